"""Decode steps in static buffers give the tokens of the decode loop. (Here without capturing them, which needs a GPU.)"""

from dataclasses import replace

import pytest
import torch
from conftest import load
from test_rollout import ADDRESS, TEXTS, ids, problems_of

from grpo.rollout import BuiltinEngine, SamplingParams, static_batch
from grpo.rollout import cuda_graphs as graphs_module
from grpo.rollout.cuda_graphs import CUDAGraphRunner
from grpo.rollout.llama_decoder import LlamaDecoder
from grpo.rollout.static_batch import padded_rows
from grpo.rollout.weights import copied_weights

SAMPLING = SamplingParams(num_generations=8, max_completion_length=40)


def engines(random_model, **options) -> tuple[BuiltinEngine, BuiltinEngine]:
    """Two engines of equal policies: one decodes by the loop, one by :mod:`grpo.rollout.cuda_graphs` without capturing its steps."""
    loop, static = (load(random_model, packed=True, **options) for _ in range(2))
    engine = BuiltinEngine(static, warn=pytest.fail)

    # On a GPU both are built once, since copies of weights keep their addresses; on CPU each rollout has copies of its own.
    def decoder(*inputs):
        return LlamaDecoder(static.backbone)(*inputs)

    def head(hidden):
        return static.model.get_output_embeddings()(hidden)

    engine.graphs = CUDAGraphRunner(decoder, head, static.eos_ids, static.device, capture=False)
    return BuiltinEngine(loop), engine


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        pytest.param({"tokens_in_flight": 300}, marks=pytest.mark.slow),
        {"tokens_in_flight": 1, "num_generations": 2},
        {"max_completion_length": 1},
        {"max_completion_length": 8},
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
    expected = loop.generate(problems, sampling, address=ADDRESS)
    counted = []
    found = engine.generate(problems, sampling, address=ADDRESS, on_tokens=counted.append)
    assert ids(found) == ids(expected)
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one.completions, other.completions, strict=True):
            assert a.sampling_logprobs == pytest.approx(b.sampling_logprobs, abs=1e-4)
            assert (a.text, a.finished) == (b.text, b.finished)
    assert sum(counted) == sum(len(c.ids) for group in expected for c in group.completions)
    enough = sampling.max_completion_length > 1
    assert engine.graphs.verified == ({sampling.is_greedy} if enough else set())


@pytest.mark.parametrize("every", [1, 3, 1000])
@pytest.mark.parametrize("width", [1, 16])
def test_nor_do_they_depend_on_when_the_host_reads_which_rows_ended(random_model, monkeypatch, every, width):
    monkeypatch.setattr(graphs_module, "SYNC_EVERY", every)
    monkeypatch.setattr(graphs_module, "OWN_BUCKET", width)
    monkeypatch.setattr(static_batch, "PROMPT_BUCKET", width)
    loop, engine = engines(random_model)
    problems = problems_of(loop.policy, *TEXTS)
    expected = loop.generate(problems, SAMPLING, address=ADDRESS)
    assert ids(engine.generate(problems, SAMPLING, address=ADDRESS)) == ids(expected)


def test_a_later_rollout_finds_steps_and_memory_again(random_model):
    loop, engine = engines(random_model)
    problems = problems_of(loop.policy, *TEXTS)
    engine.generate(problems, SAMPLING, address=ADDRESS)
    steps = dict(engine.graphs._steps)
    addresses = {name: buffer.data_ptr() for name, buffer in engine.graphs._buffers.flat.items()}
    assert len({key[0] for key in steps}) >= 2, "rows should have left"
    for p in engine.policy.model.parameters():
        p.data.mul_(1.1)  # an update
    loop.policy.model.load_state_dict(engine.policy.model.state_dict())
    found = engine.generate(problems, SAMPLING, address=(7, "rollout", 4))
    assert ids(found) == ids(loop.generate(problems, SAMPLING, address=(7, "rollout", 4)))
    assert addresses == {name: buffer.data_ptr() for name, buffer in engine.graphs._buffers.flat.items()}
    assert steps.items() <= engine.graphs._steps.items()
    # Longer completions need larger buffers: their addresses change, and no old step may be replayed.
    longer = replace(SAMPLING, max_completion_length=60)
    assert ids(engine.generate(problems, longer, address=ADDRESS)) == ids(
        loop.generate(problems, longer, address=ADDRESS)
    )
    assert not steps.items() & engine.graphs._steps.items()
    engine.graphs.release()
    assert not engine.graphs._buffers.flat
    again = engine.generate(problems, SAMPLING, address=(7, "rollout", 4))
    assert ids(again) == ids(found)


