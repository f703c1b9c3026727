"""``python -m grpo.sweep``: which runs there are, and the table of their results."""

import json
import signal
import subprocess
import sys
import time

import pandas
import pytest
import yaml
from conftest import ROOT, environment_of_runs

from grpo.commands.sweep import main, make_plan, read_varied, variant_names
from grpo.commands.sweep_results import as_markdown, compare
from grpo.config import ConfigError, load_config

ARITHMETIC = str(ROOT / "configs" / "tiny_arithmetic.yaml")


def plan_of(output, *overrides, seeds=(0,), vary=(), one_at_a_time=True):
    base = ["--config", ARITHMETIC, "optim.max_steps=3", *overrides]
    return make_plan(base, read_varied(vary), list(seeds), output, one_at_a_time=one_at_a_time)


def test_a_comma_inside_brackets_or_quotes_belongs_to_its_value():
    key = "data.system_prompt"
    items = ["optim.betas=[0.9, 0.95], [0.9, 0.999]", f"{key}='Think, then answer.'", f"{key}=it's"]
    assert read_varied(items) == [
        ["optim.betas=[0.9, 0.95]", "optim.betas=[0.9, 0.999]"],
        [f"{key}='Think, then answer.'", f"{key}=it's"],
    ]


def test_names_are_short_readable_unique_and_hold_no_secret():
    changes = [
        "optim.learning_rate=1e-5",
        "data.system_prompt=a/b é",
        "data.system_prompt=a:b_",
        f"data.x={'y' * 300}",
    ]
    secret = 'reward.functions=[{name: a, args: {api_key: "sk-1"}}]'
    names = variant_names([(), changes[:2], *([change] for change in [*changes, secret])])
    assert names[:4] == [
        "base",
        "learning_rate=1e-5,system_prompt=a_b",
        "learning_rate=1e-5",
        "system_prompt=a_b",
    ]
    assert names[4] == "system_prompt=a_b-4" and len(names[5]) == 100
    assert names[6].startswith("functions=_") and "sk-1" not in names[6]
    assert variant_names([["algorithm.objective=mine/loss.py:leash"]]) == ["objective=leash"]
    assert variant_names([["algorithm.own_args.objective.radius=0.1"]]) == ["radius=0.1"]
    section = "algorithm={objective: mine/loss.py:leash, own_args: {objective: {radius: 0.1}}}"
    assert variant_names([[section]]) == ["objective_leash,_radius_0.1"]


def test_variants_are_all_combinations_or_each_value_alone(tmp_path):
    output = tmp_path / "with: a space"
    vary = ["algorithm.scale=group,none", "algorithm.beta=0.01,0.1"]
    runs = plan_of(output, vary=vary, one_at_a_time=False)
    assert [run.variant for run in runs] == [
        f"scale={s},beta={b}" for s in ("group", "none") for b in (0.01, 0.1)
    ]
    runs = plan_of(output, vary=vary, seeds=(0, 7))
    assert [run.variant for run in runs] == [
        "base",
        "scale=group",
        "scale=none",
        "beta=0.01",
        "beta=0.1",
    ] * 2
    config = load_config(runs[7].arguments)
    assert (config.seed, config.algorithm.scale) == (7, "none")
    assert config.output_dir == str(runs[7].folder) == f"{output}/scale=none,seed=7"
    assert not output.exists(), "nothing is written before the first run"


