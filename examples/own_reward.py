"""Train with your own reward on your own data: python examples/own_reward.py

Seconds on a CPU, once the tiny model is built (a minute, at the first use). A model of yours is
`model={"name_or_path": FOLDER}`."""

import random

from grpo import train

random.seed(0)
NUMBERS = [(random.randint(10, 99), random.randint(10, 99)) for _ in range(400)]
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in NUMBERS]
"""The column `prompt` is what the model reads; the reward gets every other column by its name."""


def right_and_short(completions, answer, **columns):
    """1 for the right answer in its tag, less 0.005 per character: one number per completion, or
    None where there is no score."""
    pairs = zip(completions, answer, strict=True)
    return [float(f"<answer>{right}</answer>" in text) - 0.005 * len(text) for text, right in pairs]


result = train(
    {
        "model": {"name_or_path": "builtin:tiny"},
        "rollout": {"prompts_per_step": 8, "num_generations": 8, "max_completion_length": 64},
        "algorithm": {"beta": 0.0},
        "optim": {"learning_rate": 2e-4, "max_steps": 12},
        "eval": {"correct_above": 0.0},
        "runtime": {"precision": "fp32"},
    },
    reward_functions=right_and_short,
    dataset=ROWS[:-32],
    eval_dataset=ROWS[-32:],
    output_dir="runs/own_reward",
    checkpoint={
        "resume": "never"
    },  # start anew each time; without it, the same call continues a run that was stopped
)

print(result)
print(
    "mean length by step:",
    [round(line["completions/mean_length"]) for line in result.metrics if "reward" in line],
)
