"""Rollouts: tokens and masks are right, and a completion depends only on its own seed."""

from dataclasses import replace

import pytest
import torch
from architectures import CAN, V, build
from conftest import load, make_tags_special, save_random_model
from transformers import GenerationConfig

from grpo.algorithm.batch import Problem, collate
from grpo.algorithm.logprobs import CompletionScorer
from grpo.data.chat import special_tokens
from grpo.data.tiny import build_tokenizer
from grpo.model import Policy
from grpo.rollout import BuiltinEngine, SamplingParams, check_model, split_stop
from grpo.rollout.decode_loop import num_admissible
from grpo.rollout.prefill import ForkedCacheDecoder
from grpo.rollout.weights import CopiedLinear, copied_weights

SAMPLING = SamplingParams(num_generations=3, max_completion_length=24, temperature=0.9)
SEED_KEY = (7, "rollout", 3)


def generate(policy, *args, **options):
    return BuiltinEngine(policy).generate(*args, **options)


def problems_of(policy, *texts: str) -> list[Problem]:
    return [
        Problem(i, text, tuple(policy.tokenizer(text)["input_ids"])) for i, text in enumerate(texts)
    ]


def ids(groups) -> list[list[tuple[int, ...]]]:
    return [[c.ids for c in group.completions] for group in groups]


TEXTS = ("1+1=", "a much longer question than the others?", "12*(3+4)=", "x")


def test_greedy_tokens_are_those_of_transformers(policy):
    problems = problems_of(policy, *TEXTS)
    groups = generate(policy, problems, SamplingParams(1, 24, temperature=0.0), seed_key=SEED_KEY)
    for problem, group in zip(problems, groups, strict=True):
        (expected,) = policy.model.generate(
            torch.tensor([problem.prompt_ids]),
            attention_mask=torch.ones(1, len(problem.prompt_ids), dtype=torch.long),
            generation_config=GenerationConfig(
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=list(policy.eos_ids),
                pad_token_id=policy.pad_id,
            ),
        )
        assert group.completions[0].ids == tuple(expected[len(problem.prompt_ids) :].tolist())


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-5), ("bf16", 0.03)])
def test_sampling_logprobs_are_those_the_loss_scores(policy, precision, tolerance):
    policy.precision = precision
    problems = problems_of(policy, *TEXTS)
    groups = generate(policy, problems, SAMPLING, seed_key=SEED_KEY)
    batch = collate(groups, torch.zeros(4, 3), pad_id=policy.pad_id)
    with torch.no_grad(), policy.autocast():
        scored_BT, _ = CompletionScorer(policy.model, temperature=0.9)(*batch.scorer_inputs)
    lengths = batch.completion_mask_BT.sum(dim=1)
    assert len(set(lengths.tolist())) > 2, "lengths should differ, or this test sees little"
    difference_BT = (scored_BT - batch.sampling_logprobs_BT).abs()
    mean = difference_BT.sum() / lengths.sum()
    difference = difference_BT.max() if precision == "fp32" else mean
    assert float(difference) < tolerance


def test_a_row_does_not_depend_on_the_others(policy):
    problems = problems_of(policy, *TEXTS)
    together = ids(generate(policy, problems, SAMPLING, seed_key=SEED_KEY))
    alone = []
    for problem in problems:
        alone += ids(generate(policy, [problem], SAMPLING, seed_key=SEED_KEY))
    backwards = ids(generate(policy, problems[::-1], SAMPLING, seed_key=SEED_KEY))[::-1]
    fewer = ids(generate(policy, problems, replace(SAMPLING, num_generations=1), seed_key=SEED_KEY))
    assert together == alone == backwards
    assert [row[:1] for row in together] == fewer
    assert generate(policy, [], SAMPLING, seed_key=SEED_KEY) == []  # a rank without problems


def test_problems_that_ask_the_same(policy):
    """With others between them and beside each other; each has its own seed and so its own
    tokens."""
    problems = problems_of(policy, "1+1=", "a longer question?", "1+1=", "1+1=")
    sampling = replace(SAMPLING, tokens_in_flight=400)
    together = ids(generate(policy, problems, sampling, seed_key=SEED_KEY))
    for problem, found in zip(problems, together, strict=True):
        (alone,) = ids(generate(policy, [problem], SAMPLING, seed_key=SEED_KEY))
        assert found == alone
    assert together[0] != together[2]


def test_waves_give_the_same_tokens(policy):
    problems = problems_of(policy, *TEXTS)
    whole = generate(policy, problems, SAMPLING, seed_key=SEED_KEY)
    cut = generate(policy, problems, replace(SAMPLING, tokens_in_flight=200), seed_key=SEED_KEY)
    assert ids(cut) == ids(whole)


