"""Prints and checks of ``--debug``: shapes, dtypes, devices and times of each phase, one group in full."""

from __future__ import annotations

import math
import textwrap

import torch
from torch import Tensor

from grpo.batch import Batch, Group
from grpo.run.state import Run
from grpo.telemetry.accumulator import Accumulator


def show_step(
    run: Run, step: int, groups: list[Group], values_PGF: Tensor, advantages_PG: Tensor, batch: Batch, seconds: dict
) -> None:
    """Print one step before its update, and check its batch (AssertionError, see :func:`check_batch`)."""
    show, model = run.reporter.print, run.policy.model
    show(f"\n--- step {step} " + "-" * 60)
    weights, precision = next(model.parameters()), run.config.runtime.precision
    show(f"policy    {type(model).__name__}, weights {weights.dtype} on {weights.device}, compute {precision}")
    for phase in ("rollout", "reward", "logprobs"):
        show(f"{phase:9} {seconds[phase]:.3f} s")
    for name, tensor in vars(batch).items():
        if tensor is not None:
            show(f"  {name:22} {tuple(tensor.shape)!s:12} {str(tensor.dtype).removeprefix('torch.'):8} {tensor.device}")
    problem = groups[0].problem
    show(f"problem {problem.index}, {len(problem.prompt_ids)} prompt tokens, as the model sees it:")
    show(textwrap.indent(run.policy.tokenizer.decode(problem.prompt_ids), "  | "))
    for g, completion in enumerate(groups[0].completions):
        rewards = ", ".join(f"{n} {v:g}" for n, v in zip(run.rewards.names, values_PGF[0, g].tolist(), strict=True))
        end = "finished" if completion.finished else "truncated"
        show(f"completion {g}: {len(completion.ids)} tokens, {end}; {rewards}; advantage {advantages_PG[0, g]:+.4f}")
        show(textwrap.indent(completion.text, "  | "))
    check_batch(run, step, groups, batch)


def check_batch(run: Run, step: int, groups: list[Group], batch: Batch) -> None:
    """Check that masks have the recorded lengths, EOS is inside the mask, tensors are finite, and the KL is 0 before the first update.

    Raises:
        AssertionError: naming what does not hold.
    """
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.ids) for completion in completions]
    assert batch.completion_mask_BT.sum(dim=1).tolist() == lengths, "mask sums differ from the recorded lengths"
    for b, completion in enumerate(completions):
        last = int(batch.sequence_ids_BS[b, int(batch.prompt_lengths_B[b]) + lengths[b] - 1])
        assert last == completion.ids[-1], "the last token of a completion is not where the mask ends"
        ends_in_eos = last in run.policy.eos_ids or run.config.rollout.stop
        assert not completion.finished or ends_in_eos, "EOS is not inside the mask"
    for name, tensor in vars(batch).items():
        assert tensor is None or torch.isfinite(tensor).all(), f"{name} is not finite"
    kl_must_be_0 = batch.ref_logprobs_BT is not None and step == 0 and run.config.model.disable_dropout
    if kl_must_be_0:
        with torch.no_grad(), run.policy.autocast():
            new_BT, _ = run.bare_scorer(*batch.scorer_inputs)
            ref_BT, _ = run.ref_scorer(*batch.scorer_inputs)
        assert torch.equal(new_BT, ref_BT), "KL is not 0 at step 0 although policy and reference have the same weights"
    run.reporter.print("checked   masks = lengths, EOS inside the mask, all finite" + ", KL = 0" * kl_must_be_0)


def check_update(run: Run, metrics: Accumulator) -> None:
    """AssertionError if the importance ratio of the run's first update is not 1 (without dropout)."""
    if run.optimizer.state:
        return
    ratio = metrics.mean("ratio")  # NaN: no token counted
    tolerance = 1e-5 if run.config.runtime.precision == "fp32" else 1e-2
    is_1 = math.isnan(ratio) or not run.config.model.disable_dropout or abs(ratio - 1) < tolerance
    assert is_1, f"importance ratio of the first update is {ratio}, not 1"
    run.reporter.print(f"checked   importance ratio of the first update: {ratio:.6f}")
