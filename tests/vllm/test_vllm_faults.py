"""The vLLM engine against a server with faults: each is an error, and no request is repeated."""

import os
import signal
import subprocess
import threading
import time
from concurrent.futures import Future

import pytest
import torch
from conftest import load
from faulty_vllm import FaultyServer

from grpo.algorithm.batch import Problem
from grpo.algorithm.seeding import derive_seed
from grpo.config import RuntimeConfig
from grpo.distributed import start_world
from grpo.rollout import SamplingParams
from grpo.vllm.client import Server, ServerError
from grpo.vllm.engine import VLLMEngine
from grpo.vllm.weights import WeightsFolder

PROBLEMS = [Problem(index, "", (5 + index, 6, 7, 8)) for index in (3, 4, 9)]
SEED_KEY = (0, "rollout", 2)
SAMPLED = SamplingParams(num_generations=4, max_completion_length=12)


@pytest.fixture
def server(random_model):
    started = FaultyServer(random_model)
    yield started
    started.stop()


@pytest.fixture
def build(random_model, tmp_path):
    engines = []
    world = start_world(RuntimeConfig(device="cpu"))

    def make(*servers) -> VLLMEngine:
        policy = load(random_model)
        engine = VLLMEngine(
            policy,
            [Server(server.address, 20.0) for server in servers],
            world=world,
            weights_folder=str(tmp_path / "weights"),
            root=policy.model,
            probe_ids=range(3, 15),
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
        assert not engine.folder.path.exists()


def sample(engine) -> list:
    with engine.weights():
        return engine.generate(PROBLEMS, SAMPLED, seed_key=SEED_KEY)


def train(policy) -> None:
    """Change every weight, as an update does."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.01)


def test_requests_say_everything_and_two_servers_share_them(
    server, build, random_model, monkeypatch
):
    monkeypatch.setenv("VLLM_API_KEY", "k")
    other, tokens = FaultyServer(random_model), []
    engine = build(server, other)
    with engine.weights():
        groups = engine.generate(PROBLEMS, SAMPLED, seed_key=SEED_KEY, on_tokens=tokens.append)
        version = engine.version
        assert engine.generate([], SAMPLED, seed_key=SEED_KEY) == []  # a rank without problems
    other.stop()
    assert [group.problem for group in groups] == PROBLEMS
    completions = [completion for group in groups for completion in group.completions]
    assert sum(tokens) == sum(len(c.ids) for c in completions)
    assert all(c.finished == (c.ids[-1] in engine.policy.eos_ids) for c in completions)
    assert {c.sampling_logprobs for c in completions} == {(-1.0,) * len(c.ids) for c in completions}
    assert (len(server.bodies), len(other.bodies)) == (6, 6)
    given = {
        "max_tokens": 12,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "ignore_eos": True,
    }
    given |= {"stop": [], "stop_token_ids": list(engine.policy.eos_ids)}
    given |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    bodies = [*server.bodies, *other.bodies]
    seeds = {body["sampling_params"]["seed"] for body in bodies}
    assert seeds == {derive_seed(*SEED_KEY, index, g) for index in (3, 4, 9) for g in range(4)}
    assert all(given.items() <= body["sampling_params"].items() for body in bodies)
    assert {body["cache_salt"] for body in bodies} == {version}
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer k"}


def test_replies_are_called_in_the_thread_that_waits(server, build):
    """A tool may refuse other threads. What a reply raises ends the rollout, and the next one is as
    any other."""
    engine = build(server)
    threads = []
    asked = set()

    def reply(row, ids):
        threads.append(threading.get_ident())
        is_first = row not in asked and len(ids) < SAMPLED.max_completion_length // 2
        asked.add(row)
        answer = Future()
        answer.set_result([5] if is_first else None)
        return answer

    def fails(row, ids):
        raise KeyError("a mistake")

    with pytest.raises(KeyError, match="a mistake"):
        engine.generate(PROBLEMS, SAMPLED, seed_key=SEED_KEY, replies=fails)
    groups = engine.generate(PROBLEMS, SAMPLED, seed_key=SEED_KEY, replies=reply)
    assert any(completion.loss_mask for group in groups for completion in group.completions)
    assert set(threads) == {threading.get_ident()}


def test_the_server_gets_the_weights_of_each_rollout(server, build):
    engine = build(server)
    for number in range(2):
        train(engine.policy)
        sample(engine)
        own = engine.policy.model.state_dict()
        assert all(
            torch.equal(tensor, own[name]) for name, tensor in server.model.state_dict().items()
        )
        assert server.num_loads == number + 1
        # Nor is the probe of these weights answered from what the server has cached of others.
        assert server.probes[number]["cache_salt"] == server.weight_version
    assert server.probes[0]["cache_salt"] != server.probes[1]["cache_salt"]


def test_a_missed_update_shows(server, build):
    """Of a size that lies below the limit on the difference."""
    engine = build(server)
    sample(engine)
    server.applies_weights = False
    with torch.no_grad():
        engine.policy.model.get_output_embeddings().weight.mul_(1 + 1e-4)
    with pytest.raises(
        ServerError, match="log-probs of a text have not changed, those of the policy by"
    ):
        sample(engine)
    train(engine.policy)
    with pytest.raises(
        ServerError, match="does not compute with the policy's weights: log-probs of a text differ"
    ):
        sample(engine)


def test_a_server_that_cannot_sample_for_the_policy(server, build):
    server.settings["model_config"]["logprobs_mode"] = "raw"
    with pytest.raises(ServerError, match="--logprobs-mode processed_logprobs") as error:
        build(server)
    assert server.address in str(error.value) and "\n" not in str(error.value)


def changed(**changes):
    def change(answer):
        answer["choices"][0].update(changes)
        return answer

    return change


WRONG = {
    "finish_reason\n.* 'stop' or 'length'": changed(finish_reason="abort"),
    "logprob\n.*greater than -9999": changed(
        logprobs={"content": [{"token_id": 3, "logprob": -9999.0}]}
    ),
    "of 12 tokens: raise --max-model-len": changed(finish_reason="length"),
    "has lost this step's weights": changed(weight_versions=[{"version": "default"}]),
    "Invalid JSON": lambda answer: b"<html>",
}


@pytest.mark.parametrize("message", WRONG)
def test_an_answer_that_is_no_completion(server, build, message):
    engine = build(server)
    server.change_answer = WRONG[message]
    with pytest.raises(ValueError, match=message):
        sample(engine)


def test_a_request_that_fails_is_not_repeated(server, build):
    engine = build(server)
    asked = []

    def refuse(route):
        asked.append(route)
        return (
            500 if route == "/inference/v1/generate" and server.weight_version != "default" else 200
        )

    server.status = refuse
    with pytest.raises(
        ServerError, match=r"refuses /inference/v1/generate \(status 500\): .*made to fail"
    ):
        sample(engine)
    assert asked == ["/update_weight_version", "/collective_rpc", "/inference/v1/generate"]


def test_a_server_that_stalls(server, build):
    engine = build(server)
    server.change_answer = lambda answer: time.sleep(30)
    with engine.weights():
        engine.servers[0].timeout_s = 1.0
        with pytest.raises(ServerError, match=r"does not answer .* within 1 s .*: ReadTimeout"):
            engine.generate(PROBLEMS, SAMPLED, seed_key=SEED_KEY)


class Interrupted(Exception):
    pass


def test_a_signal_interrupts_a_rollout(server, build):
    engine = build(server)
    server.change_answer = lambda answer: time.sleep(30)

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(Interrupted):
            sample(engine)
    finally:
        signal.signal(signal.SIGALRM, before)
    server.change_answer = lambda answer: answer
    assert len(sample(engine)) == len(PROBLEMS)


def test_what_a_killed_process_left_is_deleted_and_what_a_living_one_has_is_not(
    tmp_path, random_model
):
    ended = subprocess.Popen(["true"])
    ended.wait()
    own = WeightsFolder(str(tmp_path)).path
    left = own.with_name(own.name.replace(f"-{os.getpid()}-", f"-{ended.pid}-"))
    for folder in (own, left):
        (folder / "version").mkdir(parents=True)
    policy, other = load(random_model), WeightsFolder(str(tmp_path))
    other.write(policy, policy.model.state_dict(), "version")
    assert sorted(tmp_path.iterdir()) == sorted([own, other.path])
