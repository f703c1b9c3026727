"""Parts compiled for the CPU: the plain code's numbers, few compilations, off where they are wrong."""

from types import SimpleNamespace

import pytest
import torch
from architectures import checked
from conftest import load
from test_packing import rows

from grpo.algorithm import logprobs
from grpo.algorithm.logprobs import _logits_gradient, _score
from grpo.attention import ForkedCache, fast_paths
from grpo.config import load_config
from grpo.distributed import start_world
from grpo.run.proofs import prove_update

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_stays_on():
    fast_paths.reset()
    yield
    fast_paths.reset()


@pytest.fixture
def as_on_cuda(monkeypatch):
    monkeypatch.setattr(fast_paths, "may_use", lambda device: True)


@pytest.fixture
def compiled_once():
    """A second variant of a compiled function is beyond the limit."""
    with torch._dynamo.config.patch(recompile_limit=1):
        yield


@pytest.fixture
def scorer(random_model):
    made, why_padded = checked(load(random_model).model)
    assert why_padded is None
    return made


def world():
    return start_world(load_config(["runtime.device=cpu"]).runtime)


def test_nothing_is_compiled_on_a_cpu_deterministically_or_where_dynamo_is_disabled(monkeypatch):
    cuda = torch.device("cuda")
    assert fast_paths.may_use(cuda)
    assert not fast_paths.may_use(torch.device("cpu"))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert not fast_paths.may_use(cuda)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    torch.use_deterministic_algorithms(True)
    try:
        assert not fast_paths.may_use(cuda)
    finally:
        torch.use_deterministic_algorithms(False)


def test_parts_are_on_inside_of_a_block_alone():
    fast_paths.switch_on(fast_paths.SCORES)
    with fast_paths.only(fast_paths.STEP):
        assert fast_paths.is_on(fast_paths.STEP)
        assert not fast_paths.is_on(fast_paths.SCORES)
    assert fast_paths.is_on(fast_paths.SCORES)
    fast_paths.reset()
    assert not fast_paths.is_on(fast_paths.SCORES)


@pytest.mark.parametrize(
    ("gradient", "others_agree", "reason"),
    [
        (_logits_gradient, True, None),
        (lambda *inputs: 1.01 * _logits_gradient(*inputs), True, "results differ by 0.01"),
        (lambda *inputs: torch.nan * _logits_gradient(*inputs), True, "results differ by nan"),
        (lambda *inputs: 1 / 0, True, "division by zero"),
        (_logits_gradient, False, "it failed on another rank"),
    ],
)
def test_log_probs_are_compiled_if_they_are_right_on_all_ranks(
    gradient, others_agree, reason, as_on_cuda, monkeypatch, scorer, random_model
):
    """With other plain code in the compiler's place."""

    def instead(*inputs):
        with fast_paths.only():
            return gradient(*inputs)

    monkeypatch.setattr(fast_paths, "_compile", lambda function: function)
    monkeypatch.setattr(logprobs, "_compiled_gradient", instead)
    ranks = SimpleNamespace(device=torch.device("cpu"), all_true=lambda own: own and others_agree)
    said = prove_update(ranks, load(random_model), scorer, tokens_per_microbatch=64)
    assert fast_paths.is_on(fast_paths.SCORES) == (reason is None) == (said == [])
    if reason is not None:
        assert said[0].startswith("note      without compiled log-probs (")
        assert reason in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_log_probs_and_their_gradient(dtype, temperature, compiled_once):
    torch.manual_seed(0)
    for N in (40, 17, 64, 1):
        logits_NV = 3 * torch.randn(N, 333, dtype=dtype)
        labels_N = torch.randint(333, (N,))
        grad_N = torch.randn(N)
        found = []
        for parts in ((), (fast_paths.SCORES,)):
            with fast_paths.only(*parts):
                scored = _score(logits_NV.clone(), labels_N, temperature)
                gradient = _logits_gradient(logits_NV, labels_N, scored[2], grad_N, temperature)
                assert [part for part in parts if not fast_paths.is_on(part)] == []
            found.append((*scored, gradient))
        for plain, fast in zip(*found, strict=True):
            # A gradient that is stored in bf16 may be rounded to its neighbour, 2^-7 away.
            rtol = 2**-7 if plain.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(fast, plain, rtol=rtol, atol=1e-5)


@pytest.mark.slow
def test_an_update_compiles_nothing_that_the_proof_has_not(
    as_on_cuda, monkeypatch, compiled_once, scorer, random_model
):
    """Padded and packed, in one chunk and in several, with and without gradient."""
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", 40 * scorer.model.config.vocab_size)
    assert prove_update(world(), load(random_model), scorer, tokens_per_microbatch=512) == []
    assert fast_paths.is_on(fast_paths.SCORES)
    batches = [rows(), rows()[:3], [x[2:4] for x in rows()], [x[3:4] for x in rows()]]
    for batch in batches:
        found = []
        for parts in ((), (fast_paths.SCORES,)):
            with fast_paths.only(*parts):
                with torch.no_grad():
                    scorer(*batch)
                logprobs_BT, entropies_BT = scorer(*batch)
                logprobs_BT.square().sum().backward()
                assert [part for part in parts if not fast_paths.is_on(part)] == []
            found.append([logprobs_BT, entropies_BT, *(p.grad for p in scorer.parameters())])
            scorer.zero_grad()
        for plain, fast in zip(*found, strict=True):
            atol = 1e-3 * float(plain.abs().max())
            torch.testing.assert_close(fast, plain, rtol=1e-3, atol=atol)


@pytest.mark.slow
def test_a_compilation_beyond_the_limit_is_said_once(compiled_once, capsys):
    @fast_paths.compiled("doubling")
    def double(x):
        return 2 * x

    tensors = [torch.ones(3), torch.ones(4), torch.ones(3).half(), torch.ones(3).double()]
    for _ in range(2):
        with fast_paths.only("doubling"):
            for x in tensors:
                assert torch.equal(double(x), 2 * x)
            assert not fast_paths.is_on("doubling")
    said = "note      without doubling from now on (1 variants are dynamo's limit)\n"
    assert capsys.readouterr().out == said

    # Another run of the process compiles anew.
    fast_paths.reset()
    with fast_paths.only("doubling"):
        assert torch.equal(double(tensors[2]), 2 * tensors[2])
        assert fast_paths.is_on("doubling")


@pytest.mark.slow
def test_merged_attention_compiles_once(compiled_once):
    """For rows that fill the grid or do not, for one prompt, for two rows and for one."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    for prompt_R in ([0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 2], [0, 0, 0], [0, 1], [0, 0], [0]):
        lengths = [5, 3, 4][: max(prompt_R) + 1]
        R = len(prompt_R)
        keys_and_values = [random(len(lengths), 5, 2, 8) for _ in range(2)]
        inputs = [random(R, heads, 1, 8) for heads in (6, 2, 2)]
        found = []
        for parts in ((), (fast_paths.STEP,)):
            cache = ForkedCache(lengths, capacity=4)
            cache.use_cpu_kernel = False
            cache.store_prompts(0, *keys_and_values)
            cache.fork(torch.tensor(prompt_R))
            with fast_paths.only(*parts):
                cache.begin_token()
                found.append(cache.attend(0, *inputs, None))
                assert [part for part in parts if not fast_paths.is_on(part)] == []
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
