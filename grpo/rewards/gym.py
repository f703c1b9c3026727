"""The reward ``reasoning_gym``: the scorers of the package reasoning-gym, which is imported only when this reward is used."""

from grpo.rewards.arguments import Scores, column_values, require_number, require_tag
from grpo.rewards.extract import completion_text, extract_answer
from grpo.system import import_extra


def reasoning_gym(
    prompts, completions, *, value=1.0, tag="answer", column="answer", metadata_column="metadata", **columns
) -> Scores:
    """``value`` times the score, from 0 to 1, that the task's own scorer gives the text in the tag; 0 without a well-formed tag.

    The row's metadata names the task. Many scorers give a wrong answer a small score (0.01), and some give partial scores.
    """
    library = import_extra("reasoning_gym", "gym", "reward 'reasoning_gym'")
    require_number(value=value)
    require_tag(tag)
    rewards: Scores = []
    references = column_values(columns, column, completions, "reasoning_gym")
    metadata_rows = column_values(columns, metadata_column, completions, "reasoning_gym")
    for prompt, completion, reference, metadata in zip(prompts, completions, references, metadata_rows, strict=True):
        if not metadata:
            rewards.append(None)
            continue
        answer = extract_answer(completion_text(completion), "strict", tag)
        if answer is None:
            rewards.append(0.0)
            continue
        score = library.get_score_answer_fn(metadata["source_dataset"])
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        rewards.append(float(value * score(answer, {"question": question, "answer": reference, "metadata": metadata})))
    return rewards
