"""A KV cache in which all completions of a prompt share the prompt's keys and values.

A decode step spends its time on reading keys and values. Those of a prompt are in memory once, and the queries of all
its completions are multiplied with them in one product. The keys and values of the completions' own tokens are in a
second buffer. All have the dtype of the attention products, so that autocast does not cast them at every token.

Shapes: ``U`` prompts, ``P`` longest prompt, ``R`` rows (completions) being decoded, ``J`` most rows of one prompt,
``C`` own tokens so far, ``H`` query heads, ``K`` key heads, ``D`` head size, ``g = H/K``, ``j = J * g``; ``N`` queries
and ``S`` keys of each of ``b = B * K`` sequences, where ``B`` are prompts or rows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo.attention import fast_paths


class ForkedCache:
    """Keys and values of prompts, and of one more token per row and decode step.

    Order of calls: one forward pass over the prompts (:meth:`store_prompts` in every layer), :meth:`fork`, then for
    every token :meth:`begin_token` and, in every layer, :meth:`attend`. Between tokens rows may leave
    (:meth:`keep_rows`, :meth:`split`) and join (:meth:`add_rows`). :meth:`begin_tokens` begins several tokens at once.
    """

    def __init__(
        self,
        prompt_lengths: list[int],
        capacity: int,
        device: torch.device | str = "cpu",
        names: Sequence | None = None,
    ):
        self.names = [object() for _ in prompt_lengths] if names is None else list(names)
        """A name for each prompt, by which :meth:`add_rows` finds those that both caches have."""
        self.capacity = capacity
        """Most own tokens of a row."""
        self.length = 0
        """Own tokens in the cache for each row, with the one that is being computed."""
        self.prompt_lengths_U = torch.tensor(prompt_lengths, device=device)
        self.prompt_R = torch.arange(len(prompt_lengths), device=device)
        """The prompt of each row; rows of one prompt are neighbours."""
        self.prompts: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of the prompts, ``[U, K, P, D]``, by layer."""
        self.own: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of the own tokens, ``[R, K, capacity, D]``, by layer."""
        self.dtype = torch.float32
        """Dtype of keys, values and their products."""
        self.start_R: Tensor | None = None
        """Index of each row's first own token in the buffers; None while all rows began together."""
        self.new_R: Tensor | None = None
        """Number of new tokens of each row, while several are computed at once; None: one each."""
        self.use_cpu_kernel = torch.device(device).type == "cpu"
        self._update_layout()

    def fork(self, prompt_R: Tensor) -> None:
        """Let row r continue prompt ``prompt_R[r]``; rows of one prompt must be neighbours."""
        self.prompt_R = prompt_R
        self._update_layout()

    @property
    def is_full(self) -> bool:
        """True if the buffers have no index for another token until :meth:`keep_rows` drops rows that began first."""
        return self.length == self.capacity

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but these, prompts that no row continues, and buffer indices before the first token of all."""
        first = 0
        if self.start_R is not None:
            first = int(self.start_R[rows].min())
            self.start_R = self.start_R[rows] - first
        for layer, buffers in self.own.items():
            self.own[layer] = tuple(select_rows(buffer, rows, first, self.length) for buffer in buffers)
        self.length -= first
        self.prompt_R = self.prompt_R[rows]
        prompts_left, renumbered_R = self.prompt_R.unique(return_inverse=True)
        if len(prompts_left) < len(self.prompt_lengths_U):
            self.prompt_lengths_U, self.prompt_R = self.prompt_lengths_U[prompts_left], renumbered_R
            self.prompts = {n: (k[prompts_left], v[prompts_left]) for n, (k, v) in self.prompts.items()}
            self.names = [self.names[u] for u in prompts_left.tolist()]
        self._update_layout()

    def split(self, rows: Tensor) -> ForkedCache:
        """A cache of these rows only, a copy; this one keeps them too."""
        part = copy.copy(self)
        part.own, part.prompts = dict(self.own), dict(self.prompts)
        part.keep_rows(rows)
        return part

    def add_rows(self, other: ForkedCache) -> None:
        """Append the rows of another cache. A prompt that both have is in memory once."""
        index = {name: u for u, name in enumerate(self.names)}
        new = [u for u, name in enumerate(other.names) if name not in index]
        self.names = self.names + [other.names[u] for u in new]
        index |= {name: u for u, name in enumerate(self.names)}
        prompt_U = other.prompt_R.new_tensor([index[name] for name in other.names])
        R, N = len(self.prompt_R), len(other.prompt_R)
        self.prompt_R = torch.cat([self.prompt_R, prompt_U[other.prompt_R]])
        self.prompt_lengths_U = torch.cat([self.prompt_lengths_U, other.prompt_lengths_U[new]])
        P, length = int(self.prompt_lengths_U.max()), max(self.length, other.length)
        for layer, buffers in self.prompts.items():
            both = zip(buffers, other.prompts[layer], strict=True)
            self.prompts[layer] = tuple(torch.cat([_resize(x, P), _resize(y[new], P)]) for x, y in both)
            if length:
                parts = [(self.own.get(layer, (None, None)), R, self.length)]
                parts += [(other.own.get(layer, (None, None)), N, other.length)]
                self.own[layer] = tuple(_joined([(own[i], n, end) for own, n, end in parts], length) for i in range(2))
        starts = self.prompt_R.new_zeros(R) if self.start_R is None else self.start_R
        new_starts = self.prompt_R.new_zeros(N) if other.start_R is None else other.start_R
        self.start_R = torch.cat([starts + (length - self.length), new_starts + (length - other.length)])
        self.length = length
        self._update_layout()

    def store_prompts(self, layer: int, k_UPKD: Tensor, v_UPKD: Tensor) -> None:
        """Store the keys and values of the prompts, padded on the right."""
        self.dtype = product_dtype(v_UPKD)
        self.prompts[layer] = tuple(x.transpose(1, 2).to(self.dtype).contiguous() for x in (k_UPKD, v_UPKD))

    def begin_tokens(self, new_R: Tensor) -> None:
        """Advance by ``new_R[r]`` tokens of row r, which :meth:`attend` gets together, padded on the left."""
        start_R = torch.zeros_like(new_R) if self.start_R is None else self.start_R
        # All rows end at the same index, whatever their number of tokens.
        end = int((self.length - start_R + new_R).max())
        shift_R = end - new_R - self.length
        source_RC = (torch.arange(end, device=new_R.device) - shift_R[:, None]).clamp(0, max(self.length - 1, 0))
        for buffer in (buffer for buffers in self.own.values() for buffer in buffers):
            index = source_RC[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
            # Without own tokens, these are memory that nothing has been written to, and masked NaN would stay NaN.
            buffer[:, :, :end] = buffer.gather(2, index) if self.length else 0.0
        self.start_R, self.length, self.new_R = start_R + shift_R, end, new_R

    def begin_token(self) -> None:
        """Advance to the next token of every row: once per decode step, before the first layer."""
        self.length += 1
        self.new_R = None
        if self.start_R is not None:
            index_C = torch.arange(self.length, device=self.start_R.device)
            self.own_bias = additive_mask(index_C < self.start_R[:, None], self.dtype)

    def attend(self, layer: int, q_RH1D, k_RK1D, v_RK1D, scaling: float | None) -> Tensor:
        """Store one token's keys and values for every row, which attends to its prompt and tokens; ``[R, 1, H, D]``.

        After :meth:`begin_tokens`, those of several tokens.
        """
        if self.new_R is not None:
            return self._attend_several(layer, q_RH1D, k_RK1D, v_RK1D, scaling)
        R, H, _, D = q_RH1D.shape
        K = k_RK1D.shape[1]
        q_RH1D, k_RK1D, v_RK1D = (x.to(self.dtype) for x in (q_RH1D, k_RK1D, v_RK1D))
        self._store_token(layer, k_RK1D, v_RK1D)
        q_RKgD = q_RH1D.reshape(R, K, H // K, D)
        scaling = D**-0.5 if scaling is None else scaling
        with torch.autocast(q_RH1D.device.type, enabled=False):
            q_UKjD = self._rows_to_prompts(q_RKgD)
            kernel = _cpu_attention if self.use_cpu_kernel else _plain_attention
            own = (buffer[:, :, : self.length] for buffer in self.own[layer])
            of_prompt = kernel(q_UKjD, *self.prompts[layer], self.prompt_bias, scaling)
            of_own = kernel(q_RKgD, *own, self.own_bias, scaling)
            return _merged(*of_own, *of_prompt, self.grid, self.cell_R).reshape(R, 1, H, D)

    def _store_token(self, layer: int, k_RK1D: Tensor, v_RK1D: Tensor) -> None:
        """Store one token's keys and values in the buffers."""
        if layer not in self.own:
            self.own[layer] = tuple(x.new_empty(*x.shape[:2], self.capacity, x.shape[3]) for x in (k_RK1D, v_RK1D))
        for buffer, x_RK1D in zip(self.own[layer], (k_RK1D, v_RK1D), strict=True):
            buffer[:, :, self.length - 1] = x_RK1D[:, :, 0]

    def _attend_several(self, layer: int, q_RHND: Tensor, k_RKND: Tensor, v_RKND: Tensor, scaling) -> Tensor:
        """Attention of the last N tokens of every row, of which ``new_R`` are not padding; ``[R, N, H, D]``."""
        C, N, P = self.length, q_RHND.shape[2], self.prompts[layer][0].shape[2]
        index_C = torch.arange(C, device=q_RHND.device)
        is_new_RN = index_C[C - N :] >= C - self.new_R[:, None]
        if layer not in self.own:
            self.own[layer] = tuple(
                x.new_zeros(*x.shape[:2], self.capacity, x.shape[3], dtype=self.dtype) for x in (k_RKND, v_RKND)
            )
        keys_and_values = []
        for x_RKND, prompts_UKPD, own in zip((k_RKND, v_RKND), self.prompts[layer], self.own[layer], strict=True):
            new = own[:, :, C - N : C]
            new.copy_(torch.where(is_new_RN[:, None, :, None], x_RKND.to(self.dtype), new))
            keys_and_values.append(torch.cat([prompts_UKPD[self.prompt_R], own[:, :, :C]], dim=2))
        sees_prompt_RP = torch.arange(P, device=index_C.device) < self.prompt_lengths_U[self.prompt_R][:, None]
        sees_own_RNC = (index_C >= self.start_R[:, None, None]) & (index_C <= index_C[C - N :, None])
        mask_R1NS = torch.cat([sees_prompt_RP[:, None].expand(-1, N, -1), sees_own_RNC], dim=-1)[:, None]
        options = dict(attn_mask=mask_R1NS, scale=scaling, enable_gqa=True)
        with torch.autocast(q_RHND.device.type, enabled=False):
            out = F.scaled_dot_product_attention(q_RHND.to(self.dtype), *keys_and_values, **options)
        return out.transpose(1, 2)

    def _update_layout(self) -> None:
        """Assign each row a cell of the ``[U, J]`` grid of :meth:`_rows_to_prompts`, and mask the prompts' padding."""
        U, lengths_U = len(self.prompt_lengths_U), self.prompt_lengths_U
        counts_U = self.prompt_R.bincount(minlength=U)
        J = int(counts_U.max())
        first_U = counts_U.cumsum(0) - counts_U
        order_R = self.prompt_R.argsort(stable=True)  # rows that came back stand behind those of other prompts
        number_R = torch.empty_like(order_R)
        number_R[order_R] = torch.arange(len(order_R), device=order_R.device) - first_U[self.prompt_R[order_R]]
        self.grid = (U, J)
        cell_R = self.prompt_R * J + number_R
        is_grid = len(cell_R) == U * J and bool((cell_R == torch.arange(U * J, device=cell_R.device)).all())
        self.cell_R = None if is_grid else cell_R
        P = int(lengths_U.max()) if not self.prompts else next(iter(self.prompts.values()))[0].shape[2]
        padding_UP = torch.arange(P, device=lengths_U.device) >= lengths_U[:, None]
        # Additive masks: [U, 1, 1, P] of the prompts' padding, [R, 1, 1, C] of the indices before a row's first token.
        # None if nothing is masked.
        self.prompt_bias = additive_mask(padding_UP, self.dtype) if bool(padding_UP.any()) else None
        self.own_bias: Tensor | None = None

    def _rows_to_prompts(self, x_RKgN: Tensor) -> Tensor:
        """``[R, K, g, N]`` to ``[U, K, J * g, N]``, zeros in the cells of prompts that have fewer than J rows."""
        U, J = self.grid
        K, g, N = x_RKgN.shape[1:]
        if self.cell_R is not None:
            x_RKgN = x_RKgN.new_zeros(U * J, K, g, N).index_copy_(0, self.cell_R, x_RKgN)
        return x_RKgN.reshape(U, J, K, g, N).transpose(1, 2).reshape(U, K, J * g, N)


