"""The check at the start of a run: which fast ways of scoring and sampling give the same log-probs
as the model's forward pass.

N   completion tokens of all rows         B, R  rows
T   tokens of the longest completion      S     tokens of a row
V   vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo.algorithm.batch import Batch, Completion, Group, Problem, collate
from grpo.algorithm.logprobs import CompletionScorer, logprobs_from_logits
from grpo.attention import enable_packing, window_of
from grpo.attention.precision import is_close
from grpo.model import Policy, in_training_mode, turn_dropout_off
from grpo.rollout.llama_decoder import LLAMA_SHAPED, LlamaDecoder
from grpo.rollout.prefill import prefill

PROMPT_LENGTH = 7
"""Number of tokens of the check's longer prompt, unless an attention window needs more tokens."""
COMPLETION_LENGTH = 6
"""Number of tokens of the longer completions of the check. Others are shorter."""
FP32_BOUND = 1e-4
"""Bound for :func:`is_close` in fp32. It allows for sums that are added up in another order."""
ROUNDING_FACTOR = 8
"""The bound for the fast ways of a model with more rounding is this factor times its rounding, and
at most the bound for the slow ways. Fast ways of computing differ in every matrix product, and the
rounding is measured with one other way. In the model of `tests/rollout/test_sampling_check.py` they
differ by 3 times its rounding on a CPU with AVX-512, and by 5 times on one without."""


def check_model(
    policy: Policy,
    scorer: CompletionScorer,
    *,
    disable_dropout: bool = True,
    max_row_tokens: int = 0,
) -> str | None:
    """Compare log-probs of a few short rows, computed in all ways, and switch on the fast ways that
    are right.

    Before the check, scoring and sampling use slow ways, which are right for every model. The check
    sets ``scorer.has_plain_head``, ``scorer.is_packed`` and ``policy.is_llama``, and keeps the
    global random state. All ranks call this function together. If the model is sharded, they call
    it inside the forward pass of the root module.

    Args:
        disable_dropout: switch dropout and noise off, which packed rows and :class:`LlamaDecoder`
            need, and check that training mode then computes the same as evaluation mode.
        max_row_tokens: largest number of tokens of a row in the run. If a row may be longer than
            the window of the model's attention, a prompt of the check has the window's length.

    Returns:
        None if each prompt is scored once per group, else the reason why each prompt is scored once
        per completion.

    Raises:
        ValueError: if the model is still random in training mode, or if decode steps with the
            model's cache compute other logits than the model's forward pass.
    """
    window = window_of(policy.model.config)
    longest = PROMPT_LENGTH
    # A cache that drops tokens outside of the window is noticed only in rows beyond the window.
    if window and window[1] < max_row_tokens:
        longest = window[1]
    batch = _short_batch(policy, longest)
    why_padded = (
        "model.disable_dropout is false, which dropout needs, lora.dropout too (if there is none, "
        "true computes the same, and faster)"
    )
    with policy.precise_inference_mode() as bound:
        scorer.detect_plain_head(batch.sequence_ids_BS[:, :PROMPT_LENGTH])
        # These are computed before dropout is switched off. So the comparison notices if a number
        # that also counts in evaluation is set to 0.
        expected_N = _score(scorer, batch)
        # Rounding grows with the depth of a model and with its largest activations. In SmolLM2-135M
        # each row alone gives other log-probs than the rows together, by 1e-5 deviations in fp32. A
        # larger difference than `bound` is no rounding, but rows that change each other.
        alone_N = _score(scorer, batch, together=False)
        rounding = ((alone_N - expected_N).abs().max() / expected_N.std()).item()
        fast_bound = max(FP32_BOUND, ROUNDING_FACTOR * rounding)
        fast_bound = min(fast_bound, bound)
        if disable_dropout:
            turn_dropout_off(policy.model)
            for logprobs_N in in_training_mode(policy, lambda: _score(scorer, batch)):
                if not is_close(logprobs_N, expected_N, bound):
                    raise ValueError(
                        f"{type(policy.model).__name__} is random in training mode: "
                        "set model.disable_dropout=false"
                    )
            why_padded = _pack(policy, scorer, batch, expected_N, fast_bound)
        if why_padded is None:
            policy.is_llama = _is_llama(policy, scorer, batch, fast_bound)
            return None

        # Rollouts are going to sample in the slow way. _pack() would have checked the fast way.
        logprobs_N = _decode(policy, scorer, batch)
        if not is_close(logprobs_N, expected_N, bound):
            raise ValueError(
                f"{type(policy.model).__name__} cannot be sampled: decode steps with its cache "
                "give other logits than its forward pass: take another architecture"
            )
    return why_padded


