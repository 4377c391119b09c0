"""Which kernel a call gets: the rules of the kernel table, phase by phase, without launching."""

import dataclasses
import functools
import importlib.util
import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import jaxattn
import torch_core
from tests import inputs
from torch_core import dispatch
from torch_core.dispatch import Environment
from torch_core.problem import DecodeProblem, PrefillProblem

E4M3 = "float8_e4m3fn"
E5M2 = "float8_e5m2"
GPUS = (80, 86, 89, 90, 100, 103, 110, 120, 121)  # the specification lets FA2 begin at 75, where
# its bfloat16 asserts and tiles of 16 rows do not fit


def problem(phase: str, **changes):
    fields = dict(query_dtype="bfloat16", kv_dtype="bfloat16", batch=4, num_rows=4, num_qo_heads=32,
                  num_kv_heads=4, head_dim=128, num_pages=64, page_size=16,
                  pages_per_seq=16)  # fmt: skip
    if phase == "decode":
        return DecodeProblem(**fields | changes)
    return PrefillProblem(**fields | dict(max_seqlen_q=4) | changes)


def machine(capability: int) -> Environment:
    return Environment(capability, flashinfer=True, cubins=True)


def explanation(phase: str, capability: int, backend: str = "auto", **changes):
    return dispatch.explain_problem(problem(phase, **changes), machine(capability), backend)


def chosen(phase: str, capability: int, **changes) -> str | None:
    kernel = explanation(phase, capability, **changes).kernel
    return kernel and kernel.name


def reasons(phase: str, capability: int, **changes) -> dict[str, str]:
    return explanation(phase, capability, **changes).reasons


# The kernel table of the specification, transcribed: capability, head_dim, page_size,
# (query, cache) dtypes, lse, soft cap, window, sinks, q_len > 1 (None: prefill); and whether
# a call takes a plan.
HALF = ("bfloat16", "float16")
SAME = {(d, d) for d in HALF}
E4M3_KV = {(d, E4M3) for d in HALF}
E5M2_KV = {(d, E5M2) for d in HALF}
NVFP4_KV = {(d, "nvfp4") for d in HALF}
ANY_E4M3 = {(E4M3, E4M3), (E4M3, "nvfp4")}
NATIVE_DIMS = {64, 128, 256}
SPECIFIED = {
    ("decode", "xqa"): ({90, 100, 120, 121}, set(range(16, 513, 16)), {16, 32, 64, 128},
                        SAME | E4M3_KV | NVFP4_KV, False, False, True, True, True, False),
    ("decode", "trtllm_gen"): ({100, 103}, NATIVE_DIMS, {16, 32, 64},
                               SAME | E4M3_KV | NVFP4_KV | ANY_E4M3,
                               True, False, True, True, True, False),
    ("prefill", "trtllm_gen"): ({100, 103}, NATIVE_DIMS, {16, 32, 64},
                                SAME | E4M3_KV | NVFP4_KV | ANY_E4M3,
                                True, False, True, True, None, False),
    ("decode", "native_decode"): (set(GPUS), NATIVE_DIMS, None, SAME | E4M3_KV | E5M2_KV,
                                  True, True, True, True, False, False),
    ("prefill", "native_prefill_fa2"): (set(GPUS), NATIVE_DIMS, None, SAME | E4M3_KV,
                                        True, True, True, True, None, True),
    ("prefill", "native_prefill_fa3"): ({90}, NATIVE_DIMS, None, SAME | {(E4M3, E4M3)},
                                        True, True, True, True, None, True),
}  # fmt: skip


def row(phase: str, name: str) -> dispatch.Kernel:
    (kernel,) = (k for k in dispatch.TABLE if (k.phase, k.name) == (phase, name))
    return kernel


def test_table_has_the_specified_rows():
    """No row is missing; extra is the reference of each phase."""
    rows = [(kernel.phase, kernel.name) for kernel in dispatch.TABLE]
    assert len(rows) == len(set(rows))
    assert set(rows) == set(SPECIFIED) | {("decode", "reference"), ("prefill", "reference")}


