r"""Read a number in the notations that models use: ``5 apples``, ``**5**``, ``$5$``, ``x = 5``, ``\frac{1}{2}``, ``2 1/2``, ``1\,000``.

The rule is caution: a text that could mean anything but the one number is not read as that number. So an answer with a second number, an
operator, or a word that changes the value (``5 or 6``, ``5 million``, ``5 halves``) is no number here, and neither is ``5 m``, which can be
metres, millions or a variable. Every function takes time linear in its input: only texts of up to ``LONGEST_NUMBER`` characters are read.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from grpo.rewards.extract import LAST_NUMBER, LONGEST_NUMBER, MINUS_SIGNS, answers_equal, normalize_text, parse_number

_UNIT_WORDS = """
    percent point unit degree dollar cent euro pound penny pence rupee yen yuan peso usd eur gbp ° °c °f km/h m/s
    km cm mm meter metre kilometer kilometre centimeter centimetre millimeter millimetre inch foot feet ft yard yd mile mi mph kmh
    kg mg gram kilogram milligram ounce oz lb ton tonne liter litre milliliter millilitre ml gallon pint quart cup
    sec second min minute hr hour day week month year people person men man women woman children child
"""
UNITS = frozenset(_UNIT_WORDS.split())
"""Units that are read in the singular, in lower case. Every other unit is one word in the plural, such as ``apples``."""

_OTHER_WORDS = """
    ones twos threes fours fives sixes sevens eights nines tens dozens scores hundreds thousands lakhs crores pairs couples doubles
    triples halves thirds quarters times plus minus divides equals exceeds versus unless perhaps others this thus does
    quadruples grosses negatives always sometimes yes
