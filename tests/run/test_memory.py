"""The estimate of memory against what PyTorch keeps."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo.algorithm import logprobs
from grpo.algorithm.batch import AllowedTokens
from grpo.algorithm.logprobs import CompletionScorer
from grpo.rollout import SamplingParams
from grpo.rollout.draw import draw
from grpo.run.memory.estimate import BYTES_PER_SCORED_LOGIT, Memory, estimate, graph_pool_bytes, line

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def kept_for_backward(model, precision: str, B: int, S: int) -> int:
    """Bytes of all tensors that a scoring pass saves, each storage once, without the weights themselves."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)  # held, so that no address is used twice
        return tensor

    ids_BS, mask_BT = torch.randint(0, 100, (B, S)), torch.ones(B, S // 2, dtype=torch.bool)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        CompletionScorer(model)(ids_BS, torch.full((B,), S // 2), mask_BT)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_about_what_autograd_keeps(precision, checkpointing):
    config = Qwen2Config(vocab_size=100, max_position_embeddings=512, **SIZES)
    model = Qwen2ForCausalLM(config).train()
    num_parameters = sum(p.numel() for p in model.parameters())
    options = dict(precision=precision, reference_bytes=7.0, gradient_checkpointing=checkpointing, tokens_in_flight=10)
    memory = estimate(config, num_parameters, tokens_per_microbatch=4 * 100, on_cpu=False, **options)
    assert memory.states == 16 * num_parameters and memory.reference == 7
    # keys and values: 6 layers x 2 heads of 32
    bf16 = precision == "bf16"
    assert memory.cache == 2 * 6 * 64 * (2 if bf16 else 4) * 10 + 2 * num_parameters * bf16
    there = estimate(config, num_parameters, tokens_per_microbatch=4 * 100, on_cpu=True, **options)
    assert there.cache == 2 * 6 * 64 * 4 * 10 + (2 if bf16 else 4) * num_parameters  # keys in fp32, copies re-ordered
    if checkpointing:
        whole = estimate(
            config,
            num_parameters,
            tokens_per_microbatch=400,
            on_cpu=False,
            **options | {"gradient_checkpointing": False},
        )
        assert memory.activations < 0.5 * whole.activations
    else:
        assert memory.activations == pytest.approx(kept_for_backward(model, precision, 4, 100), rel=0.2)


class Allocated(TorchDispatchMode):
    """Counts the bytes of the storages that operations inside the block make and that live at the same time."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given | self._seen:
                    self._seen.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.now -= size


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}])
def test_the_pool_of_graphs_is_about_what_drawing_a_token_allocates(filters):
    R, V, sampling = 64, 5000, SamplingParams(8, 16, **filters)
    logits_RV, u_R = torch.randn(R, V).bfloat16(), torch.full((R,), 0.5)
    with Allocated() as allocated:
        draw(logits_RV.clone(), u_R, sampling)
    pool = graph_pool_bytes(Qwen2Config(vocab_size=V, **SIZES), sampling, R, 10)
    assert 0.5 * pool < allocated.peak <= 1.1 * pool


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("k", [0, 50])
def test_the_logits_of_a_chunk_are_counted(precision, chunks, k, monkeypatch):
    """A vocabulary beside which the layers are small."""
    N, V = 512, 4096
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", N * V // chunks)
    head = torch.nn.Linear(16, V, bias=False)
    hidden_NH, labels_N = torch.randn(N, 16, requires_grad=True), torch.arange(N)
    holder = torch.nn.Module()
    holder.get_output_embeddings = lambda: head
    scorer = CompletionScorer(holder)
    kept = AllowedTokens(labels_N.repeat_interleave(k).int(), torch.full((N,), k, dtype=torch.int32)) if k else None
    with Allocated() as allocated, torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        scorer._score_hidden(hidden_NH, torch.arange(N), labels_N, kept)[0].sum().backward()
    expected = BYTES_PER_SCORED_LOGIT * N * V // chunks
    assert 0.5 * expected < allocated.peak <= 1.1 * expected


def test_the_estimate_counts_the_head():
    options = dict(precision="bf16", reference_bytes=0.0, gradient_checkpointing=False, tokens_in_flight=10)
    options |= dict(tokens_per_microbatch=16384)
    small, large = Qwen2Config(vocab_size=100, **SIZES), Qwen2Config(vocab_size=150_000, **SIZES)
    for on_cpu, most in ((True, logprobs.LOGITS_PER_CHUNK), (False, logprobs.LOGITS_PER_CHUNK_ON_CUDA)):
        less, more = (estimate(config, 10**6, on_cpu=on_cpu, **options) for config in (small, large))
        assert more.activations - less.activations == BYTES_PER_SCORED_LOGIT * (most - 16384 * 100)


def test_the_line_of_the_summary():
    memory = Memory(states=2 * 2**30, reference=2**29, cache=2**20, activations=2**30)
    assert memory.peak == 3.5 * 2**30
    assert line(memory) == (
        "memory    about 3.5 GiB a rank: weights, gradients and optimizer 2.0 GiB, reference 0.5 GiB, then KV cache and weight copies 1 MiB "
        "while sampling, activations 1.0 GiB in the update"
    )
