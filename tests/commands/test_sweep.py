"""``python -m grpo.sweep``: which runs there are, which of them are done, and the table of their results."""

import json
import signal
import subprocess
import sys
import time

import pytest
import yaml
from conftest import ROOT, environment_of_runs

from grpo.checkpoint.resume import Lock
from grpo.commands.sweep import finished, folder_name, main, make_plan, read_varied
from grpo.commands.sweep_results import as_markdown, curve, main_metric, measure, spreads
from grpo.config import ConfigError, load_config

ARITHMETIC = str(ROOT / "configs" / "tiny_arithmetic.yaml")


def plan_of(output, *overrides, seeds=(0,), vary=(), one_at_a_time=True):
    base = ["--config", ARITHMETIC, "optim.max_steps=3", *overrides]
    return make_plan(base, read_varied(vary), list(seeds), output, one_at_a_time=one_at_a_time)


def test_a_comma_inside_brackets_or_quotes_belongs_to_its_value():
    assert read_varied(["algorithm.scale=group, none", "optim.betas=[0.9, 0.95],[0.9, 0.999]"]) == [
        ["algorithm.scale=group", "algorithm.scale=none"],
        ["optim.betas=[0.9, 0.95]", "optim.betas=[0.9, 0.999]"],
    ]
    assert read_varied(["rollout.stop=['a,b'],[\"],\"],[]"]) == [
        ["rollout.stop=['a,b']", 'rollout.stop=["],"]', "rollout.stop=[]"]
    ]
    key = "data.system_prompt"
    assert read_varied([f"{key}='Think, then answer.'", f"{key}=it's"]) == [
        [f"{key}='Think, then answer.'", f"{key}=it's"]
    ]


def test_variants_are_all_combinations_or_each_value_alone(tmp_path, capsys):
    vary = ["algorithm.scale=group,none", "algorithm.beta=0.01,0.1"]
    names = [run.variant for run in plan_of(tmp_path, vary=vary, one_at_a_time=False)]
    assert names == [f"algorithm.scale={s},algorithm.beta={b}" for s in ("group", "none") for b in ("0.01", "0.1")]
    names = [run.variant for run in plan_of(tmp_path, vary=vary)]
    assert names == ["base", "algorithm.scale=none", "algorithm.beta=0.01", "algorithm.beta=0.1"]
    assert "note: algorithm.scale=group has the settings of base and is left out" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"nowhere\.py raised FileNotFoundError"):
        plan_of(tmp_path, vary=["algorithm.objective=clip,nowhere.py:mine"])


def test_every_run_is_an_ordinary_run_in_its_own_folder(tmp_path):
    output = tmp_path / "with: a space"
    vary = ["algorithm.scale=none", "data.system_prompt=a/b,a:b"]
    runs = plan_of(output, "logging.wandb=offline", seeds=(0, 7), vary=vary)
    variants = ("base", "algorithm.scale=none", "data.system_prompt=a/b", "data.system_prompt=a:b")
    assert [(run.variant, run.seed) for run in runs] == [(name, seed) for seed in (0, 7) for name in variants]
    assert len({run.folder for run in runs}) == 8, "also of names that differ in unfit characters only"
    run = runs[5]
    assert run.log == output / "algorithm.scale=none" / "seed-7.log"
    config = load_config(list(run.arguments))
    assert config == run.config
    assert (config.output_dir, config.seed, config.algorithm.scale) == (str(run.folder), 7, "none")
    assert config.logging.run_name == "algorithm.scale=none, seed 7"
    assert not output.exists(), "nothing is written before the first run"
    names = [folder_name(text * 500) for text in ("x", "é", "é-", "𝄞")]
    assert len(set(names)) == 4 and max(len(name.encode()) for name in names) < 255


