"""The built wheel holds everything that the tree holds: modules, configs, prompts. Built from a copy: a stale build/ lies."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "drafters", "inference", "scripts", "train")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("needs setuptools in the environment: the wheel is built without a network")
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        out,
        copy,
    ]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("draftsmith-*.whl")
    return built


def test_the_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {
        f"draftsmith/{file.relative_to(ROOT)}"
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.suffix in {".py", ".yaml", ".jsonl"} and "__pycache__" not in file.parts
    }
    assert expected <= names, sorted(expected - names)
    assert any(name.startswith("draftsmith/configs/prompts/") for name in names)
    modules = {name for name in names if name.startswith("draftsmith/") and name.endswith(".py")}
    assert modules == {name for name in expected if name.endswith(".py")}  # no tests, nothing stale


def test_an_installed_copy_works_outside_of_the_repository(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = (
        "import sys; sys.path.insert(0, 'site')\n"
        "from draftsmith import drafters\n"
        "from draftsmith.train.config import read\n"
        "assert drafters.__file__.startswith(sys.argv[1]), drafters.__file__\n"
        "print(drafters.kinds(), read('configs/eagle3_smollm2.yaml').kind)\n"
    )
    # -S: without site-packages' .pth files the editable install of the repository cannot answer instead.
    paths = [path for path in sys.path if "site-packages" in path]
    program = f"import sys; sys.path[:0] = {paths!r}\n" + program
    command = [sys.executable, "-S", "-I", "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'eagle3'" in done.stdout and done.stdout.rstrip().endswith("eagle3")
