"""The gradient does not depend on how the work is cut: into micro-batches by tokens, packed or padded rows, or over ranks."""

import os
import subprocess
import sys

import gradients
import pytest
import torch
from conftest import ROOT

AGGREGATIONS = ("response_mean", "token_mean", "constant")
ONE_ROW, SOME_ROWS, ALL_ROWS = 1, 150, 10**6
CUTS = {  # ranks -> ways to cut the work: tokens per micro-batch, packed or padded rows
    1: [(ALL_ROWS, "packed"), (ONE_ROW, "packed"), (SOME_ROWS, "packed"), (ALL_ROWS, "padded"), (SOME_ROWS, "padded")],
    3: [(60, "packed"), (60, "padded"), (ALL_ROWS, "packed"), (ONE_ROW, "padded")],
}
WHOLE = (1, *CUTS[1][0])


@pytest.fixture(scope="module")
def results(tmp_path_factory, random_model) -> dict:
    """``(aggregation, ranks, tokens, packed)`` -> how two updates (SGD, float64) change the weights, and their metrics."""
    folder, found = tmp_path_factory.mktemp("cuts"), {}
    for ranks, cuts in CUTS.items():
        arguments = [str(folder / f"{ranks}.pt"), str(random_model)]
        arguments += [f"{aggregation},{tokens},{packed}" for aggregation in AGGREGATIONS for tokens, packed in cuts]
        if ranks == 1:
            gradients.main(*arguments)
        else:
            run_ranks(ranks, arguments)
        for cut, result in torch.load(folder / f"{ranks}.pt").items():
            aggregation, tokens, packed = cut.split(",")
            found[aggregation, ranks, int(tokens), packed] = result
    return found


def run_ranks(ranks: int, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run(
        [*command, gradients.__file__, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def relative_difference(a: dict, b: dict) -> float:
    norm = torch.stack([t.norm() for t in a.values()]).norm()
    return (torch.stack([(a[name] - b[name]).norm() for name in a]).norm() / norm).item()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_update_is_the_same_however_it_is_cut(results, aggregation):
    whole, metrics = results[aggregation, *WHOLE]
    assert torch.stack([t.norm() for t in whole.values()]).norm() > 1e-3
    for ranks, cuts in CUTS.items():
        for cut in cuts:
            other, other_metrics = results[aggregation, ranks, *cut]
            assert relative_difference(whole, other) < 1e-10, f"another update with {ranks} ranks and {cut}"
            for name in ("loss", "kl", "entropy", "grad_norm", "ratio", "clip_ratio/region_mean"):
                assert other_metrics[name] == pytest.approx(metrics[name], rel=1e-6), (name, ranks, cut)


def test_a_wrong_denominator_would_be_seen(results):
    """The two averages differ on these rows, so the test above would notice the wrong denominator."""
    by_response, _ = results["response_mean", *WHOLE]
    by_token, _ = results["token_mean", *WHOLE]
    assert relative_difference(by_response, by_token) > 1e-2
