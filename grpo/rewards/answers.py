"""Extract the answer from a text and compare two answers.

A policy can produce any text, also one that makes a regular expression backtrack. So every function takes linear time,
but for those that call math-verify and for a pattern of the caller's.
"""

import re
import threading
from collections.abc import Mapping, Sequence
from fractions import Fraction
from numbers import Number
from typing import Any

LONGEST_NUMBER = 400
"""Characters of the longest text that is read as a number."""
LONGEST_EXPRESSION = 1000
"""Characters of the longest answer that math-verify compares: longer ones take too long."""
MODES = ("strict", "lenient", "boxed", "####")
"""The places from which :func:`extract_answer` reads an answer."""
DEFAULT_FORMAT = r"\s*<think>{0}</think>\s*<answer>{0}</answer>\s*".format(r"(?:(?!</?(?:think|answer)>).)*+")
"""Matches a whole response in which each of the four tags occurs exactly once."""
MINUS_SIGNS = dict.fromkeys(map(ord, "\u2212\u2012\u2013\ufe63\uff0d"), "-")
"""For ``str.translate``: the Unicode characters that are read as a minus sign."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # a backslash takes the next character with it: \{ is no brace

# 1{,}000, 1,\!000, 1\,000, 1\ 000: LaTeX between the digits of thousands.
_SEPARATOR = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\[,:; ])(?=[0-9]{3}(?![0-9]))")
# A dollar sign alone may be a delimiter of LaTeX and stays. So does a sign between two digits,
# which parts two numbers.
_CURRENCY = re.compile(r"(?:\\\$|[€£])(?![0-9])|(?<!\w)(?:\\\$|[€£])")

# Possessive quantifiers (\s*+): the time of several \s* in a row grows with a power of the length of a run of spaces.
_NUMBER = re.compile(
    r"""(?:=\s*+)?                                     # "= 5"
    (?P<sign>[+-]?) \s*+ \$? \s*+ (?P<inner>[+-]?)
    (?=\.?[0-9]) (?P<whole>[0-9]{1,3}(?:,[0-9]{3})+ | [0-9]*)
    (?P<decimals>\.[0-9]*)?
    (?:[eE](?P<exponent>[+-]?[0-9]{1,3}))?
    (?:\s*+/\s*+(?P<denominator>0*+[1-9][0-9]*))?
    \s*+ (?:\\?%)? \s*+ \$? \.?                         # "50%", "$5$", "5." """,
    re.VERBOSE,
)

# A minus is read as a sign only where it cannot be a subtraction: the last number of "10-5" is 5, not -5.
_LAST_NUMBER = re.compile(
    r"""(?:\$- | (?:(?<![\w)\]])-)? \$?) (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]+ | (?<![0-9])\.[0-9]+)
    (?:\.[0-9]+)? (?:[eE][+-]?[0-9]{1,3}(?!\w))?""",
    re.VERBOSE,
)

_TEXT_OF_LIST = re.compile(r"""\s*+\[(?:[\s,]*+(?:"(?:\\.|[^"\\])*+"|'(?:\\.|[^'\\])*+'))++[\s,]*+\]\s*+""", re.DOTALL)
"""Matches ``['70', '71']`` and ``["70"]``, but no interval: the items are texts in quotes."""


def reference_texts(answer: Any) -> list[str]:
    """The texts of a row's reference answer, each of which is right.

    Text and a number give one, a list gives those of its items; None, NaN and empty text give none.
    ValueError for anything else, whose text would be equal to no answer: a mapping, bytes, a list
    in a list.
    """
    items = answer if isinstance(answer, list | tuple) else [answer]
    texts = []
    for item in items:
        if item is None:
            continue
        if not isinstance(item, str | Number):
            kind = type(item).__name__
            if item is not answer:
                kind += " in a list"
            raise ValueError(f"a reference answer is text, a number or a list of these, not a {kind}")
        text = str(item)
        if text.strip() and item == item:  # NaN is not equal to itself
            texts.append(text)
    return texts


def is_text_of_list(answer: Any) -> bool:
    """True for a text that was a list of texts: ``"['70']"``."""
    return isinstance(answer, str) and _TEXT_OF_LIST.fullmatch(answer) is not None


def equals_reference(answer: str | None, reference: Any) -> bool:
    """True if an answer equals one of :func:`reference_texts`; False where these cannot be read."""
    if answer is None:
        return False
    try:
        references = reference_texts(reference)
    except ValueError:  # a column that only the user's own rewards read may hold anything
        return False
    return any(answers_equal(answer, text) for text in references)


def completion_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a completion: a string, or messages (``[{"role": "assistant", "content": ...}]``) joined by newlines.

    Content in parts (``[{"type": "text", "text": ...}]``) is concatenated.
    """
    if isinstance(completion, str):
        return completion
    texts = []
    for message in completion:
        content = message["content"] or ""
        if isinstance(content, list):
            content = "".join(part.get("text") or "" for part in content)
        texts.append(content)
    return "\n".join(texts)


def after_thinking(text: str) -> str:
    """The text after the last ``</think>``, up to a ``<think>`` that is not closed. Without tags the whole text."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def tag_content(text: str, tag: str) -> str | None:
    """The text between ``<tag>`` and ``</tag>``, unchanged; ``None`` unless each of the two occurs exactly once.

    ``None`` also if the tag lies inside the thinking: the next tag of thinking after it is ``</think>``.
    """
    _, _, after = text.partition(f"</{tag}>")
    thought, end_of_thinking, _ = after.partition("</think>")
    is_thought = end_of_thinking and "<think>" not in thought
    if is_thought or text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
        return None
    return last_tag_content(text, tag)


