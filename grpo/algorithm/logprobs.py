"""Log-probabilities of completion tokens, and entropies of the distributions they are drawn from.

    B   rows                              V   vocabulary
    T   tokens of the longest completion  H   size of a hidden state
    S   tokens of prompt and completion   L   positions that the backbone computes
    N   scored tokens of all rows         M   all completion tokens: scored ones and those of tools
    P   N rounded up, with padding        n   tokens of one chunk

The tokens that the model sampled are scored. In functions outside of ``CompletionScorer``, N are
all tokens that the function gets. If the head of a model is a plain matrix product, many tokens are
scored in chunks, without all their logits in memory at once.

Let z_v be the logit of vocabulary entry v at the position that predicts the token, divided by the
sampling temperature. This file computes:

    normalizer         log Z = log sum_v exp(z_v)
    log-probability    lp = z_label - log Z
    entropy            h = - sum_v p_v log p_v = log Z - sum_v p_v z_v,      p_v = exp(z_v - log Z)
    gradient           d lp / d z_v = [v = label] - p_v
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo.algorithm.batch import IGNORE_INDEX, completion_lengths, completion_mask
from grpo.attention import pack, packed_hidden, round_up_to_bucket

LOGITS_PER_CHUNK = 2**24
LOGITS_PER_CHUNK_ON_CUDA = 2**27
"""Number of logits of a chunk: 64 MiB in fp32. On a GPU 512 MiB, because smaller matrix products
would not keep the GPU busy."""


def logprobs_from_logits(logits_BTV: Tensor, labels_BT: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each label, by PyTorch's cross-entropy.

        lp = log softmax(logits / temperature)_label = - cross_entropy(logits / temperature, label)

    Args:
        logits_BTV: ``[B, T, V]`` (or another leading shape). The logits at position ``t`` predict
            ``labels_BT[:, t]``.
        labels_BT: ``[B, T]`` at each position the *next* token of the sequence, or ``-100`` where
            nothing is scored.
        temperature: the sampling temperature, above 0. The result is then the log-probability with
            which the token was drawn. With another temperature, the policy that is trained would
            not be the one that sampled.

    Returns:
        ``[B, T]`` in fp32 (float64 for float64 logits), in nats; 0.0 at ``-100``.

    Raises:
        ValueError: if the shapes disagree, or the temperature is not above 0.
    """
    if logits_BTV.shape[:-1] != labels_BT.shape:
        raise ValueError(
            f"logits {tuple(logits_BTV.shape)} do not fit labels {tuple(labels_BT.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0")
    logits_NV = _divide_by_temperature(logits_BTV.flatten(0, -2), temperature)
    losses_N = F.cross_entropy(
        logits_NV,
        labels_BT.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    return -losses_N.view(labels_BT.shape)


class CompletionScorer(nn.Module):
    """A causal language model whose ``forward`` returns the log-probabilities of completions.

    This is a module, so that DistributedDataParallel can wrap it and see the forward pass.
    """

    def __init__(self, model: nn.Module, temperature: float = 1.0):
        super().__init__()
        self.model = model
        self.temperature = temperature
        # With has_plain_head and is_packed False, every model is scored right. At the start of a
        # run, grpo.rollout.check_model calls detect_plain_head, and sets is_packed if that does not
        # change the log-probs.
        self.has_plain_head = False
        """True if the logits are the head's product with the last hidden state, and nothing else.

        Then the head is applied outside of the model, to the scored tokens only, in chunks."""
        self.is_packed = False
        """True if each prompt is computed once per group instead of once per completion.

        This needs a plain head, because a packed pass computes the backbone alone. ``check_model``
        sets ``is_packed`` only if ``has_plain_head`` is True."""

    def detect_plain_head(self, ids_BS: Tensor) -> None:
        """Set ``has_plain_head`` by two forward passes over the token ids ``[B, S]``.

        Call it without gradient, and in evaluation mode, since dropout would differ between the
        passes. Call it in fp32, for which the tolerance is set; ``check_model`` does so, except
        for a bf16 model whose attention has no fp32.

        The first pass computes the backbone alone. The second pass computes the model, where a hook
        reads the head's output and replaces it with a ramp of known numbers. The head is plain if
        both hold:

        - Its output is the product of its weight and the backbone's hidden states.
        - The model returns the ramp as it is.

        ``has_plain_head`` stays False for models that scale or cap their logits (Gemma 2, Cohere,
        Granite), that have no separate backbone, or whose head computes another product than
        ``nn.Linear``.
        """
        # In transformers, `base_model` is the backbone: the model without its head. Without a
        # separate backbone, `base_model` is the model itself.
        backbone = self.model.base_model
        head = self.model.get_output_embeddings()
        if backbone is self.model or not isinstance(head, nn.Linear):
            return
        hidden_BSH = backbone(input_ids=ids_BS, use_cache=False).last_hidden_state
        head_outputs = []
        ramps = []

        def replace_output(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
            head_outputs.append(output)
            # Large numbers, so that a soft cap at 30 shows.
            ramp_V = torch.linspace(-1000.0, 1000.0, output.shape[-1])
            ramp_BSV = ramp_V.to(output).expand_as(output)
            ramps.append(ramp_BSV)
            return ramp_BSV

        hook = head.register_forward_hook(replace_output)
        try:
            logits_BSV = self.model(input_ids=ids_BS, use_cache=False).logits
        finally:
            hook.remove()
        # The forward pass has called the head exactly once.
        (output_BSV,) = head_outputs
        (ramp_BSV,) = ramps

        # The weight is cast, because a frozen one may be stored in bf16 and be cast by its layer.
        # The tolerance lies far above what rounding in fp32 changes, and far below a scale such as
        # Cohere's 1/16.
        weight_VH, bias_V = _cast_head(hidden_BSH.dtype, head.weight, head.bias)
        expected_BSV = F.linear(hidden_BSH, weight_VH, bias_V).float()
        is_product = torch.allclose(expected_BSV, output_BSV.float(), rtol=1e-3, atol=1e-4)
        is_returned = torch.equal(logits_BSV.float(), ramp_BSV.float())
        self.has_plain_head = is_product and is_returned

    def forward(
        self,
        sequence_ids_BS: Tensor,
        prompt_lengths_B: Tensor,
        completion_mask_BT: Tensor,
        group_B: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Score the completions of right-padded sequences.

        Args:
            sequence_ids_BS: ``[B, S]`` prompt, then completion, then padding with any token id.
            prompt_lengths_B: ``[B]`` tokens of each prompt.
            completion_mask_BT: ``[B, T]`` True at the tokens of each completion that are scored. A
                completion ends with the last of them. Tokens of tools may lie between them.
            group_B: ``[B]`` group of each row, used if ``is_packed``. Rows of one group have the
                same prompt. Default: each prompt is computed once per completion.

        Returns:
            ``(logprobs_BT, entropies_BT)`` in fp32, in nats, 0.0 outside of the mask. Entropies are
            without gradient.
        """
        # Token t of a completion stands at prompt_length + t in its row. Positions are those of the
        # flat batch, [B * S]. Behind a short completion they run on into the next row, or past the
        # last: the mask drops these positions.
        B, S = sequence_ids_BS.shape
        T = completion_mask_BT.shape[1]
        device = sequence_ids_BS.device
        starts_B = S * torch.arange(B, device=device) + prompt_lengths_B
        positions_BT = starts_B[:, None] + torch.arange(T, device=device)
        positions_N = positions_BT[completion_mask_BT]
        labels_N = sequence_ids_BS.flatten()[positions_N]

        # A token is predicted by the position before it: the first of a completion by the last of
        # its prompt. No attention mask is needed: in a causal model, what follows a token has no
        # influence on it.
        backbone = self.model.base_model
        if self.is_packed and group_B is not None:
            lengths_B = completion_lengths(completion_mask_BT)
            packed = pack(
                sequence_ids_BS,
                prompt_lengths_B.tolist(),
                lengths_B.tolist(),
                group_B.tolist(),
            )
            hidden_LH = packed_hidden(backbone, packed)
            # predictor_M has one entry for every completion token, those of tools included, in the
            # order of the batch. is_scored_M selects the scored ones. The function completion_mask
            # returns the mask of all these tokens, and reads of positions_BT the shape alone; the
            # argument completion_mask_BT is the mask of the scored ones.
            is_completion_BT = completion_mask(positions_BT, lengths_B)
            is_scored_M = completion_mask_BT[is_completion_BT]
            predictor_N = packed.predictor_M[is_scored_M]
            scored = self._score_hidden(hidden_LH, predictor_N, labels_N)
        elif self.has_plain_head:
            # The head is applied to the N predictors alone, neither to prompts nor to padding,
            # because its logits are most of the memory.
            hidden_BSH = backbone(input_ids=sequence_ids_BS, use_cache=False).last_hidden_state
            hidden_LH = hidden_BSH.flatten(0, 1)
            scored = self._score_hidden(hidden_LH, positions_N - 1, labels_N)
        else:
            # The model applies its head by itself, to all positions.
            logits_BSV = self.model(input_ids=sequence_ids_BS, use_cache=False).logits
            logits_LV = logits_BSV.flatten(0, 1)
            scored = score_logits(logits_LV[positions_N - 1], labels_N, self.temperature)

        logprobs_N, entropies_N = scored
        zeros_BT = logprobs_N.new_zeros(B, T)
        logprobs_BT = zeros_BT.masked_scatter(completion_mask_BT, logprobs_N)
        entropies_BT = zeros_BT.masked_scatter(completion_mask_BT, entropies_N)
        return logprobs_BT, entropies_BT

    def _score_hidden(
        self,
        hidden_LH: Tensor,
        predictor_N: Tensor,
        labels_N: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies ``[N]`` of labels, from the hidden states that predict them.

        ``predictor_N`` are indices into ``hidden_LH``.
        """
        # Padded to one of few sizes, because each micro-batch has another number of tokens, and
        # oneDNN, PyTorch's library of CPU kernels, keeps memory for each shape. The padding scores
        # label 0 at position 0, and the last line drops these scores.
        N = len(predictor_N)
        padding = (0, round_up_to_bucket(N) - N)
        hidden_PH = hidden_LH[F.pad(predictor_N, padding)]
        labels_P = F.pad(labels_N, padding)

        head = self.model.get_output_embeddings()
        device_type = hidden_PH.device.type
        num_logits = LOGITS_PER_CHUNK_ON_CUDA if device_type == "cuda" else LOGITS_PER_CHUNK
        vocabulary_size = len(head.weight)
        # On a CPU, glibc returns blocks of at least 32 MiB to the system one by one. Smaller blocks
        # would leave holes in its heap. LOGITS_PER_CHUNK logits in bf16 have exactly 32 MiB, so n
        # is rounded up.
        n = math.ceil(num_logits / vocabulary_size)
        if len(hidden_PH) <= n:
            # All logits fit into one chunk. They are kept for the backward pass, which therefore
            # need not compute them again.
            logits_PV = head(hidden_PH)
            scored = _ScoreLogits.apply(logits_PV, labels_P, self.temperature)
        else:
            # Chunks are computed without autocast, in the dtype that autocast would choose.
            dtype = head.weight.dtype
            if torch.is_autocast_enabled(device_type):
                dtype = torch.get_autocast_dtype(device_type)
            scored = _ScoreHiddenInChunks.apply(
                hidden_PH,
                head.weight,
                head.bias,
                labels_P,
                self.temperature,
                n,
                dtype,
            )
        logprobs_P, entropies_P = scored
        return logprobs_P[:N], entropies_P[:N]


def score_logits(
    logits_NV: Tensor,
    labels_N: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each distribution, ``[N]`` each, fp32, in nats.

    Entropies are without gradient.
    """
    # By PyTorch's own functions, which are right for any logits. A logit of -inf has p = 0 and
    # entr(0) = 0, while p * z in _score would be NaN.
    logprobs_N = logprobs_from_logits(logits_NV, labels_N, temperature)
    with torch.no_grad():
        scaled_NV = logits_NV.detach().to(logprobs_N.dtype) / temperature
        probs_NV = F.softmax(scaled_NV, dim=-1)
        entropies_N = torch.special.entr(probs_NV).sum(dim=-1)
    return logprobs_N, entropies_N


class _ScoreLogits(torch.autograd.Function):
    """:func:`score_logits` for finite logits and labels without -100; backward pass by hand."""

    # Forward and backward together take half of autograd's time (2,000 tokens, V = 4,104, on a
    # CPU). As p_v = exp(z_v - log Z), the backward pass needs the logits in their own dtype and one
    # number per token, where autograd would keep log-softmax in fp32.

    @staticmethod
    def forward(ctx, logits_NV, labels_N, temperature):
        # Autocast would compute the entropy's product in bf16.
        with torch.autocast(logits_NV.device.type, enabled=False):
            scored = _score(logits_NV, labels_N, temperature)
        logprobs_N, entropies_N, normalizers_N = scored
        ctx.save_for_backward(logits_NV, labels_N, normalizers_N)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    # Log Z was saved as a constant, so a second derivative would be wrong: once_differentiable
    # makes PyTorch refuse it.
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs_N, _):
        logits_NV, labels_N, normalizers_N = ctx.saved_tensors
        grad_NV = _logits_gradient(
            logits_NV,
            labels_N,
            normalizers_N,
            grad_logprobs_N,
            ctx.temperature,
        )
        return grad_NV, None, None


class _ScoreHiddenInChunks(torch.autograd.Function):
    """The head and :class:`_ScoreLogits`, in chunks of ``n`` tokens.

        logits            = hidden W^T + bias
        d loss / d hidden = g W
        d loss / d W      = g^T hidden
        d loss / d bias   = sum_tokens g

    W is the weight of the head, and g = d loss / d logits. The three matrix products are computed
    in ``dtype``.
    """

    # All logits together can take tens of GiB at a vocabulary of 150,000. So no pass keeps them:
    # the backward pass computes the logits of a chunk again, which is a fourth matrix product.
    #
    # Autograd with checkpointing would compute the same, but under autocast would add up the
    # chunks' gradients of W in bf16, which loses small ones. Here they are added up in W's dtype.

    @staticmethod
    def forward(
        ctx,
        hidden_NH,
        weight_VH,
        bias_V,
        labels_N,
        temperature,
        n,
        dtype,
    ):
        ctx.temperature = temperature
        ctx.n = n
        ctx.dtype = dtype

        scored = []
        with torch.autocast(hidden_NH.device.type, enabled=False):
            cast_weight_VH, cast_bias_V = _cast_head(dtype, weight_VH, bias_V)
            for start in range(0, len(hidden_NH), n):
                chunk = slice(start, start + n)
                hidden_nH = hidden_NH[chunk].to(dtype)
                logits_nV = F.linear(hidden_nH, cast_weight_VH, cast_bias_V)
                scored.append(_score(logits_nV, labels_N[chunk], temperature))
        logprobs, entropies, normalizers = zip(*scored, strict=True)
        logprobs_N = torch.cat(logprobs)
        entropies_N = torch.cat(entropies)
        normalizers_N = torch.cat(normalizers)
        ctx.save_for_backward(
            hidden_NH,
            weight_VH,
            bias_V,
            labels_N,
            normalizers_N,
        )
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs_N, _):
        hidden_NH, weight_VH, bias_V, labels_N, normalizers_N = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        # Under LoRA the head is frozen, and the gradient of its weight would be as large as the
        # weight. The gradient of the bias is small, and is always computed.
        _, needs_grad_weight, *_ = ctx.needs_input_grad
        grad_weight_VH = torch.zeros_like(weight_VH) if needs_grad_weight else None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        with torch.autocast(grad_logprobs_N.device.type, enabled=False):
            cast_weight_VH, cast_bias_V = _cast_head(ctx.dtype, weight_VH, bias_V)
            for start in range(0, len(hidden_NH), ctx.n):
                chunk = slice(start, start + ctx.n)
                hidden_nH = hidden_NH[chunk].to(ctx.dtype)
                logits_nV = F.linear(hidden_nH, cast_weight_VH, cast_bias_V)
                grad_nV = _logits_gradient(
                    logits_nV,
                    labels_N[chunk],
                    normalizers_N[chunk],
                    grad_logprobs_N[chunk],
                    ctx.temperature,
                )
                grad_hidden_NH[chunk] = grad_nV @ cast_weight_VH
                if grad_weight_VH is not None:
                    grad_weight_VH += grad_nV.T @ hidden_nH
                if grad_bias_V is not None:
                    grad_bias_V += grad_nV.sum(dim=0)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None, None


def _cast_head(
    dtype: torch.dtype,
    weight_VH: Tensor,
    bias_V: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the head's weight and bias in this dtype."""
    if bias_V is not None:
        bias_V = bias_V.to(dtype)
    return weight_VH.to(dtype), bias_V


def _score(
    logits_NV: Tensor,
    labels_N: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs lp, entropies h and normalizers log Z, ``[N]`` each, in fp32 or wider.

        log Z = log sum_v exp(z_v)
        lp = z_label - log Z
        h = log Z - sum_v p_v z_v              from the logits
          = - sum_v p_v log p_v                from the log-probs

    z are the logits divided by the temperature. The two forms of h differ in rounding alone.
    """
    scaled_NV = _divide_by_temperature(logits_NV, temperature)
    normalizers_N = scaled_NV.logsumexp(dim=-1)
    label_logits_N1 = scaled_NV.gather(1, labels_N[:, None])
    logprobs_N = label_logits_N1[:, 0] - normalizers_N

    # Tensors [N, V] take most of the memory here. Each branch makes only one more.
    # The test is for identity: did _divide_by_temperature return the logits, or a copy of them?
    if scaled_NV is logits_NV:
        # Temperature 1 in fp32: the logits were not copied. They must not be overwritten, since the
        # backward pass of _ScoreLogits reads them. h from the log-probs would need two new tensors,
        # log p and p: so h comes from the logits. Where h is near 0, rounding can make the
        # difference negative: hence the clamp.
        probs_NV = (scaled_NV - normalizers_N[:, None]).exp_()
        mean_logits_N = torch.linalg.vecdot(probs_NV, scaled_NV)
        entropies_N = (normalizers_N - mean_logits_N).clamp(min=0)
    else:
        # A copy, which may be overwritten with the log-probs. At a low temperature z and log Z are
        # large, and their difference would lose h in rounding: so h comes from the log-probs.
        all_logprobs_NV = scaled_NV.sub_(normalizers_N[:, None])
        entropies_N = -torch.linalg.vecdot(all_logprobs_NV.exp(), all_logprobs_NV)
    return logprobs_N, entropies_N, normalizers_N


def _logits_gradient(
    logits_NV: Tensor,
    labels_N: Tensor,
    normalizers_N: Tensor,
    grad_N: Tensor,
    temperature: float,
) -> Tensor:
    """Gradient ``[N, V]`` of the logits, in their dtype, from the gradient of the log-probs.

        grad_v = ([v = label] - p_v) * grad / temperature,      p_v = exp(z_v - log Z)

    ``normalizers_N`` are log Z, ``grad_N`` is grad.
    """
    scaled_grad_N = grad_N / temperature
    scaled_NV = _divide_by_temperature(logits_NV, temperature)
    # All in one tensor, because another tensor [N, V] would raise the peak of memory: p, then
    # - p * grad for all v, then + grad at the label.
    grad_NV = (scaled_NV - normalizers_N[:, None]).exp_()
    grad_NV.mul_(-scaled_grad_N[:, None])
    grad_NV.scatter_add_(1, labels_N[:, None], scaled_grad_N[:, None])
    return grad_NV.to(logits_NV.dtype)


def _divide_by_temperature(logits_NV: Tensor, temperature: float) -> Tensor:
    """Return z, the logits over the temperature, in fp32 or wider.

    At temperature 1, logits in fp32 or wider are returned as they are, not as a copy: a caller must
    not overwrite the result then.
    """
    # bf16 has 8 significant bits: log-probs between -4 and -8 would be multiples of 1/32, and the
    # ratios exp(lp - old) wrong by up to 3%, which is much beside clip bounds of 20%. The rounding
    # of the logits themselves remains.
    dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    logits_NV = logits_NV.to(dtype)
    if temperature == 1.0:
        return logits_NV
    return logits_NV / temperature
