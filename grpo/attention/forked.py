"""A KV cache in which all completions of a prompt share the prompt's keys and values.

A decode step spends its time on reading keys and values. Those of a prompt are in memory once, and
the queries of all its completions are multiplied with them in one product. The keys and values of
the completions' own tokens are in a second buffer, where the last tokens of all rows stand at the
same index; rows that joined later start at a later one. All have the dtype of the attention
products, so that autocast does not cast them at every token.

Shapes: ``U`` prompts, ``P`` longest prompt, ``R`` rows (completions) being decoded, ``J`` most rows
of one prompt, ``C`` own tokens so far, ``H`` query heads, ``K`` key heads, ``D`` head size,
``g = H/K``, ``j = J * g``; ``N`` queries and ``S`` keys of each of ``b = B * K`` sequences, where
``B`` are prompts or rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class ForkedCache:
    """Keys and values of prompts, and of one more token per row and decode step.

    Order of calls: one forward pass over the prompts (:meth:`store_prompts` in every layer),
    :meth:`fork`, then for every token :meth:`begin_token` and, in every layer, :meth:`attend`.
    Between tokens rows may leave (:meth:`keep_rows`, :meth:`split`) and join (:meth:`add_rows`).
    :meth:`begin_tokens` begins several tokens at once.
    """

    completion_bias: Tensor | None
    """Additive mask ``[R, 1, 1, C]`` of the indices before each row's first token."""
    mask_R1NS: Tensor | None
    """True where a token may attend, while several are computed at once."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        capacity: int,
        device: torch.device | str = "cpu",
    ):
        self.prompt_ids = list(prompts)
        """Token ids, by which :meth:`add_rows` finds the prompts that both caches have."""
        self.capacity = capacity
        """Most own tokens of a row."""
        self.length = 0
        """Buffer indices in use, with that of the token that is being computed."""
        lengths = [len(prompt) for prompt in prompts]
        self.prompt_lengths_U = torch.tensor(lengths, device=device)
        self.prompts: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of the prompts, ``[U, K, P, D]``, by layer."""
        self.completion_kv: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of the own tokens, ``[R, K, capacity, D]``, by layer.

        From index ``length`` on nothing has been written: filling that would take longer than most
        of what happens when rows leave and join.
        """
        self.dtype = torch.float32
        """Dtype of keys, values and their products."""
        self.use_cpu_kernel = torch.device(device).type == "cpu"

    def store_prompts(
        self,
        layer: int,
        k_UKPD: Tensor,
        v_UKPD: Tensor,
    ) -> None:
        """Store the keys and values of the prompts, padded on the right."""
        self.dtype = product_dtype(v_UKPD)
        self.prompts[layer] = (
            k_UKPD.to(self.dtype).contiguous(),
            v_UKPD.to(self.dtype).contiguous(),
        )

    def fork(self, prompt_R: Tensor) -> None:
        """Let row r continue prompt ``prompt_R[r]``."""
        self.prompt_R = prompt_R
        """The prompt of each row."""
        self.start_R = torch.zeros_like(prompt_R)
        """Index of each row's first own token in the buffers."""

        def buffer(prompts_UKPD: Tensor) -> Tensor:
            _, K, _, D = prompts_UKPD.shape
            return prompts_UKPD.new_empty(
                len(prompt_R),
                K,
                self.capacity,
                D,
            )

        self.completion_kv = dict(self.prompts)
        _replace(self.completion_kv, buffer)
        self._update_layout()

    @property
    def is_full(self) -> bool:
        """True if the next token has no place until :meth:`keep_rows` drops the oldest rows."""
        return self.length == self.capacity

    def keep_rows(self, rows: Tensor) -> None:
        """Keep these rows alone, their prompts, and the buffer indices that any of them uses."""
        start_R = self.start_R[rows]
        first = int(start_R.min())
        end = self.length
        self.start_R = start_R - first
        self.length = end - first
        _replace(self.completion_kv, lambda buffer: select_rows(buffer, rows, first, end))

        prompt_R = self.prompt_R[rows]
        kept_U, self.prompt_R = prompt_R.unique(return_inverse=True)
        if len(kept_U) < len(self.prompt_ids):
            self.prompt_ids = [self.prompt_ids[u] for u in kept_U.tolist()]
            self.prompt_lengths_U = self.prompt_lengths_U[kept_U]
            _replace(self.prompts, lambda x: x[kept_U])
        self._update_layout()

    def split(self, rows: Tensor) -> ForkedCache:
        """A copy of the cache with these rows only."""
        part = copy.copy(self)
        part.completion_kv = dict(self.completion_kv)
        part.prompts = dict(self.prompts)
        part.keep_rows(rows)
        return part

    def add_rows(self, other: ForkedCache) -> None:
        """Append the rows of another cache. A prompt that both have is in memory once."""
        new = [u for u, ids in enumerate(other.prompt_ids) if ids not in self.prompt_ids]
        self.prompt_ids = self.prompt_ids + [other.prompt_ids[u] for u in new]
        new_lengths = other.prompt_lengths_U[new]
        self.prompt_lengths_U = torch.cat([self.prompt_lengths_U, new_lengths])
        P = int(self.prompt_lengths_U.max())

        index_U = [self.prompt_ids.index(ids) for ids in other.prompt_ids]
        index_U = self.prompt_R.new_tensor(index_U)
        self.prompt_R = torch.cat([self.prompt_R, index_U[other.prompt_R]])

        # The last tokens of all rows come to stand at the same index.
        length = max(self.length, other.length)
        shift = length - self.length
        other_shift = length - other.length
        starts = [self.start_R + shift, other.start_R + other_shift]
        self.start_R = torch.cat(starts)

        def joined_prompts(ours: Tensor, theirs: Tensor) -> Tensor:
            ours = _with_length(ours, P)
            theirs = _with_length(theirs[new], P)
            return torch.cat([ours, theirs])

        def joined_completion_kv(ours: Tensor, theirs: Tensor) -> Tensor:
            R = len(ours)
            num_rows = R + len(theirs)
            joined = ours.new_empty(num_rows, *ours.shape[1:])
            # A masked value is multiplied by 0, which gives NaN where memory holds NaN.
            joined[:R, :, :shift] = 0
            joined[R:, :, :other_shift] = 0
            joined[:R, :, shift:length] = ours[:, :, : self.length]
            joined[R:, :, other_shift:length] = theirs[:, :, : other.length]
            return joined

        _replace(self.prompts, joined_prompts, other.prompts)
        _replace(self.completion_kv, joined_completion_kv, other.completion_kv)
        self.length = length
        self._update_layout()

    def begin_token(self) -> Tensor:
        """Advance to the next token of every row: once per decode step, before the first layer.

        Returns the positions ``[R]`` of the tokens.
        """
        self.length += 1
        self.mask_R1NS = None
        self.completion_bias = None
        if self.starts_differ:
            index_C = torch.arange(self.length, device=self.start_R.device)
            is_before_RC = index_C < self.start_R[:, None]
            self.completion_bias = additive_mask(is_before_RC, self.dtype)
        return self.offset_R + (self.length - 1)

    def begin_tokens(self, new_R: Tensor) -> Tensor:
        """Advance by ``new_R[r]`` tokens of row r, which come together, padded on the left.

        Returns the positions ``[R, N]`` of the tokens.
        """
        # The tokens of each row move, so that the new ones of all rows end at the same index.
        end_R = self.length - self.start_R + new_R
        end = int(end_R.max())
        shift_R = end - new_R - self.length
        index_C = torch.arange(end, device=new_R.device)
        source_RC = index_C - shift_R[:, None]
        source_RC = source_RC.clamp(0, self.capacity - 1)
        source_R1C1 = source_RC[:, None, :, None]
        for buffers in self.completion_kv.values():
            for buffer in buffers:
                used = buffer[:, :, :end]
                if self.length:
                    source_RKCD = source_R1C1.expand_as(used)
                    used.copy_(buffer.gather(2, source_RKCD))
                else:
                    used.zero_()
        self.start_R = self.start_R + shift_R
        self.length = end
        self._update_layout()

        N = int(new_R.max())
        index_N = index_C[-N:]
        index_R1N1 = index_N[:, None].expand(len(new_R), 1, N, 1)
        first_new_R = end - new_R
        self.is_new_R1N1 = index_R1N1 >= first_new_R[:, None, None, None]
        """True at the new tokens, False at their padding."""
        is_own_R11C = index_C >= self.start_R[:, None, None, None]
        is_own_R1NC = is_own_R11C & (index_C <= index_R1N1)
        is_prompt_R11P = self.is_prompt_UP[self.prompt_R][:, None, None]
        is_prompt_R1NP = is_prompt_R11P.expand(-1, 1, N, -1)
        self.mask_R1NS = torch.cat([is_prompt_R1NP, is_own_R1NC], dim=-1)
        positions_RN = self.offset_R[:, None] + index_N
        return positions_RN.clamp(min=0)

    def attend(
        self,
        layer: int,
        q_RHND: Tensor,
        k_RKND: Tensor,
        v_RKND: Tensor,
        scaling: float | None,
    ) -> Tensor:
        """Store new tokens, which attend to their prompt and own tokens; ``[R, N, H, D]``."""
        q_RHND = q_RHND.to(self.dtype)
        k_RKND = k_RKND.to(self.dtype)
        v_RKND = v_RKND.to(self.dtype)
        if scaling is None:
            scaling = q_RHND.shape[-1] ** -0.5
        with torch.autocast(q_RHND.device.type, enabled=False):
            if self.mask_R1NS is not None:
                return self._attend_several(layer, q_RHND, k_RKND, v_RKND, scaling)
            self._store_token(layer, k_RKND, v_RKND)
            return self._attend_one(layer, q_RHND, scaling)

    def _attend_one(
        self,
        layer: int,
        q_RH1D: Tensor,
        scaling: float,
    ) -> Tensor:
        keys, values = self.completion_kv[layer]
        R, H, _, D = q_RH1D.shape
        K = keys.shape[1]
        kernel = _cpu_attention if self.use_cpu_kernel else _plain_attention
        q_RKgD = q_RH1D.reshape(R, K, H // K, D)
        prompt_out_UKjD, prompt_log_z_UKj = kernel(
            self._rows_to_prompts(q_RKgD),
            *self.prompts[layer],
            self.prompt_bias,
            scaling,
        )
        completion_out_RKgD, completion_log_z_RKg = kernel(
            q_RKgD,
            keys[:, :, : self.length],
            values[:, :, : self.length],
            self.completion_bias,
            scaling,
        )
        out_RKgD = _merged(
            completion_out_RKgD,
            completion_log_z_RKg,
            self._prompts_to_rows(prompt_out_UKjD),
            self._prompts_to_rows(prompt_log_z_UKj),
        )
        return out_RKgD.reshape(R, 1, H, D)

    def _store_token(
        self,
        layer: int,
        k_RK1D: Tensor,
        v_RK1D: Tensor,
    ) -> None:
        """Write a token's keys and values to the buffers."""
        keys, values = self.completion_kv[layer]
        keys[:, :, self.length - 1] = k_RK1D[:, :, 0]
        values[:, :, self.length - 1] = v_RK1D[:, :, 0]

    def _attend_several(
        self,
        layer: int,
        q_RHND: Tensor,
        k_RKND: Tensor,
        v_RKND: Tensor,
        scaling: float,
    ) -> Tensor:
        _, H, N, _ = q_RHND.shape
        keys_and_values = []
        for x_RKND, prompts_UKPD, buffer in zip(
            (k_RKND, v_RKND),
            self.prompts[layer],
            self.completion_kv[layer],
            strict=True,
        ):
            own = buffer[:, :, : self.length]
            last = own[:, :, -N:]
            last.copy_(torch.where(self.is_new_R1N1, x_RKND, last))
            of_prompt = prompts_UKPD[self.prompt_R]
            x_RKSD = torch.cat([of_prompt, own], dim=2)
            # CUDA has no fused kernel for a mask and fewer key heads than query heads.
            keys_and_values.append(repeat_heads(x_RKSD, H))
        out_RHND = F.scaled_dot_product_attention(
            q_RHND,
            *keys_and_values,
            attn_mask=self.mask_R1NS,
            scale=scaling,
        )
        return out_RHND.transpose(1, 2)

    def _update_layout(self) -> None:
        """Compute what changes with rows alone: positions, masks and the ``[U, J]`` grid.

        Row r is in cell ``cell_R[r]`` of the grid, in which attention to prompts is computed. None:
        in cell r.
        """
        device = self.prompt_R.device
        U = len(self.prompt_ids)
        # The number of earlier rows of the same prompt. They need not be neighbours.
        is_same_RR = self.prompt_R[:, None] == self.prompt_R
        is_earlier_RR = is_same_RR.tril(-1)
        number_R = is_earlier_RR.sum(dim=1)
        J = int(number_R.max()) + 1
        self.grid = (U, J)
        self.cell_R = self.prompt_R * J + number_R
        all_cells = torch.arange(U * J, device=device)
        if torch.equal(self.cell_R, all_cells):
            self.cell_R = None

        k_UKPD, _ = next(iter(self.prompts.values()))
        index_P = torch.arange(k_UKPD.shape[2], device=device)
        self.is_prompt_UP = index_P < self.prompt_lengths_U[:, None]
        self.prompt_bias = None
        """Additive mask ``[U, 1, 1, P]`` of the prompts' padding."""
        if not bool(self.is_prompt_UP.all()):
            self.prompt_bias = additive_mask(~self.is_prompt_UP, self.dtype)

        # Read from the device here, where rows change, and not at every token.
        self.starts_differ = bool(self.start_R.any())
        self.offset_R = self.prompt_lengths_U[self.prompt_R] - self.start_R
        """Position of the token at buffer index 0."""

    def _rows_to_prompts(self, x_RKgD: Tensor) -> Tensor:
        """``[R, K, g, D]`` to ``[U, K, J * g, D]``; zeros where a prompt has fewer than J rows."""
        U, J = self.grid
        if self.cell_R is not None:
            # The filled grid, of which row r is not at index r.
            grid = x_RKgD.new_zeros(U * J, *x_RKgD.shape[1:])
            x_RKgD = grid.index_copy_(0, self.cell_R, x_RKgD)
        x_UJKgD = x_RKgD.unflatten(0, (U, J))
        return x_UJKgD.transpose(1, 2).flatten(2, 3)

    def _prompts_to_rows(self, x_UKj: Tensor) -> Tensor:
        """The inverse of :meth:`_rows_to_prompts`, with or without the last dimension."""
        _, J = self.grid
        x_UKJg = x_UKj.unflatten(2, (J, -1))
        x_RKg = x_UKJg.transpose(1, 2).flatten(0, 1)
        return x_RKg if self.cell_R is None else x_RKg[self.cell_R]


def _merged(
    completion_out_RKgD: Tensor,
    completion_log_z_RKg: Tensor,
    prompt_out_RKgD: Tensor,
    prompt_log_z_RKg: Tensor,
) -> Tensor:
    """Attention to own tokens and to the prompt joined, ``[R, K, g, D]``.

    ``log_z`` is the log of the sum of ``e^score``. With weights ``e^s / Z``,
    ``out = (Z_prompt out_prompt + Z_own out_own) / (Z_prompt + Z_own)``.
    """
    dtype = completion_log_z_RKg.dtype
    log_ratio_RKg = prompt_log_z_RKg - completion_log_z_RKg
    prompt_share_RKg = torch.sigmoid(log_ratio_RKg)
    out_RKgD = torch.lerp(
        completion_out_RKgD.to(dtype),
        prompt_out_RKgD.to(dtype),
        prompt_share_RKg[..., None],
    )
    return out_RKgD.to(completion_out_RKgD.dtype)


def _cpu_attention(
    q_BKND: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask: Tensor | None,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, K, N, D]`` and ``log_z`` ``[B, K, N]`` of N queries over S keys, on the CPU.

    ``mask`` ``[B, 1, 1, S]`` is added to the scores.
    """
    if mask is not None:
        N = q_BKND.shape[2]
        mask = mask.expand(-1, -1, N, -1)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BKND,
        k_BKSD,
        v_BKSD,
        attn_mask=mask,
        scale=scaling,
    )


def _plain_attention(
    q_BKND: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask: Tensor | None,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Output and ``log_z`` as by :func:`_cpu_attention`, by matrix products, on CUDA.

    Scores are in fp32 for half precision, as in fused kernels: bf16 would round 64 by 0.25.
    """
    q_bND = q_BKND.flatten(0, 1)
    k_bDS = k_BKSD.flatten(0, 1).transpose(1, 2)
    if q_bND.dtype in (torch.bfloat16, torch.float16):
        scores_bNS = torch.bmm(q_bND, k_bDS, out_dtype=torch.float32)
    else:
        scores_bNS = q_bND @ k_bDS
    scores = scores_bNS.unflatten(0, q_BKND.shape[:2])
    scores = scores * scaling if mask is None else torch.add(mask, scores, alpha=scaling)
    weights_BKNS = scores.softmax(dim=-1)

    # The largest weight is e^(largest score - log_z).
    largest_weight_BKN = weights_BKNS.amax(dim=-1)
    largest_score_BKN = scores.amax(dim=-1)
    log_z_BKN = largest_score_BKN - largest_weight_BKN.log()
    weights_BKNS = weights_BKNS.to(v_BKSD.dtype)
    return weights_BKNS @ v_BKSD, log_z_BKN


def additive_mask(is_masked_RN: Tensor, dtype: torch.dtype) -> Tensor:
    """``[R, 1, 1, N]`` -inf where ``is_masked_RN`` is True, else 0."""
    mask_RN = torch.zeros_like(is_masked_RN, dtype=dtype)
    return mask_RN.masked_fill_(is_masked_RN, -torch.inf)[:, None, None]


def select_rows(buffer: Tensor, rows: Tensor, first: int, end: int) -> Tensor:
    """Rows of a buffer ``[R, K, capacity, D]``, their tokens ``first`` to ``end`` at the front."""
    chosen = buffer.new_empty(len(rows), *buffer.shape[1:])
    chosen[:, :, : end - first] = buffer[rows, :, first:end]
    return chosen


def _with_length(x_UKPD: Tensor, P: int) -> Tensor:
    """Keys or values of prompts, cut or padded on the right to P tokens."""
    padding = P - x_UKPD.shape[2]
    return F.pad(x_UKPD, (0, 0, 0, padding))


def _replace(layers: dict, function: Callable[..., Tensor], *others: dict) -> None:
    """Replace keys and values by a function of them and of those of other caches."""
    for layer in layers:
        keys_and_values = [layers[layer]]
        for other in others:
            keys_and_values.append(other[layer])
        layers[layer] = tuple(map(function, *keys_and_values))


def repeat_heads(x_RKSD: Tensor, H: int) -> Tensor:
    """Keys or values ``[R, H, S, D]``, each head repeated for its query heads."""
    K = x_RKSD.shape[1]
    if H == K:
        return x_RKSD
    return x_RKSD.repeat_interleave(H // K, dim=1)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which attention multiplies ``x``: autocast's on a GPU; at least fp32 on CPU.

    On CPU, decode steps in fp32 take 0.6 of the time of bf16, for which oneDNN also makes a kernel
    for each shape.
    """
    kind = x.device.type
    if kind == "cpu":
        return torch.promote_types(x.dtype, torch.float32)
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype
