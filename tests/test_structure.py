"""The rules that keep the tree what docs/architecture.md says: who imports whom, what is never used, how long a file is.

Everything is read from the syntax trees, so nothing is imported here but the standard library; one test starts Python.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "tasks", "distribute", "infra")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_LINES = 400

#: What the flow process may import of distribute: none of it imports torch.
TORCH_FREE = {
    "recipe", "job", "errors", "source", "layers", "plan", "dialects", "passthrough", "shards", "sizes", "swap", "work",
    "auto", "allocation",
}  # fmt: skip
#: Of our own packages, what each may import.
MAY_IMPORT = {
    "flows": {"flows", "tasks", "infra", "distribute"},
    "tasks": {"tasks", "infra", "distribute"},
    "infra": {"infra", "distribute"},
    "distribute": {"distribute"},
}
#: What ranks must work without: they have no network and no flow.
NOT_ON_RANKS = {"prefect", "huggingface_hub", "s3fs", "fsspec", "boto3", "botocore", "aiobotocore", "typer", "rich"}
#: What costs seconds and gigabytes in the flow process.
NOT_IN_FLOW = {"torch", "transformers", "safetensors", "numpy", "gguf"}
NUMERICS_MAY_IMPORT = {"torch", "math", "typing", "dataclasses", "collections", "enum"}
#: Where a device is chosen, and where the driver is asked how many there are.
KNOWS_CUDA = {"distribute/ranks.py", "infra/launch.py"}
#: Names whose use would let a file or a message of another process run code here.
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_NAMES = {
    "torch.load", "torch.save", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list", "eval", "exec",
}  # fmt: skip
#: Imported, but declared by another: what defines the errors of a declared library.
COMES_WITH = {"botocore": "s3fs", "tokenizers": "transformers"}
IMPORT_NAMES = {"pyyaml": "yaml"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every import, late ones too; `from a.b import c` gives a.b and a.b.c."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno} imports relatively; write the full name"
            yield node.module or "", node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def top_level_imports(path: Path) -> set[str]:
    return {name.partition(".")[0] for name, _ in imports(path)}


def dotted(node: ast.AST) -> str:
    """`torch.distributed.all_gather_object` of the expression; "" when it is no chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def docstrings(tree: ast.AST) -> set[ast.AST]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, owners) and node.body]
    return {body[0].value for body in bodies if isinstance(body[0], ast.Expr)}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_downwards(package: str) -> None:
    allowed = MAY_IMPORT[package] | {"importlib"}
    for path in MODULES:
        if package_of(path) == package:
            upwards = (top_level_imports(path) & {*PACKAGES, "tests", "benchmarks"}) - allowed
            assert not upwards, f"{relative(path)} imports {upwards}"


def test_flow_process_imports_only_the_torch_free_part_of_distribute() -> None:
    for path in MODULES:
        if package_of(path) not in ("flows", "tasks"):
            continue
        for name, line in imports(path):
            if name.startswith("distribute."):
                assert name.split(".")[1] in TORCH_FREE, f"{relative(path)}:{line} imports {name}"


def test_infra_knows_only_the_errors_of_distribute_and_how_folders_are_swapped() -> None:
    for path in MODULES:
        if package_of(path) == "infra":
            names = {name for name, _ in imports(path) if name.partition(".")[0] == "distribute"}
            known = ("distribute.errors", "distribute.swap")
            assert all(name.startswith(known) for name in names), f"{relative(path)} imports {names}"


def test_ranks_import_no_orchestration_and_no_network_client() -> None:
    for path in MODULES:
        if package_of(path) == "distribute":
            assert not top_level_imports(path) & NOT_ON_RANKS, relative(path)


def test_flow_process_imports_no_tensor_library() -> None:
    for path in MODULES:
        if package_of(path) in ("flows", "tasks", "infra"):
            assert not top_level_imports(path) & NOT_IN_FLOW, relative(path)


