"""jax-triton: its versions, what it is asked for, and what a program then calls."""

import contextlib
import importlib.util
import inspect
import json
import logging
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxattn
from jaxattn import _device, _triton, kv_cache, qsa
from jaxattn.qsa import _run
from torch_core import dispatch
from torch_core.qsa import launch, plan

ROOT = Path(__file__).parents[3]
CLEAR = launch.Specialization(
    "metadata:clear",
    tuple((f"blank_{n}_ptr", "int32") for n in ("request_ids", "positions", "visible", "slots")),
    (),
    1,
    2,
)
COMPRESS = plan.plan_compress(
    plan.CompressProblem(
        num_rows=3, compress_ratio=4, ring_shape=(2, 4, 16), cache_shape=(5, 4, 1, 16),
        max_positions=9, rotary_dim=8, key_dtype="bfloat16", index_dtype="float8_e4m3fn",
        weight_dtype="float32", rotary_dtype="float32", eps=1e-6, ring_ids=False,
        rotary_positions=False,
    )
)[0]  # fmt: skip
FLOATS = dict(index_key="bfloat16", ring="bfloat16", compressed_cache="float8_e4m3fn")
DTYPES = dict.fromkeys(("weight", "cos", "sin"), "float32") | FLOATS
INTEGERS = dict.fromkeys(("request_ids", "positions", "slots", "seq_lens"), "int32")


class Stand:
    """A jax-triton of some version: notes what it is asked for, and lowers it as that one does."""

    def __init__(self, version: str) -> None:
        self.__version__ = version
        self.__version_info__ = tuple(map(int, version.split(".")))
        self.asked: list[dict] = []

    def old(
        self, *args, kernel, out_shape, grid, num_warps, num_stages, compute_capability, **rest
    ):
        self.asked.append(dict(kernel=kernel, grid=grid, outputs=out_shape, args=args, rest=rest))
        return jax.ffi.ffi_call(
            "triton_kernel_call", out_shape, custom_call_api_version=2,
            legacy_backend_config="payload",
        )()  # fmt: skip

    def new(self, *args, kernel, out_type, grid, num_warps, num_stages, compute_capability, **rest):
        self.asked.append(dict(kernel=kernel, grid=grid, outputs=out_type, args=args, rest=rest))
        return jax.ffi.ffi_call("triton_kernel_call_ffi", out_type)(opaque=b"payload")

    @property
    def triton_call(self):
        return self.new if self.__version_info__ >= (0, 4) else self.old


@pytest.fixture
def stand(monkeypatch):
    """Puts a stand-in where jax_triton would be imported."""

    def put(version: str = "0.3.1") -> Stand:
        module = Stand(version)
        monkeypatch.setitem(sys.modules, "jax_triton", module)
        monkeypatch.setitem(
            sys.modules, "triton", sys.modules.get("triton") or types.ModuleType("")
        )
        kernels = types.SimpleNamespace(TritonKernelCall=None)
        monkeypatch.setitem(sys.modules, "jaxlib.gpu_triton", kernels)
        monkeypatch.setattr("jaxlib.gpu_triton", kernels, raising=False)
        _triton.compiled.cache_clear()
        _triton.failure.cache_clear()
        return module

    yield put
    _triton.compiled.cache_clear()
    _triton.failure.cache_clear()


@pytest.mark.parametrize("version", ["0.3.1", "0.4.1"])
def test_what_is_asked_for(version, stand):
    """All pointers in the kernel's order as outputs, its constants, and nothing else."""
    module = stand(version)
    (wanted,) = launch.specializations((COMPRESS,), DTYPES | INTEGERS)
    assert _triton.compiled(wanted, grid=(3,), capability=90) == b"payload"
    (asked,) = module.asked
    kernel = launch.load("compress:compress")
    names = list(inspect.signature(kernel.fn).parameters)
    pointers = [name for name in names if name.endswith("_ptr")]
    assert asked["kernel"] is kernel and asked["args"] == () and asked["grid"] == (3,)
    assert [str(output.dtype) for output in asked["outputs"]] == [
        dtype for _, dtype in wanted.pointers
    ]
    assert [name for name, _ in wanted.pointers] == pointers == names[: len(pointers)]
    assert asked["rest"] == dict(COMPRESS.constants)
    assert set(asked["rest"]) == set(names) - set(pointers)
    # Kept: another call of it asks for nothing.
    assert _triton.compiled(wanted, grid=(3,), capability=90) == b"payload"
    assert len(module.asked) == 1


@contextlib.contextmanager
def gpu(capability: int = 90) -> Iterator[None]:
    """What is traced here is traced as on such a GPU."""
    environment = dispatch.environment(capability)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_device, "environment", lambda: environment)
        jax.clear_caches()
        yield
        jax.clear_caches()


