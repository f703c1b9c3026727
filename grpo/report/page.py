"""Builds the report: one HTML file that holds the runs as JSON and a script that shows them.

The text of completions is not trusted, and no HTML parser reads it: in the JSON every character
that could end the script element is escaped, the script fills text nodes only, and the page's
Content Security Policy forbids the network and any other script."""

import base64
import hashlib
import html
import json
import math
import time
from collections.abc import Sequence
from importlib import resources
from itertools import accumulate
from typing import Any

from grpo.config import Config, flat
from grpo.report import read
from grpo.report.read import RunData, every_nth
from grpo.system import printable
from grpo.telemetry.hints import Hints
from grpo.telemetry.records import is_computed

SCRIPTS = (
    "base.js",
    "view.js",
    "charts.js",
    "curves.js",
    "headline.js",
    "samples.js",
    "tables.js",
    "main.js",
)
MAX_POINTS = 1500
"""Points of a curve; of longer runs only every n-th step is shown."""
LOGPROBS = (
    "logprobs",
    "updated_logprobs",
    "ref_logprobs",
)
SHOWN_AS_IT_IS = (
    "step",
    "problem",
    "prompt",
    "answer",
    "completion",
    "length",
    "finished",
    "tokens",
)
"""Fields of a completion's record."""


def build_page(
    runs: Sequence[RunData],
    *,
    reload_s: int | None = None,
) -> str:
    """The whole file as ASCII text. An open page reloads its file every ``reload_s`` seconds; with
    None it does not."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{name} ({i})" for i, name in enumerate(names, start=1)]
    shown = []
    for name, run in zip(names, runs, strict=True):
        shown.append(_run(run) | {"name": name})
    data = {
        "generated": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "reload_s": reload_s,
        "notes": _differences(runs),
        "runs": shown,
    }

    script = "".join(map(_template, SCRIPTS))
    script = f'(function () {{\n"use strict";\n{script}}})();\n'
    digest = hashlib.sha256(script.encode()).digest()
    digest = base64.b64encode(digest).decode()
    title = printable("GRPO: " + ", ".join(names))
    parts = {
        "TITLE": html.escape(title),
        "POLICY": f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'",
        "STYLE": _template("style.css"),
        "DATA": embed(data),
        "SCRIPT": script,
    }
    # Not str.format or repeated replace: a part may contain the name of another part, such as
    # @@DATA@@.
    texts = _template("page.html").split("@@")
    texts[1::2] = [parts[name] for name in texts[1::2]]
    whole = "".join(texts)
    return whole.encode("ascii", "xmlcharrefreplace").decode("ascii")


def embed(data: Any) -> str:
    """JSON that is safe inside a script element: ASCII, without ``<``, ``>`` and ``&``."""
    text = json.dumps(
        data,
        allow_nan=False,
        separators=(",", ":"),
    )
    for character in "&<>":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _template(name: str) -> str:
    file = resources.files("grpo.report") / "template" / name
    return file.read_text(encoding="utf-8")


def _differences(runs: Sequence[RunData]) -> list[str]:
    """A note if the evaluations of the runs cannot be compared."""
    settings = [read.evaluation_settings(run) for run in runs if read.evaluations(run)]
    different = set()
    for one in settings:
        for name in one.keys() | settings[0].keys():
            if one.get(name) != settings[0].get(name):
                different.add(name)
    if not different:
        return []
    listed = ", ".join(sorted(different))
    return [f"The runs were evaluated differently, so these numbers do not compare: {listed}."]


def _run(run: RunData) -> dict[str, Any]:
    steps = [line for line in run.metrics if "reward" in line]
    stride = math.ceil(len(steps) / MAX_POINTS)
    thinned = every_nth(steps, stride)
    names = {}
    for line in steps:
        names |= line
    series = {}
    for name in names:
        if name != "step" and not name.startswith("eval/"):
            series[name] = [_short(line.get(name)) for line in thinned]
    durations = []
    for line in steps:
        evaluation = line.get("time/eval") or 0.0
        durations.append(line["step_time"] + evaluation if line.get("step_time") else evaluation)
    seconds = list(accumulate(durations))

    hints = Hints()
    given = []
    for line in steps:
        for hint in hints.update(line):
            given.append([line["step"], hint])

    defaults = flat(Config().model_dump(mode="json"))
    subject = [
        run.config.get("model.name_or_path"),
        run.config.get("data.dataset"),
        run.config.get("algorithm.name"),
    ]
    rank = run.config.get("lora.rank")
    if rank:
        subject.append(f"LoRA rank {rank}")
    num_problems = run.starts[-1].get("num_eval_problems") if run.starts else None
    if num_problems:
        subject.append(f"{num_problems} evaluation problems")

    notes = list(run.notes)
    if stride > 1:
        notes.append(f"Curves show every {stride}th of {len(steps)} steps.")
    evaluated = read.evaluations(run)
    eval_series = {}
    for name in read.evaluation_names(run):
        eval_series[name] = [line.get(name) for line in evaluated]
    changed = []
    for key, value in run.config.items():
        if key not in defaults or defaults[key] != value:
            changed.append(key)
    return {
        "subject": " \u00b7 ".join(map(str, filter(None, subject))),
        "status": "complete" if run.is_complete else "still running, or ended early",
        "last_step": run.metrics[-1]["step"] if run.metrics else 0,
        "seconds": seconds[-1] if seconds else 0.0,
        "steps": [line["step"] for line in thinned],
        "series": series,
        "clock": [_short(value) for value in every_nth(seconds, stride)],
        "eval_steps": [line["step"] for line in evaluated],
        "eval_series": eval_series,
        "comparison": read.before_and_after(run),
        "reward": read.reward_before_and_after(run),
        "config": _texts(run.config),
        "changed": changed,
        "starts": [_texts(start) for start in run.starts],
        "hints": given,
        "notes": notes,
        "samples": [_sample(record) for record in run.samples],
    }


def _sample(record: dict[str, Any]) -> dict[str, Any]:
    """A completion as the page shows it."""
    sample = {"sampled": record.get("sampled")}
    for key in SHOWN_AS_IT_IS:
        sample[key] = record[key]
    for key in ("reward", "advantage"):
        sample[key] = _short(record[key])
    sample["rewards"] = {name: _short(value) for name, value in record["rewards"].items()}
    for key in LOGPROBS:
        values = record[key]
        sample[key] = values and [_short(value) for value in values]
    return sample


def _short(value: float | None) -> float | None:
    """Rounded to five digits: more than a curve can show, and a smaller file."""
    return float(f"{value:.5g}") if is_computed(value) else None


def _texts(values: dict[str, Any]) -> dict[str, str]:
    """The values as text."""
    texts = {}
    for key, value in values.items():
        texts[key] = value
        if not isinstance(value, str):
            texts[key] = json.dumps(value, ensure_ascii=False, default=str)
    return texts