def _prompts_to_rows(x_UKjN: Tensor, grid: tuple[int, int], cell_R: Tensor | None) -> Tensor:
    """The inverse of :meth:`ForkedCache._rows_to_prompts`."""
    (U, J), K, N = grid, x_UKjN.shape[1], x_UKjN.shape[3]
    x = x_UKjN.reshape(U, K, J, -1, N).transpose(1, 2).reshape(U * J, K, -1, N)
    return x if cell_R is None else x[cell_R]


@fast_paths.compiled(fast_paths.STEP)
def _merged(own_out_RKgD, own_log_z_RKg, prompt_out_UKjD, prompt_log_z_UKj, grid, cell_R) -> Tensor:
    """Attention to own tokens and to the prompt joined, ``[R, K, g, D]``; ``log_z``: log of the sum of ``e^score``.

    With weights ``e^s / Z``, ``out = (Z_prompt out_prompt + Z_own out_own) / (Z_prompt + Z_own)``.
    """
    prompt_log_z_RKg1 = _prompts_to_rows(prompt_log_z_UKj[..., None], grid, cell_R)
    prompt_share_RKg1 = torch.sigmoid(prompt_log_z_RKg1 - own_log_z_RKg[..., None])
    outs = own_out_RKgD, _prompts_to_rows(prompt_out_UKjD, grid, cell_R)
    return torch.lerp(*(x.to(own_log_z_RKg.dtype) for x in outs), prompt_share_RKg1).to(own_out_RKgD.dtype)


