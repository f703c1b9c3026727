"""A model of costs on a GPU, without a GPU: kernels, bytes and FLOPs of a decode step and of an update's micro-batch.

    python benchmarks/count.py                                  all shapes, to results/count.md and results/count.json
    python benchmarks/count.py --shapes qwen2.5-0.5b --top 20   one shape, and its costliest lines of code

**Nothing is measured.** The trainer's code runs on the CPU, on the paths that CUDA takes, with two and three layers of
a model's true widths, from which the true number of layers follows. Floating-point operations are counted, not
computed. An operation is one kernel, unless it makes a view; it reads its inputs and writes its outputs once. Attention
is one kernel forward and one backward (FlexAttention: two). In what torch.compile compiles, all operations between two
matrix products (or attention, sort, cumsum, scatter) are one kernel; what it computes from other tensors is stored only
for those and for the caller, else computed again, and inputs are read again after each reduction over a vocabulary. A
kernel takes the longest of its bytes at the GPU's bandwidth, its FLOPs at the rate of bf16, and 2 us.

Left out: the GPU's caches, kernels slower than their bound (products of few rows, operations of several kernels such as
sort), the host's time to launch the kernels of an update, the layout of a micro-batch, loss, gradient accumulation,
optimizer and communication.

Decode step: 24 prompts of 256 tokens x 8 rows, 256 own tokens, a cache of 512. Update: 4 prompts of 256 tokens x 8
completions of 64 to 512 tokens, forward and backward of the scorer under bf16 autocast.
"""

import math
import sys
from collections import Counter
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

from common import RESULTS, ROOT, about, parser, write

import torch  # isort: skip
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen2Config

from grpo.algorithm import logprobs
from grpo.attention import ForkedCache, forked, packed
from grpo.rollout import SamplingParams, cuda_graphs, llama_decoder, weights

try:
    from grpo.attention import fast_paths
except ImportError:  # a commit before them
    fast_paths = None
