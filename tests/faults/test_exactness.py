"""Saved at a step and continued there, a run is the uninterrupted one: tolerance 0, whatever it is
made of.

One rank runs in this process (a run of a second); several ranks, and a process killed for real,
under torchrun."""

import json
import shutil

import pytest
import torch
from conftest import save_random_model
from harness import assert_same_run, bits, mend_manifest, run, tiny
from outputs import lines, states
from safetensors.torch import load_file, save_file

from grpo.config import OptimConfig
from grpo.distributed import save_tensors
from train_grpo import main

STEPS = 6
EPOCH = 4
EVERYTHING = (
    "algorithm.num_iterations=3", "algorithm.num_minibatches=2", "algorithm.ref_sync_steps=2",
    "algorithm.ref_sync_alpha=0.5", "checkpoint.save_steps=1", "checkpoint.keep=99", "logging.log_completions=1000",
)  # fmt: skip


def inside(output, model, *more: str) -> None:
    """A run on one rank in this process; the data set is no multiple of a step's problems."""
    assert (
        main(
            [
                *tiny(model, output, *EVERYTHING, *more, problems=27),
                "runtime.threads_per_rank=1",
            ]
        )
        == 0
    )


def back_to(step: int, whole, copy):
    """A copy of a finished run as it was when it was killed after saving ``step``."""
    shutil.copytree(whole, copy)
    for folder in copy.glob("checkpoint-*"):
        if int(folder.name.split("-")[1]) > step:
            shutil.rmtree(folder)
    return copy


@pytest.fixture(scope="module")
def whole(tmp_path_factory, random_model):
    output = tmp_path_factory.mktemp("whole") / "run"
    inside(output, random_model)
    assert [line["epoch"] for line in lines(output)[1:]] == [
        0.25,
        0.5,
        0.75,
        1.0,
        1.25,
        1.5,
    ]
    return output


@pytest.mark.parametrize("step", [1, EPOCH, 5], ids=["first epoch", "boundary", "second epoch"])
def test_continued_from_any_step(tmp_path, random_model, whole, step):
    output = back_to(step, whole, tmp_path / "run")
    inside(output, random_model)
    assert_same_run(whole, output, STEPS)


SCHEDULES = OptimConfig.model_fields["lr_scheduler_type"].annotation.__args__


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        *([f"optim.lr_scheduler_type={name}"] for name in SCHEDULES),
        ["optim.lr_scheduler_type=cosine_with_min_lr", "optim.min_lr=1e-5"],
        ["algorithm.name=dapo"], ["algorithm.name=gspo"],
        ["algorithm.name=rloo", "algorithm.num_iterations=1", "algorithm.num_minibatches=1"],
        [
            "algorithm.name=gdpo", "algorithm.top_entropy_quantile=0.5", "algorithm.sampler_correction=token_mask",
            "algorithm.off_policy_mask_threshold=0.001", "rollout.top_p=0.9",
        ],
        ["runtime.precision=bf16"], ["eval.num_samples=2", "eval.temperature=1.0"],
        ["checkpoint.keep_best=eval/greedy_accuracy"], ["model.gradient_checkpointing=true"],
    ],
    ids=lambda options: options[0],
)  # fmt: skip
def test_every_kind_of_run(tmp_path, random_model, options):
    uninterrupted = tmp_path / "whole"
    inside(uninterrupted, random_model, *options)
    output = back_to(3, uninterrupted, tmp_path / "run")
    inside(output, random_model, *options)
    assert_same_run(uninterrupted, output, STEPS)


@pytest.mark.slow
def test_dropout_is_drawn_from_the_seed_too(tmp_path, whole):
    model = save_random_model(tmp_path / "model", attention_dropout=0.1)
    with_dropout = tmp_path / "whole"
    inside(with_dropout, model, "model.disable_dropout=false")
    output = back_to(3, with_dropout, tmp_path / "run")
    inside(output, model, "model.disable_dropout=false")
    assert_same_run(with_dropout, output, STEPS)
    # The same weights, trained without dropout, end elsewhere.
    assert bits(whole, STEPS) != bits(with_dropout, STEPS)


