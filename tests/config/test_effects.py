"""Notes on keys that change nothing beside the values of other keys."""

from pathlib import Path

import pytest
import torch

from grpo.algorithm.loss import policy_loss
from grpo.config import PRESETS, Config, keys_without_effect, load_config, make_config
from grpo.run.summary import warnings_of

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
TWO_UPDATES = {"algorithm.num_iterations": 2}
FUNCTION = {"rollout.function": "file.py:rollout"}
HUB = {"data.dataset": "openai/gsm8k"}
OWN = {"algorithm.advantages": "file.py:f"}
WEIGHTED_KL = {"algorithm.name": "rloo", "algorithm.beta": 0.1, "algorithm.unbiased_kl": True}
"""The ratio weights the KL."""


@pytest.mark.parametrize(
    ("key", "value", "without", "with_effect"),
    [
        ("algorithm.epsilon", 0.1, {}, TWO_UPDATES),
        ("algorithm.epsilon_high", 0.3, {}, {"algorithm.num_minibatches": 2}),
        ("algorithm.delta", 3.0, {}, TWO_UPDATES),
        ("algorithm.epsilon_high", 0.3, {"algorithm.name": "cispo"}, {"algorithm.name": "dppo_tv"}),
        ("algorithm.epsilon", 0.1, {"algorithm.name": "cispo"} | TWO_UPDATES, {"algorithm.objective": "file.py:f"}),
        ("algorithm.epsilon", 0.1, {"algorithm.name": "sapo"} | TWO_UPDATES, TWO_UPDATES),
        ("algorithm.delta", 3.0, {"algorithm.objective": "file.py:f"} | TWO_UPDATES, TWO_UPDATES),
        ("algorithm.importance_level", "sequence", {"algorithm.name": "rloo"}, {}),
        ("algorithm.importance_level", "sequence", {"algorithm.name": "rloo", "algorithm.beta": 0.1}, WEIGHTED_KL),
        ("algorithm.baseline", "none", OWN, OWN | {"algorithm.dynamic_sampling": True}),
        ("algorithm.name", "gdpo", OWN, {}),
        ("algorithm.advantage_eps", 0.0, {"algorithm.scale": "none"}, {}),
        ("algorithm.normalize_constant", 9, {}, {"algorithm.aggregation": "constant"}),
        ("algorithm.sampler_correction_max", 2.0, {}, {"algorithm.sampler_correction": "token_truncate"}),
        ("algorithm.kl_estimator", "k1", {"algorithm.beta": 0}, {}),
        ("model.reference", "x", {"algorithm.beta": 0.0}, {}),
        ("algorithm.ref_sync_steps", 2, {"algorithm.name": "dapo"}, {}),
        ("algorithm.ref_sync_alpha", 0.5, {}, {"algorithm.ref_sync_steps": 2}),
        ("lora.dropout", 0.1, {"model.disable_dropout": False}, {"model.disable_dropout": False, "lora.rank": 2}),
        ("lora.alpha", 4, {"lora.rank": 0}, {"lora.rank": 2}),
        ("data.train_split", "train[:50%]", {}, {"data.dataset": "a.jsonl"}),
        ("data.train_split", "train[:50%]", {"data.dataset": "python:rows"}, HUB),
        ("data.train_split", "train[:50%]", {"data.dataset": "none", "environment": "a.py:B"}, HUB),
        ("data.eval_split", "test", {"data.dataset": "reasoning_gym:chain_sum"}, {"data.dataset": "a.csv"}),
        ("data.eval_split", "test", HUB | {"data.eval_dataset": "builtin:countdown"}, HUB),
        ("data.config_name", "main", {}, HUB),
        ("data.config_name", "main", {"data.dataset": "a.parquet"}, {"data.eval_dataset": "openai/gsm8k"}),
        ("tools_format", "tags", FUNCTION, {"tools": ["calculator"]}),
        ("rollout.max_turns", 3, {}, {"environment": "a.py:B"}),
        ("rollout.max_tool_tokens", 3, FUNCTION, {"tools": ["calculator"]}),
        ("rollout.keep_sampling_mask", True, FUNCTION | {"rollout.top_k": 3}, {"rollout.top_k": 3}),
        ("runtime.fast_decode", False, {"rollout.engine": "vllm"}, {}),
        ("eval.top_k", 3, {}, {"eval.temperature": 0.5}),
        ("eval.min_p", 0.1, {}, {"eval.temperature": 0.5}),
        ("optim.num_epochs", 3, {"optim.max_steps": 9}, {}),
    ],
)
def test_a_key_that_changes_nothing_is_named(key, value, without, with_effect):
    assert key in keys_without_effect(make_config(without | {key: value}))
    assert key not in keys_without_effect(make_config(with_effect | {key: value}))


