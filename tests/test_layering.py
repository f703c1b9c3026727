"""Imports run one way, each outside service has one door, and files stay small."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "grpo"
FILES = sorted(PACKAGE.rglob("*.py"))
EVERY_FILE = [*FILES, ROOT / "train_grpo.py"]

BASE = {
    "agreement",
    "arguments",
    "batch",
    "config",
    "console",
    "datafile",
    "decoding",
    "distributed",
    "environment",
    "forking",
    "graphs",
    "health",
    "hub",
    "lock",
    "memory",
    "mistakes",
    "packing",
    "prefill",
    "presets",
    "rollout_weights",
    "sampling",
    "seeding",
    "terminal",
}
MATH = {"advantages", "logprobs", "loss", "rewards"}
PARTS = {"checkpoint", "data", "metrics", "model", "rollout", "samples", "signals", "tasks"}
ASSEMBLY = {
    "debug",
    "describe",
    "ending",
    "optimizer",
    "output",
    "prepare",
    "profile",
    "rehearsal",
    "run",
    "saving",
    "step_metrics",
}

MAY_IMPORT = (
    {room: set() for room in BASE}
    | {
        "config": {"agreement", "arguments", "presets"},
        "packing": {"forking"},
        "prefill": {"forking", "packing"},
        "mistakes": {"console", "distributed"},
        "decoding": {"forking", "packing", "rollout_weights"},
        "graphs": {"decoding", "forking", "sampling"},
    }
    | {room: {"batch"} for room in MATH}
    | {"logprobs": {"batch", "packing"}, "rewards": {"batch", "hub"}}
    | dict.fromkeys(PARTS, BASE | MATH)
    | {"data": BASE | MATH | {"tasks", "model"}, "model": BASE | MATH | {"tasks"}, "metrics": BASE | {"samples"}}
    | {"evaluation": BASE | MATH | PARTS}
    | {room: BASE | MATH | PARTS | {"evaluation"} | ASSEMBLY for room in ASSEMBLY}
    | {"report": {"console", "environment", "health", "samples"}}
    | {"chat": BASE | MATH | PARTS | ASSEMBLY}
    | {"__init__": set()}
)
"""Room (a module or folder of ``grpo``) -> the other rooms it may import."""

MAX_LINES = 400


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree, package=""):
    """``(dotted name, is at module level)`` of everything a module imports; ``package`` is what a leading dot means."""
    inside = {
        id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, id(node) not in inside


def imports_of(path):
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    return list(imports(ast.parse(path.read_text(encoding="utf-8")), package))


def rooms_imported_by(path):
    return {name.split(".")[1] for name, _ in imports_of(path) if name.startswith("grpo.")}


def is_or_lies_in(name, module):
    return name == module or name.startswith(module + ".")


def test_every_room_has_its_place():
    rooms = {room_of(path) for path in FILES}
    assert rooms - set(MAY_IMPORT) == set(), "give it a layer here, and in the design"
    assert set(MAY_IMPORT) - rooms == set(), "named here, but not there"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    room = room_of(path)
    assert rooms_imported_by(path) - {room} - MAY_IMPORT[room] == set()


def test_no_room_needs_itself():
    needs = {room: set() for room in MAY_IMPORT}
    for path in FILES:
        needs[room_of(path)] |= rooms_imported_by(path) - {room_of(path)}
    while leaves := {room for room, others in needs.items() if not others}:
        needs = {room: others - leaves for room, others in needs.items() if room not in leaves}
    assert not needs, "these import each other in a circle"


def test_nothing_imports_the_page():
    for path in FILES:
        assert not any(is_or_lies_in(name, "train_grpo") for name, _ in imports_of(path)), path.name


def test_arguments_are_for_the_configuration_alone():
    users = {room_of(path) for path in FILES if "arguments" in rooms_imported_by(path)}
    assert users == {"chat", "config"}  # chat reads values as the command line does


def test_only_one_file_knows_of_other_ranks():
    users = set()
    for path in EVERY_FILE:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = ("torch.distributed", "torch.nn.parallel")
        imported = any(is_or_lies_in(name, module) for name, _ in imports_of(path) for module in modules)
        spelled = any(isinstance(n, ast.Attribute) and ast.unparse(n) == "torch.distributed" for n in ast.walk(tree))
        if imported or spelled:
            users.add(path.relative_to(ROOT).as_posix())
    assert users == {"grpo/distributed.py"}


@pytest.mark.parametrize(("package", "door"), [("wandb", "grpo/metrics.py"), ("datasets", "grpo/data/source.py")])
def test_heavy_packages_have_one_door_and_are_imported_when_needed(package, door):
    found = {
        (path.relative_to(ROOT).as_posix(), at_module_level)
        for path in EVERY_FILE
        for name, at_module_level in imports_of(path)
        if is_or_lies_in(name, package)
    }
    assert found == {(door, False)}


@pytest.mark.parametrize("path", EVERY_FILE, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{lines} lines: two ideas?"


def test_the_import_finder_sees_every_way_to_write_it():
    source = (
        "import grpo.run\nimport torch.distributed as dist\nfrom torch import distributed\nfrom grpo import loss\n"
        "from grpo.rewards.extract import completion_text\nfrom . import near\nfrom .near import x\nfrom .. import up\n"
        "try:\n    import wandb\nexcept ImportError:\n    pass\n"
        "def f():\n    import datasets\n    async def g():\n        from ..model import h\n"
    )
    found = dict(imports(ast.parse(source), package="grpo.rewards"))
    assert found == {
        "grpo.run": True, "torch.distributed": True, "grpo.loss": True, "grpo.rewards.extract.completion_text": True,
        "grpo.rewards.near": True, "grpo.rewards.near.x": True, "grpo.up": True, "wandb": True,
        "datasets": False, "grpo.model.h": False,
    }  # fmt: skip