def last_tag_content(text: str, tag: str) -> str | None:
    """The text inside the last ``<tag>...</tag>``, unchanged; ``None`` without one."""
    before, _, _ = text.rpartition(f"</{tag}>")
    _, opening, content = before.rpartition(f"<{tag}>")
    return content if opening else None


def boxed_content(text: str) -> str | None:
    """The text inside the last ``\\boxed{...}`` or ``\\fbox{...}``, or ``None`` if it is missing or not closed."""
    start = len(text)
    for box in _BOX.finditer(text):
        start = box.end()
    depth = 1
    for brace in _BRACE.finditer(text, start):
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
        if depth == 0:
            return text[start : brace.start()]
    return None


def extract_answer(text: str, mode: str = "strict", tag: str = "answer") -> str | None:
    """The answer in a response, without surrounding white space, or ``None`` if there is none or it is empty.

    - ``"strict"``: the text inside ``<tag>...</tag>``, if there is exactly one such tag, outside ``<think>...</think>``
    - ``"lenient"``: the last number anywhere in the text
    - ``"boxed"``: the text inside the last ``\\boxed{...}`` or ``\\fbox{...}`` after the thinking
    - ``"####"``: the rest of the line after the last ``####`` after the thinking, as in the answers of GSM8K

    Any other mode is a ``ValueError``.
    """
    if mode == "strict":
        content = tag_content(text, tag)
    elif mode == "lenient":
        numbers = _LAST_NUMBER.findall(plain_numbers(text))
        content = numbers[-1] if numbers else None
    elif mode == "boxed":
        content = boxed_content(after_thinking(text))
    elif mode == "####":
        _, mark, rest = after_thinking(text).rpartition("####")
        content = rest.partition("\n")[0] if mark else None
    else:
        raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
    return (content or "").strip() or None


def has_format(text: str, pattern: str = DEFAULT_FORMAT) -> bool:
    """True if the whole of ``text`` matches ``pattern`` (DOTALL)."""
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def plain_numbers(text: str) -> str:
    """``text`` with ASCII minus signs, and without the currency signs ``\\$``, ``€`` and ``£``.

    LaTeX between the digits of thousands goes, too: ``-\\$1{,}000`` becomes ``-1000``.
    """
    text = text.translate(MINUS_SIGNS)
    text = _SEPARATOR.sub("", text)
    return _CURRENCY.sub("", text)


def parse_number(text: str) -> Fraction | None:
    """``text`` as an exact number, or ``None`` if it is anything but a single number.

    Accepts ``1,000``, signs (also a Unicode minus), decimals, exponents up to 999, ``a/b``, a
    currency sign, a percent sign (ignored: ``50%`` is 50), a leading ``=``, a trailing period, and
    these in LaTeX (``\\$1{,}000``, ``1\\,000``, ``50\\%``).
    """
    text = text.strip()
    if len(text) > LONGEST_NUMBER:
        return None
    text = plain_numbers(text).strip()
    match = _NUMBER.fullmatch(text)
    if match is None or (match["sign"] and match["inner"]):
        return None

    whole = match["whole"].replace(",", "")
    decimals = (match["decimals"] or "").removeprefix(".")
    denominator = int(match["denominator"] or 1)
    value = Fraction(int(whole + decimals), 10 ** len(decimals) * denominator)
    if match["exponent"]:
        value *= Fraction(10) ** int(match["exponent"])
    is_negative = "-" in (match["sign"], match["inner"])
    return -value if is_negative else value


def normalize_text(text: str) -> str:
    """``text`` with case folded, each run of white space replaced by one space, and one trailing period removed."""
    text = " ".join(text.split()).casefold()
    return text.removesuffix(".").rstrip()


def answers_equal(a: Any, b: Any) -> bool:
    """True if two answers are the same number (``0.33`` is not ``1/3``) or, where neither is one, the same text."""
    a = str(a)
    b = str(b)
    first = parse_number(a)
    second = parse_number(b)
    if first is None and second is None:
        return normalize_text(a) == normalize_text(b)
    return first == second


def answers_equivalent(answer: str, reference: str) -> bool:
    """True if two answers are equal (:func:`answers_equal`) or math-verify finds the same expression in them."""
    if answers_equal(answer, reference):
        return True
    if len(answer) > LONGEST_EXPRESSION:
        return False
    return same_expression(parse_answer(reference), parse_answer(answer))


def parse_answer(text: str) -> list[Any]:
    """The expressions that math-verify reads in an answer, also LaTeX without delimiters (``\\frac{1}{2}``), if any."""
    text = plain_numbers(text).strip()
    has_delimiters = any(delimiter in text for delimiter in ("$", "\\boxed", "\\(", "\\["))
    if has_delimiters:
        return find_expression(text)
    return find_expression(f"${text}$") or find_expression(text)


def find_expression(text: str) -> list[Any]:
    """The last expression of a text that math-verify reads (LaTeX between delimiters, or a number); empty if none."""
    import math_verify

    text = plain_numbers(text).strip()
    return math_verify.parse(text, parsing_timeout=_math_verify_timeout())


def same_expression(expected: list[Any], found: list[Any]) -> bool:
    """True if math-verify finds the results of two of the functions above to be equal."""
    import math_verify

    seconds = _math_verify_timeout()
    return bool(math_verify.verify(expected, found, timeout_seconds=seconds))


def _math_verify_timeout() -> int | None:
    # Seconds per expression. The limit uses SIGALRM, which only a main thread may do; reward workers
    # run in theirs.
    is_main_thread = threading.current_thread() is threading.main_thread()
    return 3 if is_main_thread else None