draw = sys.modules["grpo.rollout.draw"]
SHAPES = {  # layers, hidden size, width of the MLP, heads, heads of keys, vocabulary, whether the head is tied
    "qwen2.5-0.5b": (24, 896, 4864, 14, 2, 151936, True),
    "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 151936, True),
    "qwen2.5-7b": (28, 3584, 18944, 28, 4, 152064, False),
}
BYTES_PER_S, FLOPS_PER_S, FLOOR = {"H200": 4.8e12, "H100": 3.35e12}, 989e12, 2e-6
FREE = {"_unsafe_view", "scalar_tensor", "lift_fresh", "_local_scalar_dense"}
FREE |= {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
GATHERS, FILLS = {"index", "index_select", "gather", "embedding"}, {"copy_", "fill_", "zero_"}
SCATTERS = {"index_copy_", "index_put_", "_index_put_impl_", "scatter_", "scatter_add_"}
MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # the argument whose last size is summed over
NOT_FUSED = {
    *MATMULS, *SCATTERS, "sort", "topk", "searchsorted", "cumsum", "masked_scatter", "embedding_dense_backward",
}  # fmt: skip
NOT_FUSED |= {"attention", "attention_backward", "nonzero"}
REDUCTIONS = {"sum", "mean", "amax", "argmax", "any", "all", "max"}


class Count(TorchDispatchMode):
    """Counts the kernels of what runs inside of it, without computing floating-point operations.

    A *part* is what an operation reads or writes of a storage: ``(version of it, view, bytes, bytes of the storage)``.
    """

    def __init__(self, bandwidth: float):
        super().__init__()
        self.bandwidth, self.kernels = bandwidth, []  # of each kernel: line of code, [1, bytes, FLOPs, seconds]
        self.counts = self.computes = self.is_eager = False
        self.region, self.kept = None, []  # operations of the compiled function that runs; storages in use
        self.version, self.same = Counter(), {}  # of a storage: number of writes; the storage that it is a copy of
        self.made = {}  # the compiled operation that made a version of a storage

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func._schema.name.split("::")[1], kwargs or {}
        if name == "logsumexp":
            with self:
                return _logsumexp(*args)
        pairs = zip(func._schema.arguments, args, strict=False)
        mutated = [value for argument, value in pairs if argument.alias_info and argument.alias_info.is_write]
        if not mutated and any(output.alias_info for output in func._schema.returns):
            return func(*args, **kwargs)  # a view
        inputs = _tensors((args, kwargs))
        outputs = func(*args, **kwargs) if name in FREE else self.compute(func, args, kwargs, inputs, mutated)
        new = [] if mutated else _tensors(outputs)
        if name in FREE:
            self.begin(new if name != "_unsafe_view" else [])
        else:
            flops = 2 * new[0].numel() * args[MATMULS[name]].shape[-1] if name in MATMULS else 0
            self.add(name, inputs, new, mutated, flops)
        return outputs

    def compute(self, func, args, kwargs, inputs, mutated):
        """The outputs: real ones of integers, which the host reads, else memory that nothing is written to."""
        dtypes = {x.dtype for x in inputs} | {kwargs.get("dtype") or torch.long}
        is_small = not any(x.is_floating_point for x in dtypes) and all(x.numel() < 2**22 for x in inputs)
        if self.computes or is_small:
            return func(*args, **kwargs)
        if mutated:
            return mutated[0]

        def on_meta(x):
            if isinstance(x, torch.Tensor):
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            return torch.device("meta") if isinstance(x, torch.device) else x

        def unwritten(x):
            out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
            return out if x.is_floating_point() else out.zero_()

        return tree_map_only(torch.Tensor, unwritten, func(*tree_map(on_meta, args), **tree_map(on_meta, kwargs)))

    def key(self, x) -> tuple[int, int]:
        storage = self.same.get(x.untyped_storage()._cdata, x.untyped_storage()._cdata)
        return storage, self.version[storage]

    def begin(self, new) -> None:
        for x in new:  # its address may have been that of another
            self.same.pop(x.untyped_storage()._cdata, None)
            self.version[x.untyped_storage()._cdata] = 0
            self.made.pop(self.key(x), None)

    def part(self, x, num_bytes=None):
        limit = x.untyped_storage().nbytes()
        if num_bytes is None:  # expanded sizes count once
            sizes = (n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
            num_bytes = min(math.prod(sizes) * x.element_size(), limit)
        return self.key(x), (x.storage_offset(), x.shape, x.stride()), num_bytes, limit

    def add(self, name, inputs, new, mutated=(), flops=0.0, read_bytes=None) -> None:
        """Count an operation, or note it as one of the compiled function that runs."""
        first = None  # bytes of the first input that are read or, in place, written; None: all
        if name in GATHERS:
            first = sum(x.nbytes for x in new)
        elif name in SCATTERS:
            first = max((x.nbytes for x in inputs[1:] if x.dtype == inputs[0].dtype), default=0)
        sizes = read_bytes or [first, *[None] * len(inputs)]
        skips_first = name in FILLS or (name in SCATTERS and "add" not in name)
        reads = [self.part(x, size) for x, size in zip(inputs, sizes, strict=False)][int(skips_first) :]
        self.version.update(self.key(x)[0] for x in mutated)
        self.begin(new)
        writes = [self.part(x, first if mutated else None) for x in (*mutated, *new)]
        place = f"{_line()} {name}"
        if self.region is None:
            return self.launch(place, _bytes(reads) + _bytes(writes), flops)
        self.kept += [x.untyped_storage() for x in (*inputs, *new)]
        kind = "alone" if self.is_eager or name in NOT_FUSED else "reduction" if name in REDUCTIONS else "pointwise"
        op = SimpleNamespace(name=name, place=place, kind=kind, reads=reads, writes=writes, flops=flops, run=None)
        if name == "_to_copy" and kind == "pointwise":  # the compiler casts a tensor once
            for other in self.region:
                if (other.name, other.kind, other.reads) == (name, kind, reads) and other.dtype == new[0].dtype:
                    self.same[new[0].untyped_storage()._cdata] = other.writes[0][0][0]
                    return None
        op.dtype = new[0].dtype if new else None
        largest = max((x.numel() for x in inputs), default=0)
        op.rereads = kind == "reduction" and largest >= 8192 * new[0].numel()
        before = [self.made[key] for key, *_ in reads if key in self.made]
        op.level = max((x.level + x.rereads for x in before if x.run is None), default=0)
        self.made |= {key: op for key, *_ in writes}
        self.region.append(op)
        return None

    def launch(self, place, num_bytes, flops=0.0) -> None:
        if self.counts:
            seconds = max(num_bytes / self.bandwidth, flops / FLOPS_PER_S, FLOOR)
            self.kernels.append((place, torch.tensor([1, num_bytes, flops, seconds], dtype=torch.float64)))

    def end_region(self, returned, place: str) -> None:
        """Count the kernels of a compiled function: one for all operations between two that are not fused."""
        ops, self.region = self.region, None
        read = {key for op in ops for key, *_ in op.reads}
        stored = {key for op in ops if op.kind == "alone" for key, *_ in op.reads} | {self.key(x) for x in returned}
        number = 0
        for op in ops:
            is_alone, keys = op.kind == "alone", {key for key, *_ in op.writes}
            number += is_alone
            op.run, number = (id(ops), number), number + is_alone
            is_outside = any((storage, 0) not in self.made for storage, _ in keys)
            op.is_stored = op.kind != "pointwise" or bool(keys & stored) or not keys <= read or is_outside
        for run in dict.fromkeys(op.run for op in ops if op.is_stored):
            roots, sources = [op for op in ops if op.run == run and op.is_stored], {}
            writes = [part for op in roots for part in op.writes]
            if roots[0].kind == "alone":
                self.launch(roots[0].place, _bytes(roots[0].reads) + _bytes(writes), roots[0].flops)
                continue
            for op in roots:
                self.find_sources(op, op, 1.0, sources, {})
            reads = [((key, level), view, *sizes) for (key, view, level), sizes in sources.items()]
            self.launch(f"{place}: {' + '.join(op.name for op in roots)}"[:100], _bytes(reads) + _bytes(writes))

    def find_sources(self, root, op, share, sources, seen) -> None:
        """Add to ``sources`` what is read from memory to compute, for ``root``, this share of an operation's output."""
        if seen.get(id(op), 0.0) >= share:
            return
        seen[id(op)] = share
        for key, view, size, limit in op.reads:
            maker = self.made.get(key)
            if maker is None or (maker.is_stored and maker.run != root.run):
                known = sources.get((key, view, root.level), (0, 0))[0]
                sources[key, view, root.level] = (max(known, size * share), limit)
            elif maker.kind == "pointwise":
                needed = size / max(sum(part[2] for part in maker.writes), 1)
                self.find_sources(root, maker, share * min(1.0, needed), sources, seen)


def _tensors(tree) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _bytes(parts) -> float:
    """Different views of one storage are added, up to its size."""
    sizes, limits = Counter(), {}
    for key, _, size, limit in {part[:2]: part for part in parts}.values():
        sizes[key] += size
        limits[key] = limit
    return sum(min(size, limits[key]) for key, size in sizes.items())


def _line() -> str:
    """The line of the trainer or of transformers that runs."""
    frame = sys._getframe(2)
    while frame:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT / "grpo")) or "/transformers/" in path:
            return f"{path.rsplit('/', 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward"