def write_run(run, rewards):
    """The files of a complete run with these rewards, and the evaluations before and after it."""
    (run.folder / f"checkpoint-{len(rewards)}").mkdir(parents=True)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(run.config.masked_values()))
    lines = [{"step": 0, "eval/greedy_accuracy": 0.0}]
    for step, reward in enumerate(rewards, 1):
        user_metrics = {"logged/mine": 2 * reward, "own/mine": 3 * reward}
        lines.append({"step": step, "reward": reward, "kl": None, **user_metrics})
    lines[-1]["eval/greedy_accuracy"] = rewards[-1]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_table_has_the_difference_to_the_base_with_the_same_seeds(tmp_path, capsys):
    """Seeds differ by 10, the variants by 1, 2 and 3: only the paired difference shows it."""
    vary = ["algorithm.scale=none"]
    for run in plan_of(tmp_path, seeds=(0, 1, 2, 3), vary=vary):
        if run.log.name != "scale=none,seed=3.log":
            reward = 10 * run.seed + (run.seed + 1) * (run.variant != "base")
            write_run(run, [reward, reward, reward + 3.0])  # mean: reward + 1
    command = [
        "--config",
        ARITHMETIC,
        "--vary",
        *vary,
        "--one-at-a-time",
        "--seeds",
        "0,1,2,3",
        "optim.max_steps=3",
    ]
    assert main([*command, "--table-only", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert (
        "7 of 8 runs are in the table" in printed and (tmp_path / "sweep.md").read_text() in printed
    )
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in printed.splitlines()
        if line[:1] == "|"
    ]
    assert table[0] == ["metric", "variant", "seeds", "mean", "difference to base"]
    # base: 1, 11, 21, 31: mean 16, s.d. 12.91, t of 3 degrees of freedom 3.182: 3.182 * 12.91 / 2 =
    # 20.5. Differences 1, 2, 3: mean 2, s.d. 1, t of 2 degrees of freedom 4.303: 4.303 / sqrt(3) =
    # 2.48.
    assert table[4:6] == [
        ["reward", "base", "4", "16 ± 21", ""],
        ["reward", "scale=none", "3", "13 ± 27", "+2 ± 2.5"],
    ]
    metrics = ["eval/greedy_accuracy", "reward", "logged/mine", "own/mine"]
    assert [row[0] for row in table[2::2]] == metrics
    row = (
        pandas.read_csv(tmp_path / "sweep.csv")
        .set_index(["metric", "variant"])
        .loc["reward", "scale=none"]
    )
    assert (row["seeds"], row["mean"], row["difference"]) == (3, 13.0, 2.0)
    assert row["difference_95"] == pytest.approx(4.303 / 3**0.5)


def test_metrics_and_seeds_that_a_variant_lacks():
    def run(**metrics):
        return [{"step": n, **metrics} for n in range(12)]

    rows = compare(
        {
            "base": {0: run(reward=1.0)},
            "b": {0: run(reward=4.0, kl=0.5), 1: run(reward=6.0)},
            "c": {},
        }
    )
    table = [
        line.split("|")[1:-1]
        for line in as_markdown(rows, base="base").splitlines()
        if line[:1] == "|"
    ]
    assert [[cell.strip() for cell in row] for row in table[2:]] == [
        ["reward", "base", "1", "1", ""],
        # t of one degree of freedom: 12.706 * sqrt(2) / sqrt(2)
        [
            "reward",
            "b",
            "2",
            "5 ± 13",
            "+3",
        ],
        ["kl", "b", "1", "0.5", "-"],
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vary", "a=1"], "--config FILE"),
        (["--config", ARITHMETIC, "seed=1"], "--seeds"),
        (["--config", ARITHMETIC, "--vary", "output_dir=a,b"], "--output"),
        (["--config", ARITHMETIC, "--vary", "algorithm.scale=a,,b"], "write section.key=value"),
        (["--config", ARITHMETIC, "--vary", "algorithm.scale=none,nix"], "algorithm.scale='nix'"),
        (
            ["--config", ARITHMETIC, "--vary", "algorithm.objective=nowhere.py:mine"],
            "nowhere.py raised FileNotFound",
        ),
    ],
)
def test_mistakes_are_refused_before_the_first_run(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_evaluations_with_other_settings_are_not_compared(tmp_path):
    (run,) = plan_of(tmp_path)
    write_run(run, [0.0])
    plan_of(tmp_path, "logging.every=9", "eval.max_samples=null")
    with pytest.raises(ConfigError, match="evaluations with other settings"):
        plan_of(tmp_path, "eval.max_samples=3")


@pytest.mark.slow
def test_a_sweep_is_killed_stopped_and_continued(tmp_path, random_model):
    """Two variants and one that fails, two seeds: SIGKILL in the second run; Ctrl-C in the third;
    then to the end."""
    reward = tmp_path / "mine.py"
    reward.write_text(
        "def mine(completions, **columns):\n    return [float(len(text) % 2) for text in completions]\n"
        "def wrong_sign(ratio_BT, A_B1):\n    return ratio_BT * A_B1\n"
    )
    output = tmp_path / "a sweep"
    settings = (
        f"--config {ARITHMETIC} --vary algorithm.scale=none --vary model.name_or_path=/nix --one-at-a-time "
        f"model.name_or_path={random_model} reward.functions=[{reward}:mine] optim.max_steps=40 data.max_eval_samples=4 "
        f"algorithm.objective={reward}:wrong_sign "
        "rollout.prompts_per_step=2 rollout.num_generations=2 rollout.max_completion_length=12 checkpoint.save_steps=10 "
        "eval.before_training=false"
    )
    words = [sys.executable, "-m", "grpo.sweep", *settings.split(), "--output", str(output)]

    def start(seeds="0,1"):
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        environment = environment_of_runs({"PYTHONPATH": str(ROOT)})
        return subprocess.Popen([*words, "--seeds", seeds], cwd=tmp_path, env=environment, **pipes)

    def wait_for(condition):
        deadline = time.monotonic() + 400
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def steps(folder):
        file = folder / "metrics.jsonl"
        return file.read_text().count("\n") if file.exists() else 0

    base = output / "base,seed=0"
    second = output / "scale=none,seed=0"
    log = output / "scale=none,seed=0.log"
    sweep = start()
    try:
        wait_for(lambda: steps(second) >= 2)
        sweep.kill()
        # its run is told by the kernel, saves and ends
        wait_for(lambda: "stopped at step" in log.read_text())
        seen = steps(second)
        assert 2 <= seen < 40 and steps(base) == 40
        first_metrics = (base / "metrics.jsonl").stat().st_mtime_ns

        sweep = start()
        wait_for(lambda: steps(second) > seen)
        sweep.send_signal(signal.SIGINT)
        printed = sweep.communicate(timeout=400)[0]
        assert sweep.returncode == 130 and "the same command continues the sweep" in printed
        assert seen < steps(second) < 40 and log.read_text().count("stopped at step") == 2

        sweep = start()
        printed = sweep.communicate(timeout=600)[0]
    finally:
        sweep.kill()
    assert sweep.returncode == 1, printed
    assert printed.count("\nwarning: algorithm.objective") == 1, "that of all runs is printed once"
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    failed = [f"name_or_path=_nix,seed={seed}" for seed in (0, 1)]
    for name, error in zip(failed, errors, strict=True):
        assert error.startswith(f"error: {name} failed: {output}/{name}.log error: ")
        assert "'/nix'" in error
    assert (base / "metrics.jsonl").stat().st_mtime_ns == first_metrics, (
        "a complete run is not repeated"
    )
    table = pandas.read_csv(output / "sweep.csv").query("metric == 'reward'")
    assert dict(zip(table["variant"], table["seeds"], strict=True)) == {"base": 2, "scale=none": 2}

    # A complete run whose reward has changed since is not in the table.
    reward.write_text(reward.read_text().replace("% 2", "% 3"))
    printed = start("0").communicate(timeout=400)[0]
    assert "0 of 3 runs are in the table" in printed
    assert f"content of {reward}" in (output / "base,seed=0.log").read_text()
