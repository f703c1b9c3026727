"""Prints and checks of ``--debug``: shapes, dtypes and times of each phase, one group in full, a verdict at the end."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo.config import Config
from grpo.run.state import Run
from grpo.run.step import Step
from grpo.telemetry.accumulator import Accumulator


def show_step(run: Run, step: Step) -> None:
    """Print one step before its update, and check its batch (AssertionError, see :func:`check_batch`)."""
    show, model, groups, batch = run.reporter.print, run.policy.model, step.groups, step.batch
    show(f"\n--- step {step.number} " + "-" * 60)
    weights, precision = next(model.parameters()), run.config.runtime.precision
    show(f"policy    {type(model).__name__}, weights {weights.dtype} on {weights.device}, compute {precision}")
    for phase in ("rollout", "reward", "logprobs"):
        show(f"{phase:9} {step.seconds[phase]:.3f} s")
    for name, tensor in vars(batch).items():
        if isinstance(tensor, Tensor):
            show(f"  {name:22} {tuple(tensor.shape)!s:12} {str(tensor.dtype).removeprefix('torch.'):8} {tensor.device}")
    problem, values_PGF = groups[0].problem, run.world.own_rows(step.scores.values_PGF)
    show(f"problem {problem.index}, {len(problem.prompt_ids)} prompt tokens, as the model sees it:")
    show(textwrap.indent(run.policy.tokenizer.decode(problem.prompt_ids), "  | "))
    if "answer" in problem.columns:
        show(f"reference answer: {problem.columns['answer']}")
    for g, completion in enumerate(groups[0].completions):
        rewards = ", ".join(f"{n} {v:g}" for n, v in zip(run.rewards.names, values_PGF[0, g].tolist(), strict=True))
        end, advantage = "finished" if completion.finished else "truncated", batch.advantages_B[g]
        show(f"completion {g}: {completion.size}, {end}; {rewards}; advantage {advantage:+.4f}")
        show(textwrap.indent(completion.transcript, "  | "))
    check_batch(run, step)


def check_batch(run: Run, step: Step) -> None:
    """Check that masks have the recorded lengths, EOS is inside the mask, tensors are finite, and the first KL is 0.

    Raises:
        AssertionError: naming what does not hold.
    """
    batch, completions = step.batch, [completion for group in step.groups for completion in group.completions]
    lengths = [len(completion.sampled_ids) for completion in completions]
    assert batch.completion_mask_BT.sum(dim=1).tolist() == lengths, "mask sums differ from the recorded lengths"
    for b, completion in enumerate(completions):
        last = int(batch.sequence_ids_BS[b, int(batch.prompt_lengths_B[b]) + len(completion.ids) - 1])
        assert last == completion.ids[-1], "the last token of a completion is not where the mask ends"
        ends_in_eos = last in run.policy.eos_ids or run.config.rollout.stop
        assert not completion.finished or ends_in_eos, "EOS is not inside the mask"
    for name, tensor in vars(batch).items():
        assert not isinstance(tensor, Tensor) or torch.isfinite(tensor).all(), f"{name} is not finite"
    kl_must_be_0 = batch.ref_logprobs_BT is not None and step.number == 0 and kl_starts_at_0(run.config)
    if kl_must_be_0:
        with torch.no_grad(), run.policy.autocast():
            new_BT, _ = run.bare_scorer(*batch.scorer_inputs)
            ref_BT, _ = run.ref_scorer(*batch.scorer_inputs)
        assert torch.equal(new_BT, ref_BT), "KL is not 0 at step 0 although policy and reference have the same weights"
    run.reporter.print("checked   masks = lengths, EOS inside the mask, all finite" + ", KL = 0" * kl_must_be_0)


def kl_starts_at_0(config: Config) -> bool:
    """True if the reference begins as the policy and computes the same numbers."""
    return config.model.disable_dropout and config.model.reference is None


def check_update(run: Run, metrics: Accumulator) -> None:
    """AssertionError if the importance ratio of the run's first update is not 1 (without dropout)."""
    if run.optimizer.state:
        return
    ratio = metrics.mean("ratio")  # NaN: no token counted
    if math.isnan(ratio):
        run.reporter.print("checked   no importance ratio in this update: no completion has an advantage")
        return
    tolerance = 1e-5 if run.config.runtime.precision == "fp32" else 1e-2
    is_1 = not run.config.model.disable_dropout or abs(ratio - 1) < tolerance
    assert is_1, f"importance ratio of the first update is {ratio}, not 1"
    run.reporter.print(f"checked   importance ratio of the first update: {ratio:.6f}")


def show_verdict(run: Run) -> None:
    """Print which checks have passed (a failed one has ended the run), and what in ``metrics.jsonl`` looks wrong."""
    lines = map(json.loads, (Path(run.config.output_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    steps = [line for line in lines if "reward" in line]
    checks = [f"in each of {len(steps)} steps masks = lengths, EOS inside the mask, all finite"]
    if run.config.model.disable_dropout:  # see check_batch and check_update
        checks += ["KL = 0 before the first update"] * (run.ref_scorer is not None and kl_starts_at_0(run.config))
        checks += ["importance ratio of the first update = 1"]
    run.reporter.print("\n--- verdict " + "-" * 59)
    run.reporter.print(f"checked   all checks have passed: {'; '.join(checks)}")
    found = list(suspicions(steps, run.config))
    for text in found:
        run.reporter.print(f"suspect   {text}")
    before = "once that is explained" if found else "if what is printed above is as you expect"
    run.reporter.print(f"next      {before}: the same command without --debug, which shortens completions")


def suspicions(steps: Sequence[dict[str, Any]], config: Config) -> Iterator[str]:
    """One line for each thing in the metrics of the steps that would keep a run from learning."""
    found = {name: {step.get(name) for step in steps} for name in steps[0]}
    if found["frac_unscorable"] == {1.0}:
        yield "no completion got a reward, since the reward functions return None for all of them, or fail"
    elif len(found["reward"]) == 1 and found["reward_std"] == {0.0}:
        yield (
            f"every completion got reward {found['reward'].pop():g}: compare completions and answer above, then change "
            "the reward, or the format that the prompt asks for, or take easier problems"
        )
    elif found["frac_reward_zero_std"] == {1.0}:
        yield "completions of each group have equal rewards: take more of them, or problems that are solved sometimes"
    if found["completions/clipped_ratio"] == {1.0}:
        length = config.rollout.max_completion_length
        yield f"every completion was cut off at rollout.max_completion_length={length} (--debug lowers it): raise it"
