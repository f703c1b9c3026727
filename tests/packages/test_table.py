"""The table of packages in docs/tools.md. It needs none of them."""

import ast
import re
import tomllib

from conftest import ROOT
from packaging.requirements import Requirement


def lines_of_code(definition: ast.stmt, text: str) -> int:
    """The lines of a class or function of the examples without docstrings, comments and blank lines."""
    lines = set(range(definition.lineno, definition.end_lineno + 1))
    for node in ast.walk(definition):
        has_docstring = isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
        if has_docstring:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    written = [line.strip() for line in text.splitlines()]
    return sum(bool(written[n - 1]) and not written[n - 1].startswith("#") for n in lines)


def test_the_table_counts_the_glue_and_names_the_versions_that_are_installed():
    text = (ROOT / "examples" / "environments.py").read_text()
    examples = {node.name: lines_of_code(node, text) for node in ast.parse(text).body if hasattr(node, "name")}
    table = (ROOT / "docs" / "tools.md").read_text().split("## Environments of other packages")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\S+) ([\d.]+) \| (\d+) \| (?:`(\w+)`)? ?\|", table, re.MULTILINE)
    assert {name: int(lines) for _, _, lines, name in rows if name} == examples
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["environments"]
    pins = {str(requirement.specifier).removeprefix("==") for requirement in map(Requirement, extra)}
    assert {version for _, version, _, _ in rows} <= pins
