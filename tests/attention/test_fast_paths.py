"""Fast paths of CUDA, compiled for the CPU: the numbers of the plain code, and the plain code where they are not."""

import copy
import pickle

import pytest
import torch
from architectures import CAN, build
from conftest import load
from test_packing import rows

from grpo.algorithm.logprobs import CompletionScorer, _logits_gradient, _score
from grpo.attention import enable_packing, fast_paths, pack, packed
from grpo.config import load_config
from grpo.distributed import start_world
from grpo.model import Policy
from grpo.rollout.check import prove_decoding
from grpo.rollout.draw import SamplingParams, draw
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


def test_the_mask_of_flex_attention_is_that_of_the_tiles(monkeypatch, random_model):
    """Its backward pass does not run on a CPU; a run on a GPU compares its gradients at the start."""
    monkeypatch.setattr(fast_paths, "_compile", lambda function, part: function)
    scorer = CompletionScorer(load(random_model).model)
    assert scorer.pack_groups() is None
    ids_BS, prompt_lengths_B, mask_BT, group_B = rows()
    repeated = ids_BS.repeat(9, 1), prompt_lengths_B.repeat(9), mask_BT.repeat(9, 1)
    batch = *repeated, torch.cat([group_B + 3 * n for n in range(9)])  # 684 tokens, six blocks
    with torch.no_grad():
        expected_BT = scorer(*batch)[0]
        with fast_paths.only(fast_paths.FLEX):
            found_BT = scorer(*batch)[0]
    torch.testing.assert_close(found_BT, expected_BT, rtol=0, atol=2e-5)
    lengths_B = batch[2].sum(dim=1)
    layout = pack(batch[0], batch[1].tolist(), lengths_B.tolist(), batch[3].tolist())
    blocks = packed.block_mask(layout)
    assert blocks.kv_num_blocks.sum() < blocks.kv_num_blocks.numel() * (blocks.kv_num_blocks.numel() + 1) / 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_computes_with_its_own_layers(random_model, copied):
    model = load(random_model).model
    fast_paths.compile_layers(model.model.layers)
    ids, other = torch.arange(6)[None], copied(model)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        for parameter in other.parameters():
            parameter.mul_(1.1)
        assert torch.equal(model(input_ids=ids).logits, expected)
        assert not torch.allclose(other(input_ids=ids).logits, expected)


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
    (line,) = prove_update(world, policy, scorer, [], checkpointing=False)
    assert line.startswith("note      without FlexAttention over packed rows (") and "does not support backward" in line
    assert fast_paths.is_on(fast_paths.SCORES) and fast_paths.is_on(fast_paths.LAYERS)
    found = []
    for parts in ((), (fast_paths.SCORES, fast_paths.LAYERS)):
        with fast_paths.only(*parts):
            logprobs_BT, entropies_BT = scorer(*rows())
            logprobs_BT.square().sum().backward()
            found.append([logprobs_BT, entropies_BT, *(p.grad for p in policy.model.parameters())])
            policy.model.zero_grad()
    for plain, fast in zip(*found, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))


@pytest.mark.slow
def test_decode_steps_are_proved(as_on_cuda, monkeypatch):
    """The kernel for uneven lengths runs on no CPU; ``tests/cuda`` has one in its place. Qwen3 has norms of heads."""
    policy = Policy(build(*CAN["qwen3"]), None, (2,), 0, torch.device("cpu"), "fp32")
    assert enable_packing(policy.model, policy.backbone) is None
    calls, compile_ = [], fast_paths._compile
    monkeypatch.setattr(fast_paths, "_compile", lambda function, part: calls.append(part) or compile_(function, part))
    with policy.inference():
        decoder = LlamaDecoder(policy.backbone)
        assert prove_decoding(policy, decoder, SamplingParams(1, 1)) == []
    assert fast_paths.is_on(fast_paths.STEP) and fast_paths.STEP in calls


@pytest.mark.slow
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.01}], ids=str)
def test_tokens_are_drawn_alike(filters):
    torch.manual_seed(0)
    sampling = SamplingParams(1, 1, **filters)
    for R in (64, 17):
        logits_RV, u_R = (2 * torch.randn(R, 1003)).bfloat16(), torch.rand(R)
        expected = draw(logits_RV, u_R, sampling)
        with fast_paths.only(fast_paths.DRAW):
            token_R, logprob_R = draw(logits_RV, u_R, sampling)
        assert torch.equal(token_R, expected[0])
        torch.testing.assert_close(logprob_R, expected[1], rtol=0, atol=2e-6)
