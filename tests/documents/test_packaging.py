"""pyproject.toml and requirements.txt."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT, environment_of_runs
from packaging.requirements import Requirement

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_pinned_versions_are_within_the_bounds():
    bounds = {
        requirement.name: requirement
        for requirement in map(Requirement, PROJECT["project"]["dependencies"])
    }
    pinned = [
        Requirement(line)
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if line[0] != "#"
    ]
    pins = {pin.name: next(iter(pin.specifier)) for pin in pinned}
    assert pins.keys() == bounds.keys()
    for name, pin in pins.items():
        assert pin.operator == "==", name
        assert bounds[name].specifier.contains(pin.version), (
            f"{name}: {pin} is outside of {bounds[name]}"
        )


def files_of(folder: Path) -> set[Path]:
    files = set()
    for path in (folder / "grpo").rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            files.add(path.relative_to(folder))
    return files


def test_every_file_and_the_page_are_installed(tmp_path):
    """Also the report's template, which is no module."""
    pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml asks pip for it")
    built = tmp_path / "built"
    build = [
        "egg_info",
        "--egg-base",
        str(tmp_path),
        "build_py",
        "--build-lib",
        str(built),
    ]
    command = [sys.executable, "-c", "from setuptools import setup; setup()", *build]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert files_of(built) == files_of(ROOT)
    code = "import grpo.library as l, importlib.util as u; print(l.PAGE, u.find_spec('train_grpo').origin)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment_of_runs({"PYTHONPATH": str(built)}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(built / "train_grpo.py")] * 2


def test_help_of_a_fresh_clone_answers_without_installing(tmp_path):
    venv = tmp_path / "venv"
    environment = environment_of_runs({"GRPO_VENV": str(venv), "PYTHON": "false"})
    environment.pop("GRPO_NO_SETUP", None)
    done = subprocess.run(
        [ROOT / "launch.sh", "--help"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "./launch.sh test" in done.stdout and not done.stderr
    assert not venv.exists()
