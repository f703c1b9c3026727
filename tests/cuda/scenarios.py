"""Scenarios on the emulated CUDA device (:mod:`emulated_cuda`); the tests are in ``test_*.py`` beside."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from conftest import save_random_model, small_run
from emulated_cuda.tensors import device
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import train_grpo
from grpo.attention import enable_packing
from grpo.batch import Problem
from grpo.logprobs import head_is_plain
from grpo.model import Policy, load_policy, load_tokenizer
from grpo.rollout import BuiltinEngine, SamplingParams, check_sampling
from grpo.rollout.llama_decoder import matches_model
from grpo.rollout.weights import FusedLinear
from grpo.tasks.tiny import build_tokenizer

CUDA = torch.device("cuda", 0)
SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    initializer_range=0.3,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 256,
}
ARCHITECTURES = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"sliding_window": 16, "initializer_range": 0.05}),
}


def save_model(folder: Path, architecture: str) -> Path:
    """A Hugging Face folder with a small random model and the tiny tokenizer."""
    if architecture == "qwen2":
        return save_random_model(folder)
    model, config, options = ARCHITECTURES[architecture]
    tokenizer = build_tokenizer()
    tokens = dict(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(1)
    options = SIZES | tokens | {"pad_token_id": tokenizer.pad_token_id} | options
    model(config(**options)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def policy_on_gpu(folder: str, precision: str) -> Policy:
    path = save_model(Path(folder) / "model", "qwen2")
    return load_policy(str(path), load_tokenizer(str(path)), device=CUDA, precision=precision)


def trains(folder, *, architecture="qwen2", settings=()):
    """``train_grpo.py`` for two steps on a small random model; its metrics, and the precision of products at the end."""
    model = save_model(Path(folder) / "model", architecture)
    short = ["optim.max_steps=2", "eval.max_samples=8", "eval.before_training=false"]
    code = train_grpo.main([*small_run(model, Path(folder) / "run"), "runtime.device=cuda", *short, *settings])
    assert code == 0
    lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return {"lines": [json.loads(line) for line in lines], "products": torch.backends.cuda.matmul.fp32_precision}


def replays(folder, *, precision, mistake=None):
    """Rollouts by graphs and by the loop with equal weights, which change in between: the share of equal completions in each, and notes."""
    policy, said = policy_on_gpu(folder, precision), []
    assert enable_packing(policy.model, policy.backbone) is None
    loop, graphs = BuiltinEngine(policy), BuiltinEngine(policy, cuda_graphs=True, warn=said.append)
    if mistake == "stale address":
        FusedLinear.refresh = _refresh_at_another_address
    if mistake in ("host sync", "CPU tensor"):
        policy.model.get_output_embeddings().register_forward_hook(_syncs if mistake == "host sync" else _adds_on_cpu)
    problems = [Problem(u, "", tuple(range(5 + u, 10 + 3 * u))) for u in range(3)]
    equal = []
    for step in range(3):
        sampling, address = SamplingParams(num_generations=8, max_completion_length=40), (0, "rollout", step)
        both = [engine.generate(problems, sampling, address=address) for engine in (graphs, loop)]
        pairs = [
            (a.ids, b.ids)
            for x, y in zip(*both, strict=True)
            for a, b in zip(x.completions, y.completions, strict=True)
        ]
        equal.append(sum(a == b for a, b in pairs) / len(pairs))
        with torch.no_grad():
            for p in policy.model.parameters():
                p.mul_(1.3).add_(0.001)
    return {"equal": equal, "said": said}


def _refresh_at_another_address(self):
    self.weight = torch.cat([layer.weight.detach() for layer in self.layers]).to(self.dtype)


def _syncs(module, inputs, output):
    return output * float(output.abs().max() > 0)


def _adds_on_cpu(module, inputs, output):
    return output + torch.zeros(output.shape[-1]) if device.sync_debug_mode or device.is_capturing() else None


def checks(folder, *, tf32):
    """What the checks at start find, and the precision of products that PyTorch is told before and after."""
    if tf32 == "allow_tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
    elif tf32 == "fp32_precision":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    before = torch.backends.cuda.matmul.fp32_precision
    policy = policy_on_gpu(folder, "fp32")  # this compares training mode with evaluation mode
    found = {"plain head": head_is_plain(policy.model), "packing": enable_packing(policy.model, policy.backbone)}
    found["written-out decode"] = matches_model(policy.model)
    check_sampling(policy)
    ones = torch.full((1, 1), 1 + 2**-12, device=CUDA)
    found["rounds products"] = float(ones @ ones) == 1.0
    return found | {"before": before, "after": torch.backends.cuda.matmul.fp32_precision}


def adds_up(count):
    x = torch.ones(count, device="cuda")
    total = x.sum()
    assert total.device == x.device and x.is_cuda
    return total.item()


def mixes_devices():
    try:
        torch.ones(3, device="cuda") + torch.ones(3)
    except RuntimeError as error:
        return str(error)


def attends(dtype, mask, groups):
    """Attention of four query heads; the kernel that is chosen."""
    q, kv = (torch.randn(1, heads, 8, 16, device=CUDA).to(getattr(torch, dtype)) for heads in (4, 4 // groups))
    bias = torch.zeros(8, 8, device=CUDA, dtype=q.dtype) if mask else None
    F.scaled_dot_product_attention(q, kv, kv, attn_mask=bias, enable_gqa=groups > 1)
    return next(iter(device.attention))


def captures(what):
    """A graph that reads and writes; with a mistake in it, or in its use."""
    x, out = torch.ones(4, device=CUDA), torch.zeros(4, device=CUDA)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        out.copy_(x * 2)
        if what == "sync":
            out.sum().item()
    x.fill_(3.0)
    if what == "freed memory":
        del x
    graph.replay()
    return out.tolist()


def is_not_deterministic():
    torch.use_deterministic_algorithms(True)
    torch.rand(2, 3, device=CUDA).cumsum(dim=-1)


def runs_out_of_memory():
    device.memory_limit = device.allocated + 2**20
    kept = torch.empty(2**17, device=CUDA)
    try:
        torch.empty(2**18, device=CUDA)
    except torch.OutOfMemoryError:
        return torch.cuda.max_memory_allocated() - kept.nbytes
