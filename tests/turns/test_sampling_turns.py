"""Turns in the built-in engine: answers enter the KV cache, and only the model's own tokens are
scored and trained."""

import random
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from architectures import CAN, CANNOT, V, build

from grpo.algorithm.batch import Completion, Group, Problem, collate, completion_lengths
from grpo.algorithm.logprobs import CompletionScorer
from grpo.algorithm.loss import loss_denominator, policy_loss
from grpo.attention import packing_enabled
from grpo.model import Policy
from grpo.rollout import BuiltinEngine, SamplingParams, check_model

SAMPLING = SamplingParams(num_generations=4, max_completion_length=48, temperature=0.9)
TEXTS = ("1+1=", "a much longer question than the others?", "12*(3+4)=", "x")
SEED_KEY = (7, "rollout", 3)


def problems_of(policy, *texts):
    return [
        Problem(i, text, tuple(policy.tokenizer(text)["input_ids"])) for i, text in enumerate(texts)
    ]


class Answers:
    """Answers of 1 to 9 tokens that depend on the turn alone, for a number of turns; they arrive
    late, out of order."""

    def __init__(self, T, vocabulary=200, seconds=0.0):
        self.T = T
        self.vocabulary = vocabulary
        self.seconds = seconds
        self.turns = defaultdict(list)
        self.lengths = Counter()
        self.threads = ThreadPoolExecutor(8)

    def __call__(self, row, ids):
        turns = self.turns[row]
        turns.append(tuple(ids))
        rng = random.Random(hash((turns[-1], len(turns))))
        length = rng.randint(1, 9)
        answer = [rng.randrange(3, self.vocabulary) for _ in range(length)]
        self.lengths[row] += len(ids) + length
        if len(turns) == 3 or self.lengths[row] >= self.T:
            answer = None
        return self.threads.submit(self.late, answer)

    def late(self, answer):
        time.sleep(random.random() * self.seconds)
        return answer


def rows_of(groups):
    return [(c.ids, c.loss_mask, c.finished) for group in groups for c in group.completions]


def sample(policy, problems, sampling=SAMPLING, **options):
    answers = Answers(sampling.max_completion_length, **options)
    groups = BuiltinEngine(policy).generate(problems, sampling, seed_key=SEED_KEY, replies=answers)
    return groups, answers


def check_scores(policy, groups, tolerance=1e-4):
    """Sampled log-probs are those that the scorer computes from the whole conversation; 0 at
    answers."""
    batch = collate(
        groups, torch.zeros(len(groups), len(groups[0].completions)), pad_id=policy.pad_id
    )
    scorer = CompletionScorer(policy.model, temperature=0.9)
    scorer.detect_plain_head(batch.sequence_ids_BS)
    scorer.is_packed = packing_enabled(policy.model)
    with torch.no_grad():
        scored_BT, _ = scorer(*batch.scorer_inputs)
    torch.testing.assert_close(batch.sampling_logprobs_BT, scored_BT, rtol=0, atol=tolerance)
    assert (scored_BT[~batch.completion_mask_BT] == 0).all()
    return batch


def test_sampler_and_scorer_agree_over_three_turns(policy):
    sampling = replace(SAMPLING, max_completion_length=96)
    groups, answers = sample(policy, problems_of(policy, *TEXTS), sampling)
    num_turns = [len(turns) for turns in answers.turns.values()]
    assert max(num_turns) == 3
    assert sum(n > 1 for n in num_turns) > 4
    check_scores(policy, groups)
    # What the engine sampled is what it gave to the tools.
    completions = [c for group in groups for c in group.completions]
    for row, completion in enumerate(completions):
        assert not completion.loss_mask or completion.loss_mask[-1]
        if completion.finished and row in answers.turns:
            assert completion.sampled_ids == sum(answers.turns[row], ())


