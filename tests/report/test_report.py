"""The report: complete, running, damaged and empty runs are read, and text of a run never becomes
code of the page."""

import html.parser
import json

import pytest
from report.runs_for_tests import NASTY, write_run

from grpo.report.__main__ import main
from grpo.report.page import build_page, embed
from grpo.report.read import before_and_after, read_run, reward_before_and_after
from grpo.telemetry.records import append_line


def data_of(*runs):
    """What the page of some runs shows."""
    page = build_page(runs, reload_s=None)
    start = page.index('id="data">') + len('id="data">')
    return json.loads(page[start : page.index("</script>", start)])


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = read_run(write_run(tmp_path / "one"))
    assert [line["step"] for line in run.metrics] == list(range(13))
    assert run.config["reward.functions"][0]["name"] == "accuracy"
    assert len(run.samples) == 6 * 7
    rows = {row["name"]: row for row in before_and_after(run)}
    assert rows["eval/greedy_accuracy"]["before"] == {
        "step": 0,
        "value": 0.25,
        "low": 0.175,
        "high": 0.343,
    }
    assert rows["eval/mean_length"]["after"] == {
        "step": 12,
        "value": 18.0,
        "low": None,
        "high": None,
    }, "none written"
    sides = reward_before_and_after(run)  # each the mean of 6 steps
    assert sides["before"]["value"] == pytest.approx(0.35)
    assert sides["after"]["value"] == pytest.approx(0.95)


def test_a_run_is_complete_with_the_checkpoint_of_its_last_step(tmp_path):
    folder = write_run(tmp_path / "one", steps=4, optim={"max_steps": 4})
    assert not read_run(folder).is_complete, "the checkpoint is not written yet"
    (folder / "checkpoint-4").mkdir()
    assert read_run(folder).is_complete
    for settings, is_complete in (("num_epochs: 1", False), ("num_epochs: 0.4", True)):
        (folder / "config.yaml").write_text(f"optim: {{{settings}}}")
        assert read_run(folder).is_complete == is_complete


def test_a_running_or_damaged_run_is_read_as_far_as_possible(tmp_path):
    folder = write_run(tmp_path / "one", steps=40)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('not json\n{"step": 3, "reward": NaN, "kl": null}\n{"step": 41, "rew')
    (folder / "completions" / "step_000039.parquet").write_bytes(b"cut")
    run = read_run(folder, max_samples=30)
    assert [line["step"] for line in run.metrics] == list(range(41)), (
        "the last line is not complete yet"
    )
    assert run.metrics[3] == {"step": 3, "reward": None, "kl": None}, "the later one counts"
    assert (
        "steps are shown" in run.notes[0]
        and "step_000039.parquet could not be read" in run.notes[1]
    )
    assert len({record["step"] for record in run.samples}) == 9
    assert data_of(run)["runs"][0]["series"]["kl"][2:5] == [None, 0.04, None]


def test_the_command_takes_runs_without_a_step_and_nothing_else(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "is not a run: it has neither metrics.jsonl nor config.yaml" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    page = tmp_path / "new" / "both.html"
    assert main([str(tmp_path), str(tmp_path), "--output", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")


def test_the_first_screen_names_the_run_and_says_where_evaluations_differ(tmp_path):
    def run(name, num_problems, data, **config):
        data = {"eval_dataset": "c.jsonl"} | data
        folder = write_run(tmp_path / name, data=data, **config)
        append_line(folder / "starts.jsonl", {"num_eval_problems": num_problems})
        return read_run(folder)

    one = run("one", 512, {"dataset": "a.jsonl"}, lora={"rank": 4})
    shown = data_of(one)["runs"][0]
    assert (
        shown["subject"] == "builtin:tiny · a.jsonl · grpo · LoRA rank 4 · 512 evaluation problems"
    )
    assert shown["changed"] == ["data.dataset", "data.eval_dataset", "lora.rank", "output_dir"]
    same = run("same", 512, {"dataset": "b.jsonl", "max_train_samples": 3}, seed=1)
    assert data_of(one, same)["notes"] == [], "the same problems"
    far = run("far", 8, {"eval_split": "test"}, rollout={"max_completion_length": 99})
    (note,) = data_of(one, far)["notes"]
    assert note.endswith(": data.eval_split, eval.max_completion_length, number of problems.")


def test_the_text_of_a_model_stays_text(tmp_path):
    run = read_run(write_run(tmp_path / "one"))
    run.name = NASTY
    page = build_page([run, run], reload_s=None)
    assert page.isascii()
    tags = []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    parser.feed(page)
    names = [tag for tag, _ in tags]
    assert names.count("script") == 2 and "img" not in names
    for _, attributes in tags:
        for key in ("src", "href", "action", "data"):
            assert attributes.get(key, "#").startswith("#"), "nothing is fetched"
    shown = data_of(run, run)["runs"]
    assert shown[0]["samples"][1]["completion"] == f"it is 2 {NASTY}"
    assert shown[1]["name"] == NASTY + " (2)"
    assert embed("</script>&") == '"\\u003c/script\\u003e\\u0026"'
