"""pyproject.toml and requirements.txt."""

import os
import subprocess
import tomllib

from conftest import ROOT
from packaging.requirements import Requirement

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_pinned_versions_are_within_the_bounds():
    bounds = {requirement.name: requirement for requirement in map(Requirement, PROJECT["project"]["dependencies"])}
    pinned = [Requirement(line) for line in (ROOT / "requirements.txt").read_text().splitlines() if line[0] != "#"]
    pins = {pin.name: next(iter(pin.specifier)) for pin in pinned}
    assert pins.keys() == bounds.keys()
    for name, pin in pins.items():
        assert pin.operator == "==", name
        assert bounds[name].specifier.contains(pin.version), f"{name}: {pin} is outside of {bounds[name]}"


def test_files_that_are_no_modules_are_package_data():
    """The report's template; an installed package would lack any other."""
    data = PROJECT["tool"]["setuptools"]["package-data"]
    globs = [(ROOT / package.replace(".", "/"), glob) for package, globs in data.items() for glob in globs]
    declared = {path for folder, glob in globs for path in folder.glob(glob)}
    files = {path for path in (ROOT / "grpo").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files == declared
    for module in (ROOT / "grpo").rglob("*.py"):
        assert (module.parent / "__init__.py").exists(), f"{module} is in no package: setuptools would leave it out"


def test_help_of_a_fresh_clone_answers_without_installing(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "GRPO_NO_SETUP"}
    environment |= {"GRPO_VENV": str(tmp_path / "venv"), "PYTHON": "false"}
    done = subprocess.run([ROOT / "launch.sh", "--help"], env=environment, capture_output=True, text=True, check=True)
    assert "./launch.sh test" in done.stdout and not done.stderr
    assert not (tmp_path / "venv").exists()