def write_run(run, *, steps=3, seed=0):
    """The files of a run that has done ``steps`` steps: rewards 0.1, 0.2, ... plus the seed, and two evaluations."""
    (run.folder / f"checkpoint-{steps}").mkdir(parents=True)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(run.config.for_writing()))
    lines = [{"step": 0, "eval/greedy_accuracy": 0.25}]
    for n in range(1, steps + 1):
        training = {"reward": n / 10 + seed, "grad_norm": float(n), "kl": None, "step_time": n**2, "entropy": 0.5}
        lines.append({"step": n} | training)
    lines[-1] |= {"eval/greedy_accuracy": 0.5 + seed / 10, "eval/mean@4": 0.25, "eval/mean_length": 20.0}
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_complete_run_with_the_same_settings_is_done(tmp_path):
    (run,) = plan_of(tmp_path)
    assert finished(run) is None, "no folder yet"
    write_run(run)
    assert finished(run).is_complete
    machine = "runtime.device=cpu runtime.threads_per_rank=1 logging.every=9 reward.num_workers=1 checkpoint.keep=1"
    limits = "optim.tokens_per_microbatch=99 rollout.tokens_in_flight=99 model.gradient_checkpointing=true"
    (elsewhere,) = plan_of(tmp_path, *machine.split(), *limits.split())
    assert finished(elsewhere).is_complete, "where and in which parts it is computed does not count"
    for change in (
        "rollout.vllm_command=other {model}",
        "rollout.server=http://a:1",
        "model.trust_remote_code=True",
        "optim.learning_rate=1",
        "eval.num_samples=3",
        "runtime.precision=bf16",
        "data.system_prompt=x",
    ):
        key, _, value = change.partition("=")
        with pytest.raises(ConfigError, match=rf"started with other settings \({key}: .*now '?{value}"):
            finished(plan_of(tmp_path, change)[0])
    (changed,) = plan_of(tmp_path, "optim.learning_rate=1", "checkpoint.accept_changes=true")
    assert finished(changed).is_complete
    saved = run.config.for_writing()
    del saved["algorithm"]["scale"]  # as if the run had been made before there was this key, at its default now
    (run.folder / "config.yaml").write_text(yaml.safe_dump(saved))
    assert finished(run).is_complete
    (run.folder / "checkpoint-3").rename(run.folder / "checkpoint-2")
    assert finished(run) is None, "it goes on"


def test_a_mapping_that_has_lost_an_entry_is_another_setting(tmp_path):
    (run,) = plan_of(tmp_path, "data.chat_template_kwargs={a: 1, b: 2}")
    write_run(run)
    (fewer,) = plan_of(tmp_path, "data.chat_template_kwargs={a: 1}")
    with pytest.raises(ConfigError, match=r"kwargs: \{'a': 1, 'b': 2\}, now \{'a': 1\}"):
        finished(fewer)


def test_the_numbers_of_a_run(tmp_path):
    runs = plan_of(tmp_path, "optim.max_steps=40", seeds=(0, 1))
    for run in runs:
        write_run(run, steps=40, seed=run.seed)
    numbers = measure(finished(runs[0]))
    # reward: mean of 3.1 ... 4.0; gradient norm: mean of 1 ... 40; seconds: median of n^2, between 400 and 441.
    evaluation = {"eval/greedy_accuracy": 0.5, "eval/mean@4": 0.25, "eval/mean_length": 20.0}
    training = {"reward": 3.55, "entropy": 0.5, "grad_norm": 20.5, "step_time": 420.5}
    assert numbers == pytest.approx(evaluation | training)
    assert main_metric({"base": spreads({0: numbers})}) == "eval/mean@4"
    # Rewards of 0.1 n and of 0.1 n + 1: mean 0.1 n + 0.5, s.d. 1/sqrt(2); a moving mean of two steps, the first 0.15.
    points = curve(list(map(finished, runs)), "reward")
    assert list(points.index) == list(range(2, 41)) and tuple(points.loc[2]) == pytest.approx((0.65, 0.5**0.5))
    # Null in one run, in step 10, which the moving mean of step 11 leaves out: 1.1 and (2.0 + 2.1) / 2.
    of_runs = list(map(finished, runs))
    of_runs[0].metrics[10]["reward"] = None
    points = curve(of_runs, "reward")
    assert list(points.index[points["mean"].isna()]) == [10], "a gap"
    assert points.loc[11]["mean"] == pytest.approx((1.1 + 2.05) / 2)
    measured = curve(of_runs, "eval/greedy_accuracy")
    assert list(measured.index) == [0, 40] and not measured.isna().any(axis=None), "no gap between evaluations"


