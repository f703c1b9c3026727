"""Decode steps in fixed shapes give the decode loop's tokens; without capturing (``tests/cuda``: with it)."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from conftest import load
from test_rollout import SEED_KEY, TEXTS, ids, problems_of

from grpo.attention import fast_paths
from grpo.rollout import BuiltinEngine, SamplingParams
from grpo.rollout import cuda_graphs as graphs_module
from grpo.rollout.cuda_graphs import CUDAGraphRunner, FixedWidthCache
from grpo.rollout.draw import draw
from grpo.rollout.llama_decoder import LlamaDecoder

SAMPLING = SamplingParams(num_generations=8, max_completion_length=40)


def engines(random_model, **options) -> tuple[BuiltinEngine, BuiltinEngine]:
    """Two engines of equal policies: one decodes by the loop, one by captured steps without capture."""
    loop, static = (load(random_model, packed=True, **options) for _ in range(2))
    engine = BuiltinEngine(static, warn=pytest.fail)
    engine.graphs = CUDAGraphRunner(static, capture=False)
    return BuiltinEngine(loop), engine


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"tokens_in_flight": 170, "num_generations": 2},
        {"tokens_in_flight": 1, "num_generations": 2},
        {"max_completion_length": 1},
        pytest.param({"max_completion_length": 150, "num_generations": 3}, marks=pytest.mark.slow),
        {"num_generations": 1},
    ],
    ids=str,
)
def test_tokens_are_those_of_the_loop(random_model, changes):
    """Prompts of 1 to 40 tokens; groups lose rows unevenly, and prompts all of theirs; shapes grow with the length."""
    sampling = replace(SAMPLING, **changes)
    loop, engine = engines(random_model)
    problems = problems_of(loop.policy, *TEXTS, "7")
    expected = loop.generate(problems, sampling, seed_key=SEED_KEY)
    counted = []
    found = engine.generate(problems, sampling, seed_key=SEED_KEY, on_tokens=counted.append)
    assert ids(found) == ids(expected)
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one.completions, other.completions, strict=True):
            assert a.sampling_logprobs == pytest.approx(b.sampling_logprobs, abs=1e-4)
            assert (a.text, a.finished) == (b.text, b.finished)
    assert sum(counted) == sum(len(c.ids) for group in expected for c in group.completions)
    # The loop decodes waves of one row.
    enough = sampling.max_completion_length > 2 and sampling.tokens_in_flight != 1
    assert engine.graphs.verified == ({sampling.is_greedy} if enough else set())


def test_steps_read_nothing_that_is_not_written(random_model, monkeypatch, new_memory_is_nan):
    """Also where rows have left, and where the width has grown: they are captured anew then."""
    monkeypatch.setattr(graphs_module, "OWN_BUCKET", 16)
    loop, engine = engines(random_model)
    problems = problems_of(loop.policy, *TEXTS)
    found = engine.generate(problems, SAMPLING, seed_key=SEED_KEY)
    assert ids(found) == ids(loop.generate(problems, SAMPLING, seed_key=SEED_KEY))


@pytest.mark.parametrize("every", [1, 3, 1000])
@pytest.mark.parametrize("width", [1, 16])
def test_tokens_do_not_depend_on_when_the_host_reads_which_rows_ended(random_model, monkeypatch, every, width):
    monkeypatch.setattr(graphs_module, "SYNC_EVERY", every)
    monkeypatch.setattr(graphs_module, "OWN_BUCKET", width)
    loop, engine = engines(random_model)
    problems = problems_of(loop.policy, *TEXTS)
    expected = loop.generate(problems, SAMPLING, seed_key=SEED_KEY)
    shapes, captured = [], CUDAGraphRunner._captured
    monkeypatch.setattr(CUDAGraphRunner, "_captured", lambda self, *x: shapes.append(1) or captured(self, *x))
    assert ids(engine.generate(problems, SAMPLING, seed_key=SEED_KEY)) == ids(expected)
    assert len(shapes) >= (1 if every == 1000 else 2 if width == 1 else 3), "rows should have left"


def wrong_position(monkeypatch):
    real = LlamaDecoder.__call__

    def moved(self, token_R, positions_R, cache):
        return real(self, token_R, positions_R + isinstance(cache, FixedWidthCache), cache)

    monkeypatch.setattr(LlamaDecoder, "__call__", moved)


def stale_uniforms(monkeypatch):
    first = {}

    def stale_draw(logits_RV, u_R, sampling):
        return draw(logits_RV, first.setdefault(len(u_R), u_R.clone()), sampling)

    monkeypatch.setattr(graphs_module._Batch, "draw", _with(graphs_module._Batch.draw, stale_draw))


def _with(method, other_draw):
    def draws(self, logits_SV):
        graphs_module.draw = other_draw
        try:
            method(self, logits_SV)
        finally:
            graphs_module.draw = draw

    return draws


def stores_no_keys(monkeypatch):
    monkeypatch.setattr(FixedWidthCache, "_store_token", lambda cache, layer, keys, values: None)


def cannot_capture(self, step):
    step()
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def raises(monkeypatch):
    monkeypatch.setattr(CUDAGraphRunner, "_captured", cannot_capture)


@pytest.mark.parametrize("mistake", [wrong_position, stale_uniforms, stores_no_keys, raises])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_cannot_be_captured_or_is_wrong_is_decoded_by_the_loop(random_model, monkeypatch, precision, mistake):
    said, (loop, engine) = [], engines(random_model, precision=precision)
    engine.warn = said.append
    problems = problems_of(engine.policy, *TEXTS)
    expected = loop.generate(problems, SAMPLING, seed_key=SEED_KEY)
    mistake(monkeypatch)
    for _ in range(2):
        assert engine.generate(problems, SAMPLING, seed_key=SEED_KEY) == expected
    reason = "operation not permitted" if mistake is raises else "they give other results than the same steps"
    assert len(said) == 1 and reason in said[0] and engine.graphs is None


def test_each_block_of_the_first_wave_is_checked(random_model, monkeypatch):
    """Also those of graphs that are captured later, for fewer rows or more tokens."""
    _, engine = engines(random_model)
    monkeypatch.setattr(graphs_module, "OWN_BUCKET", 16)
    checked = []
    check = CUDAGraphRunner._check
    monkeypatch.setattr(CUDAGraphRunner, "_check", lambda self, batch: checked.append(1) or check(self, batch))
    problems = problems_of(engine.policy, *TEXTS)
    first, second = [engine.generate(problems, SAMPLING, seed_key=SEED_KEY) and len(checked) for _ in range(2)]
    assert first == second == 5, "40 tokens are 5 blocks of 8"


def test_a_batch_is_captured_anew_when_a_quarter_is_left_but_never_one_row(random_model, monkeypatch):
    _, engine = engines(random_model)
    sizes = []
    captured = CUDAGraphRunner._captured

    def recorded(self, step):
        sizes.append(len(step.__self__.rows))
        return captured(self, step)

    monkeypatch.setattr(CUDAGraphRunner, "_captured", recorded)
    monkeypatch.setattr(graphs_module, "SYNC_EVERY", 1)
    engine.policy.eos_ids = tuple(range(0, 400, 8))  # about one row of eight ends at each token
    engine.generate(problems_of(engine.policy, *TEXTS), SAMPLING, seed_key=SEED_KEY)
    assert sizes[0] == 32 and len(sizes) > 2
    assert all(1 < size <= before // 4 for before, size in pairwise(sizes))


def raising(function):
    raise RuntimeError("Failed to find C compiler.\nmore")


def wrong(function):
    """Rotated queries and keys, and every other tensor, come out 10% larger."""

    def compiled(*inputs):
        found = function(*inputs)
        return 1.1 * found if isinstance(found, torch.Tensor) else found

    return compiled


@pytest.mark.parametrize(
    ("compiler", "captures", "reasons"),
    [
        (lambda function: function, True, []),
        (raising, True, ["without compiled decode steps (Failed to find C compiler.)"]),
        (wrong, True, ["without compiled decode steps (they give other results"]),
        (
            raising,
            False,
            ["without compiled decode steps (Fail", "not captured in CUDA graphs (operation not permitted"],
        ),
    ],
)
def test_steps_whose_compilation_fails_are_captured_without(random_model, monkeypatch, compiler, captures, reasons):
    said, compiled = [], []
    loop, engine = engines(random_model)
    engine.warn = said.append
    engine.graphs.fast_parts = [fast_paths.STEP]
    problems = problems_of(engine.policy, *TEXTS)
    expected = loop.generate(problems, SAMPLING, seed_key=SEED_KEY)

    def compile_(function, *part):
        compiled.append(function.__name__)
        return compiler(function)

    monkeypatch.setattr(fast_paths, "_compile", compile_)
    if not captures:
        raises(monkeypatch)
    for _ in range(2):
        assert ids(engine.generate(problems, SAMPLING, seed_key=SEED_KEY)) == ids(expected)
    assert compiled and len(said) == len(reasons)
    assert all(reason in line for reason, line in zip(reasons, said, strict=True))
    assert (engine.graphs is not None) == captures
    compiled.clear()
    loop.generate(problems, SAMPLING, seed_key=SEED_KEY)
    assert not compiled, "without graphs nothing is compiled"


@pytest.mark.slow
def test_steps_are_compiled_in_the_first_rollout_alone(random_model, monkeypatch):
    """Whatever the number of rows and prompts, the lengths and the kind of sampling of those that follow."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    fast_paths.reset()
    _, engine = engines(random_model)
    engine.graphs.fast_parts = [fast_paths.STEP]
    numbers = []
    for texts, changes in (
        (TEXTS, {}),
        (TEXTS, {"temperature": 0.0, "num_generations": 1}),
        (TEXTS[:2], {"num_generations": 2, "top_p": 0.9, "max_completion_length": 60}),
        (TEXTS[:1], {"num_generations": 2}),
        (TEXTS, {"tokens_in_flight": 170}),
    ):
        problems = problems_of(engine.policy, *texts)
        engine.generate(problems, replace(SAMPLING, **changes), seed_key=SEED_KEY)
        numbers.append(len(compiled))
    fast_paths.reset()
    assert numbers == [4] * 5, "norms, rotation, MLP and attention, once each"