@pytest.mark.parametrize(
    "name", ["qwen3", "gpt2, learned positions", "sliding window", "convolutions"]
)
def test_every_kind_of_cache_goes_on_after_an_answer(name):
    kind, settings, *_ = (CAN | CANNOT)[name]
    model = build(kind, settings)
    policy = Policy(model, _Letters(), (2,), 0, torch.device("cpu"), "fp32")
    check_model(policy, CompletionScorer(model))
    problems = [Problem(i, "", tuple(range(3, 8 + 3 * i))) for i in range(3)]
    with torch.no_grad():
        model.get_output_embeddings().weight[2] *= 3.0
    groups, answers = sample(policy, problems, vocabulary=V)
    assert any(len(turns) > 1 for turns in answers.turns.values())
    check_scores(policy, groups)


def test_nothing_is_read_before_it_is_written(policy, new_memory_is_nan):
    """Most turns end with their first token, before the cache has any."""
    policy = replace(policy, eos_ids=tuple(range(3, len(policy.tokenizer))))
    _, answers = sample(policy, problems_of(policy, *TEXTS))  # the engine refuses NaN
    assert max(len(turns) for turns in answers.turns.values()) == 3


class _Letters:
    """A tokenizer for models without one."""

    all_special_tokens = ()

    def decode(self, ids, **options):
        return " ".join(map(str, ids))


def test_tokens_depend_neither_on_the_batch_nor_on_how_long_an_answer_takes(policy):
    problems = problems_of(policy, *TEXTS)
    groups, _ = sample(policy, problems)
    logprobs = [c.sampling_logprobs for group in groups for c in group.completions]
    late, _ = sample(policy, problems, seconds=0.05)
    assert rows_of(late) == rows_of(groups)
    assert [
        c.sampling_logprobs for group in late for c in group.completions
    ] == logprobs  # the same bits
    few, _ = sample(policy, problems, replace(SAMPLING, tokens_in_flight=300))
    assert rows_of(few) == rows_of(groups)
    alone = [sample(policy, [problem])[0][0] for problem in problems]
    assert rows_of(alone) == rows_of(groups)


def test_a_stop_string_in_an_answer_ends_no_turn(policy):
    sampling = replace(SAMPLING, top_k=5, stop=("a", "b"))
    groups, answers = sample(policy, problems_of(policy, *TEXTS), sampling)
    check_scores(policy, groups)
    for turns in answers.turns.values():
        for turn in turns:
            text = policy.tokenizer.decode(turn)
            assert turn[-1] in policy.eos_ids or "a" in text or "b" in text


def test_masks_of_a_conversation_by_hand():
    """Prompt 5 6; the model says 7 8, a tool 9 9 9, the model 4. Only 7 8 4 are scored, counted and
    trained."""
    mask = (True, True, False, False, False, True)
    logprobs = (-1.0, -2.0, 0.0, 0.0, 0.0, -3.0)
    turns = Completion((7, 8, 9, 9, 9, 4), "", True, logprobs, loss_mask=mask)
    plain = Completion((7, 4), "", True, (-1.0, -1.0))
    group = Group(Problem(0, "", (5, 6)), (turns, plain))
    batch = collate([group], torch.tensor([[1.0, -1.0]]), pad_id=0)
    assert batch.completion_mask_BT.tolist() == [list(mask), [True, True] + [False] * 4]
    assert completion_lengths(batch.completion_mask_BT).tolist() == [6, 2]
    assert batch.lengths_B.tolist() == [8, 4]
    assert turns.sampled_ids == (7, 8, 4)
    assert loss_denominator(batch.loss_mask_BT, aggregation="token_mean") == 5

    # reinforce: -A * logprob; a mean over the 3 sampled tokens, whatever stands at those of the
    # tool
    logprobs_BT = torch.tensor(
        [
            [-1.0, -2.0, 99.0, 99.0, 99.0, -3.0],
            [-1.0, -1.0, 0.0, 0.0, 0.0, 0.0],
        ]
    ).requires_grad_()
    loss, _ = policy_loss(
        logprobs_BT,
        logprobs_BT.detach(),
        batch.advantages_B,
        batch.loss_mask_BT,
        objective="reinforce",
        aggregation="response_mean",
        beta=0.0,
    )
    assert loss.item() == pytest.approx(2.0 - 1.0)
    loss.backward()
    third = -1 / 3
    assert logprobs_BT.grad[0].tolist() == pytest.approx([third, third, 0, 0, 0, third])
    assert (logprobs_BT.grad[~batch.completion_mask_BT] == 0).all()
