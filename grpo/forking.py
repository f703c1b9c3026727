"""Keys and values of completions that share their prompts.

A decode step is bound by reading keys and values. Here a prompt's lie in memory once, and all its completions ask them together:
one product of ``G * H/K`` queries per prompt instead of G products of ``H/K``. Each completion's own lie beside, in a buffer
allocated once.

Shapes: ``U`` prompts, ``P`` longest prompt, ``R`` rows in flight, ``J`` most rows of one prompt, ``C`` own tokens so far,
``H`` query heads, ``K`` key heads, ``D`` head size, ``g = H/K``.
"""

from __future__ import annotations

import torch


class ForkedCache:
    """Filled by one pass over the prompts, forked, then grown by one token per row and step."""

    def __init__(self, prompt_lengths: list[int], room: int, device: torch.device | str = "cpu"):
        self.room = room
        """Tokens each row can grow by."""
        self.prompt_lengths_U = torch.tensor(prompt_lengths, device=device)
        self.length = 0
        """Own tokens of each row, the one being computed among them."""
        self.prompts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.prompt_R = torch.arange(len(prompt_lengths), device=device)
        self._arrange()

    def fork(self, prompt_R: torch.Tensor) -> None:
        """Row r continues prompt ``prompt_R[r]``; rows of one prompt are neighbours."""
        self.prompt_R = prompt_R
        self._arrange()

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows only; prompts that no row continues are let go."""
        for layer, (keys, values) in self.own.items():
            self.own[layer] = self._some(keys, rows), self._some(values, rows)
        self.prompt_R = self.prompt_R[rows]
        prompts_left, renumbered = self.prompt_R.unique(return_inverse=True)
        if len(prompts_left) < len(self.prompt_lengths_U):
            self.prompt_lengths_U, self.prompt_R = self.prompt_lengths_U[prompts_left], renumbered
            self.prompts = {n: (k[prompts_left], v[prompts_left]) for n, (k, v) in self.prompts.items()}
        self._arrange()

    def store_prompts(self, layer: int, k_UPKD: torch.Tensor, v_UPKD: torch.Tensor) -> None:
        self.prompts[layer] = k_UPKD.transpose(1, 2).contiguous(), v_UPKD.transpose(1, 2).contiguous()

    def attend(
        self, layer: int, q_RH1D: torch.Tensor, k_RK1D: torch.Tensor, v_RK1D: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Add one token's keys and values to every row, and attend to prompt and own tokens; ``[R, 1, H, D]``."""
        R, H, _, D = q_RH1D.shape
        K = k_RK1D.shape[1]
        if layer not in self.own:
            self.own[layer] = k_RK1D.new_empty(R, K, self.room, D), v_RK1D.new_empty(R, K, self.room, D)
        own_keys, own_values = self.own[layer]
        C = self.length
        own_keys[:, :, C - 1], own_values[:, :, C - 1] = k_RK1D[:, :, 0], v_RK1D[:, :, 0]
        q_RKgD = (q_RH1D * (D**-0.5 if scaling is None else scaling)).view(R, K, H // K, D)

        k_UKPD, v_UKPD = self.prompts[layer]
        from_prompt = self._by_prompt(q_RKgD) @ k_UKPD.transpose(-1, -2)
        if self.hidden_U11P is not None:
            from_prompt.masked_fill_(self.hidden_U11P, float("-inf"))
        scores = torch.cat([self._by_row(from_prompt), q_RKgD @ own_keys[:, :, :C].transpose(-1, -2)], dim=-1)
        weights = scores.float().softmax(dim=-1).to(scores.dtype)
        P = k_UKPD.shape[2]
        out_RKgD = self._by_row(self._by_prompt(weights[..., :P]) @ v_UKPD) + weights[..., P:] @ own_values[:, :, :C]
        return out_RKgD.reshape(R, 1, H, D)

    def _arrange(self) -> None:
        """Where each row stands among the ``U * J`` places of :meth:`_by_prompt`."""
        U, lengths_U = len(self.prompt_lengths_U), self.prompt_lengths_U
        counts_U = self.prompt_R.bincount(minlength=U)
        self.shape = U, int(counts_U.max())
        first_U = counts_U.cumsum(0) - counts_U
        number_R = torch.arange(len(self.prompt_R), device=self.prompt_R.device) - first_U[self.prompt_R]
        self.place_R = None if bool((counts_U == self.shape[1]).all()) else self.prompt_R * self.shape[1] + number_R
        P = int(lengths_U.max()) if not self.prompts else next(iter(self.prompts.values()))[0].shape[2]
        hidden_UP = torch.arange(P, device=lengths_U.device) >= lengths_U[:, None]
        self.hidden_U11P = hidden_UP[:, None, None] if bool(hidden_UP.any()) else None

    def _by_prompt(self, x_RKgN: torch.Tensor) -> torch.Tensor:
        """``[R, K, g, N]`` to ``[U, K, J * g, N]``, zeros where a prompt has fewer rows than another."""
        U, J = self.shape
        K, g, N = x_RKgN.shape[1:]
        if self.place_R is not None:
            x_RKgN = x_RKgN.new_zeros(U * J, K, g, N).index_copy_(0, self.place_R, x_RKgN)
        return x_RKgN.reshape(U, J, K, g, N).transpose(1, 2).reshape(U, K, J * g, N)

    def _by_row(self, x_UKjN: torch.Tensor) -> torch.Tensor:
        """The inverse."""
        U, J = self.shape
        K, N = x_UKjN.shape[1], x_UKjN.shape[3]
        x = x_UKjN.reshape(U, K, J, -1, N).transpose(1, 2).reshape(U * J, K, -1, N)
        return x if self.place_R is None else x[self.place_R]

    def _some(self, buffer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        chosen = buffer.new_empty(len(rows), *buffer.shape[1:])
        chosen[:, :, : self.length] = buffer[rows, :, : self.length]
        return chosen
