"""Started on several ranks: updates a sharded model, syncs its weights to a vLLM server and samples from it.

    python sharded_vllm.py FILE ADDRESS ARGUMENTS OF train_grpo.py

FILE gets ``weights``, whole tensors by name, and ``ids``, for each rank those of its completions.
"""

import sys
from functools import partial

import torch

from grpo.config import load_config
from grpo.distributed import gathered_on_main, gradient_sync, start_world
from grpo.rollout.vllm import VLLMEngine
from grpo.run.models import any_forward
from grpo.run.prepare import prepare


def main(file: str, address: str, arguments: list[str]) -> None:
    config = load_config(arguments)
    world = start_world(config.runtime)
    run = prepare(config, world)
    build = partial(VLLMEngine, run.policy, [address], world=world, rollout=config.rollout, root=run.scorer)
    engine = build(probe_ids=range(3, 20))
    ids = []
    for step in range(2):
        with gradient_sync(run.scorer, enabled=True):
            any_forward(run.policy)(run.scorer).backward()
        run.optimizer.step()
        with engine.weights(), world.fail_together():
            groups = engine.generate(run.problems.at(step), run.sampling, address=(0, "rollout", step))
        ids += [c.ids for group in groups for c in group.completions]
    weights = {name: t.clone() for name, t in gathered_on_main(run.policy.model.named_parameters(), world)}
    facts = dict(weights=weights, ids=world.gather_objects(ids))
    if world.is_main:
        torch.save(facts, file)
    engine.close()
    run.close()
    world.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
