"""The scorers of the library reasoning-gym, imported only when one is used."""

from collections.abc import Sequence
from typing import Any

from grpo.rewards.builtin import column_values, require_number, require_tag
from grpo.rewards.extract import completion_text, extract_answer


def reasoning_gym(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    value: float = 1.0,
    tag: str = "answer",
    column: str = "answer",
    metadata_column: str = "metadata",
    **columns: Any,
) -> list[float | None]:
    """``value`` times what the task's own scorer gives for the text in the tag, from 0 to 1; 0 without a well-formed tag.

    Which task it is stands in the row's metadata. Many scorers give a wrong answer a little (0.01), some give parts of it parts.
    """
    try:
        from reasoning_gym import get_score_answer_fn
    except ImportError as error:
        raise ValueError(f"this reward needs the library reasoning-gym ({error}): pip install -e '.[gym]'") from None
    require_number(value=value)
    require_tag(tag)
    rewards: list[float | None] = []
    golds = column_values(columns, column, completions, "reasoning_gym")
    everything = column_values(columns, metadata_column, completions, "reasoning_gym")
    for prompt, completion, gold, metadata in zip(prompts, completions, golds, everything, strict=True):
        if not metadata:
            rewards.append(None)
            continue
        answer = extract_answer(completion_text(completion), "strict", tag)
        if answer is None:
            rewards.append(0.0)
            continue
        score = get_score_answer_fn(metadata["source_dataset"])
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        rewards.append(float(value * score(answer, {"question": question, "answer": gold, "metadata": metadata})))
    return rewards