@pytest.mark.parametrize("version", ["0.3.1", "0.4.1"])
def test_the_call_in_a_program(version, stand):
    """jaxlib's target that may be captured, aliases of donated arrays, under every transformation
    of the caller."""
    stand(version)
    arrays = {name: jnp.zeros((4, 4), dtype) for name, dtype in (DTYPES | INTEGERS).items()}
    arrays |= dict(ring=jnp.zeros((2, 4, 16), jnp.bfloat16))
    arrays |= dict(compressed_cache=jnp.zeros((5, 4, 1, 16), jnp.float8_e4m3fn))
    work = _run.Kernels(way="triton", chain=(COMPRESS,), wanted=("new_ring",))
    with gpu():
        traced = jax.jit(work.run).trace(arrays)
        looped = jax.jit(lambda a: jax.lax.map(lambda _: work.run(a), jnp.arange(3))).trace(arrays)
    for program in (traced, looped):
        text = program.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count('opaque = "payload"') == 1
        assert text.count("@triton_kernel_call_ffi") == 1
        for output, operand in enumerate(("ring", "compressed_cache")):
            operand = COMPRESS.inputs.index(operand)
            alias = f"output_tuple_indices = [{output}], operand_index = {operand}"
            assert alias in text


CACHE = (5, 4, 2, 8)


def append_program(dtype: str = "float32", capability: int = 90, fewer: int = 0, **scales) -> str:
    """What a donating step that appends lowers to for a GPU, of `fewer` rows than are launched."""
    rows = kv_cache.LAUNCHED_ROWS - fewer
    key = jax.ShapeDtypeStruct((rows, 2, 8), jnp.bfloat16 if dtype.startswith("float8") else dtype)
    caches = [jax.ShapeDtypeStruct(CACHE, dtype)] * 2
    slots = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def step(caches, key, slots):
        return jaxattn.append_kv(key, key, *caches, slots=slots, **scales)

    with gpu(capability):
        traced = jax.jit(step, donate_argnums=0).trace(caches, key, slots)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_append_in_a_program(dtype, stand):
    """One launch, whose results are the donated caches, and nothing else of a cache's size."""
    stand()
    text = append_program(dtype, k_scale=0.5)
    assert text.count("@triton_kernel_call_ffi") == 1 and "jaxattn" not in text
    for output, operand in enumerate((7, 8)):
        assert f"output_tuple_indices = [{output}], operand_index = {operand}" in text
        assert f"tf.aliasing_output = {output}" in text
    kind = dict(float32="f32", bfloat16="bf16", float8_e4m3fn="f8E4M3FN")[dtype]
    lines = [line for line in text.splitlines() if f"x{CACHE[-1]}x{kind}>" in line]
    used = set(re.findall(r"= stablehlo\.(\w+)", "\n".join(lines)))
    assert used == {"custom_call", "optimization_barrier"}


def test_append_without_the_kernel(stand, monkeypatch):
    """XLA's scatter: of few rows, and where no kernel can be compiled or none makes such rows."""
    stand()
    for dtype, capability, fewer in (
        ("float8_e4m3fn", 80, 0),
        ("bfloat16", 70, 0),
        ("bfloat16", 90, 1),
    ):
        text = append_program(dtype, capability, fewer)
        assert "custom_call" not in text and text.count('"stablehlo.scatter"') == 2
        assert "custom_call" in append_program(dtype, 89)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    _triton.failure.cache_clear()
    _triton.compiled.cache_clear()
    assert "custom_call" not in append_program("bfloat16")


def test_append_of_a_symbolic_number_of_rows(stand):
    """XLA's scatter, which needs no number."""
    stand()
    rows, *_ = jax.export.symbolic_shape("rows, 2, 8")
    key = jax.ShapeDtypeStruct((rows, 2, 8), jnp.bfloat16)
    caches = [jax.ShapeDtypeStruct(CACHE, jnp.bfloat16)] * 2
    slots = jax.ShapeDtypeStruct((rows,), jnp.int32)
    call = jax.jit(lambda key, slots, *caches: jaxattn.append_kv(key, key, *caches, slots=slots))
    with gpu():
        made = jax.export.export(call, platforms=["cuda"])(key, slots, *caches)
    assert made.mlir_module().count('"stablehlo.scatter"') == 2


def test_names_that_are_not_the_kernels():
    kernel = launch.load("compress:compress")
    (wanted,) = launch.specializations((COMPRESS,), DTYPES | INTEGERS)
    _triton.check_names(wanted, kernel)
    (name, value), *others = wanted.constants
    (pointer, dtype), *pointers = wanted.pointers
    for wrong in (
        wanted._replace(constants=((name.lower(), value), *others)),
        wanted._replace(constants=tuple(others)),
        wanted._replace(pointers=(*pointers, (pointer, dtype))),
        wanted._replace(pointers=tuple(pointers)),
    ):
        with pytest.raises(TypeError, match=r"^compress:compress takes \['index_key_ptr', "):
            _triton.check_names(wrong, kernel)


@pytest.mark.parametrize("version", ["0.2.0", "0.3.0", "0.5.0", "1.0.0"])
def test_r72_versions_that_are_not_known(version, stand):
    stand(version)
    with pytest.raises(ImportError) as error:
        _triton.load()
    message = str(error.value)
    assert message.startswith(f"via='triton' does not know jax-triton {version}: install a tested")
    assert message.endswith(f"Tested: {_triton.TESTED}")


