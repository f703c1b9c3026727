"""Try the largest possible step before the first step of a run, so that too little memory shows at
once.

Completions grow during training. Without the try, a run could be out of memory after hours. The
tried step has the longest prompts, and completions of full length. If the default of a memory limit
does not fit, it is halved until it fits, on all ranks alike. Under FSDP no second attempt is
possible: the run ends, with a value to try. Checkpoints hold the lowered limit, so that a continued
run cuts its batches into the same micro-batches.
"""

import gc
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

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
"""Pattern of the messages of out-of-memory errors, which have no common class. The error of another
rank arrives as a message alone."""
MEMORY_LIMITS = ("optim.tokens_per_microbatch", "rollout.tokens_in_flight")
"""Settings whose defaults may be lowered. The fields of ``Progress`` with the same names hold the
lowered values."""


def try_largest_step(run: Run, problems: list[Problem]) -> str:
    """Try the largest micro-batches, then the largest rollout; return a line for the summary.

    Random generators, weights, gradients and the optimizer do not change.

    Raises:
        ValueError: on all ranks, if memory runs out on one rank and no default can be lowered.
    """
    world = run.world
    config = run.config
    learner = run.learner
    sampling = run.sampler.sampling
    G = sampling.num_generations
    max_length = sampling.max_completion_length

    # A rollout of the longest prompts of the dataset.
    num_problems = config.rollout.prompts_per_step // world.size
    by_length = sorted(problems, key=lambda problem: -len(problem.prompt_ids))
    # Prompts differ in their first token. What all prompts begin with would be computed once, and
    # prompts of a real step may have less in common than the longest ones.
    prompts = []
    for n, problem in enumerate(by_length[:num_problems]):
        prompts += [_begun_with(n % 2, problem).prompt_ids] * G
    row_tokens = len(prompts[0]) + max_length

    # A minibatch in which all groups have the longest prompt. So no micro-batch is heavier than the
    # first.
    completion = Completion((0,) * max_length, text="", finished=False)
    num_groups = num_problems // config.algorithm.num_minibatches
    groups = [Group(_begun_with(n % 2, by_length[0]), (completion,) * G) for n in range(num_groups)]
    no_advantages_PG = torch.zeros(num_groups, G)
    minibatch = collate(groups, no_advantages_PG, pad_id=0, device=world.device)

    devices = [world.device] if world.device.type == "cuda" else []
    # The bare scorer is tried: DDP would average the gradients, and a rank that is out of memory
    # would leave the others waiting in this collective.
    scorer = learner.bare_scorer

    def try_update(num_tokens: int) -> None:
        if devices and learner.policy.is_llama:
            # In a real step, CUDA graphs keep memory after the rollout; before this update there
            # was no rollout. Ten fp32 tensors of vocabulary size for each row were measured to be a
            # little more than all that a real step takes beyond the tried one.
            vocabulary = len(learner.policy.model.get_input_embeddings().weight)
            _reserved = torch.empty(10 * len(prompts), vocabulary, device=world.device)
        # Two micro-batches are enough: from the second on, activations lie beside gradients.
        parts = microbatch_rows(minibatch, num_tokens, packed=scorer.is_packed)[:2]
        for rows in parts:
            with gradient_sync(scorer, enabled=rows is parts[-1]):
                micro = minibatch.select(rows)
                with learner.policy.autocast():
                    logprobs_BT, _ = scorer(*micro.scorer_inputs)
                logprobs_BT.sum().backward()

    def try_rollout(num_tokens: int) -> None:
        num_rows = max(num_tokens // row_tokens, 1)
        run.sampler.engine.dry_run(prompts[:num_rows], sampling)

    weights = nullcontext()
    if learner.is_sharded:
        # Gathering the weights is a collective, which an attempt that may fail on one rank alone
        # must not contain.
        weights = run.sampler.current_weights()
    update_tokens = learner.tokens_per_microbatch
    rollout_tokens = sampling.tokens_in_flight or len(prompts) * row_tokens
    seconds = {}
    with world.timed("largest step", seconds), torch.random.fork_rng(devices):
        _fit(learner, "optim.tokens_per_microbatch", update_tokens, row_tokens, try_update)
        with weights:
            _fit(learner, "rollout.tokens_in_flight", rollout_tokens, row_tokens, try_rollout)
    # PyTorch would keep the memory of the tried step, which then neither NCCL nor vLLM could use.
    torch.cuda.empty_cache()
    return f"memory    the largest possible step was tried in {seconds['largest step']:.1f} s"


def _begun_with(token: int, problem: Problem) -> Problem:
    """Return the problem with another first token in its prompt."""
    return replace(problem, prompt_ids=(token, *problem.prompt_ids[1:]))


def _fit(
    learner: Learner,
    key: str,
    most_tokens: int,
    row_tokens: int,
    attempt: Callable,
) -> None:
    """Halve a number of tokens until ``attempt`` fits in memory, and lower the setting ``key`` to
    this number.

    Args:
        key: the setting, one of :data:`MEMORY_LIMITS`.
        most_tokens: value of the setting, or the tokens of all rows if ``tokens_in_flight`` has
            no value.
        row_tokens: tokens of the longest row. A smaller limit has no effect.
        attempt: function of a number of tokens, which fails if this number is too large.

    Raises:
        ValueError: if the user has set the key to a value that does not fit, if one row does not
            fit, or under FSDP if the first attempt does not fit.
    """
    message = (
        f"the largest possible step does not fit in memory: {key}={most_tokens} is too much for "
        f"prompts and completions of {row_tokens} tokens"
    )
    num_tokens = most_tokens
    while True:
        # A failed attempt leaves tensors in reference cycles, for example in those of its
        # traceback.
        gc.collect()
        try:
            with learner.world.fail_together():
                # AdamW creates its two averages of each gradient in the first update. From the
                # second update on they lie in memory beside the activations.
                averages = []
                for parameter in learner.policy.model.parameters():
                    if parameter.requires_grad and parameter not in learner.optimizer.state:
                        averages += [torch.empty_like(parameter), torch.empty_like(parameter)]
                attempt(num_tokens)
            break
        except Exception as error:
            if not re.search(OUT_OF_MEMORY, repr(error)):
                raise
            fewer_tokens = max(num_tokens // 2, row_tokens)
            # After a pass that failed between its collectives, FSDP cannot begin another pass.
            if learner.is_sharded:
                raise ValueError(f"{message}: try {fewer_tokens}") from error
            if num_tokens <= row_tokens:
                raise ValueError(
                    f"{message}, and not even one of them fits: "
                    "lower rollout.max_completion_length, set model.gradient_checkpointing=true, "
                    "or take a smaller model"
                ) from error
            num_tokens = fewer_tokens
        finally:
            learner.clear_gradients()

    if num_tokens < most_tokens:
        section, name = key.split(".")
        # A value that the user has set is never changed: the user has to change it.
        if name in getattr(learner.config, section).model_fields_set:
            raise ValueError(f"{message}; {num_tokens} fits")
        setattr(learner.progress, name, num_tokens)
        learner.reporter.print(f"note      {message}; using {num_tokens}, equal up to rounding")


def forget_lowered_limits(progress: Progress, config: Config) -> None:
    """Drop a lowered limit of a checkpoint if the user has set this limit since."""
    for key in MEMORY_LIMITS:
        section, name = key.split(".")
        if name in getattr(config, section).model_fields_set:
            setattr(progress, name, None)
