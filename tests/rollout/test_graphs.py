"""Decode steps at fixed addresses and in few shapes give the loop's tokens. (Here without the capture, which needs a GPU.)"""

from dataclasses import replace

import pytest
import torch
from conftest import load
from test_rollout import ADDRESS, TEXTS, ids, problems_of

from grpo.rollout import Sampling, generate
from grpo.rollout import cuda_graphs as graphs_module
from grpo.rollout.cuda_graphs import Graphs, shape_for
from grpo.rollout.llama_decoder import Decoder
from grpo.rollout.weights import rollout_weights

SAMPLING = Sampling(num_generations=8, max_completion_length=40)


def with_steps(random_model, **options):
    """A policy that decodes by :mod:`grpo.rollout.cuda_graphs`."""
    policy = load(random_model, packed=True, **options)
    decoder, head = Decoder(policy.model.model, {}), policy.model.get_output_embeddings()
    policy.graphs = Graphs(decoder, head, policy.eos_ids, policy.device, capture=False)
    policy.say = pytest.fail
    return policy


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"tokens_in_flight": 300},
        {"tokens_in_flight": 1, "num_generations": 2},
        {"max_completion_length": 1},
        {"max_completion_length": 8},
        {"max_completion_length": 150, "num_generations": 3},
        {"num_generations": 1},
    ],
    ids=str,
)
def test_tokens_are_those_of_the_loop(random_model, changes):
    """Prompts of 1 to 40 tokens; groups lose rows unevenly, and prompts all of theirs; shapes grow with the length."""
    sampling = replace(SAMPLING, **changes)
    plain, policy = load(random_model, packed=True), with_steps(random_model)
    problems = problems_of(plain, *TEXTS, "7")
    expected = generate(plain, problems, sampling, address=ADDRESS)
    counted = []
    found = generate(policy, problems, sampling, address=ADDRESS, on_tokens=counted.append)
    assert ids(found) == ids(expected)
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one.completions, other.completions, strict=True):
            assert a.sampling_logprobs == pytest.approx(b.sampling_logprobs, abs=1e-4)
            assert (a.text, a.finished) == (b.text, b.finished)
    assert sum(counted) == sum(len(c.ids) for group in expected for c in group.completions)
    assert policy.graphs.checked == (sampling.tokens_in_flight != 1)  # not by one row


@pytest.mark.parametrize("every", [1, 3, 1000])
@pytest.mark.parametrize("width", [1, 16])
def test_nor_do_they_depend_on_when_rows_are_looked_at(random_model, monkeypatch, every, width):
    monkeypatch.setattr(graphs_module, "LOOK_EVERY", every)
    monkeypatch.setattr(graphs_module, "WIDTH", width)
    monkeypatch.setattr(graphs_module, "PROMPT_WIDTH", width)
    plain, policy = load(random_model, packed=True), with_steps(random_model)
    problems = problems_of(plain, *TEXTS)
    expected = generate(plain, problems, SAMPLING, address=ADDRESS)
    assert ids(generate(policy, problems, SAMPLING, address=ADDRESS)) == ids(expected)


def test_a_later_rollout_finds_steps_and_memory_again(random_model):
    plain, policy = load(random_model, packed=True), with_steps(random_model)
    problems = problems_of(plain, *TEXTS)
    generate(policy, problems, SAMPLING, address=ADDRESS)
    steps = dict(policy.graphs._graphs)
    addresses = {name: memory.data_ptr() for name, memory in policy.graphs._memory.items()}
    assert len({key[0] for key in steps}) >= 2, "rows should have left"
    for p in policy.model.parameters():
        p.data.mul_(1.1)  # an update
    plain.model.load_state_dict(policy.model.state_dict())
    found = generate(policy, problems, SAMPLING, address=(7, "rollout", 4))
    assert ids(found) == ids(generate(plain, problems, SAMPLING, address=(7, "rollout", 4)))
    assert addresses == {name: memory.data_ptr() for name, memory in policy.graphs._memory.items()}
    assert steps.items() <= policy.graphs._graphs.items()
    # Longer completions need more room: it moves, and no step may write to where it was.
    longer = replace(SAMPLING, max_completion_length=60)
    assert ids(generate(policy, problems, longer, address=ADDRESS)) == ids(
        generate(plain, problems, longer, address=ADDRESS)
    )
    assert not steps.items() & policy.graphs._graphs.items()
    policy.graphs.let_go()
    assert not policy.graphs._memory
    again = generate(policy, problems, SAMPLING, address=(7, "rollout", 4))
    assert ids(again) == ids(found)


def test_no_more_steps_are_kept_than_told(random_model, monkeypatch):
    monkeypatch.setattr(graphs_module, "MOST_GRAPHS", 2)
    plain, policy = load(random_model, packed=True), with_steps(random_model)
    problems = problems_of(plain, *TEXTS)
    found = generate(policy, problems, SAMPLING, address=ADDRESS)
    assert ids(found) == ids(generate(plain, problems, SAMPLING, address=ADDRESS))
    assert 1 <= len(policy.graphs._graphs) <= 2


