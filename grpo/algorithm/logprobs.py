"""Log-probabilities of completion tokens by shifted cross-entropy, without all the logits in memory at once.

Shapes: ``B`` rows, ``T`` completion tokens, ``S`` prompt + completion tokens, ``V`` vocabulary, ``H`` hidden size, ``N`` completion
tokens of all rows one after the other, ``n`` tokens of one chunk, ``K`` token ids that the sampler allowed at all positions together.
"""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn

from grpo.algorithm.batch import IGNORE_INDEX, AllowedTokens
from grpo.attention import enable_packing, few_sizes, pack, packed_hidden
from grpo.attention.precision import ieee_fp32

LOGITS_PER_CHUNK, LOGITS_PER_CHUNK_ON_CUDA = 2**24, 2**27
"""Maximum number of logits in memory at once: 64 MiB in fp32, on a GPU 512 MiB, because it needs larger matrix products."""


def logprobs_from_logits(logits_BTV: torch.Tensor, labels_BT: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each label: ``-cross_entropy(logits / temperature, label)``.

    Args:
        logits_BTV: ``[B, T, V]`` (or any other leading shape); the logits at position ``t`` predict ``labels_BT[:, t]``.
        labels_BT: ``[B, T]`` at each position the *next* token of the sequence, or ``-100`` where nothing is scored.
        temperature: the sampling temperature, above 0, so that the result is the probability with which the token was sampled.

    Returns:
        ``[B, T]`` in fp32 (float64 for float64 logits), in nats; 0.0 at ``-100``.
    """
    if logits_BTV.shape[:-1] != labels_BT.shape:
        raise ValueError(f"logits {tuple(logits_BTV.shape)} do not fit labels {tuple(labels_BT.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0")
    logits_NV = _divide_by_temperature(logits_BTV.flatten(0, -2), temperature)
    losses_N = F.cross_entropy(logits_NV, labels_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return -losses_N.view(labels_BT.shape)


class CompletionScorer(nn.Module):
    """A causal language model whose ``forward`` returns the log-probabilities of completions.

    It is a module, without parameters of its own, so that DistributedDataParallel can wrap it and see the forward pass.
    """

    def __init__(self, model: nn.Module, temperature: float = 1.0):
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.packed = False
        """True if each prompt is computed once per group instead of once per completion; see :meth:`pack_groups`."""

    def pack_groups(self) -> str | None:
        """Compute each prompt once per group from now on. Returns None, or the reason why the model cannot; then nothing has changed."""
        reason = enable_packing(self.model, self.model.base_model if self.plain_head else None)
        self.packed = reason is None
        return reason

    @cached_property
    def plain_head(self) -> bool:
        """:func:`head_is_plain` of the model, computed at first use."""
        return head_is_plain(self.model)

    def forward(
        self,
        sequence_ids_BS: torch.Tensor,
        prompt_lengths_B: torch.Tensor,
        completion_mask_BT: torch.Tensor,
        group_B: torch.Tensor | None = None,
        allowed: AllowedTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score the completions of right-padded sequences.

        Args:
            sequence_ids_BS: ``[B, S]`` prompt, then completion, then padding of any value. No attention mask is needed: in a causal
                model, padding on the right has no influence on what stands left of it.
            prompt_lengths_B: ``[B]`` tokens of each prompt.
            completion_mask_BT: ``[B, T]`` True at the tokens of each completion.
            group_B: ``[B]`` group of each row, if ``packed``: rows of one group have the same prompt, which is computed once.
            allowed: the tokens that could be drawn at each position: the distributions are softmaxes over these. None: over all tokens.

        Returns:
            ``(logprobs_BT, entropies_BT)`` in fp32, in nats, 0.0 outside of the mask; entropies are without gradient.
        """
        T = completion_mask_BT.shape[1]
        # Token t of the completion of row b stands at position prompt_lengths_B[b] + t, and the position before that predicts it.
        positions_BT = prompt_lengths_B[:, None] + torch.arange(T, device=sequence_ids_BS.device)[None, :]
        positions_BT = positions_BT.clamp(max=sequence_ids_BS.shape[1] - 1)
        labels_N = sequence_ids_BS.gather(1, positions_BT)[completion_mask_BT]
        rows_BT = torch.arange(len(sequence_ids_BS), device=sequence_ids_BS.device)[:, None].expand_as(positions_BT)
        before_N = rows_BT[completion_mask_BT] * sequence_ids_BS.shape[1] + positions_BT[completion_mask_BT] - 1
        if allowed is not None:
            # The counts outside of the mask are 0, so the ids are those of the positions inside, in their order.
            allowed = AllowedTokens(allowed.ids_K, allowed.counts[completion_mask_BT])
        if self.packed and group_B is not None:
            lengths_B = completion_mask_BT.sum(dim=1)
            packed = pack(sequence_ids_BS, prompt_lengths_B.tolist(), lengths_B.tolist(), group_B.tolist())
            hidden_NH = packed_hidden(self.model.base_model, packed)
            logprobs_N, entropies_N = self._score_hidden(hidden_NH, packed.before_M, labels_N, allowed)
        elif self.plain_head:
            hidden_BSH = self.model.base_model(input_ids=sequence_ids_BS, use_cache=False).last_hidden_state
            logprobs_N, entropies_N = self._score_hidden(hidden_BSH.flatten(0, 1), before_N, labels_N, allowed)
        else:
            logits_BSV = self.model(input_ids=sequence_ids_BS, use_cache=False).logits
            logits_NV = keep_only_(logits_BSV.flatten(0, 1)[before_N], allowed, self.temperature)
            logprobs_N, entropies_N = score_logits(logits_NV, labels_N, self.temperature)
        zeros_BT = logprobs_N.new_zeros(completion_mask_BT.shape)
        return tuple(zeros_BT.masked_scatter(completion_mask_BT, values_N) for values_N in (logprobs_N, entropies_N))

    def _score_hidden(
        self, hidden_MH: torch.Tensor, before_N: torch.Tensor, labels_N: torch.Tensor, allowed: AllowedTokens | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies from the last hidden states of ``M`` tokens, of which ``before_N`` predict the labels.

        In chunks of tokens where tokens x vocabulary is large. The number of tokens is rounded up to one of few sizes.
        """
        N = len(before_N)
        padding = 0, few_sizes(N) - N
        before_N, labels_N = F.pad(before_N, padding), F.pad(labels_N, padding)
        if allowed is not None:
            allowed = AllowedTokens(allowed.ids_K, F.pad(allowed.counts, padding))
        logprobs_N, entropies_N = self._score_tokens(hidden_MH[before_N], labels_N, allowed)
        return logprobs_N[:N], entropies_N[:N]

    def _score_tokens(
        self, hidden_NH: torch.Tensor, labels_N: torch.Tensor, allowed: AllowedTokens | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = self.model.get_output_embeddings()
        kind = hidden_NH.device.type
        n = -(-(LOGITS_PER_CHUNK_ON_CUDA if kind == "cuda" else LOGITS_PER_CHUNK) // head.weight.shape[0])
        if len(hidden_NH) <= n:
            logits_NV = keep_only_(head(hidden_NH), allowed, self.temperature)
            return _ScoreLogits.apply(logits_NV, labels_N, self.temperature)
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
        dtype = getattr(head, "computes_in", autocast)
        inputs = hidden_NH, head.weight, head.bias, labels_N
        return _ScoreHiddenInChunks.apply(*inputs, self.temperature, n, dtype, allowed)


def keep_only_(logits_NV: torch.Tensor, allowed: AllowedTokens | None, temperature: float) -> torch.Tensor:
    """Lower, in place, the logits of tokens that could not be drawn; ``None``: change nothing.

    They get the lowest of all logits minus 30 (at the temperature). Each has then less than e^-30 = 1e-13 of the probability of any token
    that could be drawn, and 150,000 of them together less than 2e-8, which fp32 rounds away. With minus infinity an entropy would be NaN;
    with -1e38 ``exp`` takes 20 times as long on CPU.
    """
    if allowed is None or len(logits_NV) == 0:
        return logits_NV
    left_out_NV = (allowed.counts > 0)[:, None].repeat(1, logits_NV.shape[1])
    position_K = torch.arange(len(allowed.counts), device=logits_NV.device)
    position_K = position_K.repeat_interleave(allowed.counts, output_size=len(allowed.ids_K))
    left_out_NV[position_K, allowed.ids_K] = False
    return logits_NV.masked_fill_(left_out_NV, logits_NV.detach().amin() - 30 * temperature)


def score_logits(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each label and entropy of each distribution, ``[N]`` each, fp32, in nats; entropies without gradient."""
    logprobs_N = logprobs_from_logits(logits_NV, labels_N, temperature)
    with torch.no_grad():
        probs_NV = F.softmax(logits_NV.detach().to(logprobs_N.dtype) / temperature, dim=-1)
        entropies_N = torch.special.entr(probs_NV).sum(dim=-1)
    return logprobs_N, entropies_N


class _ScoreLogits(torch.autograd.Function):
    """:func:`score_logits` for finite logits, which keeps no tensor of size ``[N, V]`` but the logits for the backward pass.

    Autograd would use a dozen such tensors, which at V = 4,104 takes a sixth of an update's time and most of its memory.
    """

    @staticmethod
    def forward(ctx, logits_NV, labels_N, temperature):
        with torch.autocast(logits_NV.device.type, enabled=False):
            logprobs_N, entropies_N, normalizers_N = _score(logits_NV, labels_N, temperature)
        ctx.save_for_backward(logits_NV, labels_N, normalizers_N)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx, grad_N, _):
        return _logits_gradient(*ctx.saved_tensors, grad_N, ctx.temperature), None, None


class _ScoreHiddenInChunks(torch.autograd.Function):
    """The head and :class:`_ScoreLogits`, ``n`` tokens at a time; the backward pass computes the logits a second time.

    All logits together can take tens of GiB at a vocabulary of 150,000. The head's weight is cast once per pass. The weight's gradient
    is added up in the weight's own dtype: autograd would add up hundreds of chunks in bf16.
    """

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, bias_V, labels_N, temperature, n, dtype, allowed=None):
        parts, labels = [], labels_N.split(n)
        ctx.allowed = [None] * len(labels) if allowed is None else allowed.split(n)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            weight, bias = weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)
            for hidden_nH, labels_n, allowed_n in zip(hidden_NH.to(dtype).split(n), labels, ctx.allowed, strict=True):
                logits_nV = keep_only_(F.linear(hidden_nH, weight, bias), allowed_n, temperature)
                parts.append(_score(logits_nV, labels_n, temperature))
        logprobs_N, entropies_N, normalizers_N = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, labels_N, normalizers_N)
        ctx.temperature, ctx.n, ctx.dtype = temperature, n, dtype
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_N, _):
        hidden_NH, weight_VH, bias_V, labels_N, normalizers_N = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        with torch.autocast(grad_N.device.type, enabled=False):
            weight, bias = weight_VH.to(ctx.dtype), None if bias_V is None else bias_V.to(ctx.dtype)
            for start, allowed_n in zip(range(0, len(hidden_NH), ctx.n), ctx.allowed, strict=True):
                chunk = slice(start, start + ctx.n)
                hidden_nH = hidden_NH[chunk].to(ctx.dtype)
                scored = (labels_N[chunk], normalizers_N[chunk], grad_N[chunk])
                logits_nV = keep_only_(F.linear(hidden_nH, weight, bias), allowed_n, ctx.temperature)
                grad_nV = _logits_gradient(logits_nV, *scored, ctx.temperature)
                grad_hidden_NH[chunk] = grad_nV @ weight
                if grad_weight_VH is not None:
                    grad_weight_VH += grad_nV.T @ hidden_nH
                if grad_bias_V is not None:
                    grad_bias_V += grad_nV.sum(dim=0)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None, None, None


