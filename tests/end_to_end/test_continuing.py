"""What a continued run takes from its checkpoint, and what not: other settings, folders, restarts
by torchrun."""

import json
import os
import re
import shutil

import pytest
from conftest import ROOT, run_trainer, small_run
from outputs import lines, states, weights
from safetensors.torch import save_file

from grpo.model import file_digest
from train_grpo import main


@pytest.fixture
def run(random_model, tmp_path, capfd):
    """Train in ``tmp_path/<folder>``; returns what was printed."""

    def train(folder: str, *options: str, code: int = 0) -> str:
        capfd.readouterr()
        settings = [
            "data.max_eval_samples=2",
            "checkpoint.save_steps=1",
            "checkpoint.keep=9",
            "algorithm.beta=0",
        ]
        assert main([*small_run(random_model, tmp_path / folder), *settings, *options]) == code
        return capfd.readouterr().out

    return train


@pytest.mark.slow
def test_accepted_changes_of_the_optimizer_are_the_ones_used(run, tmp_path):
    """Moments stay, all else is the new configuration's: also where in the schedule the run is."""
    first = ["optim.lr_scheduler_type=linear", "optim.max_steps=3"]
    run("run", *first)
    assert [line["learning_rate"] for line in lines(tmp_path / "run")[1:]] == pytest.approx(
        [1e-3, 2e-3 / 3, 1e-3 / 3]
    )
    changed = [
        "optim.lr_scheduler_type=linear", "optim.max_steps=6", "optim.learning_rate=6e-3", "optim.weight_decay=0.1",
        "optim.betas=[0.8, 0.95]", "algorithm.num_minibatches=2",
    ]  # fmt: skip
    run("run", *changed, "checkpoint.accept_changes=true")
    # 12 updates in all, the 6 of the first three steps behind it; a step reports the mean of its two.
    assert [line["learning_rate"] for line in lines(tmp_path / "run")[4:]] == pytest.approx(
        [2.75e-3, 1.75e-3, 0.75e-3]
    )
    steps = {
        name: int(t)
        for name, t in states(tmp_path / "run" / "checkpoint-6").items()
        if name.endswith("/step")
    }
    assert set(steps.values()) == {3 + 6}


@pytest.mark.slow
def test_a_named_checkpoint_is_resumed_from_once(run, tmp_path):
    """The same command again continues what it began; in its own folder as in another."""
    run("run", "optim.max_steps=4")
    expected = lines(tmp_path / "run")
    for folder in ("branch", "run"):
        again = ["optim.max_steps=4", f"checkpoint.resume={tmp_path}/run/checkpoint-2"]
        assert "checkpoint-2 at step 2" in run(folder, *again)
        shutil.rmtree(tmp_path / folder / "checkpoint-4")  # as if preempted
        assert f"resuming  {tmp_path}/{folder}/checkpoint-3 at step 3" in run(folder, *again)
        assert lines(tmp_path / folder) == expected[-2 if folder == "branch" else 0 :]
        assert "already complete" in run(folder, *again)
    # At a constant rate, more steps need no accept_changes, and are those of the longer run.
    longer = ["optim.max_steps=5", f"checkpoint.resume={tmp_path}/run/checkpoint-2"]
    printed = run("branch", *longer)
    assert (
        f"resuming  {tmp_path}/branch/checkpoint-4 at step 4, learning rate 0.001; not compared: "
        in printed
    )
    assert "accept_changes" not in printed
    run("longer", "optim.max_steps=5")
    assert lines(tmp_path / "branch")[-1] == lines(tmp_path / "longer")[-1]


@pytest.mark.slow
def test_a_branch_in_another_folder_has_its_own_best_and_its_own_wandb_run(run, tmp_path):

    def saved(checkpoint: str) -> dict:
        return json.loads((tmp_path / checkpoint / "trainer" / "state.json").read_text())

    best = [
        "checkpoint.keep_best=eval/mean_length",
        "eval.every=1",
        "logging.wandb=offline",
    ]
    printed = run("run", "optim.max_steps=2", *best)
    assert re.search(r"^best      \S+/checkpoint-[12], eval/mean_length \d", printed, re.MULTILINE)
    first = saved("run/checkpoint-2")
    assert first["best"]["value"] > 0
    # What stood in the folder before is set aside: two runs in one metrics.jsonl would be neither.
    run("branch", "optim.max_steps=1", "seed=5")
    resume = [
        f"checkpoint.resume={tmp_path}/run/checkpoint-2",
        "checkpoint.accept_changes=true",
    ]
    printed = run("branch", "optim.max_steps=3", *best, *resume)
    assert (
        f"an earlier run in {tmp_path}/branch was moved to {tmp_path}/branch/previous-1" in printed
    )
    assert [line["step"] for line in lines(tmp_path / "branch")] == [3]
    own = saved("branch/checkpoint-3")
    assert own["best"]["step"] == 3
    assert re.fullmatch(r"\w+", first["wandb_run_id"])
    assert own["wandb_run_id"] != first["wandb_run_id"]
    assert not (tmp_path / "branch" / "checkpoint-1").exists()


@pytest.mark.slow
def test_a_run_stopped_by_gradients_that_are_not_finite_stops_again_at_once(run, tmp_path, capfd):
    """The last checkpoint counts nine skipped updates, those of the steps that are complete."""
    reward = f"{ROOT}/tests/rewards_for_tests.py:huge"
    options = [
        f"reward.functions=['{reward}']",
        "algorithm.scale=none",
        "optim.max_steps=14",
    ]
    errors = []
    for _ in range(2):
        with pytest.raises(SystemExit, match="1"):
            run("run", *options, "checkpoint.save_steps=null")
        errors += [
            line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")
        ]
    assert errors[0] == errors[1]
    assert errors[0].startswith(
        "error: [rank 0] in phase 'update': ValueError: 10 updates in a row had a gradient"
    )
    assert lines(tmp_path / "run")[-1]["step"] == 9


