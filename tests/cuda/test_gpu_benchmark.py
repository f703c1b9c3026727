"""``benchmarks/gpu.py`` works on the emulated device and on the CPU, and its checks fail where something is broken."""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CPU = ("--shape", "small", "--no-figures", "--device", "cpu")


def run(gpu, tmp_path, *only, **options):
    return gpu.run("gpu_benchmark.runs", folder=str(tmp_path), only=only, **options).returned


def test_one_check_that_crashes_or_hangs_does_not_stop_the_others(gpu, tmp_path):
    report = gpu.run("gpu_benchmark.goes_on", folder=str(tmp_path))
    written = json.loads((tmp_path / "gpu.json").read_text())
    why = {row["name"]: (row["result"], row.get("why")) for row in written["checks"]}
    assert why == {
        "crashes": ("failed", "its process ended with status -11"),
        "hangs": ("failed", "stopped after 4 s"),
        "raises": ("failed", "RuntimeError: the reason"),
        "is_left_out": ("not run", "no pydantic"),
        "passes": ("passed", None),
    }
    stopped, skipped = written["figures"]
    assert stopped["result"] == "failed" and skipped["why"] == "the 15 s of --seconds are used up"
    assert report.returned["code"] == 1 and "1 of 5 checks passed" in report.output
    table = Path(tmp_path, "gpu.md").read_text()
    assert "| passes | passed | 0 | e | number 1.5 |" in table and "**not run**" in table


def test_every_check_passes_on_the_emulated_device(gpu, tmp_path):
    """All but those of the trainer's runs, which are below."""
    names = (
        "versions",
        "bandwidth",
        "sampled_logprobs",
        "model_checks",
        "tf32_checks",
        "sdpa",
        "scoring",
        "failed_capture",
    )
    names += ("graphs_sampled", "graphs_greedy", "graphs_filtered", "graphs_stops", "graphs_shrinking", "graphs_waves")
    found = run(gpu, tmp_path, *names, "save_during_captures", "nccl_alone", "gloo_two_ranks")
    not_here = {name: row["why"] for name, row in found["rows"].items() if row["result"] == "not run"}
    assert set(not_here) == {"bandwidth", "nccl_alone", "gloo_two_ranks"}
    assert all("not on an emulated device" in why for why in not_here.values())
    assert {name: row for name, row in found["rows"].items() if row["result"] == "failed"} == {}
    assert found["code"] == 1, "a check that could not be run has not passed"
    one_more = run(gpu, tmp_path, "versions")
    assert one_more["code"] == 0 and list(one_more["rows"]) == ["versions"]


@pytest.mark.parametrize(
    ("mistake", "name", "why"),
    [
        ("wrong_positions", "graphs_sampled", "fp32: tokens misfit|log-probs of graphs differ"),
        ("stale_weights", "graphs_sampled", "bf16 after 1 updates"),
        ("other_scale", "model_checks", "packing is refused"),
        ("silent_fallback", "graphs_filtered", "without a word"),
        ("wrong_kernel", "sdpa", "differs by .* from fp64"),
        ("shared_save", "save_during_captures", "copy on the host"),
        ("short_rehearsal", "rehearsed_peak", "rehearsed .* real"),
    ],
)
def test_checks_fail_where_something_is_broken(gpu, tmp_path, mistake, name, why):
    found = run(gpu, tmp_path, name, mistake=mistake)
    row = found["rows"][name]
    assert found["code"] == 1 and row["result"] == "failed", row
    assert re.search(why, row["why"]), row


def test_memory_on_the_emulated_device(gpu, tmp_path):
    found = run(gpu, tmp_path, "rehearsed_peak", "too_large_microbatch")
    assert found["code"] == 0, found["rows"]


def test_runs_on_the_cpu(gpu, tmp_path):
    found = run(gpu, tmp_path, "scoring", "sdpa", "kill_and_resume", "gloo_two_ranks", "graphs_greedy", arguments=CPU)
    not_here = {name: row.get("why") for name, row in found["rows"].items() if row["result"] != "passed"}
    assert not_here == {"graphs_greedy": "needs a GPU"}


def test_a_run_that_is_continued_otherwise_is_found(gpu, tmp_path):
    row = run(gpu, tmp_path, "kill_and_resume", arguments=CPU, mistake="forgets_averages")["rows"]["kill_and_resume"]
    assert row["result"] == "failed" and "metrics differ at steps" in row["why"]