def test_no_more_steps_are_kept_than_told(random_model, monkeypatch):
    monkeypatch.setattr(graphs_module, "MAX_GRAPHS", 2)
    loop, engine = engines(random_model)
    problems = problems_of(loop.policy, *TEXTS)
    found = engine.generate(problems, SAMPLING, address=ADDRESS)
    assert ids(found) == ids(loop.generate(problems, SAMPLING, address=ADDRESS))
    assert 1 <= len(engine.graphs._steps) <= 2


def test_bf16_tokens_score_as_the_loops_do(random_model):
    loop, engine = engines(random_model, precision="bf16")
    problems = problems_of(loop.policy, *TEXTS)
    expected = loop.generate(problems, SAMPLING, address=ADDRESS)
    found = engine.generate(problems, SAMPLING, address=ADDRESS)
    rows = [(a, b) for x, y in zip(ids(found), ids(expected), strict=True) for a, b in zip(x, y, strict=True)]
    assert sum(a == b for a, b in rows) > 0.8 * len(rows)


@pytest.mark.parametrize("mistake", ["raises", "gives other logits"])
@pytest.mark.slow
def test_what_cannot_be_captured_is_decoded_by_the_loop(random_model, mistake):
    loop, engine = engines(random_model)
    said, head = [], engine.graphs.head

    def wrong(hidden):
        if mistake == "raises":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return 1.5 * head(hidden)

    engine.graphs.head, engine.warn = wrong, said.append
    problems = problems_of(loop.policy, *TEXTS)
    expected = loop.generate(problems, SAMPLING, address=ADDRESS)
    for _ in range(2):
        assert ids(engine.generate(problems, SAMPLING, address=ADDRESS)) == ids(expected)
    reason = {
        "raises": "operation not permitted when stream is capturing",
        "gives other logits": "they give other log-probs than the same steps without graphs",
    }[mistake]
    assert said == [f"note: decode steps are not captured in CUDA graphs ({reason})"]
    assert engine.graphs is None


def test_where_memory_is_short_the_loop_goes_on(random_model):
    loop, engine = engines(random_model)
    said = []
    engine.warn = said.append
    problems = problems_of(loop.policy, *TEXTS)
    expected = loop.generate(problems, SAMPLING, address=ADDRESS)

    def full(hidden):
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine.graphs.head = full
    assert engine.generate(problems, SAMPLING, address=ADDRESS) == expected
    assert said == ["note: decode steps are not captured in CUDA graphs (CUDA out of memory)"]


def completions(groups):
    return [c for group in groups for c in group.completions]


@pytest.fixture(scope="module")
def stops_of_texts(random_model) -> dict[str, tuple[str, ...]]:
    """Stop strings that occur in the sampled texts."""
    policy = load(random_model, packed=True)
    rows = completions(BuiltinEngine(policy).generate(problems_of(policy, *TEXTS), SAMPLING, address=ADDRESS))
    texts = sorted((c.text for c in rows), key=len, reverse=True)
    assert min(map(len, texts[:4])) > 30, "texts should be long enough to be cut"
    return {
        "within a look": (texts[0][10:13],),
        "across looks": (texts[1][4:12],),
        "of many rows": (texts[0][2], texts[1][5]),
        "first tokens": tuple({text[0] for text in texts if text}),
        "long": (texts[2][1:31],),
        "last token": (texts[0][-2:],),
        "absent": ("no such text",),
        "special": ("<|im_start|>", texts[3][6:8]),
        "most special tokens": ("<|im_start|>", "<|im_end|>"),
    }


MORE_STOPS = ["within a look", "of many rows", "long", "last token", "absent", "most special tokens"]


