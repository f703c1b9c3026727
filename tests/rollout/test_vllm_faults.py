"""The vLLM engine against a server with faults: each is an error of one line, or the run goes on and loses nothing."""

import contextlib
import itertools
import os
import random
import resource
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import load
from vllm_faulty import FaultyServer, NoAnswer, never_answer

from grpo.batch import Problem
from grpo.config import RolloutConfig, RuntimeConfig
from grpo.distributed import start_world
from grpo.model.lora import add_adapter
from grpo.rollout import SamplingParams
from grpo.rollout.vllm import Server, ServerError, VLLMEngine
from grpo.rollout.vllm.client import Cancelled, NotAnswered
from grpo.rollout.vllm.requests import SENDER
from grpo.rollout.vllm.weights import WeightsFolder
from grpo.run.ending import _rescue
from grpo.seeding import derive_seed

PROBLEMS = [Problem(index, "", (5 + index, 6, 7, 8)) for index in (3, 4, 9)]
ADDRESS = (0, "rollout", 2)
SAMPLED = SamplingParams(num_generations=4, max_completion_length=12)


@pytest.fixture(scope="module")
def world():
    return start_world(RuntimeConfig(device="cpu"))


@pytest.fixture
def server(random_model):
    started = FaultyServer(random_model)
    yield started
    started.stop()


@pytest.fixture
def build(random_model, world, tmp_path):
    """Builds an engine for one server; its messages are in ``engine.lines``."""
    engines = []

    def make(server, policy=None, uses=None, **options) -> VLLMEngine:
        lines = []
        policy = policy or load(random_model)
        address = server if isinstance(server, str) else server.address
        rollout = RolloutConfig(**dict(engine="vllm", weights_folder=str(tmp_path), server_timeout_s=10) | options)
        engine = VLLMEngine(
            policy, [address], world=world, rollout=rollout, probe_ids=range(3, 15), uses=uses, warn=lines.append
        )
        engine.lines = lines
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
    assert list(tmp_path.iterdir()) == []


def ids_of(groups) -> list[tuple[int, ...]]:
    return [completion.ids for group in groups for completion in group.completions]


