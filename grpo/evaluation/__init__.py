"""Metrics on held-out problems: greedy accuracy, mean@k, pass@k, format and length, each with a 95%
interval.

The training loop and ``python -m grpo.evaluation`` run the same code: ``grading.Grader`` grades
completions, ``collect.evaluate`` samples and grades completions of all problems. Importing this
package does not import torch.
"""

from grpo.evaluation.estimate import metric_names, pass_at_k

__all__ = ["metric_names", "pass_at_k"]
