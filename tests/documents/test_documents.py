"""The documents: every metric is explained, every key exists, the worked example comes out, links
lead somewhere."""

import json
import math
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import ROOT, environment_of_runs, run_trainer, small_run

from grpo.algorithm.advantages import group_advantages
from grpo.algorithm.batch import Completion, Group, Problem
from grpo.algorithm.loss import loss_denominator, policy_loss
from grpo.config import Config
from grpo.config.aliases import OTHER_NAMES
from grpo.config.help import keys_of, unknown_key
from grpo.telemetry.accumulator import Accumulator
from grpo.turns.metrics import add_turns

DOCS = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])


def documented_metrics() -> set[str]:
    text = (ROOT / "docs" / "metrics.md").read_text().split("## What is written")[0]
    return {
        name
        for row in re.findall(
            r"^\| `([^|]+)` \|",
            text,
            re.MULTILINE,
        )
        for name in row.split("`, `")
    }


def test_every_metric_that_a_run_logs_is_documented(tmp_path, random_model):
    run_trainer(
        *small_run(random_model, tmp_path / "run"),
        "optim.max_steps=1",
        "eval.num_samples=2",
        "eval.temperature=1.0",
    )
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    logged = {name for line in text.splitlines() for name in json.loads(line)} - {"step"}
    turns = Accumulator()
    add_turns([], turns, ["<name>"])
    general = set()
    for name in logged | set(turns._pairs):
        name = re.sub(r"^eval/rewards/.+", "eval/rewards/<name>", name)
        name = re.sub(r"^rewards/[^/]+/", "rewards/<name>/", name)
        name = re.sub(r"^stop_reason/.+", "stop_reason/<kind>", name)
        general.add(re.sub(r"@\d+$", "@<k>", name))
    documented = documented_metrics()
    assert general - documented == set()
    assert {name for name in documented if "/" not in name or "<" in name} - general == set(), (
        "documented, but not logged"
    )


PAGES = [*DOCS, ROOT / "benchmarks" / "README.md"]


@pytest.mark.parametrize(
    "path",
    PAGES,
    ids=lambda path: path.name,
)
def test_what_documents_name_exists(path):
    """Keys, targets of links with their headings, files in backticks."""
    # The changelog ends with the keys that left.
    text = path.read_text().partition("\n## Removed\n")[0]
    known = set(keys_of(Config))
    sections = {key.split(".")[0] for key in known if "." in key}
    for section, key in re.findall(r"`([a-z]+)\.([a-z_]+)(?:=[^`]*)?`", text):
        if section in sections and f"{section}.{key}" not in known:
            room = {"reward": "rewards", "eval": "evaluation"}.get(section, section)
            assert key in _names_in(room), f"{section}.{key} is neither a key nor a function"
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]+))?\)", text):
        if "://" not in target:
            page = path.parent / target if target else path
            assert page.exists(), target
            assert not anchor or anchor in anchors(page), f"{target}#{anchor}"
    for name in re.findall(r"((?:[\w.-]+/)*[\w.-]+\.(?:py|yaml))\b", text):
        if name.startswith(
            (
                "grpo/",
                "tests/",
                "benchmarks/",
                "configs/",
            )
        ):
            assert (ROOT / name).exists() or re.search(r"/[xX]\.yaml$", name), name
        elif name.startswith("test_"):
            assert list((ROOT / "tests").rglob(name)), name


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w -]", "", heading.lower())
        found.add(plain.replace(" ", "-"))
    return found


def _names_in(room: str) -> set[str]:
    files = [ROOT / "grpo" / f"{room}.py", *(ROOT / "grpo" / room).glob("*.py")]
    text = "\n".join(file.read_text() for file in files if file.exists())
    return set(
        re.findall(
            r"^(?:def |class )?(\w+)",
            text,
            re.MULTILINE,
        )
    ) | {"py"}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "results").glob("*learn*.md")), ids=lambda path: path.stem
)
def test_tables_of_what_was_learned_are_those_that_the_scripts_wrote(path):
    """compare_trl.md stands in benchmarks/README.md, in part."""
    assert path.read_text().strip() in (ROOT / "docs" / "learning.md").read_text()


