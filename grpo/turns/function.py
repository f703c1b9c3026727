"""A rollout function of the user (``rollout.function``): it calls ``generate`` as it likes, and returns tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo.algorithm.batch import Group, Problem, Turns
from grpo.algorithm.seeding import derive_seed
from grpo.rollout import Engine, SamplingParams, Stops
from grpo.system import UserError

NEEDED = ("prompt_ids", "completion_ids", "logprobs")


def sample_by_function(
    engine: Engine, tools: Any, problems: Sequence[Problem], sampling: SamplingParams, seed_key: tuple[int, str, int],
    on_tokens: Callable[[int], None] | None,
) -> list[Group]:  # fmt: skip
    """The completions that ``rollout.function`` returns, one per problem and generation.

    It is called with the prompts, each ``num_generations`` times, as rewards get them, and with ``generate``. It
    returns lists with one entry per prompt: ``prompt_ids``, ``completion_ids``, ``logprobs`` (of each token of the
    completion), if it wants ``env_mask`` (1 at tokens that the model sampled, 0 at others), and columns for rewards.

    UserError if it returns something else. Its own exceptions end the run.
    """
    G = sampling.num_generations
    rows = [(problem, g) for problem in problems for g in range(G)]
    num_calls = 0

    def generate(prompt_ids: Sequence[Sequence[int]], max_tokens: int | None = None) -> list[dict[str, list]]:
        """Sample one completion for each list of token ids: ``{completion_ids, logprobs}`` of each.

        ``max_tokens``: of one completion; None: ``rollout.max_completion_length``.
        """
        nonlocal num_calls
        num_calls += 1
        # With one entry per row the seed is that of the row, whatever the number of ranks.
        addresses = rows if len(prompt_ids) == len(rows) else [(problems[0], -1 - n) for n in range(len(prompt_ids))]
        indices = [derive_seed(0, "row", problem.index, g) for problem, g in addresses]
        pairs = zip(indices, prompt_ids, strict=True)
        asked = [Problem(index, "", tuple(ids)) for index, ids in pairs]
        key = (seed_key[0], f"{seed_key[1]}/call {num_calls}", seed_key[2])
        one = replace(sampling, num_generations=1, max_completion_length=max_tokens or sampling.max_completion_length)
        found = [group.completions[0] for group in engine.generate(asked, one, seed_key=key, on_tokens=on_tokens)]
        # Greedy completions have no log-probs.
        return [
            {"completion_ids": list(c.ids), "logprobs": list(c.sampling_logprobs or [0.0] * len(c.ids))} for c in found
        ]

    function = tools.function_object
    prompts = [problem.prompt if problem.reward_prompt is None else problem.reward_prompt for problem, _ in rows]
    returned = function(prompts, generate)
    if not isinstance(returned, Mapping) or any(name not in returned for name in NEEDED):
        raise UserError(f"rollout.function={tools.function} must return a dictionary with {', '.join(NEEDED)}")
    for name, values in returned.items():
        if len(values) != len(rows):
            raise UserError(f"rollout.function={tools.function} returned {len(values)} {name} for {len(rows)} prompts")
    stops = Stops(engine.policy, sampling.stop)
    groups = []
    for p, problem in enumerate(problems):
        completions = []
        prompt_ids = set()
        for g in range(G):
            record = {name: values[p * G + g] for name, values in returned.items()}
            prompt_ids.add(tuple(record["prompt_ids"]))
            completions.append(_completion(record, stops, engine, sampling, tools.function))
        if len(prompt_ids) > 1:
            raise UserError(f"rollout.function={tools.function}: completions of one problem need equal prompt_ids")
        asked = replace(problem, prompt_ids=prompt_ids.pop())
        groups.append(Group(asked, tuple(completions)))
    return groups


def _completion(
    record: dict[str, Any],
    stops: Stops,
    engine: Engine,
    sampling: SamplingParams,
    name: str,
) -> Turns:
    ids = [int(id) for id in record["completion_ids"]]
    logprobs = list(record["logprobs"])
    mask = [bool(is_sampled) for is_sampled in record.get("env_mask", [True] * len(ids))]
    is_complete = len(ids) == len(mask) == len(logprobs)
    if not is_complete or len(ids) > sampling.max_completion_length or not any(mask):
        raise UserError(
            f"rollout.function={name}: a completion has {len(ids)} tokens, {len(logprobs)} "
            f"logprobs, {sum(mask)} of {len(mask)} in env_mask; the numbers must be equal, from 1 "
            "to rollout.max_completion_length, 1 sampled"
        )

    # What comes after the last sampled token has no influence.
    length = len(mask) - mask[::-1].index(True)
    ids = ids[:length]
    mask = mask[:length]
    sampling_logprobs = []
    if not sampling.is_greedy:
        for logprob, is_sampled in zip(logprobs[:length], mask, strict=True):
            sampling_logprobs.append(float(logprob) if is_sampled else 0.0)

    text = stops.text(ids)
    finished = ids[-1] in engine.policy.eos_ids
    read_above = (*NEEDED, "env_mask")
    return Turns(
        tuple(ids),
        text,
        finished,
        tuple(sampling_logprobs),
        loss_mask=() if all(mask) else tuple(mask),
        messages=({"role": "assistant", "content": text},),
        fields={key: value for key, value in record.items() if key not in read_above},
        stop_reason="stop" if finished else "length",
    )
