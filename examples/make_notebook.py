"""Write own_loop.ipynb from own_loop.py: python examples/make_notebook.py [--check]

`# %%` begins a cell of code, and `# %% [markdown]` a cell of text. With --check nothing is written,
and the exit code is 1 if the notebook does not agree with the script.
"""

import json
import re
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "own_loop.py"
NOTEBOOK = SCRIPT.with_suffix(".ipynb")
CELL = re.compile(r"^# %%(.*)\n((?:(?!# %%).*\n?)*)", re.MULTILINE)
"""Pattern of a cell. The groups are the text after `# %%`, and the lines up to the next cell."""


def cells_of(script: str) -> list[dict]:
    """Return the cells of a script, in the notebook format 4.5."""
    cells = []
    for number, (kind, text) in enumerate(CELL.findall(script)):
        text = text.strip("\n")
        is_markdown = "[markdown]" in kind
        if is_markdown:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)

        # The format requires an id in each cell. A random id would change each time.
        cell = {
            "id": f"cell-{number}",
            "metadata": {},
            "source": text.splitlines(keepends=True),
        }
        if is_markdown:
            cell["cell_type"] = "markdown"
        else:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
        cells.append(cell)
    return cells


def notebook_of(script: str) -> str:
    """Return the text of the notebook file for a script."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {
        "cells": cells_of(script),
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    notebook = notebook_of(SCRIPT.read_text(encoding="utf-8"))
    if "--check" not in sys.argv:
        NOTEBOOK.write_text(notebook, encoding="utf-8")
    elif NOTEBOOK.read_text(encoding="utf-8") != notebook:
        sys.exit(
            "own_loop.ipynb is not made from own_loop.py: run python examples/make_notebook.py"
        )
