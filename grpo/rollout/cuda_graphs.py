"""Decode steps as CUDA graphs: captured once per shape, then replayed with one launch.

Launching the hundreds of small kernels of a decode step takes longer than running them, and reading at every token
which rows have ended makes the device wait for the host. Here all that a step reads and writes is in static buffers of
a few padded shapes. The first step of a shape, sampling included, is captured; later ones replay it. Every
``SYNC_EVERY`` tokens the host moves the live rows to a smaller shape. The tokens are those of
:mod:`grpo.rollout.decode_loop`, which decodes what cannot be captured.

**No GPU has run this**, since none was available. Tests capture and replay the steps on an emulated CUDA device
(``tests/cuda/``), and run them on the CPU without graphs.

Shapes: ``S`` slots (rows, then padding), ``R`` rows, ``T`` most tokens of a completion, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from grpo.rollout.decode_loop import Decoded
from grpo.rollout.draw import SamplingParams, draw
from grpo.rollout.llama_decoder import LlamaDecoder
from grpo.rollout.prefill import ForkedCacheDecoder
from grpo.rollout.static_batch import Slots, State, StaticBuffers, StaticCache, padded_rows
from grpo.rollout.stops import Stops

SYNC_EVERY = 8
"""Decode steps between two reads of which rows have ended."""
OWN_BUCKET = 256
"""The number of own tokens that a step attends to is rounded up to a multiple of this; each multiple is a shape."""
MAX_GRAPHS = 256


class CUDAGraphRunner:
    """The captured decode steps of one model, and the static buffers that they read and write.

    The weights of ``decoder`` and ``head`` must keep their addresses. ``capture=False`` runs the same steps without
    graphs, on any device.
    """

    def __init__(self, decoder: LlamaDecoder, head, eos_ids: tuple[int, ...], device, *, capture=True):
        self.decoder, self.head, self.device, self.capture = decoder, head, device, capture
        self.eos_ids = eos_ids
        self.verified: set[bool] = set()
        """The kinds of sampling (whether it is greedy) for which the graphs have agreed with the decode loop."""
        self._buffers = StaticBuffers(device, self._drop_graphs)
        self._steps: dict[tuple, tuple[Callable[[], None], Callable[[], None]]] = {}
        """By shape: the replay of the graph, and the captured function, whose tensors must live as long as the
        graph.
        """
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._warmup_stream = torch.cuda.Stream(device) if capture else None
        self._capture_stream = torch.cuda.Stream(device) if capture else None

    def decode(self, decoder: ForkedCacheDecoder, logits_RV, uniforms_RT, sampling, stops: Stops, on_tokens) -> Decoded:
        """Decode every row to its end, from the logits of its first token; arguments as of
        :class:`~grpo.rollout.decode_loop.DecodeLoop`.

        ``decoder`` comes from the prefill, without own tokens. Stop strings are searched for when the host reads which
        rows have ended; what a row has drawn behind one is dropped.
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
        slots = Slots(self._buffers, state, cache, T)
        eos_E = self._eos(stops.ids)
        _draw_into(slots.state, slots.next_1, logits_RV, sampling, eos_E)
        decoded = Decoded(torch.zeros(R, T, dtype=torch.long), torch.zeros(R, T), [0] * R, [False] * R)
        num_drawn = 0
        num_searched, t = 0, 1  # tokens of each live row that have been searched for stop strings, and that are drawn
        while True:
            if stops.strings:
                slots.end_at_stops(stops, num_searched, t)
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
            # A graph that is still referenced would outlive its memory pool, if the next line drops all graphs.
            step = None
            step = self._step_for(slots, sampling, stops.ids, min(-(-(t + count - 1) // OWN_BUCKET) * OWN_BUCKET, T))
            for _ in range(count):
                step()
            num_searched, t = t, t + count
        slots.copy_results(decoded)
        return decoded

    def _eos(self, stop_ids: list[int]) -> torch.Tensor:
        return torch.tensor([*self.eos_ids, *stop_ids], device=self.device)

    def release(self) -> None:
        """Free buffers and graphs; the next rollout allocates and captures them again."""
        self._drop_graphs()
        self._buffers.flat.clear()

    def _drop_graphs(self) -> None:
        """Drop all graphs. They share one memory pool: a graph dropped alone could free memory that others use."""
        self._steps.clear()
        if self.capture:
            self._pool = torch.cuda.graph_pool_handle()

    def _step_for(self, slots: Slots, sampling: SamplingParams, stop_ids: list[int], width: int) -> Callable[[], None]:
        """One decode step over the slots that attends to ``width`` own tokens; captured, if this shape is new."""
        settings = sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p
        key = (*slots.shape_key, width, tuple(stop_ids), *settings)
        if key in self._steps:
            return self._steps[key][0]
        if len(self._steps) >= MAX_GRAPHS:
            self._drop_graphs()
        state, next_1, eos_E = slots.state, slots.next_1, self._eos(stop_ids)
        cache = StaticCache(slots, width)

        def step() -> None:
            cache.set_position(next_1)
            hidden_SH = self.decoder(state["token"], state["position"], cache)
            state["position"].add_(1)
            _draw_into(state, next_1, self.head(hidden_SH), sampling, eos_E)

        run = self._captured(step, slots) if self.capture else step
        self._steps[key] = run, step
        return run

    def _captured(self, step: Callable[[], None], slots: Slots) -> Callable[[], None]:
        """Capture a step in a graph, after two warm-up runs; returns its replay.

        The state before each run is restored; the first replay overwrites its keys and values.
        """
        changed = [slots.next_1, *(slots.state[n] for n in ("token", "position", "live", "finished", "length"))]
        before = [tensor.clone() for tensor in changed]
        current = torch.cuda.current_stream(self.device)
        self._warmup_stream.wait_stream(current)
        mode = torch.cuda.get_sync_debug_mode()
        # A host sync cannot be captured; an error in the warm-up is easier to recover from than one in the capture. In
        # the first run libraries and the compiler initialise, which may wait for the device.
        for allowed in (mode, "error"):
            try:
                torch.cuda.set_sync_debug_mode(allowed)
                with torch.cuda.stream(self._warmup_stream):
                    step()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
                current.wait_stream(self._warmup_stream)  # also after an error: the decode loop may get this memory
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
            self._warmup_stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": the threads of NCCL and of the checkpoint writer may call CUDA during the capture.
        options = dict(pool=self._pool, stream=self._capture_stream, capture_error_mode="thread_local")
        try:
            with torch.cuda.graph(graph, **options):
                step()
        except Exception as error:
            raise error.__context__ or error from None  # the error of the step says more than that of the capture's end
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
