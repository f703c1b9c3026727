"""The same run on 1 and 3 ranks: same problems, same tokens, same metrics, same weights to
rounding."""

import pytest
import torch
from conftest import run_trainer, small_run
from outputs import lines, weights

from grpo.telemetry.samples import read_samples


@pytest.fixture(scope="module")
def runs(tmp_path_factory, random_model):
    """The folders of the run on one rank and on three."""
    folder = tmp_path_factory.mktemp("ranks")
    options = [
        "algorithm.beta=0.05",
        "algorithm.num_iterations=2",
        "logging.log_completions=1000",
        "eval.num_samples=2",
        "eval.temperature=1.0",
    ]
    outputs = []
    for ranks in (1, 3):
        output = folder / str(ranks)
        run_trainer(*small_run(random_model, output), *options, ranks=ranks)
        outputs.append(output)
    return outputs


def test_groups_stay_on_their_rank_and_have_the_same_completions(runs):
    """Only the main rank's completions are written: of each third problem."""

    def rows(output, step):
        found = read_samples(output / f"completions/step_{step:06d}.parquet")
        return [(row["problem"], row["completion"]) for row in found]

    for step in range(1, 6):
        one, many = (rows(output, step) for output in runs)
        problems = list(dict.fromkeys(problem for problem, _ in one))
        assert many == [row for row in one if row[0] in problems[::3]]


def test_same_metrics(runs):
    looser = {"loss": 1e-3, "grad_norm": 1e-3}
    for one, many in zip(lines(runs[0]), lines(runs[1]), strict=True):
        assert one.keys() == many.keys()
        for name in one.keys() - {"sampling/logprob_difference", "ratio"}:
            close = pytest.approx(
                one[name], rel=looser.get(name, 1e-4), abs=1e-5 if name == "loss" else 1e-6
            )
            assert many[name] == close, f"{name} at step {one['step']}"


def test_same_evaluation_to_the_last_count(runs):
    """13 problems over 3 ranks: uneven shares, each counted once."""
    one = lines(runs[0])[0]
    assert one["step"] == 0
    assert lines(runs[1])[0] == one


def test_same_weights_after_five_steps(runs):
    one, many = (weights(output / "checkpoint-5") for output in runs)
    for name, expected in one.items():
        # AdamW at 1e-3 moves each weight by up to 1e-2 in ten updates; rounding of a gradient near
        # 0 moves it by less.
        torch.testing.assert_close(many[name], expected, rtol=1e-4, atol=2e-4, msg=name)
