"""Pure functions that extract answers from texts and compare them. Evaluation and the built-in rewards use them.

Every function runs in time linear in its input, for any input: during training a policy can produce any text, also one that makes a
regular expression backtrack. The exceptions are :func:`has_format` and :func:`matched_group` with a pattern of the caller's, which take the
time of that pattern.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

LONGEST_NUMBER = 400
"""Characters of the longest number that is read as one. Longer ones are compared as text, because exact arithmetic on them is slow."""

DEFAULT_FORMAT = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"
"""Matches the whole response. :func:`has_format` also requires each of the four tags exactly once."""

MODES = ("strict", "lenient", "boxed", "####")
"""The places from which :func:`extract_answer` reads an answer."""

_DEFAULT_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
MINUS_SIGNS = str.maketrans({"\u2212": "-", "\u2012": "-", "\u2013": "-", "\ufe63": "-", "\uff0d": "-"})

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # a backslash takes the next character with it: \{ is no brace

# Possessive quantifiers (\s*+): the time of several \s* in a row grows with a power of the length of a run of spaces.
_NUMBER = re.compile(
    r"""(?:=\s*+)?                                     # "= 5"
    (?P<sign>[+-]?) \s*+ (?:\\?[$€£])? \s*+ (?P<inner>[+-]?)
    (?P<whole>[0-9]{1,3}(?:,[0-9]{3})+ | [0-9]*)
    (?P<decimals>\.[0-9]*)?
    (?:[eE](?P<exponent>[+-]?[0-9]{1,3}))?
    (?:\s*+/\s*+(?P<denominator>[0-9]+))?
    \s*+ (?:\\?%)? \s*+ \$? \.?                         # "50%", "$5$", "5." """,
    re.VERBOSE,
)

# A minus is read as a sign only where it cannot be a subtraction: the last number of "10-5" is 5, not -5.
LAST_NUMBER = re.compile(
    r"""(?:\$- | (?:(?<![\w)\]])-)? \$?) (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]+ | (?<![0-9])\.[0-9]+)
    (?:\.[0-9]+)? (?:[eE][+-]?[0-9]{1,3}(?!\w))?""",
    re.VERBOSE,
)


def completion_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a completion, which is a string or, in TRL's conversational form, ``[{"role": "assistant", "content": ...}]``.

    Several messages are joined by newlines. Content in parts (``[{"type": "text", "text": ...}]``) is concatenated. Any other form is
    a ``ValueError``.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and all(isinstance(m, Mapping) and "content" in m for m in completion):
        return "\n".join(_content_text(message["content"]) for message in completion)
    raise ValueError(f"expected a completion as a string or a list of messages, got {type(completion).__name__}")


def _content_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def after_thinking(text: str) -> str:
    """The text after the last ``</think>``, up to a ``<think>`` that is not closed. Without these tags, the whole text."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def tag_content(text: str, tag: str) -> str | None:
    """The text between ``<tag>`` and ``</tag>``, unchanged; ``None`` unless each of the two occurs exactly once.

    ``None`` also if the tag lies inside the thinking: the next tag of thinking after it is ``</think>``.
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    start, end = text.index(opening) + len(opening), text.index(closing)
    thought, end_of_thinking, _ = text[end + len(closing) :].partition("</think>")
    if end_of_thinking and "<think>" not in thought:
        return None
    return text[start:end] if start <= end else None


def last_tag_content(text: str, tag: str) -> str | None:
    """The text inside the last ``<tag>...</tag>``, unchanged; ``None`` without one."""
    before, _, _ = text.rpartition(f"</{tag}>")
    _, opening, content = before.rpartition(f"<{tag}>")
    return content if opening else None


def boxed_content(text: str) -> str | None:
    """The text inside the last ``\\boxed{...}`` or ``\\fbox{...}``, unchanged; ``None`` without one, or if its brace is not closed."""
    start = max((box.end() for box in _BOX.finditer(text)), default=None)
    depth = 1
    for brace in _BRACE.finditer(text, start) if start is not None else ():
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : brace.start()]
    return None


