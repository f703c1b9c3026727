"""Accuracy on held-out problems: greedy, mean@k, pass@k, format, length, each with its interval, with exact counts over ranks.

The training loop's evaluations and ``python -m grpo.evaluation --config X --model FOLDER`` are the same code.
"""

from grpo.evaluation.collect import Answers, Evaluation, evaluate
from grpo.evaluation.estimate import Estimate, estimates, metric_names, pass_at_k
from grpo.evaluation.verdict import Judge, Verdict, judge_of, make_judge

__all__ = [
    "Answers",
    "Estimate",
    "Evaluation",
    "Judge",
    "Verdict",
    "estimates",
    "evaluate",
    "judge_of",
    "make_judge",
    "metric_names",
    "pass_at_k",
]
