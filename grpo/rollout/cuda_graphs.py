"""Decode steps as CUDA graphs: captured once per shape, then replayed with one launch.

Launching the hundreds of small kernels of a decode step takes longer than running them, and reading at every token which rows have ended
makes the device wait for the host. Here all that a step reads and writes is in static buffers of a few padded shapes. The first step of a
shape, sampling included, is captured; later ones replay it. Every ``SYNC_EVERY`` tokens the host moves the live rows to a smaller shape.
The tokens are those of :mod:`grpo.rollout.decode_loop`, which decodes what cannot be captured.

**The capture has never run on a GPU**, since none was available. On CPU, tests run the same steps without capturing them.

Shapes: ``S`` slots (rows, then padding), ``R`` rows, ``T`` most tokens of a completion, ``C`` own tokens that a step attends to, ``U``
prompts, ``J`` most rows of one prompt, ``P`` padded prompt length, ``K`` key heads, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from grpo.attention import ForkedCache
from grpo.rollout.decode_loop import Decoded
from grpo.rollout.draw import SamplingParams, draw
from grpo.rollout.llama_decoder import LlamaDecoder
from grpo.rollout.prefill import ForkedCacheDecoder

SYNC_EVERY = 8
"""Decode steps between two reads of which rows have ended."""
OWN_BUCKET = 256
"""The number of own tokens that a step attends to is rounded up to a multiple of this; each multiple is a shape."""
PROMPT_BUCKET = 256
"""Prompts are padded to a multiple of this number of tokens."""
MAX_GRAPHS = 256
MAX_KEPT_SHARE = 0.1
"""Buffers and graphs are freed after a rollout if the buffers take more than this share of device memory: the update may need it."""
State = dict[str, torch.Tensor]
"""The state of each slot, by name: its row, its prompt, the tokens drawn so far, ..."""


def padded_rows(number: int) -> int:
    """The next power of two, so that there are few shapes to capture. (No other grid has been measured.)"""
    return 1 << max(number - 1, 0).bit_length()


class CUDAGraphRunner:
    """The captured decode steps of one model, and the static buffers that they read and write.

    The weights of ``decoder`` and ``head`` must keep their addresses. ``capture=False`` runs the same steps without graphs, on any device.
    """

    def __init__(self, decoder: LlamaDecoder, head, eos_ids: tuple[int, ...], device: torch.device, *, capture=True):
        self.decoder, self.head, self.device, self.capture = decoder, head, device, capture
        self.eos_E = torch.tensor(eos_ids, device=device)
        self.is_verified = False
        """True once the graphs' tokens have agreed with those of the decode loop."""
        self._buffers: dict[str, torch.Tensor] = {}
        self._steps: dict[tuple, tuple[Callable[[], None], Callable[[], None]]] = {}
        """By shape: the replay of the graph, and the captured function, whose tensors must live as long as the graph."""
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._warmup_stream = torch.cuda.Stream(device) if capture else None
        self._capture_stream = torch.cuda.Stream(device) if capture else None

    def decode(self, decoder: ForkedCacheDecoder, logits_RV, uniforms_RT, sampling, on_tokens) -> Decoded:
        """Decode every row to its end, from the logits of its first token; arguments as of :class:`~grpo.rollout.decode_loop.DecodeLoop`.

        ``decoder`` comes from the prefill, without own tokens.
        """
        cache, R, T = decoder.cache, len(logits_RV), sampling.max_completion_length
        state = {
            "row": torch.arange(R, device=self.device),
            "prompt": cache.prompt_R,
            "token": torch.zeros(R, dtype=torch.long, device=self.device),
            "position": decoder.positions_R,
            "live": torch.ones(R, dtype=torch.bool, device=self.device),
            "finished": torch.zeros(R, dtype=torch.bool, device=self.device),
            "length": torch.zeros(R, dtype=torch.long, device=self.device),
            "tokens": torch.zeros(R, T, dtype=torch.long, device=self.device),
            "logprobs": torch.zeros(R, T, device=self.device),
        }
        if uniforms_RT is not None:
            state["uniforms"] = uniforms_RT
        slots = _Slots(self, state, cache, T)
        _draw_into(slots.state, slots.next_1, logits_RV, sampling, self.eos_E)
        decoded = Decoded(torch.zeros(R, T, dtype=torch.long), torch.zeros(R, T), [0] * R, [False] * R)
        num_drawn = 0
        t = 1  # tokens drawn so far for each live row
        while True:
            live = slots.state["live"][: slots.num_rows].nonzero().flatten()
            if on_tokens is not None:
                num_before, num_drawn = num_drawn, slots.num_drawn()
                on_tokens(num_drawn - num_before)
            if len(live) == 0 or t == T:
                break
            if padded_rows(len(live)) < slots.num_slots:
                slots.copy_results(decoded)
                slots.keep(live, t - 1)
            count = min(SYNC_EVERY, T - t)
            step = None  # a graph that is still referenced would outlive its memory pool, if the next line drops all graphs
            step = self._step_for(slots, sampling, min(-(-(t + count - 1) // OWN_BUCKET) * OWN_BUCKET, T))
            for _ in range(count):
                step()
            t += count
        slots.copy_results(decoded)
        return decoded

    def release(self) -> None:
        """Free buffers and graphs; the next rollout allocates and captures them again."""
        self._drop_graphs()
        self._buffers.clear()

    def release_if_large(self) -> None:
        """After a rollout: free the buffers if the update may need their memory."""
        is_on_gpu, size = self.device.type == "cuda", sum(flat.nbytes for flat in self._buffers.values())
        if is_on_gpu and size > MAX_KEPT_SHARE * torch.cuda.get_device_properties(self.device).total_memory:
            self.release()

    def _drop_graphs(self) -> None:
        """Drop all graphs. They share one memory pool: a graph dropped alone could free memory that others use."""
        self._steps.clear()
        if self.capture:
            self._pool = torch.cuda.graph_pool_handle()

    def copy_to_static(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Copy values into the static buffer of this name."""
        return self.static_buffer(name, values.shape, values.dtype).copy_(values)

    def static_buffer(self, name: str, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of this name, at the same address each time. If it must grow, its address changes, and all graphs are dropped."""
        size = torch.Size(shape).numel()
        flat = self._buffers.get(name)
        if flat is None or len(flat) < size or flat.dtype != dtype:
            self._buffers[name] = flat = torch.zeros(size, dtype=dtype, device=self.device)
            self._drop_graphs()
        return flat[:size].view(shape)

    def _step_for(self, slots: _Slots, sampling: SamplingParams, width: int) -> Callable[[], None]:
        """One decode step over the slots that attends to ``width`` own tokens; captured, if this shape is new."""
        key = (*slots.shape_key, width, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        if key in self._steps:
            return self._steps[key][0]
        if len(self._steps) >= MAX_GRAPHS:
            self._drop_graphs()
        state, next_1, cache = slots.state, slots.next_1, _StaticCache(slots, width)

        def step() -> None:
            cache.set_position(next_1)
            hidden_SH = self.decoder(state["token"], state["position"], cache)
            state["position"].add_(1)
            _draw_into(state, next_1, self.head(hidden_SH), sampling, self.eos_E)

        run = self._captured(step, slots) if self.capture else step
        self._steps[key] = run, step
        return run

    def _captured(self, step: Callable[[], None], slots: _Slots) -> Callable[[], None]:
        """Capture a step in a graph, after a warm-up run in which libraries initialise; returns its replay.

        The state before the warm-up is restored; the first replay overwrites its keys and values.
        """
        changed = [slots.next_1, *(slots.state[n] for n in ("token", "position", "live", "finished", "length"))]
        before = [tensor.clone() for tensor in changed]
        current = torch.cuda.current_stream(self.device)
        self._warmup_stream.wait_stream(current)
        mode = torch.cuda.get_sync_debug_mode()
        try:
            # A host sync cannot be captured; an error in the warm-up is easier to recover from than one in the capture.
            torch.cuda.set_sync_debug_mode("error")
            with torch.cuda.stream(self._warmup_stream):
                step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        current.wait_stream(self._warmup_stream)
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        try:
            # "thread_local": the threads of NCCL and of the checkpoint writer may call CUDA during the capture.
            options = dict(pool=self._pool, stream=self._capture_stream, capture_error_mode="thread_local")
            with torch.cuda.graph(graph, **options):
                step()
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own stream set
        return graph.replay


def _draw_into(state: State, next_1: torch.Tensor, logits_SV: torch.Tensor, sampling: SamplingParams, eos_E) -> None:
    """Draw token number ``next`` of every slot and record it in the static state, without a host sync."""
    u_S = state["uniforms"].index_select(1, next_1).squeeze(1) if "uniforms" in state else None
    token_S, logprob_S = draw(logits_SV, u_S, sampling)
    state["tokens"].index_copy_(1, next_1, token_S[:, None])
    state["logprobs"].index_copy_(1, next_1, logprob_S[:, None])
    state["length"].add_(state["live"])
    finished_S = (token_S[:, None] == eos_E).any(dim=1) & state["live"]
    state["finished"].logical_or_(finished_S)
    state["live"].logical_and_(~finished_S)
    state["token"].copy_(token_S)
    next_1.add_(1)


class _Slots:
    """The batch in static buffers: rows, padded to a number of slots, with their state, prompts, keys and values."""

    def __init__(self, runner: CUDAGraphRunner, state: State, cache: ForkedCache, T: int):
        self.runner, self.state, self.T, self.dtype = runner, state, T, cache.dtype
        self.next_1 = runner.copy_to_static("next", torch.zeros(1, dtype=torch.long, device=runner.device))
        """Index of the next token, the same for all rows."""
        self.drawn_by_dropped = 0
        """Tokens of the rows that have been dropped."""
        self.P = -(-int(cache.prompt_lengths_U.max()) // PROMPT_BUCKET) * PROMPT_BUCKET
        self.prompts, self.lengths_U = cache.prompts, cache.prompt_lengths_U
        self.own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.num_rows = self.num_slots = len(state["row"])
        self.keep(torch.arange(self.num_rows, device=runner.device), 0)

    def keep(self, slots: torch.Tensor, num_own: int) -> None:
        """Keep only the rows in ``slots``, in the smallest shape that holds them; each has ``num_own`` own tokens in the cache."""
        runner, R = self.runner, len(slots)
        self.drawn_by_dropped += int(self.state["length"][: self.num_rows].sum() - self.state["length"][slots].sum())
        # The first shape has exactly as many slots as rows: memory was bounded for these.
        S = R if self.num_slots == R else padded_rows(R)
        filled_S = torch.cat([slots, slots[:1].expand(S - R)])  # padding computes what the first row computes
        prompts_left, prompt_R = self.state["prompt"][slots].unique(return_inverse=True)
        counts_U = prompt_R.bincount()
        # U and J stay those of the first shape, or shrink to S, so that they follow from S alone.
        U, J = (min(self.U, S), min(self.J, S)) if self.own else (len(prompts_left), int(counts_U.max()))
        first_U = counts_U.cumsum(0) - counts_U
        number_R = torch.arange(R, device=runner.device) - first_U[prompt_R]
        cell_S = first_U.new_full((S,), U * J)  # padding queries go to one more cell, which is never read
        cell_S[:R] = prompt_R * J + number_R
        self.to_cell_S = runner.copy_to_static("to cell", cell_S)
        self.from_cell_S = runner.copy_to_static("from cell", cell_S.clamp(max=U * J - 1))
        self.state["prompt"] = torch.zeros_like(self.state["prompt"]).index_copy_(0, slots, prompt_R)
        self.state = {name: runner.copy_to_static(name, values[filled_S]) for name, values in self.state.items()}
        self._move_prompts(torch.cat([prompts_left, prompts_left[:1].expand(U - len(prompts_left))]))
        self._move_own(filled_S, num_own)
        self.num_rows, self.num_slots, self.U, self.J = R, S, U, J

    def _move_prompts(self, prompts_U: torch.Tensor) -> None:
        runner, P = self.runner, self.P
        self.lengths_U = self.lengths_U[prompts_U]
        padding_UP = torch.arange(P, device=runner.device) >= self.lengths_U[:, None]
        self.prompt_padding = runner.copy_to_static("prompt padding", padding_UP[:, None, None])
        for layer, pair in self.prompts.items():
            padded = [F.pad(x[prompts_U], (0, 0, 0, P - x.shape[2])) for x in pair]
            names = f"prompt keys {layer}", f"prompt values {layer}"
            self.prompts[layer] = tuple(map(runner.copy_to_static, names, padded))

    def _move_own(self, filled_S: torch.Tensor, num_own: int) -> None:
        for layer, (keys_UKPD, _) in self.prompts.items():
            shape = (len(filled_S), keys_UKPD.shape[1], self.T, keys_UKPD.shape[3])
            # Copied before the new buffers are made, which may be the same memory.
            tokens = [buffer[filled_S, :, :num_own] for buffer in self.own.get(layer, ())]
            names = f"own keys {layer}", f"own values {layer}"
            self.own[layer] = tuple(self.runner.static_buffer(name, shape, self.dtype) for name in names)
            for buffer, values in zip(self.own[layer], tokens, strict=False):
                buffer[:, :, :num_own] = values

    @property
    def shape_key(self) -> tuple:
        """Equal keys mean equal shapes and addresses."""
        return self.num_slots, self.U, self.J, self.P, self.T, self.dtype, "uniforms" in self.state

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


class _StaticCache(ForkedCache):
    """A :class:`ForkedCache` over the static buffers. Every step attends to ``width`` own tokens, of which later ones are masked."""

    def __init__(self, slots: _Slots, width: int):
        self.prompts, self.prompt_padding, self.dtype = dict(slots.prompts), slots.prompt_padding, slots.dtype
        self.own = {layer: tuple(buffer[:, :, :width] for buffer in pair) for layer, pair in slots.own.items()}
        self.grid, self.num_cells = (slots.U, slots.J), slots.U * slots.J + 1  # one more, for padding queries
        self.to_cell_R, self.from_cell_R = slots.to_cell_S, slots.from_cell_S
        self.use_cascade = False
        self.index_C = torch.arange(width, device=slots.to_cell_S.device)

    def set_position(self, next_1: torch.Tensor) -> None:
        """The step computes the token before number ``next``: its keys and values go to index ``next - 1``, and those behind are masked."""
        self.index_1, self.own_padding = next_1 - 1, self.index_C >= next_1

    def begin_token(self) -> None:
        """Nothing to do: :meth:`set_position` counts on the device."""

    def _store_token(self, layer: int, k_RK1D: torch.Tensor, v_RK1D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.own[layer]
        return keys.index_copy_(2, self.index_1, k_RK1D), values.index_copy_(2, self.index_1, v_RK1D)
