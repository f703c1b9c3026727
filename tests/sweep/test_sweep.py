"""``python -m grpo.sweep``: which runs there are, which of them are done, and the table of their results."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from conftest import ROOT, environment_of_runs

from grpo.checkpoint.resume import Lock
from grpo.commands.sweep.command import main
from grpo.commands.sweep.picture import curve
from grpo.commands.sweep.plan import Variant, folder_name, make_plan, make_variants, read_seeds, read_vary
from grpo.commands.sweep.results import differences, finished, measure, runs_in
from grpo.commands.sweep.runner import places
from grpo.commands.sweep.table import as_json, as_markdown, main_metric
from grpo.config import ConfigError, load_config
from grpo.report.read import flat

ARITHMETIC = str(ROOT / "configs" / "tiny_arithmetic.yaml")


def test_values_are_divided_at_commas_outside_of_brackets_and_quotes():
    assert read_vary("algorithm.scale=group, none") == ("algorithm.scale", ["group", "none"])
    assert read_vary("optim.betas=[0.9, 0.95],[0.9, 0.999]") == ("optim.betas", ["[0.9, 0.95]", "[0.9, 0.999]"])
    assert read_vary("rollout.stop=['a,b'],[\"],\"],[]") == ("rollout.stop", ["['a,b']", '["],"]', "[]"])
    assert read_vary("data.system_prompt='Think, then answer.',it's") == (
        "data.system_prompt",
        ["'Think, then answer.'", "it's"],
    )
    for wrong in ("algorithm.scale", "algorithm.scale=", "algorithm.scale=a,,b", "=a"):
        with pytest.raises(ConfigError, match=r"write section\.key=value,value"):
            read_vary(wrong)
    assert read_seeds("0,3") == [0, 3]
    for wrong in ("", "a", "1,1", "-1", "1.5"):
        with pytest.raises(ConfigError, match="different whole numbers"):
            read_seeds(wrong)


def test_variants_are_all_combinations_or_each_value_alone():
    varied = [("algorithm.scale", ["group", "none"]), ("algorithm.beta", ["0", "0.1"])]
    names = [variant.name for variant in make_variants(varied, one_at_a_time=False)]
    assert names == [f"algorithm.scale={s},algorithm.beta={b}" for s in ("group", "none") for b in ("0", "0.1")]
    alone = make_variants(varied, one_at_a_time=True)
    assert alone[0] == Variant("base") and [v.overrides for v in alone[1:]] == [
        ("algorithm.scale=group",), ("algorithm.scale=none",), ("algorithm.beta=0",), ("algorithm.beta=0.1",),
    ]  # fmt: skip
    assert make_variants([], one_at_a_time=False) == [Variant("base")]
    for keys in (["seed"], ["output_dir"], ["optim.max_steps"] * 2):
        with pytest.raises(ConfigError, match=keys[0]):
            make_variants([(key, ["1"]) for key in keys], one_at_a_time=True)


def test_every_run_has_its_own_folder_and_is_checked_first(tmp_path):
    variants = make_variants(
        [("algorithm.scale", ["group", "none"]), ("data.system_prompt", ["a/b", "a:b"])], one_at_a_time=True
    )
    output = tmp_path / "with: a space"
    runs, notes = make_plan(ARITHMETIC, ["optim.max_steps=3", "logging.wandb=offline"], variants, [0, 7], output)
    assert notes == ["algorithm.scale=group has the settings of base and is left out"]
    assert [(run.variant, run.seed) for run in runs] == [
        (name, seed) for seed in (0, 7) for name in ("base", "algorithm.scale=none", "data.system_prompt=a/b", "data.system_prompt=a:b")
    ]  # fmt: skip
    folders = [run.folder.parent.name for run in runs[:4]]
    assert folders[:3] == ["base", "algorithm.scale=none", "data.system_prompt=a-b"]
    assert len(set(folders)) == 4, "two names that differ in unfit characters only"
    run = runs[5]
    assert run.log == output / "algorithm.scale=none" / "seed-7.log"
    assert load_config(list(run.arguments)) == run.config
    config = run.config
    assert (config.output_dir, config.seed, config.algorithm.scale, config.optim.max_steps) == (
        str(run.folder),
        7,
        "none",
        3,
    )
    assert (config.logging.group, config.logging.run_name) == ("with: a space", "algorithm.scale=none, seed 7")
    assert len(folder_name("x" * 500)) == 150
    assert len(folder_name("é" * 500).encode()) <= 150 and folder_name("é" * 500) != folder_name("é" * 501)
    by_rank = make_plan(ARITHMETIC, ["rollout.prompts_per_rank=3"], [Variant("base")], [0], tmp_path, num_ranks=4)
    assert by_rank[0][0].config.rollout.prompts_per_step == 12

    impossible = make_variants(
        [("algorithm.scale", ["nix"]), ("rollout.num_generations", ["1", "2"])], one_at_a_time=True
    )
    with pytest.raises(ConfigError) as error:
        make_plan(ARITHMETIC, [], impossible, [0], tmp_path)
    first, second = str(error.value).split("\n")
    assert first.startswith("algorithm.scale=nix: ") and second.startswith("rollout.num_generations=1: ")
    # A mistake of all variants is said once, without their names.
    with pytest.raises(ConfigError, match=r"^unknown key 'algorithm\.scal'"):
        make_plan(ARITHMETIC, ["algorithm.scal=1"], impossible, [0], tmp_path)
    (tmp_path / "debug.yaml").write_text("debug: true")
    with pytest.raises(ConfigError, match="for a single run"):
        make_plan(str(tmp_path / "debug.yaml"), [], [Variant("base")], [0], tmp_path)
    assert not tmp_path.joinpath("with: a space").exists(), "nothing is written before the first run"


def write_run(run, *, steps=3, seed=0):
    """The files of a run that has done ``steps`` steps: rewards 0.1, 0.2, ... plus the seed, and an evaluation in the end."""
    (run.folder / f"checkpoint-{steps}").mkdir(parents=True)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(run.config.for_writing()))
    lines = [
        {"step": n, "reward": n / 10 + seed, "grad_norm": float(n), "kl": None, "step_time": n**2, "entropy": 0.5}
        for n in range(1, steps + 1)
    ]
    lines[-1] |= {"eval/greedy_accuracy": 0.5 + seed / 10, "eval/mean@4": 0.25, "eval/mean_length": 20.0}
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def plan_of(tmp_path, *overrides, seeds=(0,), vary=()):
    variants = make_variants(list(map(read_vary, vary)), one_at_a_time=True)
    return make_plan(ARITHMETIC, ["optim.max_steps=3", *overrides], variants, list(seeds), tmp_path)[0]


def test_a_complete_run_with_the_same_settings_is_done(tmp_path):
    (run,) = plan_of(tmp_path)
    assert finished(run) is None, "no folder yet"
    write_run(run)
    assert finished(run).is_complete
    machine = "runtime.device=cpu runtime.threads_per_rank=1 logging.every=9 reward.num_workers=1 checkpoint.keep=1"
    (elsewhere,) = plan_of(tmp_path, *machine.split())
    assert finished(elsewhere).is_complete, "where it is computed does not count"
    for change in ("optim.learning_rate=1", "eval.num_samples=3", "runtime.precision=bf16", "data.system_prompt=x"):
        key, _, value = change.partition("=")
        with pytest.raises(ConfigError, match=rf"started with other settings \({key}: checkpoint .*now '?{value}"):
            finished(plan_of(tmp_path, change)[0])
    (longer,) = plan_of(tmp_path, "optim.max_steps=4", "checkpoint.accept_changes=true")
    assert finished(longer).is_complete
    (run.folder / "checkpoint-3").rename(run.folder / "checkpoint-2")
    assert finished(run) is None, "it goes on"


def test_a_key_that_a_run_did_not_know_has_its_default(tmp_path):
    config = load_config(["--config", ARITHMETIC])
    known = dict(flat(config.for_writing()))
    assert differences(config, known) == []
    assert differences(config, known | {"algorithm.a_key_of_the_past": 1}) == []
    # tiny_arithmetic.yaml sets the first, and leaves the second at its default.
    del known["algorithm.beta"], known["algorithm.scale"]
    assert differences(config, known) == [("algorithm.beta", 0.04, 0.0)]


def test_the_numbers_of_a_run(tmp_path):
    (run,) = plan_of(tmp_path, "optim.max_steps=20")
    write_run(run, steps=20)
    numbers = measure(finished(run))
    # reward: mean of 1.1 ... 2.0; gradient norm: mean of 1 ... 20; seconds: median of n^2, between 100 and 121.
    assert numbers == pytest.approx({
        "reward": 1.55, "entropy": 0.5, "grad_norm": 10.5, "step_time": 110.5, "eval/greedy_accuracy": 0.5, "eval/mean@4": 0.25,
        "eval/mean_length": 20.0,
    })  # fmt: skip
    assert main_metric(list(numbers)) == "eval/mean@4"
    # Rewards of 0.1 n and of 0.1 n + 1: mean 0.1 n + 0.5, s.d. 1/sqrt(2); a moving mean of two steps ends at step 2 with 0.15 + 0.5.
    other = plan_of(tmp_path, "optim.max_steps=20", seeds=(1,))[0]
    write_run(other, steps=20, seed=1)
    points = curve([finished(run), finished(other)], "reward", window=2)
    step, spread = points[0]
    assert len(points) == 19 and step == 2 and (spread.mean, spread.sd) == pytest.approx((0.65, 0.5**0.5))


def test_the_table():
    runs = {
        "base": {s: {"eval/greedy_accuracy": v, "kl": 0.0} for s, v in ((0, 0.80), (1, 0.82), (2, 0.84))},
        "a|b": {5: {"reward": 1.2345}},
        "c": {},
    }
    metrics = {entry["variant"]: entry["metrics"] for entry in as_json(runs)}
    # s.d. 0.02; t of 2 degrees of freedom 4.303: 0.02 / sqrt(3) * 4.303 = 0.049687.
    spread = metrics["base"]["eval/greedy_accuracy"]
    assert (spread["mean"], spread["sd"], spread["low"], spread["high"]) == pytest.approx(
        (0.82, 0.02, 0.770313, 0.869687), abs=1e-6
    )
    assert metrics["a|b"]["reward"] == {"mean": 1.2345, "sd": None, "low": None, "high": None, "values": {5: 1.2345}}
    lines = as_markdown(runs).splitlines()
    table = [
        [cell.strip() for cell in line.replace("\\|", "!").split("|")[1:-1]] for line in lines if line.startswith("|")
    ]
    assert table[0] == ["variant", "seeds", "greedy accuracy, %", "reward"]
    assert table[2:5] == [
        ["base", "3", "82.0 ± 2.0 [77.0, 87.0]", "-"],
        ["a!b", "1", "-", "1.23"],
        ["c", "0", "-", "-"],
    ]
    assert table[5] == ["variant", "seeds", "KL, nats"] and table[7] == ["base", "3", "0 ± 0 [0, 0]"]


def test_the_machine_is_shared_by_the_runs(monkeypatch):
    config = load_config([f"--config={os.devnull}"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("grpo.commands.sweep.runner.available_cores", lambda: 8)
    monkeypatch.setattr("grpo.commands.sweep.runner._gpus", list)
    assert [place.arguments for place in places(config, 4)] == [("runtime.threads_per_rank=2",)] * 4
    assert places(config, 1)[0].arguments == (), "the trainer chooses"
    assert places(load_config([f"--config={os.devnull}", "runtime.threads_per_rank=3"]), 4)[0].arguments == ()

    def gpus(count, jobs):
        monkeypatch.setattr("grpo.commands.sweep.runner._gpus", lambda: list("abcd")[:count])
        return [(place.environment["CUDA_VISIBLE_DEVICES"], place.ranks) for place in places(config, jobs)]

    assert gpus(4, 1) == [("a,b,c,d", 4)]
    assert gpus(4, 2) == [("a,b", 2), ("c,d", 2)]
    assert gpus(2, 3) == [("a", 1), ("b", 1), ("a", 1)]


def test_the_command_writes_table_and_picture_and_refuses_mistakes(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason='needs pip install -e ".[plots]"')
    for run in plan_of(tmp_path, seeds=(0, 1), vary=["algorithm.scale=none"]):
        if (run.variant, run.seed) != ("algorithm.scale=none", 1):
            write_run(run, seed=run.seed)
            with open(run.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": 0, "eval/greedy_accuracy": 0.25}) + "\n")
    sweep = f"--config {ARITHMETIC} --vary algorithm.scale=none --one-at-a-time --seeds 0,1 --output"
    command = [*sweep.split(), str(tmp_path)]
    assert main([*command, "--table-only", "optim.max_steps=3"]) == 0
    printed = capsys.readouterr().out
    assert "55.0 ± 7.1 [-8.5, 118.5]" in printed and "1 of 4 runs are not complete" in printed
    assert printed.count("before training") == 1 and "25.0 ± 0.0 [25.0, 25.0]" in printed
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert "optim.max_steps=3" in written["command"] and written["interval"]["level"] == 0.95
    assert [entry["seeds"] for entry in written["variants"]] == [[0, 1], [0, 1], [0]]
    variants = [("base", 0), ("base", 1), ("algorithm.scale=none", 0)]
    assert [(variant, seed) for variant, seed, _ in runs_in(tmp_path)] == variants, "also without the configuration"
    for words, message in (
        ([*command, "optim.max_steps=4"], "optim.max_steps: checkpoint 3, now 4"), (["--vary", "a=1"], "--config FILE"),
        ([*command, "--jobs", "0"], "--jobs 0"), ([*command, "seed=1"], "--seeds"), (["--table-only"], "--output DIR"),
        ([*command, "--debug"], "train_grpo.py"), (["--table-only", "--output", str(tmp_path / "nix")], "no complete run"),
    ):  # fmt: skip
        assert main(words) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_is_killed_stopped_and_continued(tmp_path, random_model):
    """Two variants and one that fails, two seeds: SIGKILL in the second run; then two at once, and Ctrl-C; then to the end."""
    config, output = tmp_path / "X.yaml", tmp_path / "a sweep"
    values = {
        "model": {"name_or_path": str(random_model)}, "data": {"dataset": "builtin:arithmetic", "max_train_samples": 64, "max_eval_samples": 4},
        "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 12}, "optim": {"max_steps": 40},
        "reward": {"functions": [f"{ROOT}/tests/rewards_for_tests.py:share_of_digits"]},
        "runtime": {"precision": "fp32"}, "checkpoint": {"save_steps": 10}, "eval": {"before_training": False},
    }  # fmt: skip
    config.write_text(yaml.safe_dump(values))
    command = [
        sys.executable, "-m", "grpo.sweep", "--config", str(config), "--vary", "algorithm.scale=none", "--vary", f"model.name_or_path={tmp_path}/nix",
        "--one-at-a-time", "--seeds", "0,1", "--output", str(output),
    ]  # fmt: skip

    def start():
        environment = environment_of_runs({"PYTHONPATH": str(ROOT)})
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)

    def wait_for(condition):
        deadline = time.monotonic() + 400
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def steps(folder):
        file = folder / "metrics.jsonl"
        return file.read_text().count("\n") if file.exists() else 0

    def is_free(folder):
        lock = Lock()
        try:
            lock.acquire(folder)
        except ConfigError:
            return False
        return lock.release() is None

    base, second, third = (
        output / "base" / "seed-0",
        output / "algorithm.scale=none" / "seed-0",
        output / "base" / "seed-1",
    )
    sweep = start()
    try:
        wait_for(lambda: steps(second) >= 2)
        sweep.kill()
        wait_for(lambda: is_free(second))  # its run is told by the kernel, saves and ends
        assert 2 <= steps(second) < 40 and steps(base) == 40
        first_metrics = (base / "metrics.jsonl").stat().st_mtime_ns

        command += ["--jobs", "2"]
        sweep = start()
        wait_for(lambda: steps(third) >= 2)
        sweep.send_signal(signal.SIGINT)
        printed = sweep.communicate(timeout=400)[0]
        assert sweep.returncode == 128 + signal.SIGINT, printed
        assert "1 are complete" in printed and "the same command continues the sweep" in printed
        assert 2 <= steps(third) < 40
        assert "preempted at step" in third.with_name("seed-1.log").read_text()

        sweep = start()
        printed = sweep.communicate(timeout=600)[0]
    finally:
        sweep.kill()
    assert sweep.returncode == 1, printed
    name = f"model.name_or_path={tmp_path}/nix"
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    for seed, error in enumerate(errors):
        assert error.startswith(f"error: {name}, seed {seed}: {name}: no such folder")
        assert error.endswith(f"({output / folder_name(name)}/seed-{seed}.log)")
    assert len(errors) == 2
    assert (base / "metrics.jsonl").stat().st_mtime_ns == first_metrics, "a complete run is not repeated"
    table = {entry["variant"]: entry["seeds"] for entry in json.loads((output / "sweep.json").read_text())["variants"]}
    assert table == {"base": [0, 1], "algorithm.scale=none": [0, 1], name: []}
    del table[name]
    assert main(["--table-only", "--output", str(output)]) == 0  # the folders alone: all but the variant without a run
    assert {
        entry["variant"]: entry["seeds"] for entry in json.loads((output / "sweep.json").read_text())["variants"]
    } == table
