"""Train with your own reward on your own data: python examples/own_reward.py

This takes seconds on a CPU. The first use builds the tiny model, which takes a minute. To train a
model of yours, set `model={"name_or_path": FOLDER}`.
"""

import random

from grpo import train

NUM_ROWS = 400
NUM_EVAL_ROWS = 32

random.seed(0)
rows = []
for _ in range(NUM_ROWS):
    a = random.randint(10, 99)
    b = random.randint(10, 99)
    # The model reads the column `prompt`. The reward gets every other column by its name.
    rows.append({"prompt": f"{a}+{b}=", "answer": str(a + b)})


def right_and_short(completions, answer, **columns):
    """Score 1 for the right answer in its tag, less 0.005 for each character of the completion.

    Returns one number for each completion. A reward may return None, which means no score.
    """
    rewards = []
    for text, right in zip(completions, answer, strict=True):
        is_right = f"<answer>{right}</answer>" in text
        rewards.append(float(is_right) - 0.005 * len(text))
    return rewards


result = train(
    {
        "model": {"name_or_path": "builtin:tiny"},
        "rollout": {"prompts_per_step": 8, "num_generations": 8, "max_completion_length": 64},
        "algorithm": {"beta": 0.0},
        "optim": {"learning_rate": 2e-4, "max_steps": 12},
        # An evaluation counts a completion as right if its reward is above this number.
        "eval": {"correct_above": 0.0},
        "runtime": {"precision": "fp32"},
    },
    reward_functions=right_and_short,
    dataset=rows[:-NUM_EVAL_ROWS],
    eval_dataset=rows[-NUM_EVAL_ROWS:],
    output_dir="runs/own_reward",
    # Start anew each time. With the default, the same call continues a run that was stopped.
    checkpoint={"resume": "never"},
)

print(result)
lengths = []
for line in result.metrics:
    # A line with the metrics of an evaluation alone has no reward.
    if "reward" in line:
        lengths.append(round(line["completions/mean_length"]))
print("mean length by step:", lengths)
