"""jax.export: what one process traced, another runs, or is told why it cannot."""

import ast
import os
import pickle
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattn
from jaxattn import _device, _ffi, _triton, export, kv_cache
from tests.faults.interop import append_arguments
from tests.inputs import Case, to_jax
from tests.jaxattn.qsa.model import Model, decode_offsets
from torch_core import dispatch
from torch_core.backends import native, xqa

ROOT = Path(jaxattn.__file__).parents[1]
BASE = dict(num_qo_heads=8, num_kv_heads=1, head_dim=128, page_size=64, dtype="bfloat16")
CASES = {
    "plain": Case("plain", (9, 30)),
    "decode": Case("decode", (9, 30, 0), sinks=True, kv_layout="HND", options=dict(window_left=7)),
    "e4m3": Case("e4m3", (9, 30), dtype="bfloat16", kv_dtype="float8_e4m3fn", q_len=3,
                 draft_mask="bool", options=dict(k_scale=0.25, return_lse=True)),
    "prefill": Case("prefill", (9, 30), q_lens=(3, 5), options=dict(soft_cap=3.0)),
}  # fmt: skip
READER = """
import pickle, sys
import jax
import jaxattn

*paths, unprepared = sys.argv[1:]

def run(path, deserialize):
    with open(path, "rb") as file:
        data, arguments, expected = pickle.load(file)
    results = jax.jit(deserialize(bytearray(data)).call)(*arguments)
    for result, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert jax.numpy.asarray(result).tobytes() == wanted.tobytes(), path
    print("right", path)

if unprepared:
    try:
        run(unprepared, jax.export.deserialize)
    except jax.errors.JaxRuntimeError as error:
        print(error)
for path in paths:
    run(path, jaxattn.export.deserialize)
"""


