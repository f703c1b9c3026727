"""A GRPO step on one GPU with and without each fast path: seconds, tokens a second, MFU, memory.

    python benchmarks/gpu_step.py                              every variant
    python benchmarks/gpu_step.py --only plain --only three    some of them

The model has the shape of Qwen2.5-0.5B and random weights. 8 prompts of 256 tokens have 8
completions each, of 128 to 512 tokens, uniformly; the lengths are the same in all variants. A step
samples, and updates all weights (bf16 autocast, micro-batches of 16,384 tokens, clipping, fused
AdamW) by the trainer's functions, whose own proofs switch on the parts of a variant. The first step
is apart; figures are medians of the others. Variants "at any rate" have a proof that nearly always
passes.

Log-probs and gradients of sampled tokens are compared with those of the model in fp64, computed by
transformers and autograd. Each variant is a fork of this process, with an empty cache of compiled
kernels. A line of JSON is written as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

# With it PyTorch asks the driver for GPUs without initialising CUDA, after which no fork has any.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

from common import RESULTS  # isort: skip  # puts the checkout on the path

import torch
import torch._dynamo.utils as dynamo
import torch._inductor.compile_fx  # once for all forks
import transformers
from gpu_checks import SIZES, forked
from random_model import sharpen
from rollout import EOS, ForcedLengths, NoTokenizer, copy_bandwidth
from torch import Tensor
from torch.profiler import ProfilerActivity
from transformers import Qwen2Config, Qwen2ForCausalLM
from update import flops, matmul_rate

from grpo.algorithm.advantages import group_advantages
from grpo.algorithm.batch import Batch, Completion, Group, Problem, collate, microbatches
from grpo.algorithm.logprobs import CompletionScorer
from grpo.algorithm.loss import loss_denominator, policy_loss
from grpo.attention import fast_paths as parts
from grpo.model import Policy
from grpo.rollout import SamplingParams
from grpo.rollout.draw import draw
from grpo.run.optimizer import make_optimizer
from grpo.run.proofs import prove_update

GROUP = 8
PROMPT_LENGTH = 256
TOKENS_PER_MICROBATCH = 16384
PEAK_FLOPS = 989e12
"""Of an H100 SXM or H200 in bf16, by its data sheet."""
LIMIT_S = 150
"""A variant is stopped after this time."""


@dataclass(frozen=True)
class Variant:
    parts: tuple[str, ...] = ()
    """Names in :mod:`grpo.attention.fast_paths`."""
    graphs: bool = False
    samples: bool = True
    updates: bool = True
    tolerance: float = 0.0
    """Of the proofs of an update's parts; 0: the trainer's."""


ALL = (*parts.UPDATE, *parts.DECODING)
VARIANTS = {
    "plain": Variant(),
    "three": Variant(
        (parts.STEP, parts.SCORES),
        graphs=True,
    ),
    "all": Variant(
        ALL,
        graphs=True,
    ),
    "scores": Variant(
        (parts.SCORES,),
        samples=False,
    ),
    "layers": Variant(
        (parts.LAYERS,),
        samples=False,
    ),
    "layers_at_any_rate": Variant(
        (parts.LAYERS,),
        samples=False,
        tolerance=1.0,
    ),
    "flex": Variant(
        (parts.FLEX,),
        samples=False,
    ),
    "flex_at_any_rate": Variant(
        (parts.FLEX,),
        samples=False,
        tolerance=1.0,
    ),
    "graphs": Variant(
        graphs=True,
        updates=False,
    ),
    "step": Variant(
        (parts.STEP,),
        updates=False,
    ),
    "flash": Variant(
        (parts.FLASH,),
        updates=False,
    ),
    "draw": Variant(
        (parts.DRAW,),
        updates=False,
    ),
    "graphs_step_draw": Variant(
        (parts.STEP, parts.DRAW),
        graphs=True,
        updates=False,
    ),
}


def forced_draw(logits_RV: Tensor, u_R: Tensor, sampling) -> tuple[Tensor, Tensor]:
    """Draw a token that is EOS where the uniform number is 2 or more, and only there."""
    is_last_R = u_R >= 2
    token_R, logprob_R = draw(logits_RV, u_R - 2 * is_last_R, sampling)
    token_R = token_R.masked_fill(token_R == EOS, EOS + 1)
    return token_R.masked_fill(is_last_R, EOS), logprob_R


class Trainer:
    """A model, and what a run has to sample with it and to update it."""

    def __init__(self, a: argparse.Namespace, variant: Variant):
        self.variant = variant
        self.device = torch.device(a.device)
        self.scratch = a.scratch
        self.length = a.length
        self.said: list[str] = []
        self.seconds_of_proofs: dict[str, float] = {}
        self.policy = self.random_policy(a.shape)
        rng = torch.Generator().manual_seed(0)
        self.lengths_UG = torch.randint(
            a.length // 4,
            a.length + 1,
            (a.prompts, GROUP),
            generator=rng,
        )
        vocabulary = self.policy.model.config.vocab_size
        ids_UL = torch.randint(2, vocabulary, (a.prompts, PROMPT_LENGTH), generator=rng)
        self.problems = []
        for number, ids in enumerate(ids_UL.tolist()):
            self.problems.append(Problem(number, "", tuple(ids)))

    def random_policy(self, shape: str) -> Policy:
        torch.manual_seed(0)
        config = Qwen2Config(
            max_position_embeddings=32768,
            attn_implementation="sdpa",
            **SIZES[shape],
        )
        with self.device:
            model = Qwen2ForCausalLM(config).float().eval()
        # Else attention is almost an average, and wrong positions would hardly show.
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.mul_(4.0)
        sharpen(model)
        return Policy(model, NoTokenizer(), (EOS,), 0, self.device, "bf16")

    def prepare(self) -> None:
        """Make scorer, optimizer and engine as a run does, with its proofs of an update's parts."""
        self.scorer = CompletionScorer(self.policy.model)
        why = self.scorer.pack_groups()
        assert why is None, why
        # Weights do not move, so that every step is the same. AdamW computes all the same.
        self.optimizer = make_optimizer(
            self.policy.model,
            learning_rate=0.0,
            betas=(0.9, 0.999),
            weight_decay=0.0,
        )
        world = SimpleNamespace(device=self.device, all_true=bool)
        self.said += prove_update(
            world,
            self.policy,
            self.scorer,
            [],
            checkpointing=False,
        )
        self.engine = ForcedLengths(
            self.policy,
            cuda_graphs=self.variant.graphs,
            warn=self.said.append,
        )
        self.engine.lengths_UG = self.lengths_UG

    def prove(self, part: str, *arguments) -> list[str]:
        """The proof of a part of this variant, timed. No other part is switched on."""
        if part not in self.variant.parts:
            return []
        started = time.perf_counter()
        notes = self.original_prove(part, *arguments)
        self.seconds_of_proofs[part] = time.perf_counter() - started
        return notes

    original_prove = staticmethod(parts.prove)

    def sample(self, number: int, problems: list[Problem] | None = None) -> list[Group]:
        sampling = SamplingParams(GROUP, self.length)
        return self.engine.generate(
            problems or self.problems,
            sampling,
            seed_key=(0, "gpu", number),
        )

    def random_groups(self) -> list[Group]:
        """Completions of random tokens, for variants that do not sample."""
        rng = torch.Generator().manual_seed(2)
        vocabulary = self.policy.model.config.vocab_size
        groups = []
        for problem in self.problems:
            rows = []
            for length in self.lengths_UG[problem.index].tolist():
                ids = torch.randint(2, vocabulary, (length,), generator=rng)
                rows.append(Completion(tuple(ids.tolist()), "", True))
            groups.append(Group(problem, tuple(rows)))
        return groups

    def batch_of(self, groups: list[Group]) -> Batch:
        """With advantages as of rewards from 0 to 7."""
        rewards_PG = torch.arange(float(GROUP)).expand(len(groups), -1)
        return collate(
            groups,
            group_advantages(rewards_PG),
            pad_id=0,
            device=self.device,
        )

    def update(self, groups: list[Group]) -> None:
        """One update, as in ``train_grpo.update``."""
        batch = self.batch_of(groups)
        denominator = loss_denominator(batch.loss_mask_BT)
        for micro, _ in microbatches(batch, TOKENS_PER_MICROBATCH, packed=True):
            with self.policy.autocast():
                new_BT, _ = self.scorer(*micro.scorer_inputs)
            loss_sum, _ = policy_loss(
                new_BT,
                new_BT.detach(),
                micro.advantages_B,
                micro.loss_mask_BT,
            )
            (loss_sum / denominator).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), 1.0)
        assert bool(torch.isfinite(norm)), f"the norm of the gradient is {float(norm)}"
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def checked_batch(self) -> Batch:
        """Sampled rows of two prompts, which :func:`write_reference` has left."""
        return self.batch_of(torch.load(self.scratch / "groups.pt", weights_only=False))

    def taken_gradient(self) -> Tensor:
        """Gradient of norms, biases, embedding and three layers, as one vector. All gradients are zeroed after it."""
        last = self.policy.model.config.num_hidden_layers - 1
        places = ["embed"]
        for number in (0, last // 2, last):
            places.append(f"layers.{number}.")
        taken = []
        for name, parameter in self.policy.model.named_parameters():
            if parameter.ndim == 1 or any(place in name for place in places):
                taken.append(parameter.grad.float().flatten())
        self.policy.model.zero_grad()
        return torch.cat(taken)

    def errors(self) -> dict[str, float]:
        """Mean distance of log-probs (nats), and relative one of gradients, from fp64."""
        exact = torch.load(self.scratch / "exact.pt", map_location=self.device)
        batch = self.checked_batch()
        with self.policy.autocast():
            logprobs_BT, _ = self.scorer(*batch.scorer_inputs)
        (logprobs_BT.sum(dim=1) * signs(batch)).sum().backward()
        distance_BT = (logprobs_BT.detach() - exact["logprobs"]).abs()
        difference = (self.taken_gradient() - exact["gradient"]).norm()
        return {
            "log-probs": float(distance_BT[batch.completion_mask_BT].mean()),
            "gradient": float(difference / exact["gradient"].norm()),
        }

    def sampling_error(self, groups: list[Group]) -> float:
        """Mean distance of sampled log-probs from the scorer's in fp32, in nats.

        The last token of a row is left out: another one was drawn.
        """
        batch = self.batch_of(groups[:2])
        with torch.no_grad(), parts.only():
            logprobs_BT, _ = self.scorer(*batch.scorer_inputs)
        distances = []
        rows = [*groups[0].completions, *groups[1].completions]
        for row, logprobs_T in zip(rows, logprobs_BT.cpu(), strict=True):
            sampled_n = torch.tensor(row.sampling_logprobs[:-1])
            distances.append((sampled_n - logprobs_T[: len(sampled_n)]).abs())
        return float(torch.cat(distances).mean())

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def signs(batch: Batch) -> Tensor:
    """``[B]`` 1 and -1 in turn."""
    number_B = torch.arange(len(batch.completion_mask_BT), device=batch.completion_mask_BT.device)
    return 1.0 - 2.0 * (number_B % 2)


def write_reference(trainer: Trainer) -> dict:
    """Sample rows of two prompts; write their log-probs and gradient by the model in fp64."""
    trainer.length = min(trainer.length, 256)
    trainer.lengths_UG = trainer.lengths_UG.clamp(max=trainer.length)
    trainer.prepare()
    groups = trainer.sample(0, trainer.problems[:2])
    torch.save(groups, trainer.scratch / "groups.pt")
    batch = trainer.checked_batch()
    model = trainer.policy.model.double()
    model.set_attn_implementation("eager")
    exact_BT = torch.zeros(batch.completion_mask_BT.shape, dtype=torch.double)
    for b, sign in enumerate(signs(batch).tolist()):
        prompt = int(batch.prompt_lengths_B[b])
        length = int(batch.completion_mask_BT[b].sum())
        ids_S = batch.sequence_ids_BS[b, : prompt + length]
        logits_SV = model(input_ids=ids_S[None], use_cache=False).logits[0]
        all_logprobs_nV = logits_SV[prompt - 1 : -1].log_softmax(dim=-1)
        logprobs_n = all_logprobs_nV.gather(1, ids_S[prompt:, None])[:, 0]
        (sign * logprobs_n.sum()).backward()
        exact_BT[b, :length] = logprobs_n.detach().cpu()
    exact = {"logprobs": exact_BT, "gradient": trainer.taken_gradient()}
    torch.save(exact, trainer.scratch / "exact.pt")
    found = {"checked tokens": int(batch.completion_mask_BT.sum())}
    if trainer.device.type == "cuda":
        found["GPU"] = torch.cuda.get_device_name()
        found["TFLOP/s of a product"] = matmul_rate(trainer.device, "bf16") / 1e12
        found["TB/s of a copy"] = copy_bandwidth(trainer.device) / 1e12
    return found


def timed(trainer: Trainer, pass_) -> tuple[object, float, float]:
    """Run a pass. Returns its result, its seconds, and its peak memory in GiB."""
    is_cuda = trainer.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    trainer.synchronize()
    started = time.perf_counter()
    result = pass_()
    trainer.synchronize()
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0
    return result, seconds, peak


def figures(trainer: Trainer, repeats: int) -> dict:
    """Figures of ``1 + repeats`` steps; of two steps where a rollout takes more than 5 s."""
    variant = trainer.variant
    groups = trainer.random_groups()
    sampling = []
    update = []
    compiled = []
    found: dict[str, object] = {}
    for number in range(1 + repeats):
        if number > 1 and sampling and sampling[-1] > 5:
            break
        if variant.samples:
            groups, seconds, peak = timed(trainer, lambda n=number: trainer.sample(n))
            sampling.append(seconds)
            found["sampling GiB"] = peak
        if variant.updates:
            _, seconds, peak = timed(trainer, lambda rows=groups: trainer.update(rows))
            update.append(seconds)
            found["update GiB"] = peak
        compiled.append(sum(compilations().values()))
        if variant.parts and not any(map(parts.is_on, variant.parts)):
            return {"failed": "; ".join(trainer.said)}  # the rest would be plain code
    tokens = int(trainer.lengths_UG.sum())
    found["tokens"] = tokens
    found["compilations by step"] = compiled
    if sampling:
        found["all sampling s"] = sampling
        found["first sampling s"] = sampling[0]
        found["sampling s"] = statistics.median(sampling[1:])
        found["sampled tokens/s"] = tokens / found["sampling s"]
        found["sampling error"] = trainer.sampling_error(groups)
    if update:
        found["all update s"] = update
        found["first update s"] = update[0]
        found["update s"] = statistics.median(update[1:])
        found["updated tokens/s"] = tokens / found["update s"]
        work = flops(trainer.policy.model, PROMPT_LENGTH, trainer.lengths_UG.tolist())
        found["MFU"] = work / found["update s"] / PEAK_FLOPS
        found |= trainer.errors()
    if sampling and update:
        found["step s"] = found["sampling s"] + found["update s"]
    if sampling and update and variant.graphs:
        found |= even_figures(trainer)
    return found


def even_figures(trainer: Trainer) -> dict:
    """The second step in which all completions have full length."""
    trainer.engine.lengths_UG = torch.full_like(trainer.lengths_UG, trainer.length)
    for number in range(2):
        groups, sampling, _ = timed(trainer, lambda n=number: trainer.sample(n))
        _, update, _ = timed(trainer, lambda rows=groups: trainer.update(rows))
    trainer.engine.lengths_UG = trainer.lengths_UG
    return {"even sampling s": sampling, "even update s": update}


def compilations() -> Counter:
    """The number of each function."""
    return Counter(one.co_name for one in dynamo.get_compilation_metrics() if one.co_name)


def profile(trainer: Trainer, path: Path) -> None:
    """Write the kernels of a short rollout, and of an update of half of the prompts."""
    groups = trainer.random_groups()
    groups = groups[: len(groups) // 2]
    trainer.length = 25
    trainer.engine.lengths_UG = torch.full_like(trainer.lengths_UG, trainer.length)
    passes = {
        "rollout of 25 tokens": lambda: trainer.sample(9),
        "update of half of the prompts": lambda: trainer.update(groups),
    }
    activities = [ProfilerActivity.CPU]
    key = "self_cpu_time_total"
    if trainer.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        key = "self_device_time_total"
    for what, pass_ in passes.items():
        pass_()
        with torch.profiler.profile(activities=activities) as profiled:
            pass_()
            trainer.synchronize()
        averages = profiled.key_averages()
        table = averages.table(
            sort_by=key,
            row_limit=45,
            max_name_column_width=90,
        )
        with path.open("a") as file:
            file.write(f"== {what}\n{table}\n")


def measure(a: argparse.Namespace, name: str) -> dict:
    """All figures of a variant, or the reference of all."""
    dynamo.set_compilation_metrics_limit(1000)
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("torch._dynamo").addHandler(handler)
    variant = VARIANTS.get(name, Variant())
    trainer = Trainer(a, variant)
    with ExitStack() as stack:
        stack.enter_context(patch.object(parts, "prove", trainer.prove))
        stack.enter_context(patch("grpo.rollout.decode_loop.draw", forced_draw))
        stack.enter_context(patch("grpo.rollout.cuda_graphs.draw", forced_draw))
        if variant.tolerance:
            tolerances = {"bf16": variant.tolerance}
            stack.enter_context(patch("grpo.run.proofs.TOLERANCE", tolerances))
        if name == "fp64":
            return write_reference(trainer)
        started = time.perf_counter()
        trainer.prepare()
        found = {"start s": time.perf_counter() - started}
        found |= figures(trainer, a.repeats)
        if a.profile and "step s" in found:
            profile(trainer, a.output / f"profile_{name}.txt")
    found["proofs s"] = trainer.seconds_of_proofs
    found["on"] = [part for part in ALL if parts.is_on(part)]
    found["graphs"] = trainer.engine.graphs is not None
    microseconds = [one.duration_us or 0 for one in dynamo.get_compilation_metrics()]
    found["compiling s"] = sum(microseconds) / 1e6
    found["compilations"] = dict(compilations())
    found["said"] = trainer.said
    found["warnings"] = warnings
    return found


def measured_apart(a: argparse.Namespace, name: str, limit_s: float) -> dict:
    """:func:`measure` in a fork, for at most so many seconds."""
    answer = a.scratch / f"{name}.json"
    log = a.scratch / f"{name}.log"

    def run() -> None:
        cache = a.scratch / f"cache-{name}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
        try:
            result = measure(a, name)
        except Exception as error:
            traceback.print_exc()
            result = {"failed": f"{type(error).__name__}: {error}"}
        answer.write_text(json.dumps(result))

    process = forked(run, log)
    process.join(limit_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        return {"failed": f"stopped after {limit_s:.0f} s"}
    found = {"failed": f"its process ended with status {process.exitcode}"}
    if answer.exists():
        found = json.loads(answer.read_text())
    if "failed" in found:
        found["output"] = log.read_text(errors="replace").splitlines()[-30:]
    return found


COLUMNS = (
    "step s", "sampling s", "sampled tokens/s", "update s", "updated tokens/s", "MFU", "sampling GiB", "update GiB",
    "start s", "first sampling s", "first update s", "compiling s", "sampling error", "log-probs", "gradient",
)  # fmt: skip


def table(rows: list[dict]) -> str:
    lines = [f"| variant | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        cells = [row["name"]]
        for column in COLUMNS:
            cells.append(f"{row[column]:.4g}" if column in row else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=VARIANTS,
    )
    parser.add_argument(
        "--device",
        default="cuda",
    )
    parser.add_argument(
        "--shape",
        default="qwen2.5-0.5b",
        choices=SIZES,
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=8,
    )
    parser.add_argument(
        "--length",
        type=int,
        default=512,
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="timed steps, after the first",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1800,
        help="nothing goes on after it",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="write profile_<variant>.txt",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS,
        help="folder of the results",
    )
    a = parser.parse_args()
    begun = time.monotonic()
    versions = {
        "Python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(versions), flush=True)
    a.output.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        a.scratch = Path(scratch)
        for name in ("fp64", *(a.only or VARIANTS)):
            left = a.seconds - (time.monotonic() - begun)
            if left < 10:
                break
            limit_s = min(LIMIT_S, left)
            row = {"name": name} | measured_apart(a, name, limit_s)
            rows.append(row)
            line = json.dumps(row)
            with (a.output / "gpu_step.jsonl").open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