def train(policy) -> None:
    """Change every weight, as an update does."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.05)


def test_every_value_of_a_request_is_given_and_its_seed_is_that_of_the_completion(server, build):
    engine, tokens = build(server), []
    with engine.weights():
        groups = engine.generate(PROBLEMS, SAMPLED, address=ADDRESS, on_tokens=tokens.append)
    assert [group.problem for group in groups] == PROBLEMS and [len(group.completions) for group in groups] == [4, 4, 4]
    completions = [completion for group in groups for completion in group.completions]
    assert sum(tokens) == sum(len(c.ids) for c in completions)
    assert all(
        len(c.sampling_logprobs) == len(c.ids) and c.finished == (c.ids[-1] in engine.policy.eos_ids)
        for c in completions
    )
    seeds = {derive_seed(*ADDRESS, index, g) for index in (3, 4, 9) for g in range(4)}
    assert {body["seed"] for body in server.bodies} == seeds and len(seeds) == 12
    given = {
        "max_tokens": 12,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
    }
    given |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "ignore_eos": True, "stop": []}
    for body in server.bodies:
        assert {name: body[name] for name in given} == given
        assert body["stop_token_ids"] == list(engine.policy.eos_ids)
    assert engine.metrics() == {"sampling/stale_completions": 0.0} and engine.lines == []


def test_the_server_gets_the_weights_of_each_rollout(server, build):
    engine, versions = build(server), []
    for _ in range(2):
        train(engine.policy)
        with engine.weights():
            engine.generate(PROBLEMS, SAMPLED, address=ADDRESS)
            engine.generate(PROBLEMS, SAMPLED, address=ADDRESS)
        versions.append(server.weight_version)
        own = engine.policy.model.state_dict()
        assert all(torch.equal(tensor, own[name]) for name, tensor in server.model.state_dict().items())
    assert len(set(versions)) == 2 and server.num_reloads == 2
    kept = [path for path in engine.folder.path.iterdir() if path.is_dir()]
    assert [path.name for path in kept] == [versions[1].removesuffix(".0")]  # those of the former rollout are deleted


def test_a_server_that_is_not_there(build, server):
    server.stop()
    with pytest.raises(ServerError) as error:
        build(server, server_timeout_s=0.3)
    assert str(error.value) == (
        f"{server.address} has not answered for 0.3 s (GET /version: Connection refused): look at the server's log, start it again, or raise "
        "rollout.server_timeout_s"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "torch.bfloat16"}, "computes in bfloat16, and runtime.precision=fp32: start it with --dtype float32, or set runtime.precision"),
        ({"quantization": "fp8"}, "quantizes its weights (fp8): start it without --quantization"),
        ({"logprobs_mode": "raw_logits"}, "returns raw_logits in place of log-probs: start it with --logprobs-mode processed_logprobs"),
        ({"vllm_version": "0.31.2"}, "runs vLLM 0.31.2: install vLLM 0.32 or later there"),
        ({"dev_mode": False}, "has no route /server_info: start it with VLLM_SERVER_DEV_MODE=1 in its environment"),
        ({"vocabulary": 20}, "has a model of fewer tokens than the policy's {V}: start it with the model that is trained"),
        ({"vocabulary": 2000}, "has a model of more tokens than the policy's {V}: start it with the model that is trained"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_sample_for_the_policy(server, build, changes, message):
    for name, value in changes.items():
        if hasattr(server, name):
            setattr(server, name, value)
        else:
            server.changes[name] = value
    V = server.model.config.vocab_size
    with pytest.raises(ServerError) as error:
        build(server)
    assert str(error.value) == f"{server.address} {message.format(V=V)}"


def test_an_api_key_is_that_of_the_environment(server, build, monkeypatch):
    server.api_key = "of-the-server"
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    for _ in range(2):
        with pytest.raises(ServerError, match=rf"^{server.address} wants another API key: set VLLM_API_KEY in the"):
            build(server)
        monkeypatch.setenv("VLLM_API_KEY", "another")
    monkeypatch.setenv("VLLM_API_KEY", "of-the-server")
    with (engine := build(server)).weights():
        assert len(engine.generate(PROBLEMS, SAMPLED, address=ADDRESS)) == len(PROBLEMS)


def test_a_server_with_a_model_of_another_shape(build, tmp_path_factory):
    from conftest import save_random_model

    server = FaultyServer(save_random_model(tmp_path_factory.mktemp("other"), num_hidden_layers=3))
    with pytest.raises(
        ServerError,
        match=r"has another model, .*: its num_hidden_layers is 3, the policy's 2: start it with the model that is",
    ):
        build(server)
    server.stop()


def test_another_program_at_the_address(build, server):
    server.status = lambda route: 404
    with pytest.raises(ServerError, match=r"has no route /version: is it a vLLM server\?$"):
        build(server)


def test_logprobs_before_the_temperature_are_refused(server, build):
    message = "returns log-probs before temperature and filters, and temperature=0.7: start it with --logprobs-mode processed_logprobs"
    with pytest.raises(ServerError, match=message):
        build(server, temperature=0.7)
    engine = build(server)
    greedy = SamplingParams(num_generations=1, max_completion_length=12, temperature=0.0)
    with engine.weights():
        assert all(
            c.sampling_logprobs == () for g in engine.generate(PROBLEMS, greedy, address=ADDRESS) for c in g.completions
        )
        with pytest.raises(ServerError, match=message.replace("temperature=0.7", "top_k=5")):
            engine.generate(PROBLEMS, SamplingParams(4, 12, top_k=5), address=ADDRESS)
        with pytest.raises(
            ServerError,
            match=r"takes 256 tokens, and a prompt of 4 with a completion of 253 has 257: .*--max-model-len 257",
        ):
            engine.generate(PROBLEMS, SamplingParams(4, 253), address=ADDRESS)


def test_prompts_and_evaluations_to_come_are_checked_at_the_start(server, build):
    build(server, uses=[(244, SAMPLED)])
    with pytest.raises(ServerError, match="a prompt of 245 with a completion of 12 has 257: start it with"):
        build(server, uses=[(4, SAMPLED), (245, SAMPLED)])
    with pytest.raises(ServerError, match=r"temperature=0\.6: start it with --logprobs-mode processed_logprobs"):
        build(server, uses=[(4, SAMPLED), (4, SamplingParams(4, 12, temperature=0.6))])


def test_a_tokenizer_may_have_more_tokens_than_the_embedding(server, build, random_model):
    """vLLM takes the ids of its tokenizer too, here one behind the embedding."""
    policy = load(random_model)
    policy.tokenizer.add_tokens([f"<more-{i}>" for i in range(server.vocabulary + 1 - len(policy.tokenizer))])
    assert max(policy.tokenizer.get_vocab().values()) == server.vocabulary
    server.vocabulary += 1
    build(server, policy)
    with pytest.raises(ServerError, match="has a model of more tokens than the policy's"):
        build(server)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda answer: answer["choices"].clear(), "returned 0 completions where 1 was asked for"),
        (lambda answer: answer.pop("choices"), "returned no completions where 1 was asked for"),
        (lambda answer: answer["choices"][0].update(token_ids=None), "returned a completion without token ids"),
        (lambda answer: answer["choices"][0].update(logprobs=None), "without a finite log-prob for each (0 values)"),
        (lambda answer: answer["choices"][0]["logprobs"]["token_logprobs"].pop(), "tokens without a finite log-prob for each"),
        (lambda answer: answer["choices"][0]["logprobs"]["token_logprobs"].__setitem__(0, None), "tokens without a finite log-prob"),
        (lambda answer: answer["choices"][0]["logprobs"]["token_logprobs"].__setitem__(0, float("nan")), "tokens without a finite log-prob"),
        (lambda answer: answer["choices"][0]["token_ids"].__setitem__(0, 10**6), "returned token ids outside of the vocabulary"),
        (lambda answer: answer["choices"][0].update(token_ids=[5], finish_reason="length", logprobs={"token_logprobs": [-1.0]}), "after 1 tokens where 12"),
        (lambda answer: answer["choices"][0].update(token_ids=[5] * 13, logprobs={"token_logprobs": [-1.0] * 13}), "returned 13 tokens where 12"),
    ],
)  # fmt: skip
def test_an_answer_that_is_no_completion(server, build, change, message):
    engine = build(server)
    with engine.weights():
        server.change_answer = change
        with pytest.raises(ServerError) as error:
            engine.generate(PROBLEMS, SAMPLED, address=ADDRESS)
    assert str(error.value).startswith(server.address) and message in str(error.value)


@pytest.fixture
def expected(server, build):
    """The completions without a fault."""
    engine = build(server)
    with engine.weights():
        completions = ids_of(engine.generate(PROBLEMS, SAMPLED, address=ADDRESS))
    server.bodies.clear()
    return completions


def test_a_server_that_is_started_again_while_it_samples_gets_the_weights_again(server, build, expected):
    engine = build(server)
    train(engine.policy)

    def die_at_the_fifth(number):
        if number == 4:
            server.restart()
            raise NoAnswer

    server.on_completion = die_at_the_fifth
    with engine.weights():
        before = server.weight_version
        assert ids_of(engine.generate(PROBLEMS, SAMPLED, address=ADDRESS)) == expected
    assert server.num_reloads == 3  # of the expected completions, of this rollout, and after the start
    assert server.weight_version != before and server.weight_version.rpartition(".")[0] == before.rpartition(".")[0]
    own = engine.policy.model.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in server.model.state_dict().items())
    assert f"{server.address} was started again: it gets the weights of this step again" in engine.lines


def test_a_server_that_is_started_again_before_it_gets_the_version_gets_the_weights_again(server, build):
    """The version is set last: a server that has just been started must not get it without the weights."""
    policy = load(server.folder)
    engine, restarts = build(server, policy), []

    def restart_once(route):
        if route == "/update_weight_version" and server.num_reloads == 1 and not restarts:
            restarts.append(route)
            server.restart()
            raise NoAnswer
        return 200

    train(policy)
    server.status = restart_once
    with engine.weights():
        assert restarts and server.num_reloads == 2 and not server.weight_version.startswith("loading ")
        for name, tensor in policy.model.state_dict().items():
            assert torch.equal(server.model.state_dict()[name], tensor)


def test_a_server_that_stalls_while_it_gets_the_weights(server, build):
    """After the time limit no other request follows, which would wait as long again."""
    engine, routes = build(server, server_timeout_s=2), []

    def stall(route):
        routes.append(route)
        never_answer()

    server.status = stall
    with pytest.raises(ServerError, match="has not answered for 2 s"), engine.weights():
        pass
    assert set(routes) == {"/update_weight_version"}


def test_an_adapter_that_the_server_refuses_ends_the_run_at_once(server, build):
    server.changes["max_lora_rank"] = 8
    policy = load(server.folder)
    add_adapter(policy, {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}, base=str(server.folder))
    with (
        pytest.raises(ServerError, match=r"no such layer: set rollout.weights_folder to"),
        build(server, policy).weights(),
    ):
        pass
    assert server.num_adapters_refused == 1
    server.changes["max_lora_rank"] = 1
    with pytest.raises(
        ServerError, match="of rank 1 at most, the policy's has rank 4: start it with --enable-lora --max-lora-rank 8"
    ):
        build(server, policy)


def test_a_server_that_was_started_again_between_two_rollouts(server, build, expected):
    engine = build(server)
    with engine.weights():
        pass
    server.restart()
    with engine.weights():
        assert ids_of(engine.generate(PROBLEMS, SAMPLED, address=ADDRESS)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dtype": "torch.bfloat16"},
            "computes in bfloat16, and runtime.precision=fp32: start it with --dtype float32",
        ),
        ({"logprobs_mode": "raw_logprobs"}, "returns log-probs before temperature and filters, and temperature=0.7"),
    ],
)
def test_a_server_that_was_started_again_with_other_options_is_refused(server, build, changes, message):
    server.changes["logprobs_mode"] = "processed_logprobs"
    engine = build(server, temperature=0.7)
    with engine.weights():
        pass
    server.restart()
    server.changes |= changes
    with pytest.raises(ServerError, match=message), engine.weights():
        pass


def test_a_server_whose_engine_has_died_ends_when_its_connections_do(server, build, expected):
    """It listens no longer, and waits for its clients, which wait for it; without them it ends, and is started again."""
    engine, dead, ended = build(server, server_timeout_s=60), threading.Event(), threading.Event()

    def die_at_the_fifth(number):
        if number == 4:
            server.stop()
            server.forget()
            dead.set()
        if dead.is_set() and not ended.is_set():
            server.wait_for_client(60)
            ended.set()
            raise NoAnswer

    def start_again():
        ended.wait(60)
        server.start()

    server.on_completion = die_at_the_fifth
    threading.Thread(target=start_again, daemon=True).start()
    with engine.weights():
        assert ids_of(engine.generate(PROBLEMS, SAMPLED, address=ADDRESS)) == expected
    assert ended.is_set()


def test_completions_of_other_weights_are_counted_and_sampled_again(server, build, expected):
    engine = build(server)

    def load_others(number):
        if number == 4:
            server.forget("grpo-1-another-3.0")

    server.on_completion = load_others
    with engine.weights():
        assert ids_of(engine.generate(PROBLEMS, SAMPLED, address=ADDRESS)) == expected
    num_stale = engine.metrics()["sampling/stale_completions"]
    assert num_stale >= 1 and len(server.bodies) == 12 + num_stale
    assert engine.lines == [
        f"{server.address} has the weights of another run (give each run a server of its own): it gets the weights of this step again"
    ]
    assert engine.metrics() == {"sampling/stale_completions": 0.0}


def test_a_server_that_dies_and_does_not_come_back(server, build):
    engine = build(server, server_timeout_s=1.0)

    def die(number):
        if number == 4:
            server.stop()
            raise NoAnswer

    server.on_completion = die
    with engine.weights(), pytest.raises(ServerError) as error:
        engine.generate(PROBLEMS, SAMPLED, address=ADDRESS)
    assert str(error.value).startswith(f"{server.address} has not answered for 1 s (") and "\n" not in str(error.value)


def test_a_server_that_stalls(server, build):
    engine = build(server, server_timeout_s=1.0)
    server.on_completion = lambda number: never_answer() if number >= 3 else None
    with engine.weights(), pytest.raises(ServerError, match=r"has not answered for 1 s: look at the server's log"):
        engine.generate(PROBLEMS, SAMPLED, address=ADDRESS)


def test_a_signal_interrupts_a_rollout(server, build):
    class Asked(BaseException):
        pass

    def handler(*args):
        raise Asked

    engine = build(server)
    server.on_completion = lambda number: never_answer()
    previous = signal.signal(signal.SIGALRM, handler)
    try:
        with engine.weights():
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(Asked):
                engine.generate(PROBLEMS, SAMPLED, address=ADDRESS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    # The server sees that nobody waits, and the threads that waited end.
    deadline = time.monotonic() + 60
    while any(thread.name == SENDER for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_cut_ends_requests_at_whatever_point_they_are(server):
    """A request may be about to connect, or wait for its answer."""
    server.on_completion = lambda number: never_answer()
    body, generator = (
        {"model": str(server.folder), "prompt": [3], "max_tokens": 4, "return_token_ids": True},
        random.Random(0),
    )

    def ask(to: Server, cancelled: threading.Event) -> None:
        with contextlib.suppress(NotAnswered, Cancelled):
            to.complete(body, cancelled)

    for _ in range(10):
        to, cancelled = Server(server.address, 60), threading.Event()
        threads = [threading.Thread(target=ask, args=(to, cancelled), daemon=True) for _ in range(60)]
        for thread in threads:
            thread.start()
        time.sleep(generator.uniform(0, 0.05))
        cancelled.set()
        to.cut()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)


def test_errors_500_are_asked_again(server, build, expected):
    engine, count, lock = build(server), itertools.count(), threading.Lock()

    def some_fail(route):
        with lock:
            return 500 if next(count) % 8 == 3 else 200

    # collective_rpc is asked once: after a failed reload vLLM does not work any more.
    server.status = lambda route: 200 if route == "/collective_rpc" else some_fail(route)
    with engine.weights():
        assert ids_of(engine.generate(PROBLEMS, SAMPLED, address=ADDRESS)) == expected
    server.status = lambda route: 500 if route == "/v1/completions" else 200
    engine = build_with_short_timeout(build, server)
    with pytest.raises(ServerError, match="status 500, made to fail"), engine.weights():
        pass


def build_with_short_timeout(build, server):
    server_status, server.status = server.status, lambda route: 200
    engine = build(server, server_timeout_s=0.5)
    server.status = server_status
    return engine


def test_weights_that_are_not_applied_are_found_by_checksums(server, build):
    engine = build(server)
    server.applies_weights = False
    with engine.weights():  # it has them since its start
        pass
    with torch.no_grad():
        engine.policy.model.model.norm.weight.add_(1e-5)  # too little for the probe
    message = "holds other weights than it was given: the checksum of model.norm.weight differs: start it again, with the model that is trained"
    with pytest.raises(ServerError, match=message), engine.weights():
        pass
    train(engine.policy)
    with (
        pytest.raises(
            ServerError, match=r"does not compute with the weights it was given: log-probs of 11 tokens differ by"
        ),
        engine.weights(),
    ):
        pass


def test_a_folder_that_the_server_does_not_see(server, build):
    engine = build(server)
    write = engine.folder._write_model
    engine.folder._write_model = lambda *args: write(*args) or hide(engine)
    with (
        pytest.raises(
            ServerError, match=r"could not load .*: set rollout.weights_folder to a folder that the server sees too"
        ) as error,
        engine.weights(),
    ):
        pass
    assert "\n" not in str(error.value)


def hide(engine) -> None:
    for folder in engine.folder.path.glob("grpo-*"):
        folder.rename(folder.with_name("hidden"))


def test_a_full_weights_folder(server, build):
    engine = build(server)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        message = r"^rollout.weights_folder=.*: the weights cannot be written \(.*\): free space there, or set another"
        with pytest.raises(ValueError, match=message), engine.weights():
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(
        ValueError, match=r"B free, and the weights take 1000000000\.0 GB \(twice, while new ones replace old ones\)"
    ):
        engine.folder._make_room(engine.folder.path / "grpo-big", 10**18)
    with engine.weights():
        pass


def test_a_weights_folder_that_cannot_be_written(server, random_model, world, tmp_path):
    rollout = RolloutConfig(engine="vllm", weights_folder=str(tmp_path / "missing"))
    with pytest.raises(
        ValueError, match=r"missing cannot be written \(No such file or directory\): set it to another folder"
    ):
        VLLMEngine(load(random_model), [server.address], world=world, rollout=rollout)


def test_servers_get_whole_paths(tmp_path, world, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    folder = WeightsFolder("here", world)
    assert folder.path.parent == tmp_path / "here"
    folder.close()


def test_an_error_of_a_server_in_a_run_is_one_line(capsys):
    run = SimpleNamespace(
        world=SimpleNamespace(rank=0, phase="rollout", is_main=True),
        signals=SimpleNamespace(announce_failure=lambda text: None),
        saver=SimpleNamespace(rescue=lambda: "saved checkpoint-3"),
    )
    for error, shown in (
        (ServerError("http://a:1 is old: install 0.32"), "http://a:1 is old: install 0.32"),
        (KeyError("x"), "KeyError: 'x'"),
    ):
        try:
            raise error
        except (ServerError, KeyError) as failure:
            _rescue(run, failure)
        lines = capsys.readouterr().err.splitlines()
        assert lines[-2:] == [f"error: [rank 0] in phase 'rollout': {shown}", "note: saved checkpoint-3"]
        assert (len(lines) == 2) == isinstance(error, ServerError)


def test_the_folder_of_a_killed_run_is_deleted_and_that_of_a_living_one_is_not(tmp_path, world):
    living = WeightsFolder(str(tmp_path), world)
    other = tmp_path / "grpo-othermachine-7-abc"  # where locks are not seen from here
    other.mkdir()
    (other / "owner").touch()
    pid = os.fork()
    if pid == 0:
        WeightsFolder(str(tmp_path), world)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(list(tmp_path.iterdir())) == 3
    second = WeightsFolder(str(tmp_path), world)
    assert {path.name for path in tmp_path.iterdir()} == {living.path.name, second.path.name, other.name}
    living.close()
    second.close()
    assert list(tmp_path.iterdir()) == [other]


def test_few_enough_prompts_are_in_flight_on_a_cpu_server_that_computes_them_in_parts(server, build):
    server.changes["max_num_batched_tokens"] = 11  # of prompts of 4 tokens: 2
    engine, lock, flying, most = build(server), threading.Lock(), 0, 0

    def count(number):
        nonlocal flying, most
        with lock:
            flying += 1
            most = max(most, flying)
        time.sleep(0.01)
        with lock:
            flying -= 1

    server.on_completion = count
    with engine.weights():
        engine.generate(PROBLEMS, SAMPLED, address=ADDRESS)
        assert most <= 2
        server.changes["max_num_batched_tokens"] = 3
        engine.servers.check([(4, SAMPLED)])
        with pytest.raises(
            ServerError,
            match=r"would compute a prompt of 4 tokens in parts, .* start it with --no-enable-chunked-prefill",
        ):
            engine.generate(PROBLEMS, SAMPLED, address=ADDRESS)
