"""Memory does not grow with the number of steps."""

import json
import subprocess
import sys
from statistics import mean

import pytest
from conftest import ROOT, environment_of_runs


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "ranks"), [("bf16", 2), ("fp32", 1)])
def test_memory_of_the_last_step_is_that_of_step_5(assets, tmp_path, precision, ranks):
    """Every micro-batch has new lengths: kernels, with their working memory, were once kept for
    each of them."""
    command = [
        sys.executable,
        f"{ROOT}/benchmarks/memory.py",
        f"--model={assets}/models/gsm8k-7m",
        f"--data={assets}/data/gsm8k/train.jsonl",
        f"--settings={precision}:{ranks}",
        f"--threads={ranks}",
        "--steps=12",
        f"--output={tmp_path}/memory",
        "rollout.prompts_per_step=2",
        "rollout.max_completion_length=32",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=environment_of_runs(), check=False
    )
    assert done.returncode == 0, done.stderr
    rss = json.loads((tmp_path / "memory.json").read_text())["results"][0]["rss_mib"]
    assert len(rss) == 12
    # Means of three steps: a step's memory also depends on how many tokens it sampled.
    assert mean(rss[-3:]) < 1.05 * mean(rss[3:6]), rss
