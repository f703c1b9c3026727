"""The report: what is read of a run that is whole, going on, damaged or empty; and that its text cannot become the page's code."""

import html.parser
import json
import math

import pytest
from conftest import ROOT
from report.runs_for_tests import NASTY, write_run

from grpo.report.__main__ import main
from grpo.report.page import SCRIPTS, build_page, embed
from grpo.report.read import before_and_after, read_run, wilson


def test_wilson_interval():
    # 8 of 10: (0.8 + 3.8415 / 20 +- 1.96 sqrt(0.016 + 3.8415 / 400)) / (1 + 3.8415 / 10)
    assert wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0.0, 100) == pytest.approx((0.0, 0.03699), abs=1e-4)
    assert wilson(1.0, 100) == pytest.approx((1 - 0.03699, 1.0), abs=1e-4)
    assert all(math.isnan(value) for value in wilson(0.5, 0))


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = read_run(write_run(tmp_path / "one"))
    assert run.name == "one"
    assert [line["step"] for line in run.metrics] == list(range(13))
    assert run.config["rollout.num_generations"] == 8
    assert run.config["reward.functions"][0]["name"] == "accuracy"
    assert len(run.samples) == 6 * 7
    assert run.notes == []
    rows = {row["name"]: row for row in before_and_after(run)}
    accuracy, length = rows["eval/greedy_accuracy"], rows["eval/mean_length"]
    assert accuracy["before"] == {"step": 0, "value": 0.25, "low": wilson(0.25, 100)[0], "high": wilson(0.25, 100)[1]}
    assert accuracy["after"]["value"] == 0.75
    assert length["after"] == {"step": 12, "value": 18.0, "low": None, "high": None}
    assert rows["eval/rewards/bonus"]["after"] == {"step": 12, "value": 0.75, "low": None, "high": None}, "of any range"
    assert [name for name, row in rows.items() if not row["is_rate"]] == [
        "eval/mean_length", "eval/greedy_mean_length", "eval/rewards/penalty", "eval/rewards/bonus",
    ]  # fmt: skip


def test_a_run_that_is_going_on_or_damaged_is_read_as_far_as_it_goes(tmp_path):
    lines = ["not json\n", '{"step": 3, "reward": NaN}\n', '{"reward": 1}\n', "[1]\n", '{"step": 13, "rew']
    folder = write_run(tmp_path / "one", lines=lines)
    (folder / "completions" / "step_000003.parquet").write_bytes(b"cut")
    (folder / "config.yaml").write_text("a: [")
    (folder / "run.json").write_text('{"starts": 5}')
    run = read_run(folder)
    assert [line["step"] for line in run.metrics] == list(range(13)), "the last line has no end yet"
    assert run.metrics[3] == {"step": 3, "reward": None}, "the later one counts"
    assert not run.is_complete
    assert len(run.samples) == 5 * 7
    assert run.notes == [
        "3 line(s) of metrics.jsonl could not be read.", "config.yaml could not be read.", "1 file(s) of completions could not be read.",
    ]  # fmt: skip
    assert before_and_after(run)[0]["after"]["low"] is None, "nothing says how many problems there were"
    build_page([run])


def test_a_run_that_has_only_begun(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    run = read_run(tmp_path)
    assert (run.metrics, run.samples, run.config) == ([], [], {"seed": 1})
    assert run.notes == ["No step has been written yet."]
    build_page([run])
    (tmp_path / "metrics.jsonl").write_text("")
    build_page([read_run(tmp_path)])


def test_the_command_writes_a_file_or_refuses_in_one_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    said = f"error: {tmp_path} is not a run: it has neither metrics.jsonl nor config.yaml\n"
    assert capsys.readouterr().err == said
    assert not list(tmp_path.iterdir())
    one, two = (str(write_run(tmp_path / name)) for name in ("one", "two"))
    assert main([one]) == 0
    assert (tmp_path / "one" / "report.html").read_text().startswith("<!doctype html>")
    assert main([one, two, "--output", str(tmp_path / "new" / "both.html")]) == 0
    assert "both.html: 2 run(s)" in capsys.readouterr().out


def test_few_samples_are_taken_evenly_and_from_the_end_too(tmp_path):
    run = read_run(write_run(tmp_path / "one", steps=40), max_samples=50)
    steps = sorted({record["step"] for record in run.samples})
    assert steps[0] == 1 and steps[-1] == 39 and len(run.samples) <= 50 + 7
    assert "are shown" in run.notes[0]


class Outline(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.addresses = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action", "data")]


def test_the_text_of_a_model_cannot_leave_its_place(tmp_path):
    run = read_run(write_run(tmp_path / "one"))
    run.name = NASTY
    page = build_page([run, run])
    assert page.isascii()
    outline = Outline()
    outline.feed(page)
    assert outline.tags.count("script") == 2
    assert "img" not in outline.tags
    assert all(address.startswith("#") for address in outline.addresses), "nothing is fetched"
    start = page.index('id="data">') + len('id="data">')
    data = json.loads(page[start : page.index("</script>", start)])
    nasty = NASTY.replace("\ud800", "?")
    assert data["runs"][0]["samples"][1]["completion"] == f"it is 2 {nasty}"
    assert data["runs"][1]["name"] == NASTY + " (2)"
    assert embed("</script>&") == '"\\u003c/script\\u003e\\u0026"'


def test_scripts_are_ascii_and_make_no_html_of_text():
    for name in SCRIPTS:
        text = (ROOT / "grpo" / "report" / "template" / name).read_text(encoding="ascii")
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch(", "Function("):
            assert way not in text, f"{way} in {name}"


def test_figures_for_a_paper(tmp_path):
    pytest.importorskip("matplotlib")
    from PIL import Image

    from grpo.report.figures import write_figures

    runs = [read_run(write_run(tmp_path / name, steps=5)) for name in ("one", "two")]
    written = write_figures(runs, tmp_path / "figures")
    assert {path.stem for path in written} == {
        "reward", "kl", "completions_mean_length", "rewards_accuracy_mean", "eval_greedy_accuracy", "before_after",
    }  # fmt: skip
    for path in written:
        with Image.open(path) as image:
            assert min(image.size) >= 600
            assert len(image.convert("L").getcolors()) > 10, "something is drawn"
