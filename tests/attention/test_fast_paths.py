"""Fast paths of CUDA, compiled for the CPU: the numbers of the plain code, and the plain code where they are not."""

import pytest
import torch
from architectures import CAN, build
from conftest import load
from test_packing import rows

from grpo.algorithm.logprobs import CompletionScorer, _logits_gradient, _score
from grpo.attention import enable_packing, fast_paths
from grpo.config import load_config
from grpo.distributed import start_world
from grpo.model import Policy
from grpo.rollout.check import prove_decoding
from grpo.rollout.llama_decoder import LlamaDecoder
from grpo.run.proofs import prove_update

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_stays_on():
    with fast_paths.only():
        yield


@pytest.fixture
def as_on_cuda(monkeypatch):
    monkeypatch.setattr(fast_paths, "may_use", lambda device: True)


@pytest.mark.parametrize(
    ("fast_value", "others_agree", "reason"),
    [
        (1.0, True, None),
        (1.2, True, "its results differ by 0.28"),  # 0.2 of the values, whose standard deviation is sqrt(1/2)
        (torch.nan, True, "differ by nan"),
        (None, True, "no kernel"),
        (1.0, False, "it failed on another rank"),
    ],
)
def test_a_part_is_on_if_it_is_right_on_all_ranks(fast_value, others_agree, reason):
    def compute():
        if fast_paths.is_on("part") and fast_value is None:
            raise RuntimeError("no kernel\nmore")
        yield torch.tensor([0.0, 1.0]) * 1 + (fast_value - 1 if fast_paths.is_on("part") and fast_value else 0.0)

    said = fast_paths.prove("part", compute, 1e-3, lambda own: own and others_agree)
    assert fast_paths.is_on("part") == (reason is None) == (said == [])
    assert reason is None or (said[0].startswith("note      without part (") and reason in said[0])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_log_probs_and_their_gradient(dtype, temperature):
    torch.manual_seed(0)
    for N in (40, 17, 64):
        logits_NV, labels_N = 3 * torch.randn(N, 333, dtype=dtype), torch.randint(333, (N,))
        grad_N, found = torch.randn(N), []
        for parts in ((), (fast_paths.SCORES,)):
            with fast_paths.only(*parts):
                scored = _score(logits_NV.clone(), labels_N, temperature)
                found.append((*scored, _logits_gradient(logits_NV, labels_N, scored[2], grad_N, temperature)))
        for plain, fast in zip(*found, strict=True):
            # A gradient that is stored in bf16 may be rounded to its neighbour, 2^-7 away.
            torch.testing.assert_close(fast, plain, rtol=2**-7 if plain.dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.slow
def test_an_update_is_proved_and_computes_other_batches_alike(as_on_cuda, random_model):
    policy, world = load(random_model), start_world(load_config(["runtime.device=cpu"]).runtime)
    scorer = CompletionScorer(policy.model)
    assert scorer.pack_groups() is None
    assert prove_update(world, policy, scorer, tokens_per_microbatch=512) == []
    assert fast_paths.is_on(fast_paths.SCORES)
    found = []
    for parts in ((), (fast_paths.SCORES,)):
        with fast_paths.only(*parts):
            logprobs_BT, entropies_BT = scorer(*rows())
            logprobs_BT.square().sum().backward()
            found.append([logprobs_BT, entropies_BT, *(p.grad for p in policy.model.parameters())])
            policy.model.zero_grad()
    for plain, fast in zip(*found, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))


@pytest.mark.slow
def test_decode_steps_are_proved(as_on_cuda, monkeypatch):
    """Qwen3 has norms of heads."""
    policy = Policy(build(*CAN["qwen3"]), None, (2,), 0, torch.device("cpu"), "fp32")
    assert enable_packing(policy.model, policy.backbone) is None
    calls, compile_ = [], fast_paths._compile
    monkeypatch.setattr(fast_paths, "_compile", lambda function, part: calls.append(part) or compile_(function, part))
    with policy.inference():
        decoder = LlamaDecoder(policy.backbone)
        assert prove_decoding(policy, decoder) == []
    assert fast_paths.is_on(fast_paths.STEP) and fast_paths.STEP in calls
