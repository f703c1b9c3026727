"""The keys of ``rollout.engine=vllm``: what follows from them, and which may change when a run continues."""

import pytest

from grpo.checkpoint.resume import _differences
from grpo.config import make_config
from grpo.run.summary import warnings_of

VLLM = {"rollout.engine": "vllm"}


def test_addresses():
    assert make_config({}).rollout.addresses is None
    one = make_config({"rollout.server": "http://a:1/"}).rollout
    assert (one.server, one.addresses) == ("http://a:1", ["http://a:1"])
    two = make_config({"rollout.server": ["http://a:1", "https://b/x/"]}).rollout
    assert two.addresses == ["http://a:1", "https://b/x"]
    assert make_config({"rollout.vllm_command": "v {model} --config '{\"level\": 0}'"})


@pytest.mark.parametrize(
    ("values", "correction"),
    [
        ({}, "none"),
        (VLLM, "token_truncate"),
        (VLLM | {"algorithm.name": "dapo"}, "token_truncate"),
        (VLLM | {"algorithm.sampler_correction": "none"}, "none"),
        (VLLM | {"algorithm.sampler_correction": "sequence_mask"}, "sequence_mask"),
        (VLLM | {"algorithm.name": "dppo_tv"}, "none"),
        (VLLM | {"algorithm.objective": "dppo_tv"}, "none"),
        (VLLM | {"algorithm.name": "dppo_tv", "algorithm.objective": "clip"}, "token_truncate"),
    ],
)
def test_the_sampler_correction_follows_from_the_engine_unless_it_is_set(values, correction):
    config = make_config(values)
    assert config.algorithm.sampler_correction == correction
    assert make_config(config.model_dump()).algorithm.sampler_correction == correction  # as written to config.yaml


def notes(values):
    return [line for line in warnings_of(make_config(values), [], []) if "rollout." in line]


def test_notes():
    assert notes({}) == [] and notes(VLLM) == []
    (line,) = notes(VLLM | {"rollout.tokens_in_flight": 99})
    assert line == "note: rollout.tokens_in_flight has no effect with rollout.engine=vllm"
    (line,) = notes(VLLM | {"rollout.server": "http://a:1", "rollout.vllm_command": "v {model}"})
    assert line == "note: rollout.vllm_command has no effect with rollout.server=ADDRESS"
    (line,) = notes(VLLM | {"algorithm.sampler_correction": "none"})
    assert "rollout.engine=vllm without algorithm.sampler_correction" in line
    (line,) = notes(VLLM | {"rollout.top_k": 5})
    assert "rollout.top_p=1, top_k=5, min_p=0: " in line and "the gradient estimate is biased" in line
    (line,) = notes({"rollout.top_p": 0.9})
    assert "rollout.top_p=0.9, top_k=0, min_p=0: " in line
    assert "biased; rollout.keep_sampling_mask=true of the built-in engine" in line
    assert notes({"rollout.top_p": 0.9, "rollout.keep_sampling_mask": True}) == []


def test_servers_may_change_between_runs_and_the_engine_may_not():
    moved = {
        "rollout.server": "http://a:1",
        "rollout.vllm_command": "v {model}",
        "rollout.weights_folder": "/elsewhere",
    }
    saved = {"config": make_config(VLLM).for_writing(), "data_fingerprint": "", "content": {}}
    assert _differences(make_config(VLLM | moved), saved, "", {}) == []
    assert ("rollout.engine", "vllm", "builtin") in _differences(make_config({}), saved, "", {})
