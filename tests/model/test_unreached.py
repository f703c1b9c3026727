"""Parameters that a forward pass over text does not reach are frozen; all others are trained."""

import torch
from architectures import CAN, CANNOT, READS_IMAGES, SIZES, build
from safetensors.torch import load_file
from torch import nn

from grpo.algorithm.logprobs import CompletionScorer
from grpo.distributed import full_trained_weights
from grpo.model import Policy, freeze_unused_by_text, num_parameters, save_weights
from grpo.model.lora import AdapterReference, adapter_parameters, add_adapter, add_reference_adapter

IMAGES_ALONE = ("model.vision_tower.", "model.multi_modal_projector.")
MIXTURES = {
    "mixtral": SIZES | dict(num_local_experts=4),
    "qwen3_moe": SIZES
    | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8),
}


def policy_of(model) -> Policy:
    return Policy(model, None, (2,), 0, torch.device("cpu"), "fp32")


def freeze(policy) -> None:
    scorer = CompletionScorer(policy.model.eval())
    policy.unused_by_text = freeze_unused_by_text(policy.model, policy.score_one_token(scorer))


def lora() -> Policy:
    policy = policy_of(build(*READS_IMAGES))
    settings = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
    add_adapter(policy, settings, base="base")
    return policy


def test_the_vision_tower_is_frozen_and_everything_else_is_trained():
    policy = policy_of(build(*READS_IMAGES))
    freeze(policy)
    ids_BS = torch.arange(3, 40)[None]
    policy.model(input_ids=ids_BS, labels=ids_BS).loss.backward()
    for name, parameter in policy.model.named_parameters():
        assert (
            parameter.requires_grad
            == (not name.startswith(IMAGES_ALONE))
            == (parameter.grad is not None)
        ), name
        assert (name in policy.unused_by_text) == name.startswith(IMAGES_ALONE)
    trained = num_parameters(policy.model, trained=True)
    assert num_parameters(policy.model) == trained + sum(
        p.numel() for p in policy.unused_by_text.values()
    )


def test_nothing_of_a_text_model_is_frozen():
    for kind, settings, *_ in [*CAN.values(), *CANNOT.values(), *MIXTURES.items()]:
        policy = policy_of(build(kind, settings))
        freeze(policy)
        assert policy.unused_by_text == {}, kind


class Experts(nn.Module):
    """The token is sent to the first of two experts, which are modules of their own; the tower has
    no part in it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"one": nn.Linear(2, 2), "other": nn.Linear(2, 2)})]
        )
        self.tower = nn.ModuleList([nn.Linear(2, 2)])


def test_experts_that_another_token_may_reach_are_trained():
    model = Experts()
    output = model.layers[0]["one"](torch.ones(2)).sum()
    assert list(freeze_unused_by_text(model, output)) == ["tower.0.weight", "tower.0.bias"]
    assert all(parameter.requires_grad for parameter in model.layers.parameters())


def test_adapters_of_the_vision_tower_stay_frozen_and_are_in_the_files(tmp_path):
    """Also after peft has switched to the reference and back, and said that it trains the whole
    adapter."""
    policy = lora()
    add_reference_adapter(policy)
    freeze(policy)
    adapters = adapter_parameters(policy.model)
    in_tower = {name for name in adapters if name.startswith("model.vision_tower.")}
    assert policy.unused_by_text.keys() == in_tower and 0 < len(in_tower) < len(adapters)
    scorer = CompletionScorer(policy.model)
    policy.score_one_token(AdapterReference(policy, scorer))
    trained = {
        name for name, parameter in policy.model.named_parameters() if parameter.requires_grad
    }
    assert trained == adapters.keys() - in_tower
    weights = full_trained_weights(policy.trained_model, policy.unused_by_text.values())
    save_weights(policy.trained_model, weights, tmp_path)
    assert len(load_file(tmp_path / "adapter_model.safetensors")) == len(adapters)
