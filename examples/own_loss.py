"""Your own loss and advantages: two functions, which configurations name by file.

    python train_grpo.py algorithm.objective=examples/own_loss.py:geometric_mean
    algorithm.num_iterations=2 output_dir=runs/gmpo python train_grpo.py
    algorithm.advantages=examples/own_loss.py:above_median output_dir=runs/above_median python -m
    grpo.sweep --config configs/tiny_arithmetic.yaml algorithm.num_iterations=2 optim.max_steps=50
    --seeds 0 \
      --vary algorithm.objective=clip,examples/own_loss.py:geometric_mean

With one update per rollout each ratio is 1, and another way to clip changes nothing: hence the two
iterations. Shapes: P problems, G completions each; B rows, T completion tokens. What the functions
get: docs/algorithm.md. """

import torch


def geometric_mean(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds):
    """GMPO (arXiv 2507.20673): the geometric mean of a response's clipped importance ratios, for
    all its tokens.

    A ratio is clipped as in PPO, where the policy has moved the way the advantage points. The
    paper's bounds, e to the power of -0.4 and 0.4, are algorithm.epsilon=0.33
    algorithm.epsilon_high=0.49."""
    low, high = bounds
    clipped_BT = torch.where(A_B1 > 0, ratio_BT.clamp(max=high), ratio_BT.clamp(min=low))
    lengths_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    mean_B1 = ((clipped_BT.log() * mask_BT).sum(dim=1, keepdim=True) / lengths_B1).exp()
    return (-A_B1 * mean_B1).expand_as(ratio_BT)


def above_median(rewards_PG, values_PGF):
    """The reward less the (lower) median of its group, which one very good completion does not
    move."""
    return rewards_PG - rewards_PG.nanmedian(dim=1, keepdim=True).values
