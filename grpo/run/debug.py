"""Prints and checks of ``--debug``: shapes, dtypes and times of each phase, one group in full, a verdict at the end."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo.config import Config
from grpo.run.records import Run
from grpo.run.step import Step
from grpo.telemetry.accumulator import Accumulator
from grpo.telemetry.records import read_steps


def show_step(run: Run, step: Step) -> None:
    """Print one step before its update, and check its batch (AssertionError, see :func:`check_batch`)."""
    show = run.log.reporter.print
    batch = step.batch
    show(f"\n--- step {step.number} " + "-" * 60)
    policy = type(run.learner.policy.model).__name__
    weights = next(run.learner.policy.model.parameters())
    precision = run.config.runtime.precision
    show(f"policy    {policy}, weights {weights.dtype} on {weights.device}, compute {precision}")
    for phase in ("rollout", "reward", "logprobs"):
        seconds = step.seconds[phase]
        show(f"{phase:9} {seconds:.3f} s")
    for name, tensor in vars(batch).items():
        if isinstance(tensor, Tensor):
            shape = str(tuple(tensor.shape))
            dtype = str(tensor.dtype).removeprefix("torch.")
            show(f"  {name:22} {shape:12} {dtype:8} {tensor.device}")

    group = step.groups[0]
    problem = group.problem
    length = len(problem.prompt_ids)
    prompt = run.learner.policy.tokenizer.decode(problem.prompt_ids)
    show(f"problem {problem.index}, {length} prompt tokens, as the model sees it:")
    show(textwrap.indent(prompt, "  | "))
    if "answer" in problem.columns:
        answer = problem.columns["answer"]
        show(f"reference answer: {answer}")

    values_PGF = run.world.own_rows(step.values_PGF)
    for g, completion in enumerate(group.completions):
        rewards = []
        for name, value in zip(
            run.tasks.rewards.names,
            values_PGF[0, g].tolist(),
            strict=True,
        ):
            rewards.append(f"{name} {value:g}")
        end = "finished" if completion.finished else "truncated"
        advantage = f"advantage {batch.advantages_B[g]:+.4f}"
        scores = ", ".join(rewards)
        show(f"completion {g}: {completion.size}, {end}; {scores}; {advantage}")
        show(textwrap.indent(completion.transcript, "  | "))
    check_batch(run, step)


def check_batch(run: Run, step: Step) -> None:
    """Check masks against the recorded lengths, EOS, finiteness, and in the first step the KL.

    Raises:
        AssertionError: naming what does not hold.
    """
    batch = step.batch
    completions = []
    for group in step.groups:
        completions.extend(group.completions)

    checks = ["masks = lengths"]
    lengths = [len(completion.sampled_ids) for completion in completions]
    mask_lengths = batch.completion_mask_BT.sum(dim=1).tolist()
    assert mask_lengths == lengths, "mask sums differ from the recorded lengths"

    for b, completion in enumerate(completions):
        size = int(batch.prompt_lengths_B[b]) + len(completion.ids)
        last = int(batch.sequence_ids_BS[b, size - 1])
        assert last == completion.ids[-1], "the last token of a completion is not where the mask ends"
        # Stop strings end in other tokens than EOS.
        if completion.finished and not run.config.rollout.stop:
            assert last in run.learner.policy.eos_ids, "EOS is not inside the mask"
            checks.append("EOS inside the mask")

    for name, tensor in vars(batch).items():
        is_finite = not isinstance(tensor, Tensor) or torch.isfinite(tensor).all()
        assert is_finite, f"{name} is not finite"
    checks.append("all finite")

    has_reference = batch.ref_logprobs_BT is not None
    if has_reference and step.number == 0 and kl_starts_at_0(run.config):
        with torch.no_grad(), run.learner.policy.autocast():
            new_BT, _ = run.learner.bare_scorer(*batch.scorer_inputs)
            ref_BT, _ = run.learner.ref_scorer(*batch.scorer_inputs)
        assert torch.equal(new_BT, ref_BT), "KL is not 0 at step 0 although policy and reference have the same weights"
        checks.append("KL = 0 before the first update")
    passed(run, checks)


def kl_starts_at_0(config: Config) -> bool:
    """True if the reference begins as the policy and computes the same numbers."""
    return config.model.disable_dropout and config.model.reference is None


def check_update(run: Run, metrics: Accumulator) -> None:
    """AssertionError if the importance ratio of the run's first update is not 1 (without dropout)."""
    if run.learner.optimizer.state:
        return
    name = "importance ratio of the first update"
    ratio = metrics.reduce(run.world)["ratio"]
    if math.isnan(ratio):
        run.log.reporter.print(f"unchecked {name}: no completion has an advantage")
    elif not run.config.model.disable_dropout:
        run.log.reporter.print(f"unchecked {name}: {ratio:.6f}, since dropout changes it")
    else:
        is_fp32 = run.config.runtime.precision == "fp32"
        tolerance = 1e-5 if is_fp32 else 1e-2
        is_1 = abs(ratio - 1) < tolerance
        assert is_1, f"{name} is {ratio}, not 1"
        passed(run, [f"{name}: {ratio:.6f}"])


def passed(run: Run, checks: Sequence[str]) -> None:
    """Print the names of checks that were made and have passed, and record them for the verdict."""
    run.debug_checks.extend(checks)
    run.log.reporter.print(f"checked   {listed(checks)}")


def listed(checks: Sequence[str]) -> str:
    """Each name once, separated by commas."""
    return ", ".join(dict.fromkeys(checks))


def show_verdict(run: Run) -> None:
    """Print the checks that were made (a failed one has ended the run), and what looks wrong in the metrics."""
    show = run.log.reporter.print
    show("\n--- verdict " + "-" * 59)
    show(f"checked   all checks have passed: {listed(run.debug_checks)}")
    lines = read_steps(Path(run.config.output_dir) / "metrics.jsonl")
    steps = [line for line in lines if "reward" in line]
    hints = run.log.reporter.hints.verdict()
    longest = run.config.rollout.max_completion_length
    found = list(suspicions(steps, hints, longest))
    for text in found:
        show(f"suspect   {text}")
    before = "if what is printed above is as you expect"
    if found:
        before = "once that is explained"
    show(f"next      {before}: the same command without --debug, which shortens completions")


def suspicions(
    steps: Sequence[dict[str, Any]],
    hints: Mapping[str, str],
    longest: int,
) -> Iterator[str]:
    """One line for each thing in the metrics of the steps that would keep a run from learning.

    Args:
        hints: those that hold for the steps, by the names of their rules.
        longest: most tokens of a completion.
    """
    rewards = {step["reward"] for step in steps}
    has_one_reward = len(rewards) == 1 and all(step["reward_std"] == 0.0 for step in steps)
    if has_one_reward:
        yield (
            f"every completion got reward {rewards.pop():g}: compare completions and answer above, "
            "then change the reward, or the format that the prompt asks for, or take easier problems"
        )
    left_out = {"shared cores"}  # which makes a run slow, not wrong
    if has_one_reward or "no score" in hints:
        left_out.add("equal rewards")  # the cause is named
    for name, hint in hints.items():
        if name == "truncation":
            yield f"{hint} (--debug lowers the limit, here to {longest})"
        elif name not in left_out:
            yield hint
