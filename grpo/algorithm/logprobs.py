"""Log-probabilities of completion tokens, without all the logits in memory at once.

    B   rows                              V   vocabulary
    T   completion tokens of a row        H   size of a hidden state
    S   prompt and completion tokens      M   tokens of a packed sequence, prompts among them
    N   completion tokens of all rows     n   completion tokens of one chunk

All of this file computes four formulas, from the logits z_v of a token over the vocabulary, divided
by the sampling temperature:

    normalizer         log Z = log sum_v exp(z_v)
    log-probability    lp = z_label - log Z
    entropy            h = - sum_v p_v log p_v = log Z - sum_v p_v z_v,      p_v = exp(z_v - log Z)
    gradient           d lp / d z_v = [v = label] - p_v
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo.algorithm.batch import IGNORE_INDEX, completion_lengths, completion_mask
from grpo.attention import pack, packed_hidden, round_up_to_bucket

LOGITS_PER_CHUNK = 2**24
LOGITS_PER_CHUNK_ON_CUDA = 2**27
"""Number of logits in memory at once: 64 MiB in fp32. On a GPU 512 MiB, because smaller matrix
products would not keep it busy."""


def logprobs_from_logits(logits_BTV: Tensor, labels_BT: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each label, by PyTorch's cross-entropy.

        lp = log softmax(logits / temperature)_label = - cross_entropy(logits / temperature, label)

    Args:
        logits_BTV: ``[B, T, V]`` (or another leading shape). The logits at position ``t`` predict
            ``labels_BT[:, t]``.
        labels_BT: ``[B, T]`` at each position the *next* token of the sequence, or ``-100`` where
            nothing is scored.
        temperature: the sampling temperature, above 0: the result is the probability with which the
            token was drawn. Without it, the policy that is trained is not the one that sampled.

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
        # Off, every model is scored right. grpo.rollout.check_model switches both on for models of
        # which the log-probs stay the same.
        self.has_plain_head = False
        """True if the logits are the head's product with the last hidden state, and nothing else.

        The head is then computed in chunks."""
        self.is_packed = False
        """True if each prompt is computed once per group instead of once per completion."""

    def detect_plain_head(self, ids_BS: Tensor) -> None:
        """Set ``has_plain_head`` by a forward pass over the token ids ``[B, S]``.

        It stays False for models that scale or cap their logits (Gemma 2, Cohere, Granite), that
        have no separate backbone, or whose head computes another product than ``nn.Linear``.
        """
        backbone = self.model.base_model
        head = self.model.get_output_embeddings()
        if backbone is self.model or not isinstance(head, nn.Linear):
            return
        hidden_BSH = backbone(input_ids=ids_BS, use_cache=False).last_hidden_state
        outputs = []

        def replace_output(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
            outputs.append(output)
            # From -1000 to 1000: a cap at 30 would not change small logits.
            ramp_V = torch.linspace(-1000.0, 1000.0, output.shape[-1])
            ramp_BSV = ramp_V.to(output).expand_as(output)
            outputs.append(ramp_BSV)
            return ramp_BSV

        hook = head.register_forward_hook(replace_output)
        try:
            logits_BSV = self.model(input_ids=ids_BS, use_cache=False).logits
        finally:
            hook.remove()
        output_BSV, ramp_BSV = outputs

        # Before the head: is its output the product of its weight and the last hidden state? The
        # weight is cast, because it may be stored in bf16.
        weight_VH, bias_V = _cast_head(hidden_BSH.dtype, head.weight, head.bias)
        expected_BSV = F.linear(hidden_BSH, weight_VH, bias_V).float()
        is_product = torch.allclose(expected_BSV, output_BSV.float(), rtol=1e-3, atol=1e-4)
        # Behind the head: does the model return its output as it is?
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
            sequence_ids_BS: ``[B, S]`` prompt, then completion, then padding of any value.
            prompt_lengths_B: ``[B]`` tokens of each prompt.
            completion_mask_BT: ``[B, T]`` True at the tokens of each completion that are scored. A
                completion ends with the last of them. Tokens of tools may lie between them.
            group_B: ``[B]`` group of each row, if ``packed``. Rows of one group have the same
                prompt.

        Returns:
            ``(logprobs_BT, entropies_BT)`` in fp32, in nats, 0.0 outside of the mask. Entropies are
            without gradient.
        """
        # Token t of a completion stands at prompt_length + t, and is predicted by the logits of the
        # position before it: by the last token of the prompt, for t = 0. Positions are those of the
        # flat batch, [B * S].
        B, S = sequence_ids_BS.shape
        T = completion_mask_BT.shape[1]
        device = sequence_ids_BS.device
        starts_B = S * torch.arange(B, device=device) + prompt_lengths_B
        positions_BT = starts_B[:, None] + torch.arange(T, device=device)
        positions_N = positions_BT[completion_mask_BT]
        labels_N = sequence_ids_BS.flatten()[positions_N]
        predictor_N = positions_N - 1

        # Only these N positions meet the head, whose logits are most of the memory: neither prompts
        # nor padding. No attention mask is needed: in a causal model, what follows a token has no
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
            hidden_MH = packed_hidden(backbone, packed)
            # `packed.predictor_M` has all tokens of the completions, those of tools among them.
            in_completion_BT = completion_mask(completion_mask_BT, lengths_B)
            is_scored_M = completion_mask_BT[in_completion_BT]
            predictor_N = packed.predictor_M[is_scored_M]
            scored = self._score_hidden(hidden_MH, predictor_N, labels_N)
        elif self.has_plain_head:
            hidden_BSH = backbone(input_ids=sequence_ids_BS, use_cache=False).last_hidden_state
            hidden_MH = hidden_BSH.flatten(0, 1)
            scored = self._score_hidden(hidden_MH, predictor_N, labels_N)
        else:
            logits_BSV = self.model(input_ids=sequence_ids_BS, use_cache=False).logits
            logits_NV = logits_BSV.flatten(0, 1)[predictor_N]
            scored = score_logits(logits_NV, labels_N, self.temperature)

        logprobs_N, entropies_N = scored
        zeros_BT = logprobs_N.new_zeros(B, T)
        logprobs_BT = zeros_BT.masked_scatter(completion_mask_BT, logprobs_N)
        entropies_BT = zeros_BT.masked_scatter(completion_mask_BT, entropies_N)
        return logprobs_BT, entropies_BT

    def _score_hidden(
        self,
        hidden_MH: Tensor,
        predictor_N: Tensor,
        labels_N: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies ``[N]`` of labels, from the hidden states that predict them.

        ``predictor_N`` are indices into ``hidden_MH``.
        """
        # Padded to one of few sizes, because each micro-batch has another number of tokens, and the
        # CPU's kernels keep memory for each shape.
        N = len(predictor_N)
        padding = (0, round_up_to_bucket(N) - N)
        hidden_NH = hidden_MH[F.pad(predictor_N, padding)]
        labels_N = F.pad(labels_N, padding)

        # Rounded up, so that a chunk has 32 MiB or more also in bf16. From there on, glibc maps
        # memory and gives it back, and smaller blocks would leave holes in the heap.
        head = self.model.get_output_embeddings()
        device_type = hidden_NH.device.type
        num_logits = LOGITS_PER_CHUNK_ON_CUDA if device_type == "cuda" else LOGITS_PER_CHUNK
        n = -(-num_logits // len(head.weight))
        if len(hidden_NH) <= n:
            logits_NV = head(hidden_NH)
            scored = _ScoreLogits.apply(logits_NV, labels_N, self.temperature)
        else:
            dtype = head.weight.dtype
            if torch.is_autocast_enabled(device_type):
                dtype = torch.get_autocast_dtype(device_type)
            scored = _ScoreHiddenInChunks.apply(
                hidden_NH,
                head.weight,
                head.bias,
                labels_N,
                self.temperature,
                n,
                dtype,
            )
        logprobs_N, entropies_N = scored
        return logprobs_N[:N], entropies_N[:N]


def score_logits(
    logits_NV: Tensor,
    labels_N: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each distribution, ``[N]`` each, fp32, in nats.

    Entropies are without gradient.
    """
    # By PyTorch's own functions, which are right for any logits. Where one of them is -inf, entr(0)
    # is 0, while p * z in _score would be NaN.
    logprobs_N = logprobs_from_logits(logits_NV, labels_N, temperature)
    with torch.no_grad():
        scaled_NV = logits_NV.detach().to(logprobs_N.dtype) / temperature
        probs_NV = F.softmax(scaled_NV, dim=-1)
        entropies_N = torch.special.entr(probs_NV).sum(dim=-1)
    return logprobs_N, entropies_N


class _ScoreLogits(torch.autograd.Function):
    """:func:`score_logits` for finite logits, with a backward pass written by hand."""

    # Autograd would keep a dozen tensors [N, V] for softmax, log-softmax and entropy: at V = 4,104
    # a sixth of an update's time, and most of its memory. As p_v = exp(z_v - log Z), the logits and
    # one number per token are enough.

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

    @staticmethod
    def backward(ctx, grad_N, _):
        grad_NV = _logits_gradient(*ctx.saved_tensors, grad_N, ctx.temperature)
        return grad_NV, None, None


class _ScoreHiddenInChunks(torch.autograd.Function):
    """The head and :class:`_ScoreLogits`, ``n`` tokens at a time.

        logits = hidden W^T + bias
        d / d hidden = g W,      d / d W = g^T hidden,      d / d bias = sum_tokens g

    g is the gradient of the logits. ``dtype`` is that of the products.
    """

    # All logits together can take tens of GiB at a vocabulary of 150,000. So no pass keeps them:
    # the backward pass computes those of a chunk again, at the price of a fourth matrix product.
    #
    # Autograd with checkpointing would do the same, but would cast the head's weight in each chunk,
    # and add up the chunks' gradients of it in bf16, which loses small ones. Here they are added up
    # in the weight's own dtype.

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
            head = _cast_head(dtype, weight_VH, bias_V)
            for start in range(0, len(hidden_NH), n):
                chunk = slice(start, start + n)
                hidden_nH = hidden_NH[chunk].to(dtype)
                logits_nV = F.linear(hidden_nH, *head)
                scored.append(_score(logits_nV, labels_N[chunk], temperature))
        outputs = zip(*scored, strict=True)
        logprobs_N, entropies_N, normalizers_N = map(torch.cat, outputs)
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
    def backward(ctx, grad_N, _):
        hidden_NH, weight_VH, bias_V, labels_N, normalizers_N = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        # Under LoRA the head is frozen, and its gradient would be as large as the head.
        grad_weight_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        with torch.autocast(grad_N.device.type, enabled=False):
            head = _cast_head(ctx.dtype, weight_VH, bias_V)
            for start in range(0, len(hidden_NH), ctx.n):
                chunk = slice(start, start + ctx.n)
                hidden_nH = hidden_NH[chunk].to(ctx.dtype)
                logits_nV = F.linear(hidden_nH, *head)
                grad_nV = _logits_gradient(
                    logits_nV,
                    labels_N[chunk],
                    normalizers_N[chunk],
                    grad_N[chunk],
                    ctx.temperature,
                )
                grad_hidden_NH[chunk] = grad_nV @ head[0]
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
        h = log Z - sum_v p_v z_v = - sum_v p_v log p_v

    The logits z are divided by the temperature.
    """
    scaled_NV = _divide_by_temperature(logits_NV, temperature)
    normalizers_N = scaled_NV.logsumexp(dim=-1)
    label_logits_N1 = scaled_NV.gather(1, labels_N[:, None])
    logprobs_N = label_logits_N1[:, 0] - normalizers_N

    if scaled_NV is logits_NV:
        # The backward pass reads these logits, so they stay as they are. The first form of h needs
        # only the probabilities beside them. Rounding must not make it negative.
        probs_NV = (scaled_NV - normalizers_N[:, None]).exp_()
        mean_logits_N = torch.linalg.vecdot(probs_NV, scaled_NV)
        entropies_N = (normalizers_N - mean_logits_N).clamp(min=0)
    else:
        # The scaled logits are a copy, and may be overwritten. A low temperature makes them large,
        # and the difference above would be lost in rounding: hence the second form.
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

        grad_v = ([v = label] - p_v) / temperature * grad,      p_v = exp(z_v - log Z)

    ``normalizers_N`` are log Z, ``grad_N`` is grad.
    """
    # In place, in the tensor of p: first - p_v * grad for all v, then + grad at the label. Another
    # tensor [N, V] would raise the peak of memory.
    grad_N = grad_N / temperature
    scaled_NV = _divide_by_temperature(logits_NV, temperature)
    logprobs_NV = scaled_NV - normalizers_N[:, None]
    grad_NV = logprobs_NV.exp_().mul_(-grad_N[:, None])
    grad_NV.scatter_add_(1, labels_N[:, None], grad_N[:, None])
    return grad_NV.to(logits_NV.dtype)


def _divide_by_temperature(logits_NV: Tensor, temperature: float) -> Tensor:
    """Return z, the logits over the temperature, in fp32 or wider."""
    # bf16 has 8 significant bits: log-probs between -4 and -8 would be multiples of 1/32, and the
    # ratios exp(lp - old) wrong by up to 3%, at bounds of 20%.
    dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    logits_NV = logits_NV.to(dtype)
    # The same tensor at temperature 1, without a copy of the largest tensor of a pass.
    if temperature == 1.0:
        return logits_NV
    return logits_NV / temperature
