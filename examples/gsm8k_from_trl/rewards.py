"""The rewards of trl_script.py, unchanged, for gsm8k.yaml."""

import re


def response(completion):
    return completion[0]["content"]


def extract_answer(text):
    """The text in the last <answer>."""
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def number(text):
    return text.replace(",", "").replace("$", "")


def correctness_reward_func(prompts, completions, answer, **kwargs):
    """2 for the right answer."""
    return [
        2.0 * (extract_answer(response(c)) == number(a))
        for c, a in zip(completions, answer, strict=True)
    ]


def int_reward_func(completions, **kwargs):
    """0.5 for an answer of digits only."""
    return [0.5 * extract_answer(response(c)).isdigit() for c in completions]


def strict_format_reward_func(completions, **kwargs):
    """0.5 for the form of the system prompt with each tag on its own line."""
    pattern = r"<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n?"
    return [0.5 * bool(re.fullmatch(pattern, response(c), re.DOTALL)) for c in completions]


def soft_format_reward_func(completions, **kwargs):
    """0.5 if the response begins with both pairs of tags, however they are spaced."""
    pattern = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"
    return [0.5 * bool(re.match(pattern, response(c), re.DOTALL)) for c in completions]


def xmlcount_reward_func(completions, **kwargs):
    """0.125 for each tag that occurs once, less 0.001 for each character after the last one."""
    tags = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")

    def count(text):
        trailing = text.partition("</answer>")[2].strip()
        return 0.125 * sum(text.count(tag) == 1 for tag in tags) - 0.001 * len(trailing)

    return [count(response(c)) for c in completions]