def test_other_seed_keys_give_other_completions(policy):
    problems = problems_of(policy, "1+1=", "1+1=")

    def long_ones(*seed_key):
        groups = generate(policy, problems, replace(SAMPLING, num_generations=8), seed_key=seed_key)
        return [c.ids for group in groups for c in group.completions if len(c.ids) > 5]

    here = long_ones(7, "rollout", 3)
    assert len(here) > 4
    assert len(set(here)) == len(here), "same prompt, but other problem and sample numbers"
    assert not set(here) & set(long_ones(7, "rollout", 4))
    assert not set(here) & set(long_ones(8, "rollout", 3))
    assert not set(here) & set(long_ones(7, "evaluation", 3))


def test_ends_at_eos_inclusive_or_at_the_limit(policy):
    groups = generate(
        policy,
        problems_of(policy, *TEXTS),
        replace(SAMPLING, num_generations=16),
        seed_key=SEED_KEY,
    )
    completions = [c for group in groups for c in group.completions]
    assert {c.finished for c in completions} == {True, False}
    for completion in completions:
        assert sum(token in policy.eos_ids for token in completion.ids) == completion.finished
        assert (completion.ids[-1] in policy.eos_ids) == completion.finished
        assert completion.finished or len(completion.ids) == 24
        assert len(completion.sampling_logprobs) == len(completion.ids)
        shown = [id for id in completion.ids if id not in (*policy.eos_ids, policy.pad_id)]
        assert completion.text == policy.tokenizer.decode(shown)


def test_pad_id_equal_to_eos_id(random_model):
    policy = load(random_model)
    expected = generate(policy, problems_of(policy, *TEXTS), SAMPLING, seed_key=SEED_KEY)
    policy.pad_id = policy.eos_ids[0]
    groups = generate(policy, problems_of(policy, *TEXTS), SAMPLING, seed_key=SEED_KEY)
    assert ids(groups) == ids(expected)
    batch = collate(groups, torch.zeros(4, 3), pad_id=policy.pad_id)
    completions = [c for group in groups for c in group.completions]
    assert any(c.finished for c in completions)
    for b, completion in enumerate(completions):
        n = len(completion.ids)
        assert batch.loss_mask_BT[b, :n].all(), "the EOS is trained on"
        assert not batch.loss_mask_BT[b, n:].any(), "what follows it, though of the same id, is not"


def test_two_eos_ids(random_model, tmp_path):
    plain = load(random_model)
    letter = plain.tokenizer.convert_tokens_to_ids("e")
    folder = save_random_model(tmp_path, eos_token_id=[plain.tokenizer.eos_token_id, letter])
    policy = load(folder)
    assert set(policy.eos_ids) == {plain.tokenizer.eos_token_id, letter}
    groups = generate(
        policy,
        problems_of(policy, *TEXTS),
        replace(SAMPLING, num_generations=32),
        seed_key=SEED_KEY,
    )
    ends = {c.ids[-1] for g in groups for c in g.completions if c.finished}
    assert ends == set(policy.eos_ids)
    assert all(
        token not in policy.eos_ids for g in groups for c in g.completions for token in c.ids[:-1]
    )


def test_generation_config_of_the_checkpoint_does_not_leak(random_model, tmp_path):
    reference = load(random_model)
    folder = save_random_model(tmp_path)
    GenerationConfig(
        do_sample=True,
        top_k=2,
        top_p=0.8,
        temperature=0.1,
        repetition_penalty=1.5,
        eos_token_id=reference.eos_ids[0],
    ).save_pretrained(folder)
    policy = load(folder)
    assert policy.model.generation_config.repetition_penalty == 1.5, "the folder does say so"
    problems = problems_of(policy, *TEXTS)
    for sampling in (SAMPLING, SamplingParams(1, 24, temperature=0.0)):
        found = generate(policy, problems, sampling, seed_key=SEED_KEY)
        expected = generate(reference, problems, sampling, seed_key=SEED_KEY)
        assert ids(found) == ids(expected)


def test_stop_strings_end_a_completion_and_stay_in_it(policy):
    problems = problems_of(policy, *TEXTS)
    sampling = replace(SAMPLING, num_generations=8)
    plain = generate(policy, problems, sampling, seed_key=SEED_KEY)
    texts = [c.text for g in plain for c in g.completions]
    stop = next(text[4:6] for text in texts if len(text) > 8 and text[4:6].isascii())
    stopped = generate(policy, problems, replace(sampling, stop=(stop,)), seed_key=SEED_KEY)
    for before, after in zip(texts, [c for g in stopped for c in g.completions], strict=True):
        assert before.startswith(after.text)
        if stop in before:
            assert after.finished and stop in after.text, "it stays part of the completion"
            assert stop not in policy.tokenizer.decode(after.ids[:-1], skip_special_tokens=True), (
                "and nothing follows"
            )
        else:
            assert after.text == before


