"""Datasets and models by their Hub names, through the libraries' own clients, from a Hub on this machine."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, run_trainer
from hub_service import hub, pointed_at, publish

from grpo.config import load_config
from grpo.data import load_rows

ROWS = [{"question": f"What is {i} + 1?", "answer": f"One more.\n#### {i + 1:,}"} for i in range(990, 1210)]


def rows_of(env: dict[str, str], *settings: str) -> dict:
    """The rows of a configuration, by the loader of a run, in a process of its own."""
    code = (
        "import json, sys; from grpo.config import load_config; from grpo.data import load_rows;"
        "c = load_config(sys.argv[1:]); rows = [load_rows(c.data, train=train, seed=0) for train in (True, False)];"
        "print(json.dumps([[r.prompts, r.columns] for r in rows]))"
    )
    command = [sys.executable, "-c", code, *settings]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_gsm8k_of_the_hub_is_the_gsm8k_of_the_files(tmp_path, assets):
    files = {split: assets / "data" / "gsm8k" / f"{split}.jsonl" for split in ("train", "test")}
    publish(tmp_path / "hub", *([json.loads(line) for line in file.open()] for file in files.values()))
    config = ("--config", str(ROOT / "configs" / "gsm8k_qwen2.5_0.5b.yaml"))
    with hub(tmp_path / "hub") as (endpoint, asked):
        env = pointed_at(endpoint, tmp_path / "cache")
        from_hub = rows_of(env, *config)
    assert [line for line in asked if line.startswith("GET") and line.endswith("main/train-00000-of-00001.parquet")]
    train, test = from_hub
    assert [len(train[0]), len(test[0])] == [7473, 1319]
    local = (f"data.dataset={files['train']}", f"data.eval_dataset={files['test']}", "data.eval_split=train")
    loaded = load_config([*config, *local])
    rows = [load_rows(loaded.data, train=is_train, seed=0) for is_train in (True, False)]
    assert from_hub == json.loads(json.dumps([[r.prompts, r.columns] for r in rows]))


@pytest.mark.slow
def test_a_run_takes_data_and_model_from_the_hub_and_again_from_its_cache(tmp_path, random_model):
    publish(tmp_path / "hub", ROWS, ROWS[:7])
    shutil.copytree(random_model, tmp_path / "hub" / "models" / "someone" / "small")
    small = (
        "--config", "configs/gsm8k_cpu.yaml", "model.name_or_path=someone/small", "rollout.prompts_per_step=2",
        "rollout.num_generations=2", "rollout.max_completion_length=8", "eval.max_samples=4", "optim.max_steps=1",
    )  # fmt: skip
    with hub(tmp_path / "hub") as (endpoint, asked):
        env = pointed_at(endpoint, tmp_path / "cache")
        printed = run_trainer(*small, f"output_dir={tmp_path}/run", env=env).stdout
        assert "openai/gsm8k: 20 problems to train on; 4 to evaluate on" in printed
        fetched = [line.rpartition("/")[2] for line in asked if line.startswith("GET") and "/resolve/" in line]
        assert {"train-00000-of-00001.parquet", "model.safetensors", "tokenizer.json"} <= set(fetched)
        for settings, message in (
            (["data.config_name=null"], "it has the configurations main, socratic: set data.config_name"),
            (["data.config_name=mian"], "BuilderConfig 'mian' not found. Available: ['main', 'socratic']"),
            (["data.dataset=openai/gsm9k"], "doesn't exist on the Hub or cannot be accessed"),
            (["model.name_or_path=someone/smal"], "someone/smal cannot be loaded"),
        ):
            done = run_trainer(*small, f"output_dir={tmp_path}/wrong", *settings, env=env, check=False)
            assert done.returncode == 2
            assert len(done.stderr.splitlines()) == 1, done.stderr
            assert message in done.stderr
            assert not (tmp_path / "wrong").exists()
    # Nobody listens there any more: the same run from what the libraries have kept.
    again = run_trainer(*small, f"output_dir={tmp_path}/again", env=env).stdout
    assert "openai/gsm8k: 20 problems to train on; 4 to evaluate on" in again
    first, second = ((tmp_path / name / "checkpoint-1" / "model.safetensors").read_bytes() for name in ("run", "again"))
    assert first == second