def without(item: str, folder) -> None:
    """Take one thing out of a checkpoint (its start value put in place), and mend the manifest."""
    trainer = folder / "trainer"
    saved = states(folder)
    state = json.loads((trainer / "state.json").read_text())
    if item in ("exp_avg", "exp_avg_sq", "step"):
        for name, tensor in saved.items():
            if name.startswith("optimizer/") and name.endswith(f"/{item}"):
                tensor.zero_()
    elif item == "reference":
        saved = {
            name: tensor for name, tensor in saved.items() if not name.startswith("reference/")
        }
    elif item == "weights":
        weights = load_file(folder / "model.safetensors")
        name = sorted(weights)[0]
        weights[name].view(torch.int32).view(-1)[0] ^= 1  # the last bit of one weight
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    elif item == "number of steps":
        state["step"] -= 1
    elif item == "num_tokens":
        state["num_tokens"] = 0
    shutil.rmtree(trainer / "states")
    save_tensors(saved, trainer / "states", is_single_process=True)
    (trainer / "state.json").write_text(json.dumps(state))
    mend_manifest(folder)


ITEMS = [
    "exp_avg",
    "exp_avg_sq",
    "step",
    "reference",
    "weights",
    "number of steps",
    "num_tokens",
]


@pytest.mark.parametrize("item", ITEMS)
def test_removing_any_saved_item_changes_the_run(tmp_path, random_model, whole, item):
    """Else the tests above could not see that it is saved."""
    output = back_to(5, whole, tmp_path / "run")
    without(item, output / "checkpoint-5")
    inside(output, random_model)
    with pytest.raises(AssertionError):
        assert_same_run(whole, output, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks(tmp_path, random_model, ranks):
    """Two uninterrupted runs; continued at the end of the first epoch and in the second; token ids
    of every rank."""
    outputs = [tmp_path / name for name in ("whole", "again", "resumed-4", "resumed-5")]
    traces = []
    for output in outputs:
        if output.name.startswith("resumed"):
            back_to(int(output.name[-1]), outputs[0], output)
        env = {"GRPO_TRACE": f"{output}.trace"}
        share = "rollout.prompts_per_step=12"  # 2 minibatches over 2 or 3 ranks
        run(
            output,
            tiny(random_model, output, *EVERYTHING, share, problems=48),
            ranks=ranks,
            env=env,
        )
        traces.append(
            {path.name: path.read_text() for path in (tmp_path / f"{output.name}.trace").iterdir()}
        )
    assert len(traces[0]) == STEPS * ranks
    for output, trace in zip(outputs[1:], traces[1:], strict=True):
        assert_same_run(outputs[0], output, STEPS)
        assert trace.items() <= traces[0].items(), "token ids"


def ids_of_step(output, step: int) -> list:
    """The token ids of all ranks."""
    rows = []
    for path in output.parent.glob(f"{output.name}.trace/step-{step}-*"):
        rows += json.loads(path.read_text())
    return sorted(rows)


@pytest.mark.slow
def test_two_ranks_continued_on_one_and_on_three(tmp_path, random_model):
    """The same problems and completions; the same weights to rounding."""
    ids = {}
    weights = {}
    accuracy = {}
    for ranks in (2, 1, 3):
        output = tmp_path / str(ranks)
        if ranks != 2:
            back_to(3, tmp_path / "2", output)
        options = tiny(random_model, output, "checkpoint.save_steps=1", "checkpoint.keep=99")
        run(
            output,
            options,
            ranks=ranks,
            launcher=True,
            env={"GRPO_TRACE": f"{output}.trace"},
        )
        ids[ranks] = [ids_of_step(output, step) for step in range(3, STEPS)]
        weights[ranks] = load_file(output / f"checkpoint-{STEPS}" / "model.safetensors")
        accuracy[ranks] = lines(output)[-1]["eval/greedy_accuracy"]
    for ranks in (1, 3):
        assert ids[ranks] == ids[2]
        assert accuracy[ranks] == accuracy[2]
        for name, tensor in weights[2].items():
            torch.testing.assert_close(weights[ranks][name], tensor, rtol=1e-4, atol=2e-4, msg=name)
