"""A KV cache in which all completions of a prompt share the prompt's keys and values.

A decode step spends its time on reading keys and values. Here the keys of a prompt are in memory
once, and one matrix product multiplies them with the queries of all completions of the prompt.
Attention to the prompt and attention to the completion are computed apart and merged afterwards, as
in Hydragen (Juravsky et al. 2024, arXiv:2402.05099). The formulas for one query ``q`` over keys
``k_s`` and values ``v_s`` are::

    score_s = scaling * (q . k_s) + mask_s
    Z       = sum_s e^score_s                          log_z is log Z
    out     = sum_s (e^score_s / Z) v_s

    out of both parts = (Z_prompt * out_prompt + Z_completion * out_completion)
                        / (Z_prompt + Z_completion)

A row is a completion that is being decoded. Keys and values of the rows' tokens are in buffers. The
last tokens of all rows stand at the same index, so that the next tokens of all rows are written by
one operation. A row that joined later starts at a later index, its ``start``. Here is a buffer of
``capacity`` 6 and ``length`` 4::

    index    0   1   2   3   4   5
    row 0    a0  a1  a2  a3  -   -       start 0
    row 1    -   -   b0  b1  -   -       start 2

U   prompts                               H   query heads
P   tokens of the longest prompt          K   key heads, and as many value heads
R   rows                                  g   query heads of each key head, H / K
J   largest number of rows of a prompt    j   queries of one key head in J rows, J * g
C   indices of the buffers in use         D   size of a head
N   queries                               S   keys, of prompt and completion
B   prompts or rows                       b   prompts or rows, times key heads: B * K
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
    """Keys and values of prompts, and of rows, which are completions of these prompts.

    Order of calls: one forward pass over the prompts (:meth:`store_prompts` in every layer),
    :meth:`fork`, then for every token :meth:`begin_token` and, in every layer, :meth:`attend`.
    Between tokens rows may leave (:meth:`keep_rows`), join (:meth:`add_rows`), or be copied
    (:meth:`copy_rows`).
    :meth:`begin_tokens` begins several tokens of each row at once.
    """

    completion_bias: Tensor | None
    """Additive mask ``[R, 1, 1, C]``, -inf at the indices before each row's start. None if all rows
    start at index 0."""
    mask_R1NS: Tensor | None
    """Mask for several new tokens per row: True where a token may attend. None if each row has one
    new token."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        capacity: int,
        device: torch.device | str = "cpu",
    ):
        self.prompt_ids = list(prompts)
        """Token ids of the prompts. :meth:`add_rows` compares them to find equal prompts."""
        self.capacity = capacity
        """Number of indices of the buffers, at least the token limit of a completion."""
        self.length = 0
        """Number of buffer indices in use, including the index of the token being computed."""
        lengths = [len(prompt) for prompt in prompts]
        self.prompt_lengths_U = torch.tensor(lengths, device=device)
        self.prompt_kv: KeysAndValues = {}
        """Keys and values of the prompts, ``[U, K, P, D]``, padded on the right."""
        self.completion_kv: KeysAndValues = {}
        """Buffers with keys and values of the completions' tokens, ``[R, K, capacity, D]``.

        Memory from index ``length`` on is uninitialised, because filling it would slow down each
        change of the rows.
        """
        self.dtype = torch.float32
        """Dtype in which keys and values are stored and multiplied, so that no step casts them."""
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
        """Index of each row's prompt."""
        self.start_R = torch.zeros_like(prompt_R)
        """Buffer index of each row's first token."""

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
        """True if the buffers have no index left for another token. :meth:`keep_rows` frees indices
        if no kept row starts at index 0."""
        return self.length == self.capacity

    def keep_rows(self, rows: Sequence[int] | Tensor) -> None:
        """Keep only the given rows. Prompts without a kept row, and buffer indices before the first
        start of a kept row, are dropped."""
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
        # keep_rows() replaces values of the copy's dictionaries. This cache must stay as it is.
        part.completion_kv = dict(self.completion_kv)
        part.prompt_kv = dict(self.prompt_kv)
        part.keep_rows(rows)
        return part

    def add_rows(self, other: ForkedCache) -> None:
        """Append the rows of another cache. Equal prompts of both caches are stored once."""
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
            # Values before a row's start are masked: they are multiplied by 0. But new memory may
            # hold NaN, and 0 * NaN is NaN.
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
        """Advance every row by one token. This is called in each decode step, before the layers.

        Returns the positions ``[R]`` of the new tokens.
        """
        self.length += 1
        # The new token of every row may attend to the whole buffer up to itself, except for the
        # indices before the start of the row.
        self.mask_R1NS = None
        self.completion_bias = None
        if self.starts_differ:
            index_C = torch.arange(self.length, device=self.start_R.device)
            is_before_R11C = index_C < self.start_R[:, None, None, None]
            self.completion_bias = additive_mask(is_before_R11C, self.dtype)
        return self.offset_R + (self.length - 1)

    def begin_tokens(self, num_new_R: Tensor) -> Tensor:
        """Advance row r by ``num_new_R[r]`` tokens. The token ids must be padded on the left.

        Returns the positions ``[R, N]`` of the new tokens, where N is the largest of ``num_new_R``.
        """
        # All rows must end at the same index again. So the earlier tokens of row r move by
        # shift_R[r] indices, and its new tokens begin at index first_new_R[r].
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
                    # Indices before a row's start, which are masked, get any finite numbers.
                    # Indices of new tokens get numbers that are overwritten later.
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
        """True at new tokens, False at padding."""
        is_completion_R11C = index_C >= self.start_R[:, None, None, None]
        is_completion_R1NC = is_completion_R11C & (index_C <= index_N1)
        is_prompt_R11P = self.is_prompt_U11P[self.prompt_R]
        is_prompt_R1NP = is_prompt_R11P.expand(-1, 1, N, -1)
        self.mask_R1NS = torch.cat([is_prompt_R1NP, is_completion_R1NC], dim=-1)
        positions_RN = self.offset_R[:, None] + index_N
        return positions_RN.clamp(min=0)  # positions of padding may be negative

    def attend(
        self,
        layer: int,
        q_RHND: Tensor,
        k_RKND: Tensor,
        v_RKND: Tensor,
        scaling: float | None,
    ) -> Tensor:
        """Store the keys and values of new tokens, and return their attention ``[R, N, H, D]``.

        Each new token attends to its prompt, and to its completion up to itself.
        """
        q_RHND = q_RHND.to(self.dtype)
        k_RKND = k_RKND.to(self.dtype)
        v_RKND = v_RKND.to(self.dtype)
        if scaling is None:
            scaling = q_RHND.shape[-1] ** -0.5
        # On a CPU, keys and values are in fp32, which autocast would cast to bf16.
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
        """Return the attention of one token per row, merged from prompt and completion."""
        kernel = _cpu_attention if self.use_cpu_kernel else _plain_attention
        k_UKPD, v_UKPD = self.prompt_kv[layer]
        k_buffer, v_buffer = self.completion_kv[layer]
        R, H, _, D = q_RH1D.shape
        K = k_UKPD.shape[1]

        # The g query heads of a key head become g queries of that head. For attention to a prompt,
        # the queries of the prompt's rows become j queries, so that each key is read once for all.
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
        """Write the keys and values of one token per row to the buffers."""
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
        """Write several tokens per row to the buffers, and return the attention of these tokens.

        This runs only once per turn, so simplicity counts more than speed. The keys and values of
        prompt and completion are concatenated for one call of PyTorch's attention.
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
            # A row with fewer than N new tokens has earlier tokens among its last N, which stay.
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
        """Compute positions, masks and the grid, which change with the rows, not at every token.

        The grid has U prompts times J rows per prompt. Attention to the prompts is computed in the
        grid, with row r in cell ``cell_R[r]``. ``cell_R`` is None if row r is in cell r and no cell
        is empty.
        """
        device = self.prompt_R.device
        U = len(self.prompt_ids)
        # number_R counts the rows of each prompt. These rows need not be neighbours: groups with
        # equal prompts share a prompt here, and paused rows come back behind all other rows.
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
        """Additive mask ``[U, 1, 1, P]``, -inf at padding. None if no prompt is padded."""
        if not self.is_prompt_U11P.all():
            self.prompt_bias = additive_mask(~self.is_prompt_U11P, self.dtype)

        # Reading a number from a GPU waits for the GPU. So this is done here, not at every token.
        self.starts_differ = bool(self.start_R.any())
        self.offset_R = self.prompt_lengths_U[self.prompt_R] - self.start_R
        """Number to add to a buffer index for the position of the row's token at that index."""

    def _rows_to_prompts(self, x_RKgD: Tensor) -> Tensor:
        """Rearrange ``[R, K, g, D]`` to ``[U, K, j, D]``, with zeros in the empty cells."""
        U, J = self.grid
        if self.cell_R is not None:
            # Empty cells get queries of zeros, which are finite numbers. Their results are unused.
            cells = x_RKgD.new_zeros(U * J, *x_RKgD.shape[1:])
            x_RKgD = cells.index_copy_(0, self.cell_R, x_RKgD)
        x_UJKgD = x_RKgD.unflatten(0, (U, J))
        x_UKJgD = x_UJKgD.transpose(1, 2)
        return x_UKJgD.flatten(2, 3)

    def _prompts_to_rows(self, x_UKj: Tensor) -> Tensor:
        """Undo :meth:`_rows_to_prompts`: ``[U, K, j, D]`` or ``[U, K, j]`` to one entry per row."""
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
    """Merge attention to the prompt and attention to the completion, ``[R, K, g, D]``.

    ``out = w * out_prompt + (1 - w) * out_completion`` with the weight
    ``w = Z_prompt / (Z_prompt + Z_completion) = sigmoid(log Z_prompt - log Z_completion)``.
    The sigmoid needs no exponential of a ``log_z``, and so cannot overflow.
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
    """Return ``out [B, K, N, D]`` and ``log_z [B, K, N]`` of N queries over S keys, on the CPU.

    ``mask`` ``[B, 1, 1, S]`` is added to the scores.
    """
    # F.scaled_dot_product_attention uses this kernel, too, but does not return log_z.
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
    """Return ``out`` and ``log_z`` like :func:`_cpu_attention`, by matrix products, on CUDA."""
    q_bND = q_BKND.flatten(0, 1)
    k_bSD = k_BKSD.flatten(0, 1)
    k_bDS = k_bSD.transpose(1, 2)
    # For half precision, scores are in fp32, as in fused kernels: bf16 would round a score near 64
    # by up to 0.25.
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
    """Replace the keys and the values of each layer by the result of ``function``.

    The arguments of ``function`` are the old tensor, then the same tensor of each other cache.
    """
    # In place, so that only one layer is in memory twice.
    for layer in layers:
        keys_and_values = [cache[layer] for cache in (layers, *others)]
        layers[layer] = tuple(map(function, *keys_and_values))


def repeat_heads(x_RKSD: Tensor, H: int) -> Tensor:
    """Repeat each head of keys or values for its query heads, to ``[R, H, S, D]``."""
    K = x_RKSD.shape[1]
    if H == K:
        return x_RKSD
    return x_RKSD.repeat_interleave(H // K, dim=1)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which attention multiplies ``x``: on a GPU autocast's dtype, on a CPU at
    least fp32.

    On a CPU, decode steps in fp32 take 0.6 times as long as in bf16. In bf16, oneDNN would also
    make a kernel for each shape.
    """
    device_type = x.device.type
    if device_type == "cpu":
        return torch.promote_types(x.dtype, torch.float32)
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return x.dtype
