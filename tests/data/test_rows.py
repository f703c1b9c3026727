"""Datasets to rows: every source reads the same, nothing is changed silently, answers are found in
their column."""

import json
import math
import sys
from decimal import Decimal
from pathlib import Path

import datasets
import pandas
import pytest

from grpo.config import DataConfig
from grpo.data import load_rows, rows_from_table
from grpo.rewards import load_reward

ROWS = [{"prompt": f"{i}+1=", "answer": f"so #### {i + 1}"} for i in range(20)]
ANSWER = {"answer_column": "answer"}
PATTERN = {"answer_column": "answer", "answer_pattern": "#### (.+)"}


SPLITS = datasets.DatasetDict(
    {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:3])}
)
SOURCES = {
    "d.jsonl": lambda rows, path: rows.to_json(path),
    "d.json": lambda rows, path: rows.to_json(path, lines=False),
    "d.csv": lambda rows, path: rows.to_csv(path),
    "d.parquet": lambda rows, path: rows.to_parquet(path),
    "folder": lambda rows, path: rows.save_to_disk(path),
    "folder of splits": lambda rows, path: SPLITS.save_to_disk(path),
    "folder of files": lambda rows, path: rows.to_csv(path / "train.csv"),
}


def save(folder: Path, name: str, rows=ROWS) -> str:
    """The rows, written as a person would; returns the path."""
    path = folder / name
    SOURCES[name](datasets.Dataset.from_list(rows), path)
    return str(path)


def rows_in(source: str, *, train: bool = True, table=None, **settings):
    config = DataConfig(dataset=source, **settings)
    return load_rows(config, train=train, seed=0, table=table)


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_rows_whole_and_in_slices(tmp_path, name):
    source = save(tmp_path, name)
    prompts = [row["prompt"] for row in ROWS]
    rows = rows_in(source, **ANSWER)
    assert rows.prompts == prompts
    assert [row["answer"] for row in rows.columns] == [row["answer"] for row in ROWS]

    splits = {"train_split": "train[:90%]", "eval_split": "train[-2:]"}
    assert rows_in(source, max_train_samples=3, **splits).prompts == prompts[:3]
    assert rows_in(source, **splits).prompts == prompts[:18]
    assert rows_in(source, train=False, max_eval_samples=100, **splits).prompts == prompts[18:]
    assert rows_in(source, train_split="train[5:7]+train[:1]").prompts == ["5+1=", "6+1=", "0+1="]


def test_named_splits_and_evaluation_data_in_a_second_file(tmp_path, monkeypatch):
    source = save(tmp_path, "folder of splits")
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path, "d.csv", ROWS[:4])
    for settings, count in (
        ({"eval_split": "test"}, 3),
        ({"eval_dataset": "~/d.csv", "eval_split": "train[:50%]"}, 2),
    ):
        assert len(rows_in(source, train=False, **settings).prompts) == count
        assert len(rows_in(source, **settings).prompts) == 20
    assert rows_in(source, train=False) is None, "nothing to evaluate on is named"


def test_json_values_stay_as_they_are_written(tmp_path):
    answers = [
        "2024-01-05T10:00:00Z",
        "}\n{",
        "NA",
        "007",
        2**70,
        12.5,
        True,
        None,
        [1, "a"],
        {"b": "10:30"},
        {"c": 1},
    ]
    rows = [{"prompt": "a\u2028b 🙂", "answer": answer} for answer in answers]
    rows.append({"prompt": "b", "level": 1})
    path = tmp_path / "d.json"
    for text in (json.dumps(rows, ensure_ascii=False), "\n \n".join(map(json.dumps, rows))):
        path.write_text("\ufeff" + text, encoding="utf-8")
        found = rows_in(str(path), **ANSWER)
        assert [repr(row["answer"]) for row in found.columns] == [
            repr(answer) for answer in [*answers, None]
        ]
        assert [row["level"] for row in found.columns] == [None] * len(answers) + [1]
        assert found.prompts == ["a\u2028b 🙂"] * len(answers) + ["b"]