def test_numerics_import_torch_and_math_only() -> None:
    for path in (ROOT / "distribute" / "numerics").rglob("*.py"):
        ours = {name for name, _ in imports(path) if name.startswith("distribute")}
        assert all(name.startswith("distribute.numerics") for name in ours), f"{relative(path)} imports {ours}"
        rest = top_level_imports(path) - {"distribute"}
        assert rest <= NUMERICS_MAY_IMPORT, f"{relative(path)} imports {rest - NUMERICS_MAY_IMPORT}"
        used = {dotted(node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))}
        assert not any("distributed" in name for name in used), f"{relative(path)} uses torch.distributed"


def test_nobody_takes_a_private_name_of_another_module() -> None:
    for path in MODULES:
        for name, line in imports(path):
            package, _, last = name.partition(".")
            last = last.rpartition(".")[2]
            private = last.startswith("_") and not last.startswith("__")
            assert not (package in PACKAGES and private), f"{relative(path)}:{line} imports {name}"


def test_only_ranks_and_launcher_know_cuda() -> None:
    for path in MODULES:
        if relative(path) in KNOWS_CUDA:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        prose = docstrings(tree)
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and node not in prose else dotted(node)
            if isinstance(text, str):
                assert "cuda" not in text.lower(), f"{relative(path)}:{node.lineno} names a device: {text!r}"


def test_nothing_is_ever_unpickled_or_evaluated() -> None:
    for path in [*MODULES, *TESTS]:
        if path == Path(__file__):
            continue
        assert not top_level_imports(path) & UNSAFE_MODULES, relative(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = dotted(node)
            used = {name, name.rpartition(".")[2] if name.count(".") and "object" in name else name}
            assert not used & UNSAFE_NAMES, f"{relative(path)}:{node.lineno} uses {name}"


@pytest.mark.parametrize("path", [*MODULES, *TESTS], ids=relative)
def test_file_is_short_enough_to_read_at_once(path: Path) -> None:
    count = len(path.read_text(encoding="utf-8").splitlines())
    assert count <= MAX_LINES, f"{relative(path)} has {count} lines: split it by what it is about"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_module_says_what_it_owns(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.name == "__init__.py":
        assert path.parent == ROOT / "distribute" or not text, "import a name from the file that defines it"
    else:
        assert ast.get_docstring(ast.parse(text)), f"{relative(path)} has no module docstring"


def test_every_import_is_declared_and_every_dependency_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.match(r"[\w.-]+", line)[0] for line in project["dependencies"]}  # type: ignore[index]
    known = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in declared}
    used = set().union(*map(top_level_imports, MODULES)) - sys.stdlib_module_names - {*PACKAGES}
    assert used - known <= COMES_WITH.keys(), f"imported but not declared: {used - known - COMES_WITH.keys()}"
    assert known <= used, f"declared but not imported: {known - used}"


def test_architecture_says_what_every_module_is_for() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = documented_modules(text.partition("## The tree")[2].split("```")[1])
    assert named == {relative(path) for path in MODULES if path.name != "__init__.py"}


def documented_modules(tree: str) -> set[str]:
    """Paths of the .py files of a tree drawn by two spaces a level; each must have a comment beside it."""
    paths, folders = set(), []
    for indent, name, comment in re.findall(r"^( *)(\S+)(.*)$", tree, re.M):
        if name.endswith("/"):
            folders = [*folders[: len(indent) // 2], name]
        elif name.endswith(".py"):
            assert comment.strip(), f"nothing is said about {name}"
            paths.add("".join(folders[: len(indent) // 2]) + name)
    return paths


def test_dependencies_document_names_every_runtime_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    for line in project["dependencies"]:
        name, limits = re.fullmatch(r"([\w.-]+)(.*)", line).groups()  # type: ignore[union-attr]
        assert re.search(rf"^\| {re.escape(name)} \| `{re.escape(limits)}` \|", text, re.M), (
            f"{line} is not explained"
        )


def test_importing_the_flow_side_leaves_torch_out() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in MODULES
        if path.name != "__init__.py"
        and (package_of(path) != "distribute" or path.relative_to(ROOT).with_suffix("").parts[1] in TORCH_FREE)
    ]
    code = (
        f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
        "print([name for name in ('torch', 'transformers', 'numpy.random', 'safetensors') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "torch" not in found.stdout and "transformers" not in found.stdout, found.stdout