def test_no_evaluation_is_an_effect():
    assert keys_without_effect(make_config({"data.eval_split": None})) == {}


@pytest.mark.parametrize("objective", ["clip", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_bounds_change_no_gradient_of_the_first_update(objective, level):
    """With one update a rollout the old log-probs are the new ones: the ratio is 1, inside of all bounds."""
    torch.manual_seed(0)
    sampled_BT = torch.randn(4, 5)
    advantages_B = torch.tensor([1.0, -2.0, 0.5, -0.1])
    mask_BT = torch.arange(5) < torch.tensor([[5], [3], [1], [4]])

    def gradient(**bounds):
        logprobs_BT = sampled_BT.clone().requires_grad_()
        loss, _ = policy_loss(
            logprobs_BT,
            logprobs_BT.detach(),
            advantages_B,
            mask_BT,
            objective=objective,
            importance_level=level,
            **bounds,
        )
        loss.backward()
        return logprobs_BT.grad

    expected = gradient()
    assert expected.abs().sum() > 0
    for bounds in ({"epsilon": 0.0}, {"epsilon": 0.0, "epsilon_high": 9.0}, {"epsilon": 0.0, "delta": 1.01}):
        assert torch.equal(gradient(**bounds), expected)


def test_only_what_the_user_set_is_named(tmp_path):
    """Presets and other keys set such keys as well, which is no concern of the user's."""
    for name in PRESETS:
        assert keys_without_effect(make_config({"algorithm.name": name})) == {}
    for path in CONFIGS:
        assert keys_without_effect(load_config(["--config", str(path)])) == {}, path.name
    assert keys_without_effect(make_config({"rollout.engine": "vllm"})) == {}

    # A value that is the default anyway changes nothing with any setting.
    assert keys_without_effect(make_config({"algorithm.epsilon": 0.2, "rollout.max_turns": None})) == {}

    file = tmp_path / "run.yaml"
    file.write_text("rollout: {max_turns: 3}")
    ways = [
        load_config(["--config", str(file)]),
        load_config(["rollout.max_turns=3"]),
        load_config(["rollout.max_turns=3", "--debug"]),
        make_config(str(file)),
        make_config(None, {"rollout": {"max_turns": 3}}),
        make_config(make_config({"rollout.max_turns": 3}), {"seed": 1}),
        Config(rollout={"max_turns": 3}),
    ]
    for config in ways:
        assert keys_without_effect(config) == {"rollout.max_turns": "without tools or environment"}


def test_a_note_for_each_key():
    config = make_config({"rollout.max_turns": 3, "algorithm.beta": 0, "algorithm.unbiased_kl": True})
    notes = [line for line in warnings_of(config, [], []) if "has no effect" in line]
    assert sorted(notes) == [
        "note: algorithm.unbiased_kl has no effect with algorithm.beta=0.0",
        "note: rollout.max_turns has no effect without tools or environment",
    ]


def test_a_rollout_function_keeps_the_warning_about_its_filters():
    values = FUNCTION | {"rollout.top_k": 3}
    for more in ({}, {"rollout.keep_sampling_mask": True}):
        (line,) = [line for line in warnings_of(make_config(values | more), [], []) if "top_k=3" in line]
        assert "so the gradient estimate is biased" in line and "without rollout.function" in line