def test_greedy_and_sampled_rollouts_are_each_checked(random_model, monkeypatch):
    said, (_, engine) = [], engines(random_model)
    engine.warn = said.append
    problems = problems_of(engine.policy, *TEXTS)
    engine.generate(problems, replace(SAMPLING, temperature=0.0), seed_key=SEED_KEY)
    assert engine.graphs.verified == {True} and not said
    stale_uniforms(monkeypatch)
    engine.generate(problems, SAMPLING, seed_key=SEED_KEY)
    assert engine.graphs is None and len(said) == 1


def completions(groups):
    return [c for group in groups for c in group.completions]


@pytest.fixture(scope="module")
def stops_of_texts(random_model) -> dict[str, tuple[str, ...]]:
    """Stop strings that occur in the sampled texts."""
    policy = load(random_model, packed=True)
    rows = completions(BuiltinEngine(policy).generate(problems_of(policy, *TEXTS), SAMPLING, seed_key=SEED_KEY))
    texts = sorted((c.text for c in rows), key=len, reverse=True)
    assert min(map(len, texts[:4])) > 30, "texts should be long enough to be cut"
    return {
        "across looks": (texts[1][4:12],),
        "of many rows": (texts[0][2], texts[1][5]),
        "first tokens": tuple({text[0] for text in texts if text}),
        "special": ("<|im_start|>", texts[3][6:8]),
    }


