"""Builds the report: one HTML file that holds the runs as JSON and a script that shows them.

The text of completions is not trusted, and no HTML parser reads it: in the JSON every character that could end the
script element is escaped, the script fills text nodes only, and the page's Content Security Policy forbids the network
and any other script.
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
from grpo.report.read import RunData, evaluations, every_nth
from grpo.telemetry.hints import hints_for

SCRIPTS = ("base.js", "view.js", "charts.js", "curves.js", "headline.js", "samples.js", "tables.js", "main.js")
MAX_POINTS = 1500
"""Points of a curve; of longer runs only every n-th step is shown."""


def build_page(runs: Sequence[RunData], *, reload_s: int | None = None) -> str:
    """The whole file as ASCII text. An open page reloads its file every ``reload_s`` seconds; with None it does not."""
    names = _distinct([run.name for run in runs])
    data = {
        "generated": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "reload_s": reload_s,
        "notes": _differences(runs),
        "runs": [_run(name, run) for name, run in zip(names, runs, strict=True)],
    }
    style, script = _template("style.css"), "".join(_template(name) for name in SCRIPTS)
    script = f'(function () {{\n"use strict";\n{script}}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "TITLE": html.escape("".join(c if c.isprintable() else "?" for c in "GRPO: " + ", ".join(names))),
        "POLICY": f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'",
        "STYLE": style,
        "DATA": embed(data),
        "SCRIPT": script,
    }
    # Not str.format or repeated replace: a part may contain the name of another part, such as @@DATA@@.
    texts = _template("page.html").split("@@")
    assert len(texts) % 2 == 1
    whole = "".join(parts[text] if i % 2 else text for i, text in enumerate(texts))
    return whole.encode("ascii", "xmlcharrefreplace").decode("ascii")


def embed(data: Any) -> str:
    """JSON that is safe inside a script element: ASCII, without ``<``, ``>`` and ``&``."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _template(name: str) -> str:
    return (resources.files("grpo.report") / "template" / name).read_text(encoding="utf-8")


def _differences(runs: Sequence[RunData]) -> list[str]:
    """A note if the evaluations of the runs cannot be compared."""
    settings = [read.evaluation_settings(run) for run in runs if evaluations(run)]
    names = sorted(set().union(*settings))
    different = [name for name in names if any(found.get(name) != settings[0].get(name) for found in settings)]
    note = "The runs were evaluated differently, so these numbers do not compare"
    return [f"{note}: {', '.join(different)}."] if different else []


def _run(name: str, run: RunData) -> dict[str, Any]:
    steps = [line for line in run.metrics if "reward" in line]
    stride = math.ceil(len(steps) / MAX_POINTS) or 1
    thinned = every_nth(steps, stride)
    names = dict.fromkeys(key for line in steps for key in line if key != "step" and not key.startswith("eval/"))
    evaluated = evaluations(run)
    seconds = list(accumulate((line.get("step_time") or 0.0) + (line.get("time/eval") or 0.0) for line in steps))
    defaults = flat(Config().model_dump(mode="json"))
    config = defaults | run.config
    hints = hints_for(
        config["algorithm.baseline"],
        config["algorithm.scale"],
        config["algorithm.advantages"],
    )
    num_problems, rank = (run.starts or [{}])[-1].get("num_eval_problems"), run.config.get("lora.rank")
    subject = [run.config.get(key) for key in ("model.name_or_path", "data.dataset", "algorithm.name")]
    subject += [f"LoRA rank {rank}" if rank else None, f"{num_problems} evaluation problems" if num_problems else None]
    thinning = [f"Curves show every {stride}th of {len(steps)} steps."] if stride > 1 else []
    return {
        "name": name,
        "subject": " \u00b7 ".join(str(part) for part in subject if part),
        "status": "complete" if run.is_complete else "still running, or ended early",
        "last_step": run.metrics[-1]["step"] if run.metrics else 0,
        "seconds": seconds[-1] if seconds else 0.0,
        "steps": [line["step"] for line in thinned],
        "series": {key: [_short(line.get(key)) for line in thinned] for key in names},
        "clock": [_short(value) for value in every_nth(seconds, stride)],
        "eval_steps": [line["step"] for line in evaluated],
        "eval_series": {key: [line.get(key) for line in evaluated] for key in read.evaluation_names(run)},
        "comparison": read.before_and_after(run),
        "reward": read.reward_before_and_after(run),
        "config": {key: _as_text(value) for key, value in run.config.items()},
        "changed": [key for key, value in run.config.items() if defaults.get(key, ...) != value],
        "starts": [{str(key): _as_text(value) for key, value in start.items()} for start in run.starts],
        "hints": [[line["step"], hint] for line in steps for hint in hints.update(line)],
        "notes": run.notes + thinning,
        "samples": [_sample(record) for record in run.samples],
    }


def _sample(record: dict[str, Any]) -> dict[str, Any]:
    kept = {key: record.get(key) for key in ("step", "problem", "prompt", "answer", "completion", "length", "finished")}
    kept |= {key: _short(record.get(key)) for key in ("reward", "advantage")}
    kept["rewards"] = {key: _short(value) for key, value in record["rewards"].items()}
    kept["tokens"], kept["sampled"] = record.get("tokens"), record.get("sampled")
    for key in ("logprobs", "updated_logprobs", "ref_logprobs"):
        kept[key] = None if record.get(key) is None else [_short(value) for value in record[key]]
    return kept


def _short(value: Any) -> float | None:
    """Rounded to five digits: more than a curve can show, and a smaller file."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _distinct(names: Sequence[str]) -> list[str]:
    counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [name if count == 1 else f"{name} ({count})" for name, count in zip(names, counts, strict=True)]
