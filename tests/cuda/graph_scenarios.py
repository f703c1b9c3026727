"""Scenarios of decode steps in CUDA graphs, on the emulated device; the tests are in ``test_captured_steps.py``."""

from collections import Counter
from pathlib import Path

import scenarios
import torch
from conftest import load, save_random_model
from emulated_cuda.tensors import NO_KERNEL, device

from grpo.batch import Problem
from grpo.rollout import BuiltinEngine, SamplingParams

TEXTS = ("1+1=", "a much longer question than the others?", "12*(3+4)=", "x")
ADDRESS = (7, "rollout", 3)
CUDA = torch.device("cuda", 0)


def engines_on_gpu(folder, precision: str, warn, **changes) -> tuple[BuiltinEngine, BuiltinEngine]:
    """The decode loop and CUDA graphs, of equal policies."""
    folder = save_random_model(Path(folder) / "model", **changes)
    loop, captured = (load(folder, packed=True, device=CUDA, precision=precision) for _ in range(2))
    return BuiltinEngine(loop), BuiltinEngine(captured, cuda_graphs=True, warn=warn)


def problems_of(policy) -> list[Problem]:
    return [Problem(i, text, tuple(policy.tokenizer(text)["input_ids"])) for i, text in enumerate(TEXTS)]


def is_invalidated(folder):
    """Rollouts around a capture that CUDA invalidates: what was said, and whether the tokens are those of the loop."""
    said, sampling = [], SamplingParams(4, 12)
    loop, engine = engines_on_gpu(folder, "fp32", said.append)
    head = engine.policy.model.get_output_embeddings()

    def reads_when_captured(module, inputs, output):
        if torch.cuda.is_current_stream_capturing():
            output.sum().item()

    head.register_forward_hook(reads_when_captured)
    problems = problems_of(loop.policy)
    tokens = [
        [[c.ids for c in g.completions] for g in e.generate(problems, sampling, address=ADDRESS)]
        for e in (loop, engine)
    ]
    return {"said": said, "equal": tokens[0] == tokens[1]}


def trains_after_a_failed_capture(folder, fails: bool):
    """Lines of ``metrics.jsonl`` of a run on the device, whose captures fail if ``fails``."""
    if fails:
        torch.cuda.CUDAGraph.capture_begin = lambda *_, **__: 1 / 0
    return scenarios.trains(folder, settings=["eval.every=0"])["lines"]


def kernels_per_layer(folder, precision: str, **changes) -> dict[str, dict[str, int]]:
    """Kernels that one layer adds to a decode step, by operation: in the decode loop, in the first graph, and in one from which rows have left."""
    counts = []
    for layers in (1, 2):
        place = Path(folder) / str(layers)
        loop, engine = engines_on_gpu(place, precision, print, num_hidden_layers=layers, head_dim=8, **changes)
        problems = problems_of(loop.policy)
        engine.generate(problems, SamplingParams(8, 40), address=ADDRESS)
        graphs = [run.__self__ for run, _ in engine.graphs._steps.values()]
        found = [
            Counter(operation(func) for func, *_ in graph.recorded if operation(func) not in NO_KERNEL)
            for graph in (graphs[0], graphs[-1])
        ]
        device.forget()
        with loop._ready() as prefill:
            decoder, _ = prefill([problem.prompt_ids for problem in problems for _ in range(8)], 4)
            decoder.step(torch.zeros(32, dtype=torch.long, device=CUDA))
            device.forget()
            decoder.step(torch.zeros(32, dtype=torch.long, device=CUDA))
        counts.append([Counter(device.kernels), *found])
    names = ("loop", "first graph", "last graph")
    return {name: dict(two - one) for name, one, two in zip(names, *counts, strict=True)}


def operation(func) -> str:
    return func._schema.name.partition("::")[2]
