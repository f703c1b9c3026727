r"""An advantage that knows lengths, and a loss with a KL of its own.

    python train_grpo.py algorithm.advantages=examples/own_kl.py:short_where_best \
        algorithm.objective=examples/own_kl.py:clip_and_asymmetric_kl output_dir=runs/own_kl

A function gets the arguments that it names: docs/algorithm.md lists them. The demo's beta is 0: the
loss gets a reference because it names ref_logprobs_BT. Metrics are logged as own/kl and so on. What
stands after * are parameters of its own: algorithm.own_args.objective.above=0.2 sets another value.
"""

import torch


def short_where_best(rewards_PG, lengths_PG, *, penalty=0.1):
    """Return the reward minus the mean of its group, where the best completions of a group lose up
    to ``penalty`` for being longer than the group's mean."""
    lengths_PG = lengths_PG.float()
    excess_PG = lengths_PG / lengths_PG.mean(dim=1, keepdim=True) - 1
    # NaN stands for a completion without a score, and is never the best.
    best_P1 = rewards_PG.nan_to_num(-torch.inf).amax(dim=1, keepdim=True)
    is_best_PG = rewards_PG == best_P1
    shaped_PG = rewards_PG - penalty * excess_PG.clamp(0, 1) * is_best_PG
    advantages_PG = shaped_PG - shaped_PG.nanmean(dim=1, keepdim=True)
    return advantages_PG, {"length_of_best": lengths_PG[is_best_PG].mean()}


def clip_and_asymmetric_kl(
    logprobs_BT, ratio_BT, A_B1, bounds, ref_logprobs_BT, *, above=0.1, below=0.01
):
    """Return the loss of PPO plus a KL (k3) of weight ``above`` where the policy gives a token more
    probability than the reference, and of weight ``below`` elsewhere."""
    clipped_BT = ratio_BT.clamp(*bounds)
    policy_BT = -torch.minimum(ratio_BT * A_B1, clipped_BT * A_B1)
    d_BT = ref_logprobs_BT - logprobs_BT
    kl_BT = d_BT.exp() - d_BT - 1
    is_above_BT = d_BT < 0
    weight_BT = torch.where(is_above_BT, above, below)
    return policy_BT + weight_BT * kl_BT, {"kl": kl_BT, "above_reference": is_above_BT}