@pytest.mark.parametrize("phase, name", SPECIFIED)
def test_columns_are_the_specified_ones(phase, name):
    """Each column of a row, as transcribed."""
    kernel = row(phase, name)
    capabilities, dims, pages, dtypes, lse, soft_cap, window, sinks, drafts, plan = SPECIFIED[
        phase, name
    ]
    for capability in (*GPUS, 0, 70):
        assert dispatch._within(capability, kernel.capabilities) == (capability in capabilities)
    assert set(kernel.head_dims) == dims
    assert kernel.page_sizes is None if pages is None else set(kernel.page_sizes) == pages
    assert set(kernel.dtypes) == dtypes
    assert (kernel.lse, kernel.soft_cap, kernel.window, kernel.sinks) == (
        lse, soft_cap, window, sinks)  # fmt: skip
    assert drafts is None or kernel.drafts == drafts
    assert kernel.plans == plan
    assert kernel.cubins == (name == "trtllm_gen")


BROKEN = {
    "head_dim": (dict(head_dim=72), "takes head_dim "),
    "page_size": (dict(page_size=24), "takes page_size "),
    "dtypes": (dict(query_dtype="float32", kv_dtype="float32"),
               "takes no float32 query with a float32 cache"),
    "lse": (dict(return_lse=True), "cannot return lse"),
    "soft_cap": (dict(soft_cap=30.0), "has no soft cap"),
    "sinks": (dict(sinks=True), "has no sinks"),
    "drafts": (dict(q_len=2, num_rows=8), "takes q_len 1 only"),
    "batch_invariant": (dict(batch_invariant=True), "its result depends on the rest of the batch"),
}  # fmt: skip


@pytest.mark.parametrize("phase, name, limit", [
    (*of, limit) for of in SPECIFIED for limit in BROKEN if (of[0], limit) != ("prefill", "drafts")
])  # fmt: skip
def test_each_limit_is_refused_with_its_reason(phase, name, limit):
    """A request past a column is refused for that column, any other one is not."""
    changes, reason = BROKEN[limit]
    kernel = row(phase, name)
    refused = dict(
        head_dim=kernel.head_dims is not None,
        page_size=kernel.page_sizes is not None,
        dtypes=True,
        lse=not kernel.lse,
        soft_cap=not kernel.soft_cap,
        sinks=not kernel.sinks,
        drafts=not kernel.drafts,
        batch_invariant=not kernel.batch_invariant,
    )[limit]
    capability = min(SPECIFIED[phase, name][0])
    answer = dispatch.refusal(kernel, problem(phase, **changes), machine(capability))
    assert (answer or "").startswith(reason) if refused else answer is None


@pytest.mark.parametrize("phase, name", SPECIFIED)
def test_other_capability_is_refused(phase, name):
    """The reason names the capabilities that would do, and the device's."""
    kernel = row(phase, name)
    for capability in {*GPUS, 70} - SPECIFIED[phase, name][0]:
        reason = dispatch.refusal(kernel, problem(phase), machine(capability))
        assert reason.startswith("needs capability ")
        assert reason.endswith(f", this device has {capability}")


def test_capability_90_decodes_with_xqa():
    """XQA for bf16, fp16 and e4m3 caches."""
    for query, cache in SAME | E4M3_KV:
        assert chosen("decode", 90, query_dtype=query, kv_dtype=cache) == "xqa"


def test_capability_90_prefills_without_xqa():
    """XQA exists for decode only; prefill is FlashInfer's own."""
    assert chosen("prefill", 90) == "native_prefill_fa3"
    assert "xqa" not in reasons("prefill", 90)
    assert chosen("prefill", 90, kv_dtype=E4M3) == "native_prefill_fa2"


@pytest.mark.parametrize("capability", [100, 103])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_capability_100_and_103_use_trtllm_gen(phase, capability):
    """Both phases."""
    assert chosen(phase, capability) == "trtllm_gen"