def test_r72_versions_that_do_not_work_together(stand, monkeypatch):
    """What jax-triton raises inside comes with the versions in it, and "auto" goes on without."""
    module = stand()

    def old(*args, kernel, out_shape, **rest):
        raise TypeError("ast_to_ttir() got an unexpected keyword argument 'context'")

    monkeypatch.setattr(module, "old", old)
    with pytest.raises(RuntimeError) as error:
        _triton.compiled(CLEAR, grid=(1,), capability=90)
    message = str(error.value)
    start = "via='triton' could not compile metadata:clear with jax-triton 0.3.1, jax "
    assert message.startswith(start + jax.__version__)
    assert "TypeError: ast_to_ttir() got" in message and _triton.TESTED in message
    environment = dispatch.environment(90)
    monkeypatch.setattr(_device, "environment", lambda: environment)
    with pytest.raises(RuntimeError, match="could not compile metadata:clear"):
        _run.way("triton")
    assert _run.way("auto") == "dlpack"


@pytest.mark.parametrize("missing", ["triton", "jax_triton"])
def test_r72_what_is_missing(missing, stand, monkeypatch, caplog):
    stand()
    monkeypatch.setitem(sys.modules, missing, None)
    environment = dispatch.environment(90)
    monkeypatch.setattr(_device, "environment", lambda: environment)
    _run._tell.cache_clear()
    with pytest.raises(ImportError) as error:
        _run.way("triton")
    assert str(error.value).startswith("via='triton' cannot use jax-triton here (")
    assert missing in str(error.value) and "pip install 'jaxattn[cuda]'" in str(error.value)
    with caplog.at_level(logging.WARNING):
        assert _run.way("auto") == _run.way("auto") == _run.way("dlpack") == "dlpack"
    assert caplog.text.count("via='auto' is 'dlpack'") == 1


def test_a_jax_without_gpu_support(stand, monkeypatch):
    stand()
    monkeypatch.setattr("jaxlib.gpu_triton", types.ModuleType("gpu_triton"))
    with pytest.raises(ImportError, match=r"\(this jax has no GPU support\)"):
        _triton.load()


def test_ways():
    assert _run.way("auto") == _run.way("triton") == _run.way("dlpack") == "reference"
    with pytest.raises(
        ValueError, match=r"^via must be one of 'auto', 'dlpack', 'triton', got 'x'"
    ):
        _run.way("x")
    selected = jnp.zeros((2, 2), jnp.int32)
    metadata = qsa.Metadata(*[jnp.zeros(2, jnp.int32)] * 4)
    with pytest.raises(ValueError, match=r"^via must be one of"):
        qsa.expand(selected, metadata, compress_ratio=4, via="cuda")


def test_the_cache_directory_stays(stand, monkeypatch):
    """jax-triton 0.3 empties TRITON_CACHE_DIR and 0.4 removes it, when it is imported."""
    stand()
    for value in ("/somewhere", None):
        if value is None:
            monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
        else:
            monkeypatch.setenv("TRITON_CACHE_DIR", value)

        class Loader(types.ModuleType):
            def __getattr__(self, name):
                os.environ["TRITON_CACHE_DIR"] = ""
                return None

        monkeypatch.setitem(sys.modules, "triton", Loader("triton"))
        _triton.load()
        assert os.environ.get("TRITON_CACHE_DIR") == value


LOWER = """
import json, os
from jaxattn import _triton, qsa
from torch_core.qsa import launch
from torch_core.qsa.warmup import reachable
import jax, jax.numpy as jnp
S, dtype = jax.ShapeDtypeStruct, jnp.bfloat16
arrays = (S((99, 64, 2, 64), dtype), S((99, 16, 1, 32), jnp.float8_e4m3fn), S((4, 8, 32), dtype),
          S((32,), dtype), S((512, 8), jnp.float32))
wanted = reachable(*arrays, num_qo_heads=8, index_heads=2, budget=64, pages_per_seq=8,
                   max_requests=2, max_rows=4, max_draft=1, eps=1e-6, workspace_bytes=2**20)
before = os.environ.get("TRITON_CACHE_DIR")
try:
    _triton.load()
except ImportError as error:
    print(json.dumps(str(error)))
else:
    sizes = {each.kernel: len(_triton.compiled(each, grid=(1,), capability=90)) for each in wanted}
    assert os.environ.get("TRITON_CACHE_DIR") == before
    # A step with another number of rows compiles nothing.
    from triton.backends.nvidia.compiler import CUDABackend
    CUDABackend.make_ttir = None
    for each in wanted:
        assert _triton.compiled(each, grid=(7, 2), capability=90)
    print(json.dumps(sizes))
"""


@pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="needs jax-triton")
@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_compiles_every_kernel(where):
    """For a Hopper GPU, on any machine whose JAX has GPU support; once for all grids."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", LOWER], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = json.loads(done.stdout.splitlines()[-1])
    if isinstance(sizes, str):
        pytest.skip(sizes)
    kernels = {"metadata:clear", "metadata:build", "compress:compress", "expand:expand_rows"}
    assert kernels <= set(sizes) and min(sizes.values()) > 100
