"""The vLLM engine against real servers (vLLM on the CPU): greedy completions, log-probs, stops,
seeds, weights."""

import contextlib
import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, load
from tokenizers import AddedToken
from transformers import AutoTokenizer
from vllm_server import VLLMServer

from grpo.algorithm.batch import Problem, collate
from grpo.algorithm.logprobs import CompletionScorer
from grpo.config import RuntimeConfig, load_config
from grpo.distributed import start_world
from grpo.model.lora import add_adapter
from grpo.rollout import BuiltinEngine, SamplingParams
from grpo.turns.engine import TurnsEngine
from grpo.turns.tools import Tools
from grpo.vllm.client import Server, session
from grpo.vllm.engine import VLLMEngine

pytestmark = pytest.mark.slow
SEED_KEY = (0, "rollout", 0)


@pytest.fixture(scope="module")
def model(assets, tmp_path_factory):
    """The 7M checkpoint, with settings of generation that must have no effect, and tags that are
    special tokens."""
    folder = tmp_path_factory.mktemp("model") / "gsm8k-7m"
    shutil.copytree(assets / "models" / "gsm8k-7m", folder, copy_function=shutil.copyfile)
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text()) | {
        "repetition_penalty": 1.3,
        "top_k": 2,
        "temperature": 0.5,
    }
    file.write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(folder)  # its model has rows for more tokens
    tags = [AddedToken(tag, special=True) for tag in ("<answer>", "</answer>")]
    tokenizer.add_tokens(tags, special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def servers(model, tmp_path_factory):
    """Name -> server, which starts when a test first builds an engine for it."""
    logs = tmp_path_factory.mktemp("logs")
    found = {
        "fp32": VLLMServer(model, logs / "fp32.log"),
        "lora": VLLMServer(model, logs / "lora.log", "--enable-lora", "--max-lora-rank", "8"),
        "bf16": VLLMServer(model, logs / "bf16.log", dtype="bfloat16"),
    }
    yield found
    for server in found.values():
        server.stop()


@pytest.fixture
def build(servers, tmp_path):
    """Builds an engine for one of the servers."""
    engines, world = [], start_world(RuntimeConfig(device="cpu"))

    def make(name, policy) -> VLLMEngine:
        if servers[name].started is None:
            servers[name].start()
        options = dict(weights_folder=str(tmp_path / "weights"), probe_ids=range(100, 140))
        server = Server(servers[name].address, 300.0)
        server.explain = servers[name].started.explain
        engine = VLLMEngine(policy, [server], world=world, root=policy.model, **options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def problems(assets, model):
    tokenizer = load(model).tokenizer
    file = next((assets / "data").rglob("*test*.jsonl"))
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:64]]
    found = []
    for index, row in enumerate(rows):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question"]}],
            add_generation_prompt=True,
            tokenize=False,
        )
        found.append(
            Problem(
                index,
                row["question"],
                tuple(tokenizer(text, add_special_tokens=False)["input_ids"]),
            )
        )
    return found


def differences(policy, groups, temperature) -> torch.Tensor:
    """Absolute differences of the sampler's log-probs from the scorer's of training, of all
    tokens."""
    batch = collate(
        groups, torch.zeros(len(groups), len(groups[0].completions)), pad_id=policy.pad_id
    )
    sampled_N = batch.sampling_logprobs_BT[batch.completion_mask_BT]
    return (sampled_N - scores(policy, groups, temperature)).abs()


def scores(policy, groups, temperature) -> torch.Tensor:
    """Log-probs of all completions' tokens by the scorer of training."""
    batch = collate(
        groups, torch.zeros(len(groups), len(groups[0].completions)), pad_id=policy.pad_id
    )
    with torch.no_grad(), policy.inference_mode():
        scored_BT, _ = CompletionScorer(policy.model, temperature)(*batch.scorer_inputs)
    return scored_BT[batch.completion_mask_BT]


def rollout(engine, problems, sampling) -> list:
    with engine.weights():
        return engine.generate(problems, sampling, seed_key=SEED_KEY)


