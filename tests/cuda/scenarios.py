"""Scenarios on the emulated CUDA device (:mod:`emulated_cuda`); the tests are in ``test_*.py`` beside."""

import json
from pathlib import Path

import torch
from conftest import load, save_random_model, small_run
from emulated_cuda.tensors import device
from transformers import AutoConfig, AutoModelForCausalLM

import train_grpo
from grpo.algorithm.batch import Problem
from grpo.rollout import BuiltinEngine, SamplingParams

CUDA = torch.device("cuda", 0)


def save_model(folder: Path, architecture: str) -> Path:
    """A Hugging Face folder with a small random model of this type, and the tiny tokenizer."""
    save_random_model(folder)
    if architecture != "qwen2":
        sizes = json.loads((folder / "config.json").read_text())
        for name in ("model_type", "rope_parameters", "layer_types"):
            del sizes[name]
        torch.manual_seed(1)
        sizes |= dict(head_dim=16, sliding_window=16, initializer_range=0.05)  # the window is Gemma's
        config = AutoConfig.for_model(architecture, **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def trains(folder, *, architecture, precision, settings):
    """``train_grpo.py`` for two steps on a small random model; its metrics. In tf32, PyTorch is told so beforehand."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    model = save_model(Path(folder) / "model", architecture)
    short = ["runtime.device=cuda", "optim.max_steps=2", "eval.max_samples=8", "eval.before_training=false"]
    settings = [*settings, f"runtime.precision={'bf16' if precision == 'bf16' else 'fp32'}"]
    assert train_grpo.main([*small_run(model, Path(folder) / "run"), *short, *settings]) == 0
    assert (torch.backends.cuda.matmul.fp32_precision == "tf32") == (precision == "tf32")
    return [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]


def replays(folder, *, precision, mistake=None):
    """Rollouts by graphs and by the loop, with weights that change in between: equal completions in each, and notes."""
    policy, said = load(save_random_model(Path(folder)), packed=True, device=CUDA, precision=precision), []
    loop, graphs = BuiltinEngine(policy), BuiltinEngine(policy, cuda_graphs=True, warn=said.append)
    if mistake:
        policy.model.get_output_embeddings().register_forward_hook(globals()[mistake])
    problems = [Problem(u, "", tuple(range(5 + u, 10 + 3 * u))) for u in range(3)]
    equal = []
    for step in range(3):
        sampling, address = SamplingParams(num_generations=8, max_completion_length=24), (0, "rollout", step)
        both = [engine.generate(problems, sampling, seed_key=address) for engine in (graphs, loop)]
        rows = [[completion.ids for group in groups for completion in group.completions] for groups in both]
        equal.append(sum(a == b for a, b in zip(*rows, strict=True)) / len(rows[0]))
        with torch.no_grad():
            for p in policy.model.parameters():
                p.mul_(1.3).add_(0.001)
    return {"equal": equal, "said": said}


def syncs(module, inputs, output):
    """A mistake in decode steps, as a hook of the head."""
    return output * float(output.abs().max() > 0)


def syncs_when_captured(module, inputs, output):
    return syncs(module, inputs, output) if device.is_capturing() else None


def reads_what_is_freed(module, inputs, output):
    if device.is_capturing():
        return output + vars(module).pop("stored")
    module.stored = torch.zeros(output.shape[-1], device=CUDA)
    return output


def evaluates(expression):
    """An expression on a device with 1 MiB, in deterministic mode, where host syncs are errors."""
    ones = torch.ones(4, device=CUDA)
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_sync_debug_mode("error")
    device.memory_limit = 2**20
    eval(expression, {"torch": torch, "ones": ones})


def captures():
    """A graph that reads ``x`` and writes ``out``."""
    x, out, graph = torch.ones(4, device=CUDA), torch.zeros(4, device=CUDA), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(x * 2)
    x.fill_(3.0)
    before = out.tolist()
    graph.replay()
    return before, out.tolist()