def test_bf16_tokens_score_as_the_loops_do(random_model):
    plain, policy = load(random_model, packed=True, precision="bf16"), with_steps(random_model, precision="bf16")
    problems = problems_of(plain, *TEXTS)
    expected = generate(plain, problems, SAMPLING, address=ADDRESS)
    found = generate(policy, problems, SAMPLING, address=ADDRESS)
    rows = [(a, b) for x, y in zip(ids(found), ids(expected), strict=True) for a, b in zip(x, y, strict=True)]
    assert sum(a == b for a, b in rows) > 0.8 * len(rows)


@pytest.mark.parametrize("mistake", ["raises", "gives other logits"])
def test_what_cannot_be_captured_is_decoded_by_the_loop(random_model, mistake):
    plain, policy = load(random_model, packed=True), with_steps(random_model)
    said, head = [], policy.graphs.head

    def wrong(hidden):
        if mistake == "raises":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return 1.5 * head(hidden)

    policy.graphs.head, policy.say = wrong, said.append
    problems = problems_of(plain, *TEXTS)
    expected = generate(plain, problems, SAMPLING, address=ADDRESS)
    for _ in range(2):
        assert ids(generate(policy, problems, SAMPLING, address=ADDRESS)) == ids(expected)
    reason = {
        "raises": "operation not permitted when stream is capturing",
        "gives other logits": "they give other tokens than the same steps without",
    }[mistake]
    assert said == [f"note: decode steps are not captured in CUDA graphs ({reason})"]
    assert policy.graphs is None


def test_where_memory_is_short_the_loop_goes_on(random_model):
    policy = with_steps(random_model)
    said = []
    policy.say = said.append
    expected = generate(load(random_model, packed=True), problems_of(policy, *TEXTS), SAMPLING, address=ADDRESS)

    def full(hidden):
        raise torch.OutOfMemoryError("CUDA out of memory")

    policy.graphs.head = full
    assert generate(policy, problems_of(policy, *TEXTS), SAMPLING, address=ADDRESS) == expected
    assert said == ["note: decode steps are not captured in CUDA graphs (CUDA out of memory)"]


def test_stop_texts_are_looked_for_by_the_loop(random_model):
    policy = with_steps(random_model)
    policy.graphs.decode = pytest.fail
    generate(policy, problems_of(policy, *TEXTS), replace(SAMPLING, stop=("1",)), address=ADDRESS)


def test_on_cpu_nothing_is_captured(random_model):
    policy = load(random_model, packed=True)
    policy.capture = True
    with policy.sampling():
        assert policy.graphs is None


def test_shapes():
    assert [shape_for(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17, 24, 25, 64, 65)] == [
        1, 2, 4, 4, 8, 8, 8, 8, 16, 16, 16, 32, 32, 32, 64, 128]  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kept_copies_of_weights_follow_the_weights_at_their_addresses(random_model, precision, monkeypatch):
    """As on a GPU, where weights are not re-ordered."""
    monkeypatch.setattr("grpo.rollout.weights._can_reorder", lambda weight: False)
    model, kept = load(random_model).model, {}
    with rollout_weights(model, precision, kept) as products:
        assert products is kept
        addresses = {layer: product.weight.data_ptr() for layer, product in products.items()}
    assert len(addresses) == (
        len([m for m in model.modules() if type(m) is torch.nn.Linear]) if precision == "bf16" else 0
    )
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
    with rollout_weights(model, precision, kept) as products, rollout_weights_of_a_copy(model, precision) as fresh:
        assert addresses == {layer: product.weight.data_ptr() for layer, product in products.items()}
        for name, layer in model.named_modules():
            if layer in products:
                torch.testing.assert_close(products[layer].weight, fresh[name].weight, rtol=0, atol=0)
                if products[layer].bias is not None:
                    torch.testing.assert_close(products[layer].bias, fresh[name].bias, rtol=0, atol=0)


def test_layers_compute_for_themselves_again_whatever_becomes_of_the_copies(random_model):
    model, kept = load(random_model).model, {}
    with rollout_weights(model, "bf16", kept):
        assert any("forward" in vars(m) for m in model.modules())
        kept.clear()
    assert not any("forward" in vars(m) for m in model.modules())


def rollout_weights_of_a_copy(model, precision):
    import contextlib
    import copy

    @contextlib.contextmanager
    def by_name():
        twin = copy.deepcopy(model)
        for module in twin.modules():
            vars(module).pop("forward", None)
        with rollout_weights(twin, precision) as products:
            yield {name: products[layer] for name, layer in twin.named_modules() if layer in products}

    return by_name()
