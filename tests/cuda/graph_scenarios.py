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
    return scenarios.trains(folder)["lines"]


def kernels_per_layer(folder, precision: str, **changes) -> dict[str, dict[str, int]]:
    """Kernels that one layer adds to a decode step, by operation: in the decode loop, and in graphs of equal and of unequal groups."""
    counts = []
    for layers in (1, 2):
        place = Path(folder) / str(layers)
        loop, engine = engines_on_gpu(place, precision, print, num_hidden_layers=layers, head_dim=8, **changes)
        problems = problems_of(loop.policy)
        for bound in (None, 600):  # which splits groups
            engine.generate(problems, SamplingParams(8, 12, tokens_in_flight=bound), address=ADDRESS)
        graphs = {key[6]: run.__self__ for key, (run, _) in engine.graphs._steps.items()}  # by whether groups are equal
        found = [launched(operation(func) for func, *_ in graphs[equal].recorded) for equal in (True, False)]
        device.forget()
        with loop._ready() as prefill:
            decoder, _ = prefill([problem.prompt_ids for problem in problems for _ in range(8)], 4)
            decoder.step(torch.zeros(32, dtype=torch.long, device=CUDA))
            device.forget()
            decoder.step(torch.zeros(32, dtype=torch.long, device=CUDA))
        counts.append([launched(device.kernels.elements()), *found])
    names = ("loop", "equal groups", "unequal groups")
    return {name: dict(two - one) for name, one, two in zip(names, *counts, strict=True)}


def launched(operations) -> Counter[str]:
    """Kernels by operation. CUDA has one for ``rms_norm``, which PyTorch computes by six operations on this device."""
    count = Counter(name for name in operations if name not in NO_KERNEL)
    norms = count.pop("rsqrt")
    count.subtract({"pow": norms, "mean": norms, "add_": norms, "mul": 2 * norms})
    return +count + Counter(rms_norm=norms)


def operation(func) -> str:
    return func._schema.name.partition("::")[2]
