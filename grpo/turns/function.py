"""The user's rollout function (``rollout.function``): it calls ``generate`` and returns tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from grpo.algorithm.batch import Group, Problem, Turns
from grpo.algorithm.seeding import derive_seed
from grpo.rollout import Engine, SamplingParams, Stops
from grpo.system import UserError

NEEDED = ("prompt_ids", "completion_ids", "logprobs")


def sample_by_function(
    engine: Engine,
    tools: Any,
    problems: Sequence[Problem],
    sampling: SamplingParams,
    seed_key: tuple[int, str, int],
    on_tokens: Callable[[int], None] | None,
) -> list[Group]:
    """The completions that ``rollout.function`` returns, one per problem and generation.

    The function is called with the prompts, each ``num_generations`` times, as rewards get them,
    and with ``generate``. It returns lists with one entry per prompt: ``prompt_ids``,
    ``completion_ids``, ``logprobs`` (of each token of the completion), if it wants ``env_mask``
    (1 at tokens that the model sampled, 0 at others), and columns for rewards.

    UserError if it returns something else. The function's own exceptions end the run.
    """
    # With dynamic sampling, a rank may have no group to sample again.
    if not problems:
        return []
    G = sampling.num_generations
    prompts = []
    for problem in problems:
        prompts += [problem.prompt_of_rewards] * G
    seed, purpose, step = seed_key
    calls = count(1)

    def generate(
        prompt_ids: Sequence[Sequence[int]],
        max_tokens: int | None = None,
    ) -> list[dict[str, list]]:
        """Sample one completion for each list of token ids: ``{completion_ids, logprobs}`` of each.

        ``max_tokens``: of one completion; None: ``rollout.max_completion_length``.
        """
        call_key = (seed, f"{purpose}/call {next(calls)}", step)
        asked = []
        for n, ids in enumerate(prompt_ids):
            engine.policy.check_room(len(ids), max_tokens or 1)
            # With one entry per prompt, the seed is the same on any number of ranks.
            if len(prompt_ids) == len(prompts):
                address = (problems[n // G].index, n % G)
            else:
                address = (problems[0].index, -1 - n)
            asked.append(Problem(derive_seed(0, "row", *address), "", tuple(ids)))
        one_each = replace(
            sampling,
            num_generations=1,
            max_completion_length=max_tokens or sampling.max_completion_length,
        )
        sampled = []
        for group in engine.generate(asked, one_each, seed_key=call_key, on_tokens=on_tokens):
            (completion,) = group.completions
            ids = list(completion.ids)
            # Greedy completions have no log-probs.
            logprobs = list(completion.sampling_logprobs) or [0.0] * len(ids)
            sampled.append({"completion_ids": ids, "logprobs": logprobs})
        return sampled

    returned = tools.function_object(prompts, generate)
    setting = f"rollout.function={tools.function}"
    if not isinstance(returned, Mapping) or any(name not in returned for name in NEEDED):
        raise UserError(f"{setting} must return a dictionary with {', '.join(NEEDED)}")
    for name, values in returned.items():
        if len(values) != len(prompts):
            raise UserError(f"{setting} returned {len(values)} {name} for {len(prompts)} prompts")

    stops = Stops(engine.policy, sampling.stop)
    groups = []
    for p, problem in enumerate(problems):
        completions = []
        prompt_ids = set()
        for row in range(p * G, (p + 1) * G):
            record = {name: values[row] for name, values in returned.items()}
            prompt_ids.add(tuple(record.pop("prompt_ids")))
            completions.append(_completion(record, stops, engine, sampling, setting))
        if len(prompt_ids) > 1:
            raise UserError(f"{setting}: completions of one problem need equal prompt_ids")
        asked = replace(problem, prompt_ids=prompt_ids.pop())
        engine.policy.check_room(len(asked.prompt_ids), sampling.max_completion_length)
        groups.append(Group(asked, tuple(completions)))
    return groups


def _completion(
    record: dict[str, Any],
    stops: Stops,
    engine: Engine,
    sampling: SamplingParams,
    setting: str,
) -> Turns:
    ids = [int(id) for id in record.pop("completion_ids")]
    logprobs = list(record.pop("logprobs"))
    mask = [bool(is_sampled) for is_sampled in record.pop("env_mask", [True] * len(ids))]
    fits = len(ids) == len(mask) == len(logprobs) <= sampling.max_completion_length
    if not fits or not any(mask):
        raise UserError(
            f"{setting}: a completion has {len(ids)} tokens, {len(logprobs)} logprobs, "
            f"{sum(mask)} of {len(mask)} in env_mask; the numbers must be equal, from 1 to "
            "rollout.max_completion_length, 1 sampled"
        )

    # Tokens after the last sampled one have no influence on the loss.
    while not mask[-1]:
        for values in (ids, mask, logprobs):
            values.pop()
    sampling_logprobs = []
    if not sampling.is_greedy:
        for logprob, is_sampled in zip(logprobs, mask, strict=True):
            sampling_logprobs.append(float(logprob) if is_sampled else 0.0)

    text = stops.text(ids)
    # A stop string counts in the last turn alone: the tokens after the last one that is masked.
    start = len(mask)
    while start and mask[start - 1]:
        start -= 1
    turn = ids[start:]
    finished = stops.end(turn)
    return Turns(
        tuple(ids),
        text,
        finished,
        tuple(sampling_logprobs),
        loss_mask=() if all(mask) else tuple(mask),
        messages=({"role": "assistant", "content": text},),
        fields=record,
        stop_reason="stop" if finished else "length",
    )
