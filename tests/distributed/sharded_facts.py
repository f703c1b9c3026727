"""Started on several ranks: prepares a run, and rank 0 saves what the ranks hold.

    python sharded_facts.py FILE ARGUMENTS OF train_grpo.py

FILE gets ``bytes``, for each rank its bytes of weights, gradients and Adam's averages after an
update; ``weights`` and ``states``, full tensors by name as they were restored; ``num_parameters``;
and ``is_llama``, of the engine."""

import sys

import torch

from grpo.config import load_config
from grpo.distributed import full_tensor, gradient_sync, local_shard, start_world
from grpo.model import num_parameters
from grpo.run.prepare import prepare


def main(file: str, arguments: list[str]) -> None:
    config = load_config(arguments)
    world = start_world(config.runtime)
    run = prepare(config, world)
    model = run.learner.policy.model
    weights = {
        name: full_tensor(tensor.detach()).clone() for name, tensor in model.named_parameters()
    }
    states = {
        name: full_tensor(tensor.detach()).clone()
        for name, tensor in run.log.saver.trained.optimizer_and_reference().items()
    }

    with gradient_sync(run.learner.scorer, enabled=True):
        run.learner.policy.score_one_token(run.learner.scorer).backward()
    run.learner.optimizer.step()
    averages = [
        state[key]
        for state in run.learner.optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    ]
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    held = [*model.parameters(), *gradients, *averages]
    # of which several may be views of one
    storages = [local_shard(tensor).untyped_storage() for tensor in held]
    own = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    facts = dict(
        bytes=world.gather_objects(own),
        weights=weights,
        states=states,
        num_parameters=num_parameters(model),
    )
    facts["is_llama"] = run.sampler.engine.policy.is_llama
    if world.is_main:
        torch.save(facts, file)
    run.close()
    world.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