@pytest.mark.parametrize(
    "kind",
    ["across looks", "first tokens", "special", *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_STOPS)],
)
def test_stop_strings_end_the_tokens_of_the_loop(random_model, stops_of_texts, kind):
    sampling = replace(SAMPLING, stop=stops_of_texts[kind])
    loop, engine = engines(random_model)
    problems = problems_of(loop.policy, *TEXTS)
    expected = loop.generate(problems, sampling, address=ADDRESS)
    counted = []
    found = engine.generate(problems, sampling, address=ADDRESS, on_tokens=counted.append)
    for a, b in zip(completions(found), completions(expected), strict=True):
        assert (a.ids, a.text, a.finished) == (b.ids, b.text, b.finished)
        assert a.sampling_logprobs == pytest.approx(b.sampling_logprobs, abs=1e-4)
    assert sum(counted) == sum(len(c.ids) for c in completions(expected)) and min(counted) >= 0
    unstopped = completions(loop.generate(problems, SAMPLING, address=ADDRESS))
    ends, other = ([(c.ids, c.finished) for c in rows] for rows in (completions(found), unstopped))
    assert (ends == other) == (kind == "absent"), "the strings should end something"


@pytest.mark.parametrize(
    ("every", "T"), [(5, 9), *(pytest.param(*x, marks=pytest.mark.slow) for x in [(1, 40), (1000, 40)])]
)
def test_stop_strings_end_the_same_tokens_whenever_the_host_looks(random_model, stops_of_texts, monkeypatch, every, T):
    """Also at the limit, where a row that stops with its last token has finished."""
    monkeypatch.setattr(graphs_module, "SYNC_EVERY", every)
    stop = stops_of_texts["of many rows"] + stops_of_texts["across looks"]
    sampling = replace(SAMPLING, stop=stop, max_completion_length=T)
    loop, engine = engines(random_model)
    problems = problems_of(loop.policy, *TEXTS)
    expected = completions(loop.generate(problems, sampling, address=ADDRESS))
    found = completions(engine.generate(problems, sampling, address=ADDRESS))
    assert [(c.ids, c.text, c.finished) for c in found] == [(c.ids, c.text, c.finished) for c in expected]


@pytest.mark.slow
def test_a_later_rollout_may_have_other_special_tokens_as_stops(random_model):
    loop, engine = engines(random_model)
    problems = problems_of(loop.policy, *TEXTS)
    for stop in ((), ("<|im_start|>",), ()):
        sampling = replace(SAMPLING, stop=stop)
        expected = loop.generate(problems, sampling, address=ADDRESS)
        assert ids(engine.generate(problems, sampling, address=ADDRESS)) == ids(expected)


def test_on_cpu_nothing_is_captured(random_model):
    engine = BuiltinEngine(load(random_model, packed=True), cuda_graphs=True)
    engine.generate(problems_of(engine.policy, *TEXTS), SAMPLING, address=ADDRESS)
    assert engine.graphs is None and not engine._kept_copies


def test_shapes():
    assert [padded_rows(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17, 24, 25, 64, 65)] == [
        1, 2, 4, 4, 8, 8, 8, 8, 16, 16, 16, 32, 32, 32, 64, 128]  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kept_copies_of_weights_follow_the_weights_at_their_addresses(random_model, precision, monkeypatch):
    """As on a GPU, where weights are not re-ordered."""
    monkeypatch.setattr("grpo.rollout.weights._can_reorder", lambda weight: False)
    model, kept = load(random_model).model, {}
    with copied_weights(model, precision, kept):
        pass
    addresses = {layer: fused.weight.data_ptr() for layer, fused in kept.items()}
    linear = [module for module in model.modules() if type(module) is torch.nn.Linear]
    assert set(addresses) == (set(linear) if precision == "bf16" else set())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
    with copied_weights(model, precision, kept):
        pass
    assert addresses == {layer: fused.weight.data_ptr() for layer, fused in kept.items()}
    fresh = {}
    with copied_weights(model, precision, fresh):
        assert fresh.keys() == kept.keys()
    for layer, fused in kept.items():
        torch.testing.assert_close(fused.weight, fresh[layer].weight, rtol=0, atol=0)
        if fused.bias is not None:
            torch.testing.assert_close(fused.bias, fresh[layer].bias, rtol=0, atol=0)


def test_the_model_is_itself_again_also_if_kept_copies_are_dropped_in_between(random_model):
    """As happens when graphs are switched off in the middle of a rollout."""
    model, kept = load(random_model).model, {}
    modules = dict(model.named_modules())
    with copied_weights(model, "bf16", kept):
        assert dict(model.named_modules()) != modules
        kept.clear()
    assert dict(model.named_modules()) == modules
