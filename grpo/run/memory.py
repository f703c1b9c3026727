"""The largest step, tried before the first one, so that memory that is too small shows at once.

The try takes the longest prompts, and completions of full length. A default that does not fit is
halved until it does, on all ranks alike. Checkpoints hold the lowered value, so that a continued
run computes in the same parts.
"""

import gc
import re
from collections.abc import Callable
from contextlib import nullcontext

import torch

from grpo.algorithm.batch import Completion, Group, Problem, collate, microbatch_rows
from grpo.checkpoint.saver import Progress
from grpo.config import Config
from grpo.distributed import gradient_sync
from grpo.run.records import Learner, Run

OUT_OF_MEMORY = (
    "out of memory|MemoryError|DefaultCPUAllocator"
    "|STATUS_ALLOC_FAILED|STATUS_NOT_INITIALIZED"  # cuBLAS
    "|could not create a primitive"  # oneDNN
)
"""A pattern of all errors when memory runs out, on this rank or another: they share no class."""
MEMORY_LIMITS = ("optim.tokens_per_microbatch", "rollout.tokens_in_flight")
"""Settings whose defaults may be lowered; the fields of ``Progress`` that hold the chosen values
have their names."""


def try_largest_step(run: Run, problems: list[Problem]) -> str:
    """Try the largest micro-batches, then the largest rollout; return a line for the summary.

    Random generators, weights, gradients and the optimizer do not change.

    Raises:
        ValueError: on all ranks, if memory runs out on one and no default can be lowered.
    """
    world = run.world
    config = run.config
    learner = run.learner
    sampling = run.sampler.sampling
    G = sampling.num_generations
    num_problems = config.rollout.prompts_per_step // world.size
    longest = sorted(problems, key=lambda problem: -len(problem.prompt_ids))[:num_problems]
    prompts = [problem.prompt_ids for problem in longest for _ in range(G)]
    row_tokens = len(prompts[0]) + sampling.max_completion_length

    # All groups have the longest prompt, so that no micro-batch is heavier than the first.
    num_groups = num_problems // config.algorithm.num_minibatches
    completion = Completion((0,) * sampling.max_completion_length, text="", finished=False)
    groups = [Group(longest[0], (completion,) * G)] * num_groups
    minibatch = collate(groups, torch.zeros(num_groups, G), pad_id=0, device=world.device)
    devices = [world.device] if world.device.type == "cuda" else []
    scorer = learner.bare_scorer  # DDP would average the gradients: a collective

    def update(tokens: int) -> None:
        # In place of what CUDA graphs keep between rollouts, and what else a real step takes: ten
        # fp32 tensors of vocabulary size for each row are a little more than was measured.
        num_kept = 10 * len(prompts) if devices and learner.policy.is_llama else 0
        vocabulary = len(learner.policy.model.get_input_embeddings().weight)
        _held = torch.empty(num_kept, vocabulary, device=world.device)
        # Of several micro-batches, the second runs beside the gradients of the first.
        parts = microbatch_rows(minibatch, tokens, packed=scorer.packed)[:2]
        for rows in parts:
            with gradient_sync(scorer, enabled=rows is parts[-1]):
                with learner.policy.autocast():
                    logprobs_BT, _ = scorer(*minibatch.select(rows).scorer_inputs)
                logprobs_BT.sum().backward()

    def sample(tokens: int) -> None:
        run.sampler.engine.dry_run(prompts[: max(tokens // row_tokens, 1)], sampling)

    seconds = {}
    # FSDP gathers the weights of the engine: a collective, before memory may run out on one rank.
    weights = run.sampler.current_weights() if learner.is_sharded else nullcontext()
    with world.timed("largest step", seconds), torch.random.fork_rng(devices):
        most = learner.tokens_per_microbatch
        _fit(learner, "optim.tokens_per_microbatch", most, row_tokens, update)
        with weights:
            most = sampling.tokens_in_flight or len(prompts) * row_tokens
            _fit(learner, "rollout.tokens_in_flight", most, row_tokens, sample)
    torch.cuda.empty_cache()
    return f"memory    the largest possible step was tried in {seconds['largest step']:.1f} s"


def _fit(learner: Learner, key: str, most: int, least: int, attempt: Callable) -> None:
    """Halve a number of tokens until ``attempt`` fits in memory with it, and use it for the key.

    ValueError if the user has set the key, or if the ``least`` tokens, of one row, do not fit.
    """
    problem = (
        f"the largest possible step does not fit in memory: {key}={most} is too much for "
        f"prompts and completions of {least} tokens"
    )
    trained = [p for p in learner.policy.model.parameters() if p.requires_grad]
    tokens = most
    while True:
        gc.collect()  # frees the tensors of an attempt that failed
        try:
            with learner.world.fail_together():
                # The first update creates two averages of each gradient.
                averages = []
                for parameter in 2 * trained:
                    if parameter not in learner.optimizer.state:
                        averages.append(torch.empty_like(parameter))
                attempt(tokens)
            break
        except Exception as error:
            if not re.search(OUT_OF_MEMORY, repr(error)):
                raise
            if learner.is_sharded:  # no other pass can begin after one that failed
                raise ValueError(f"{problem}: try {max(tokens // 2, least)}") from error
            if tokens <= least:
                raise ValueError(
                    f"{problem}, and not even one of them fits: "
                    "lower rollout.max_completion_length, set model.gradient_checkpointing=true, "
                    "or take a smaller model"
                ) from error
            tokens = max(tokens // 2, least)
        finally:
            # The gradients of DDP are views of its buckets, which stay.
            learner.optimizer.zero_grad(set_to_none=learner.scorer is learner.bare_scorer)

    if tokens < most:
        if _is_set(learner.config, key):
            raise ValueError(f"{problem}; {tokens} fits")
        setattr(learner.progress, key.split(".")[1], tokens)
        learner.reporter.print(f"note      {problem}; using {tokens}, equal up to rounding")


def forget_lowered_limits(progress: Progress, config: Config) -> None:
    """Drop the chosen values of settings that the user has set."""
    for key in MEMORY_LIMITS:
        if _is_set(config, key):
            setattr(progress, key.split(".")[1], None)


def _is_set(config: Config, key: str) -> bool:
    """True if the user has set a setting."""
    section, name = key.split(".")
    return name in getattr(config, section).model_fields_set