def test_the_worked_example():
    """docs/algorithm.md, whose numbers are worked out by hand: advantages, and the loss of two
    completions."""
    text = (ROOT / "docs" / "algorithm.md").read_text()

    def advantages(*rewards):
        return group_advantages(torch.tensor([rewards], dtype=torch.float64)).tolist()[0]

    std = math.sqrt((4 * 0.25) / 3)
    a = 0.5 / (std + 1e-4)
    assert advantages(1, 0, 0, 1) == pytest.approx(
        [
            a,
            -a,
            -a,
            a,
        ]
    )
    for number in (f"{std:.5f}", f"{std + 1e-4:.5f}", f"{a:.4f}", f"{0.5 / std:.4f}"):
        assert number in text
    assert advantages(1, 1, 1, 1) == [0, 0, 0, 0]
    found = advantages(1, math.nan, 0)
    assert f"A = `[+{found[0]:.4f}, 0, -{found[0]:.4f}]`" in text
    assert found == pytest.approx([found[0], 0, -found[0]])

    new = torch.tensor(
        [
            [-0.5, -1.0, -0.2],
            [
                -0.7,
                0.0,
                0.0,
            ],
        ],
        dtype=torch.float64,
    )
    old = torch.tensor(
        [
            [-0.6, -1.0, -0.5],
            [
                -0.3,
                0.0,
                0.0,
            ],
        ],
        dtype=torch.float64,
    )
    mask = torch.tensor(
        [
            [1, 1, 1],
            [
                1,
                0,
                0,
            ],
        ],
        dtype=torch.bool,
    )
    A = torch.tensor([1.0, -1.0], dtype=torch.float64)
    for aggregation in ("response_mean", "token_mean", "constant"):
        options = dict(aggregation=aggregation, max_length=8)
        loss, _ = policy_loss(new, old, A, mask, **options)
        value = loss / loss_denominator(mask, **options)
        assert f"`{aggregation}` {value:.4f}" in text


TRL_ARGUMENTS = ROOT / "docs" / "trl_arguments.md"


def trl_mapping() -> dict[str, str]:
    """Name of each setting of TRL that has a counterpart -> its cell in the column "here"."""
    table = TRL_ARGUMENTS.read_text().split("## Without a counterpart")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| [^|]* \| [^|]* \|$", table, re.MULTILINE)
    assert len(rows) == len(dict(rows)) == table.count("\n| `")
    return dict(rows)


def test_every_key_that_replaces_one_of_trl_exists():
    """Each cell has a key, and the command line answers with it."""
    known = keys_of(Config)
    sections = {key.split(".")[0] for key in known}
    for theirs, cell in trl_mapping().items():
        keys = re.findall(r"`([a-z_]+(?:\.[a-z_]+)?)(?:=\w+)?`", cell)
        keys = [key for key in keys if key in known or key.split(".")[0] in sections]
        assert keys, theirs
        assert set(keys) - known.keys() == set(), theirs
        assert (
            theirs in known or keys[0] in unknown_key(theirs, list(known)) or theirs in OTHER_NAMES
        ), theirs


def test_every_setting_of_trl_is_in_the_table_or_has_a_reason():
    ending = TRL_ARGUMENTS.read_text().split("## Without a counterpart")[1]
    listed = " ".join(ending.split()).split(" - ")[1:]
    without = []
    for line in listed:
        reason, _, names = line.rpartition(": ")
        assert reason and re.fullmatch(r"`\w+`(, `\w+`)*", names), line
        without += re.findall(r"\w+", names)
    names = [*trl_mapping(), *without]
    assert len(names) == len(set(names)) == 77 + 114, "of TRL 1.16.0 with transformers 5.23"


@pytest.mark.slow  # .ci/run installs TRL before the slow tests
def test_the_table_of_trls_settings_is_what_its_script_writes():
    pytest.importorskip("trl", reason="needs TRL: pip install -e '.[bench]'")
    script = ROOT / "docs" / "make_trl_arguments.py"
    environment = environment_of_runs({"PYTHONPATH": str(ROOT)})
    subprocess.run([sys.executable, script, "--check"], env=environment, check=True)