@pytest.mark.parametrize("capability", sorted(set(GPUS) - {90, 100, 103}))
def test_other_capabilities_are_native(capability):
    """Native decode and FA2 prefill."""
    assert chosen("decode", capability) == "native_decode"
    assert chosen("prefill", capability) == "native_prefill_fa2"


@pytest.mark.parametrize("capability", [0, 75, 90, 100, 120])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_heads_must_divide(phase, capability):
    """num_qo_heads % num_kv_heads == 0 everywhere."""
    arguments = dict(num_qo_heads=7, num_kv_heads=2, head_dim=128, page_size=16)
    with pytest.raises(ValueError, match="positive multiple of num_kv_heads = 2 heads, got 7"):
        torch_core.explain(phase, **arguments, capability=capability)
    assert torch_core.supported(phase, **arguments, capability=capability) is False


@pytest.mark.parametrize("changes", [
    dict(return_lse=True), dict(soft_cap=20.0), dict(batch_invariant=True),
], ids=lambda changes: next(iter(changes)))  # fmt: skip
@pytest.mark.parametrize("kv_dtype", ["bfloat16", E4M3])
def test_what_xqa_lacks_goes_to_native_decode(changes, kv_dtype):
    """lse, soft cap and batch invariance leave XQA."""
    assert chosen("decode", 90, kv_dtype=kv_dtype, **changes) == "native_decode"


@pytest.mark.parametrize("capability", [100, 103])
def test_batch_invariance_leaves_trtllm_gen(capability):
    """For the native kernels, in both phases."""
    assert chosen("decode", capability, batch_invariant=True) == "native_decode"
    assert chosen("prefill", capability, batch_invariant=True) == "native_prefill_fa2"
    assert chosen("decode", capability, return_lse=True) == "trtllm_gen"


def test_query_dtype_differs_by_phase_on_90():
    """XQA takes no e4m3 query, even with an e4m3 cache; SM90 prefill does."""
    e4m3 = dict(query_dtype=E4M3, kv_dtype=E4M3)
    assert chosen("decode", 90, **e4m3) is None
    assert reasons("decode", 90, **e4m3)["xqa"] == f"takes no {E4M3} query with a {E4M3} cache"
    assert chosen("decode", 90, kv_dtype=E4M3) == "xqa"
    assert chosen("prefill", 90, **e4m3) == "native_prefill_fa3"


def test_window_with_e4m3_query_is_refused_on_90():
    """It can hang there, and only there; a bf16 query is the way out."""
    e4m3 = dict(query_dtype=E4M3, kv_dtype=E4M3, window_left=511)
    why = reasons("prefill", 90, **e4m3)
    reason = "a window with an e4m3 query can hang on SM90; use a bfloat16 query"
    assert why["native_prefill_fa3"] == reason
    assert chosen("prefill", 90, **e4m3) is None
    assert chosen("prefill", 90, window_left=511) == "native_prefill_fa3"
    assert chosen("prefill", 100, **e4m3) == "trtllm_gen"


@pytest.mark.parametrize("capability", GPUS)
def test_nvfp4_by_capability(capability):
    """trtllm-gen on 100 and 103, XQA on 12x decode, nowhere else."""
    on_100 = "trtllm_gen" if capability in (100, 103) else None
    on_12x = "xqa" if capability in (120, 121) else on_100
    assert chosen("prefill", capability, kv_dtype="nvfp4") == on_100
    assert chosen("decode", capability, kv_dtype="nvfp4") == on_12x


def test_nvfp4_reason():
    """XQA runs on 90 and 100, but reads nvfp4 on 12x only."""
    for capability in (90, 100):
        why = reasons("decode", capability, kv_dtype="nvfp4")
        assert why["xqa"] == "reads an nvfp4 cache on capability 120 to 129 only"


