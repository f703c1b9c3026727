"""Sampling: tokens a second of this trainer's rollouts beside ``model.generate``, same weights,
prompts and lengths.

    python benchmarks/rollout.py --model DIR
        a checkpoint, on the GPU or else the CPU
    python benchmarks/rollout.py --model DIR --server http://127.0.0.1:8000
        beside a vLLM server, as in training
    python benchmarks/rollout.py --shape qwen2.5-0.5b --rows 64 --prompt 256
        random weights of a known shape

Lengths are forced: row r may end only at a length drawn from a log-normal distribution, through a
logits processor in ``generate`` and the same rule in ours, so that both sample the same number of
tokens. Each is run ``--repeats`` times in turn; medians.

A vLLM server gets the weights before each run (timed apart), and returns log-probs, which ours
computes.
"""

import statistics
import time
from pathlib import Path
from unittest.mock import patch

from common import about, in_turn, parser, ratios, shown, write

import torch  # isort: skip
from random_model import SIZES, sharpen
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, Qwen2Config

from grpo.algorithm.batch import Problem
from grpo.algorithm.logprobs import CompletionScorer
from grpo.model import Policy
from grpo.rollout import BuiltinEngine, SamplingParams, check_model
from grpo.rollout.decode_loop import decode
from grpo.rollout.draw import draw_tokens

EOS = 1


class EndsAt(LogitsProcessor):
    """Row r's only choice at its last place is EOS, and EOS is no choice before."""

    def __init__(self, lengths_R: torch.Tensor, prompt: int):
        self.lengths_R = lengths_R
        self.prompt = prompt

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
    torch.manual_seed(0)
    if a.model:
        model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32)
    else:
        config = Qwen2Config(max_position_embeddings=32768, **SIZES[a.shape])
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="sdpa"
            )
        sharpen(model)
    return Policy(
        model.to(device).eval(),
        NoTokenizer(),
        (EOS,),
        0,
        device,
        a.precision,
    )


class ForcedLengths(BuiltinEngine):
    """Completion r has a given length: its last uniform number is 2 or more, which ``forced_draw``
    turns into EOS."""

    lengths_UG: torch.Tensor

    def generate(self, problems, *args, **options):
        lengths_R = self.lengths_UG[[problem.index for problem in problems]].flatten()

        def forced_decode(policy, prefill, prompts, uniforms_RT, *more):
            uniforms_RT[torch.arange(len(prompts)), lengths_R - 1] += 2
            return decode(policy, prefill, prompts, uniforms_RT, *more)

        with patch("grpo.rollout.engine.decode", forced_decode):
            groups = super().generate(problems, *args, **options)
        for problem, group in zip(problems, groups, strict=True):
            lengths = [len(row.ids) for row in group.completions]
            assert lengths == self.lengths_UG[problem.index].tolist(), (
                "a completion has another length"
            )
        return groups


def forced_draw(logits_RV, u_R, sampling):
    """Draw a token that ends the completion where the uniform number is 2 or more, and only
    there."""
    is_last_R = u_R >= 2
    return draw_tokens(ends_at(logits_RV, is_last_R), u_R - 2 * is_last_R, sampling)


def ours(engine, prompts_UL, lengths_UG, T) -> int:
    problems = [
        Problem(
            u,
            "",
            tuple(row),
        )
        for u, row in enumerate(prompts_UL.tolist())
    ]
    engine.lengths_UG = lengths_UG.cpu()
    with patch("grpo.rollout.decode_loop.draw_tokens", forced_draw):
        groups = engine.generate(
            problems,
            SamplingParams(lengths_UG.shape[1], T),
            seed_key=(0, "benchmark", 0),
        )
    return sum(len(c.ids) for group in groups for c in group.completions)


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
            logits_processor=LogitsProcessorList(
                [EndsAt(lengths_UG.flatten(), prompts_RL.shape[1])]
            ),
        )
    assert out.shape[1] <= prompts_RL.shape[1] + T
    return int(lengths_UG.sum())


def main() -> None:
    a = parser(
        __doc__,
        model=None,
        shape="qwen2.5-0.5b",
        device="cuda" if torch.cuda.is_available() else "cpu",
        precision="bf16",
        rows=32,
        group=8,
        prompt=256,
        max_length=256,
        repeats=5,
        threads=torch.get_num_threads(),
        server=None,
        output=None,
    ).parse_args()
    torch.set_num_threads(a.threads)
    if a.model:
        a.shape = Path(a.model).name  # for the file of results
    device = torch.device(a.device)
    policy = load(a, device)
    rng = torch.Generator().manual_seed(0)
    U = a.rows // a.group
    vocabulary = policy.model.config.vocab_size
    prompts_UL = torch.randint(
        2,
        vocabulary,
        (U, a.prompt),
        generator=rng,
    ).to(device)
    median = a.max_length / 2.6
    factors_UG = (torch.randn(U, a.group, generator=rng) * 0.5).exp()
    lengths_UG = (factors_UG * median).round().clamp(1, a.max_length).long()
    check_model(policy, CompletionScorer(policy.model))

    engine = ForcedLengths(policy, cuda_graphs=True)
    sides = {"ours": ours, "generate": theirs}
    served = None
    if a.server:
        from vllm_server import Served  # needs the extra vllm

        served = Served(a.server, policy, a.threads)
        sides["vLLM, server"] = served
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(a.repeats + 1):
        for name, side in in_turn(sides.items(), number + 1):
            if side is served:
                served.sync()
            start = time.perf_counter()
            tokens = side(engine, prompts_UL, lengths_UG.to(device), a.max_length)
            if device.type == "cuda":
                torch.cuda.synchronize()
            assert tokens == int(lengths_UG.sum()), (name, tokens)
            if number:  # the first of each is warm-up
                rates[name].append(tokens / (time.perf_counter() - start))
    result = about(a, torch=torch.__version__, tokens_per_second=rates)
    for name, values in rates.items():
        times = shown(ratios(rates["ours"], values))
        print(f"{name}: {statistics.median(values):.0f} tokens/s, ours is {times} times as fast")
    if served:
        result["weight_sync_seconds"] = served.stop()
        print(f"vLLM, server: new weights in {result['weight_sync_seconds']:.2f} s")
    write(a.output, result)


if __name__ == "__main__":
    main()
