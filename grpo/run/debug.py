"""Prints and checks of ``--debug``: tensors and times of each step, one group, a verdict."""

from __future__ import annotations

import math
import textwrap

from torch import Tensor

from grpo.run.records import Learner, Run
from grpo.run.step import Step
from grpo.telemetry.accumulator import Accumulator


def show_step(run: Run, step: Step) -> None:
    """Print one step before its update, its first group in full, and check its batch.

    Raises:
        AssertionError: naming what does not hold.
    """
    show = run.log.reporter.print
    batch = step.batch
    show(f"\n--- step {step.number} ---")
    for phase in ("rollout", "reward", "logprobs"):
        show(f"{phase:9} {step.seconds[phase]:.3f} s")
    for name, tensor in vars(batch).items():
        if isinstance(tensor, Tensor):
            shape = tuple(tensor.shape)
            show(f"  {name:22} {shape!s:12} {tensor.dtype} {tensor.device}")
            assert tensor.isfinite().all(), f"{name} is not finite"

    group = step.groups[0]
    problem = group.problem
    prompt = run.learner.policy.tokenizer.decode(problem.prompt_ids)
    show(f"problem {problem.index}, {len(problem.prompt_ids)} tokens, as the model sees it:")
    show(textwrap.indent(prompt, "  | "))
    show(f"reference answer: {problem.columns.get('answer')}")
    for g, completion in enumerate(group.completions):
        end = "finished" if completion.finished else "truncated"
        show(f"completion {g}: {completion.size}, {end}, advantage {batch.advantages_B[g]:+.4f}")
        values = step.values_PGF[0, g].tolist()
        for name, value in zip(run.tasks.rewards.names, values, strict=True):
            show(f"  {name} {value:g}")
        show(textwrap.indent(completion.transcript, "  | "))

    _check_masks(run.learner, step)
    show("checked   all finite, masks = lengths, last tokens inside")


def _check_masks(learner: Learner, step: Step) -> None:
    """Check that each mask holds the sampled tokens up to the last, which is EOS if finished."""
    batch = step.batch
    completions = []
    for group in step.groups:
        completions.extend(group.completions)
    for b, completion in enumerate(completions):
        num_masked = batch.completion_mask_BT[b].sum()
        assert num_masked == len(completion.sampled_ids), "a mask differs from the recorded length"
        end = batch.lengths_B[b] - 1
        last = int(batch.sequence_ids_BS[b, end])
        assert last == completion.ids[-1], "a mask does not end with its completion"
        # Stop strings end in other tokens than EOS.
        if completion.finished and not learner.config.rollout.stop:
            assert last in learner.policy.eos_ids, "EOS is not inside the mask"


def check_update(learner: Learner, metrics: Accumulator) -> None:
    """Check that at the first update the importance ratio is 1 and the KL is 0, without dropout.

    Raises:
        AssertionError: with the value that differs.
    """
    show = learner.reporter.print
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
        mean = means[name]
        what = f"{name} of the first update: {mean:.6f}"
        if math.isnan(mean):
            show(f"unchecked {what}, since no completion has an advantage")
        else:
            assert abs(mean - value) < tolerance, f"{what}, not {value}"
            show(f"checked   {what}")


def show_verdict(run: Run) -> None:
    """Print what the metrics say against the run: a check that fails has ended it before."""
    show = run.log.reporter.print
    show("\nverdict   no check has failed")
    for hint in run.log.reporter.hints.verdict().values():
        show(f"suspect   {hint}")
    show("next      the same command without --debug, which shortens completions")
