"""The report: complete, running, damaged and empty runs are read, and text of a run never becomes code of the page."""

import html.parser
import json

import pytest
from conftest import ROOT, small_run
from report.runs_for_tests import NASTY, write_run

import train_grpo
from grpo.commands.evaluation import main as evaluation_main
from grpo.report.__main__ import main
from grpo.report.figures import curve
from grpo.report.page import SCRIPTS, build_page, embed
from grpo.report.read import before_and_after, read_run, reward_before_and_after
from grpo.telemetry.records import record_start


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = read_run(write_run(tmp_path / "one"))
    assert [line["step"] for line in run.metrics] == list(range(13))
    assert run.config["rollout.num_generations"] == 8
    assert run.config["reward.functions"][0]["name"] == "accuracy"
    assert len(run.samples) == 6 * 7
    rows = {row["name"]: row for row in before_and_after(run)}
    assert rows["eval/greedy_accuracy"]["before"] == {"step": 0, "value": 0.25, "low": 0.175, "high": 0.343}
    assert rows["eval/mean_length"]["after"] == {"step": 12, "value": 18.0, "low": None, "high": None}, "none written"
    assert rows["eval/truncated"]["is_rate"] and not rows["eval/rewards/bonus"]["is_rate"]


def test_a_run_is_complete_with_the_checkpoint_of_its_last_step(tmp_path):
    folder = write_run(tmp_path / "one", steps=4, optim={"max_steps": 4})
    assert not read_run(folder).is_complete, "the checkpoint is not written yet"
    (folder / "checkpoint-4").mkdir()
    assert read_run(folder).is_complete
    for settings, is_complete in (("max_steps: 8", False), ("num_epochs: 1", False), ("num_epochs: 0.4", True)):
        (folder / "config.yaml").write_text(f"optim: {{{settings}}}")
        assert read_run(folder).is_complete == is_complete
    sides = reward_before_and_after(read_run(folder))  # each the mean of 2 steps
    assert [sides[side]["value"] for side in ("before", "after")] == pytest.approx([0.15, 0.35])


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


def test_the_command_takes_runs_without_a_step_and_nothing_else(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} is not a run: it has neither metrics.jsonl nor config.yaml\n"
    (tmp_path / "config.yaml").write_text("")
    assert read_run(tmp_path).config == {}
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    run = read_run(tmp_path)
    assert (run.metrics, run.samples, run.config) == ([], [], {"seed": 1})
    assert run.notes == ["No step has been written yet."]
    other = str(write_run(tmp_path / "other"))
    assert main([str(tmp_path), other, "--output", str(tmp_path / "new" / "both.html")]) == 0
    assert (tmp_path / "new" / "both.html").read_text().startswith("<!doctype html>")


def test_max_samples_keeps_evenly_spaced_steps_and_the_last(tmp_path):
    run = read_run(write_run(tmp_path / "one", steps=40), max_samples=50)
    steps = sorted({record["step"] for record in run.samples})
    assert steps[0] == 1 and steps[-1] == 39 and len(run.samples) <= 50 + 7
    assert "are shown" in run.notes[0]


def test_the_first_screen_names_the_run_and_says_where_evaluations_differ(tmp_path):
    def shown(*runs):
        page = build_page([read_run(run) for run in runs])
        start = page.index('id="data">') + len('id="data">')
        return json.loads(page[start : page.index("</script>", start)])

    one = write_run(tmp_path / "one", data={"dataset": "a.jsonl", "eval_dataset": "c.jsonl"}, lora={"rank": 4})
    data = shown(one)
    assert data["runs"][0]["subject"] == "builtin:tiny \u00b7 a.jsonl \u00b7 grpo \u00b7 LoRA rank 4"
    assert data["runs"][0]["changed"] == ["data.dataset", "data.eval_dataset", "lora.rank", "output_dir"]
    record_start(one, {"num_eval_problems": 512})
    assert shown(one)["runs"][0]["subject"].endswith(" \u00b7 512 evaluation problems")
    other = {"dataset": "b.jsonl", "max_train_samples": 3}
    same = write_run(tmp_path / "same", data=other | {"eval_dataset": "c.jsonl"}, seed=1, algorithm={"name": "dapo"})
    record_start(same, {"num_eval_problems": 512})
    assert shown(one, same)["notes"] == [], "the same problems"
    changes = {"eval_dataset": "c.jsonl", "eval_split": "test"}
    far = write_run(tmp_path / "far", data=other | changes, rollout={"max_completion_length": 99})
    record_start(far, {"num_eval_problems": 8})
    (note,) = shown(one, far)["notes"]
    assert note.endswith(": data.eval_split, eval.max_completion_length, number of problems.")


def test_the_text_of_a_model_stays_text(tmp_path):
    run = read_run(write_run(tmp_path / "one"))
    run.name = NASTY
    page = build_page([run, run])
    assert page.isascii()
    tags, parser = [], html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    parser.feed(page)
    names = [tag for tag, _ in tags]
    assert names.count("script") == 2 and "img" not in names
    fetched = [found[key] for _, found in tags for key in ("src", "href", "action", "data") if key in found]
    assert all(address.startswith("#") for address in fetched), "nothing is fetched"
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


def test_a_curve_has_a_gap_where_a_metric_was_not_computed(tmp_path):
    run = read_run(write_run(tmp_path / "one", steps=6))
    kl = curve(run, "kl")
    assert list(kl) == [1, 2, 3, 4, 5, 6] and [step for step in kl if kl[step] is None] == [5]
    assert curve(run, "entropy") == {}, "null in all steps"
    assert curve(run, "eval/greedy_accuracy") == {0: 0.25, 3: 0.5, 6: 0.75}, "no gap between evaluations"


def test_hints_of_steps_without_some_numbers(tmp_path):
    """Null in all but the first steps is neither an error nor a reason to say nothing."""
    folder = write_run(tmp_path / "one", steps=0)
    lines = [{"step": step, "reward": None, "kl": 9.0 if step < 3 else None, "entropy": None} for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = build_page([read_run(folder)])
    start = page.index('id="data">') + len('id="data">')
    (found,) = json.loads(page[start : page.index("</script>", start)])["runs"]
    assert [step for step, _ in found["hints"]] == [3] and "KL" in found["hints"][0][1]
    assert found["series"]["kl"] == [9.0, 9.0, *[None] * 6]


@pytest.mark.slow
def test_figures_for_a_paper(tmp_path):
    pytest.importorskip("matplotlib")
    from PIL import Image

    from grpo.report.figures import write_figures

    runs = [read_run(write_run(tmp_path / name, steps=5)) for name in ("one", "two")]
    written = write_figures(runs, tmp_path / "figures")
    assert {path.stem for path in written} == {
        "reward", "kl", "completions_mean_length", "rewards_accuracy_mean", "eval_greedy_accuracy",
    }  # fmt: skip
    images = [Image.open(path) for path in written]
    assert all(len(image.convert("L").getcolors()) > 10 for image in images), "no figure is empty"