def update(policy, problems, num_updates=3, learning_rate=1e-3) -> None:
    """Optimizer updates that change what the model computes."""
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate)
    ids_BS = torch.tensor([problem.prompt_ids[:24] for problem in problems[:8]])
    for _ in range(num_updates):
        policy.model(input_ids=ids_BS, labels=ids_BS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_greedy_completions_end_where_the_builtin_engines_end(build, model, problems):
    policy = load(model)
    engine = build("fp32", policy)
    tokens = policy.tokenizer.convert_ids_to_tokens(range(2, 8))
    special = next(
        (t for t in tokens if t in policy.tokenizer.all_special_tokens), policy.tokenizer.eos_token
    )
    for stop in ((), (" the",), ("\n", special), ("= ", "answer>")):
        sampling = SamplingParams(1, 160, temperature=0.0, stop=stop)
        found = rollout(engine, problems, sampling)
        assert found == BuiltinEngine(policy).generate(problems, sampling, seed_key=SEED_KEY), stop
        if not stop:
            assert {c.finished for group in found for c in group.completions} == {True, False}


def test_turns_are_those_of_the_builtin_engine_and_of_the_scorer(build, model, problems):
    """An environment of several turns, greedy and sampled; its answers come late."""
    policy = load(model)
    user = ROOT / "tests" / "turns" / "user_tools.py"
    config = load_config(
        [f"environment={user}:Slow", "reward.functions=[]", "data.dataset=builtin:arithmetic"]
    )
    with contextlib.closing(Tools(config).load()) as tools:
        engine = TurnsEngine(build("fp32", policy), tools, config)
        engine.check()
        greedy = SamplingParams(1, 400, temperature=0.0)
        builtin = TurnsEngine(BuiltinEngine(policy), tools, config)
        found = engine.generate(problems[:8], greedy, seed_key=SEED_KEY)
        expected = builtin.generate(problems[:8], greedy, seed_key=SEED_KEY)
        groups = engine.generate(problems[:8], SamplingParams(3, 400), seed_key=SEED_KEY)
    equal = [
        a.completions[0].ids == b.completions[0].ids for a, b in zip(found, expected, strict=True)
    ]
    # two tokens may be equally likely
    assert sum(equal) >= 7 and found[0].completions[0].num_turns > 1
    assert max(c.num_turns for group in groups for c in group.completions) >= 3
    assert differences(policy, groups, 1.0).max() < 1e-4


def test_the_same_seeds_give_the_same_completions(build, model, problems):
    engine = build("fp32", load(model))
    ids = []
    for address in (SEED_KEY, SEED_KEY, (0, "rollout", 1)):
        with engine.weights():
            groups = engine.generate(problems[:16], SamplingParams(4, 40), seed_key=address)
        ids.append([completion.ids for group in groups for completion in group.completions])
    assert ids[0] == ids[1] != ids[2]
    assert len(set(ids[0])) > 48  # of 64: the samples of a group differ


def test_logprobs_at_a_temperature_are_the_scorers(build, model, problems):
    policy = load(model)
    engine = build("fp32", policy)
    groups = rollout(engine, problems[:16], SamplingParams(4, 60, temperature=0.7))
    assert differences(policy, groups, 0.7).max() <= 1e-4


def test_logprobs_after_updates_are_those_of_the_new_weights(build, model, problems):
    policy = load(model)
    engine = build("fp32", policy)
    update(policy, problems)
    groups = rollout(engine, problems[:16], SamplingParams(4, 60))
    assert differences(policy, groups, 1.0).max() <= 1e-4


def test_logprobs_after_updates_in_bf16(build, model, problems):
    """Those of given tokens: each group's completion is the likeliest."""
    policy = load(model, precision="bf16")
    engine = build("bf16", policy)
    update(policy, problems, learning_rate=1e-4)
    with engine.weights():
        groups = engine.generate(
            problems[:8], SamplingParams(1, 40, temperature=0.0), seed_key=SEED_KEY
        )
        logprobs = [logprobs_of(engine, group) for group in groups]
    assert (torch.cat(logprobs) - scores(policy, groups, 1.0)).abs().mean() <= 1e-2


def logprobs_of(engine, group) -> torch.Tensor:
    """Log-probs of the tokens of a group's first completion by the server, as those of given
    tokens."""
    prompt_ids = group.problem.prompt_ids
    ids = prompt_ids + group.completions[0].ids

    async def ask() -> list[float]:
        async with session() as http:
            (server,) = engine.servers
            return await server.prompt_logprobs(
                http, ids, model=server.model, version=engine.version
            )

    return torch.tensor(engine.wait_for(ask())[len(prompt_ids) - 1 :])


def test_an_adapter_is_synced_alone(build, model, problems):
    policy = load(model)
    settings = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    add_adapter(policy, settings, base=str(model))
    engine = build("lora", policy)
    sizes = []
    for _ in range(2):
        update(policy, problems)
        groups = rollout(engine, problems[:8], SamplingParams(4, 40))
        assert differences(policy, groups, 1.0).max() <= 1e-4
        sizes.append({file.name for file in engine.folder.path.rglob("*") if file.is_file()})
    assert sizes == [{"adapter_config.json", "adapter_model.safetensors", "README.md"}] * 2


def test_the_benchmark_of_sampling_runs_beside_a_server(build, servers, model):
    """It asserts that all sides sampled the forced lengths."""
    build("fp32", load(model))  # starts the server
    command = [sys.executable, f"{ROOT}/benchmarks/rollout.py", "--model", str(model)]
    command += ["--server", servers["fp32"].address, "--device", "cpu", "--precision", "fp32"]
    command += ["--rows", "8", "--prompt", "16", "--max-length", "16"]
    command += ["--repeats", "1", "--threads", "1"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert "vLLM, server: " in printed
