"""Extract the answer from a response, and compare two answers.

A policy can write any text, even one on which a regular expression backtracks for hours. So every
function takes linear time, except functions that call math-verify or match a user's pattern.
"""

import re
import threading
from fractions import Fraction
from numbers import Number

MAX_NUMBER_LENGTH = 400
"""Largest number of characters in a text that is read as a number.

Python reads digits in quadratic time, so longer texts would take too long.
"""
MAX_SYMBOLIC_LENGTH = 1000
"""Largest number of characters in an answer that :func:`answers_equivalent` gives to math-verify.

Longer answers would take too long.
"""
ANSWER_MODES = ("strict", "lenient", "boxed", "####")
"""Values of the argument ``mode`` of :func:`extract_answer`."""
_TEXT_WITHOUT_TAGS = r"(?:(?!</?(?:think|answer)>).)*+"
DEFAULT_FORMAT = (
    rf"\s*<think>{_TEXT_WITHOUT_TAGS}</think>\s*<answer>{_TEXT_WITHOUT_TAGS}</answer>\s*"
)
"""Pattern of a whole response: thinking in ``<think>`` tags, then an answer in ``<answer>`` tags.

Each of the four tags occurs exactly once.
"""
MINUS_SIGNS = str.maketrans("\u2212\u2012\u2013\ufe63\uff0d", "-----")
"""Table for ``str.translate`` that turns Unicode minus signs and dashes into ``-``."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"(?s)\\.|[{}]")  # an escaped brace, such as \{, is no brace

_NUMBER_DECORATION = re.compile(
    r"""(?x)
    # LaTeX between the digits of thousands: 1{,}000, 1,\!000, 1\,000, 1\ 000.
    (?<=[0-9]) (?: \{,\} | ,\\! | \\[,:;\ ] ) (?=[0-9]{3}(?![0-9]))
    # A currency sign. A dollar sign alone may be a delimiter of LaTeX and stays.
    # So does a sign between two digits, which parts two numbers.
    | (?:\\\$|[€£]) (?![0-9])
    | (?<!\w) (?:\\\$|[€£])
    """
)

# Possessive quantifiers (\s*+) do not backtrack. With several plain \s* in a row, the time would
# grow as a power of the number of spaces.
_NUMBER = re.compile(
    r"""(?x)
    (?:=\s*+)?                                         # "= 5"
    (?P<sign>[+-]?) \s*+ \$? \s*+ (?P<inner_sign>[+-]?)
    (?=\.?[0-9]) (?P<integer>[0-9]{1,3}(?:,[0-9]{3})+ | [0-9]*)
    (?P<decimals>\.[0-9]*)?
    (?:[eE](?P<exponent>[+-]?[0-9]{1,3}))?
    (?:\s*+/\s*+(?P<denominator>0*+[1-9][0-9]*))?
    \s*+ (?:\\?%)? \s*+ \$? \.?                        # "50%", "$5$", "5."
    """
)

# A minus is read as a sign only where it cannot be a subtraction: the last number of "10-5" is 5,
# not -5.
_NUMBER_IN_TEXT = re.compile(
    r"""(?x)
    (?:\$- | (?:(?<![\w)\]])-)? \$?)
    (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]+ | (?<![0-9])\.[0-9]+)
    (?:\.[0-9]+)? (?:[eE][+-]?[0-9]{1,3}(?!\w))?
    """
)


def reference_texts(answer: object) -> list[str]:
    """Return the right answers of a row as a list of texts.

    Text or a number gives one text. A list gives one text per item. None, NaN and empty text are
    left out.

    Raises:
        ValueError: for anything else, such as a mapping, bytes, or a list in a list.
    """
    items = answer if isinstance(answer, list | tuple) else [answer]
    texts = []
    for item in items:
        if item is None:
            continue
        if not isinstance(item, str | Number):
            place = " in a list" if items is answer else ""
            raise ValueError(
                "a reference answer is text, a number or a list of these, not a "
                f"{type(item).__name__}{place}"
            )
        text = str(item)
        # A missing value may be NaN, which is not equal to itself.
        if text.strip() and item == item:
            texts.append(text)
    return texts


def equals_reference(answer: str | None, reference: object) -> bool:
    """True if ``answer`` equals one of the texts of ``reference`` (:func:`reference_texts`).

    False if ``reference_texts`` raises ValueError for ``reference``.
    """
    if answer is None:
        return False
    try:
        return any(answers_equal(answer, text) for text in reference_texts(reference))
    except ValueError:  # a column that only the user's own rewards read may hold anything
        return False


def completion_text(completion: str | list[dict]) -> str:
    """Return the text of a completion, which is a string or a list of messages.

    The model's messages are joined by newlines. Their role is ``assistant`` or missing. Results of
    tools and observations have other roles, and are left out. Content in parts
    (``[{"type": "text", "text": ...}]``) is concatenated.
    """
    if isinstance(completion, str):
        return completion
    texts = []
    for message in completion:
        if message.get("role", "assistant") != "assistant":
            continue
        # A turn that only calls tools may have None as its content.
        content = message["content"] or ""
        if isinstance(content, list):
            content = "".join(part.get("text") or "" for part in content)
        texts.append(content)
    return "\n".join(texts)


def after_thinking(text: str) -> str:
    """Return the text after the last ``</think>``, up to a ``<think>`` that is not closed.

    Return all of the text if it has neither tag.
    """
    return text.rpartition("</think>")[2].partition("<think>")[0]


def tag_content(text: str, tag: str) -> str | None:
    """Return the text between ``<tag>`` and ``</tag>``, unchanged.

    Return ``None`` unless each of the two tags occurs exactly once, and outside the thinking.
    """
    opening = f"<{tag}>"
    closing = f"</{tag}>"
    # The tag lies inside the thinking if the next thinking tag after it is </think>. No <think>
    # before the tag is needed, since the prompt may have opened the thinking.
    _, _, after = text.partition(closing)
    thought, end_of_thinking, _ = after.partition("</think>")
    is_thought = end_of_thinking and "<think>" not in thought
    if is_thought or text.count(opening) != 1 or text.count(closing) != 1:
        return None
    return last_tag_content(text, tag)


def last_tag_content(text: str, tag: str) -> str | None:
    """Return the text inside the last ``<tag>...</tag>``, or ``None`` without the tag."""
    before = text.rpartition(f"</{tag}>")[0]
    _, opening, content = before.rpartition(f"<{tag}>")
    return content if opening else None


def boxed_content(text: str) -> str | None:
    """Return the text inside the last ``\\boxed{...}`` or ``\\fbox{...}``.

    Return ``None`` if there is no box, or if the last box is not closed.
    """
    *before, content = _BOX.split(text)
    if not before:
        return None
    # Braces are counted, since LaTeX nests them: \boxed{\frac{1}{2}}.
    depth = 1
    for brace in _BRACE.finditer(content):
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
        if depth == 0:
            return content[: brace.start()]
    return None


def extract_answer(text: str, mode: str = "strict", tag: str = "answer") -> str | None:
    """Return the answer in a response, without surrounding white space.

    Return ``None`` if the response has no answer, or an empty answer. ``mode`` says which text is
    the answer:

    - ``"strict"``: the text inside ``<tag>...</tag>``. The tag must occur exactly once, and outside
      the thinking, ``<think>...</think>``.
    - ``"lenient"``: the last number anywhere in the response.
    - ``"boxed"``: the text inside the last ``\\boxed{...}`` or ``\\fbox{...}``. The thinking is
      skipped.
    - ``"####"``: the rest of the line after the last ``####``. The thinking is skipped. GSM8K marks
      its answers in this way.

    Raises:
        ValueError: if ``mode`` is none of these four.
    """
    if mode == "strict":
        content = tag_content(text, tag)
    elif mode == "lenient":
        numbers = _NUMBER_IN_TEXT.findall(plain_numbers(text))
        content = numbers[-1] if numbers else None
    elif mode == "boxed":
        content = boxed_content(after_thinking(text))
    elif mode == "####":
        _, mark, rest = after_thinking(text).rpartition("####")
        line = rest.partition("\n")[0]
        content = line if mark else None
    else:
        raise ValueError(f"mode must be one of {', '.join(map(repr, ANSWER_MODES))}, got {mode!r}")
    return (content or "").strip() or None


def has_format(text: str, pattern: str = DEFAULT_FORMAT) -> bool:
    """True if ``pattern`` matches the whole of ``text``. A dot also matches a newline."""
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def plain_numbers(text: str) -> str:
    """Return ``text`` with ASCII minus signs, and without ``\\$``, ``€`` and ``£``.

    LaTeX that separates thousands is removed, too: ``-\\$1{,}000`` becomes ``-1000``.
    """
    return _NUMBER_DECORATION.sub("", text.translate(MINUS_SIGNS))


def parse_number(text: str) -> Fraction | None:
    """Return ``text`` as an exact number, or ``None`` if it is anything but a single number.

    A number may have thousands separators (``1,000``), a sign (also a Unicode minus), decimals, an
    exponent up to 999, a denominator (``a/b``), a currency sign, a leading ``=`` and a trailing
    period. A percent sign is ignored: ``50%`` is 50. LaTeX is read, too: ``\\$1{,}000``,
    ``1\\,000``, ``50\\%``.
    """
    text = text.strip()
    if len(text) > MAX_NUMBER_LENGTH:
        return None
    match = _NUMBER.fullmatch(plain_numbers(text).strip())
    if match is None or (match["sign"] and match["inner_sign"]):
        return None

    # A fraction is exact: 0.1 + 0.2 and 0.3 are equal, and 0.33 and 1/3 are not.
    integer = match["integer"].replace(",", "")
    decimals = (match["decimals"] or "").removeprefix(".")
    denominator = int(match["denominator"] or 1)
    value = Fraction(int(integer + decimals), 10 ** len(decimals) * denominator)
    if match["exponent"]:
        value *= Fraction(10) ** int(match["exponent"])
    is_negative = "-" in (match["sign"], match["inner_sign"])
    return -value if is_negative else value


def comparable_form(answer: object) -> Fraction | str:
    """Return the form in which an answer is compared: a number, or else text.

    The text is case folded. Its white space is collapsed, and one trailing period is removed.
    """
    text = str(answer)
    number = parse_number(text)
    if number is not None:
        return number
    return " ".join(text.split()).casefold().removesuffix(".").rstrip()


def answers_equal(a: object, b: object) -> bool:
    """True if two answers are the same number or, if neither is a number, the same text."""
    return comparable_form(a) == comparable_form(b)


def answers_equivalent(answer: str, reference: str) -> bool:
    """True if two answers are equal (:func:`answers_equal`), or if math-verify judges them equal.

    math-verify is not asked about an answer longer than ``MAX_SYMBOLIC_LENGTH``.
    """
    if answers_equal(answer, reference):
        return True
    is_short = len(answer) <= MAX_SYMBOLIC_LENGTH
    return is_short and same_expression(parse_answer(reference), parse_answer(answer))


def parse_answer(text: str) -> list:
    """Return the expressions that math-verify reads in an answer.

    The answer may be LaTeX, with or without delimiters.
    """
    text = plain_numbers(text).strip()
    # math-verify reads LaTeX only between delimiters, which answers such as \frac{1}{2} lack.
    if not re.search(r"\$|\\(?:boxed|\(|\[)", text):
        expressions = find_expression(f"${text}$")
        if expressions:
            return expressions
    return find_expression(text)


def find_expression(text: str) -> list:
    """Return the last expression in a text, as math-verify parses it, or an empty list.

    An expression is a number, or LaTeX between delimiters.
    """
    import math_verify

    return math_verify.parse(plain_numbers(text).strip(), parsing_timeout=_math_verify_timeout())


def same_expression(expected: list, answer: list) -> bool:
    """True if math-verify judges two results of :func:`parse_answer` to be equal."""
    import math_verify

    return bool(math_verify.verify(expected, answer, timeout_seconds=_math_verify_timeout()))


def _math_verify_timeout() -> int | None:
    # Seconds per expression. math-verify's limit uses SIGALRM, which works only in a main thread. A
    # worker process calls rewards in its main thread. In other threads there is no limit.
    return 3 if threading.current_thread() is threading.main_thread() else None