@pytest.mark.parametrize("phase, name", SPECIFIED)
def test_missing_flashinfer(phase, name):
    """The reason names what to install."""
    capability = min(SPECIFIED[phase, name][0])
    environment = Environment(capability, flashinfer=False, cubins=True)
    reason = dispatch.refusal(row(phase, name), problem(phase), environment)
    assert reason == "needs FlashInfer: pip install 'jaxattn[cuda]'"


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_missing_cubins(phase):
    """trtllm-gen is refused with what to install, and the next kernel chosen."""
    environment = Environment(100, flashinfer=True, cubins=False)
    answer = dispatch.explain_problem(problem(phase), environment)
    assert answer.reasons["trtllm_gen"] == "needs prebuilt kernels: pip install flashinfer-cubin"
    assert answer.kernel.name == {"decode": "xqa", "prefill": "native_prefill_fa2"}[phase]


def test_every_row_has_its_file():
    """`load` finds a module for each."""
    for kernel in dispatch.TABLE:
        assert dispatch.load(kernel).__name__ == f"torch_core.{kernel.module}"


def test_fa2_counts_in_32_bits():
    """The tokens of a page table, and the elements of a query."""
    reason = "counts the tokens of a page table and the elements of a query in 32 bits"
    wide = dict(batch=4096, num_rows=4096, page_size=64, pages_per_seq=2**14)
    assert reasons("decode", 90, **wide, return_lse=True)["native_decode"] == reason
    assert reasons("prefill", 80, **wide)["native_prefill_fa2"] == reason
    long = dict(num_rows=2**19, num_qo_heads=64, head_dim=128)
    assert reasons("prefill", 80, **long)["native_prefill_fa2"] == reason
    assert chosen("prefill", 90, **long) == "native_prefill_fa3"


def test_wide_heads_of_xqa():
    """head_dim above 256 takes no drafts; without drafts a KV head's query rows have 16 KiB."""
    wide = dict(head_dim=512)
    assert chosen("decode", 90, **wide) == "xqa"
    drafts = dict(q_len=2, num_rows=8)
    reason = "head_dim above 256 takes q_len 1 only"
    assert reasons("decode", 90, **wide, **drafts)["xqa"] == reason
    for head_dim, most in ((16, 128), (64, 128), (80, 64), (128, 64), (144, 32), (256, 32),
                           (272, 16), (512, 16)):  # fmt: skip
        sizes = dict(num_kv_heads=1, head_dim=head_dim)
        assert chosen("decode", 90, **sizes, num_qo_heads=most) == "xqa"
        many = sizes | dict(num_qo_heads=most + 1)
        reason = f"takes at most {most} query heads a KV head with head_dim {head_dim}, got "
        assert reasons("decode", 90, **many)["xqa"] == f"{reason}{most + 1}"
    assert chosen("decode", 90, head_dim=256, num_qo_heads=136, **drafts) == "xqa"


def test_window_with_a_draft_mask_leaves_xqa():
    """Linear drafts may have a window, a mask may not."""
    drafts = dict(q_len=4, num_rows=16, window_left=64)
    assert chosen("decode", 90, **drafts) == "xqa"
    why = reasons("decode", 90, **drafts, draft_mask="packed")
    assert why["xqa"] == "a window with a draft mask takes linear drafts only"
    assert chosen("decode", 90, q_len=4, num_rows=16, draft_mask="packed") == "xqa"


def test_small_window_over_drafts_leaves_xqa():
    """A request shorter than its draft block is moved, and its window would not be."""
    drafts = dict(q_len=4, num_rows=16)
    reason = "a window takes window_left of at least q_len - 1"
    assert reasons("decode", 90, **drafts, window_left=2)["xqa"] == reason
    assert chosen("decode", 90, **drafts, window_left=3) == "xqa"
    assert chosen("decode", 90, window_left=0) == "xqa"


def test_xqa_counts_requests_in_16_bits():
    """Its grid has them on an axis of that size."""
    many = dict(batch=2**16, num_rows=2**16)
    assert reasons("decode", 90, **many)["xqa"] == "takes a batch of at most 65535, got 65536"
    assert chosen("decode", 90, **many) == "native_decode"


