"""Datasets and models by their Hub names, through the libraries' own clients, from a Hub on this
machine."""

import shutil

import pytest
from conftest import run_trainer
from hub_service import hub, pointed_at, publish

ROWS = [
    {"question": f"What is {i} + 1?", "answer": f"One more.\n#### {i + 1:,}"}
    for i in range(990, 1210)
]


@pytest.mark.slow
def test_a_run_takes_data_and_model_from_the_hub_and_again_from_its_cache(tmp_path, random_model):
    publish(tmp_path / "hub", ROWS, ROWS[:7])
    shutil.copytree(random_model, tmp_path / "hub" / "models" / "someone" / "small")
    small = (
        "--config",
        "configs/gsm8k_cpu.yaml",
        "model.name_or_path=someone/small",
        "rollout.prompts_per_step=2",
        "rollout.num_generations=2",
        "rollout.max_completion_length=8",
        "eval.max_samples=4",
        "optim.max_steps=1",
    )
    counted = "openai/gsm8k: 20 problems to train on; 4 to evaluate on"
    with hub(tmp_path / "hub") as (endpoint, asked):
        env = pointed_at(endpoint, tmp_path / "cache")
        assert counted in run_trainer(*small, f"output_dir={tmp_path}/run", env=env).stdout
        fetched = [
            line.rpartition("/")[2]
            for line in asked
            if line.startswith("GET") and "/resolve/" in line
        ]
        assert {"train-00000-of-00001.parquet", "model.safetensors", "tokenizer.json"} <= set(
            fetched
        )
        wrong = (*small, f"output_dir={tmp_path}/wrong", "data.dataset=openai/gsm9k")
        done = run_trainer(*wrong, env=env, check=False)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert "doesn't exist on the Hub or cannot be accessed" in done.stderr
        assert not (tmp_path / "wrong").exists()
    env["HF_HUB_OFFLINE"] = "1"
    assert counted in run_trainer(*small, f"output_dir={tmp_path}/again", env=env).stdout
    first, second = (
        (tmp_path / name / "checkpoint-1" / "model.safetensors").read_bytes()
        for name in ("run", "again")
    )
    assert first == second
