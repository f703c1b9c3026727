"""Output and checks of ``--debug``: the tensors and the groups of each step."""

from __future__ import annotations

import textwrap

from torch import Tensor

from grpo.run.records import Learner, Run, Step
from grpo.telemetry.accumulator import Accumulator


def show_step(run: Run, step: Step) -> None:
    """Print the tensors and the groups of a step before its update, and check the tensors.

    Raises:
        AssertionError: if a tensor has a value that is not finite, with the tensor's name.
    """
    show = run.log.reporter.print
    batch = step.batch
    show(f"\n--- step {step.number + 1} ---")
    for name, tensor in vars(batch).items():
        if isinstance(tensor, Tensor):
            show(f"  {name:22} {tuple(tensor.shape)!s:12} {tensor.dtype} {tensor.device}")
            assert tensor.isfinite().all(), f"{name} is not finite"
    show("checked   all values are finite")

    rows = zip(
        step.values_PGF.flatten(0, 1).tolist(),
        batch.advantages_B,
        strict=True,
    )
    is_later = False
    for group in step.groups:
        problem = group.problem
        # The prompt is decoded from the token ids, so that a wrong chat template or a doubled BOS
        # token shows.
        prompt = run.learner.policy.tokenizer.decode(problem.prompt_ids)
        # Prompts mostly begin alike: of the others the end is enough.
        if is_later and prompt[400:]:
            prompt = f"(the end of it) {prompt[-400:]}"
        is_later = True
        show(f"problem {problem.index}, {len(problem.prompt_ids)} tokens, as the model sees it:")
        show(textwrap.indent(prompt, "  | "))
        show(f"columns of its row: {problem.columns!r:.500}")
        for g, completion in enumerate(group.completions):
            values, advantage = next(rows)
            rewards = dict(zip(run.tasks.rewards.names, values, strict=True))
            show(f"completion {g}: {completion.facts}, advantage {advantage:+.4f}, {rewards}")
            show(textwrap.indent(completion.transcript, "  | "))


def check_update(learner: Learner, metrics: Accumulator) -> None:
    """Check that the importance ratio is 1 and the KL is 0 at the first update. With dropout
    nothing is checked.

    Raises:
        AssertionError: if ratio or KL differs, with its value.
    """
    model = learner.config.model
    # AdamW has state only after its first update. With dropout, two passes over the same rows
    # differ.
    if learner.optimizer.state or not model.disable_dropout:
        return
    means = metrics.reduce(learner.world)
    expected = {"ratio": 1.0}
    # With model.reference the policy starts from another model than the reference.
    if "kl" in means and model.reference is None:
        expected["kl"] = 0.0

    # In bf16 two passes over the same rows in other micro-batches round differently.
    tolerance = 1e-5 if learner.config.runtime.precision == "fp32" else 1e-2
    for name, value in expected.items():
        mean = means[name]
        fact = f"{name} of the first update: {mean:.6f}{'' if mean == mean else ': no advantages'}"
        # If all advantages are 0, no ratio was computed. The mean is then NaN, and passes.
        assert not abs(mean - value) > tolerance, f"{fact}, not {value}"
        learner.reporter.print(fact)
