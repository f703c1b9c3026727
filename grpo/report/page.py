"""Build the report: one HTML file that holds the data of the runs as JSON, and a script that shows
the data.

The text of completions is not trusted, and is never parsed as HTML. In the JSON, every character
that could end the script element is escaped. The script fills text nodes only. The page's Content
Security Policy forbids the network and any other script.
"""

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
"""Files of the template that are joined, in this order, into the script of the page."""
MAX_POINTS = 1500
"""Largest number of points of a curve. In a run with more steps, curves show only every n-th
step."""
LOGPROB_FIELDS = ("logprobs", "updated_logprobs", "ref_logprobs")
"""Fields of a completion's record that hold one number per token."""
COPIED_FIELDS = (
    "step",
    "problem",
    "prompt",
    "answer",
    "completion",
    "length",
    "finished",
    "tokens",
)
"""Fields of a completion's record that the page holds unchanged."""


def build_page(runs: Sequence[RunData], *, reload_s: int | None) -> str:
    """Return the HTML file as ASCII text.

    Args:
        reload_s: seconds after which an open page reloads itself. None: it never reloads.
    """
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        # Runs may have the same name, for example with different seeds, but the page tells runs
        # apart by name.
        names = [f"{name} ({i})" for i, name in enumerate(names, 1)]
    run_entries = [_run_entry(run) | {"name": name} for name, run in zip(names, runs, strict=True)]
    data = {
        "generated": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "reload_s": reload_s,
        "notes": _comparison_notes(runs),
        "runs": run_entries,
    }

    # The Content Security Policy allows only the script with this hash. A browser runs no other
    # script, whatever a model wrote.
    script = "".join(map(_template, SCRIPTS))
    script = f'(function () {{\n"use strict";\n{script}}})();\n'
    digest = hashlib.sha256(script.encode()).digest()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{base64.b64encode(digest).decode()}'"
    )
    title = printable("GRPO: " + ", ".join(names))
    parts = {
        "TITLE": html.escape(title),
        "POLICY": policy,
        "STYLE": _template("style.css"),
        "DATA": embed(data),
        "SCRIPT": script,
    }

    # In the template the name of a part stands between two @@, so every second text is a name. With
    # repeated str.replace, a text such as @@DATA@@ inside a part would be replaced, too.
    texts = _template("page.html").split("@@")
    texts[1::2] = [parts[name] for name in texts[1::2]]
    page = "".join(texts)
    # Only the title can have characters that are not ASCII: the JSON and the template are ASCII.
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def embed(data: Any) -> str:
    """Return JSON that is safe inside a script element: ASCII, without ``<``, ``>`` and ``&``."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # In JSON these characters occur only inside strings, where an escape stands for the same
    # character.
    for character in "&<>":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _template(name: str) -> str:
    file = resources.files("grpo.report") / "template" / name
    return file.read_text(encoding="utf-8")


def _comparison_notes(runs: Sequence[RunData]) -> list[str]:
    """Return a note if the evaluations of the runs cannot be compared, else no note."""
    all_settings = [read.evaluation_settings(run) for run in runs if read.evaluations(run)]
    different = set()
    for settings in all_settings:
        first = all_settings[0]
        different |= {
            name for name in settings.keys() | first.keys() if settings.get(name) != first.get(name)
        }
    if not different:
        return []
    return [
        "The runs were evaluated differently, so these numbers do not compare: "
        f"{', '.join(sorted(different))}."
    ]


def _run_entry(run: RunData) -> dict[str, Any]:
    """Return a run in the form that the page's script reads."""
    # A line without a reward is an evaluation before the first step. Evaluations have separate
    # curves.
    steps = [line for line in run.metrics if "reward" in line]
    stride = math.ceil(len(steps) / MAX_POINTS)
    thinned = every_nth(steps, stride)
    series = {
        name: [_rounded(line.get(name)) for line in thinned]
        for name in read.metric_names(steps)
        if not name.startswith("eval/")
    }

    # The time is summed over all steps, also over steps that are left out of the curves.
    seconds = [(line.get("step_time") or 0.0) + (line.get("time/eval") or 0.0) for line in steps]
    clock = list(accumulate(seconds))

    # A hint is shown at the step where it first applies, so all steps are read in order.
    hints = Hints()
    hints_by_step = [[line["step"], hint] for line in steps for hint in hints.update(line)]

    config = run.config
    subject = [
        config.get("model.name_or_path"),
        config.get("data.dataset"),
        config.get("algorithm.name"),
    ]
    rank = config.get("lora.rank")
    if rank:
        subject.append(f"LoRA rank {rank}")
    if run.num_eval_problems:
        subject.append(f"{run.num_eval_problems} evaluation problems")

    notes = list(run.notes)
    if stride > 1:
        notes.append(f"Curves show every {stride}th of {len(steps)} steps.")

    # Evaluations are few, so their curves leave no points out.
    evaluated = read.evaluations(run)
    eval_series = {
        name: [line.get(name) for line in evaluated] for name in read.metric_names(evaluated)
    }

    # The page lists changed keys first. A key that has no default was written by another version,
    # and is listed as changed.
    default_config = Config().model_dump(mode="json")
    defaults = flat(default_config)
    changed = [key for key, value in config.items() if (key, value) not in defaults.items()]
    return {
        "subject": " \u00b7 ".join(map(str, filter(None, subject))),
        "status": "complete" if run.is_complete else "still running, or ended early",
        "last_step": run.metrics[-1]["step"] if run.metrics else 0,
        "seconds": sum(seconds),
        "steps": [line["step"] for line in thinned],
        "series": series,
        "clock": [_rounded(value) for value in every_nth(clock, stride)],
        "eval_steps": [line["step"] for line in evaluated],
        "eval_series": eval_series,
        "comparison": read.before_and_after(run),
        "reward": read.reward_before_and_after(run),
        "config": _as_texts(config),
        "changed": changed,
        "starts": [_as_texts(start) for start in run.starts],
        "hints": hints_by_step,
        "notes": notes,
        "samples": [_sample_entry(record) for record in run.samples],
    }


def _sample_entry(record: dict[str, Any]) -> dict[str, Any]:
    """Return a completion in the form that the page's script reads."""
    # These say which tokens the model sampled, and why the completion ended. Only runs with tools
    # or an environment write them.
    sample = {name: record.get(name) for name in ("sampled", "stop_reason")}
    for key in COPIED_FIELDS:
        sample[key] = record[key]
    for key in ("reward", "advantage"):
        sample[key] = _rounded(record[key])
    sample["rewards"] = {name: _rounded(value) for name, value in record["rewards"].items()}
    for key in LOGPROB_FIELDS:
        values = record[key]  # None for ref_logprobs without a reference model
        sample[key] = values and [_rounded(value) for value in values]
    return sample


def _rounded(value: float | None) -> float | None:
    """Return the value with five significant digits; None if the value was not computed."""
    # Five digits are more than a curve can show, and the file is smaller.
    return float(f"{value:.5g}") if is_computed(value) else None


def _as_texts(values: dict[str, Any]) -> dict[str, str]:
    """Return the values as text. A value of another type is written as JSON."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for key, value in values.items()
    }
