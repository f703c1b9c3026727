"""Compare two models on the same problems: python examples/compare_checkpoints.py [FOLDER FOLDER]

Each accuracy is printed with its 95% interval. The difference of the accuracies has an interval,
too. Both models answer the same problems, so this interval is computed from the difference for each
problem. It is narrower than the two separate intervals suggest. Without folders, a short run makes
the two checkpoints.
"""

import sys
from pathlib import Path

from grpo import train
from grpo.commands.evaluation import run
from grpo.config import make_config
from grpo.distributed import start_world
from grpo.evaluation.estimate import mean_with_interval

SETTINGS = {
    "output_dir": "runs/compare_checkpoints",
    "model.name_or_path": "builtin:tiny",
    "data": {"dataset": "builtin:arithmetic", "max_eval_samples": 50},
    "rollout": {"prompts_per_step": 8, "num_generations": 8, "max_completion_length": 64},
    "algorithm.beta": 0.0,
    "optim": {"learning_rate": 2e-4, "max_steps": 8},
    # With several samples of a problem, its accuracy is a fraction, and not only 0 or 1.
    "eval": {"before_training": False, "num_samples": 4, "temperature": 1.0},
    "checkpoint": {"save_steps": 2, "keep": 4, "resume": "never"},
    "runtime.precision": "fp32",
}


def accuracies(evaluation):
    """Return the accuracy of each problem: right samples divided by all samples."""
    values = []
    for problem in evaluation.problems:
        num_right = sum(sample.correct for sample in problem.samples)
        values.append(num_right / len(problem.samples))
    return values


folders = sys.argv[1:3]
if not folders:
    result = train(SETTINGS)
    folders = [str(result.output_dir / "checkpoint-2"), str(result.checkpoint)]

config = make_config(SETTINGS)
output = Path(config.output_dir, "evaluation.json")
first, second = run(config, folders, output, start_world(config.runtime))

# A hard problem is hard for both models. The difference for one problem cancels this out.
differences = []
for before, after in zip(accuracies(first), accuracies(second), strict=True):
    differences.append([after - before])
difference = mean_with_interval(differences)
print(
    f"difference of the accuracies: {difference.value:+.3f}, "
    f"95% interval {difference.low:+.3f} to {difference.high:+.3f}"
)
