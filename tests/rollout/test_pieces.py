"""The parts of a decode step that are compiled on a GPU, here by PyTorch's compiler for the CPU."""

import pytest
import torch
from test_graphs import SAMPLING, engines
from test_rollout import ADDRESS, TEXTS, ids, problems_of

from grpo.rollout import pieces
from grpo.rollout.llama_decoder import LlamaDecoder
from grpo.rollout.pieces import CompiledPieces, Pieces, check, pieces_for

CPU = torch.device("cpu")


@pytest.mark.slow
def test_compiled_parts_compute_what_plain_ones_compute(random_model):
    compiled = CompiledPieces()
    check(compiled, CPU)
    loop, engine = engines(random_model)
    engine.graphs.pieces = compiled
    engine.graphs.decoder = lambda *inputs: LlamaDecoder(engine.policy.backbone, compiled)(*inputs)
    problems = problems_of(loop.policy, *TEXTS)
    found = engine.generate(problems, SAMPLING, address=ADDRESS)
    assert ids(found) == ids(loop.generate(problems, SAMPLING, address=ADDRESS))


@pytest.mark.parametrize("name", ["add_norm", "rotate", "gated", "weights"])
def test_a_part_that_computes_something_else_is_found(name):
    class Wrong(Pieces):
        pass

    real = getattr(Pieces, name)

    def wrong(*arguments):
        out = real(*arguments)
        return (out[0], out[1] * 1.1) if isinstance(out, tuple) else out * 1.1

    setattr(Wrong, name, staticmethod(wrong))
    with pytest.raises(ValueError, match=f"compiled, {name} gives other numbers"):
        check(Wrong(), CPU)


def test_nothing_is_compiled_on_the_cpu():
    assert type(pieces_for(CPU, pytest.fail)) is Pieces


@pytest.mark.slow
def test_where_the_compiler_fails_it_is_said_and_the_parts_are_plain(monkeypatch):
    def fails(*_):
        raise RuntimeError("no compiler\nmore")

    said = []
    monkeypatch.setattr(pieces, "has_triton", lambda: True)
    monkeypatch.setattr(pieces, "check", fails)
    assert type(pieces_for(torch.device("cuda"), said.append)) is Pieces
    assert said == ["note: parts of decode steps are not compiled (no compiler)"]
