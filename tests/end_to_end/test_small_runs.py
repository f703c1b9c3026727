"""Runs that are killed, filled up, poisoned or continued from elsewhere; and settings that must
change nothing, or exactly one thing."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, run_trainer, small_run
from outputs import assert_same_weights, lines, states

from grpo.telemetry.samples import read_samples


@pytest.mark.slow
def test_continued_from_an_earlier_checkpoint_a_run_keeps_what_it_saves(tmp_path, random_model):
    """The checkpoints after the chosen one, broken or of another branch, do not push out the new
    ones."""
    arguments = [
        *small_run(random_model, tmp_path),
        "checkpoint.save_steps=1",
        "checkpoint.keep=2",
    ]
    run_trainer(*arguments, "optim.max_steps=4")
    with open(tmp_path / "checkpoint-4" / "model.safetensors", "r+b") as file:
        file.truncate(100)
    again = [*arguments, "optim.max_steps=5"]
    done = run_trainer(*again)
    assert "warning: skipping" in done.stdout
    assert "checkpoint-4: model.safetensors" in done.stdout
    assert f"resuming  {tmp_path}/checkpoint-3" in done.stdout
    assert {p.name for p in tmp_path.glob("checkpoint-*")} == {
        "checkpoint-4",
        "checkpoint-5",
    }
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(tmp_path, random_model):
    arguments = [
        f"reward.functions=['{ROOT}/tests/rewards_for_tests.py:huge']",
        "algorithm.scale=none",
        "optim.max_steps=2",
        "eval.before_training=false",
        "optim.weight_decay=0.1",
    ]
    done = run_trainer(*small_run(random_model, tmp_path / "run"), *arguments, ranks=2)
    assert done.stdout.count("warning: a gradient is not finite") == 2
    assert_same_weights(random_model, tmp_path / "run" / "checkpoint-2")
    assert [line["skipped_updates"] for line in lines(tmp_path / "run")] == [1, 1], (
        "updates, not ranks"
    )


@pytest.mark.slow
def test_gradient_checkpointing_changes_memory_alone(tmp_path, random_model):
    for name in ("false", "true"):
        run_trainer(
            *small_run(random_model, tmp_path / name),
            f"model.gradient_checkpointing={name}",
            "optim.max_steps=2",
        )
    assert_same_weights(tmp_path / "false" / "checkpoint-2", tmp_path / "true" / "checkpoint-2")
    assert lines(tmp_path / "false") == lines(tmp_path / "true")


@pytest.mark.slow
def test_the_reference_follows_the_policy_when_asked(tmp_path, random_model):
    kl = {}
    for every in (1, 2):
        output = tmp_path / str(every)
        run_trainer(
            *small_run(random_model, output),
            f"algorithm.ref_sync_steps={every}",
            "optim.max_steps=4",
            "eval.before_training=false",
        )
        kl[every] = [line["kl"] for line in lines(output)]
        assert any(name.startswith("reference/") for name in states(output / "checkpoint-4"))
    assert kl[1] == [0.0] * 4, "before each update the policy is the reference"
    assert kl[2][0] == kl[2][2] == 0.0
    assert kl[2][1] > 0
    assert kl[2][3] > 0


@pytest.mark.slow
def test_dynamic_sampling_gives_up_where_nothing_differs(tmp_path, random_model):
    options = [
        f"reward.functions=['{ROOT}/tests/rewards_for_tests.py:constant']", "algorithm.dynamic_sampling=true",
        "algorithm.beta=0",
        "optim.max_steps=2", "eval.before_training=false",
    ]  # fmt: skip
    run_trainer(*small_run(random_model, tmp_path / "run"), *options, ranks=2, timeout=120)
    assert [line["frac_reward_zero_std"] for line in lines(tmp_path / "run")] == [1.0, 1.0]
    assert_same_weights(random_model, tmp_path / "run" / "checkpoint-2")


def test_what_a_run_leaves_behind(tmp_path, random_model):
    done = run_trainer(
        *small_run(random_model, tmp_path / "run"),
        "eval.every=2",
        "logging.every=3",
        "logging.log_completions=3",
    )
    shown = [line.split("  ")[0] for line in done.stdout.splitlines() if "/5  " in line]
    assert shown == ["eval 0/5", "eval 2/5", "step 3/5", "eval 4/5", "step 5/5", "eval 5/5"]
    assert done.stdout.index("before") < done.stdout.index("\nsaved ")
    written = lines(tmp_path / "run")
    assert [line["step"] for line in written] == [0, 1, 2, 3, 4, 5]
    assert [line["step"] for line in written if "eval/greedy_accuracy" in line] == [
        0,
        2,
        4,
        5,
    ]
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        ".lock",
        "config.yaml",
        "metrics.jsonl",
        "intervals.jsonl",
        "starts.jsonl",
        "completions",
        "checkpoint-5",
    }
    assert (
        yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["rollout"]["num_generations"]
        == 4
    )
    files = sorted((tmp_path / "run" / "completions").iterdir())
    assert [path.name for path in files] == ["step_000003.parquet", "step_000005.parquet"]
    records = read_samples(files[0])
    assert len(records) == 3
    assert {record["step"] for record in records} == {3}


@pytest.mark.slow
def test_a_substitute_that_no_reward_scores_does_not_stop_the_run(tmp_path, random_model):
    """Dynamic sampling asks for another problem in place of the second group; a reward that fails
    on that alone is no broken reward."""
    (tmp_path / "picky.py").write_text(
        "def scores(prompts, completions, **columns):\n"
        "    if len(completions) != 8:\n"
        "        raise ValueError('no answer to compare with')\n"
        "    return [0, 1, 2, 3, 5, 5, 5, 5]\n"
    )
    rows = [{"prompt": f"{i}+1="} for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [
        f"data.dataset={tmp_path}/rows.jsonl", f"reward.functions=['{tmp_path}/picky.py:scores']", "algorithm.beta=0",
        "rollout.prompts_per_step=2", "algorithm.dynamic_sampling=true",
        "optim.max_steps=2",
    ]  # fmt: skip
    run_trainer(*small_run(random_model, tmp_path / "run"), *options, "eval.before_training=false")
    for line in lines(tmp_path / "run"):
        assert (line["rewards/scores/errors"], line["frac_unscorable"], line["reward"]) == (
            12,
            0.5,
            1.5,
        )
        assert line["grad_norm"] > 0


TRL_REWARDS = """
import re

