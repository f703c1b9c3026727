"""What must hold for any input, drawn by hypothesis; and a fuzz run of the parsers that read what
models write."""

import itertools
import random
import time
from fractions import Fraction

import pytest
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from grpo.config import PRESETS, Config, load_config
from grpo.rewards.answers import (
    ANSWER_MODES,
    MAX_NUMBER_LENGTH,
    answers_equal,
    extract_answer,
    has_format,
    parse_number,
)
from grpo.rewards.builtin import accuracy, countdown, evaluate_expression, tag_groups

FUZZ_CASES = 500
"""Texts per part in the quick suite; ten times as many in the slow one."""
SLOWEST_CASE = 2.0
"""Seconds of CPU for one text of at most ``LONG`` characters; a pattern that backtracks would take
minutes."""
LONG = 20_000

properties = settings(
    max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
finite = st.floats(1e-8, 1e3)
printable = st.characters(codec="utf-8", exclude_categories=["C"])
presets = [name for name in PRESETS if "rein" not in name and name != "rloo"]


@st.composite
def overrides(draw) -> dict[str, dict]:
    """Sections of a configuration that may be written."""
    return {
        "seed": draw(st.integers(0, 2**63 - 1)),
        "output_dir": draw(st.text(printable, min_size=1)),
        "algorithm": {"name": draw(st.sampled_from(presets)), "beta": draw(st.floats(0, 1))},
        "rollout": {
            "temperature": draw(finite),
            "stop": draw(st.lists(st.text(printable, min_size=1))),
        },
        "optim": {
            "learning_rate": draw(finite),
            "betas": draw(st.tuples(st.floats(0, 0.999), st.floats(0, 0.9999))),
            "max_steps": draw(st.none() | st.integers(1, 10**9)),
        },
        "data": {"system_prompt": draw(st.none() | st.text(printable))},
    }


@seed(0)
@settings(properties, max_examples=10)
@given(values=overrides())
def test_a_configuration_survives_its_file(tmp_path_factory, values):
    """Written as a run writes it and read again, it is the same; so are its single keys as
    overrides."""
    config = Config.model_validate(values)
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_text(
        yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True),
        encoding="utf-8",
    )
    assert load_config(["--config", str(path)]) == config
    again = load_config(
        [f"optim.learning_rate={values['optim']['learning_rate']!r}", f"seed={values['seed']}"]
    )
    assert (again.optim.learning_rate, again.seed) == (
        values["optim"]["learning_rate"],
        values["seed"],
    )


@seed(0)
@properties
@given(integer=st.integers(-(10**15), 10**15), decimals=st.integers(0, 6), grouped=st.booleans())
def test_a_number_is_read_as_it_was_written(integer, decimals, grouped):
    value = Fraction(integer, 10**decimals)
    digits = f"{abs(integer):0{decimals + 1}d}"
    whole, rest = (digits[:-decimals], digits[-decimals:]) if decimals else (digits, "")
    whole = f"{int(whole):,}" if grouped else str(int(whole))
    text = ("-" if integer < 0 else "") + whole + ("." + rest if rest else "")
    assert parse_number(text) == value
    assert parse_number(f"${text}" if integer >= 0 else text) == value
    assert answers_equal(text, str(float(value)) if abs(value) < 10**6 and decimals < 6 else text)
    for wrong in (f"{text} {text}", f"{text}x{text}", "x", ""):
        assert parse_number(wrong) is None


words = st.text(st.characters(codec="utf-8", exclude_characters="<>"), max_size=40)


@seed(0)
@properties
@given(before=words, inside=words.filter(str.strip), after=words, other=words)
def test_the_answer_between_the_tags_and_no_other(before, inside, after, other):
    text = f"{before}<answer>{inside}</answer>{after}"
    assert extract_answer(text) == inside.strip()
    assert extract_answer(text + f"<answer>{other}</answer>") is None, "two answers are none"
    assert extract_answer(before + after) is None
    assert has_format(f"<think>{before}</think>\n<answer>{inside}</answer>")
    assert not has_format(
        f"<think>{before}</think>\n<answer>{inside}</answer><answer>{other}</answer>"
    )


