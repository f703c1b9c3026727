"""The check of CUDA graphs against the decode loop: rounding passes, mistakes do not."""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, save_random_model
from test_graphs import SAMPLING, engines
from test_rollout import ADDRESS, TEXTS, problems_of

from grpo.batch import Problem
from grpo.logprobs import CompletionScorer
from grpo.rollout import BuiltinEngine, SamplingParams, cuda_graphs, static_batch
from grpo.rollout.cuda_graphs import CUDAGraphRunner
from grpo.rollout.draw import draw
from grpo.rollout.graph_check import score
from grpo.rollout.llama_decoder import LlamaDecoder

SHORT = replace(SAMPLING, num_generations=4, max_completion_length=20)

SHAPE = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)


def wrong_position(engine, monkeypatch):
    real = engine.graphs.decoder
    engine.graphs.decoder = lambda token_R, positions_R, cache: real(token_R, positions_R + 1, cache)


def misses_the_newest_key(engine, monkeypatch):
    def set_position(cache, next_1):
        cache.index_1, cache.own_padding = next_1 - 1, cache.index_C >= next_1 - 1

    monkeypatch.setattr(static_batch.StaticCache, "set_position", set_position)


def sees_a_later_key(engine, monkeypatch):
    def set_position(cache, next_1):
        cache.index_1, cache.own_padding = next_1 - 1, cache.index_C > next_1

    monkeypatch.setattr(static_batch.StaticCache, "set_position", set_position)


def stale_uniforms(engine, monkeypatch):
    first = {}

    def stale_draw(logits_RV, u_R, sampling):
        return draw(logits_RV, first.setdefault(len(u_R), u_R.clone()), sampling)

    monkeypatch.setattr(cuda_graphs, "draw", stale_draw)


def stale_weight(engine, monkeypatch):
    """As after an update by 5%."""
    weight = engine.policy.model.lm_head.weight.detach()
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    engine.graphs.head = lambda hidden: torch.nn.functional.linear(hidden.to(weight.dtype), weight * (1 + 0.05 * noise))


def one_row_reads_another_prompt(engine, monkeypatch):
    real = engine.graphs.decoder

    def decoder(token_R, positions_R, cache):
        cache.from_cell_R = torch.cat([cache.from_cell_R[:-1], cache.from_cell_R[:1]])
        return real(token_R, positions_R, cache)

    engine.graphs.decoder = decoder


MISTAKES = [wrong_position, misses_the_newest_key, sees_a_later_key, stale_uniforms, stale_weight]
MISTAKES += [one_row_reads_another_prompt]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_mistakes_are_found(random_model, monkeypatch, precision, mistake):
    said, (_, engine) = [], engines(random_model, precision=precision)
    engine.warn = said.append
    mistake(engine, monkeypatch)
    engine.generate(problems_of(engine.policy, *TEXTS), SHORT, address=ADDRESS)
    assert engine.graphs is None
    assert said == [
        "note: decode steps are not captured in CUDA graphs (they give other log-probs than the same steps without graphs)"
    ]


@pytest.fixture(scope="module")
def model_of_many_tokens(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("model"), vocab_size=20000)


@pytest.mark.parametrize("spread", [0.3, 2.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounding_in_bf16_is_no_mistake(model_of_many_tokens, spread, temperature):
    """Though most rows soon draw another token than the loop."""
    _, engine = engines(model_of_many_tokens, precision="bf16")
    engine.policy.model.model.norm.weight.data.mul_(spread)
    head, rng = engine.graphs.head, torch.Generator().manual_seed(0)

    def rounded(hidden_RH):  # by another order of additions
        return head(hidden_RH * (1 + 2**-9 * torch.randn(hidden_RH.shape, generator=rng)))

    engine.graphs.head = rounded
    sampling = replace(SHORT, temperature=temperature)
    engine.generate(problems_of(engine.policy, *TEXTS), sampling, address=ADDRESS)
    assert engine.graphs.verified == {temperature == 0.0}


def test_too_few_tokens_decide_nothing(random_model):
    _, engine = engines(random_model)
    problems = problems_of(engine.policy, "1+1=")
    engine.generate(problems, SamplingParams(1, 20), address=ADDRESS)
    assert not engine.graphs.verified
    engine.generate(problems, SamplingParams(8, 20), address=ADDRESS)
    assert engine.graphs.verified == {False}


def test_greedy_and_sampled_rollouts_are_each_checked(random_model, monkeypatch):
    said, (_, engine) = [], engines(random_model)
    engine.warn = said.append
    problems = problems_of(engine.policy, *TEXTS)
    engine.generate(problems, replace(SHORT, temperature=0.0), address=ADDRESS)
    assert engine.graphs.verified == {True} and not said
    stale_uniforms(engine, monkeypatch)
    engine.generate(problems, SHORT, address=ADDRESS)
    assert engine.graphs is None and len(said) == 1


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}, {"temperature": 0.0}], ids=str)
def test_what_is_drawn_is_not_missed(changes):
    rng = torch.Generator().manual_seed(0)
    sampling = replace(SHORT, **changes)
    logits_RV = torch.randn(2000, 20, generator=rng) * 3
    u_R = None if sampling.is_greedy else torch.rand(2000, generator=rng)
    token_R, logprob_R = draw(logits_RV, u_R, sampling)
    scored_R, missed_R = score(logits_RV, token_R, u_R, sampling)
    assert float(missed_R.max()) < 1e-6
    if not sampling.is_greedy:
        torch.testing.assert_close(scored_R, logprob_R)
    _, missed_R = score(logits_RV, (token_R + 1) % 20, u_R, sampling)
    assert float(missed_R.mean()) > 0.1


@pytest.mark.slow
def test_random_weights_of_the_benchmark_are_sampled_like_trained_ones(monkeypatch):
    """As in ``benchmarks/rollout.py --shape``, with its forced lengths; the graphs, uncaptured, pass the check."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("rollout")
    monkeypatch.setitem(benchmark.SHAPES, "test", SHAPE)
    arguments = SimpleNamespace(model=None, shape="test", precision="bf16")
    policy = benchmark.load(arguments, torch.device("cpu"))
    assert CompletionScorer(policy.model).pack_groups() is None
    engine = benchmark.ForcedLengths(policy, warn=pytest.fail)
    head = policy.model.get_output_embeddings()
    engine.graphs = CUDAGraphRunner(LlamaDecoder(policy.backbone), head, policy.eos_ids, policy.device, capture=False)
    prompts_UL, lengths_UG = torch.randint(2, 20000, (2, 12)), torch.tensor([[12, 3, 20, 1], [20, 20, 7, 15]])
    problems = [Problem(u, "", tuple(row)) for u, row in enumerate(prompts_UL.tolist())]
    groups = BuiltinEngine(policy).generate(problems, SamplingParams(8, 20), address=ADDRESS)
    logprobs = [x for group in groups for c in group.completions for x in c.sampling_logprobs]
    assert -1.0 < sum(logprobs) / len(logprobs) < -0.3
    assert benchmark.ours(engine, prompts_UL, lengths_UG, 20) == int(lengths_UG.sum())
    assert engine.graphs.verified == {False}
