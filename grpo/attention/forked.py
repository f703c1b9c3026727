"""A KV cache in which all completions of a prompt share the prompt's keys and values.

A decode step spends its time on reading keys and values. Here those of a prompt are in memory once,
and the queries of all its completions are multiplied with them in one matrix product. Attention to
the prompt and attention to the completion are computed apart and merged afterwards, as in Hydragen
(Juravsky et al. 2024, arXiv:2402.05099). For one query ``q`` over keys ``k_s`` and values ``v_s``::

    score_s = scaling * (q . k_s) + mask_s
    Z       = sum_s e^score_s                          log_z is its logarithm
    out     = sum_s (e^score_s / Z) v_s

    out of both parts = (Z_prompt * out_prompt + Z_completion * out_completion)
                        / (Z_prompt + Z_completion)

The keys and values of the completions' tokens are in buffers. The last tokens of all rows stand at
the same index, so that the next tokens of all rows are written by one operation. A row that joined
later starts at a later index, its ``start``. Here is a buffer of ``capacity`` 6 and ``length`` 4::

    index    0   1   2   3   4   5
    row 0    a0  a1  a2  a3  -   -       start 0
    row 1    -   -   b0  b1  -   -       start 2

U   prompts                               H   query heads
P   tokens of the longest prompt          K   key heads, which are also those of the values
R   rows: completions being decoded       g   query heads of each key head, H / K
J   most rows of one prompt               j   queries of one key head and all rows, J * g
C   indices of the buffers in use         D   size of a head
N   queries                               S   keys, of prompt and completion
B   sequences, prompts or rows            b   sequences and key heads, B * K
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

KeysAndValues = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of each layer, by the layer's number."""