"""
NOT_UNITS = frozenset(_OTHER_WORDS.split())
"""Words that end like a plural, but change the value or are no noun. Words in -ths (but ``months``) and -illions are none either."""

_LATEX = (
    (re.compile(r"(?<=[0-9])(?:\{,\}|\\,|,\\!)(?=[0-9]{3}(?![0-9]))"), ","),  # 1{,}000  1\,000  1,\!000
    (re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?[0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}|([0-9])([0-9]))"), r" \1\3/\2\4 "),
    (re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})"), "°"),
    (re.compile(r"\\[,;:! ]"), " "),
)
"""Patterns and replacements. Spaces around a replacement keep numbers apart that LaTeX sets apart."""

_WRAPPED = re.compile(
    r"""(?P<mark>\*{1,3}|_{1,3}|`{1,3}|\${1,2}) (?P<a>(?:(?!(?P=mark)).)+) (?P=mark) \.?    # **5**  `5`  $5$
    | \\\( (?P<b>.+) \\\) \.? | \\\[ (?P<c>.+) \\\] \.? | \\(?:boxed|fbox)\s*\{ (?P<d>.+) \} \.?
    | \*{0,3} (?:the\s+)? (?:(?:final|correct)\s+)? answer \*{0,3} \s* (?:is\b\s*:? | [:=](?:\*{1,3}(?=\s))?) (?P<e>.+)
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_ASSIGNMENT = re.compile(r"(?P<variable>[A-Za-z])\s*+=(?P<value>[^=]+)")
_MIXED = re.compile(
    r"(?P<sign>[+-]?)\s*+(?P<whole>[1-9][0-9]*)[ ]+(?P<part>[1-9][0-9]*)\s*+/\s*+(?P<parts>[1-9][0-9]*)\s*+\.?"
)
_WITH_UNIT = re.compile(
    r"""(?P<value>.*[^A-Za-z\s°/.]) \s*+
    (?P<unit>(?:(?:square|cubic|sq|cu)\.?\s++)? (?P<word>°?\s*+[A-Za-z]+|°) (?:(?:/|\s++per\s++)(?P<per>[A-Za-z]+))?
    (?:\s*+(?:\^\{?[23]\}?|[²³]))?) \s*+\.?""",
    re.VERBOSE | re.DOTALL,
)
_SIGNS = {"$": "dollar", "€": "euro", "£": "pound", "%": "percent", "°": "degree"}
_LAST = re.compile(LAST_NUMBER.pattern + r"(?:[ ]+[1-9][0-9]*/[1-9][0-9]* | /[1-9][0-9]*)?", re.VERBOSE)


@dataclass(frozen=True)
class Quantity:
    """A number, with the unit and the name of the variable that were written with it."""

    value: Fraction
    unit: str | None = None
    variable: str | None = None

    def agrees(self, other: "Quantity") -> bool:
        """True if the values are equal and neither the units nor the variables contradict each other: one side may lack them."""
        details = ((self.unit, other.unit), (self.variable, other.variable))
        return self.value == other.value and all(a == b or a is None or b is None for a, b in details)


def equal_in_any_notation(answer: str, reference: Any, *, bare: bool = False) -> bool:
    """True if two answers are equal as they stand (:func:`answers_equal`), as quantities, or as texts without their markup.

    With ``bare``, the answer has been cut from its surroundings, which may hold a unit: then only a reference answer without unit is equal.
    """
    if answers_equal(answer, reference):
        return True
    reference = str(reference)
    if max(len(answer), len(reference)) > LONGEST_NUMBER:
        return False
    first, second = read_quantity(answer), read_quantity(reference)
    if first is None and second is None:
        return normalize_text(_unwrapped(_plain(answer))) == normalize_text(_unwrapped(_plain(reference)))
    if first is None or second is None or (bare and (second.unit or second.variable)):
        return False
    return first.agrees(second)


def last_number(text: str) -> str | None:
    """The last number anywhere in a text. Unlike in the mode ``lenient`` of :func:`extract_answer` it may be a fraction or a mixed number."""
    numbers = _LAST.findall(_plain(text))
    return numbers[-1] if numbers else None


def read_quantity(text: str) -> Quantity | None:
    """``text`` as one number, with or without a unit, in any notation; ``None`` if it is anything else."""
    if len(text) > LONGEST_NUMBER:
        return None
    text, variable, unit = _unwrapped(_plain(text)), None, None
    if assignment := _ASSIGNMENT.fullmatch(text):
        variable, text = assignment["variable"], _unwrapped(assignment["value"])
    if _number(text) is None and (match := _WITH_UNIT.fullmatch(text)):
        unit, text = _read_unit(match), _unwrapped(match["value"])
        if unit is None:
            return None
    value = _number(text)
    units = {name for sign, name in _SIGNS.items() if sign in text} | ({unit} if unit else set())
    if value is None or len(units) > 1:  # "$5 cents"
        return None
    return Quantity(value, next(iter(units), None), variable)


def _plain(text: str) -> str:
    text = text.translate(MINUS_SIGNS)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text


def _unwrapped(text: str) -> str:
    """A short text without the Markdown, the LaTeX delimiters and the words ("the answer is") around all of it."""
    text = text.strip()
    while match := _WRAPPED.fullmatch(text):
        text = match[match.lastgroup].strip()
    return text


def _number(text: str) -> Fraction | None:
    if (mixed := _MIXED.fullmatch(text)) is None:
        return parse_number(text)
    part = Fraction(int(mixed["part"]), int(mixed["parts"]))
    value = int(mixed["whole"]) + part
    return None if part >= 1 else -value if mixed["sign"] == "-" else value


def _read_unit(match: re.Match[str]) -> str | None:
    """The unit in lower case, without spaces and a last s; ``None`` if the words are not known to be a unit."""
    unit, per = "".join(match["unit"].split()).casefold(), match["per"]
    if unit in UNITS:
        return _SIGNS.get(unit, unit)
    known = _is_unit(match["word"]) and (per is None or _is_unit(per + "s"))
    return unit.removesuffix("s") if known else None


def _is_unit(word: str) -> bool:
    word = "".join(word.split()).casefold()
    if word in UNITS or word.removesuffix("s") in UNITS:
        return True
    is_plural = len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "ths", "illions"))
    return is_plural and word not in NOT_UNITS