def _score(logits_NV: torch.Tensor, labels_N: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropies and log-normalizers, ``[N]`` each, in fp32 or wider."""
    scaled_NV = _divide_by_temperature(logits_NV, temperature)
    normalizers_N = scaled_NV.logsumexp(dim=-1)
    logprobs_N = scaled_NV.gather(1, labels_N[:, None])[:, 0] - normalizers_N
    if scaled_NV is logits_NV:  # which the backward pass reads: no second tensor of this size besides the probabilities
        probs_NV = (scaled_NV - normalizers_N[:, None]).exp_()
        entropies_N = (normalizers_N - torch.linalg.vecdot(probs_NV, scaled_NV)).clamp(min=0)
    else:
        # From log-probs. A low temperature makes the scaled logits large, and the difference above would be lost in rounding.
        all_logprobs_NV = scaled_NV.sub_(normalizers_N[:, None])
        entropies_N = -torch.linalg.vecdot(all_logprobs_NV.exp(), all_logprobs_NV)
    return logprobs_N, entropies_N, normalizers_N


def _logits_gradient(logits_NV, labels_N, normalizers_N, grad_N, temperature: float) -> torch.Tensor:
    """Gradient of the logits ``[N, V]``, in their dtype: ``(one_hot(label) - softmax) / temperature``, times ``grad_N``."""
    grad_N = grad_N / temperature
    grad_NV = (_divide_by_temperature(logits_NV, temperature) - normalizers_N[:, None]).exp_().mul_(-grad_N[:, None])
    grad_NV.scatter_add_(1, labels_N[:, None], grad_N[:, None])
    return grad_NV.to(logits_NV.dtype)


def _divide_by_temperature(logits_NV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits divided by the temperature, in fp32 or wider."""
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return logits_NV if temperature == 1.0 else logits_NV / temperature


@torch.no_grad()
@ieee_fp32()
def head_is_plain(model: nn.Module) -> bool:
    """True if the model's logits are ``head(backbone(ids))`` and nothing else; tested with a forward pass of two tokens.

    False for models that scale or cap their logits (Gemma 2, Cohere, Granite) or have no separate backbone: their completions are scored
    from the logits that the whole model returns, all in memory at once.
    """
    inner, head = model.base_model, model.get_output_embeddings()
    if inner is model or not isinstance(head, nn.Linear):
        return False
    ids = torch.arange(2, device=head.weight.device)[None, :]
    was_training = model.training
    model.eval()
    logits = []
    # The hook replaces the head's output by numbers from -1000 to 1000: a cap at 30 would not change the small logits of a new model.
    hook = head.register_forward_hook(lambda module, inputs, output: logits.append(output) or _ramp_like(output))
    try:
        hidden = inner(input_ids=ids, use_cache=False).last_hidden_state
        returned = model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
        model.train(was_training)
    if not torch.equal(returned.float(), _ramp_like(logits[0]).float()):
        return False
    # They may be stored in bf16.
    weight, bias = (None if p is None else p.to(hidden.dtype) for p in (head.weight, head.bias))
    expected = F.linear(hidden, weight, bias).float()
    return torch.allclose(expected, logits[0].float(), rtol=1e-3, atol=1e-4)


def _ramp_like(logits: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1000.0, 1000.0, logits.shape[-1], dtype=logits.dtype, device=logits.device).expand_as(logits)
