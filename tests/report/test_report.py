"""The report: complete, running, damaged and empty runs are read, and text of a run never becomes code of the page."""

import html.parser
import json

import pytest
from conftest import ROOT, small_run
from report.runs_for_tests import NASTY, write_run

import train_grpo
from grpo.commands.evaluation import main as evaluation_main
from grpo.report.__main__ import main
from grpo.report.page import SCRIPTS, build_page, embed
from grpo.report.read import before_and_after, read_run, reward_before_and_after


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = read_run(write_run(tmp_path / "one"))
    assert run.name == "one"
    assert [line["step"] for line in run.metrics] == list(range(13))
    assert run.config["rollout.num_generations"] == 8
    assert run.config["reward.functions"][0]["name"] == "accuracy"
    assert len(run.samples) == 6 * 7
    assert run.notes == [] and not run.is_complete
    rows = {row["name"]: row for row in before_and_after(run)}
    assert rows["eval/greedy_accuracy"]["before"] == {"step": 0, "value": 0.25, "low": 0.175, "high": 0.343}
    assert rows["eval/mean_length"]["after"] == {"step": 12, "value": 18.0, "low": None, "high": None}, "none written"
    assert rows["eval/truncated"]["after"]["low"] is None, "the evaluation had no interval (NaN)"
    assert [name for name, row in rows.items() if not row["is_rate"]] == [
        "eval/mean_length", "eval/greedy_mean_length", "eval/rewards/penalty", "eval/rewards/bonus",
    ]  # fmt: skip


def test_a_run_is_complete_with_the_checkpoint_of_its_last_step(tmp_path):
    folder = write_run(tmp_path / "one", steps=4, optim={"max_steps": 4})
    assert not read_run(folder).is_complete, "the checkpoint is not written yet"
    (folder / "checkpoint-4").mkdir()
    assert read_run(folder).is_complete
    for settings in ("optim: {max_steps: 8}", "optim: {num_epochs: 1}"):
        (folder / "config.yaml").write_text(settings)
        assert not read_run(folder).is_complete, "a checkpoint on the way"
    (folder / "config.yaml").write_text("optim: {num_epochs: 0.4}")
    assert read_run(folder).is_complete
    assert reward_before_and_after(read_run(folder)) == {
        "name": "reward", "label": "reward, mean of 2 steps", "is_rate": False,
        "before": {"first": 1, "step": 2, "value": pytest.approx(0.15), "low": None, "high": None},
        "after": {"first": 3, "step": 4, "value": pytest.approx(0.35), "low": None, "high": None},
    }  # fmt: skip


def test_the_report_and_the_evaluation_command_show_the_same_intervals(tmp_path, random_model):
    run = tmp_path / "run"
    arguments = [*small_run(random_model, run), "eval.num_samples=3", "eval.temperature=1.0", "optim.max_steps=1"]
    assert train_grpo.main([*arguments, "runtime.threads_per_rank=1"]) == 0
    assert evaluation_main([f"--model={run}/checkpoint-1", *arguments, "runtime.threads_per_rank=1"]) == 0
    (model,) = json.loads((run / "evaluation.json").read_text())["models"]
    sides = {row["name"]: row["after"] for row in before_and_after(read_run(run))}
    for name, expected in model["metrics"].items():
        assert {key: sides[name][key] for key in ("value", "low", "high")}.items() <= expected.items()


def test_a_running_or_damaged_run_is_read_as_far_as_possible(tmp_path):
    lines = ["not json\n", '{"step": 3, "reward": NaN}\n', '{"step": 13, "rew']
    folder = write_run(tmp_path / "one", lines=lines)
    (folder / "completions" / "step_000003.parquet").write_bytes(b"cut")
    (folder / "config.yaml").write_text("a: [")
    (folder / "run.json").write_text('{"starts": ')
    run = read_run(folder)
    assert [line["step"] for line in run.metrics] == list(range(13)), "the last line is not complete yet"
    assert run.metrics[3] == {"step": 3, "reward": None}, "the later one counts"
    assert not run.is_complete
    assert len(run.samples) == 5 * 7
    assert run.notes == ["config.yaml could not be read.", "completions/step_000003.parquet could not be read."]
    assert run.starts == []
    build_page([run])


def test_a_run_without_a_step(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    run = read_run(tmp_path)
    assert (run.metrics, run.samples, run.config) == ([], [], {"seed": 1})
    assert run.notes == ["No step has been written yet."]
    build_page([run])
    (tmp_path / "metrics.jsonl").write_text("")
    build_page([read_run(tmp_path)])


def test_the_command_writes_a_file_or_prints_one_line_about_the_error(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    expected = f"error: {tmp_path} is not a run: it has neither metrics.jsonl nor config.yaml\n"
    assert capsys.readouterr().err == expected
    assert not list(tmp_path.iterdir())
    one, two = (str(write_run(tmp_path / name)) for name in ("one", "two"))
    assert main([one]) == 0
    assert (tmp_path / "one" / "report.html").read_text().startswith("<!doctype html>")
    assert main([one, two, "--output", str(tmp_path / "new" / "both.html")]) == 0
    assert "both.html: 2 run(s)" in capsys.readouterr().out


def test_max_samples_keeps_evenly_spaced_steps_and_the_last(tmp_path):
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


def test_the_text_of_a_model_stays_text(tmp_path):
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


def test_scripts_are_ascii_and_never_parse_text_as_html():
    for name in SCRIPTS:
        text = (ROOT / "grpo" / "report" / "template" / name).read_text(encoding="ascii")
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch(", "Function("):
            assert way not in text, f"{way} in {name}"


@pytest.mark.slow
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
            assert len(image.convert("L").getcolors()) > 10, "the figure is not empty"
