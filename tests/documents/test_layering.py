"""Imports run one way, each outside service is imported in one file, and rooms stay within their
budgets."""

import ast
import functools
import graphlib
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "grpo"
FILES = sorted(PACKAGE.rglob("*.py"))
EVERY_FILE = [*FILES, ROOT / "train_grpo.py"]

ORDER = [
    "system", "attention", "algorithm",  # helpers; tensors in, tensors out
    "config", "distributed",  # the ground that the parts stand on
    "data", "telemetry", "workers", "rewards", "model", "rollout", "vllm", "turns", "evaluation", "checkpoint",  # the parts
    "run", "library",  # puts the parts together; train_grpo.py as a function
    "report", "commands", "chat", "merge", "sweep",  # what is run beside training
]  # fmt: skip
"""The rooms of ``grpo`` (a file or folder directly under it): each may import only those before
it."""

ALONE = {
    "__init__": {"library", "system"},  # library: when `grpo.train` is asked for
    "attention": set(),
    "algorithm": {"attention"},
    "config": {"algorithm", "system"},
    "distributed": {"config", "system"},
    "report": {"config", "system", "telemetry"},
    "workers": {"system"},
}
"""Rooms that may import only these, fewer than the order allows."""

MAX_ROOMS = 22
BUDGETS = {
    "system": 996, "attention": 5730, "algorithm": 8062, "config": 6807, "distributed": 2972, "data": 7830,
    "telemetry": 4637, "workers": 5033, "rewards": 9222, "model": 4515, "rollout": 8808, "vllm": 4295, "turns": 7727,
    "evaluation": 2588, "checkpoint": 3127, "run": 12774, "library": 1506, "report": 2563, "commands": 5456,
}  # fmt: skip
"""Python tokens of each room, without comments, docstrings and line ends: what a reader takes in,
however it is laid out. A room that outgrows its budget asks first what can leave it; lines are
free."""
MAX_DENSITY = 8.0
"""Tokens a code line, over a room: one statement, one thought."""
MAX_DENSITY_OF_FILE = 8.5
MAX_WIDTH = 100
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def room_of(path):
    """A room's ``__main__.py`` is a door to ``commands``."""
    return (
        "commands"
        if path.name == "__main__.py"
        else path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    )