KINDS = ("across looks", "of many rows", "first tokens", "special")


@pytest.mark.parametrize(
    ("kind", "every", "T"),
    [*((kind, graphs_module.SYNC_EVERY, 40) for kind in KINDS), (KINDS[1], 5, 9), (KINDS[0], 1000, 40)],
)
def test_stop_strings_end_the_tokens_of_the_loop(random_model, stops_of_texts, monkeypatch, kind, every, T):
    """Whenever the host looks; also at the limit, where a row that stops with its last token has finished."""
    monkeypatch.setattr(graphs_module, "SYNC_EVERY", every)
    plain = replace(SAMPLING, max_completion_length=T)
    sampling = replace(plain, stop=stops_of_texts[kind])
    loop, engine = engines(random_model)
    problems = problems_of(loop.policy, *TEXTS)
    expected = loop.generate(problems, sampling, seed_key=SEED_KEY)
    counted = []
    found = engine.generate(problems, sampling, seed_key=SEED_KEY, on_tokens=counted.append)
    for a, b in zip(completions(found), completions(expected), strict=True):
        assert (a.ids, a.text, a.finished) == (b.ids, b.text, b.finished)
        assert a.sampling_logprobs == pytest.approx(b.sampling_logprobs, abs=1e-4)
    assert sum(counted) == sum(len(c.ids) for c in completions(expected)) and min(counted) >= 0
    unstopped = completions(loop.generate(problems, plain, seed_key=SEED_KEY))
    ends, other = ([(c.ids, c.finished) for c in rows] for rows in (completions(found), unstopped))
    assert ends != other, "the strings should end something"
