"""Keys and values of completions that share their prompts.

A decode step is bound by reading keys and values. Here a prompt's lie in memory once, and all its completions ask them together:
one product of ``G * H/K`` queries per prompt instead of G products of ``H/K``. Each completion's own lie beside, in a buffer
allocated once.

Keys and values are kept in the dtype they are multiplied in: what autocast would cast is cast once, not again at every token (rotary
embeddings leave keys in fp32). On CPU that is fp32 also under bf16 autocast: products of two rows with a few hundred keys take 0.6 of
the time that they take in bf16 (measured: 190 and 290 us, 32 rows, 100 tokens, one core).

Shapes: ``U`` prompts, ``P`` longest prompt, ``R`` rows in flight, ``J`` most rows of one prompt, ``C`` own tokens so far,
``H`` query heads, ``K`` key heads, ``D`` head size, ``g = H/K``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class ForkedCache:
    """Filled by one pass over the prompts, forked, then grown by one token per row and step."""

    def __init__(self, prompt_lengths: list[int], room: int, device: torch.device | str = "cpu"):
        self.room = room
        """Tokens each row can grow by."""
        self.prompt_lengths_U = torch.tensor(prompt_lengths, device=device)
        self.dtype = torch.float32
        """Of keys, values and their products."""
        self.in_two_parts = torch.device(device).type == "cpu"
        """Whether prompts and own tokens are attended to each for themselves, by a kernel that only CPUs have."""
        self.length = 0
        """Own tokens of each row, the one being computed among them."""
        self.prompts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.prompt_R = torch.arange(len(prompt_lengths), device=device)
        self.start_R: torch.Tensor | None = None
        """The first own place of each row, where some began later than others."""
        self.hidden_own: torch.Tensor | None = None
        """``[C]`` or ``[R, 1, 1, C]``, True at own places that hold nothing of the row; None: there are none."""
        self._arrange()

    def fork(self, prompt_R: torch.Tensor) -> None:
        """Row r continues prompt ``prompt_R[r]``; rows of one prompt are neighbours."""
        self.prompt_R = prompt_R
        self._arrange()

    @property
    def is_full(self) -> bool:
        """No place is left for another token, until rows that began first are let go by :meth:`keep`."""
        return self.length == self.room

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows only; prompts that no row continues are let go, and places before the first token of all rows."""
        first = 0
        if self.start_R is not None:
            first = int(self.start_R[rows].min())
            self.start_R = self.start_R[rows] - first
        for layer, (keys, values) in self.own.items():
            self.own[layer] = self._some(keys, rows, first), self._some(values, rows, first)
        self.length -= first
        self.prompt_R = self.prompt_R[rows]
        prompts_left, renumbered = self.prompt_R.unique(return_inverse=True)
        if len(prompts_left) < len(self.prompt_lengths_U):
            self.prompt_lengths_U, self.prompt_R = self.prompt_lengths_U[prompts_left], renumbered
            self.prompts = {n: (k[prompts_left], v[prompts_left]) for n, (k, v) in self.prompts.items()}
        self._arrange()

    def join(self, other: ForkedCache) -> None:
        """Go on with another's rows, which have no own tokens yet, beside these."""
        new = len(other.prompt_R)
        lengths_U = torch.cat([self.prompt_lengths_U, other.prompt_lengths_U])
        P = int(lengths_U.max())
        for layer, pairs in self.prompts.items():
            both = zip(pairs, other.prompts[layer], strict=True)
            self.prompts[layer] = tuple(torch.cat([_as_wide(mine, P), _as_wide(theirs, P)]) for mine, theirs in both)
            if layer in self.own:
                self.own[layer] = tuple(_with_rows(buffer, new, self.length) for buffer in self.own[layer])
        start_R = torch.zeros_like(self.prompt_R) if self.start_R is None else self.start_R
        self.start_R = torch.cat([start_R, start_R.new_full((new,), self.length)])
        self.prompt_R = torch.cat([self.prompt_R, other.prompt_R + len(self.prompt_lengths_U)])
        self.prompt_lengths_U = lengths_U
        self._arrange()

    def store_prompts(self, layer: int, k_UPKD: torch.Tensor, v_UPKD: torch.Tensor) -> None:
        self.dtype = _multiplied_in(v_UPKD)
        self.prompts[layer] = tuple(x.transpose(1, 2).to(self.dtype).contiguous() for x in (k_UPKD, v_UPKD))

    def attend(
        self, layer: int, q_RH1D: torch.Tensor, k_RK1D: torch.Tensor, v_RK1D: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Add one token's keys and values to every row, and attend to prompt and own tokens; ``[R, 1, H, D]``."""
        R, H, _, D = q_RH1D.shape
        K = k_RK1D.shape[1]
        q_RH1D, k_RK1D, v_RK1D = (x.to(self.dtype) for x in (q_RH1D, k_RK1D, v_RK1D))
        own_keys, own_values = self._append(layer, k_RK1D, v_RK1D)
        q_RKgD = q_RH1D.reshape(R, K, H // K, D)
        scaling = D**-0.5 if scaling is None else scaling
        with torch.autocast(q_RH1D.device.type, enabled=False):
            attention = self._in_two_parts if self.in_two_parts else self._at_once
            out_RKgD = attention(q_RKgD, *self.prompts[layer], own_keys, own_values, scaling)
        return out_RKgD.reshape(R, 1, H, D)

    def _append(self, layer: int, k_RK1D: torch.Tensor, v_RK1D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep one token's; returns all own ones, ``[R, K, C, D]``."""
        if layer not in self.own:
            R, K, _, D = k_RK1D.shape
            self.own[layer] = k_RK1D.new_empty(R, K, self.room, D), v_RK1D.new_empty(R, K, self.room, D)
        own_keys, own_values = (buffer[:, :, : self.length] for buffer in self.own[layer])
        own_keys[:, :, -1], own_values[:, :, -1] = k_RK1D[:, :, 0], v_RK1D[:, :, 0]
        if self.start_R is not None and (self.hidden_own is None or self.hidden_own.shape[-1] != self.length):
            places_C = torch.arange(self.length, device=self.start_R.device)
            self.hidden_own = (places_C < self.start_R[:, None])[:, None, None]
            self._own_mask = torch.zeros(self.hidden_own.shape, dtype=k_RK1D.dtype, device=places_C.device)
            self._own_mask.masked_fill_(self.hidden_own, float("-inf"))
        return own_keys, own_values

    def _at_once(self, q_RKgD, k_UKPD, v_UKPD, k_RKCD, v_RKCD, scaling: float) -> torch.Tensor:
        """One softmax over the scores of prompt and own tokens; ``[R, K, g, D]``."""
        from_prompt = _scores(self._by_prompt(q_RKgD), k_UKPD, scaling)
        if self.hidden_U11P is not None:
            from_prompt.masked_fill_(self.hidden_U11P, float("-inf"))
        from_own = _scores(q_RKgD, k_RKCD, scaling)
        if self.hidden_own is not None:
            from_own.masked_fill_(self.hidden_own, float("-inf"))
        scores = torch.cat([self._by_row(from_prompt), from_own], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v_UKPD.dtype)
        P = k_UKPD.shape[2]
        return self._by_row(self._by_prompt(weights[..., :P]) @ v_UKPD) + weights[..., P:] @ v_RKCD

    def _in_two_parts(self, q_RKgD, k_UKPD, v_UKPD, k_RKCD, v_RKCD, scaling: float) -> torch.Tensor:
        """The same by the CPU's fused kernel: prompt and own tokens each for themselves, joined by their normalizers.

        With weights ``e^s / Z`` over both parts, ``out = (Z_prompt out_prompt + Z_own out_own) / (Z_prompt + Z_own)``; the kernel
        returns log Z beside each part. 15% off the whole attention with one thread.
        """
        q_UKjD = self._by_prompt(q_RKgD)
        mask = None
        if self.hidden_U11P is not None:
            if self._mask_U11P is None:  # the same for all layers and tokens until a prompt leaves
                nothing = torch.zeros(self.hidden_U11P.shape, dtype=q_UKjD.dtype)
                self._mask_U11P = nothing.masked_fill_(self.hidden_U11P, float("-inf"))
            mask = self._mask_U11P.expand(-1, -1, q_UKjD.shape[2], -1)
        prompt_out, prompt_log_z = _fused(q_UKjD, k_UKPD, v_UKPD, attn_mask=mask, scale=scaling)
        own_mask = None if self._own_mask is None else self._own_mask.expand(-1, -1, q_RKgD.shape[2], -1)
        own_out_RKgD, own_log_z = _fused(q_RKgD, k_RKCD, v_RKCD, attn_mask=own_mask, scale=scaling)
        share_RKg1 = torch.sigmoid(self._by_row(prompt_log_z[..., None]) - own_log_z[..., None])
        return torch.lerp(own_out_RKgD, self._by_row(prompt_out), share_RKg1)

    def _arrange(self) -> None:
        """Where each row stands among the ``U * J`` places of :meth:`_by_prompt`."""
        U, lengths_U = len(self.prompt_lengths_U), self.prompt_lengths_U
        counts_U = self.prompt_R.bincount(minlength=U)
        self.shape = U, int(counts_U.max())
        self.places = U * self.shape[1]
        first_U = counts_U.cumsum(0) - counts_U
        number_R = torch.arange(len(self.prompt_R), device=self.prompt_R.device) - first_U[self.prompt_R]
        self.place_R = None if bool((counts_U == self.shape[1]).all()) else self.prompt_R * self.shape[1] + number_R
        self.from_R = self.place_R
        P = int(lengths_U.max()) if not self.prompts else next(iter(self.prompts.values()))[0].shape[2]
        hidden_UP = torch.arange(P, device=lengths_U.device) >= lengths_U[:, None]
        self.hidden_U11P = hidden_UP[:, None, None] if bool(hidden_UP.any()) else None
        self._mask_U11P: torch.Tensor | None = None
        self.hidden_own = self._own_mask = None

    def _by_prompt(self, x_RKgN: torch.Tensor) -> torch.Tensor:
        """``[R, K, g, N]`` to ``[U, K, J * g, N]``, zeros where a prompt has fewer rows than another."""
        U, J = self.shape
        K, g, N = x_RKgN.shape[1:]
        if self.place_R is not None:
            x_RKgN = x_RKgN.new_zeros(self.places, K, g, N).index_copy_(0, self.place_R, x_RKgN)[: U * J]
        return x_RKgN.reshape(U, J, K, g, N).transpose(1, 2).reshape(U, K, J * g, N)

    def _by_row(self, x_UKjN: torch.Tensor) -> torch.Tensor:
        """The inverse."""
        U, J = self.shape
        K, N = x_UKjN.shape[1], x_UKjN.shape[3]
        x = x_UKjN.reshape(U, K, J, -1, N).transpose(1, 2).reshape(U * J, K, -1, N)
        return x if self.from_R is None else x[self.from_R]

    def _some(self, buffer: torch.Tensor, rows: torch.Tensor, first: int) -> torch.Tensor:
        chosen = buffer.new_empty(len(rows), *buffer.shape[1:])
        chosen[:, :, : self.length - first] = buffer[rows, :, first : self.length]
        return chosen


def _scores(q_RKgD: torch.Tensor, k_RKCD: torch.Tensor, scaling: float) -> torch.Tensor:
    """``[R, K, g, C]``, of half-precision inputs in fp32, as fused kernels have them: from 64 on bf16 has steps of 0.5, so that a head with
    such scores would be off by up to a quarter of a nat each, and sampling be another policy than scoring."""
    if q_RKgD.dtype in (torch.bfloat16, torch.float16):
        q, k = q_RKgD.flatten(0, 1), k_RKCD.flatten(0, 1).transpose(1, 2)
        return torch.bmm(q, k, out_dtype=torch.float32).unflatten(0, q_RKgD.shape[:2]).mul_(scaling)
    return (q_RKgD * scaling) @ k_RKCD.transpose(-1, -2)


def _as_wide(x_UKPD: torch.Tensor, P: int) -> torch.Tensor:
    return F.pad(x_UKPD[:, :, :P], (0, 0, 0, P - min(x_UKPD.shape[2], P)))


def _with_rows(buffer: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """``rows`` more, whose places up to ``length`` are zeros: weight 0 times what memory happens to hold could be NaN."""
    longer = buffer.new_empty(len(buffer) + rows, *buffer.shape[1:])
    longer[: len(buffer), :, :length] = buffer[:, :, :length]
    longer[len(buffer) :, :, :length] = 0.0
    return longer


_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _multiplied_in(x: torch.Tensor) -> torch.dtype:
    kind = x.device.type
    if kind == "cpu":
        return torch.promote_types(x.dtype, torch.float32)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
