"""A task of reasoning-gym, which is in the extras ``gym`` and ``environments``."""

import pytest
from conftest import DEFAULTS
from outputs import metrics_of
from replays import TWO_STEPS
from speaking import save_speaking_model

from grpo.config import load_config
from grpo.data import load_rows
from grpo.telemetry.samples import read_samples
from train_grpo import main

reasoning_gym = pytest.importorskip(
    "reasoning_gym", reason="needs reasoning-gym: pip install -e '.[gym]'"
)


def test_a_training_with_a_task_is_scored_again_by_hand(tmp_path):
    """Letters are counted. An answer that contains the right one has a part of its reward."""
    answers = ["1", "2", "3", "1 2 3 4", "none"]
    model = save_speaking_model(
        tmp_path / "model", [f"<answer>{answer}</answer>" for answer in answers]
    )
    settings = [
        f"model.name_or_path={model}",
        "data.dataset=reasoning_gym:letter_counting",
        "data.max_train_samples=8",
        "data.max_eval_samples=4",
        "data.max_prompt_length=800",
        "rollout.prompts_per_step=4",
        "rollout.num_generations=8",
        "rollout.max_completion_length=16",
        *TWO_STEPS,
    ]
    output = tmp_path / "run"
    assert main([DEFAULTS, f"output_dir={output}", *settings]) == 0
    rows = load_rows(load_config(settings).data, train=True, seed=0)
    score = reasoning_gym.get_score_answer_fn("letter_counting")
    rewards = set()
    for step in (1, 2):
        for saved in read_samples(output / "completions" / f"step_{step:06d}.parquet"):
            entry = rows.columns[saved["problem"]] | {"question": rows.prompts[saved["problem"]]}
            expected = 0.0
            if saved["completion"].count("<answer>") == 1:
                text = saved["completion"].removeprefix("<answer>").removesuffix("</answer>")
                expected = score(text, entry)
                assert saved["rewards"]["reasoning_gym"] == pytest.approx(expected)
                rewards.add(expected)
    assert len(rewards) > 1
    lines = metrics_of(output)
    assert any(line.get("grad_norm", 0.0) > 0 for line in lines)
    assert any("eval/greedy_accuracy" in line for line in lines)