def test_the_table():
    base = spreads({s: {"eval/greedy_accuracy": v, "kl": 0.0} for s, v in ((0, 0.80), (1, 0.82), (2, 0.84))})
    other = spreads({5: {"reward": 1.2345}})
    # s.d. 0.02; t of 2 degrees of freedom 4.303: 0.02 / sqrt(3) * 4.303 = 0.049687.
    expected = dict(mean=0.82, sd=0.02, low=0.770313, high=0.869687)
    accuracy = base["eval/greedy_accuracy"]
    assert {key: accuracy[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    assert other["reward"] == {"mean": 1.2345, "sd": None, "low": None, "high": None, "values": {5: 1.2345}}
    lines = [line.replace("\\|", "!") for line in as_markdown({"base": base, "a|b": other}).splitlines()]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert table[0] == ["variant", "seeds", "greedy accuracy, %", "reward"]
    assert table[2:4] == [["base", "3", "82.0 ± 2.0 [77.0, 87.0]", "-"], ["a!b", "1", "-", "1.23"]]
    assert table[4] == ["variant", "seeds", "KL, nats"] and table[6] == ["base", "3", "0 ± 0 [0, 0]"]


def test_the_command_writes_table_and_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason='needs pip install -e ".[plots]"')
    for run in plan_of(tmp_path, seeds=(0, 1), vary=["algorithm.scale=none"]):
        if (run.variant, run.seed) != ("algorithm.scale=none", 1):
            write_run(run, seed=run.seed)
    sweep = (
        f"--config {ARITHMETIC} --vary algorithm.scale=none --one-at-a-time --seeds 0,1 optim.max_steps=3 --table-only"
    )
    assert main([*sweep.split(), "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "55.0 ± 7.1 [-8.5, 118.5]" in printed and "1 of 4 runs are not in the table" in printed
    assert printed.count("before training") == 1 and "25.0 ± 0.0 [25.0, 25.0]" in printed
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert "optim.max_steps=3" in written["command"] and written["interval"]["level"] == 0.95
    assert [entry["seeds"] for entry in written["variants"]] == [[0, 1], [0, 1], [0]]
    assert main(["--table-only", "--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "sweep.json").read_text())["variants"] == written["variants"], "the folders alone"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vary", "a=1"], "--config FILE"),
        (["--table-only"], "--output DIR"),
        (["--table-only", "--output", "nowhere"], "no run <variant>/seed-<n>"),
        (["--config", ARITHMETIC, "seed=1"], "--seeds"),
        (["--config", ARITHMETIC, "--vary", "output_dir=a,b"], "--output"),
        (["--config", ARITHMETIC, "--jobs", "2"], "argument '--jobs' is not understood"),
        (["--config", ARITHMETIC, "--vary", "algorithm.scale"], "write section.key=value"),
        (["--config", ARITHMETIC, "--vary", "algorithm.scale=a,,b"], "write section.key=value"),
        (["--config", ARITHMETIC, "--vary", "algorithm.scale=none,nix"], "algorithm.scale='nix'"),
    ],
)
def test_mistakes_are_refused_before_the_first_run(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_is_killed_stopped_and_continued(tmp_path, random_model):
    """Two variants and one that fails, two seeds: SIGKILL in the second run; Ctrl-C in the third; then to the end."""
    config, output, missing = tmp_path / "X.yaml", tmp_path / "a sweep", f"model.name_or_path={tmp_path}/nix"
    data = {"dataset": "builtin:arithmetic", "max_train_samples": 64, "max_eval_samples": 4}
    values = {
        "model": {"name_or_path": str(random_model)}, "data": data, "optim": {"max_steps": 40},
        "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 12},
        "reward": {"functions": [f"{ROOT}/tests/rewards_for_tests.py:share_of_digits"]},
        "runtime": {"precision": "fp32"}, "checkpoint": {"save_steps": 10}, "eval": {"before_training": False},
    }  # fmt: skip
    config.write_text(yaml.safe_dump(values))
    words = [sys.executable, "-m", "grpo.sweep", "--config", str(config), "--vary", "algorithm.scale=none"]
    words += ["--vary", missing, "--one-at-a-time", "--seeds", "0,1", "--output", str(output)]

    def start():
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return subprocess.Popen(words, cwd=tmp_path, env=environment_of_runs({"PYTHONPATH": str(ROOT)}), **pipes)

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

    base, second = output / "base" / "seed-0", output / "algorithm.scale=none" / "seed-0"
    sweep = start()
    try:
        wait_for(lambda: steps(second) >= 2)
        sweep.kill()
        wait_for(lambda: is_free(second))  # its run is told by the kernel, saves and ends
        seen = steps(second)
        assert 2 <= seen < 40 and steps(base) == 40
        first_metrics = (base / "metrics.jsonl").stat().st_mtime_ns

        sweep = start()
        wait_for(lambda: steps(second) > seen)
        sweep.send_signal(signal.SIGINT)
        printed = sweep.communicate(timeout=400)[0]
        assert sweep.returncode == 128 + signal.SIGINT, printed
        assert "1 are complete" in printed and "the same command continues the sweep" in printed
        assert seen < steps(second) < 40
        assert "stopped at step" in second.with_name("seed-0.log").read_text()

        sweep = start()
        printed = sweep.communicate(timeout=600)[0]
    finally:
        sweep.kill()
    assert sweep.returncode == 1, printed
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    for seed, error in enumerate(errors):
        assert error.startswith(f"error: {missing}, seed {seed}: ") and "cannot be loaded" in error
        assert error.endswith(f"({output / folder_name(missing)}/seed-{seed}.log)")
    assert len(errors) == 2
    assert (base / "metrics.jsonl").stat().st_mtime_ns == first_metrics, "a complete run is not repeated"
    table = {entry["variant"]: entry["seeds"] for entry in json.loads((output / "sweep.json").read_text())["variants"]}
    assert table == {"base": [0, 1], "algorithm.scale=none": [0, 1]}


@pytest.mark.slow
def test_a_complete_run_whose_reward_file_changed_is_not_averaged(tmp_path, random_model):
    reward, output = tmp_path / "mine.py", tmp_path / "sweep"
    reward.write_text("def mine(completions, **columns):\n    return [0.0] * len(completions)\n")
    words = [sys.executable, "-m", "grpo.sweep", "--config", ARITHMETIC, f"model.name_or_path={random_model}"]
    words += [f'reward.functions=[{{name: "{reward}:mine"}}]', "optim.max_steps=1", "eval.before_training=false"]
    words += ["data.max_eval_samples=2", "rollout.max_completion_length=8", "--output", str(output)]

    def swept(seeds):
        options = dict(env=environment_of_runs(), cwd=ROOT, capture_output=True, text=True, timeout=400)
        return subprocess.run([*words, "--seeds", seeds], **options)

    assert swept("0").returncode == 0
    again = swept("0")
    assert again.returncode == 0 and "1 are complete" in again.stdout, again.stderr
    reward.write_text("def mine(completions, **columns):\n    return [9.0] * len(completions)\n")
    changed = swept("0,1")
    assert changed.returncode == 1 and f"content of {reward}: " in changed.stderr, changed.stderr
    assert not (output / "base" / "seed-1").exists(), "no new run starts"
