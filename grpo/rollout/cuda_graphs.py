"""Decode steps on CUDA, captured once and replayed.

A step of a small model is hundreds of kernels that run for a few microseconds each: launching them takes longer than running them, and a
look at every token for rows that have ended makes the device wait for the host. Here everything that a step reads and writes lies at
fixed addresses in one of few shapes: a step, its sampling included, is captured in a CUDA graph the first time a shape comes, and is one
launch from then on. The host looks every ``LOOK_EVERY`` tokens which rows have ended, and moves those that are left to the next smaller
shape.

Tokens are those of the loop in :mod:`grpo.rollout`: same uniform numbers, same arithmetic; places that hold nothing get weight 0.
What cannot be captured is decoded by that loop, and the run says so once.

**No GPU has been at hand: the capture itself has never run.** On CPU, tests run the same steps one by one.

Shapes: ``S`` slots (rows, and as many empty ones as the shape has more), ``T`` most tokens of a completion, ``C`` own places looked at,
``U`` prompts, ``J`` most rows of one prompt, ``P`` longest prompt, ``K`` key heads, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from grpo.attention.forked import ForkedCache
from grpo.rollout.draw import Sampling, draw
from grpo.rollout.llama_decoder import Decoder

LOOK_EVERY = 8
"""Tokens between two looks at which rows have ended."""
WIDTH = 256
"""Own places that are looked at grow by so many."""
PROMPT_WIDTH = 256
MOST_GRAPHS = 256
KEPT_SHARE = 0.1
"""Memory and graphs outlive a rollout if they take no more of the device than this; else the update has it, and they are made again."""


def shape_for(number: int) -> int:
    """The next power of two: few shapes, since each is captured anew. (Which grid is best has not been measured.)"""
    return 1 << max(number - 1, 0).bit_length()


class Graphs:
    """The captured steps of one model, and the memory that they work in."""

    def __init__(
        self,
        decoder: Decoder,
        head: Callable[[torch.Tensor], torch.Tensor],
        eos_ids: tuple[int, ...],
        device: torch.device,
        *,
        capture: bool = True,
    ):
        """
        Args:
            decoder, head: hidden states of a token per row, and their logits; what they read must stay at its address.
            capture: False runs the same steps without a graph, on any device.
        """
        self.decoder, self.head, self.device, self.capture = decoder, head, device, capture
        self.eos_E = torch.tensor(eos_ids, device=device)
        self.checked = False
        """Whether what it gives has been compared with the loop it stands for."""
        self._memory: dict[str, torch.Tensor] = {}
        self._graphs: dict[tuple, tuple[Callable[[], None], Callable[[], None]]] = {}
        """How a step is run, and the step itself: what it holds must live as long as its graph."""
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if capture else []
        """To warm up on, and to capture on."""

    def decode(
        self,
        cache: ForkedCache,
        positions_R: torch.Tensor,
        logits_RV: torch.Tensor,
        uniforms_RT: torch.Tensor | None,
        sampling: Sampling,
        on_tokens: Callable[[int], None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, list[int], list[bool]]:
        """Decode every row to its end.

        Args:
            cache: of the prompts, forked, without own tokens.
            positions_R: of each row's first token.
            logits_RV: of each row's first token.
            uniforms_RT: the numbers that tokens are drawn with; None: greedy.

        Returns:
            Tokens and log-probs ``[R, T]`` on the CPU, tokens of each row, and whether each has ended by itself.
        """
        R, T = len(logits_RV), sampling.max_completion_length
        state = {
            "row": torch.arange(R, device=self.device),
            "prompt": cache.prompt_R,
            "token": torch.zeros(R, dtype=torch.long, device=self.device),
            "position": positions_R,
            "live": torch.ones(R, dtype=torch.bool, device=self.device),
            "finished": torch.zeros(R, dtype=torch.bool, device=self.device),
            "length": torch.zeros(R, dtype=torch.long, device=self.device),
            "tokens": torch.zeros(R, T, dtype=torch.long, device=self.device),
            "logprobs": torch.zeros(R, T, device=self.device),
        }
        if uniforms_RT is not None:
            state["uniforms"] = uniforms_RT
        wave = _Wave(self, state, cache, T)
        _take(wave.state, wave.next_1, logits_RV, sampling, self.eos_E)
        tokens_RT, logprobs_RT = torch.zeros(R, T, dtype=torch.long), torch.zeros(R, T)
        lengths, finished, drawn = [0] * R, [False] * R, 0

        def bring_home() -> None:
            home = {name: wave.state[name].cpu() for name in ("row", "tokens", "logprobs", "length", "finished")}
            for slot, row in enumerate(home["row"].tolist()[: wave.num_rows]):
                tokens_RT[row], logprobs_RT[row] = home["tokens"][slot], home["logprobs"][slot]
                lengths[row], finished[row] = int(home["length"][slot]), bool(home["finished"][slot])

        t = 1  # tokens drawn for each row that has not ended
        while True:
            live = wave.state["live"][: wave.num_rows].nonzero().flatten()
            if on_tokens is not None:
                so_far = wave.drawn_before + int(wave.state["length"][: wave.num_rows].sum())
                on_tokens(so_far - drawn)
                drawn = so_far
            if len(live) == 0 or t == T:
                break
            if shape_for(len(live)) < wave.num_slots:
                bring_home()
                wave.keep(live, t - 1)
            count = min(LOOK_EVERY, T - t)
            step = None  # no graph outlives the others when they are forgotten
            step = self._step(wave, sampling, min(-(-(t + count - 1) // WIDTH) * WIDTH, T))
            for _ in range(count):
                step()
            t += count
        bring_home()
        return tokens_RT, logprobs_RT, lengths, finished

    def let_go(self) -> None:
        """Give the memory back; graphs are captured again when they are needed."""
        self._forget()
        self._memory.clear()

    def tidy(self) -> None:
        """After a rollout: the update may need the memory."""
        size = sum(flat.numel() * flat.element_size() for flat in self._memory.values())
        is_on_gpu = self.device.type == "cuda"
        if is_on_gpu and size > KEPT_SHARE * torch.cuda.get_device_properties(self.device).total_memory:
            self.let_go()

    def _forget(self) -> None:
        """All captured steps together: they share their memory, and one that goes alone may take what others use."""
        self._graphs.clear()
        if self.capture:
            self._pool = torch.cuda.graph_pool_handle()

    def place(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """A copy of the values at the name's own address."""
        return self.room(name, values.shape, values.dtype).copy_(values)

    def room(self, name: str, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory at the name's own address. Where it must grow it moves, and what has been captured is forgotten."""
        size = torch.Size(shape).numel()
        flat = self._memory.get(name)
        if flat is None or len(flat) < size or flat.dtype != dtype:
            self._memory[name] = flat = torch.zeros(size, dtype=dtype, device=self.device)
            self._forget()
        return flat[:size].view(shape)

    def _step(self, wave: _Wave, sampling: Sampling, width: int) -> Callable[[], None]:
        """The wave's next step, looking at so many own places."""
        key = (*wave.key, width, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        if key in self._graphs:
            return self._graphs[key][0]
        if len(self._graphs) >= MOST_GRAPHS:
            self._forget()
        state, next_1, cache = wave.state, wave.next_1, wave.cache_of(width)

        def step() -> None:
            cache.look_at(next_1)
            hidden_SH = self.decoder(state["token"], state["position"], cache)
            state["position"].add_(1)
            _take(state, next_1, self.head(hidden_SH), sampling, self.eos_E)

        run = self._captured(step, wave) if self.capture else step
        self._graphs[key] = run, step
        return run

    def _captured(self, step: Callable[[], None], wave: _Wave) -> Callable[[], None]:
        """One launch for the whole step. Libraries set themselves up in a first run, whose traces are wiped away."""
        counted = [wave.next_1, *(wave.state[n] for n in ("token", "position", "live", "finished", "length"))]
        before = [tensor.clone() for tensor in counted]
        here, (aside, capturing) = torch.cuda.current_stream(self.device), self._streams
        aside.wait_stream(here)
        mode = torch.cuda.get_sync_debug_mode()
        try:
            torch.cuda.set_sync_debug_mode(
                "error"
            )  # what waits for the device cannot be captured, and is easier to leave here
            with torch.cuda.stream(aside):
                step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        here.wait_stream(aside)
        for tensor, value in zip(counted, before, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        try:
            # NCCL and savers have threads of their own, which may go on.
            with torch.cuda.graph(graph, pool=self._pool, stream=capturing, capture_error_mode="thread_local"):
                step()
        finally:
            torch.cuda.set_stream(here)  # a capture that fails leaves its own
        return graph.replay


def _take(
    state: dict[str, torch.Tensor], next_1: torch.Tensor, logits_SV: torch.Tensor, sampling: Sampling, eos_E
) -> None:
    """Draw token number ``next`` of every slot and note it, in place."""
    u_S = state["uniforms"].index_select(1, next_1).squeeze(1) if "uniforms" in state else None
    token_S, logprob_S = draw(logits_SV, u_S, sampling)
    state["tokens"].index_copy_(1, next_1, token_S[:, None])
    state["logprobs"].index_copy_(1, next_1, logprob_S[:, None])
    state["length"].add_(state["live"])
    ended_S = (token_S[:, None] == eos_E).any(dim=1) & state["live"]
    state["finished"].logical_or_(ended_S)
    state["live"].logical_and_(~ended_S)
    state["token"].copy_(token_S)
    next_1.add_(1)


class _Wave:
    """Rows in slots, their prompts, and where both lie."""

    def __init__(self, graphs: Graphs, state: dict[str, torch.Tensor], cache: ForkedCache, T: int):
        self.graphs, self.T = graphs, T
        self.dtype = cache.dtype
        self.next_1 = graphs.place("next", torch.zeros(1, dtype=torch.long, device=graphs.device))
        self.drawn_before = 0
        """Tokens of the rows that have left."""
        P = -(-int(cache.prompt_lengths_U.max()) // PROMPT_WIDTH) * PROMPT_WIDTH
        some = next(iter(cache.prompts.values()))[0]
        self.K, self.D, self.P = some.shape[1], some.shape[3], P
        self.prompts, self.lengths_U = cache.prompts, cache.prompt_lengths_U
        self.own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.state = state
        self.num_rows = self.num_slots = len(state["row"])
        self.keep(torch.arange(self.num_rows, device=graphs.device), 0)

    def keep(self, slots: torch.Tensor, own: int) -> None:
        """Go on with these slots, of which each has so many own tokens in the cache, in the smallest shape that holds them."""
        graphs, rows = self.graphs, len(slots)
        self.drawn_before += int(self.state["length"][: self.num_rows].sum()) - int(self.state["length"][slots].sum())
        S = rows if rows == self.num_slots else shape_for(rows)  # all of them at first: memory is bounded for these
        filled_S = torch.cat([slots, slots[:1].expand(S - rows)])  # an empty slot computes what the first does
        prompts_left, renumbered = self.state["prompt"][slots].unique(return_inverse=True)
        counts_U = renumbered.bincount()
        # Of the prompts and their rows as many as at first, or as there are slots: the shape follows from S alone.
        U, J = (min(self.U, S), min(self.J, S)) if self.own else (len(prompts_left), int(counts_U.max()))
        first_U = counts_U.cumsum(0) - counts_U
        number_R = torch.arange(rows, device=graphs.device) - first_U[renumbered]
        place_S = torch.full((S,), U * J, device=graphs.device)
        place_S[:rows] = renumbered * J + number_R
        self.place_S = graphs.place("place", place_S)
        self.from_S = graphs.place("from", place_S.clamp(max=U * J - 1))
        prompts_U = torch.cat([prompts_left, prompts_left[:1].expand(U - len(prompts_left))])
        self.state["prompt"] = torch.zeros_like(self.state["prompt"]).index_copy_(0, slots, renumbered)
        self.state = {name: graphs.place(name, values[filled_S]) for name, values in self.state.items()}
        self.lengths_U = self.lengths_U[prompts_U]
        hidden_UP = torch.arange(self.P, device=graphs.device) >= self.lengths_U[:, None]
        self.hidden_U11P = graphs.place("hidden", hidden_UP[:, None, None])
        for layer, pair in self.prompts.items():
            chosen = (F.pad(x[prompts_U], (0, 0, 0, self.P - x.shape[2])) for x in pair)
            self.prompts[layer] = tuple(
                graphs.place(f"prompt {kind} {layer}", x) for kind, x in zip("kv", chosen, strict=True)
            )
            old = self.own.get(layer)
            taken = None if old is None else [buffer[filled_S, :, :own] for buffer in old]
            shape = (S, self.K, self.T, self.D)
            self.own[layer] = tuple(graphs.room(f"own {kind} {layer}", shape, self.dtype) for kind in "kv")
            for buffer, values in zip(self.own[layer], taken or (), strict=False):
                buffer[:, :, :own] = values
        self.num_rows, self.num_slots, self.U, self.J = rows, S, U, J

    @property
    def key(self) -> tuple:
        """Equal keys: the same addresses and shapes."""
        return self.num_slots, self.U, self.J, self.P, self.T, self.dtype, "uniforms" in self.state

    def cache_of(self, width: int) -> _FixedCache:
        return _FixedCache(self, width)


class _FixedCache(ForkedCache):
    """A :class:`ForkedCache` whose rows have room for ``C`` own tokens, and are looked at whole."""

    def __init__(self, wave: _Wave, width: int):
        self.prompts, self.hidden_U11P, self.dtype = dict(wave.prompts), wave.hidden_U11P, wave.dtype
        self.own = {layer: tuple(buffer[:, :, :width] for buffer in pair) for layer, pair in wave.own.items()}
        self.shape, self.places = (wave.U, wave.J), wave.U * wave.J + 1  # empty slots ask at a place of their own
        self.place_R, self.from_R = wave.place_S, wave.from_S
        self.in_two_parts, self.length = False, 0
        self.places_C = torch.arange(width, device=wave.place_S.device)

    def look_at(self, next_1: torch.Tensor) -> None:
        """The token that is computed now comes before number ``next``: it lies at ``next - 1``, and nothing behind."""
        self.now_1, self.hidden_own = next_1 - 1, self.places_C >= next_1

    def _append(self, layer: int, k_RK1D: torch.Tensor, v_RK1D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.own[layer]
        return keys.index_copy_(2, self.now_1, k_RK1D), values.index_copy_(2, self.now_1, v_RK1D)