def _logsumexp(x, dim, keepdim=False):
    """The operations that CUDA launches for ``logsumexp``."""
    most = x.amax(dim, keepdim=True)
    most.masked_fill_(most.abs() == math.inf, 0)
    total = (x - most).exp_().sum(dim, keepdim=keepdim)
    return total.log_().add_(most if keepdim else most.squeeze(dim))


class Attention(torch.autograd.Function):
    """Attention as a whole, of so many FLOPs; ``factors``: FLOPs of each backward kernel relative to the forward's."""

    @staticmethod
    def forward(ctx, count, q, k, v, mask, flops, factors):
        out, log_z = _heads_last(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        inputs = [q, k, v] if mask is None else [q, k, v, mask]
        count.add("attention", inputs, [out, log_z], flops=flops)
        ctx.save_for_backward(*inputs, out, log_z)
        ctx.count, ctx.flops = count, [flops * factor for factor in factors]
        return out

    @staticmethod
    def backward(ctx, grad):
        grads = [_heads_last(x) for x in ctx.saved_tensors[:3]]
        groups = [grads] if len(ctx.flops) == 1 else [grads[:1], grads[1:]]
        for group, flops in zip(groups, ctx.flops, strict=True):
            ctx.count.add("attention_backward", [*ctx.saved_tensors, grad], group, flops=flops)
        return None, *grads, None, None, None


def _heads_last(x):
    """Empty, laid out as the kernels lay their outputs out."""
    return x.new_empty([x.shape[i] for i in (0, 2, 1, 3)]).transpose(1, 2)


class Mark(torch.autograd.Function):
    """The identity, which calls ``back`` with the gradients when the backward pass reaches it."""

    @staticmethod
    def forward(ctx, back, *tensors):
        ctx.back = back
        return tensors

    @staticmethod
    def backward(ctx, *grads):
        ctx.back(grads)
        return None, *grads


def patched(count: Count) -> ExitStack:
    """Inside the block the code takes CUDA's paths, and some kernels are counted as a whole."""

    def sdpa(q, k, v, attn_mask=None, is_causal=False, scale=None, **_):
        flops = 4.0 * q.numel() * k.shape[2] / (2 if is_causal else 1)
        return Attention.apply(count, q, k, v, attn_mask, flops, (2.5,))

    def flex(q, k, v, blocks, scaling, is_grouped):
        pairs = sum(blocks.kv_num_blocks.flatten().tolist()) * packed.BLOCK**2
        return Attention.apply(count, q, k, v, None, 4.0 * pairs * q.shape[1] * q.shape[3], (1.5, 2.0))

    def varlen_attn(q, k, v, first_q, first_k, N, S, seqused_k, **_):
        out, log_z = torch.empty_like(q), q.new_empty(1, len(q), dtype=torch.float32)
        used = sum(seqused_k.tolist()) * k.shape[2]
        sizes, inputs = [None, used * k.itemsize, used * k.itemsize, None, None], [q, k, v, first_k, seqused_k]
        count.add("attention", inputs, [out, log_z], flops=4.0 * used * N, read_bytes=sizes)
        return out, log_z

    def rms_norm(x, shape, weight, epsilon):
        count.add("rms_norm", [x, weight], [out := torch.empty_like(x)])
        return out

    def with_flag(name, value, function):
        def call(*args):
            with patch.object(count, name, value):
                return function(*args)

        return call

    def attention(module, q, k, v, *args, **options):
        """The compiled layer is left here, in both directions."""
        if count.region is None:
            return packed._attention_forward(module, q, k, v, *args, **options)
        q, k, v = Mark.apply(lambda _: setattr(count, "is_eager", False), q, k, v)
        with patch.object(count, "is_eager", True):
            out, _ = packed._attention_forward(module, q, k, v, *args, **options)
        return Mark.apply(lambda _: setattr(count, "is_eager", True), out)[0], None

    def compiled(function, part):
        name = function.__name__

        def call(*args):
            count.region = []
            out = function(*args)
            count.end_region(_tensors(out), name)
            return out

        def layer(module, x, *args, **kwargs):
            count.region = []
            (x,) = Mark.apply(lambda grads: count.end_region(grads, "layer, backward"), x)
            out = function(module, x, *args, **kwargs)
            (out,) = Mark.apply(lambda _: setattr(count, "region", []), out)
            count.end_region([out], "layer")
            return out

        return layer if part == fast_paths.LAYERS else call

    def product_dtype(x):
        return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype

    changes = [(torch.nn.functional, "scaled_dot_product_attention", sdpa), (torch, "rms_norm", rms_norm)]
    changes += [(forked, "product_dtype", product_dtype), (packed, "product_dtype", product_dtype)]
    changes += [(weights, "_can_reorder", lambda weight: False), (varlen, "varlen_attn", varlen_attn)]
    doubles = bool(fast_paths) and fast_paths.is_on(fast_paths.SCORES)
    changes += [(logprobs, "LOGITS_PER_CHUNK", logprobs.LOGITS_PER_CHUNK_ON_CUDA << doubles)]
    changes += [(logprobs, "pack", with_flag("counts", False, logprobs.pack))]
    if fast_paths:
        changes += [(fast_paths, "_compile", compiled), (packed, "_flex", flex)]
        changes += [(packed, "block_mask", with_flag("computes", True, packed.block_mask))]
    changes += [(draw, "first_exceeding", draw.first_exceeding_in_blocks)]
    if hasattr(draw, "_least_by_bits"):
        changes += [(draw, "_least_of_top_p", draw._least_by_bits)]
    stack = ExitStack()
    for place, name, value in changes:
        stack.enter_context(patch.object(place, name, value))
    AttentionInterface.register(packed.ATTENTION, attention)
    return stack


def load(shape: str, layers: int):
    """A model with these widths, whose weights are memory that nothing has been written to."""
    _, hidden, inner, heads, key_heads, vocabulary, is_tied = SHAPES[shape]
    sizes = dict(hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, vocab_size=vocabulary)
    sizes |= dict(num_key_value_heads=key_heads, num_hidden_layers=layers, tie_word_embeddings=is_tied)
    with torch.device("meta"):
        config = Qwen2Config(**sizes, max_position_embeddings=32768)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model = model.to_empty(device="cpu")
    model.tie_weights()
    model.set_attn_implementation(packed.ATTENTION)
    return model


def decode_step(count: Count, shape: str, layers: int, top_p: float = 1.0) -> None:
    """Count one decode step, as a CUDA graph would hold it."""
    U, G, P, T, own, bf16 = 24, 8, 256, 512, 256, torch.bfloat16
    model = load(shape, layers)
    with torch.no_grad(), torch.autocast("cpu", bf16), weights.copied_weights(model, "bf16"):
        cache, attention = ForkedCache([P] * U, T), model.base_model.layers[0].self_attn
        size = U, attention.k_proj.out_features // attention.head_dim, P, attention.head_dim
        cache.prompts = {n: (torch.empty(size, dtype=bf16), torch.empty(size, dtype=bf16)) for n in range(layers)}
        cache.dtype, cache.use_cpu_kernel, cache.use_cascade = bf16, False, False  # the last: its name before
        cache.fork(torch.arange(U).repeat_interleave(G))
        decoder = SimpleNamespace(cache=cache, positions_R=torch.full((U * G,), P + own - 1))
        decoder.head = model.get_output_embeddings()
        decoder.hidden_of_token = llama_decoder.LlamaDecoder(model.base_model)
        batch = cuda_graphs._Batch(decoder, torch.empty(U * G, T), SamplingParams(G, T, top_p=top_p))
        batch.next_1.fill_(own)
        step = batch.make_step(T if getattr(cache, "uses_flash", False) else own, own)
        count.counts = True
        step()


def update(count: Count, shape: str, layers: int) -> None:
    """Count the forward and backward pass of one micro-batch."""
    U, G, P, T, rng = 4, 8, 256, 512, torch.Generator().manual_seed(0)
    lengths_B = torch.randint(64, T + 1, (U * G,), generator=rng)
    ids_BS = torch.randint(SHAPES[shape][5], (U * G, P + T), generator=rng)
    scorer = logprobs.CompletionScorer(load(shape, layers).train())
    scorer.packed, vars(scorer)["plain_head"] = True, True
    if fast_paths:
        fast_paths.compile_layers(scorer.model.base_model.layers)
    group_B, mask_BT = torch.arange(U).repeat_interleave(G), torch.arange(T) < lengths_B[:, None]
    count.counts = True
    with torch.autocast("cpu", torch.bfloat16):
        logprobs_BT, _ = scorer(ids_BS, torch.full((U * G,), P), mask_BT, group_B)
    logprobs_BT.sum().backward()


def totals(run, shape: str, gpu: str, parts=(), **options) -> tuple[torch.Tensor, Counter]:
    """Kernels, bytes, FLOPs and seconds ``[4]`` of all layers, from passes of two and three, and seconds by line."""
    sums, lines, more = torch.zeros(4, dtype=torch.float64), Counter(), SHAPES[shape][0] - 2
    for layers, factor in ((2, 1 - more), (3, more)):
        with fast_paths.only(*parts) if fast_paths else nullcontext(), Count(BYTES_PER_S[gpu]) as count, patched(count):
            run(count, shape, layers, **options)
        for line, costs in count.kernels:
            sums += factor * costs
            lines[line] += factor * float(costs[3])
    return sums, lines


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    p.add_argument("--gpu", default="H200", choices=BYTES_PER_S)
    p.add_argument("--top", type=int, default=0, help="print so many of the costliest lines of code for each row")
    p.add_argument("--output", default=str(RESULTS / "count"), help="output files, without suffix")
    a = p.parse_args()
    rows, table, columns = [], [], ["kernels", "GB moved", "TFLOP", "ms by bandwidth", "ms by FLOP", "ms of the model"]

    def show(line: str) -> None:
        table.append(line)
        print(line, flush=True)

    def compare(shape, what, run, sides, **options) -> None:
        plain = None
        for side, parts in sides.items():
            sums, lines = totals(run, shape, a.gpu, parts, **options)
            kernels, num_bytes, flops, seconds = sums.tolist()
            plain = plain or seconds
            times = [1e3 * num_bytes / BYTES_PER_S[a.gpu], 1e3 * flops / FLOPS_PER_S, 1e3 * seconds]
            values = [round(kernels), num_bytes / 1e9, flops / 1e12, *times, plain / seconds]
            names = ["shape", "what", "side", *columns, "plain / this"]
            rows.append(dict(zip(names, [shape, what, side, *values], strict=True)))
            show(f"| {shape} | {what} | {side} | {values[0]:,} | {' | '.join(f'{x:.2f}' for x in values[1:])} |")
            for line, spent in lines.most_common(a.top):
                print(f"    {1e3 * spent:8.3f} ms  {line}")

    def header() -> None:
        show(f"| shape | what | side | {' | '.join(columns)} | plain / this |\n{'|---' * 10}|")

    every = (*fast_paths.UPDATE, *fast_paths.DECODING) if fast_paths else ()
    sides = {"plain": ()} | ({"fast": every} if fast_paths else {})
    header()
    for shape in a.shapes:
        compare(shape, "decode step", decode_step, sides)
        if shape == "qwen2.5-0.5b":
            compare(shape, "decode step, top_p 0.9", decode_step, sides, top_p=0.9)
        compare(shape, "update", update, sides)
    if fast_paths:
        show("\nOne part at a time:\n")
        header()
        for what, run, parts in (
            ("decode step", decode_step, fast_paths.DECODING),
            ("update", update, fast_paths.UPDATE),
        ):
            compare(a.shapes[0], what, run, {"plain": ()} | {part: (part,) for part in parts})
    numbers = f"{BYTES_PER_S[a.gpu] / 1e12} TB/s, {FLOPS_PER_S / 1e12:.0f} TFLOP/s, {1e6 * FLOOR:.0f} us a kernel"
    facts = about(torch=torch.__version__, what=f"a model, not measured, of an {a.gpu}: {numbers}", rows=rows)
    del facts["machine"]  # the model does not depend on it
    write(a.output, facts, "\n".join(table))


if __name__ == "__main__":
    main()