def test_no_soft_cap_with_an_e4m3_query():
    """FA3 would ignore it without a word."""
    why = reasons("prefill", 90, query_dtype=E4M3, kv_dtype=E4M3, soft_cap=20.0)
    reason = "ignores a soft cap with an e4m3 query; use a bfloat16 query"
    assert why["native_prefill_fa3"] == reason


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_reference_on_a_cpu(phase):
    """On capability 0 it is the choice, and every GPU kernel says why it is not."""
    answer = explanation(phase, 0)
    assert answer.kernel.name == "reference"
    rest = {name for of, name in SPECIFIED if of == phase}
    assert set(answer.reasons) == rest
    assert all(r.endswith("this device has none (CPU)") for r in answer.reasons.values())


@pytest.mark.parametrize("capability", (*GPUS, 70))
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_reference_on_a_gpu_only_by_name(phase, capability):
    """Never by "auto", even where nothing else runs."""
    anything = dict(query_dtype="float32", kv_dtype="float32", head_dim=72)
    answer = explanation(phase, capability, **anything)
    assert answer.kernel is None
    assert answer.reasons["reference"] == "used on a GPU only when asked for by name"
    assert explanation(phase, capability, "reference", **anything).kernel.name == "reference"


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("capability", (0, *GPUS))
def test_explanation_is_complete(phase, capability):
    """Every row of the phase is either chosen or has a reason, and the text holds them all."""
    for backend in dispatch.BACKENDS:
        answer = explanation(phase, capability, backend)
        names = {k.name for k in dispatch.TABLE if k.phase == phase}
        got = {answer.kernel.name} if answer.kernel else set()
        assert not got & set(answer.reasons)
        assert got | set(answer.reasons) == names
        assert backend == "auto" or got <= {backend}
        lines = str(answer).splitlines()
        chosen = f"{answer.kernel.name}: chosen" if answer.kernel else "no kernel"
        assert lines[0] == chosen
        assert lines[1:] == [f"{name}: {reason}" for name, reason in answer.reasons.items()]


def test_named_backend_beats_preference():
    """A backend that could run is used when named, and the others say who was asked for."""
    answer = explanation("decode", 90, "native_decode")
    assert answer.kernel.name == "native_decode"
    assert answer.reasons["xqa"] == "backend='native_decode' was asked for"


def test_choice_is_fixed(monkeypatch):
    """A second, equal call gets the same row without looking again."""
    first = dispatch.choose(problem("decode"), machine(90))
    monkeypatch.setattr(dispatch, "explain_problem", lambda *_: pytest.fail("looked again"))
    assert dispatch.choose(problem("decode"), machine(90)) is first


def test_choice_without_a_kernel_raises_every_reason():
    """NotImplementedError lists each row of the phase."""
    call = problem("decode", query_dtype=E4M3, kv_dtype=E4M3, soft_cap=2.0)
    with pytest.raises(NotImplementedError, match="no kernel runs this decode") as error:
        dispatch.choose(call, machine(90))
    for name, reason in dispatch.explain_problem(call, machine(90)).reasons.items():
        assert f"{name}: {reason}" in str(error.value)
    with pytest.raises(NotImplementedError, match="'xqa' cannot run this decode: takes no float8"):
        dispatch.choose(call, machine(90), "xqa")


def test_environment_is_of_the_given_capability():
    """`environment` says what is installed here."""
    for capability in (0, 90):
        assert dispatch.environment(capability) == Environment(
            capability,
            flashinfer=importlib.util.find_spec("flashinfer") is not None,
            cubins=importlib.util.find_spec("flashinfer_cubin") is not None,
        )


HEAD_DIMS = (64, 80, 128, 192, 256, 512)
GROUPS = (1, 2, 3, 5, 6, 7, 8, 12, 16, 32)
PAGES = (1, 8, 16, 32, 64, 128, 256)
Q_LENS = (1, 2, 5, 8)


