"""The tour of a step in docs/algorithm.md: each row names a function, its file and its lines.

The rows follow the calls of train_grpo.py. A row in bold is a function of the page, those below it
are called by that function, and a row with an arrow is called by the one above it.
"""

import ast
import re

import pytest
from conftest import ROOT

PAGE = "train_grpo.py"
ROW = re.compile(
    r"^\| (?P<mark>\*\*|↳ |)`(?P<name>[\w.]+)`(?:\*\*)? \| (?P<does>.+) \| "
    r"`(?P<file>[\w/]+\.py):(?P<lines>\d+-\d+)` \|$",
    re.MULTILINE,
)


def tour():
    """The rows of the table."""
    text = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")
    section = text.partition("\n## What happens in one step\n")[2]
    # All rows but the two of the head: one that is written in another way would not be checked.
    table = [line for line in section.splitlines() if line.startswith("|")]
    rows = list(ROW.finditer(section))
    assert len(rows) == len(table) - 2, set(table) - {row.group() for row in rows}
    return rows


def functions_of(file):
    """Lines of each function and method with its decorators, by name, as in ``World.sum``."""
    lines = {}
    path = ROOT / file
    if not path.exists():
        return lines

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                lines[prefix + child.name] = f"{first}-{child.end_lineno}"

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return lines


def correct(row):
    """The row as it must be; where the function has left its file, one row for each new place."""
    name = row["name"]
    files = [row["file"]]
    if name not in functions_of(row["file"]):
        paths = [ROOT / PAGE, *sorted((ROOT / "grpo").rglob("*.py"))]
        files = [path.relative_to(ROOT).as_posix() for path in paths]
    places = []
    for file in files:
        lines = functions_of(file).get(name)
        if lines is not None:
            places.append(f"{file}:{lines}")
    if not places:
        return f"(no function or method {name} in {PAGE} or grpo/: the row has to go)"
    head = row.group().rpartition(" | ")[0]
    return "\n".join(f"{head} | `{place}` |" for place in places)


def test_each_function_of_the_tour_is_at_these_lines():
    stale = []
    for row in tour():
        if correct(row) != row.group():
            stale.append(correct(row))
    if stale:
        rows = "\n".join(stale)
        pytest.fail(f"docs/algorithm.md, the rows of the tour must be:\n{rows}", pytrace=False)


def calls_in(function):
    """What a function of the page calls, such as ``world.sum``, in the order of the first calls."""
    # A call ends behind those in its arguments, which run before it.
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.end_lineno, call.end_col_offset))
    return list(dict.fromkeys(ast.unparse(call.func) for call in calls))


def test_the_tour_follows_the_calls_of_the_page():
    """It has all calls of functions of grpo and of the page itself; methods where they matter."""
    page = ast.parse((ROOT / PAGE).read_text(encoding="utf-8"))
    imported = set()
    for node in page.body:
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "grpo":
            imported |= {alias.name for alias in node.names}
    functions = [node for node in page.body if isinstance(node, ast.FunctionDef)]
    names_of_page = {function.name for function in functions}

    expected = []
    described = [(row["mark"], row["name"].split(".")[-1]) for row in tour() if row["mark"] != "↳ "]
    for function in functions:
        expected.append(("**", function.name))
        for call in calls_in(function):
            name = call.split(".")[-1]
            is_of_grpo = call.split(".")[0] in imported | names_of_page
            if is_of_grpo or ("", name) in described:
                expected.append(("", name))
    assert described == expected


def test_a_moved_function_is_reported_with_its_new_place():
    row = ROW.match("| ↳ `World.sum` | adds | `grpo/distributed/parallel.py:1-2` |")
    lines = functions_of("grpo/distributed/world.py")["World.sum"]
    assert correct(row) == f"| ↳ `World.sum` | adds | `grpo/distributed/world.py:{lines}` |"
    row = ROW.match("| **`away`** | is gone | `grpo/nowhere.py:1-2` |")
    assert correct(row).startswith("(no function or method away ")