def test_csv_cells_are_the_texts_that_are_written(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text(
        "prompt,answer,level,code,day\n"
        "1,12,12,007,2024-01-05\n"
        '"two\nlines, quoted ""so""",,,1e5,1.50\n'
        "NA,null,-3,nan,inf\n"
    )
    # The folder goes through another reader.
    for source in (path, tmp_path):
        found = rows_in(str(source), **ANSWER)
        assert found.prompts == ["1", 'two\nlines, quoted "so"', "NA"]
        assert [list(row.values()) for row in found.columns] == [
            ["12", "12", "007", "2024-01-05"],
            [None, "", "1e5", "1.50"],
            ["null", "-3", "nan", "inf"],
        ]


def test_rows_as_python_objects(tmp_path):
    cell = {"truth": {"numbers": [1, 2], "tests": [{"inputs": ["1"]}]}}
    rows = [{"prompt": "a", "cell": cell, "n": 1.5}, {"prompt": "b", "cell": None}]
    expected = [rows[0], {"prompt": "b", "cell": None, "n": None}]
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(tmp_path / "d.parquet")
    # In a frame from a file, lists are NumPy's arrays at any depth.
    for given in (
        rows,
        dataset,
        pandas.DataFrame(rows),
        pandas.read_parquet(tmp_path / "d.parquet"),
    ):
        assert repr(rows_from_table(given, "dataset", None)) == repr(expected)
    with pytest.raises(ValueError, match="dataset must be a list of mappings"):
        rows_from_table("file.jsonl", "dataset", None)


def test_endless_rows_are_read_up_to_the_limit_or_refused():
    def endless():
        while True:
            yield {"prompt": "a"}

    for table in (endless(), datasets.IterableDataset.from_generator(endless)):
        assert rows_from_table(table, "dataset", 3) == [{"prompt": "a"}] * 3
        with pytest.raises(
            ValueError, match=r"dataset has no length .*: set data.max_train_samples"
        ):
            rows_from_table(table, "dataset", None)


def test_a_field_in_a_column_is_the_answer_or_the_prompt(tmp_path):
    first = {"reward_model": {"ground_truth": "1", "style": "rule"}, "extra": {"question": "q"}}
    second = {"reward_model": None, "extra": {"question": "r"}}
    rows = rows_in(
        save(tmp_path, "d.parquet", [first, second]),
        answer_column="reward_model.ground_truth",
        prompt_column="extra.question",
    )
    assert rows.prompts == ["q", "r"]
    assert [row["answer"] for row in rows.columns] == ["1", None]
    assert rows.columns[0]["reward_model"] == first["reward_model"]
    assert rows.num_without_answer == 1


@pytest.mark.parametrize(
    ("pattern", "cell", "answer"),
    [
        (r"#### (.+)", "He has 1,000 + 234.\n#### 1,234", "1,234"),
        (r"\d+", "about 42 or 43", "42"),  # no group: the whole match
        (r"#### (.+)", "no answer here", None),
        (r"(?:is (\S+)|#### 7)", "a group that takes no part: #### 7", None),
        (None, ["7", "seven"], ["7", "seven"]),
        (None, math.nan, None),
    ],
)
def test_answers_are_found_in_their_column_and_rows_without_are_kept_and_counted(
    pattern, cell, answer
):
    rows = [{"prompt": "a", "gold": cell}, {"prompt": "b", "gold": "is 5 #### 5"}]
    found = rows_in("python:rows", table=rows, answer_column="gold", answer_pattern=pattern)
    assert found.columns[0] == {"gold": cell, "answer": answer}
    assert found.num_without_answer == (answer is None)


P = '{"prompt": "a", "answer": "7"}\n'
REFUSED = [
    ("d.jsonl", P + '\n{"prompt": \n', {}, "Expecting value: line 4 column 1"),
    ("d.jsonl", "\n\n", {}, "d.jsonl has no rows"),
    ("d.jsonl", b'{"prompt": "\xff\xfe"}\n', {}, "can't decode byte 0xff in position 12"),
    ("d.jsonl", '{"prompt": ' + "[" * 100_000, {}, "cannot be read: maximum recursion depth"),
    ("d.csv", "prompt,answer\na,1,2\n", {}, "more fields than the header"),
    ("csv/train.csv", "prompt,answer\na,1,2\n", {}, "more fields than the header"),
    ("d.parquet", "not parquet", {}, "Parquet"),
    ("d.jsonl", P, {"train_split": "test"}, "Unknown split \"test\". Should be one of ['train']"),
    (
        "d.jsonl",
        P,
        {"prompt_column": "question"},
        "has no such column, or no prompts in it; it has prompt, answer",
    ),
    ("d.jsonl", P, PATTERN, "fits data.answer_pattern, #### (.+)); the columns"),
    (
        "d.jsonl",
        P,
        ANSWER | {"answer_pattern": "("},
        "is no regular expression that works: missing )",
    ),
    (
        "d.jsonl",
        P.replace("7", "a" * 60 + "b"),
        ANSWER | {"answer_pattern": "(a|aa)+$"},
        "regex timed out",
    ),
    (
        "d.jsonl",
        P + '{"prompt": 7}\n',
        {},
        "d.jsonl, row 2: a prompt is text, or a list of messages",
    ),
    ("builtin:chess", "", {}, "arithmetic, countdown"),
    ("reasoning_gym:chain_sum", "", {}, "needs the package reasoning_gym"),
]


@pytest.mark.parametrize(("name", "text", "settings", "message"), REFUSED)
def test_data_that_is_refused(tmp_path, monkeypatch, name, text, settings, message):
    monkeypatch.setattr("grpo.data.table.PATTERN_SECONDS", 0.2)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as if it were missing
    dataset = name
    if ":" not in name:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        dataset = str(path.parent if "/" in name else path)
    with pytest.raises(ValueError) as error:
        rows_in(dataset, **settings)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_seeds_of_an_environment_are_different_and_those_that_numpy_takes():
    config = DataConfig(dataset="environment:prompts")
    found = []
    for train, seed in ((True, 0), (True, 1), (False, 0)):
        rows = load_rows(config, train=train, seed=seed, has_environment=True)
        found += [row["seed"] for row in rows.columns]
    assert len(set(found)) == 2 * 4096 + 128
    assert min(found) >= 0 and 2**30 < max(found) < 2**31


def test_gym_rows_are_different_and_never_in_both_splits_and_scorers_get_the_arguments():
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install -e '.[gym]'")
    settings = {
        "config_name": {"min_terms": 2, "max_terms": 2},
        "max_train_samples": 60,
        "max_eval_samples": 30,
    }
    train = rows_in("reasoning_gym:chain_sum", **settings)
    evaluation = rows_in("reasoning_gym:chain_sum", train=False, **settings)
    assert len({*train.prompts, *evaluation.prompts}) == 90
    assert train.prompts == rows_in("reasoning_gym:chain_sum", **settings).prompts
    assert all(len(row["metadata"]["expression"].split()) == 3 for row in train.columns)

    # The scorer reads the number of decimal places.
    precise = {"min_num_decimal_places": 6, "max_num_decimal_places": 6, "max_terms": 2}
    rows = rows_in("reasoning_gym:decimal_arithmetic", config_name=precise, max_train_samples=1)
    answer = rows.columns[0]["answer"]
    near = Decimal(answer) + Decimal("0.00005")
    columns = {name: [value] * 2 for name, value in rows.columns[0].items()}
    texts = [f"<answer>{answer}</answer>", f"<answer>{near}</answer>"]
    assert load_reward("reasoning_gym")(rows.prompts * 2, texts, **columns) == [1.0, 0.0]

    with pytest.raises(
        ValueError, match=r"data.dataset=reasoning_gym:chain_sum: .*unexpected .* 'min_term'"
    ):
        rows_in("reasoning_gym:chain_sum", config_name={"min_term": 2})
