"""Functions of the user for the loss (``algorithm.objective``), for advantages
(``algorithm.advantages``) and for the training loop (``algorithm.loop``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo.algorithm.advantages import UserAdvantages, call_user_advantages
from grpo.algorithm.batch import Group
from grpo.algorithm.loss import UserObjective, policy_loss
from grpo.algorithm.own import named_arguments
from grpo.config import Config
from grpo.config.algorithm import AlgorithmConfig, is_user_function
from grpo.rewards.functions import describe_error, load_object, source_files
from grpo.run.records import Run, Step


@dataclass(frozen=True)
class UserFunctions:
    """The user's functions for loss, advantages and training loop. A function is None if the
    configuration names none."""

    objective: UserObjective | None
    advantages: UserAdvantages | None
    loop: Callable[[Run], None] | None
    source_files: dict[str, str]
    """Files that define the functions: name of a file for messages -> path of the file."""
    warnings: set[str]
    """Probable mistakes in the loss and the advantages, a line each."""
    loss_metrics: set[str]
    """Names of the metrics of the user's loss, found in its trial, and those of every loss. Empty
    for a built-in loss."""

    @property
    def needs_reference(self) -> bool:
        """True if the loss asks for the log-probs of the reference."""
        return self.objective is not None and "ref_logprobs_BT" in named_arguments(self.objective)


def load_user_functions(config: Config) -> UserFunctions:
    """Load the user's functions, and try the loss on a small example.

    Raises:
        ValueError: if the user made a mistake, with a message of one line.
    """
    algorithm = config.algorithm
    files = {}
    warnings = set()
    loss_metrics = set()
    # The order matters: a message about the loss or the advantages names a line of the last file.
    loop = _load(algorithm, "loop", files)
    objective = None
    if is_user_function(algorithm.objective):
        objective = _load(algorithm, "objective", files)
        _try(
            config,
            "objective",
            files,
            partial(_try_objective, objective, warnings.add, loss_metrics),
        )

    # The arguments of advantages include columns of the rows, which are not read yet:
    # try_advantages().
    advantages = _load(algorithm, "advantages", files)
    return UserFunctions(objective, advantages, loop, files, warnings, loss_metrics)


def try_advantages(
    config: Config,
    user: UserFunctions,
    columns: Mapping[str, Any],
    names: Sequence[str],
) -> None:
    """Call the user's advantages on three groups, as any run may have them: one of rewards 1 in
    its first half and 0 in the other, one of rewards 1, and one of rewards 0 and a None. Equal
    rewards have equal lengths.

    Args:
        columns: the columns of a row.
        names: names of the reward functions.

    Raises:
        ValueError: if the user made a mistake, with a message of one line.
    """
    if user.advantages is None:
        return
    warn = user.warnings.add
    G = max(config.rollout.num_generations, 2)
    F = len(names)
    # Each function has another number of ones.
    mixed_GF = torch.arange(G)[:, None] < G // 2 + torch.arange(F)
    values_PGF = torch.stack([mixed_GF.float(), torch.ones(G, F), torch.zeros(G, F)])
    rewards_PG = values_PGF[..., 0]
    lengths_PG = rewards_PG.long() + 1
    # In every run a reward function may fail or take too long, and then gives None.
    values_PGF[2, -1] = torch.nan

    def try_step(step: int) -> None:
        by_name = _named(names, values_PGF, lengths_PG, [columns] * 3, step)
        call = partial(call_user_advantages, user.advantages, rewards_PG, values_PGF, by_name)
        advantages_PG, metrics = call()
        # Both would be summed under the one name.
        shared = metrics.keys() & user.loss_metrics
        if shared:
            raise ValueError(f"algorithm.objective has a metric of this name: {', '.join(shared)}")
        if not torch.equal(advantages_PG, call()[0]):
            warn(
                "warning: algorithm.advantages gives other advantages at a second call: what "
                "it draws or remembers is in no checkpoint, and may differ between ranks"
            )
        mixed_G, ones_G, _ = advantages_PG
        if ones_G.std() > 1e-4 or abs(mixed_G[0] - mixed_G[G // 2 - 1]) > 1e-4:
            warn(
                "warning: algorithm.advantages tells completions of a group apart that have "
                "equal rewards and lengths: does it mix problems (axis 0), or rank ties?"
            )
        # In the first group each function gives 1 to the first completion. It gives 0 to the last,
        # unless there are many functions.
        if mixed_G.any() and mixed_G[0] <= mixed_G[-1]:
            warn(
                "warning: algorithm.advantages gives a completion to which each reward "
                "function gives 1 no more than one to which each gives 0: is its sign right?"
            )

    _try(config, "advantages", user.source_files, try_step)


def own_advantages(
    run: Run,
    step: Step,
    groups: Sequence[Group],
    rewards_PG: Tensor,
    values_PGF: Tensor,
) -> Tensor:
    """Return the advantages ``[P, G]`` of all ranks by the user's function, and add its metrics.

    Args:
        groups: completions of this rank.
        rewards_PG, values_PGF: rewards, and values of the reward functions, of all ranks.
    """
    world = run.world
    function = run.learner.user_advantages
    lengths = []
    for group in groups:
        lengths.append([len(completion.sampled_ids) for completion in group.completions])
    lengths_PG = world.gather_rows(torch.tensor(lengths))
    # All ranks have the same number of groups. Global row i is on rank i % size.
    rank_columns = world.gather_objects([group.problem.columns for group in groups])
    columns = [row for rows in zip(*rank_columns, strict=True) for row in rows]

    by_name = _named(
        run.tasks.rewards.names,
        values_PGF,
        lengths_PG,
        columns,
        step.number,
    )
    advantages_PG, metrics = call_user_advantages(function, rewards_PG, values_PGF, by_name)
    step.metrics.add_all(metrics)
    return advantages_PG


def _named(
    names: Sequence[str],
    values_PGF: Tensor,
    lengths_PG: Tensor,
    columns: Sequence[Mapping[str, Any]],
    step: int,
) -> dict[str, Any]:
    """Return what a user's advantages get if they name it: the number of the step, columns of the
    rows as lists, values of the reward functions, and lengths."""
    # A column or a reward with the name "step" comes before the number.
    by_name = {"step": step} | {name: [row[name] for row in columns] for name in columns[0]}
    by_name |= dict(zip(names, values_PGF.unbind(dim=-1), strict=True))
    by_name["lengths_PG"] = lengths_PG
    return by_name


def _try(
    config: Config,
    key: str,
    files: dict[str, str],
    try_step: Callable[[int], None],
) -> None:
    """Try the function that a key names, for the first and the last step, as a term of it may fade
    in or out. Turn whatever it raises into a ValueError of one line."""
    # Without max_steps the rows are not counted yet.
    last_step = (config.optim.max_steps or 101) - 1
    for step in (0, last_step):
        try:
            try_step(step)
        except Exception as error:  # the user's function may raise anything
            # The last file defines the function: the message names the line there.
            file = next(reversed(files.values()), "")
            raise ValueError(
                f"algorithm.{key}={getattr(config.algorithm, key)}{describe_error(error, file)} "
                f"(docs/algorithm.md has its arguments; tried at step {step}, "
                f"own_args: {config.algorithm.own_args})"
            ) from error


def _load(algorithm: AlgorithmConfig, key: str, files: dict[str, str]) -> Any:
    """Load the function that a key names, with the arguments of the configuration as its own
    parameters, and add its source files to ``files``. Returns None if the key is empty."""
    name = getattr(algorithm, key)
    if not name:
        return None
    args = algorithm.own_args.get(key, {})
    function = load_object(name, f"algorithm.{key}")
    files |= source_files(name, function)
    # A partial shows parameters after a bound one as keyword-only: a misspelt name among them would
    # be taken for a parameter of the user's own.
    parameters = inspect.getfullargspec(function).kwonlyargs
    unknown = args.keys() - parameters
    if unknown:
        raise ValueError(
            f"algorithm.own_args.{key}: {name} has no parameter {', '.join(unknown)} after *; "
            f"it has {', '.join(parameters) or 'none'}"
        )
    return partial(function, **args)


def _try_objective(
    function: UserObjective,
    warn: Callable[[str], None],
    loss_metrics: set[str],
    step: int,
) -> None:
    """Check the loss and its gradient on rows of 2, 1, 0 and 1 tokens, with ratios above and below
    the bounds, and at 1. In the second row the policy is the old one, and in the fourth nearly so:
    no trust region of a loss leaves these out.

    In other micro-batches a row has other neighbours and more padding. Loss and gradient must not
    depend on this.

    Warn if a sign seems wrong. The loss with advantages of 0, which occur in every run, is its
    penalties, such as a KL, and the rest of its gradient is that of the policy.

    Raises:
        ValueError: if loss or gradient depend on other rows or on padding, or are not finite, or if
            there is no gradient.
    """
    # In the first step the policy before the updates is the reference, too.
    old_logprobs_BT = torch.tensor([[-1.2, -2.0], [-1, 0], [0, 0], [-0.8, 0]])
    logprobs_BT = torch.tensor([[-0.5, -2.7], [-1, 0], [0, 0], [-0.799, 0]], requires_grad=True)
    advantages_B = torch.tensor([1.0, -1.0, 2.0, 0.5])
    mask_BT = old_logprobs_BT < 0

    def loss_of(
        rows: slice = slice(None),
        num_padding: int = 0,
        advantages_B: Tensor = advantages_B,
    ) -> Tensor:
        def cut(values_BT: Tensor) -> Tensor:
            return pad(values_BT[rows], (0, num_padding))

        loss_sum, stats = policy_loss(
            cut(logprobs_BT),
            cut(old_logprobs_BT),
            advantages_B[rows],
            cut(mask_BT),
            ref_logprobs_BT=cut(old_logprobs_BT),
            sampling_logprobs_BT=cut(old_logprobs_BT),
            objective=function,
            step=step,
        )
        loss_metrics.update(stats)
        return loss_sum

    loss = loss_of()
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    if not gradient_BT.any():
        raise ValueError("the loss has no gradient")
    if not (loss.isfinite() and gradient_BT.isfinite().all()):
        raise ValueError(f"the loss ({loss:g}) or its gradient is not finite")
    other_losses = {
        "the other rows": sum(loss_of(slice(b, b + 1)) for b in range(4)),
        "the number of padding columns": loss_of(num_padding=2),
    }
    for others, other_loss in other_losses.items():
        (other_gradient_BT,) = torch.autograd.grad(other_loss, logprobs_BT)
        if not torch.allclose(gradient_BT, other_gradient_BT, atol=1e-6):
            raise ValueError(
                f"the loss of a row or its gradient depends on {others} (or on chance), and so the "
                "update on how the batch is cut"
            )
    penalty = loss_of(advantages_B=torch.zeros(4))
    (penalty_gradient_BT,) = torch.autograd.grad(penalty, logprobs_BT)
    policy_BT = gradient_BT - penalty_gradient_BT
    # The first row has a positive advantage. Its first token has become more likely than the bounds
    # allow, its second less likely. The second row has a negative advantage.
    above, below = policy_BT[0]
    is_sign_right = below <= 0 <= policy_BT[1, 0] and policy_BT.any()
    if not is_sign_right or above < below == 0:
        warn(
            "warning: algorithm.objective raises the probability of a token with a negative "
            "advantage, or lowers that of one with a positive advantage and a ratio below 1, or "
            "leaves that one as it is and raises one above its bounds (max for min?), or gives NaN "
            "for advantages of 0: is its sign right, and does it use A_B1?"
        )
    # A penalty of either policy makes the first token less likely, or the second more likely.
    above, below = penalty_gradient_BT[0]
    if penalty and above <= 0 <= below:
        warn(
            "warning: where advantages are 0, algorithm.objective is not 0, and its gradient is 0, "
            "or moves tokens away from the old policy and the reference: is the sign of a penalty "
            "right, and is it not detached?"
        )
