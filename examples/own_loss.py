r"""Your own loss and advantages: two functions, which configurations name by file.

    python train_grpo.py algorithm.objective=examples/own_loss.py:geometric_mean \
        algorithm.num_iterations=2 output_dir=runs/gmpo
    python train_grpo.py algorithm.advantages=examples/own_loss.py:above_median \
        output_dir=runs/above_median
    python -m grpo.sweep --config configs/tiny_arithmetic.yaml algorithm.num_iterations=2 \
        optim.max_steps=50 --seeds 0 \
        --vary algorithm.objective=clip,examples/own_loss.py:geometric_mean

With one update per rollout each ratio is 1, and another way to clip changes nothing: hence the two
iterations. Shapes: P problems, G completions each, F reward functions; B rows, T completion tokens.
docs/algorithm.md says what the functions get.
"""

import torch


def geometric_mean(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds):
    """GMPO (arXiv 2507.20673): the loss of each token has the geometric mean of the clipped
    importance ratios of its response.

    A ratio is clipped as in PPO: above where the advantage is positive, else below. The paper's
    bounds, e to the power of -0.4 and 0.4, are algorithm.epsilon=0.33 algorithm.epsilon_high=0.49.
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
    """The reward less the (lower) median of its group, which one very good completion does not
    move."""
    # NaN is a completion without a score, and stays NaN.
    medians_P1 = rewards_PG.nanmedian(dim=1, keepdim=True).values
    return rewards_PG - medians_P1
