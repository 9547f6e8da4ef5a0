"""Facts about the source tree: layers, the package list, imports, and nothing that can run code from a file."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = [name.removeprefix("draftsmith.") for name in PYPROJECT["tool"]["setuptools"]["packages"]]
FILES = sorted(file for name in PACKAGES for file in ROOT.joinpath(*name.split(".")).glob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
ALLOWED = {  # drafters ← inference ← train ← scripts; configs holds files and one function that finds them
    "configs": set(),
    "drafters": set(),
    "inference": {"configs", "drafters"},
    "train": {"configs", "drafters", "inference"},
    "scripts": {"configs", "drafters", "inference", "train"},
}


def imported(tree: ast.AST) -> Iterator[str]:
    """Every imported module, those inside functions and under TYPE_CHECKING too, with dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant):
                yield str(argument.value)
            elif isinstance(argument, ast.JoinedStr) and isinstance(argument.values[0], ast.Constant):
                yield str(argument.values[0].value)


def wrong_layers(source: str, package: str) -> list[str]:
    found = set()
    for name in imported(ast.parse(source)):
        parts = name.split(".")
        if parts[0] == "draftsmith" and len(parts) > 1 and parts[1] not in {package, ""} | ALLOWED[package]:
            found.add(parts[1])
    return sorted(found)


def bare_names(source: str) -> list[str]:
    return sorted({name.split(".")[0] for name in imported(ast.parse(source))} & {*ALLOWED, "conftest"})


def unsafe_loading(source: str) -> list[str]:
    """Whatever can run code that a file holds: pickle and its relatives, torch.load without weights_only, yaml.load, eval."""
    tree = ast.parse(source)
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    found = [name for name in imported(tree) if name.split(".")[0] in modules]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        keywords = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if name == "torch.load" and keywords.get("weights_only") != "True":
            found.append(name)
        if name in ("eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            found.append(name)
        if name in ("numpy.load", "np.load") and keywords.get("allow_pickle", "False") != "False":
            found.append(name)
    return found


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_a_file_imports_only_from_its_own_layer_and_those_below(file: Path) -> None:
    assert wrong_layers(file.read_text(), file.relative_to(ROOT).parts[0]) == []


@pytest.mark.parametrize("file", FILES + TESTS, ids=relative)
def test_a_file_imports_no_bare_package_name(file: Path) -> None:
    """From the repository root `import drafters` works and gives a second copy of every class."""
    assert bare_names(file.read_text()) == []


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_a_file_loads_nothing_that_could_run_code(file: Path) -> None:
    assert unsafe_loading(file.read_text()) == []


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_a_file_begins_by_saying_what_it_is(file: Path) -> None:
    assert len(ast.get_docstring(ast.parse(file.read_text())) or "") >= 40


@pytest.mark.parametrize(
    "package, source, expected",
    [
        ("drafters", "import draftsmith.inference.target", ["inference"]),
        ("drafters", "from draftsmith.train import run", ["train"]),
        ("drafters", "def f():\n    from draftsmith import inference", ["inference"]),
        ("inference", "if TYPE_CHECKING:\n    from draftsmith.train.data import Sequence", ["train"]),
        ("inference", "importlib.import_module('draftsmith.scripts.main')", ["scripts"]),
        ("inference", "importlib.import_module(f'draftsmith.train.{name}')", ["train"]),
        ("train", "from draftsmith.scripts.main import main", ["scripts"]),
        ("train", "from draftsmith.inference import decode\nfrom draftsmith import drafters", []),
    ],
)
def test_the_layer_check_notices_what_it_is_for(package: str, source: str, expected: list[str]) -> None:
    assert wrong_layers(source, package) == expected


def test_the_other_checks_notice_what_they_are_for() -> None:
    assert bare_names("import drafters.base\nfrom train import run\nfrom conftest import x") == [
        "conftest",
        "drafters",
        "train",
    ]
    assert bare_names("import draftsmith.drafters") == []
    for bad in ("import pickle", "from pickle import loads", "torch.load(f)", "torch.load(f, weights_only=False)",
                "yaml.load(f)", "eval('1')", "np.load(f, allow_pickle=True)"):  # fmt: skip
        assert unsafe_loading(bad), bad
    assert not unsafe_loading("torch.load(f, weights_only=True)\nmodel.eval()\nyaml.safe_load(f)\nnp.load(f)")


def test_the_package_list_is_the_tree() -> None:
    """An unlisted folder works in an editable install and is missing from the wheel."""
    ignored = {"tests", "build", "dist", "runs"}
    roots = [p for p in ROOT.iterdir() if p.is_dir() and p.name not in ignored and p.name[0] != "." and p.suffix == ""]
    tree = {".".join(file.parent.relative_to(ROOT).parts) for root in roots for file in root.rglob("*.py")}
    assert sorted(PACKAGES) == sorted(tree)
    assert {name.split(".")[0] for name in PACKAGES} == set(ALLOWED)
    assert all((ROOT.joinpath(*name.split(".")) / "__init__.py").exists() for name in PACKAGES)


def test_every_data_file_of_the_packages_matches_a_pattern_that_ships_it() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]
    for name in PACKAGES:
        folder = ROOT.joinpath(*name.split("."))
        shipped = {file for pattern in patterns.get(f"draftsmith.{name}", []) for file in folder.glob(pattern)}
        data = {
            file
            for file in folder.rglob("*")
            if file.suffix in {".yaml", ".yml", ".jsonl", ".json", ".html", ".css", ".js"}
        }
        assert data <= shipped, sorted(map(relative, data - shipped))
