"""Started on several ranks: updates a sharded model, syncs its weights to a vLLM server and samples from it.

    python sharded_vllm.py FILE ADDRESS ARGUMENTS OF train_grpo.py

FILE gets ``weights``, whole tensors by name, and ``ids``, for each rank those of its completions.
"""

import sys

import torch

from grpo.config import load_config
from grpo.distributed import gradient_sync, start_world, whole
from grpo.run.models import any_forward
from grpo.run.prepare import prepare
from grpo.vllm.client import Server
from grpo.vllm.engine import VLLMEngine


def main(file: str, address: str, arguments: list[str]) -> None:
    config = load_config(arguments)
    world = start_world(config.runtime)
    run = prepare(config, world)
    servers, folder = [Server(address, 60.0)], config.rollout.weights_folder
    engine = VLLMEngine(run.policy, servers, world=world, weights_folder=folder, root=run.scorer)
    ids = []
    for step in range(2):
        with gradient_sync(run.scorer, enabled=True):
            any_forward(run.policy)(run.scorer).backward()
        run.optimizer.step()
        with engine.weights(), world.fail_together():
            groups = engine.generate(run.problems.at(step), run.sampling, seed_key=(0, "rollout", step))
        ids += [c.ids for group in groups for c in group.completions]
    weights = {name: whole(t.detach()).clone() for name, t in run.policy.model.named_parameters()}
    facts = dict(weights=weights, ids=world.gather_objects(ids))
    if world.is_main:
        torch.save(facts, file)
    engine.close()
    run.close()
    world.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
