"""Started by test_cut_invariance.py: updates from fixed groups, of which each rank has its share.

    gradients.py OUTPUT.pt MODEL AGGREGATION,TOKENS_PER_MICROBATCH,PACKED,ROWS ...

PACKED is packed or padded; ROWS is kl (beta 0.1), all (beta 0), skip (beta 0, without the rows of
advantage 0), entropy (skip, with the policy term of the fifth of the tokens with the highest
entropy) or corrected (kl, with the options in CORRECTED). ``section.key=value`` among them is a
setting of the run."""

import sys
from dataclasses import replace
from functools import partial

import torch
from conftest import small_run

from grpo.algorithm.advantages import group_advantages
from grpo.algorithm.batch import Completion, Group, Problem, collate, skip_zero_advantage
from grpo.config import load_config, make_config
from grpo.distributed import start_world, wrap_data_parallel
from grpo.run.prepare import prepare
from grpo.run.records import Run, Step
from train_grpo import update, with_old_and_ref_logprobs

P, G = 6, 4
CORRECTED = dict(
    objective="sapo",
    unbiased_kl=True,
    sampler_correction="sequence_truncate",
    off_policy_mask_threshold=0.5,
)


def fixed_groups() -> list[Group]:
    """Prompts and completions of uneven length, one completion truncated; the same on every
    rank."""
    rng = torch.Generator().manual_seed(0)
    groups = []
    for p in range(P):
        prompt = tuple(torch.randint(3, 250, (3 + 4 * p,), generator=rng).tolist())
        lengths = torch.randint(1, 16, (G,), generator=rng).tolist()
        completions = tuple(
            Completion(
                tuple(torch.randint(3, 250, (n,), generator=rng).tolist()),
                "",
                finished=(p, g) != (2, 1),
            )
            for g, n in enumerate(lengths)
        )
        groups.append(Group(Problem(p, "", prompt), completions))
    return groups


def sampled(completion: Completion) -> Completion:
    """The completion with uneven log-probs of sampling."""
    mean = -3.0 if len(completion.ids) % 2 else -14.0
    logprobs = tuple(mean - i % 4 for i in completion.ids)
    return replace(completion, sampling_logprobs=logprobs)


def main(output: str, model: str, *cuts: str) -> None:
    more = [cut for cut in cuts if "=" in cut]
    cuts = [cut for cut in cuts if "=" not in cut]
    arguments = [
        *small_run(model, f"{output}.run"),
        "algorithm.beta=0.1",
        "algorithm.num_iterations=2",
    ]
    arguments += [
        "algorithm.mask_truncated_completions=true",
        "optim.max_steps=1",
        "optim.max_grad_norm=1e9",
    ]
    config = load_config([*arguments, "rollout.max_completion_length=16", *more])
    world = start_world(config.runtime)
    # Everything in float64, so that rounding cannot hide a difference of method; the reference is
    # unlike the policy.
    torch.set_default_dtype(torch.float64)
    run = prepare(config, world)
    run.learner.ref_scorer.model.double()
    for model in (run.learner.policy.model.double(), run.learner.ref_scorer.model):
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(rms_norm, module)
    scorer = wrap_data_parallel(run.learner.bare_scorer, world, run.learner.policy.score_one_token)
    run = replace(run, learner=replace(run.learner, scorer=scorer))
    with torch.no_grad():
        if run.learner.policy.adapter is None:
            for parameter in run.learner.ref_scorer.model.parameters():
                parameter *= 1.1
        else:  # the reference is the model without its adapter, whose second matrices begin at 0
            for name, parameter in run.learner.policy.adapter.named_parameters():
                parameter += 0.1 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(len(name))
                )
    assert run.learner.bare_scorer.is_packed and run.learner.ref_scorer.is_packed
    before = {name: p.detach().clone() for name, p in run.learner.policy.model.named_parameters()}
    results = {}
    for cut in cuts:
        aggregation, tokens, packed, rows = cut.split(",")
        beta = config.algorithm.beta if rows in ("kl", "corrected") else 0.0
        algorithm = {"aggregation": aggregation, "beta": beta}
        algorithm["top_entropy_quantile"] = 0.2 if rows == "entropy" else 1.0
        algorithm |= CORRECTED if rows == "corrected" else {}
        changed = make_config(
            config, {"algorithm": algorithm, "optim.tokens_per_microbatch": int(tokens)}
        )
        # with LoRA one for both
        for scorer in (
            run.learner.bare_scorer,
            getattr(run.learner.ref_scorer, "scorer", run.learner.ref_scorer),
        ):
            scorer.is_packed = packed == "packed"
        run.learner.policy.model.load_state_dict(before)
        ref_scorer = run.learner.ref_scorer if beta else None
        learner = replace(run.learner, config=changed, ref_scorer=ref_scorer)
        changed_run = replace(run, config=changed, learner=learner)
        results[cut] = two_updates(changed_run, skips=rows in ("skip", "entropy"))
    if world.is_main:
        torch.save(results, output)
    run.close()
    world.shutdown()


def rms_norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """In the dtype of the input; transformers computes it in fp32."""
    return (
        module.weight
        * x
        * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + module.variance_epsilon)
    )


def two_updates(run: Run, *, skips: bool) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The change of each weight, and the reported metrics. Of three ranks, one has only groups of
    equal rewards."""
    world = run.world
    optimizer = torch.optim.SGD(run.learner.policy.model.parameters(), lr=0.05)
    run = replace(run, learner=replace(run.learner, optimizer=optimizer))
    rewards_PG = torch.rand(P, G, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rewards_PG[1::3] = 0.5
    advantages_PG = group_advantages(rewards_PG)
    mine, groups = slice(world.rank, None, world.size), fixed_groups()
    if run.config.algorithm.unbiased_kl:
        groups = [
            replace(group, completions=tuple(map(sampled, group.completions))) for group in groups
        ]
    batch = collate(
        groups[mine], advantages_PG[mine], pad_id=run.learner.policy.pad_id, mask_truncated=True
    )
    if skips:
        batch = skip_zero_advantage(batch)
    batch = with_old_and_ref_logprobs(run.learner, batch)
    before = {name: p.detach().clone() for name, p in run.learner.policy.model.named_parameters()}
    step = Step(0)
    for _ in range(2):
        update(run.learner, step, batch, is_first_iteration=False)
    moved = {
        name: before[name] - p.detach() for name, p in run.learner.policy.model.named_parameters()
    }
    return moved, step.metrics.reduce(world)


if __name__ == "__main__":
    main(*sys.argv[1:])