def extract_answer(text: str, mode: str = "strict", tag: str = "answer") -> str | None:
    """The answer in a response, without surrounding white space, or ``None`` if there is none or it is empty.

    - ``"strict"``: the text inside ``<tag>...</tag>``, if there is exactly one such tag and it is not inside ``<think>...</think>``
    - ``"lenient"``: the last number anywhere in the text
    - ``"boxed"``: the text inside the last ``\\boxed{...}`` or ``\\fbox{...}`` after the thinking
    - ``"####"``: the rest of the line after the last ``####`` after the thinking, as in the answers of GSM8K

    Any other mode is a ``ValueError``.
    """
    if mode == "strict":
        content = tag_content(text, tag)
    elif mode == "lenient":
        content = next(reversed(LAST_NUMBER.findall(text.translate(MINUS_SIGNS))), None)
    elif mode == "boxed":
        content = boxed_content(after_thinking(text))
    elif mode == "####":
        _, mark, rest = after_thinking(text).rpartition("####")
        content = rest.partition("\n")[0] if mark else None
    else:
        unquoted = '; in YAML an unquoted # begins a comment: write mode: "####"' if mode is None else ""
        raise ValueError(f"mode must be {', '.join(map(repr, MODES[:-1]))} or {MODES[-1]!r}, got {mode!r}{unquoted}")
    return (content.strip() or None) if content is not None else None


def parse_number(text: str) -> Fraction | None:
    """``text`` as an exact number, or ``None`` if it is anything but a single number.

    Accepts thousands separators, signs (Unicode minus too), decimals, exponents up to 999, ``a/b``, a currency sign, a percent sign
    (ignored: ``50%`` is 50), a leading ``=`` and a trailing period.
    """
    text = text.strip()
    if len(text) > LONGEST_NUMBER:
        return None
    match = _NUMBER.fullmatch(text.translate(MINUS_SIGNS))
    if match is None or (match["sign"] and match["inner"]):
        return None
    whole, decimals = match["whole"].replace(",", ""), (match["decimals"] or ".")[1:]
    if not whole + decimals:
        return None
    value = Fraction(int(whole + decimals), 10 ** len(decimals)) * Fraction(10) ** int(match["exponent"] or 0)
    if match["denominator"]:
        if int(match["denominator"]) == 0:
            return None
        value /= int(match["denominator"])
    return -value if "-" in (match["sign"], match["inner"]) else value


def normalize_text(text: str) -> str:
    """``text`` with case folded, each run of white space replaced by one space, and one trailing period removed."""
    return " ".join(text.split()).casefold().removesuffix(".").rstrip()


def answers_equal(a: Any, b: Any) -> bool:
    """True if two answers are equal: numbers exactly (``"$1,000.00"`` is ``1000``, ``"0.33"`` is not ``"1/3"``), anything else as
    normalised text."""
    first, second = parse_number(str(a)), parse_number(str(b))
    if first is not None or second is not None:
        return first == second
    return normalize_text(str(a)) == normalize_text(str(b))


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """``re.compile`` with DOTALL. ``ValueError`` if ``pattern`` is not a regular expression."""
    try:
        return re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None


def has_format(text: str, pattern: str | re.Pattern[str] | None = None) -> bool:
    """True if the whole of ``text`` matches ``pattern`` (DOTALL); by default :data:`DEFAULT_FORMAT`, each tag exactly once."""
    if pattern is None:
        # With each tag known to occur once, a lazy ``.*?`` has one place to stop at, so matching is linear.
        return all(text.count(tag) == 1 for tag in _DEFAULT_TAGS) and has_format(text, DEFAULT_FORMAT)
    return (compile_pattern(pattern) if isinstance(pattern, str) else pattern).fullmatch(text) is not None


def matched_group(text: str, pattern: re.Pattern[str], group: str) -> str | None:
    """The text of a named group, unchanged; ``None`` unless the whole of ``text`` matches ``pattern`` and the group takes part."""
    match = pattern.fullmatch(text)
    return match and match[group]