def test_the_ported_script():
    """The reward functions are those of the TRL script, and docs/from_trl.md shows lines of both
    files as they are."""
    folder = ROOT / "examples" / "gsm8k_from_trl"
    script, rewards, settings = (
        (folder / name).read_text() for name in ("trl_script.py", "rewards.py", "gsm8k.yaml")
    )
    functions = rewards[rewards.index("\ndef ") :].strip()
    assert functions.count("\ndef ") == 7
    assert functions in script

    text = (ROOT / "docs" / "from_trl.md").read_text()
    table = text.split("| `trl_script.py` | `gsm8k.yaml` |")[1].split("\n\n")[0]
    rows = table.strip().splitlines()[1:]
    assert len(rows) >= 4
    for row in rows:
        _, theirs, ours, _ = row.split("|")
        for cell, source in ((theirs, script), (ours, settings)):
            shown = re.findall(r"`([^`]+)`", cell)
            assert shown and all(code in source for code in shown), row


def test_the_readmes_figures_are_those_of_the_benchmark():
    """Speed and memory beside TRL at beta 0.04, with SmolLM2-135M and 64 and 256 tokens."""
    text = (ROOT / "README.md").read_text()
    for length in (64, 256):
        file = ROOT / "benchmarks" / "results" / f"compare_trl_135m_{length}_kl.json"
        (entry,) = json.loads(file.read_text())["results"]
        step = entry["summary"]["step"]["ratio"]
        memory = entry["summary"]["peak_rss_mib"]["ratio"]
        assert f"{step:.2f} times" in text, length
        assert f"with {1 / memory:.0%}" in text, length


def test_the_replay_buffer_of_the_page_gives_the_same_batch():
    text = (ROOT / "docs" / "algorithm.md").read_text()
    (code,) = re.findall(r"  ```python\n(  from dataclasses.*?)  ```", text, re.DOTALL)
    functions = {}
    exec(textwrap.dedent(code), functions)
    problem = Problem(3, "1 + 1 =", (1, 2), {"answer": "2"})
    completions = (
        Completion((5, 6), "2", True, (-0.1, -0.2)),
        Completion((7,), "3", False, (-0.3,)),
    )
    group = Group(problem, completions)
    values_GF = torch.tensor([[1.0], [math.nan]])
    saved = json.loads(json.dumps(functions["as_json"](group, values_GF)))
    assert functions["as_group"](saved, {3: problem}) == group
    torch.testing.assert_close(torch.tensor(saved["values"]), values_GF, equal_nan=True)


def test_the_tests_of_what_cannot_happen_exist():
    text = " ".join((ROOT / "docs/cannot_happen.md").read_text().split())
    found = re.findall(r"`(tests/[\w/]+\.py)`: ((?:`test_\w+`(?:, )?)+|all)", text)
    assert len(found) >= 12
    for file, names in found:
        source = (ROOT / file).read_text()
        assert all(f"def {name}(" in source for name in re.findall(r"test_\w+", names)), file


def test_functions_of_the_code_tour_and_of_the_formulas_exist():
    """``room.name`` and ``room.module.Class.method`` in grpo/."""
    documents = [(ROOT / "docs" / f"{name}.md").read_text() for name in ("algorithm", "library")]
    found = 0
    for dotted in re.findall(r"`([a-z_]+\.[A-Za-z_][\w.]*)", "\n".join(documents)):
        room = dotted.split(".")[0]
        is_room = (ROOT / "grpo" / f"{room}.py").exists() or (
            ROOT / "grpo" / room / "__init__.py"
        ).exists()
        # data.Schedule is a class, data.dataset a key
        if is_room and dotted not in {
            *keys_of(Config),
            "config.yaml",
        }:
            pkgutil.resolve_name(f"grpo.{dotted}")
            found += 1
    assert found > 30


def without_code(text: str) -> str:
    """The text without its code blocks."""
    return re.sub(
        r"^```.*?^```$",
        "",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def test_the_readme_is_short_and_documents_are_narrow():
    """Prose is at most 140 wide, a cell of a table 200."""
    for path in DOCS:
        lines = without_code(path.read_text()).splitlines()
        prose = [line for line in lines if not line.startswith(("|", "  <img"))]
        cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")]
        assert all(
            len(line) <= 140 for line in prose if "](" not in line or len(line.split()) > 1
        ), path.name
        assert all(len(cell) <= 200 for cell in cells), path.name
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