def _short_batch(policy: Policy, longest: int) -> Batch:
    """Return a batch of a prompt of ``longest`` tokens and a prompt of one token, each with a
    completion of 2 tokens and a completion of 6 tokens."""
    # Tokens differ as far as the vocabulary allows: equal ones would hide a wrong mask. They begin
    # in the middle of the vocabulary, since tokens at its ends are often reserved, and no text has
    # trained them. A model may answer such tokens with huge activations, and rounding grows with
    # them: in a trained SmolLM2-135M to 2e-3 deviations, where ordinary tokens have 1e-5.
    vocabulary = len(policy.model.get_input_embeddings().weight)
    first = vocabulary // 2
    ids = tuple(n % vocabulary for n in range(first, first + longest + 8))
    short = Completion(ids[-8:-6], "", True)
    long = Completion(ids[-COMPLETION_LENGTH:], "", True)
    problems = [Problem(0, "", ids[:length]) for length in (longest, 1)]
    groups = [Group(problem, (short, long)) for problem in problems]
    return collate(
        groups,
        torch.zeros(2, 2),
        pad_id=policy.pad_id,
        device=policy.device,
    )


def _score(scorer: CompletionScorer, batch: Batch, together: bool = True) -> Tensor:
    """Log-probs ``[N]`` of all completions, row after row, computed in one batch if possible."""
    parts = [batch]
    if not (together and scorer.has_plain_head):
        # Without a plain head, all logits of a part are in memory at once, and a prompt may have a
        # window's length.
        parts = [batch.select(slice(b, b + 1)) for b in range(len(batch))]
    scored = []
    for part in parts:
        # `forward` and not a call of the module: a sharded scorer is inside its call already.
        logprobs_BT, _ = scorer.forward(*part.scorer_inputs)
        scored.append(logprobs_BT[part.completion_mask_BT])
    return torch.cat(scored)


def _decode(
    policy: Policy,
    scorer: CompletionScorer,
    batch: Batch,
    llama_decoder: LlamaDecoder | None = None,
    shift: int = 0,
) -> Tensor:
    """Log-probs ``[N]`` of all completions, computed by decode steps as in a rollout.

    After two tokens the shorter completion of each prompt is dropped. With ``shift``, no completion
    is dropped, and the positions of all completion tokens are ``shift`` higher than normal.
    """
    prompts = [
        tuple(ids_S[:length].tolist())
        for ids_S, length in zip(batch.sequence_ids_BS, batch.prompt_lengths_B, strict=True)
    ]
    offsets_T = torch.arange(COMPLETION_LENGTH, device=policy.device)
    labels_BT = batch.sequence_ids_BS.gather(1, batch.prompt_lengths_B[:, None] + offsets_T)

    # The scorer's log-probs are in fp32, too, even if PyTorch's default dtype is another.
    logprobs_BT = torch.zeros_like(labels_BT, dtype=torch.float32)
    rows = torch.arange(len(prompts), device=policy.device)
    decoder, logits_RV = prefill(policy, llama_decoder, prompts, COMPLETION_LENGTH)
    if shift:
        decoder.offset_R += shift
    for t in range(COMPLETION_LENGTH):
        labels_R = labels_BT[rows, t]
        logprobs_R = logprobs_from_logits(logits_RV, labels_R, scorer.temperature)
        logprobs_BT[rows, t] = logprobs_R.float()
        # The short completions end here. With shift they stay, because keep_rows() would compute
        # the positions anew, without the shift.
        if t == 1 and not shift:
            rows = rows[1::2]
            decoder.keep_rows(rows)
        logits_RV = decoder.step(labels_BT[rows, t])
    return logprobs_BT[batch.completion_mask_BT]


def _pack(
    policy: Policy,
    scorer: CompletionScorer,
    batch: Batch,
    expected_N: Tensor,
    bound: float,
) -> str | None:
    """Switch model and scorer to packed rows and forked caches, if scoring and decoding with these
    both give the log-probs ``expected_N``.

    Returns None if they were switched. Otherwise returns the reason, and restores the settings.
    """
    if not scorer.has_plain_head:
        return "its head does more than a product with the last hidden state"
    reason = enable_packing(policy.model)
    if reason:
        return reason
    scorer.is_packed = True
    reason = "its layers mix the tokens of a row in other ways than attention"
    try:
        if is_close(_score(scorer, batch), expected_N, bound):
            logprobs_N = _decode(policy, scorer, batch)
            if is_close(logprobs_N, expected_N, bound):
                return None
    except Exception as error:  # the model's code is not ours, and may not accept these arguments
        reason = str(error) or reason
    # The settings are restored also after an exception in the middle of a forward pass.
    scorer.is_packed = False
    policy.model.set_attn_implementation("sdpa")
    return reason


def _is_llama(policy: Policy, scorer: CompletionScorer, batch: Batch, bound: float) -> bool:
    """True if decode steps of :class:`LlamaDecoder` give the same log-probs as the model's
    modules."""
    if type(policy.backbone).__name__ not in LLAMA_SHAPED:
        return False
    # Compared at the end of the context, because some models scale queries beyond some position.
    context_length = policy.context_length or 2**20
    shift = context_length - PROMPT_LENGTH - COMPLETION_LENGTH
    expected_N = _decode(policy, scorer, batch, shift=shift)
    logprobs_N = _decode(policy, scorer, batch, LlamaDecoder(policy.backbone), shift)
    return is_close(logprobs_N, expected_N, bound)