def test_weights_that_are_not_finite_are_never_a_checkpoint(run, tmp_path, capfd):
    with pytest.raises(SystemExit, match="1"):
        run(
            "run",
            "optim.learning_rate=3.4e38",
            "optim.betas=[0, 0.999]",
            "optim.warmup_steps=1",
            "optim.max_steps=9",
        )
    error = capfd.readouterr().err
    assert "error: [rank 0] in phase 'save': ValueError: " in error
    assert (
        "holds values that are not finite: no checkpoint is saved at step 2; lower optim.learning_rate"
        in error
    )
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.slow
def test_never_starts_afresh_but_not_when_torchrun_restarts_it(random_model, tmp_path):
    def run(launch):
        never = [
            "checkpoint.save_steps=1",
            "checkpoint.keep=9",
            "optim.max_steps=3",
            "checkpoint.resume=never",
        ]
        return run_trainer(
            *small_run(random_model, tmp_path),
            *never,
            env={"TORCHELASTIC_RUN_ID": launch},
            fresh=False,
        ).stdout

    assert "the same command or call with checkpoint.resume=auto continues from there" in run("one")
    shutil.rmtree(tmp_path / "checkpoint-3")
    assert f"resuming  {tmp_path}/checkpoint-2 at step 2" in run("one")
    assert "was moved to" in run("two"), "what lies there is not what this torchrun began"


def test_another_reward_file_or_model_in_the_same_place_is_refused(
    run, tmp_path, capfd, random_model
):
    """The settings name the same files; what these hold is compared too."""
    reward = tmp_path / "mine.py"
    model = tmp_path / "model"
    saves = ["checkpoint.save_steps=1", "optim.max_steps=2"]
    text = "def mine(prompts, completions, **columns):\n    return [float(len(c) % 3) for c in completions]\n"
    reward.write_text(text)
    shutil.copytree(random_model, model)
    same = [
        f"reward.functions=['{reward}:mine']",
        f"model.name_or_path={model}",
        *saves,
        "algorithm.beta=0.1",
    ]
    run("run", *same)
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")  # as if interrupted
    state_file = tmp_path / "run" / "checkpoint-1" / "trainer" / "state.json"
    state = json.loads(state_file.read_text())
    assert {str(reward), f"{model}/config.json", f"{model}/model.safetensors"} <= state[
        "content"
    ].keys()

    def changed_files() -> list[str]:
        assert (
            main(
                [
                    *small_run(random_model, tmp_path / "run"),
                    "data.max_eval_samples=2",
                    *same,
                ]
            )
            == 2
        )
        error = capfd.readouterr().err
        assert error.count("\n") == 1
        assert "checkpoint.accept_changes=true" in error
        return re.findall(r"content of (\S+): checkpoint '\w+', now '\w+'", error)

    reward.write_text(text.replace("% 3", "% 4"))
    assert changed_files() == [str(reward)]
    reward.write_text(text)
    changed = weights(model)
    changed["model.norm.weight"][5] += 1.0
    save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
    assert changed_files() == [f"{model}/model.safetensors"]
    assert f"note: checkpoint.accept_changes accepts content of {model}/model.safetensors: " in run(
        "run", *same, "checkpoint.accept_changes=true"
    )


def test_of_a_large_file_blocks_are_read(tmp_path):
    """The first and the last MiB are among them, and the size counts."""
    path = tmp_path / "model.safetensors"
    megabytes = 100
    with open(path, "wb") as file:
        file.truncate(megabytes * 2**20)
    found = {file_digest(path)}
    # the first block, the 33rd, the last
    for place in (
        0,
        99 * 2**20 * 32 // 63,
        megabytes * 2**20 - 1,
    ):
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"x")
        found.add(file_digest(path))
    os.truncate(path, megabytes * 2**20 - 1)
    assert len(found | {file_digest(path)}) == 5


def test_a_loop_of_the_user_goes_on_where_it_was(random_model, tmp_path):
    """Two ranks, stopped by a failing update after two steps, train as one rank that is not."""
    loop = f"algorithm.loop={ROOT}/examples/own_training_loop.py:train"
    settings = [
        loop,
        "algorithm.own_args.loop.share=0.5",
        "checkpoint.save_steps=2",
        "data.eval_split=none",
    ]
    settings += ["rollout.temperature=1.5", "optim.max_steps=4"]
    for folder, ranks in (("whole", 1), ("stopped", 2)):
        run_trainer(*small_run(random_model, tmp_path / folder), *settings, ranks=ranks)
    first = (tmp_path / "stopped" / "checkpoint-2").rename(tmp_path / "first")
    shutil.rmtree(tmp_path / "stopped")
    shutil.copytree(first, tmp_path / "stopped" / "checkpoint-2")
    run_trainer(*small_run(random_model, tmp_path / "stopped"), *settings, ranks=2)
    states = []
    for folder in ("whole", "stopped"):
        asked_again = [line["own/asked_again"] for line in lines(tmp_path / folder) if line["step"]]
        file = tmp_path / folder / "checkpoint-4" / "trainer" / "state.json"
        states.append((asked_again[-2:], json.loads(file.read_text())["loop_state"]))
    assert states[0] == states[1]
    assert states[0][0] == [3, 3] and states[0][1]["waiting"]
