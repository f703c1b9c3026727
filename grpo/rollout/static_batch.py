"""The batch of captured decode steps: rows in slots, with their state, prompts, keys and values at addresses that do
not change.

Shapes: ``S`` slots (rows, then padding), ``R`` rows, ``T`` most tokens of a completion, ``C`` own tokens that a step
attends to, ``U`` prompts, ``J`` most rows of one prompt, ``P`` padded prompt length, ``K`` key heads, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from grpo.attention import ForkedCache
from grpo.rollout.decode_loop import Decoded
from grpo.rollout.stops import Stops

PROMPT_BUCKET = 256
"""Prompts are padded to a multiple of this number of tokens."""
State = dict[str, torch.Tensor]
"""The state of each slot, by name: its row, its prompt, the tokens drawn so far, ..."""


def padded_rows(number: int) -> int:
    """The next power of two, so that there are few shapes to capture. (No other grid has been measured.)"""
    return 1 << max(number - 1, 0).bit_length()


class StaticBuffers:
    """Memory by name, at the same address each time. If a buffer must grow, its address changes, and ``on_move`` is
    called.
    """

    def __init__(self, device: torch.device, on_move: Callable[[], None]):
        self.device, self.on_move = device, on_move
        self.flat: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel()
        flat = self.flat.get(name)
        if flat is None or len(flat) < size or flat.dtype != dtype:
            self.flat[name] = flat = torch.zeros(size, dtype=dtype, device=self.device)
            self.on_move()
        return flat[:size].view(shape)

    def copy(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Copy values into the buffer of this name."""
        return self.get(name, values.shape, values.dtype).copy_(values)

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self.flat.values())


