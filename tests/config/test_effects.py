"""Notes on keys that change nothing beside the values of other keys; test_keys.py has each key
alone."""

from pathlib import Path

import pytest
import torch

from grpo.algorithm.loss import policy_loss
from grpo.config import PRESETS, Config, keys_without_effect, load_config, make_config
from grpo.run.summary import warnings_of

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
CASES = """
    algorithm.epsilon=0.1 |  | algorithm.num_iterations=2
    algorithm.epsilon_high=0.3 |  | algorithm.num_minibatches=2
    algorithm.delta=3.0 | algorithm.objective=file.py:f algorithm.num_iterations=2 | algorithm.num_iterations=2
    algorithm.epsilon_high=0.3 | algorithm.name=cispo | algorithm.name=dppo_tv
    algorithm.epsilon=0.1 | algorithm.name=cispo algorithm.num_iterations=2 | algorithm.objective=file.py:f
    algorithm.epsilon=0.1 | algorithm.name=sapo algorithm.num_iterations=2 | algorithm.num_iterations=2
    algorithm.importance_level=sequence | algorithm.name=rloo |
    algorithm.importance_level=sequence | algorithm.name=rloo algorithm.beta=0.1 | algorithm.name=rloo algorithm.beta=0.1 algorithm.unbiased_kl=true
    algorithm.baseline=none | algorithm.advantages=file.py:f | algorithm.advantages=file.py:f algorithm.dynamic_sampling=true
    algorithm.own_args={objective: {a: 1}} |  | algorithm.objective=file.py:f
    algorithm.own_args={advantages: {a: 1}} | algorithm.objective=file.py:f | algorithm.advantages=file.py:f
    algorithm.own_args={loop: {a: 1}} | algorithm.objective=file.py:f | algorithm.loop=file.py:f
    algorithm.scale=none | algorithm.name=gdpo |
    algorithm.name=gdpo | algorithm.advantages=file.py:f |
    algorithm.advantage_eps=0 | algorithm.scale=none |
    algorithm.sampler_correction_max=2 |  | algorithm.sampler_correction=token_truncate
    algorithm.kl_estimator=k1 | algorithm.beta=0 |
    algorithm.ref_sync_steps=2 | algorithm.name=dapo |
    lora.dropout=0.1 | lora.rank=2 | model.disable_dropout=false lora.rank=2
    lora.rank=4 | model.adapter=x |
    lora.base_precision=fp32 | lora.rank=2 runtime.precision=fp32 | lora.rank=2
    data.train_split=train[:50%] | data.dataset=python:rows | data.dataset=openai/gsm8k
    data.train_split=train[:50%] | data.dataset=none environment=a.py:B | data.dataset=a.jsonl
    data.eval_split=test | data.dataset=reasoning_gym:chain_sum | data.dataset=a.csv
    data.eval_split=test | data.dataset=openai/gsm8k data.eval_dataset=builtin:countdown | data.dataset=openai/gsm8k
    data.config_name=main | data.dataset=a.parquet | data.eval_dataset=openai/gsm8k
    data.config_name={a: 1} |  | data.dataset=reasoning_gym:chain_sum
    tools_format=tags |  | tools=[calculator]
    rollout.max_turns=3 |  | environment=a.py:B
    rollout.vllm_command=v {model} | rollout.engine=vllm rollout.server=http://a:1 | rollout.engine=vllm
    rollout.tokens_in_flight=99 | rollout.engine=vllm |
    eval.top_k=3 |  | eval.temperature=0.5
    optim.num_epochs=3 | optim.max_steps=9 |
    checkpoint.accept_changes=true | checkpoint.resume=never |
    logging.project=mine |  | logging.trackio=true
"""
"""A setting | settings beside which it changes nothing | settings beside which it acts."""


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_a_key_that_changes_nothing_is_named(case):
    setting, without, with_effect = case.strip().split(" |")
    key = setting.partition("=")[0]
    assert key in keys_without_effect(load_config([*without.split(), setting]))
    assert key not in keys_without_effect(load_config([*with_effect.split(), setting]))


@pytest.mark.parametrize("objective", ["clip", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_bounds_change_no_gradient_of_the_first_update(objective, level):
    """With one update a rollout the old log-probs are the new ones: the ratio is 1, inside of all
    bounds."""
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
    for bounds in (
        {"epsilon": 0.0},
        {"epsilon": 0.0, "epsilon_high": 9.0},
        {"epsilon": 0.0, "delta": 1.01},
    ):
        assert torch.equal(gradient(**bounds), expected)


def test_only_what_the_user_set_is_named():
    """Presets and other keys set such keys as well, which is no concern of the user's."""
    for name in PRESETS:
        assert keys_without_effect(make_config({"algorithm.name": name})) == {}
    for path in CONFIGS:
        assert keys_without_effect(load_config(["--config", str(path)])) == {}, path.name
    # A value that is the default anyway changes nothing with any setting.
    assert (
        keys_without_effect(make_config({"algorithm.epsilon": 0.2, "rollout.max_turns": None}))
        == {}
    )
    for config in (
        load_config(["rollout.max_turns=3", "--debug"]),
        make_config(make_config({"rollout.max_turns": 3}), {"seed": 1}),
        Config(rollout={"max_turns": 3}),
    ):
        assert keys_without_effect(config) == {"rollout.max_turns": "without tools or environment"}


NOTES = """
    algorithm.beta=0 & algorithm.unbiased_kl=true -> unbiased_kl has no effect with algorithm.beta=0.0
    rollout.engine=vllm & algorithm.sampler_correction=none -> rollout.engine=vllm without algorithm.sampler_correction
    rollout.engine=vllm & rollout.top_k=5 -> rollout.top_p=1, top_k=5, min_p=0
    rollout.top_p=0.9 -> the gradient estimate is biased
    algorithm.objective=a.py:f & algorithm.own_args={objective: {radius: 1}} -> in algorithm.own_args, has no effect
"""


@pytest.mark.parametrize("case", NOTES.strip().splitlines())
def test_notes(case):
    argv, said = case.strip().split(" -> ")
    (note,) = warnings_of(load_config(argv.split(" & ")), [], [])
    assert said in note


def test_no_notes():
    two_updates = [
        "algorithm.objective=a.py:f",
        "algorithm.own_args={objective: {radius: 1}}",
        "algorithm.num_iterations=2",
    ]
    for argv in ([], ["rollout.engine=vllm"], two_updates):
        assert not list(warnings_of(load_config(argv), [], []))