def test_a_stop_string_that_is_a_special_token_ends_a_completion(policy):
    """The text of a completion does not contain it: it is found by its id, and is the last token,
    as an EOS is."""
    problems = problems_of(policy, *TEXTS)
    sampling = replace(SAMPLING, num_generations=24)
    plain = [
        c
        for group in generate(policy, problems, sampling, seed_key=SEED_KEY)
        for c in group.completions
    ]
    turn = policy.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert turn not in policy.eos_ids
    groups = generate(
        policy, problems, replace(sampling, stop=("<|im_start|>", "zzz")), seed_key=SEED_KEY
    )
    stopped = [c for group in groups for c in group.completions]
    assert any(turn in c.ids[:-1] for c in plain), "or this test sees nothing"
    for before, after in zip(plain, stopped, strict=True):
        end = before.ids.index(turn) + 1 if turn in before.ids else len(before.ids)
        assert after.ids == before.ids[:end]
        assert after.finished == (before.finished or turn in before.ids)
        assert "<|im_start|>" not in after.text
        assert len(after.sampling_logprobs) == end


@pytest.fixture(scope="module")
def special_tags(tmp_path_factory):
    """The random model, with tags that are special tokens of its tokenizer."""
    folder = save_random_model(tmp_path_factory.mktemp("special"))
    make_tags_special(folder)
    return load(folder)


def test_tags_that_are_special_tokens_stay_in_the_text(random_model, special_tags):
    """Rewards read the same texts whether tags are special tokens or not."""
    plain = load(random_model)
    sampling = replace(SAMPLING, num_generations=32)
    assert "<think>" in special_tokens(special_tags.tokenizer)
    problems = problems_of(plain, *TEXTS)
    groups = generate(special_tags, problems, sampling, seed_key=SEED_KEY)
    assert groups == generate(plain, problems, sampling, seed_key=SEED_KEY)
    texts = [c.text for group in groups for c in group.completions]
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert any(tag in text for text in texts), "or this test sees nothing"
    assert not any("<|im_end|>" in text or "<|endoftext|>" in text for text in texts)


def test_stop_strings_with_a_special_token_beside_other_text_are_refused(policy):
    tokenizer = policy.tokenizer
    assert split_stop(tokenizer, ["</answer>", "<|im_start|>"]) == (
        [tokenizer.convert_tokens_to_ids("<|im_start|>")], ["</answer>"]
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"rollout\.stop: '<\|im_start\|>user' holds"):
        split_stop(tokenizer, ["<|im_start|>user"])


def test_sampling_leaves_the_model_as_it_was(random_model):
    policy = load(random_model, gradient_checkpointing=True)
    policy.model.train()
    trained = generate(policy, problems_of(policy, *TEXTS), SAMPLING, seed_key=SEED_KEY)
    assert policy.model.training
    assert policy.model.is_gradient_checkpointing
    policy.model.eval()
    assert ids(trained) == ids(
        generate(policy, problems_of(policy, *TEXTS), SAMPLING, seed_key=SEED_KEY)
    )
    assert not policy.model.training


def test_forked_and_copied_caches_give_the_same_tokens(random_model):
    """Prompts of 1 to 15 tokens; rows end at different times: groups lose rows unevenly, and
    prompts all of theirs."""
    sampling = SamplingParams(8, 40)
    plain = load(random_model)
    packed = load(random_model, packed=True)
    texts = ("7", "12+30=", "what is 99-1?", "3*3=", "0=0=0=0=0=0=0")
    expected = generate(plain, problems_of(plain, *texts), sampling, seed_key=SEED_KEY)
    found = generate(packed, problems_of(packed, *texts), sampling, seed_key=SEED_KEY)
    assert ids(found) == ids(expected)
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one.completions, other.completions, strict=True):
            assert a.sampling_logprobs == pytest.approx(b.sampling_logprobs, abs=1e-4)
    lengths = {len(c.ids) for group in found for c in group.completions}
    assert len(lengths) > 5