class ForkedCache:
    """Keys and values of prompts, and of the tokens of the rows that continue them.

    Order of calls: one forward pass over the prompts (:meth:`store_prompts` in every layer),
    :meth:`fork`, then for every token :meth:`begin_token` and, in every layer, :meth:`attend`.
    Between tokens rows may leave (:meth:`keep_rows`), join (:meth:`add_rows`), or be copied
    (:meth:`copy_rows`).
    :meth:`begin_tokens` begins several tokens at once.
    """

    completion_bias: Tensor | None
    """Additive mask ``[R, 1, 1, C]`` of the indices before each row's start. None: all start at
    0."""
    mask_R1NS: Tensor | None
    """True where a token may attend, while several are computed at once; None: one token is."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        capacity: int,
        device: torch.device | str = "cpu",
    ):
        self.prompt_ids = list(prompts)
        """Token ids of the prompts, by which :meth:`add_rows` finds those that both caches have."""
        self.capacity = capacity
        """Size of the buffers: at least the most tokens of a completion."""
        self.length = 0
        """Indices of the buffers in use, with that of the token that is being computed."""
        lengths = [len(prompt) for prompt in prompts]
        self.prompt_lengths_U = torch.tensor(lengths, device=device)
        self.prompt_kv: KeysAndValues = {}
        """Of the prompts, ``[U, K, P, D]``, padded on the right."""
        self.completion_kv: KeysAndValues = {}
        """Buffers of the completions' tokens, ``[R, K, capacity, D]``.

        From index ``length`` on nothing has been written: filling the rest would take longer than
        most of what happens when rows leave and join.
        """
        self.dtype = torch.float32
        """Dtype in which keys and values are stored and multiplied: no cast at every token."""
        self.use_cpu_kernel = torch.device(device).type == "cpu"

    def store_prompts(
        self,
        layer: int,
        k_UKPD: Tensor,
        v_UKPD: Tensor,
    ) -> None:
        """Store the keys and values of the prompts, padded on the right."""
        self.dtype = product_dtype(v_UKPD)
        k_UKPD = k_UKPD.to(self.dtype).contiguous()
        v_UKPD = v_UKPD.to(self.dtype).contiguous()
        self.prompt_kv[layer] = (k_UKPD, v_UKPD)

    def fork(self, prompt_R: Tensor) -> None:
        """Begin a completion of prompt ``prompt_R[r]`` in each row r."""
        self.prompt_R = prompt_R
        """The prompt of each row."""
        self.start_R = torch.zeros_like(prompt_R)
        """Index of each row's first token in the buffers."""

        def empty_buffer(prompts_UKPD: Tensor) -> Tensor:
            _, K, _, D = prompts_UKPD.shape
            return prompts_UKPD.new_empty(
                len(prompt_R),
                K,
                self.capacity,
                D,
            )

        self.completion_kv = dict(self.prompt_kv)
        _replace(self.completion_kv, empty_buffer)
        self._update_layout()

    @property
    def is_full(self) -> bool:
        """True if the next token has no place until :meth:`keep_rows` drops the oldest rows."""
        return self.length == self.capacity

    def keep_rows(self, rows: Sequence[int] | Tensor) -> None:
        """Drop all other rows, the prompts that no row continues, and the unused indices."""
        rows = torch.as_tensor(rows, device=self.start_R.device)
        # Indices before the first start are unused, and the tokens move to the left.
        start_R = self.start_R[rows]
        first = int(start_R.min())
        end = self.length
        self.start_R = start_R - first
        self.length = end - first

        def select(buffer: Tensor) -> Tensor:
            selected = buffer.new_empty(len(rows), *buffer.shape[1:])
            selected[:, :, : self.length] = buffer[rows, :, first:end]
            return selected

        _replace(self.completion_kv, select)

        # In most calls every prompt still has a row, and no keys and values of prompts are copied.
        prompt_R = self.prompt_R[rows]
        used_U, self.prompt_R = prompt_R.unique(return_inverse=True)
        if len(used_U) < len(self.prompt_ids):
            self.prompt_ids = [self.prompt_ids[u] for u in used_U.tolist()]
            self.prompt_lengths_U = self.prompt_lengths_U[used_U]
            _replace(self.prompt_kv, lambda x_UKPD: x_UKPD[used_U])
        self._update_layout()

    def copy_rows(self, rows: Sequence[int]) -> ForkedCache:
        """Return a copy of the cache with these rows only."""
        part = copy.copy(self)
        # keep_rows() replaces the values of these dictionaries, which are not to change here.
        part.completion_kv = dict(self.completion_kv)
        part.prompt_kv = dict(self.prompt_kv)
        part.keep_rows(rows)
        return part

    def add_rows(self, other: ForkedCache) -> None:
        """Append the rows of another cache. A prompt that both have is in memory once."""
        new = [u for u, ids in enumerate(other.prompt_ids) if ids not in self.prompt_ids]
        # A new list, since copies of the cache by copy_rows() may hold this one.
        self.prompt_ids = self.prompt_ids + [other.prompt_ids[u] for u in new]
        new_lengths = other.prompt_lengths_U[new]
        self.prompt_lengths_U = torch.cat([self.prompt_lengths_U, new_lengths])
        P = int(self.prompt_lengths_U.max())

        # Prompt u of the other cache is prompt number_U[u] of this one.
        numbers = [self.prompt_ids.index(ids) for ids in other.prompt_ids]
        number_U = self.prompt_R.new_tensor(numbers)
        other_prompt_R = number_U[other.prompt_R]
        self.prompt_R = torch.cat([self.prompt_R, other_prompt_R])

        # The tokens of the shorter cache move to the right, so that the last tokens of all rows
        # stand at the same index.
        length = max(self.length, other.length)
        shift = length - self.length
        other_shift = length - other.length
        starts = [self.start_R + shift, other.start_R + other_shift]
        self.start_R = torch.cat(starts)

        def joined_prompts(x_UKPD: Tensor, other_UKPD: Tensor) -> Tensor:
            x_UKPD = _with_length(x_UKPD, P)
            new_UKPD = _with_length(other_UKPD[new], P)
            return torch.cat([x_UKPD, new_UKPD])

        def joined_buffers(buffer: Tensor, other_buffer: Tensor) -> Tensor:
            R = len(buffer)
            num_rows = R + len(other_buffer)
            joined = buffer.new_empty(num_rows, *buffer.shape[1:])
            # Values before a row's start are masked, so multiplied by 0. But new memory may hold
            # NaN, and 0 * NaN is NaN.
            joined[:R, :, :shift] = 0
            joined[R:, :, :other_shift] = 0
            joined[:R, :, shift:length] = buffer[:, :, : self.length]
            joined[R:, :, other_shift:length] = other_buffer[:, :, : other.length]
            return joined

        _replace(self.prompt_kv, joined_prompts, other.prompt_kv)
        _replace(self.completion_kv, joined_buffers, other.completion_kv)
        self.length = length
        self._update_layout()

    def begin_token(self) -> Tensor:
        """Advance to the next token of every row: once per decode step, before the first layer.

        Returns the positions ``[R]`` of the tokens.
        """
        self.length += 1
        # The last token of every row may attend to all of the buffer up to itself, except for the
        # indices before its row's start.
        self.mask_R1NS = None
        self.completion_bias = None
        if self.starts_differ:
            index_C = torch.arange(self.length, device=self.start_R.device)
            is_before_R11C = index_C < self.start_R[:, None, None, None]
            self.completion_bias = additive_mask(is_before_R11C, self.dtype)
        return self.offset_R + (self.length - 1)

    def begin_tokens(self, num_new_R: Tensor) -> Tensor:
        """Advance by several tokens, ``num_new_R[r]`` of row r, which come padded on the left.

        Returns the positions ``[R, N]`` of the tokens, where N is the largest of ``num_new_R``.
        """
        # All rows are to end at the same index again, so the earlier tokens of each row move:
        # further to the right in a row with fewer new tokens. The new tokens of row r are those
        # from index first_new_R[r] on.
        end_R = self.length - self.start_R + num_new_R
        end = int(end_R.max())
        first_new_R = end - num_new_R
        shift_R = first_new_R - self.length
        index_C = torch.arange(end, device=num_new_R.device)
        source_R1C1 = index_C[:, None] - shift_R[:, None, None, None]
        source_R1C1 = source_R1C1.clamp(0, self.capacity - 1)
        for buffers in self.completion_kv.values():
            for buffer in buffers:
                used_RKCD = buffer[:, :, :end]
                if self.length:
                    # Before a row's start this copies finite numbers, and where new tokens are to
                    # come, numbers that they overwrite.
                    source_RKCD = source_R1C1.expand_as(used_RKCD)
                    used_RKCD.copy_(buffer.gather(2, source_RKCD))
                else:
                    used_RKCD.zero_()
        self.start_R = self.start_R + shift_R
        self.length = end
        self._update_layout()

        # A new token attends to its prompt, and to its completion up to itself:
        # start <= index of the key <= index of the query.
        N = int(num_new_R.max())
        index_N = index_C[-N:]
        index_N1 = index_N[:, None]
        self.is_new_R1N1 = index_N1 >= first_new_R[:, None, None, None]
        """True at the new tokens, False at their padding."""
        is_completion_R11C = index_C >= self.start_R[:, None, None, None]
        is_completion_R1NC = is_completion_R11C & (index_C <= index_N1)
        is_prompt_R11P = self.is_prompt_U11P[self.prompt_R]
        is_prompt_R1NP = is_prompt_R11P.expand(-1, 1, N, -1)
        self.mask_R1NS = torch.cat([is_prompt_R1NP, is_completion_R1NC], dim=-1)
        positions_RN = self.offset_R[:, None] + index_N
        return positions_RN.clamp(min=0)  # those of padding may be negative

    def attend(
        self,
        layer: int,
        q_RHND: Tensor,
        k_RKND: Tensor,
        v_RKND: Tensor,
        scaling: float | None,
    ) -> Tensor:
        """Store the keys and values of new tokens, and attend from these tokens.

        Each attends to its prompt, and to its completion up to itself. Returns ``[R, N, H, D]``.
        """
        q_RHND = q_RHND.to(self.dtype)
        k_RKND = k_RKND.to(self.dtype)
        v_RKND = v_RKND.to(self.dtype)
        if scaling is None:
            scaling = q_RHND.shape[-1] ** -0.5
        # Autocast would cast to bf16 on a CPU, where keys and values are in fp32.
        with torch.autocast(q_RHND.device.type, enabled=False):
            if self.mask_R1NS is not None:
                return self._attend_several(
                    layer,
                    q_RHND,
                    k_RKND,
                    v_RKND,
                    scaling,
                )
            self._store_token(layer, k_RKND, v_RKND)
            return self._attend_one(layer, q_RHND, scaling)

    def _attend_one(
        self,
        layer: int,
        q_RH1D: Tensor,
        scaling: float,
    ) -> Tensor:
        """Attend from one token per row: to the prompt, to the completion, then both merged."""
        kernel = _cpu_attention if self.use_cpu_kernel else _plain_attention
        k_UKPD, v_UKPD = self.prompt_kv[layer]
        k_buffer, v_buffer = self.completion_kv[layer]
        R, H, _, D = q_RH1D.shape
        K = k_UKPD.shape[1]

        # The g query heads of a key head become g queries of it. On the prompt's side, those of all
        # its rows become j queries, so that each key is read once for all of them.
        q_RKgD = q_RH1D.reshape(R, K, H // K, D)
        q_UKjD = self._rows_to_prompts(q_RKgD)
        prompt_out_UKjD, prompt_log_z_UKj = kernel(
            q_UKjD,
            k_UKPD,
            v_UKPD,
            self.prompt_bias,
            scaling,
        )
        completion_out_RKgD, completion_log_z_RKg = kernel(
            q_RKgD,
            k_buffer[:, :, : self.length],
            v_buffer[:, :, : self.length],
            self.completion_bias,
            scaling,
        )
        out_RKgD = _merge(
            self._prompts_to_rows(prompt_out_UKjD),
            self._prompts_to_rows(prompt_log_z_UKj),
            completion_out_RKgD,
            completion_log_z_RKg,
        )
        return out_RKgD.reshape(R, 1, H, D)

    def _store_token(
        self,
        layer: int,
        k_RK1D: Tensor,
        v_RK1D: Tensor,
    ) -> None:
        """Write one token per row to the buffers."""
        k_buffer, v_buffer = self.completion_kv[layer]
        last = self.length - 1
        k_buffer[:, :, last] = k_RK1D[:, :, 0]
        v_buffer[:, :, last] = v_RK1D[:, :, 0]

    def _attend_several(
        self,
        layer: int,
        q_RHND: Tensor,
        k_RKND: Tensor,
        v_RKND: Tensor,
        scaling: float,
    ) -> Tensor:
        """Write several tokens per row to the buffers, and attend from them.

        It is rare, once per turn and not per token. So prompt and completion stand side by side in
        one call of PyTorch's own attention.
        """
        _, H, N, _ = q_RHND.shape
        keys_and_values = []
        for x_RKND, prompts_UKPD, buffer in zip(
            (k_RKND, v_RKND),
            self.prompt_kv[layer],
            self.completion_kv[layer],
            strict=True,
        ):
            completion_RKCD = buffer[:, :, : self.length]
            last_RKND = completion_RKCD[:, :, -N:]
            # A row with fewer new tokens has earlier ones among its last N. They stay.
            last_RKND.copy_(torch.where(self.is_new_R1N1, x_RKND, last_RKND))
            prompt_RKPD = prompts_UKPD[self.prompt_R]
            x_RKSD = torch.cat([prompt_RKPD, completion_RKCD], dim=2)
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
        """Compute what changes with the rows alone, and not at every token.

        These are positions, masks, and a grid of U prompts times J rows each. Attention to the
        prompts is computed in this grid, in which row r has cell ``cell_R[r]``. None: cell r.
        """
        device = self.prompt_R.device
        U = len(self.prompt_ids)
        # Each row's number among the rows of its prompt, which need not be neighbours: groups with
        # equal prompts share a prompt here, and paused rows come back behind all others.
        is_same_RR = self.prompt_R[:, None] == self.prompt_R
        is_earlier_RR = is_same_RR.tril(-1)
        number_R = is_earlier_RR.sum(dim=1)
        J = int(number_R.max()) + 1
        self.grid = (U, J)
        self.cell_R = self.prompt_R * J + number_R
        all_cells = torch.arange(U * J, device=device)
        if torch.equal(self.cell_R, all_cells):
            self.cell_R = None  # the rows are in the order of the grid

        k_UKPD, _ = next(iter(self.prompt_kv.values()))
        index_P = torch.arange(k_UKPD.shape[2], device=device)
        self.is_prompt_U11P = index_P < self.prompt_lengths_U[:, None, None, None]
        self.prompt_bias = None
        """Additive mask ``[U, 1, 1, P]`` of the prompts' padding. None: no prompt is padded."""
        if not self.is_prompt_U11P.all():
            self.prompt_bias = additive_mask(~self.is_prompt_U11P, self.dtype)

        # Reading a number from a GPU waits for it: here, and not at every token.
        self.starts_differ = bool(self.start_R.any())
        self.offset_R = self.prompt_lengths_U[self.prompt_R] - self.start_R
        """Position of the token at buffer index 0."""

    def _rows_to_prompts(self, x_RKgD: Tensor) -> Tensor:
        """``[R, K, g, D]`` to ``[U, K, j, D]``; zeros where a prompt has fewer than J rows."""
        U, J = self.grid
        if self.cell_R is not None:
            # Queries of zeros in the empty cells: finite numbers, whose results nothing reads.
            cells = x_RKgD.new_zeros(U * J, *x_RKgD.shape[1:])
            x_RKgD = cells.index_copy_(0, self.cell_R, x_RKgD)
        x_UJKgD = x_RKgD.unflatten(0, (U, J))
        x_UKJgD = x_UJKgD.transpose(1, 2)
        return x_UKJgD.flatten(2, 3)

    def _prompts_to_rows(self, x_UKj: Tensor) -> Tensor:
        """The inverse of :meth:`_rows_to_prompts`, with or without the last dimension."""
        _, J = self.grid
        x_UKJg = x_UKj.unflatten(2, (J, -1))
        x_UJKg = x_UKJg.transpose(1, 2)
        x_RKg = x_UJKg.flatten(0, 1)
        if self.cell_R is None:
            return x_RKg
        return x_RKg[self.cell_R]


def _merge(
    prompt_out_RKgD: Tensor,
    prompt_log_z_RKg: Tensor,
    completion_out_RKgD: Tensor,
    completion_log_z_RKg: Tensor,
) -> Tensor:
    """Attention to prompt and completion together, ``[R, K, g, D]``.

    ``out = w * out_prompt + (1 - w) * out_completion`` with the weight
    ``w = Z_prompt / (Z_prompt + Z_completion) = sigmoid(log Z_prompt - log Z_completion)``,
    which needs no exponential of a ``log_z`` and so cannot overflow.
    """
    log_ratio_RKg = prompt_log_z_RKg - completion_log_z_RKg
    prompt_weight_RKg = torch.sigmoid(log_ratio_RKg)
    dtype = prompt_weight_RKg.dtype
    out_RKgD = torch.lerp(
        completion_out_RKgD.to(dtype),
        prompt_out_RKgD.to(dtype),
        prompt_weight_RKg[..., None],
    )
    return out_RKgD.to(completion_out_RKgD.dtype)


def _cpu_attention(
    q_BKND: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask: Tensor | None,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """``out`` ``[B, K, N, D]`` and ``log_z`` ``[B, K, N]`` of N queries over S keys, on the CPU.

    ``mask`` ``[B, 1, 1, S]`` is added to the scores.
    """
    # The public function uses this kernel too, and does not return log_z.
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
    """``out`` and ``log_z`` as of :func:`_cpu_attention`, by matrix products, on CUDA."""
    q_bND = q_BKND.flatten(0, 1)
    k_bSD = k_BKSD.flatten(0, 1)
    k_bDS = k_bSD.transpose(1, 2)
    # Scores are in fp32 for half precision, as in fused kernels: bf16 would round 64 by 0.25.
    if q_bND.dtype in (torch.bfloat16, torch.float16):
        scores_bNS = torch.bmm(
            q_bND,
            k_bDS,
            out_dtype=torch.float32,
        )
    else:
        scores_bNS = q_bND @ k_bDS
    scores_BKNS = scores_bNS.unflatten(0, q_BKND.shape[:2])
    if mask is None:
        scores_BKNS = scores_BKNS * scaling
    else:
        scores_BKNS = torch.add(mask, scores_BKNS, alpha=scaling)
    weights_BKNS = scores_BKNS.softmax(dim=-1)

    # The largest weight is e^(largest score) / Z, so log_z needs no second sum over the keys.
    largest_score_BKN = scores_BKNS.amax(dim=-1)
    largest_weight_BKN = weights_BKNS.amax(dim=-1)
    log_z_BKN = largest_score_BKN - largest_weight_BKN.log()
    weights_BKNS = weights_BKNS.to(v_BKSD.dtype)
    return weights_BKNS @ v_BKSD, log_z_BKN


def additive_mask(is_masked: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor to add to scores: -inf where ``is_masked`` is True, else 0."""
    mask = torch.zeros_like(is_masked, dtype=dtype)
    return mask.masked_fill_(is_masked, -torch.inf)


def _with_length(x_UKPD: Tensor, P: int) -> Tensor:
    """Keys or values of prompts, cut or padded on the right to P tokens."""
    return F.pad(x_UKPD, (0, 0, 0, P - x_UKPD.shape[2]))


def _replace(
    layers: KeysAndValues,
    function: Callable[..., Tensor],
    *others: KeysAndValues,
) -> None:
    """Replace keys and values by a function of them and of those of other caches."""
    # In place, so that only one layer is in memory twice.
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
    device_type = x.device.type
    if device_type == "cpu":
        return torch.promote_types(x.dtype, torch.float32)
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return x.dtype
