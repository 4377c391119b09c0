"""Both packages expose the same calls, document them, and import only what they may."""

import ast
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import jaxattn
import torch_core
from jaxattn import compat, export, paging, rpa, speculative

ROOT = Path(torch_core.__file__).parents[1]
PACKAGES = (torch_core, jaxattn)
ONLY_JAX = {"to_jax", "to_torch"}


def public(package) -> dict[str, types.FunctionType]:
    functions = {
        name: value
        for name, value in vars(package).items()
        if not name.startswith("_") and inspect.isfunction(value)
    }
    assert {"decode", "prefill", "append_kv", "merge_states", "explain", "supported"} <= set(
        functions
    )
    return functions


SERVING = {
    paging: ("alloc", "append", "fork", "free", "copy_pages"),
    speculative: (
        "chain_mask",
        "tree_mask",
        "accept",
        "accept_sampled",
        "compact",
        "reuse_selection",
    ),
    rpa: ("ragged_paged_attention",),
    compat: ("paged_attention",),
    export: ("export", "deserialize"),
    jaxattn.PagedKVCache: ("zeros",),
}


def all_functions():
    named = {package: sorted(public(package)) for package in PACKAGES} | SERVING
    return [
        pytest.param(owner, name, id=f"{owner.__name__}.{name}")
        for owner, names in named.items()
        for name in names
    ]


def documented(function) -> str:
    return inspect.getdoc(function) or ""


def section(text: str, title: str) -> str | None:
    """The lines of one section of a docstring."""
    match = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", text + "\n", re.MULTILINE)
    return match and match[1]


def test_same_names():
    """jaxattn has the conversions in addition."""
    assert set(public(jaxattn)) - ONLY_JAX == set(public(torch_core))
    assert ONLY_JAX <= set(public(jaxattn))


@pytest.mark.parametrize("name", sorted(public(torch_core)))
def test_same_arguments(name):
    """Names, order, kinds and defaults; torch takes `out` in addition, by keyword."""
    of_torch, of_jax = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (getattr(torch_core, name), getattr(jaxattn, name))
    )
    out = ("out", inspect.Parameter.KEYWORD_ONLY, None)
    assert [p for p in of_torch if p != out] == of_jax
    assert (out in of_torch) == (name in ("decode", "prefill", "merge_states"))


QSA = sorted(name for name, value in vars(torch_core.qsa).items() if inspect.isfunction(value))


def test_qsa_has_the_same_names():
    """Classes too."""
    names = [
        {n for n, v in vars(package.qsa).items()
         if inspect.isfunction(v) or (inspect.isclass(v) and not n.startswith("_"))}
        for package in PACKAGES
    ]  # fmt: skip
    assert names[0] == names[1] and {"build_metadata", "attention", "warmup"} < names[0]


@pytest.mark.parametrize("name", QSA)
def test_qsa_has_the_same_arguments(name):
    """Names, order, kinds and defaults; torch takes `out`, JAX `via`, and a device is its own."""
    of_torch, of_jax = (
        {p.name: (p.kind, "" if p.name == "device" else p.default)
         for p in inspect.signature(getattr(package.qsa, name)).parameters.values()}
        for package in PACKAGES
    )  # fmt: skip
    own = [of_torch.pop("out", None), of_jax.pop("via", None)]
    assert list(of_torch.items()) == list(of_jax.items())
    assert bool(own[0]) == (name in ("attend", "attention"))
    helpers = ("prepare_query", "ring_rows", "rotary_tables", "split_batch")
    assert bool(own[1]) == (name not in helpers)
    assert own[1] in (None, (inspect.Parameter.KEYWORD_ONLY, "auto"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
@pytest.mark.parametrize("name", QSA)
def test_qsa_docstrings_name_every_parameter(name, package):
    """Results and errors too."""
    function = getattr(package.qsa, name)
    entries = re.findall(r"^    (\w[\w, \n]*?):", section(documented(function), "Args") or "", re.M)
    named = {word for entry in entries for word in re.split(r"[,\s]+", entry)}
    assert named == set(inspect.signature(function).parameters)
    assert section(documented(function), "Returns")
    assert re.search(r"^Raises(:|, and)", documented(function), re.M)


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_phases_share_their_options(name):
    """What both phases take has one default."""
    other = {"decode": "prefill", "prefill": "decode"}[name]
    mine, others = (inspect.signature(getattr(torch_core, n)).parameters for n in (name, other))
    shared = mine.keys() & others.keys()
    assert len(shared) == 17
    assert all(mine[p].default == others[p].default for p in shared)


@pytest.mark.parametrize("package, name", all_functions())
def test_docstring_sections(package, name):
    """A summary, Args, Returns where something comes back, Raises."""
    function = getattr(package, name)
    text = documented(function)
    assert re.match(r"[A-Z].*\.", text)
    assert section(text, "Args")
    assert section(text, "Raises")
    if inspect.signature(function).return_annotation is not None:
        assert section(text, "Returns")


@pytest.mark.parametrize("package, name", all_functions())
def test_docstring_names_every_parameter(package, name):
    """Each one heads an entry of Args, alone or in a list."""
    function = getattr(package, name)
    entries = re.findall(r"^    (\w[\w, \n]*?):", section(documented(function), "Args") or "", re.M)
    named = {word for entry in entries for word in re.split(r"[,\s]+", entry)}
    parameters = inspect.signature(function).parameters.values()
    rest = {p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD}
    assert named - rest == {p.name for p in parameters} - rest


@pytest.mark.parametrize("name", ["decode", "prefill", "append_kv", "merge_states"])
def test_docstrings_agree(name):
    """Both packages begin each argument's description alike."""
    entries = []
    for package in PACKAGES:
        text = section(documented(getattr(package, name)), "Args")
        found = re.findall(r"^    (\w[\w, \n]*?): (.{0,14})", text, re.M)
        entries.append({key: value for key, value in found if key != "out"})
    assert {re.sub(r", out$", "", key) for key in entries[0]} == set(entries[1])
    assert [v for k, v in entries[0].items()] == list(entries[1].values())


def test_decode_has_one_contract():
    """What a caller owes is the same; only torch says who checks."""
    contracts = [documented(p.decode).partition("Caller's contract: ")[2] for p in PACKAGES]
    of_torch, of_jax = (" ".join(text.split()) for text in contracts)
    checks = " The CPU checks both; a GPU would have to synchronise."
    texts = {of_torch.replace(checks, ""), of_jax.replace(checks, "")}
    assert len(texts) == 1 and "scores are all below -99000 gives 0 on XQA" in texts.pop()


def loaded_after(statement: str) -> set[str]:
    """The top-level modules of a fresh process after a statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_import_torch_core_loads_no_front_end():
    """Neither JAX nor the kernel libraries."""
    loaded = loaded_after("import torch_core")
    assert {"torch", "torch_core"} <= loaded
    assert not loaded & {"jax", "jaxlib", "jax_tvm_ffi", "jaxattn", "flashinfer", "triton"}


def test_import_jaxattn_loads_no_kernel_library():
    """FlashInfer and Triton are imported where used."""
    loaded = loaded_after("import jaxattn")
    assert {"jax", "jaxattn", "torch_core"} <= loaded
    assert not loaded & {"flashinfer", "triton", "jax_triton"}


def imports(path: Path) -> set[str]:
    """The top-level names of every import statement of a file, wherever it stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("name", ["checks.py", "problem.py"])
def test_rules_import_no_framework(name):
    """By their import statements: the standard library and each other."""
    assert imports(ROOT / "torch_core" / name) <= sys.stdlib_module_names


def test_rules_run_without_a_framework():
    """The files alone, as a package of their own, describe a call."""
    code = f"""
import importlib.util, sys, types
root = {str(ROOT / "torch_core")!r}
package = types.ModuleType("rules")
package.__path__ = [root]
sys.modules["rules"] = package
from rules import checks, problem
Array = type("Array", (), {{}})
def array(dtype, *shape):
    made = Array()
    made.shape, made.dtype = shape, dtype
    return made
cache = array("bfloat16", 6, 16, 2, 64)
inputs = problem.AttentionInputs(
    array("bfloat16", 3, 8, 64), cache, cache, array("int32", 3, 4), array("int32", 3)
)
described, _ = problem.describe_decode(inputs)
assert described.group_size == 4 and described.batch == 3
"""
    assert not loaded_after(code) & {"torch", "jax", "jaxlib", "numpy"}


def sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def test_torch_core_never_imports_jax():
    """Nor jaxattn, at any level of any file."""
    for path in sources("torch_core"):
        assert not imports(path) & {"jax", "jaxlib", "jaxattn", "jax_tvm_ffi", "jax_triton"}, path


@pytest.mark.parametrize("module, owner", [
    ("jax_tvm_ffi", "jaxattn/_ffi.py"), ("jax_triton", "jaxattn/_triton.py"),
])  # fmt: skip
def test_bridges_have_one_importer(module, owner):
    """One file each."""
    importers = {str(p.relative_to(ROOT)) for p in sources("torch_core", "jaxattn")
                 if module in imports(p)}  # fmt: skip
    assert importers <= {owner}
    assert importers or not (ROOT / owner).exists()


def test_flashinfer_is_imported_by_backends_only():
    """A file of torch_core/backends each, below the level of the module's import."""
    for path in sources("torch_core", "jaxattn"):
        if "flashinfer" in imports(path):
            assert path.parent == ROOT / "torch_core" / "backends", path
