"""The largest step, tried first, changes no bit of the run, and where memory is short it names a
value that fits."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, run_trainer, save_random_model, small_run

from grpo.config import load_config
from grpo.distributed import OtherRankFailed, start_world
from grpo.run.memory import OUT_OF_MEMORY, try_largest_step
from grpo.run.prepare import prepare

VOLATILE = ("step_time", "tokens_per_second", "time/")


def results_of(output, step: int):
    """Metrics without times, and the SHA-256 of every tensor file of a checkpoint."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    files = json.loads((output / f"checkpoint-{step}" / "manifest.json").read_text())["files"]
    return (
        [
            {key: value for key, value in row.items() if not key.startswith(VOLATILE)}
            for row in rows
        ],
        {name: files[name] for name in ("model.safetensors", "trainer/states/__0_0.distcp")},
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_try_changes_no_bit(tmp_path, random_model, ranks):
    """Stopped after two steps and continued, so that it also happens when the optimizer has its
    averages."""
    arguments = [
        *small_run(random_model, tmp_path),
        "algorithm.num_iterations=2",
        "model.gradient_checkpointing=true",
    ]
    for steps in (2, 4):
        results = []
        for tried in ("true", "false"):
            more = [
                f"optim.max_steps={steps}",
                f"output_dir={tmp_path}/{tried}",
                f"runtime.try_largest_step={tried}",
            ]
            done = run_trainer(*arguments, *more, "checkpoint.accept_changes=true", ranks=ranks)
            assert ("the largest possible step was tried in " in done.stdout) == (tried == "true")
            results.append(results_of(tmp_path / tried, steps))
        assert results[0] == results[1]


def test_it_restores_generators_gradients_and_weights(tmp_path):
    """Dropout draws from the global generator, whose state is restored."""
    model = save_random_model(tmp_path / "model", attention_dropout=0.1)
    config = load_config([*small_run(model, tmp_path / "run"), "model.disable_dropout=false"])
    run = prepare(config, start_world(config.runtime))
    try:
        state = torch.get_rng_state()
        weights = [p.clone() for p in run.learner.policy.model.parameters()]
        try_largest_step(run, run.tasks.schedule.problems)
        assert torch.equal(torch.get_rng_state(), state)
        for p, before in zip(run.learner.policy.model.parameters(), weights, strict=True):
            assert p.grad is None and torch.equal(p, before)
        assert not run.learner.optimizer.state and run.learner.policy.model.training
        run.learner.bare_scorer(torch.arange(12)[None], torch.tensor([4]), torch.ones(1, 8) > 0)
        assert not torch.equal(torch.get_rng_state(), state), "a forward pass does draw"
    finally:
        run.close()


def test_it_takes_the_longest_prompts_and_completions_of_full_length(
    tmp_path, random_model, monkeypatch
):
    """A rollout of 6 problems x 4 completions of 12 tokens; two packed micro-batches of at most 100
    tokens."""
    more = ["optim.tokens_per_microbatch=100", "algorithm.num_minibatches=2"]
    config = load_config([*small_run(random_model, tmp_path / "run"), *more])
    run = prepare(config, start_world(config.runtime))
    problems = run.tasks.schedule.problems
    lengths = sorted((len(problem.prompt_ids) for problem in problems), reverse=True)
    L = lengths[0]
    rollouts = []
    passes = []
    monkeypatch.setattr(
        run.sampler.engine, "dry_run", lambda *arguments: rollouts.append(arguments)
    )

    def watched(scorer, inputs, outputs):
        sequence_ids_BS, _, mask_BT, group_B = inputs
        num_prompts = len(group_B.unique())
        num_tokens = num_prompts * L + int(mask_BT.sum())
        passes.append(num_tokens)
        assert sequence_ids_BS.shape[1] == L + 12 and mask_BT.all()
        # prompts that begin alike would be computed in part once
        assert num_prompts == 1 or len(sequence_ids_BS[:, 0].unique()) == 2
        outputs[0].register_hook(lambda _: passes.append("backward"))

    run.learner.bare_scorer.register_forward_hook(watched)
    try:
        try_largest_step(run, problems)
    finally:
        run.close()
    ((prompts, sampling),) = rollouts
    assert [len(prompt) for prompt in prompts[::4]] == lengths[:6] and len(prompts) == 24
    assert len({prompt[0] for prompt in prompts}) == 2
    assert sampling == run.sampler.sampling and sampling.max_completion_length == 12
    # Prompts of 14 tokens: four completions of one group and two of the next make 2 * 14 + 6 * 12.
    assert L == 14 and passes == [100, "backward", 100, "backward"]


# --- memory that is short


LIMITED = """
import os, resource, sys
sys.path.insert(0, {root!r})
import grpo.run.memory, grpo.run.prepare, train_grpo
try_largest_step = grpo.run.memory.try_largest_step

def under_a_limit(run, problems):
    if os.environ.get("RANK", "0") == {rank!r}:
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + {mib} * 2**20, resource.RLIM_INFINITY))
    return try_largest_step(run, problems)

grpo.run.prepare.try_largest_step = under_a_limit
sys.exit(train_grpo.main(sys.argv[1:]))
"""


def run_with(mib: int, *arguments: str, tmp_path, rank: int = 0, ranks: int = 1):
    """A run whose memory may grow by so many MiB from the start of the try."""
    script = tmp_path / "limited.py"
    script.write_text(LIMITED.format(root=str(ROOT), mib=mib, rank=str(rank)))
    # Only tensors shall count towards the limit: no holes in the heap (large allocations get pages
    # of their own and return them), no arenas of threads, none of the kernels that oneDNN caches
    # for every shape (150 MiB in a rollout).
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
    }
    env |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "LRU_CACHE_CAPACITY": "1"}
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        if ranks > 1
        else []
    )
    return subprocess.run(
        [
            sys.executable,
            *launcher,
            str(script),
            *arguments,
            "runtime.try_largest_step=true",
            "runtime.threads_per_rank=1",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env=env,
    )


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("long"), max_position_embeddings=1024)


