"""A packed group gives the log-probs and gradients of its rows computed one by one."""

import pytest
import torch
from architectures import CAN, CANNOT, V, build, checked

from grpo.algorithm.batch import (
    Completion,
    Group,
    Problem,
    collate,
    completion_mask,
    microbatch_rows,
)
from grpo.algorithm.logprobs import CompletionScorer
from grpo.attention import pack, round_up_to_bucket
from grpo.attention.packed import ATTENTION

torch.set_num_threads(1)


def rows(num_shared=0):
    """Six rows of three groups, of one to forty tokens; the second group has one completion, the
    third an empty one. All prompts begin with ``num_shared`` tokens more."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, V, (n,), generator=generator) for n in (11, 1, 7)]
    shared = torch.randint(3, V, (num_shared,), generator=generator)
    prompts = [torch.cat([shared, prompt]) for prompt in prompts]
    group_B, lengths = [0, 0, 0, 1, 2, 2], [5, 1, 40, 9, 17, 0]
    sequences = [
        torch.cat([prompts[g], torch.randint(3, V, (n,), generator=generator)])
        for g, n in zip(group_B, lengths, strict=True)
    ]
    ids_BS = torch.zeros(6, max(map(len, sequences)), dtype=torch.long)
    for b, sequence in enumerate(sequences):
        ids_BS[b, : len(sequence)] = sequence
    mask_BT = completion_mask(torch.zeros(6, 40), torch.tensor(lengths))
    return ids_BS, torch.tensor([len(prompts[g]) for g in group_B]), mask_BT, torch.tensor(group_B)


def scored(scorer, *batch):
    """Log-probs, entropies, and the gradient of a weighted sum of the log-probs."""
    scorer.zero_grad()
    logprobs_BT, entropies_BT = scorer(*batch)
    weights_BT = torch.linspace(-1, 2, logprobs_BT.numel(), dtype=logprobs_BT.dtype).view_as(
        logprobs_BT
    )
    (logprobs_BT * weights_BT).sum().backward()
    gradients = {
        name: p.grad.clone() for name, p in scorer.named_parameters() if p.grad is not None
    }
    return logprobs_BT.detach(), entropies_BT, gradients


@pytest.mark.parametrize("name", CAN)
@pytest.mark.parametrize(
    ("recompute", "num_shared"), [(False, 0), (True, 0), (False, 20), (True, 20)]
)
def test_packed_equals_padded(name, recompute, num_shared):
    model = build(*CAN[name])
    if recompute:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    scorer = CompletionScorer(model, temperature=0.8)
    padded = scored(scorer, *rows(num_shared))
    scorer, why_padded = checked(model, temperature=0.8)
    assert why_padded is None and scorer.is_packed
    calls = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: calls.append(inputs[0].shape)
    )
    packed = scored(scorer, *rows(num_shared))
    hook.remove()
    # 11 + 1 + 7 prompt tokens and those that all prompts begin with, once each, and each completion
    # without its last token; the last 2 are padding: neither 86 nor 106 is one of the few sizes
    assert calls[0] == (
        1,
        num_shared + 19 + 4 + 0 + 39 + 8 + 16 + 2,
    )
    torch.testing.assert_close(packed[0], padded[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(packed[1], padded[1], rtol=0, atol=1e-5)
    assert packed[2].keys() == padded[2].keys()
    for parameter, expected in padded[2].items():
        torch.testing.assert_close(
            packed[2][parameter], expected, rtol=1e-4, atol=2e-5, msg=parameter
        )


@pytest.mark.parametrize("num_shared", [0, 20])
def test_packed_equals_padded_in_float64(num_shared):
    # (the others' norms compute in fp32)
    scorer = CompletionScorer(build(*CAN["gpt2, learned positions"]).double())
    padded = scored(scorer, *rows(num_shared))
    scorer, why_padded = checked(scorer.model)
    assert why_padded is None
    packed = scored(scorer, *rows(num_shared))
    torch.testing.assert_close(packed[0], padded[0], rtol=0, atol=1e-12)
    for parameter, expected in padded[2].items():
        torch.testing.assert_close(
            packed[2][parameter], expected, rtol=1e-10, atol=1e-11, msg=parameter
        )


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_packed_is_found_out(name):
    *how, reason = CANNOT[name]
    model = build(*how)
    scorer = CompletionScorer(model)
    scorer.detect_plain_head(rows()[0])
    expected_BT, _ = scorer(*rows())
    scorer, why_padded = checked(model)
    assert reason in why_padded
    assert not scorer.is_packed
    assert model.config._attn_implementation != ATTENTION
    assert torch.equal(scorer(*rows())[0], expected_BT)


def test_a_model_that_mixes_tokens_elsewhere_is_found_out():
    """A layer that looks one token back would look into the neighbour's completion."""
    model = build(*CAN["qwen2"])
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x + torch.roll(x, 1, dims=1))
    with pytest.raises(ValueError, match="Qwen2ForCausalLM cannot be sampled"):
        checked(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_changes_its_mask_is_found_out():
    """As sparse attention does in rows longer than the probe."""
    model = build(*CAN["qwen2"])
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def masked(hidden_states, attention_mask, **options):
        n = hidden_states.shape[1]
        mask = attention_mask
        if mask is not None and mask.shape[-1] == 1:
            mask = mask.expand(1, 1, n, n)
        return forward(hidden_states, attention_mask=mask, **options)

    attention.forward = masked
    assert checked(model)[1] == "its layers change the mask"


def test_without_group_numbers_rows_are_padded():
    scorer = CompletionScorer(build(*CAN["qwen2"]))
    scorer.detect_plain_head(rows()[0])
    *batch, _ = rows()
    expected_BT, _ = scorer(*batch)
    scorer, _ = checked(scorer.model)
    assert torch.equal(scorer(*batch)[0], expected_BT)


def test_layout_by_hand():
    ids_BS = torch.tensor(
        [[10, 11, 20, 21, 22, 0], [10, 11, 30, 0, 0, 0], [12, 40, 41, 42, 43, 44]]
    )
    packed = pack(ids_BS, [2, 2, 1], [3, 1, 5], [0, 0, 1])
    # prompts; then the completions without their last tokens, the longest first; the second
    # completion has none left
    assert packed.ids_1N.tolist() == [[10, 11, 12, 40, 41, 42, 43, 20, 21]]
    assert packed.positions_1N.tolist() == [[0, 1, 0, 1, 2, 3, 4, 2, 3]]
    assert packed.predictor_M.tolist() == [1, 7, 8, 1, 2, 3, 4, 5, 6]
    prompts, completions = packed.tiles
    assert (prompts.width, completions.width) == (2, 4)
    assert completions.prompt_R.tolist() == [1, 0]
    # a prompt of one token in two places, then itself
    assert packed.visible_RCS(completions)[0].int().tolist() == [
        [1, 0, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [1, 0, 1, 1, 1, 0],
        [1, 0, 1, 1, 1, 1],
    ]
    assert packed.visible_RCS(completions)[1, :2].int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
    ]


def test_layout_of_prompts_that_begin_alike_by_hand():
    shared = list(range(100, 116))
    ids_BS = torch.tensor([[*shared, 10, 11, 20, 21], [*shared, 12, 40, 41, 42]])
    packed = pack(ids_BS, [18, 17], [2, 3], [0, 1])
    # the tokens that both begin with; the rest of each prompt; the completions
    assert packed.ids_1N.tolist() == [[*shared, 10, 11, 12, 40, 41, 20]]
    assert packed.positions_1N.tolist() == [[*range(16), 16, 17, 16, 17, 18, 18]]
    assert packed.predictor_M.tolist() == [17, 21, 18, 19, 20]
    prompts, _ = packed.tiles
    assert (prompts.width, packed.sizes) == (18, [19, 3, 0])
    x_nHD = torch.arange(1.0, 20.0)[:, None, None]
    x_RHCD = prompts.pad(x_nHD)
    assert x_RHCD[:, 0, :, 0].tolist() == [[*range(1, 17), 17, 18], [*range(1, 17), 19, 0]]
    assert torch.equal(prompts.unpad(x_RHCD), x_nHD)

    # each prompt keeps a token of its own, and 15 equal tokens are too few
    packed = pack(ids_BS, [17, 17], [3, 3], [0, 1])
    assert packed.sizes[0] == 16 + 1 + 1
    packed = pack(ids_BS, [16, 17], [4, 3], [0, 1])
    assert packed.sizes[0] == 16 + 17


def test_completions_of_very_unlike_lengths_are_in_tiles_of_their_own():
    lengths = [100, 97, 80, 74, 60, 40, 39, 8, 2]
    ids_BS = torch.zeros(9, 110, dtype=torch.long)
    packed = pack(ids_BS, [5] * 9, [n + 1 for n in lengths], [0] * 9)
    assert [(len(tile.prompt_R), tile.width) for tile in packed.tiles] == [
        (1, 5),
        (3, 100),
        (2, 74),
        (2, 40),
        (2, 8),
    ]
    assert packed.sizes == [5, 277, 134, 79, 10, 7]  # and 7 tokens of padding


def test_groups_are_cut_by_their_packed_tokens():
    def group(index, prompt, *lengths):
        completions = [Completion(tuple(range(n)), "", True) for n in lengths]
        return Group(Problem(index, "", tuple(range(prompt))), tuple(completions))

    groups = [group(0, 10, 5, 5), group(1, 4, 3, 3), group(2, 20, 30, 10)]
    batch = collate(groups, torch.zeros(3, 2), pad_id=0)
    assert batch.group_B.tolist() == [0, 0, 1, 1, 2, 2]
    # 20 + 10 tokens, then 20 + 30 which is the limit, then the prompt once more for the row that did not fit
    assert [rows.tolist() for rows in microbatch_rows(batch, 50, packed=True)] == [
        [0, 1, 2, 3],
        [4],
        [5],
    ]
    assert [rows.tolist() for rows in microbatch_rows(batch, 1, packed=True)] == [
        [0],
        [1],
        [2],
        [3],
        [4],
        [5],
    ]
    assert [rows.tolist() for rows in microbatch_rows(batch, 10**6, packed=True)] == [
        [0, 1, 2, 3, 4, 5]
    ]


def test_packed_rows_have_few_lengths():
    lengths = [round_up_to_bucket(n) for n in range(2049, 4097)]
    assert len(set(lengths)) == 16 and all(0 <= m - n < 128 for n, m in enumerate(lengths, 2049))
    assert [round_up_to_bucket(n) for n in (0, 1, 31, 32, 33, 64, 65)] == [0, 1, 31, 32, 34, 64, 68]