PIECES = [
    "<answer>", "</answer>", "<think>", "</think>", "<answer", "answer>", "<", ">", "\\boxed{", "{", "}", "(", ")",
    "(((", ")))", "+", "-", "*", "/", "×", "÷", "−", "=", "1", "42", "0", "007", "3.14", "1,000", ",", ".", "%", "$",
    "1e9", "9" * 40, "1/3", "/0", " ", "\n", "\t", "  " * 20, "x", "the answer is", "####", "\\frac{1}{2}", "\\text{",
    "{,}", "**", "`", "^{", "x=", " km", "\\(", "٣", "²", "½", "🙂", "\x00", "\ud800", "-" * 30, "(" * 40, "1+" * 30,
    "1 " * 40, ".1" * 30, ",1" * 30,
]  # fmt: skip


def random_text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.15:  # one thing many times: what makes a pattern backtrack
        return (rng.choice(PIECES) + rng.choice(PIECES) * rng.randint(0, 2)) * rng.randint(1, 200)
    if kind < 0.25:
        return "".join(chr(rng.randrange(1, 0x2FFFF)) for _ in range(rng.randint(0, 60)))
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 60)))


def seconds_to_parse(text: str) -> float:
    """CPU seconds of all parsers together; no exception but the documented one, an answer of the
    right type."""
    began = time.process_time()
    for mode in ANSWER_MODES:
        answer = extract_answer(text, mode=mode)
        assert answer is None or isinstance(answer, str)
        (right,) = accuracy(prompts=[""], completions=[text], answer=["42"], mode=mode)
        assert right in (0.0, 1.0)
    number = parse_number(text)
    assert number is None or isinstance(number, Fraction)
    assert has_format(text) in (True, False)
    try:
        value, used = evaluate_expression(text)
        assert isinstance(value, Fraction) and all(type(n) is int for n in used)
    except (ValueError, ZeroDivisionError):
        pass
    (right,) = accuracy(prompts=[""], completions=[text], answer=["42"])
    (made,) = countdown(prompts=[""], completions=[text], target=[42], numbers=[[1, 42]])
    (shaped,) = tag_groups(prompts=[""], completions=[text])
    assert right in (0.0, 1.0) and 0.0 <= made <= 1.0 and 0.0 <= shaped <= 1.0
    return time.process_time() - began


def slowest_of(texts) -> str:
    """What was measured; the first text over the bound ends it."""
    seconds = [0.0]
    for text in texts:
        seconds.append(seconds_to_parse(text))
        assert seconds[-1] < SLOWEST_CASE, (
            f"{seconds[-1]:.2f} s for {len(text)} characters: {text[:60]!r}"
        )
    return f"{len(seconds) - 1} texts, the slowest {1000 * max(seconds):.1f} ms"


@pytest.mark.parametrize(
    "part", [*range(4), *(pytest.param(part, marks=pytest.mark.slow) for part in range(4, 8))]
)
def test_nothing_that_a_model_writes_breaks_or_delays_the_parsers(part):
    rng = random.Random(part)
    print(
        slowest_of(
            random_text(rng)[:3000] for _ in range(FUZZ_CASES if part < 4 else 10 * FUZZ_CASES)
        )
    )


@pytest.mark.slow
def test_long_texts_take_no_longer_than_they_are():
    """What is quadratic passes 3,000 characters unseen; at 20,000 it would take seconds."""
    parts = itertools.product(("", "<answer>"), PIECES, ("", "x"))
    print(slowest_of((tag + piece * LONG)[:LONG] + end for tag, piece, end in parts))
    # As long as a text may be that is read as a number: any power of that length is too long.
    parts = itertools.product(("", "=", "5", "x=", "5 a"), PIECES, ("", "x", "5"))
    answers = (
        (start + piece * MAX_NUMBER_LENGTH)[: MAX_NUMBER_LENGTH - 1] + end
        for start, piece, end in parts
    )
    print(slowest_of(f"<answer>{answer}</answer>" for answer in answers))