def read(*paths: Path, unprepared: Path | str = "") -> str:
    """What a fresh process says of the programs; of `unprepared`, read by JAX alone, first."""
    done = subprocess.run(
        [sys.executable, "-c", READER, *map(str, paths), str(unprepared)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def call_of(name: str, arguments: dict):
    """A jitted function of the arrays, and the arrays."""
    arrays = {key: to_jax(v) for key, v in arguments.items() if isinstance(v, np.ndarray)}
    static = {key: v for key, v in arguments.items() if key not in arrays}
    return jax.jit(lambda arrays: getattr(jaxattn, name)(**arrays, **static)), (arrays,)


def qsa_step(model: Model):
    decodes = dict(num_decodes=3, decode_query_len=1)
    step = jax.jit(lambda *carry: model.step(*carry, decode_offsets(model), **decodes))
    return step, (model.rows(3), model.state(), jnp.array([5, 4, 16], jnp.int32))


PROGRAMS = {name: lambda case=case: call_of(case.phase, case.make()) for name, case in
            CASES.items()}  # fmt: skip
PROGRAMS["append"] = lambda: call_of("append_kv", append_arguments())
PROGRAMS["append_bf16"] = lambda: call_of(
    "append_kv",
    {name: value.astype(jnp.bfloat16) if value.dtype == np.float32 else value
     for name, value in append_arguments().items() if isinstance(value, np.ndarray)},
)  # fmt: skip
PROGRAMS["qsa"] = lambda: qsa_step(Model(layers=1))


def write(folder: Path, name: str, function, arguments) -> Path:
    """The exported program, its arguments and what it gives here."""
    data = export.export(function)(*arguments).serialize()
    given, expected = jax.tree.map(np.asarray, (arguments, function(*arguments)))
    path = folder / name
    path.write_bytes(pickle.dumps((bytes(data), given, expected)))
    return path


def test_fresh_process(tmp_path):
    """Every call's program runs there, bit-equal, after deserialize made its targets. Read by JAX
    alone it ends in an error that names the missing call, not in a crash."""
    paths = [write(tmp_path, name, *make()) for name, make in PROGRAMS.items()]
    said = read(*paths, unprepared=tmp_path / "prefill")
    assert "No FFI handler registered for jaxattn.prefill('reference'" in said.splitlines()[0]
    assert said.count("right") == len(PROGRAMS)


@pytest.mark.parametrize("name", ["plain", "decode"])
def test_symbolic_batch(name):
    """One program for every batch on a CPU."""
    (batch,) = jax.export.symbolic_shape("b")
    function, (arrays,) = PROGRAMS[name]()
    rows = ("query", "page_table", "seq_lens")
    shapes = {
        name: jax.ShapeDtypeStruct(
            (batch, *array.shape[1:]) if name in rows else array.shape, array.dtype
        )
        for name, array in arrays.items()
    }
    exported = export.export(function)(shapes)
    for count in (1, 2):
        part = {n: x[:count] if n in rows else x for n, x in arrays.items()}
        np.testing.assert_allclose(
            exported.call(part), function(arrays)[:count], rtol=1e-5, atol=1e-6
        )


def test_jax_export_alone_is_refused():
    """Before anything is written, by the name of the call."""
    function, arguments = PROGRAMS["prefill"]()
    with pytest.raises(ValueError, match=r"custom_call @.?jaxattn\.prefill"):
        jax.export.export(function)(*arguments)


def test_a_mesh_of_auto_axes_is_refused():
    """JAX splits its programs by a callback, and says so only where it writes them."""
    kind = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    function, arguments = PROGRAMS["decode"]()
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with pytest.raises(NotImplementedError, match="a mesh of Auto axes cannot be exported"):
        export.export(function)(*jax.device_put(arguments, spread))


@pytest.mark.parametrize("data", [b"", b"no program" * 9, bytes(100)])
def test_other_bytes(data):
    with pytest.raises(ValueError, match="data must be the bytes of a serialized program"):
        export.deserialize(data)


def test_a_function_that_is_not_jitted():
    with pytest.raises(TypeError, match=r"function must be one of jax\.jit, got function"):
        export.export(lambda x: x)


@pytest.mark.parametrize("name", ["jaxattn.attend(1, 2)", "jaxattn.decode(open('x'))",
                                  "jaxattn.decode('reference')", "jaxattn.decode"])  # fmt: skip
def test_names_of_other_versions(name):
    """A name that this version does not make is refused by that name; nothing in it is run."""
    with pytest.raises(ValueError, match=re.escape(f"the program calls {name!r}, which this ver")):
        _ffi.restore(name, "cpu")


KERNELS = [
    ("xqa", xqa, replace(Case("", (9, 30)), **BASE), {}),
    ("xqa", xqa, replace(Case("", (9, 30), q_len=3, kv_layout="HND"), **BASE), {}),
    ("native_decode", native, replace(Case("", (9, 30)), **BASE), dict(soft_cap=2.0)),
    ("native_prefill_fa2", native, replace(Case("", (9, 30), (3, 5)), **BASE), {}),
    ("native_prefill_fa3", native, replace(Case("", (9, 30), (3, 5)), **BASE), {}),
]  # fmt: skip


@pytest.fixture
def hopper(monkeypatch):
    """What the names of kernels hold of a GPU."""
    monkeypatch.setattr(_device, "environment", lambda: dispatch.Environment(90))
    monkeypatch.setattr(_device, "multiprocessors", lambda: 132)


@pytest.mark.parametrize("name, module, case, options", KERNELS, ids=range(len(KERNELS)))
def test_kernels_by_their_names(name, module, case, options, hopper, monkeypatch):
    """The name holds a kernel's build and arguments: what comes back launches the same way."""
    built = []
    monkeypatch.setattr(module, "function", lambda *key: built.append(key) or "kernel")
    module.bind.cache_clear()
    arguments = case.make() | options
    arrays = {key: v for key, v in arguments.items() if isinstance(v, np.ndarray)}
    static = {key: v for key, v in arguments.items() if key not in arrays}
    inputs = dispatch.AttentionInputs(**arrays)
    describe = dispatch.describe_decode if case.phase == "decode" else dispatch.describe_prefill
    problem, _ = describe(inputs, **static)
    kernel = _ffi._Kernel(module.bind(problem, 132, name, False), ("query", "out"))
    module.bind.cache_clear()
    recipe = ast.literal_eval(repr(kernel.recipe()))
    other = _ffi._rebuilt(*recipe)
    assert other.order == kernel.order and len(built) == 2 and built[0] == built[1]
    for field in ("name", "function", "arguments", "owned", "build"):
        assert getattr(other.binding, field) == getattr(kernel.binding, field)


def test_triton_programs_load_jax_triton(monkeypatch):
    """It registers the target that they call; an ImportError says what is missing."""
    text = 'stablehlo.custom_call @triton_kernel_call_ffi(%arg0) {backend_config = "x"}'
    program = types.SimpleNamespace(mlir_module=lambda: text, platforms=("cuda",))
    loaded = []
    monkeypatch.setattr(_triton, "load", lambda: loaded.append(1))
    export._prepare(program)
    assert loaded


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["decode", "prefill", "append", "qsa"])
def test_fresh_process_on_a_gpu(name, tmp_path, monkeypatch):
    """The same with kernels: found built there, bit-equal."""
    monkeypatch.setattr(kv_cache, "LAUNCHED_ROWS", 0)
    if name == "qsa":
        model = Model(layers=1, dtype="bfloat16", head_dim=64, index_dim=32, via="triton")
        program = qsa_step(model)
    elif name == "append":
        program = PROGRAMS["append_bf16"]()
        assert _triton.TARGET in program[0].lower(*program[1]).as_text()
    else:
        case = replace(Case(name, (90, 300), (3, 5) if name == "prefill" else None), **BASE)
        program = call_of(name, case.make())
    assert "right" in read(write(tmp_path, name, *program))