def long_run(model, output, *more: str) -> list[str]:
    """64 completions of 400 tokens a step."""
    return [
        *small_run(model, output),
        "rollout.prompts_per_step=8",
        "rollout.num_generations=8",
        "rollout.max_completion_length=400",
        "optim.max_steps=1",
        "eval.before_training=false",
        "data.max_eval_samples=1",
        "logging.log_completions=0",  # pyarrow reserves a GiB of addresses
        *more,
    ]


DOES_NOT_FIT = "the largest possible step does not fit in memory: "


def refused(done) -> str:
    """The message of the one line of error."""
    assert done.returncode == 2, done.stderr[-3000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr
    return line.removeprefix(f"error: {DOES_NOT_FIT}")


def chosen(done, key: str) -> list[str]:
    """The values that the run chose for a key because the default did not fit."""
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the largest possible step was tried in " in done.stdout
    return re.findall(
        rf"^note      {DOES_NOT_FIT}{key}=.* is too much .*; using (\d+), equal", done.stdout, re.M
    )


def state_of(output, step: int) -> dict:
    return json.loads((output / f"checkpoint-{step}" / "trainer" / "state.json").read_text())


@pytest.mark.slow
def test_a_default_that_does_not_fit_is_lowered(tmp_path, long_model):
    """Continued, with more memory, the run keeps the value: its bits are those of a run that was
    not interrupted."""
    output = tmp_path / "run"
    arguments = [
        *long_run(long_model, output),
        "algorithm.beta=0.0",
        "optim.max_steps=2",
        "checkpoint.save_steps=1",
    ]
    (value,) = chosen(run_with(60, *arguments, tmp_path=tmp_path), "optim.tokens_per_microbatch")
    assert 800 < int(value) < 16384 and state_of(output, 2)["tokens_per_microbatch"] == int(value)
    whole = results_of(output, 2)
    shutil.rmtree(output / "checkpoint-2")
    continued = run_with(4000, *arguments, tmp_path=tmp_path)
    assert not chosen(continued, "optim.tokens_per_microbatch") and "step 2/2" in continued.stdout
    assert results_of(output, 2) == whole


@pytest.mark.slow
def test_a_rollout_too_large(tmp_path):
    """Without a limit by the user one is chosen. 40,000 tokens need 140 MiB, 80,000 need 240."""
    model = save_random_model(
        tmp_path / "model", max_position_embeddings=1024, hidden_size=128, num_key_value_heads=4
    )
    arguments = long_run(
        model,
        tmp_path / "run",
        "rollout.prompts_per_step=32",
        "optim.tokens_per_microbatch=1000",
        "algorithm.beta=0.0",
    )
    (value,) = chosen(run_with(220, *arguments, tmp_path=tmp_path), "rollout.tokens_in_flight")
    assert 800 < int(value) < 105984
    assert state_of(tmp_path / "run", 1)["tokens_in_flight"] == int(value)


@pytest.mark.slow
def test_not_even_one_fits(tmp_path):
    """In wide layers one completion needs less than 30 MiB while it is sampled, and more than 70 in
    an update.

    (14 and 70 with torch 2.13; torch 2.11, built for CUDA: 30 and 80.)
    """
    model = save_random_model(
        tmp_path / "model", max_position_embeddings=1024, intermediate_size=4096
    )
    arguments = long_run(model, tmp_path / "run", "rollout.tokens_in_flight=500")
    told = refused(run_with(45, *arguments, tmp_path=tmp_path))
    assert re.fullmatch(
        r"optim\.tokens_per_microbatch=16384 is too much for prompts and completions of 414 tokens, "
        r"and not even one of them fits: lower rollout\.max_completion_length, .*",
        told,
    )


@pytest.mark.slow
def test_all_ranks_stop_where_memory_is_short_on_one(tmp_path, long_model):
    arguments = long_run(long_model, tmp_path / "run", "algorithm.beta=0.0")
    done = run_with(
        60, *arguments, "optim.tokens_per_microbatch=16384", tmp_path=tmp_path, ranks=2, rank=1
    )
    assert done.returncode != 0
    (found,) = re.findall(
        r"^error: the largest possible step does not fit .*tokens_per_microbatch=16384 .*; (\d+) fits$",
        done.stderr,
        re.M,
    )
    more = f"optim.tokens_per_microbatch={found}"
    done = run_with(60, *arguments, more, tmp_path=tmp_path, ranks=2, rank=1)
    assert done.returncode == 0 and "step 1/1" in done.stdout, done.stderr[-3000:]


def test_out_of_memory_errors_are_recognised():
    for ask in (lambda: torch.empty(1 << 50, dtype=torch.uint8), lambda: bytearray(1 << 62)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            ask()
        on_another_rank = OtherRankFailed(f"rank 1: {type(caught.value).__name__}: {caught.value}")
        for error in (caught.value, on_another_rank):
            assert re.search(OUT_OF_MEMORY, repr(error))
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not re.search(OUT_OF_MEMORY, repr(caught.value))
