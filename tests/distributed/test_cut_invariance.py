"""The gradient does not depend on how the work is cut: micro-batches, token budgets, ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

SCRIPT = Path(__file__).parent / "gradients.py"


def moved_by(tmp_path, model, aggregation: str, *, tokens: int = 10**6, ranks: int = 1):
    """Two updates' step in weights (SGD, float64) and the metrics reported."""
    output = tmp_path / f"{aggregation}-{tokens}-{ranks}.pt"
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(SCRIPT), str(output), str(model), aggregation, str(tokens)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return torch.load(output), torch.load(str(output) + ".metrics")


def relative_difference(a: dict, b: dict) -> float:
    norm = torch.stack([t.norm() for t in a.values()]).norm()
    return (torch.stack([(a[name] - b[name]).norm() for name in a]).norm() / norm).item()


@pytest.mark.parametrize("aggregation", ["response_mean", "token_mean", "constant"])
def test_update_is_the_same_however_it_is_cut(tmp_path, random_model, aggregation):
    whole, metrics = moved_by(tmp_path, random_model, aggregation)
    assert torch.stack([t.norm() for t in whole.values()]).norm() > 1e-3
    one_row_each = 1
    for cut in ({"tokens": one_row_each}, {"tokens": 150}, {"ranks": 2, "tokens": 60}, {"ranks": 3}):
        other, other_metrics = moved_by(tmp_path, random_model, aggregation, **cut)
        assert relative_difference(whole, other) < 1e-6, f"{cut} moves the weights elsewhere"
        for name in ("loss", "kl", "entropy", "grad_norm", "ratio", "clip_ratio/region_mean"):
            assert other_metrics[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-9), f"{name} under {cut}"


def test_a_wrong_denominator_would_be_seen(tmp_path, random_model):
    """The two averages differ on these rows, so a mix-up of denominators could not pass the test above."""
    by_response, _ = moved_by(tmp_path, random_model, "response_mean")
    by_token, _ = moved_by(tmp_path, random_model, "token_mean")
    assert relative_difference(by_response, by_token) > 1e-2
