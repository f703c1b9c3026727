"""The gradient does not depend on how the work is cut: micro-batches, token budgets, packed or
padded rows, ranks; nor on rows without gradient."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT, environment_of_runs, run_forked

SCRIPT = Path(__file__).parent / "gradients.py"
AGGREGATIONS = ("response_mean", "token_mean", "constant")
ONE_ROW, SOME_ROWS, ALL_ROWS = 1, 150, 10**6
CUTS = {  # ranks -> cuts: tokens per micro-batch, packed or padded
    1: [
        (ALL_ROWS, "packed"),
        (ONE_ROW, "packed"),
        (SOME_ROWS, "packed"),
        (ALL_ROWS, "padded"),
        (SOME_ROWS, "padded"),
    ],
    2: [(60, "packed"), (60, "padded")],
    3: [(ALL_ROWS, "packed"), (ONE_ROW, "padded")],
}
WHOLE = (1, *CUTS[1][0])
SKIPPED = {
    1: [(ALL_ROWS, "packed"), (60, "padded")],
    2: [(60, "packed")],
    3: [(ALL_ROWS, "packed"), (60, "padded")],
}
"""Cuts in which the rows of advantage 0 are not computed, without a KL term; a rank of three has no
other rows."""


@pytest.fixture(scope="module")
def results(tmp_path_factory, random_model) -> dict:
    """See :func:`updates_of`; with a KL term."""
    cuts = {
        ranks: [
            f"{aggregation},{tokens},{packed},kl"
            for aggregation in AGGREGATIONS
            for tokens, packed in CUTS[ranks]
        ]
        for ranks in CUTS
    }
    return updates_of(cuts, tmp_path_factory.mktemp("cuts"), random_model)


@pytest.fixture(scope="module")
def options(tmp_path_factory, random_model) -> dict:
    """See :func:`updates_of`; without the rows of advantage 0, with the tokens of highest entropy,
    and with corrections."""
    cuts = {ranks: [] for ranks in SKIPPED}
    cuts[1] += [f"{aggregation},{ALL_ROWS},packed,all" for aggregation in AGGREGATIONS]
    cuts[1] += [f"token_mean,{ALL_ROWS},packed,kl"]
    for ranks, skipped in SKIPPED.items():
        for tokens, packed in skipped:
            cuts[ranks] += [f"{aggregation},{tokens},{packed},skip" for aggregation in AGGREGATIONS]
            cuts[ranks] += [
                f"token_mean,{tokens},{packed},{rows}" for rows in ("entropy", "corrected")
            ]
    return updates_of(cuts, tmp_path_factory.mktemp("options"), random_model)


def updates_of(cuts: dict[int, list[str]], folder: Path, model, *settings: str) -> dict:
    """``(aggregation, ranks, tokens, packed, rows)`` to what two updates (SGD, float64) moved in
    the weights, and their metrics.

    ``cuts``: ranks -> the arguments of the script.
    """
    found = {}
    for ranks, arguments in cuts.items():
        output, environment = folder / f"{ranks}.pt", environment_of_runs({"PYTHONPATH": str(ROOT)})
        done = run_forked(
            SCRIPT,
            [str(output), str(model), *settings, *arguments],
            ranks=ranks,
            timeout=240,
            env=environment,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        for cut, result in torch.load(output).items():
            aggregation, tokens, packed, rows = cut.split(",")
            found[aggregation, ranks, int(tokens), packed, rows] = result
    return found


def relative_difference(a: dict, b: dict) -> float:
    norm = torch.stack([t.norm() for t in a.values()]).norm()
    return (torch.stack([(a[name] - b[name]).norm() for name in a]).norm() / norm).item()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_update_is_the_same_however_it_is_cut(results, aggregation):
    whole, metrics = results[aggregation, *WHOLE, "kl"]
    assert torch.stack([t.norm() for t in whole.values()]).norm() > 1e-3
    for ranks, cuts in CUTS.items():
        for cut in cuts:
            other, other_metrics = results[aggregation, ranks, *cut, "kl"]
            assert relative_difference(whole, other) < 1e-10, (
                f"{ranks} ranks, {cut} moves the weights elsewhere"
            )
            for name in ("loss", "kl", "entropy", "grad_norm", "ratio", "clip_ratio/region_mean"):
                assert other_metrics[name] == pytest.approx(metrics[name], rel=1e-6), (
                    name,
                    ranks,
                    cut,
                )


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_update_is_the_same_without_the_rows_of_advantage_0(options, aggregation):
    whole, metrics = options[aggregation, *WHOLE, "all"]
    assert torch.stack([t.norm() for t in whole.values()]).norm() > 1e-3
    for ranks, cuts in SKIPPED.items():
        for cut in cuts:
            other, other_metrics = options[aggregation, ranks, *cut, "skip"]
            assert relative_difference(whole, other) < 1e-10, (
                f"{ranks} ranks, {cut} moves the weights elsewhere"
            )
            for name in ("loss", "grad_norm"):
                assert other_metrics[name] == pytest.approx(metrics[name], rel=1e-6), (
                    name,
                    ranks,
                    cut,
                )
            # over fewer rows
            assert other_metrics["entropy"] != pytest.approx(metrics["entropy"], rel=1e-6)
            _, first_metrics = options[aggregation, 1, *SKIPPED[1][0], "skip"]
            # over the same rows, whichever rank has them
            for name in (
                "entropy",
                "ratio",
                "clip_ratio/region_mean",
            ):
                assert other_metrics[name] == pytest.approx(first_metrics[name], rel=1e-6), (
                    name,
                    ranks,
                    cut,
                )


@pytest.mark.slow
def test_the_tokens_of_highest_entropy_are_the_same_however_it_is_cut(options):
    whole, _ = options["token_mean", 1, *SKIPPED[1][0], "entropy"]
    for ranks, cuts in SKIPPED.items():
        for cut in cuts:
            assert (
                relative_difference(whole, options["token_mean", ranks, *cut, "entropy"][0]) < 1e-10
            ), (ranks, cut)
    # some tokens are left out
    assert relative_difference(whole, options["token_mean", *WHOLE, "all"][0]) > 1e-2


@pytest.mark.slow
def test_corrections_are_the_same_however_it_is_cut(options):
    whole, metrics = options["token_mean", 1, *SKIPPED[1][0], "corrected"]
    assert (
        metrics["sampling/off_policy_masked"] > 0
        and metrics["sampling/importance_sampling_ratio/cut"] > 0
    )
    for ranks, cuts in SKIPPED.items():
        for cut in cuts:
            other, other_metrics = options["token_mean", ranks, *cut, "corrected"]
            assert relative_difference(whole, other) < 1e-10, (ranks, cut)
            names = [name for name in metrics if name.startswith("sampling/")] + ["kl", "loss"]
            assert {n: other_metrics[n] for n in names} == pytest.approx(
                {n: metrics[n] for n in names}, rel=1e-6
            )
    # they do something
    assert relative_difference(whole, options["token_mean", *WHOLE, "kl"][0]) > 1e-2


@pytest.mark.slow
def test_adapters_move_the_same_however_it_is_cut(tmp_path, random_model):
    """And nothing else moves."""
    cuts = {1: [CUTS[1][0], CUTS[1][-1]], 2: CUTS[2][:1], 3: CUTS[3][1:]}
    cuts = {
        ranks: [f"token_mean,{tokens},{packed},kl" for tokens, packed in cuts[ranks]]
        for ranks in cuts
    }
    results = updates_of(cuts, tmp_path, random_model, "lora.rank=4", "lora.alpha=16")
    whole, metrics = results["token_mean", *WHOLE, "kl"]
    adapters = {name for name in whole if ".lora_" in name}
    assert adapters and all((whole[name].norm() > 0) == (name in adapters) for name in whole)
    assert metrics["kl"] > 1e-3
    for (_, *cut, _), (other, other_metrics) in results.items():
        assert relative_difference(whole, other) < 1e-10, cut
        for name in ("loss", "kl", "entropy", "grad_norm"):
            assert other_metrics[name] == pytest.approx(metrics[name], rel=1e-6), (name, cut)


def test_a_wrong_denominator_would_be_seen(results):
    """The two averages differ on these rows, so a mix-up of denominators could not pass the test
    above."""
    by_response, _ = results["response_mean", *WHOLE, "kl"]
    by_token, _ = results["token_mean", *WHOLE, "kl"]
    assert relative_difference(by_response, by_token) > 1e-2
