r"""A loss and advantages of your own: two functions that a configuration names by their file.

    python train_grpo.py algorithm.objective=examples/own_loss.py:geometric_mean \
        algorithm.num_iterations=2 output_dir=runs/gmpo
    python train_grpo.py algorithm.advantages=examples/own_loss.py:above_median \
        output_dir=runs/above_median
    python -m grpo.sweep --config configs/tiny_arithmetic.yaml algorithm.num_iterations=2 \
        optim.max_steps=50 --seeds 0 \
        --vary algorithm.objective=clip,examples/own_loss.py:geometric_mean

With one update per rollout, each importance ratio is 1, and no ratio is clipped. So the commands
with a loss set two iterations. Shapes: P problems, G completions each, F reward functions; B rows,
T completion tokens. docs/algorithm.md describes the arguments of the functions.
"""

import torch


def geometric_mean(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds):
    """Return the loss of GMPO (arXiv 2507.20673) for each token.

    The importance ratio of a token is replaced by the geometric mean of the clipped ratios in its
    response. As in PPO, a ratio is clipped at the upper bound if the advantage is positive, else at
    the lower bound. The paper's bounds, e to the power of -0.4 and 0.4, are algorithm.epsilon=0.33
    and algorithm.epsilon_high=0.49.
    """
    low, high = bounds
    clipped_BT = torch.where(
        A_B1 > 0,
        ratio_BT.clamp(max=high),
        ratio_BT.clamp(min=low),
    )
    # The geometric mean is the exponential of the mean logarithm, over the tokens of the row alone:
    # rows and columns of one micro-batch must not mix.
    log_BT = clipped_BT.log() * mask_BT
    log_sum_B1 = log_BT.sum(dim=1, keepdim=True)
    lengths_B1 = mask_BT.sum(dim=1, keepdim=True)
    # A row without tokens counts as one token, since 0 / 0 would be NaN.
    mean_log_B1 = log_sum_B1 / lengths_B1.clamp(min=1)
    mean_B1 = mean_log_B1.exp()
    loss_B1 = -A_B1 * mean_B1
    return loss_B1.expand_as(ratio_BT)


def above_median(rewards_PG, values_PGF):
    """Return each reward less the (lower) median of its group.

    One very good completion does not move the median.
    """
    # NaN stands for a completion without a score, and stays NaN.
    medians_P1 = rewards_PG.nanmedian(dim=1, keepdim=True).values
    return rewards_PG - medians_P1