def test_rows_that_waited_get_the_tokens_of_all_at_once(random_model, monkeypatch):
    """Whole groups join when rows have ended; memory stays within the bound."""
    policy = load(random_model, packed=True)
    problems = problems_of(policy, "7", "12+30=", "what is 99-1?", "3*3=", "0=0=0=0=0=0=0")
    sampling = SamplingParams(8, 40)
    expected = generate(policy, problems, sampling, seed_key=SEED_KEY)
    held = []
    joined = []
    add_rows = ForkedCacheDecoder.add_rows
    step = ForkedCacheDecoder.step

    def recorded_add(self, other):
        add_rows(self, other)
        joined.append(len(other.prompt_R))

    def recorded_step(self, token_R):
        held.append(len(token_R) * (int(self.prompt_lengths_U.max()) + self.capacity))
        return step(self, token_R)

    monkeypatch.setattr(ForkedCacheDecoder, "add_rows", recorded_add)
    monkeypatch.setattr(ForkedCacheDecoder, "step", recorded_step)
    longest = max(len(problem.prompt_ids) for problem in problems)
    for rows in (3, 20):
        bound = rows * (longest + 46)
        held.clear()
        counted = []
        bounded = replace(sampling, tokens_in_flight=bound)
        found = generate(policy, problems, bounded, seed_key=SEED_KEY, on_tokens=counted.append)
        assert ids(found) == ids(expected)
        assert max(held) <= bound
        assert sum(counted) == sum(len(c.ids) for group in found for c in group.completions)
    assert joined[-3:] == [8, 8, 8]


def test_no_row_is_decoded_beyond_its_last_position():
    """Prompt and completion fill the context, and a row that ended there shares the batch with rows
    that go on."""
    policy = Policy(
        build(*CAN["gpt2, learned positions"]),
        build_tokenizer(),
        (2, 12),
        0,
        torch.device("cpu"),
        "fp32",
    )
    assert check_model(policy, CompletionScorer(policy.model)) is None
    problems = [Problem(i, "", tuple((7 * i + j) % V for j in range(104))) for i in range(24)]
    sampling = SamplingParams(1, 128 - 104)
    expected = generate(policy, problems, sampling, seed_key=(1, "x", 0))
    found = generate(
        policy, problems, replace(sampling, tokens_in_flight=8 * 138), seed_key=(1, "x", 0)
    )
    assert ids(found) == ids(expected)


def test_how_many_rows_may_begin():
    short, long = (1,) * 10, (2,) * 30
    prompts = [short] * 4 + [long] * 4 + [short] * 4

    def number(in_flight, begun, bound):
        of_rows = [prompts[row] for row in in_flight]
        return num_admissible(
            prompts[begun:], of_rows, replace(SAMPLING, tokens_in_flight=bound), 20
        )

    assert number([], 0, None) == 12
    assert number([0], 4, None) == 8
    assert number([], 0, 1) == 1, "one row at least"
    assert number([], 0, 30 * 3) == 3, "a part of a group too large to begin whole"
    assert number([], 0, 30 * 4) == number([], 0, 30 * 7) == 4, "longer prompts count more, for all"
    assert number([], 0, 50 * 8) == 8
    assert number([], 0, 50 * 8 - 1) == 4
    assert number([0, 1], 4, 50 * 6 - 1) == 0
    assert number([0, 1], 4, 50 * 6) == 4


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_reordered_weights_give_the_same_logits(random_model, precision, tolerance):
    policy = load(random_model, precision=precision)
    ids_BS = torch.arange(3, 13)[None]
    policy.model.eval()
    with torch.no_grad(), policy.autocast():
        expected_BSV = policy.model(input_ids=ids_BS).logits.float()
    with policy.inference_mode(), copied_weights(policy.model, precision):
        found_BSV = policy.model(input_ids=ids_BS).logits.float()
        assert isinstance(policy.model.lm_head, CopiedLinear), (
            "this machine has no re-ordered weights"
        )
    torch.testing.assert_close(
        found_BSV, expected_BSV, rtol=0, atol=tolerance * float(expected_BSV.abs().max())
    )
    assert type(policy.model.lm_head) is torch.nn.Linear


def test_layers_with_hooks_or_another_forward_compute_themselves(random_model):
    model = load(random_model).model
    layer = model.model.layers[0]
    seen = []
    layer.self_attn.q_proj.register_forward_hook(lambda *_: seen.append("hook"))
    layer.mlp.up_proj.forward = lambda x: 0 * x.repeat(1, 1, 2)
    with torch.no_grad(), copied_weights(model, "fp32"):
        assert type(layer.self_attn.q_proj) is type(layer.mlp.up_proj) is torch.nn.Linear
        assert isinstance(layer.mlp.gate_proj, CopiedLinear)
        model(input_ids=torch.arange(5)[None])
    assert seen == ["hook"]
