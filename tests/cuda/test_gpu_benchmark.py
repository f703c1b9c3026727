"""``benchmarks/gpu.py`` works on the emulated device and on the CPU, and its checks fail where something is broken."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow

CPU = ("--shape", "small", "--no-figures", "--device", "cpu")
GRAPHS = [f"graphs_{name}" for name in ("sampled", "greedy", "filtered", "stops", "shrinking", "waves")]


def run(gpu, tmp_path, *only, scenario="runs", **options):
    return gpu.run(f"gpu_benchmark.{scenario}", folder=str(tmp_path), **({"only": only} if only else {}), **options)


def test_one_check_that_crashes_or_hangs_does_not_stop_the_others(gpu, tmp_path):
    report = run(gpu, tmp_path, scenario="goes_on", limit_s=2, arguments=["--group", "first"])
    assert {name: (row["result"], row["words"]) for name, row in report.returned["rows"].items()} == {
        "crashes": ("failed", "its process ended with status -11"),
        "hangs": ("failed", "stopped after 2 s"),
        "raises": ("failed", "KeyError: 'reason'"),
        "is_left_out": ("not run", "not on emulated, only on an abacus"),
        "passes": ("passed", "number 1.5"),
    }
    assert report.returned["code"] == 1 and "0 of 4 checks passed" in report.output
    table = Path(tmp_path, "gpu_first.md").read_text()
    assert "| passes | passed | 0 | e | number 1.5 |" in table and "**not run**" in table
    arguments = ["--group", "rest", "--seconds", "3"]
    report = run(gpu, tmp_path / "late", scenario="goes_on", limit_s=60, arguments=arguments)
    stopped, skipped = report.returned["rows"].values()
    assert stopped["result"] == "failed" and skipped["why"] == "the 3 s of --seconds are used up"


def test_it_starts_without_pydantic():
    code = "import sys; sys.modules['pydantic'] = None; import gpu; sys.exit(gpu.main(['--list']))"
    command, folder = [sys.executable, "-c", code], ROOT / "benchmarks"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "scoring" in done.stdout, done.stderr


def test_every_check_of_one_process_passes_on_the_emulated_device(gpu, tmp_path):
    names = ["versions", "model_checks", "tf32_checks", "sdpa", "scoring", "fast_paths", "failed_capture"]
    found = run(gpu, tmp_path, *names, *GRAPHS).returned
    assert found["code"] == 0, {name: row for name, row in found["rows"].items() if row["result"] != "passed"}


@pytest.mark.parametrize(
    ("mistake", "name", "why"),
    [
        ("wrong_positions", "graphs_sampled", "rows are the loop's|log-probs of graphs differ"),
        ("copied_once", "graphs_sampled", "bf16 after an update: log-probs of graphs differ"),
        ("other_scale", "model_checks", "packing is refused"),
        ("silent_fallback", "graphs_filtered", "without a word"),
        ("wrong_kernel", "sdpa", "differs by .* from fp64"),
        ("short_rehearsal", "dry_run_peak", "rehearsed .* real"),
        ("forgets_averages", "kill_and_resume", "metrics differ at steps"),
    ],
)
def test_checks_fail_where_something_is_broken(gpu, tmp_path, mistake, name, why):
    options = {"arguments": CPU} if name == "kill_and_resume" else {}
    found = run(gpu, tmp_path, name, mistake=mistake, **options).returned
    row = found["rows"][name]
    assert found["code"] == 1 and row["result"] == "failed" and re.search(why, row["why"]), row


def test_runs_on_the_emulated_device_and_on_the_cpu(gpu, tmp_path):
    found = run(gpu, tmp_path / "emulated", "dry_run_peak", "too_large_microbatch", "nccl_alone").returned["rows"]
    assert found.pop("nccl_alone")["result"] == "not run"
    names = ("sdpa", "scoring", "kill_and_resume", "nccl_alone", "gloo_two_ranks")
    found |= run(gpu, tmp_path / "cpu", *names, arguments=CPU).returned["rows"]
    assert {name: row["words"] for name, row in found.items() if row["result"] != "passed"} == {}