class Slots:
    """The batch in static buffers: rows, padded to a number of slots, with their state, prompts, keys and values."""

    def __init__(self, buffers: StaticBuffers, state: State, cache: ForkedCache, T: int):
        self.buffers, self.state, self.T, self.dtype = buffers, state, T, cache.dtype
        self.next_1 = buffers.copy("next", torch.zeros(1, dtype=torch.long, device=buffers.device))
        """Index of the next token, the same for all rows."""
        self.drawn_by_dropped = 0
        """Tokens of the rows that have been dropped."""
        self.P = -(-int(cache.prompt_lengths_U.max()) // PROMPT_BUCKET) * PROMPT_BUCKET
        self.prompts, self.lengths_U = cache.prompts, cache.prompt_lengths_U
        self.own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.num_rows = self.num_slots = len(state["row"])
        self.keep(torch.arange(self.num_rows, device=buffers.device), 0)

    def keep(self, slots: torch.Tensor, num_own: int) -> None:
        """Keep only the rows in ``slots``, in the smallest shape that holds them; each has ``num_own`` own tokens in
        the cache.
        """
        buffers, R = self.buffers, len(slots)
        self.drawn_by_dropped += int(self.state["length"][: self.num_rows].sum() - self.state["length"][slots].sum())
        # The first shape has exactly as many slots as rows: memory was bounded for these.
        S = R if self.num_slots == R else padded_rows(R)
        filled_S = torch.cat([slots, slots[:1].expand(S - R)])  # padding computes what the first row computes
        prompts_left, prompt_R = self.state["prompt"][slots].unique(return_inverse=True)
        counts_U = prompt_R.bincount()
        # U and J stay those of the first shape, or shrink to S, so that they follow from S alone.
        U, J = (min(self.U, S), min(self.J, S)) if self.own else (len(prompts_left), int(counts_U.max()))
        first_U = counts_U.cumsum(0) - counts_U
        number_R = torch.arange(R, device=buffers.device) - first_U[prompt_R]
        cell_S = first_U.new_full((S,), U * J)  # padding queries go to one more cell, which is never read
        cell_S[:R] = prompt_R * J + number_R
        self.to_cell_S = buffers.copy("to cell", cell_S)
        self.from_cell_S = buffers.copy("from cell", cell_S.clamp(max=U * J - 1))
        if S == U * J and bool((counts_U == J).all()):
            # Every row is in the cell of its number: nothing to scatter and gather.
            self.to_cell_S = self.from_cell_S = None
        self.state["prompt"] = torch.zeros_like(self.state["prompt"]).index_copy_(0, slots, prompt_R)
        self.state = {name: buffers.copy(name, values[filled_S]) for name, values in self.state.items()}
        self._move_prompts(torch.cat([prompts_left, prompts_left[:1].expand(U - len(prompts_left))]))
        self._move_own(filled_S, num_own)
        self.num_rows, self.num_slots, self.U, self.J = R, S, U, J

    def _move_prompts(self, prompts_U: torch.Tensor) -> None:
        buffers, P = self.buffers, self.P
        self.lengths_U = self.lengths_U[prompts_U]
        padding_UP = torch.arange(P, device=buffers.device) >= self.lengths_U[:, None]
        bias_UP = torch.zeros_like(padding_UP, dtype=torch.float32).masked_fill_(padding_UP, float("-inf"))
        self.prompt_bias = buffers.copy("prompt bias", bias_UP[self.state["prompt"]][:, None, None])
        for layer, pair in self.prompts.items():
            padded = [F.pad(x[prompts_U], (0, 0, 0, P - x.shape[2])) for x in pair]
            names = f"prompt keys {layer}", f"prompt values {layer}"
            self.prompts[layer] = tuple(map(buffers.copy, names, padded))

    def _move_own(self, filled_S: torch.Tensor, num_own: int) -> None:
        for layer, (keys_UKPD, _) in self.prompts.items():
            shape = (len(filled_S), keys_UKPD.shape[1], self.T, keys_UKPD.shape[3])
            # Copied before the new buffers are made, which may be the same memory.
            tokens = [buffer[filled_S, :, :num_own] for buffer in self.own.get(layer, ())]
            names = f"own keys {layer}", f"own values {layer}"
            self.own[layer] = tuple(self.buffers.get(name, shape, self.dtype) for name in names)
            for buffer, values in zip(self.own[layer], tokens, strict=False):
                buffer[:, :, :num_own] = values

    @property
    def shape_key(self) -> tuple:
        """Equal keys mean equal shapes and addresses."""
        is_grid, is_sampled = self.to_cell_S is None, "uniforms" in self.state
        return self.num_slots, self.U, self.J, self.P, self.T, self.dtype, is_grid, is_sampled

    def end_at_stops(self, stops: Stops, num_searched: int, num_drawn: int) -> None:
        """End each row at its first stop string among the tokens from number ``num_searched`` on, and drop what it has
        drawn behind it.
        """
        state = {name: values[: self.num_rows] for name, values in self.state.items()}
        first = max(num_searched + 1 - stops.span, 0)
        lengths, tokens = state["length"].tolist(), state["tokens"][:, first:num_drawn].tolist()
        ends = {}
        for slot, (length, row) in enumerate(zip(lengths, tokens, strict=True)):
            if length > num_searched and (end := stops.first_end(row[: length - first], num_searched - first)):
                ends[slot] = first + end
        if ends:
            slots, end_N = (torch.tensor(list(x), device=self.buffers.device) for x in (ends, ends.values()))
            state["length"][slots] = end_N
            state["finished"][slots], state["live"][slots] = True, False

    def num_drawn(self) -> int:
        """Tokens drawn so far, for live, ended and dropped rows."""
        return self.drawn_by_dropped + int(self.state["length"][: self.num_rows].sum())

    def copy_results(self, decoded: Decoded) -> None:
        """Copy the tokens of all rows in the slots to the CPU."""
        names = ("row", "tokens", "logprobs", "length", "finished")
        state = {name: self.state[name][: self.num_rows].cpu() for name in names}
        for slot, row in enumerate(state["row"].tolist()):
            decoded.tokens_RT[row], decoded.logprobs_RT[row] = state["tokens"][slot], state["logprobs"][slot]
            decoded.lengths[row], decoded.finished[row] = int(state["length"][slot]), bool(state["finished"][slot])


class StaticCache(ForkedCache):
    """A :class:`ForkedCache` over the static buffers. Every step attends to ``width`` own tokens, of which later ones
    are masked.
    """

    def __init__(self, slots: Slots, width: int):
        self.prompts, self.prompt_bias, self.dtype = dict(slots.prompts), slots.prompt_bias, slots.dtype
        self.own = {layer: tuple(buffer[:, :, :width] for buffer in pair) for layer, pair in slots.own.items()}
        self.grid, self.num_cells = (slots.U, slots.J), slots.U * slots.J + 1  # one more, for padding queries
        self.to_cell_R, self.from_cell_R = slots.to_cell_S, slots.from_cell_S
        self.use_cascade = False
        self.index_C = torch.arange(width, device=slots.prompt_bias.device)

    def set_position(self, next_1: torch.Tensor) -> None:
        """The step computes the token before number ``next``: its keys and values go to index ``next - 1``, and those
        behind are masked.
        """
        self.index_1 = next_1 - 1
        bias_C = torch.zeros_like(self.index_C, dtype=torch.float32).masked_fill_(self.index_C >= next_1, float("-inf"))
        self.bias = torch.cat([self.prompt_bias, bias_C.expand(len(self.prompt_bias), 1, 1, -1)], dim=-1)

    def _weights(self, from_prompt: torch.Tensor, from_own: torch.Tensor, scaling: float) -> torch.Tensor:
        scores = torch.cat([from_prompt, from_own], dim=-1)
        return torch.add(self.bias, scores, alpha=scaling).softmax(dim=-1).to(self.dtype)

    def begin_token(self) -> None:
        """Nothing to do: :meth:`set_position` counts on the device."""

    def _store_token(self, layer: int, k_RK1D: torch.Tensor, v_RK1D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.own[layer]
        return keys.index_copy_(2, self.index_1, k_RK1D), values.index_copy_(2, self.index_1, v_RK1D)