def cell(head_dim, group, page, q_len):
    return dict(
        num_qo_heads=2 * group, num_kv_heads=2, head_dim=head_dim, page_size=page, q_len=q_len
    )


def xqa_runs(head_dim, group, page, q_len) -> bool:
    """XQA's limits, written apart from the table."""
    wide = head_dim > 256 and (q_len > 1 or group > 16)
    return head_dim % 16 == 0 and head_dim <= 512 and page in (16, 32, 64, 128) and not wide


def native_runs(head_dim, group, page, q_len) -> bool:
    return head_dim in (64, 128, 256) and q_len == 1


@pytest.mark.parametrize("q_len", Q_LENS)
@pytest.mark.parametrize("capability", [0, 90])
def test_grid(capability, q_len):
    """Each cell has the kernel that the limits say, and `supported` agrees with `explain`."""
    for head_dim, group, page in itertools.product(HEAD_DIMS, GROUPS, PAGES):
        arguments = cell(head_dim, group, page, q_len)
        with_flashinfer = functools.partial(dispatch.Environment, flashinfer=True, cubins=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "environment", with_flashinfer)
            answer = torch_core.explain("decode", **arguments, capability=capability)
            agreed = torch_core.supported("decode", **arguments, capability=capability)
        place = (head_dim, group, page, q_len)
        expected = "native_decode" if native_runs(*place) else None
        expected = "xqa" if xqa_runs(*place) else expected
        expected = expected if capability else "reference"
        assert (answer.kernel and answer.kernel.name) == expected, place
        assert agreed == (expected is not None)


SAMPLE = list(itertools.product(HEAD_DIMS, GROUPS, PAGES, Q_LENS))[:: 1680 // 40]


@pytest.mark.parametrize("place", SAMPLE, ids=lambda place: "-".join(map(str, place)))
def test_grid_on_the_cpu_is_what_decode_does(place):
    """The cells that `explain` gives to the reference run, and no named GPU kernel does."""
    arguments = cell(*place)
    head_dim, group, page, q_len = place
    made = inputs.Case("cell", (9,), q_len=q_len, num_qo_heads=2 * group, num_kv_heads=2,
                       head_dim=head_dim, page_size=page, dtype="bfloat16",
                       extra_pages=0).make()  # fmt: skip
    answer = torch_core.explain("decode", **arguments, capability=0)
    assert answer.kernel.name == "reference"
    assert np.isfinite(inputs.run_torch(torch_core.decode, made).astype(np.float32)).all()
    for name, reason in answer.reasons.items():
        with pytest.raises(NotImplementedError) as error:
            inputs.run_torch(torch_core.decode, made, backend=name)
        assert str(error.value) == f"backend {name!r} cannot run this decode: {reason}"


@pytest.mark.parametrize("changes", [
    dict(window_left=-2), dict(soft_cap=0.0), dict(q_len=0), dict(kv_layout="NDH"),
    dict(num_kv_heads=3), dict(backend="xla"), dict(query_dtype="float64"), dict(query_dtype=E5M2),
    dict(query_dtype=E4M3, kv_dtype="bfloat16"),
], ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()))  # fmt: skip
def test_supported_is_false_on_values_that_no_call_accepts(changes):
    """`supported` never raises on values; a dtype is one, as it is spelled in text."""
    arguments = dict(num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=16) | changes
    with pytest.raises((ValueError, TypeError)):
        torch_core.explain("decode", **arguments)
    assert torch_core.supported("decode", **arguments) is False


DTYPES = [
    ("bfloat16", "float8_e4m3fn"),
    ("torch.bfloat16", "torch.float8_e4m3fn"),
    (torch.bfloat16, torch.float8_e4m3fn),
    (jnp.bfloat16, jnp.float8_e4m3fn),
    (jnp.dtype("bfloat16"), jnp.dtype("float8_e4m3fn")),
    (ml_dtypes.bfloat16, torch.float8_e4m3fn),
]


