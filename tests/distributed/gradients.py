"""Run under torchrun by test_cut_invariance.py: one update from fixed groups, this rank's share of them; rank 0 saves it.

torchrun --nproc_per_node=N gradients.py OUTPUT.pt MODEL AGGREGATION TOKENS_PER_MICROBATCH
"""

import sys

import torch

from grpo.advantages import group_advantages
from grpo.batch import Completion, Group, Problem, collate
from grpo.config import load_config
from grpo.distributed import start_world
from grpo.logprobs import CompletionScorer
from grpo.metrics import Accumulator
from grpo.run import prepare, touch_every_parameter
from train_grpo import update, with_old_and_ref_logprobs

P, G = 6, 4


def fixed_groups() -> list[Group]:
    """Uneven prompts and completions, one group of equal rewards, one truncated row; the same on every rank."""
    rng = torch.Generator().manual_seed(0)
    groups = []
    for p in range(P):
        prompt = tuple(torch.randint(3, 250, (3 + 4 * p,), generator=rng).tolist())
        lengths = torch.randint(1, 16, (G,), generator=rng).tolist()
        completions = tuple(
            Completion(tuple(torch.randint(3, 250, (n,), generator=rng).tolist()), "", finished=(p, g) != (2, 1))
            for g, n in enumerate(lengths)
        )
        groups.append(Group(Problem(p, "", prompt), completions))
    return groups


def main(output: str, model: str, aggregation: str, tokens: str) -> None:
    config = load_config(
        [
            f"output_dir={output}.run",
            f"model.name_or_path={model}",
            "data.max_train_samples=64",
            "rollout.prompts_per_step=6",
            "rollout.num_generations=4",
            "rollout.max_completion_length=16",
            f"algorithm.aggregation={aggregation}",
            "algorithm.beta=0.1",
            "algorithm.num_iterations=2",
            "algorithm.mask_truncated_completions=true",
            f"optim.tokens_per_microbatch={tokens}",
            "optim.max_steps=1",
            "optim.max_grad_norm=1e9",
            "runtime.precision=fp32",
            "runtime.threads_per_rank=1",
        ]
    )
    world = start_world(device="cpu", threads_per_rank=1)
    # Double precision (but for the norms, which transformers computes in fp32), and a reference unlike the policy: what is
    # left are differences of method, hardly of rounding.
    torch.set_default_dtype(torch.float64)
    run = prepare(config, world)
    run.policy.model.double()
    scorer = CompletionScorer(run.policy.model)
    run.scorer = world.data_parallel(scorer, touch_every_parameter(run.policy))
    run.ref_scorer.model.double()
    with torch.no_grad():
        for parameter in run.ref_scorer.model.parameters():
            parameter *= 1.1
    run.optimizer = torch.optim.SGD(run.policy.model.parameters(), lr=0.05)

    rewards_PG = torch.rand(P, G, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rewards_PG[4] = 0.5
    advantages_PG = group_advantages(rewards_PG)
    mine = slice(world.rank, None, world.size)
    batch = collate(fixed_groups()[mine], advantages_PG[mine], pad_id=run.policy.pad_id, mask_truncated=True)
    batch = with_old_and_ref_logprobs(run, batch)
    before = {name: p.detach().clone() for name, p in run.policy.model.named_parameters()}
    metrics = Accumulator()
    for _ in range(2):
        update(run, batch, metrics, is_first_pass=False)
    if world.is_main:
        moved = {name: before[name] - p.detach() for name, p in run.policy.model.named_parameters()}
        torch.save(moved, output)
    reduced = metrics.reduce(world)
    if world.is_main:
        torch.save(reduced, output + ".metrics")
    run.close()
    world.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