def answer_of(text):
    return text.rsplit("<answer>")[-1].split("</answer>")[0].strip()

def correctness(prompts, completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    assert {prompt[0]["role"] for prompt in prompts} == {"system"} and prompts[0][-1]["content"].endswith("=")
    print("question", prompts[0][-1]["content"], "extracted", answer_of(texts[0]))
    return [2.0 if answer_of(text) == gold else 0.0 for text, gold in zip(texts, answer)]

def form(completions, **kwargs):
    pattern = r"<reasoning>.*</reasoning>\\s*<answer>.*</answer>"
    found = [re.search(pattern, completion[0]["content"], re.DOTALL) for completion in completions]
    return [0.5 if match else 0.0 for match in found]

def digits(completions, completion_ids, log_metric, log_extra, trainer_state, **kwargs):
    counts = [sum(c.isdigit() for c in completion[0]["content"]) for completion in completions]
    log_metric("tokens_seen_by_reward", sum(map(len, completion_ids)) / len(completions))
    log_metric("reported_step", trainer_state.global_step + trainer_state.epoch / 1000 + trainer_state.max_steps * 1000)
    if "0+1=" in kwargs["question"]:
        log_metric("on_one_rank", 7)
    log_metric("loss", 7)
    log_extra("digits", counts)
    log_extra("reward", counts)
    log_extra("note", [{"digits": count} for count in counts])
    return [count / 100 for count in counts]
"""


@pytest.mark.slow
def test_rewards_of_a_trl_script_run_unchanged(tmp_path, random_model):
    """Rewards that index messages, on a text column with a system prompt; what they log arrives,
    also if one rank alone logs it."""
    (tmp_path / "mine.py").write_text(TRL_REWARDS)
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    for row in rows:
        row["text"] = row["question"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ", ".join(f"'{tmp_path}/mine.py:{name}'" for name in ("correctness", "form", "digits"))
    arguments = [
        f"data.dataset={tmp_path}/d.jsonl", "data.prompt_column=text", "data.answer_column=answer",
        "data.system_prompt=Answer as <reasoning>..</reasoning><answer>..</answer>", f"reward.functions=[{names}]",
        "optim.max_steps=2", "logging.log_completions=3", "rollout.prompts_per_step=4", "data.eval_split=train[:2]",
    ]  # fmt: skip
    done = run_trainer(*small_run(random_model, tmp_path / "run"), *arguments, ranks=2)
    assert "question" in done.stderr
    assert "warning" not in done.stderr
    first, second = lines(tmp_path / "run")[1:]
    assert first["rewards/digits/errors"] == 0 == first["rewards/correctness/errors"]
    assert first["logged/tokens_seen_by_reward"] == pytest.approx(first["completions/mean_length"])
    assert [first["logged/reported_step"], second["logged/reported_step"]] == pytest.approx(
        [2000.0, 2001.0005]
    )
    assert first["logged/loss"] == 7.0 != first["loss"], "a name of the trainer's"
    assert {line.get("logged/on_one_rank") for line in (first, second)} == {7.0, None}
    for record in read_samples(tmp_path / "run" / "completions" / "step_000001.parquet"):
        assert record["prompt"].endswith("+1="), "text as in the row"
        count = sum(c.isdigit() for c in record["completion"])
        assert json.loads(record["logged"]) == {
            "digits": count,
            "reward": count,
            "note": f"{{'digits': {count}}}",
        }
        assert record["rewards"]["digits"] == pytest.approx(count / 100)


@pytest.mark.slow
def test_the_bare_command_on_two_ranks(tmp_path):
    """Word for word, without any other argument: the demo. It is stopped after two steps, and saves
    them."""
    for name in ("train_grpo.py", "grpo", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = [
        str(Path(sys.executable).with_name("torchrun")),
        "--nproc_per_node=2",
        "train_grpo.py",
    ]
    output = tmp_path / "runs" / "tiny_arithmetic"
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        while run.poll() is None and (
            not (output / "metrics.jsonl").exists() or len(lines(output)) < 3
        ):
            time.sleep(0.1)
        run.terminate()
        printed = run.stdout.read()
    assert "config    configs/tiny_arithmetic.yaml, since there is no --config" in printed, printed
    assert ", 2 rank(s), 1 update(s); 150 steps" in printed
    assert "fp32 on cpu" in printed
    steps = [line["step"] for line in lines(output)]
    assert steps[:3] == [0, 1, 2]
    assert (output / f"checkpoint-{steps[-1]}" / "model.safetensors").exists()
