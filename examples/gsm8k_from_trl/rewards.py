"""The reward functions of trl_script.py, unchanged. gsm8k.yaml names them."""

import re


def response(completion):
    """Return the text of a completion, which is a list of one message."""
    return completion[0]["content"]


def extract_answer(text):
    """Return the text in the last <answer>."""
    _, _, after_tag = text.rpartition("<answer>")
    answer, _, _ = after_tag.partition("</answer>")
    return answer.strip()


def plain_number(text):
    """Return a number as the model is expected to write it: 1234 for $1,234."""
    return text.replace(",", "").replace("$", "")


def correctness_reward_func(prompts, completions, answer, **kwargs):
    """Score 2 for the right answer, else 0."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        is_right = extract_answer(response(completion)) == plain_number(right)
        rewards.append(2.0 if is_right else 0.0)
    return rewards


def int_reward_func(completions, **kwargs):
    """Score 0.5 for an answer of digits only, else 0."""
    rewards = []
    for completion in completions:
        answer = extract_answer(response(completion))
        rewards.append(0.5 if answer.isdigit() else 0.0)
    return rewards


def strict_format_reward_func(completions, **kwargs):
    """Score 0.5 for the form of the system prompt with each tag on its own line, else 0."""
    pattern = r"<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n?"
    rewards = []
    for completion in completions:
        match = re.fullmatch(pattern, response(completion), re.DOTALL)
        rewards.append(0.5 if match else 0.0)
    return rewards


def soft_format_reward_func(completions, **kwargs):
    """Score 0.5 if the response begins with both pairs of tags, in any spacing, else 0."""
    pattern = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"
    rewards = []
    for completion in completions:
        match = re.match(pattern, response(completion), re.DOTALL)
        rewards.append(0.5 if match else 0.0)
    return rewards


def xmlcount_reward_func(completions, **kwargs):
    """Score 0.125 for each tag that occurs once, less 0.001 for each character after </answer>."""
    tags = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
    rewards = []
    for completion in completions:
        text = response(completion)
        num_single_tags = sum(text.count(tag) == 1 for tag in tags)
        _, _, after_answer = text.partition("</answer>")
        num_trailing = len(after_answer.strip())
        rewards.append(0.125 * num_single_tags - 0.001 * num_trailing)
    return rewards