def _cpu_attention(q_BKND, k_BKSD, v_BKSD, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Output ``[B, K, N, D]`` and ``log_z`` ``[B, K, N]`` of N queries over S keys, by the CPU's fused kernel.

    An additive mask leaves keys out.
    """
    mask = None if mask is None else mask.expand(-1, -1, q_BKND.shape[2], -1)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BKND, k_BKSD, v_BKSD, attn_mask=mask, scale=scaling
    )


def _plain_attention(q_BKND, k_BKSD, v_BKSD, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """The same by matrix products, on CUDA.

    Scores are in fp32 for half precision, as in fused kernels: bf16 would round a score of 64 by 0.25.
    """
    q, k = q_BKND.flatten(0, 1), k_BKSD.flatten(0, 1).transpose(1, 2)
    half = q.dtype in (torch.bfloat16, torch.float16)
    scores = (torch.bmm(q, k, out_dtype=torch.float32) if half else q @ k).unflatten(0, q_BKND.shape[:2])
    weights_BKNS, log_z_BKN = _softmax(scores, mask, scaling, v_BKSD.dtype)
    return weights_BKNS @ v_BKSD, log_z_BKN


@fast_paths.compiled(fast_paths.STEP)
def _softmax(scores: Tensor, mask: Tensor | None, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Over the last dimension, in ``dtype``; and ``log_z`` without it: the largest weight is ``e^(max - log_z)``."""
    scores = scores * scaling if mask is None else torch.add(mask, scores, alpha=scaling)
    weights = scores.softmax(dim=-1)
    return weights.to(dtype), scores.amax(dim=-1) - weights.amax(dim=-1).log()


def additive_mask(padding_RN: Tensor, dtype: torch.dtype) -> Tensor:
    """``[R, 1, 1, N]`` -inf where ``padding`` is True, else 0."""
    return torch.zeros_like(padding_RN, dtype=dtype).masked_fill_(padding_RN, -torch.inf)[:, None, None]


def select_rows(buffer: Tensor, rows: Tensor, first: int, end: int) -> Tensor:
    """Chosen rows of a buffer ``[R, K, capacity, D]``, with their tokens ``first`` to ``end`` moved to the front."""
    chosen = buffer.new_empty(len(rows), *buffer.shape[1:])
    chosen[:, :, : end - first] = buffer[rows, :, first:end]
    return chosen


def _joined(parts: list[tuple[Tensor | None, int, int]], length: int) -> Tensor:
    """One buffer of ``(buffer, rows, end)``, each moved so that its last token, before ``end``, is before ``length``.

    Zeros in front: these are masked, but 0 times uninitialised memory could be NaN. Without a buffer all are zeros.
    """
    like = next(buffer for buffer, *_ in parts if buffer is not None)
    joined, first = like.new_empty(sum(rows for _, rows, _ in parts), *like.shape[1:]), 0
    for buffer, rows, end in parts:
        joined[first : first + rows, :, : length - end] = 0.0
        if end:
            joined[first : first + rows, :, length - end : length] = buffer[:, :, :end]
        first += rows
    return joined


def _resize(x_UKPD: Tensor, P: int) -> Tensor:
    """Cut or padded on the right to P tokens."""
    return F.pad(x_UKPD[:, :, :P], (0, 0, 0, P - min(x_UKPD.shape[2], P)))


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which attention multiplies ``x``: autocast's on a GPU; at least fp32 on CPU.

    On CPU, decode steps in fp32 take 0.6 of the time of bf16, for which oneDNN also makes a kernel for each shape.
    """
    kind = x.device.type
    if kind == "cpu":
        return torch.promote_types(x.dtype, torch.float32)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
