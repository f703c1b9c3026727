"""Prints and checks of ``--debug``: the tensors of each step, and one group."""

from __future__ import annotations

import textwrap

from torch import Tensor

from grpo.run.records import Learner, Run, Step
from grpo.telemetry.accumulator import Accumulator


def show_step(run: Run, step: Step) -> None:
    """Print one step before its update, its first group in full, and check its batch.

    Raises:
        AssertionError: naming what does not hold.
    """
    show = run.log.reporter.print
    batch = step.batch
    show(f"\n--- step {step.number} ---")
    for name, tensor in vars(batch).items():
        if isinstance(tensor, Tensor):
            shape = tuple(tensor.shape)
            show(f"  {name:22} {shape!s:12} {tensor.dtype} {tensor.device}")
            assert tensor.isfinite().all(), f"{name} is not finite"
    show("checked   all values are finite")

    group = step.groups[0]
    prompt_ids = group.problem.prompt_ids
    prompt = run.learner.policy.tokenizer.decode(prompt_ids)
    show(f"problem {group.problem.index}, {len(prompt_ids)} tokens, as the model sees it:")
    show(textwrap.indent(prompt, "  | "))
    show(f"reference answer: {group.problem.columns.get('answer')}")
    for g, completion in enumerate(group.completions):
        end = "finished" if completion.finished else "truncated"
        rewards = dict(zip(run.tasks.rewards.names, step.values_PGF[0, g].tolist(), strict=True))
        advantage = batch.advantages_B[g]
        show(f"completion {g}: {completion.size}, {end}, advantage {advantage:+.4f}, {rewards}")
        show(textwrap.indent(completion.transcript, "  | "))


def check_update(learner: Learner, metrics: Accumulator) -> None:
    """Check that at the first update the importance ratio is 1 and the KL is 0, without dropout.

    Raises:
        AssertionError: with the value that differs.
    """
    model = learner.config.model
    # The optimizer has a state after its first update.
    if learner.optimizer.state or not model.disable_dropout:
        return
    means = metrics.reduce(learner.world)
    expected = {"ratio": 1.0}
    # The KL to another model than the one that is trained has any value.
    if "kl" in means and model.reference is None:
        expected["kl"] = 0.0
    tolerance = 1e-5 if learner.config.runtime.precision == "fp32" else 1e-2
    for name, value in expected.items():
        what = f"{name} of the first update: {means[name]:.6f}"
        assert not abs(means[name] - value) > tolerance, f"{what}, not {value}"
        learner.reporter.print(what)  # NaN, unchecked, if no completion has an advantage