def imports(tree, package=""):
    """``(dotted name, is at module level)`` of everything a module imports; ``package`` is what a
    leading dot means."""
    inside = {
        id(n)
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
        for n in ast.walk(f)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            module = ".".join([*above, *filter(None, [node.module])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, id(node) not in inside


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path):
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    return list(imports(parsed(path), package))


def files_of(room):
    folder = PACKAGE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{room}.py"]


def rooms_imported_by(path):
    return {name.split(".")[1] for name, _ in imports_of(path) if name.startswith("grpo.")}


def is_or_lies_in(name, module):
    return name == module or name.startswith(module + ".")


def test_every_module_is_in_the_order():
    assert {room_of(path) for path in FILES} == {*ORDER, "__init__"}
    assert len(ORDER) <= MAX_ROOMS


def test_imports_run_one_way():
    for path in FILES:
        room = room_of(path)
        before = set(ORDER[: ORDER.index(room)]) if room in ORDER else set()
        assert rooms_imported_by(path) - {room} <= ALONE.get(room, before), path


def test_only_the_library_knows_where_the_page_lives():
    """It imports the page when a run starts, and a sweep starts the file that it names."""
    importing = [
        (room_of(path), at_module_level)
        for path in FILES
        for name, at_module_level in imports_of(path)
        if is_or_lies_in(name, "train_grpo")
    ]
    assert importing == []
    naming = {
        path.name
        for path in FILES
        for n in ast.walk(parsed(path))
        if isinstance(n, ast.Constant) and n.value in ("train_grpo", "train_grpo.py")
    }
    # The command line's parser has the name for its usage.
    assert naming - {"arguments.py"} == {"library.py"}


def test_arguments_are_for_the_configuration_alone():
    users = {
        room_of(path)
        for path in FILES
        if any("grpo.config.arguments" in name for name, _ in imports_of(path))
    }
    assert users == {"config"}


def test_only_one_file_knows_of_other_ranks():
    users = set()
    for path in EVERY_FILE:
        tree = parsed(path)
        modules = ("torch.distributed", "torch.nn.parallel")
        imported = any(
            is_or_lies_in(name, module) for name, _ in imports_of(path) for module in modules
        )
        spelled = any(
            isinstance(n, ast.Attribute) and ast.unparse(n) == "torch.distributed"
            for n in ast.walk(tree)
        )
        if imported or spelled:
            users.add(path.relative_to(ROOT).as_posix())
    assert all(user.startswith("grpo/distributed/") for user in users), users


@pytest.mark.parametrize(
    ("package", "file"),
    [
        ("wandb", "grpo/telemetry/dashboards.py"),
        ("trackio", "grpo/telemetry/dashboards.py"),
        ("torch.utils.tensorboard", "grpo/telemetry/dashboards.py"),
        ("datasets", "grpo/data/rows.py"),
    ],
)
def test_heavy_packages_are_imported_in_one_file_and_when_needed(package, file):
    found = {
        (path.relative_to(ROOT).as_posix(), at_module_level)
        for path in EVERY_FILE
        for name, at_module_level in imports_of(path)
        if is_or_lies_in(name, package)
    }
    assert found == {(file, False)}


def test_peft_is_imported_in_one_file_and_when_needed():
    users = {
        path.relative_to(ROOT).as_posix()
        for path in EVERY_FILE
        if 'import_extra("peft"' in path.read_text(encoding="utf-8")
    }
    imported = {
        path for path in EVERY_FILE for name, _ in imports_of(path) if is_or_lies_in(name, "peft")
    }
    assert users == {"grpo/model/lora.py"} and not imported


def weigh(path):
    """Tokens of a file without comments, docstrings (also those under a name) and line ends, and
    the lines they are on."""
    source = path.read_text(encoding="utf-8")
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(node.lineno)
    tokens = 0
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if token.type not in LAYOUT and not is_docstring:
            tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    return tokens, len(lines)


@pytest.mark.parametrize("room", BUDGETS)
def test_rooms_stay_within_their_budget_and_are_not_packed(room):
    tokens = 0
    lines = 0
    for path in files_of(room):
        file_tokens, file_lines = weigh(path)
        tokens += file_tokens
        lines += file_lines
        assert file_tokens <= MAX_DENSITY_OF_FILE * file_lines, path
    assert tokens <= BUDGETS[room]
    assert tokens <= MAX_DENSITY * lines, f"{tokens / lines:.2f} tokens a code line"


@pytest.mark.parametrize("room", BUDGETS)
def test_no_circle_between_files_of_a_room(room):
    modules = {}
    for path in files_of(room):
        names = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(names).removesuffix(".__init__")] = path
    graph = {}
    for module, path in modules.items():
        graph[module] = set()
        for name, _ in imports_of(path):
            # A name is a module, or something that lies in one: `from grpo.run import steps`, `from
            # grpo.run.steps import x`.
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name:
                graph[module].add(name)
    # Raises CycleError, which names the files, where one imports itself by way of others.
    list(graphlib.TopologicalSorter(graph).static_order())


def test_the_page_is_one_page_and_lines_are_narrow():
    page = (ROOT / "train_grpo.py").read_text(encoding="utf-8")
    train = page[page.index("def train(") : page.index("def compute_advantages(")]
    assert page.count("\n") <= 200 and train.strip().count("\n") < 45
    assert max(map(len, page.splitlines())) <= 100
    folders = ("grpo", "benchmarks", "examples")
    for path in [
        ROOT / "train_grpo.py",
        *(path for name in folders for path in (ROOT / name).rglob("*.py")),
    ]:
        wide = [
            line for line in path.read_text(encoding="utf-8").splitlines() if len(line) > MAX_WIDTH
        ]
        assert not wide, path


def test_the_import_finder_sees_every_way_to_write_it():
    source = (
        "import grpo.run\nimport torch.distributed as dist\nfrom torch import distributed\nfrom grpo import run as r\n"
        "from grpo.rewards.answers import completion_text\nfrom . import near\nfrom .near import x\nfrom .. import up\n"
        "try:\n    import wandb\nexcept ImportError:\n    pass\n"
        "def f():\n    import datasets\n    async def g():\n        from ..model import h\n"
    )
    found = dict(imports(ast.parse(source), package="grpo.rewards"))
    assert found == {
        "grpo.run": True, "torch.distributed": True, "grpo.rewards.answers.completion_text": True,
        "grpo.rewards.near": True, "grpo.rewards.near.x": True, "grpo.up": True, "wandb": True,
        "datasets": False, "grpo.model.h": False,
    }  # fmt: skip