@pytest.mark.parametrize("package", [torch_core, jaxattn])
@pytest.mark.parametrize("pair", DTYPES, ids=str)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_dtypes_of_every_kind(phase, pair, package):
    """A name and the dtypes of torch, NumPy and JAX say the same."""
    arguments = dict(num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=16, capability=90)
    names = ("query_dtype", "kv_dtype")
    for count in (1, 2):
        asked, named = (dict(zip(names[:count], each, strict=False)) for each in (pair, DTYPES[0]))
        expected = package.explain(phase, **arguments, **named)
        assert package.explain(phase, **arguments, **asked) == expected
        assert package.supported(phase, **arguments, **asked) == (expected.kernel is not None)


@pytest.mark.parametrize("dtypes, error, message", [
    (dict(query_dtype="bf16"), ValueError,
     "query_dtype must be one of 'bfloat16', 'float16', 'float32', 'float8_e4m3fn', got 'bf16'"),
    (dict(query_dtype=np.float64), ValueError, "query_dtype must be one of .*, got 'float64'"),
    (dict(kv_dtype=torch.int8), ValueError, "kv_dtype must be one of .*'nvfp4', got 'int8'"),
    (dict(kv_dtype=8), TypeError, "kv_dtype must be a dtype or its name, got 8"),
    (dict(query_dtype=None), TypeError, "query_dtype must be a dtype or its name, got None"),
    (dict(kv_dtype=np.float16), TypeError,
     "kv_dtype must have the query's dtype bfloat16 or be float8_e4m3fn or .*, got float16"),
])  # fmt: skip
def test_wrong_dtypes_are_refused_by_name(dtypes, error, message):
    """Not by the name of an array that nobody passed."""
    with pytest.raises(error, match=f"^{message}$"):
        torch_core.explain("decode", num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=16,
                           **dtypes)  # fmt: skip


@pytest.mark.parametrize("capability", [0, 90, 100, 120])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_explain_describes_the_call_it_is_given(monkeypatch, phase, capability):
    """`explain` on plain arguments equals `explain_problem` on the same problem."""
    monkeypatch.setattr(
        dispatch, "environment", functools.partial(Environment, flashinfer=True, cubins=True)
    )
    options = (dict(), dict(return_lse=True), dict(sinks=True), dict(soft_cap=3.0),
               dict(window_left=7), dict(batch_invariant=True), dict(kv_layout="HND"),
               dict(kv_dtype=E4M3), dict(kv_dtype="nvfp4"),
               dict(query_dtype="float16"))  # fmt: skip
    for changes in options:
        answer = torch_core.explain(phase, num_qo_heads=32, num_kv_heads=4, head_dim=128,
                                    page_size=16, capability=capability, **changes)  # fmt: skip
        dtype = changes.get("query_dtype", "bfloat16")
        call = problem(phase, **dict(query_dtype=dtype, kv_dtype=dtype) | changes)
        assert answer == dispatch.explain_problem(call, machine(capability))
    if phase == "decode":
        masked = torch_core.explain(phase, num_qo_heads=32, num_kv_heads=4, head_dim=128,
                                    page_size=16, capability=90, q_len=4, draft_mask=True,
                                    window_left=9)  # fmt: skip
        assert "draft mask" in masked.reasons["xqa"]


def test_capability_of_this_machine():
    """A CPU has none; a device that is asked about decides."""
    assert dispatch.device_capability(torch.device("cpu")) == 0
    if not torch.cuda.is_available():
        assert dispatch.device_capability() == 0


def test_problems_are_hashable_and_distinct():
    """Equal calls share a choice, different ones do not."""
    call = problem("decode")
    assert hash(call) == hash(problem("decode")) and call == problem("decode")
    for field, value in (("q_len", 2), ("window_left", 3), ("return_lse", True), ("batch", 5)):
        assert dataclasses.replace(call, **{field: value}) != call
