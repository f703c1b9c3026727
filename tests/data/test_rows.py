"""Datasets to rows: every source reads the same, nothing is changed silently, answers are found in their column."""

import datetime
import json
import math
import sys
from decimal import Decimal
from pathlib import Path

import datasets
import pandas
import pytest

from grpo.config import DataConfig, load_config
from grpo.data import load_rows, rows_of
from grpo.rewards import load_reward

ROWS = [{"prompt": f"{i}+1=", "answer": f"so #### {i + 1}", "level": i % 3} for i in range(20)]


def save(folder: Path, kind: str, rows=ROWS) -> str:
    """The rows, written as a person would; returns the path."""
    dataset, path = datasets.Dataset.from_list(rows), folder / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif kind == "csv":
        dataset.to_csv(path)
    elif kind == "parquet":
        dataset.to_parquet(path)
    elif kind == "folder":
        dataset.save_to_disk(path)
    elif kind == "folder of splits":
        datasets.DatasetDict({"train": dataset, "test": dataset.select(range(3))}).save_to_disk(path)
    elif kind == "folder of files":
        dataset.to_csv(path / "train.csv")
    return str(path)


def rows_in(source: str, *, train: bool = True, **settings):
    return load_rows(DataConfig(dataset=source, **settings), train=train, seed=0)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "folder", "folder of splits", "folder of files"])
def test_every_source_gives_the_same_rows_whole_and_in_slices(tmp_path, kind):
    source = save(tmp_path, kind)
    rows = rows_in(source, answer_column="answer")
    assert rows.prompts == [row["prompt"] for row in ROWS]
    assert rows.columns == [{"answer": row["answer"], "level": row["level"]} for row in ROWS]
    splits = {"train_split": "train[:90%]", "eval_split": "train[-2:]"}
    train, evaluation = rows_in(source, **splits), rows_in(source, train=False, **splits)
    assert train.prompts == [row["prompt"] for row in ROWS[:18]]
    assert evaluation.prompts == [row["prompt"] for row in ROWS[18:]]
    assert rows_in(source, train_split="train[5:7]+train[:1]").prompts == ["5+1=", "6+1=", "0+1="]
    limits = {"max_train_samples": 3, "max_eval_samples": 100, "eval_split": "train"}
    assert rows_in(source, **limits).prompts == ["0+1=", "1+1=", "2+1="]
    assert len(rows_in(source, train=False, **limits).prompts) == 20


def test_named_splits_and_evaluation_data_in_a_second_file(tmp_path, monkeypatch):
    source, other = save(tmp_path, "folder of splits"), save(tmp_path, "csv", ROWS[:4])
    assert rows_in(source, train=False, eval_split="test").prompts == ["0+1=", "1+1=", "2+1="]
    assert len(rows_in(source, train=False, eval_dataset=other).prompts) == 4
    assert len(rows_in(source, train=False, eval_dataset=other, eval_split="train[:50%]").prompts) == 2
    assert len(rows_in(source, eval_dataset=other).prompts) == 20
    assert rows_in(source, train=False) is None, "nothing to evaluate on is named"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(rows_in("~/data.csv").prompts) == 4


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_json_values_stay_as_they_are_written(tmp_path, kind):
    answers = ["2024-01-05", "2024-01-05T10:00:00Z", "10:30", 12, 12.5, "12", True, None, [1, "a"], {"b": "2024-01-05"}]
    rows = [{"prompt": "a\u2028b 🙂", "answer": answer} for answer in answers] + [{"prompt": "b", "level": 1}]
    path = tmp_path / f"d.{kind}"
    text = json.dumps(rows, ensure_ascii=False) if kind == "json" else "\n\n".join(map(json.dumps, rows))
    path.write_text("\ufeff" + text, encoding="utf-8")
    found = rows_in(str(path), answer_column="answer")
    assert [repr(columns["answer"]) for columns in found.columns] == [repr(answer) for answer in [*answers, None]]
    assert [columns["level"] for columns in found.columns] == [None] * len(answers) + [1]
    assert found.prompts == ["a\u2028b 🙂"] * len(answers) + ["b"]


@pytest.mark.parametrize("folder", [False, True])
def test_csv_cells_stay_as_they_are_written(tmp_path, folder):
    """A column has numbers only if this changes no cell; only an empty cell is a missing value."""
    path = tmp_path / "train.csv"
    path.write_text(
        "prompt,answer,level,price,code,true,day,flag,list\n"
        "1,12,12,0.5,007,true,2024-01-05,True,[1]\n"
        '"two\nlines, quoted ""so""",,,2,1e5,false,1.50,False,[2]\n'
        "NA,null,-3,,nan,true,inf,True,[3]\n"
    )
    found = rows_in(str(tmp_path if folder else path), answer_column="answer")
    assert found.places == [f"row {i} of the split" for i in (1, 2, 3)] if folder else [f"line {i}" for i in (2, 3, 5)]
    assert found.prompts == ["1", 'two\nlines, quoted "so"', "NA"]
    names = ["answer", "level", "price", "code", "true", "day", "flag", "list"]
    assert [[columns[name] for name in names] for columns in found.columns] == [
        ["12", 12, 0.5, "007", "true", "2024-01-05", True, "[1]"],
        [None, None, 2, "1e5", "false", "1.50", False, "[2]"],
        ["null", -3, None, "nan", "true", "inf", True, "[3]"],
    ]
    assert load_reward("accuracy")([""], ["<answer>12</answer>"], answer=[found.columns[0]["answer"]]) == [1.0]


def test_rows_as_python_objects():
    rows = [{"prompt": "a", "tests": ["x", "y"], "n": 1}, {"prompt": "b", "tests": None}]
    expected = [{"prompt": "a", "tests": ["x", "y"], "n": 1}, {"prompt": "b", "tests": None, "n": None}]
    for given in (rows, datasets.Dataset.from_list(rows), pandas.DataFrame(rows)):
        found = rows_of(given, "dataset")
        assert found == expected
        assert all(type(row["n"]) in (int, type(None)) for row in found)
    for given in ({"prompt": ["a"]}, datasets.DatasetDict(train=datasets.Dataset.from_list(rows)), ["a"], "file.jsonl"):
        with pytest.raises(ValueError, match="dataset must be a list of mappings"):
            rows_of(given, "dataset")


def test_lists_inside_of_cells_are_the_same_from_a_file_and_from_a_data_frame(tmp_path):
    cell = {"ground_truth": {"numbers": [1, 2], "tests": [{"inputs": ["1"]}]}}
    path = tmp_path / "d.parquet"
    datasets.Dataset.from_list([{"prompt": "a", "reward_model": cell}]).to_parquet(path)
    for table in (pandas.read_parquet(path), datasets.Dataset.from_parquet(str(path))):
        assert rows_of(table, "dataset") == [{"prompt": "a", "reward_model": cell}]


def test_endless_rows_are_read_up_to_the_limit_or_refused():
    def endless():
        while True:
            yield {"prompt": "a"}

    for table in (endless(), datasets.IterableDataset.from_generator(endless)):
        assert rows_of(table, "dataset", 3) == [{"prompt": "a"}] * 3
        with pytest.raises(ValueError, match=r"dataset has no length .*: set data.max_train_samples"):
            rows_of(table, "dataset")
        with pytest.raises(ValueError, match=r"eval_dataset has no length .*: set data.max_eval_samples"):
            rows_of(table, "eval_dataset")


VERL = [
    {"prompt": "a", "reward_model": {"ground_truth": "1", "style": "rule"}, "extra": {"question": "q"}},
    {"prompt": "b", "reward_model": None, "extra": {"question": "r"}},
]
NESTED = {"answer_column": "reward_model.ground_truth", "prompt_column": "extra.question"}


def test_a_field_in_a_column_is_the_answer_or_the_prompt(tmp_path):
    for kind in ("jsonl", "parquet"):
        rows = rows_in(save(tmp_path, kind, VERL), **NESTED)
        assert rows.prompts == ["q", "r"]
        assert [row["answer"] for row in rows.columns] == ["1", None]
        assert rows.columns[0]["reward_model"] == VERL[0]["reward_model"]
        assert rows.num_without_answer == 1
    dotted = [{"prompt": "a", "reward_model.ground_truth": "2"}]
    rows = rows_in(save(tmp_path, "jsonl", dotted), answer_column="reward_model.ground_truth")
    assert rows.columns[0]["answer"] == "2"


def test_a_list_of_answers_stays_one_and_a_pattern_searches_each_of_them(tmp_path):
    rows = [
        {"prompt": "a", "answer": ["#### 70", "no"]},
        {"prompt": "b", "answer": []},
        {"prompt": "c", "answer": None},
    ]
    source = save(tmp_path, "jsonl", rows)
    found = rows_in(source, answer_column="answer")
    assert [row["answer"] for row in found.columns] == [["#### 70", "no"], [], None]
    assert found.num_without_answer == 2
    found = rows_in(source, answer_column="answer", answer_pattern="#### (.+)")
    assert [row["answer"] for row in found.columns] == [["70"], None, None]


def test_a_pattern_searches_dates_and_nan_is_a_missing_answer():
    day = datetime.date(2024, 1, 5)
    rows = [{"prompt": "a", "answer": day}, {"prompt": "b", "answer": math.nan}]
    for pattern, expected in ((None, [day, None]), (r"\d+", ["2024", None])):
        config = DataConfig(dataset="python:rows", answer_column="answer", answer_pattern=pattern)
        found = load_rows(config, train=True, seed=0, table=rows)
        assert [row["answer"] for row in found.columns] == expected
        assert found.num_without_answer == 1


def test_builtin_tasks_have_their_own_splits():
    assert rows_in("builtin:arithmetic", train=False, eval_split=None) is None
    for name in ("arithmetic", "countdown"):
        train, evaluation = rows_in(f"builtin:{name}"), rows_in(f"builtin:{name}", train=False, eval_split="test")
        assert not set(train.prompts) & set(evaluation.prompts)
        assert all(columns["answer"] for columns in train.columns)


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (r"#### (.+)", "He has 1,000 + 234.\n#### 1,234", "1,234"),
        (r"####\s*(.+)", "so\n####  -5 ", "-5"),
        (r"\d+", "about 42 or 43", "42"),  # no group: the whole match
        (r"(?:is|=) (\S+)", "x = 3", "3"),
        (r"#### (.+)", "no answer here", None),
        (r"#### (.+)", None, None),
        (r"####(.*)", "nothing follows\n#### ", None),
        (r"(?:is (\S+)|#### 7)", "a group that takes no part: #### 7", None),
        (None, "#### 7", "#### 7"),
    ],
)
def test_answers_are_found_in_their_column_and_rows_without_are_kept_and_counted(tmp_path, pattern, text, answer):
    rows = [{"prompt": "a", "gold": text}, {"prompt": "b", "gold": "is 5 #### 5"}]
    found = rows_in(save(tmp_path, "jsonl", rows), answer_column="gold", answer_pattern=pattern)
    assert found.columns[0] == {"gold": text, "answer": answer}
    assert found.num_without_answer == (answer is None)


P = '{"prompt": "a", "answer": "7"}\n'
ANSWER = {"answer_column": "answer"}
PATTERN = ANSWER | {"answer_pattern": "#### (.+)"}
REFUSED = [
    ("d.jsonl", P + '{"prompt": \n' + P, {}, "the value that begins in line 2: "),
    ("d.json", '[{"prompt": "a"},\n{"prompt": }]\n', {}, "line 2"),
    ("d.jsonl", P + "[1, 2]\n", {}, "rows must be JSON objects: line 2 is [1, 2]"),
    ("d.jsonl", P + "\n\nnull\n", {}, "rows must be JSON objects: line 4 is None"),
    ("d.json", '[\n{"prompt": "a"},\n7]', {}, "rows must be JSON objects: row 2 is 7"),
    ("d.jsonl", "\n\n", {}, "d.jsonl has no rows"),
    ("d.jsonl", P.encode() + b'{"prompt": "\xff\xfe"}\n', {}, "can't decode byte 0xff in position 43"),
    ("d.jsonl", '{"prompt": ' + "[" * 100_000, {}, "cannot be read: maximum recursion depth"),
    ("d.csv", "prompt,answer\n", {}, "has no rows"),
    ("d.csv", "prompt,answer,answer\na,1,2\n", {}, "line 1 names a column twice"),
    ("d.csv", 'prompt,answer\n"a\nb",1\n\n"c\n\nd"\n', {}, "line 5 has 1 fields, the header has 2"),
    ("d.csv", "question;answer\nWhat is 1, 2?;3\n", {}, "must be separated by commas"),
    ("d.csv", "prompt,answer\na,1\nb,2,3\n", {}, "line 3 has 3 fields, the header has 2"),
    ("d.csv", "prompt,answer\na,1\nb\n", {}, "line 3 has 1 fields, the header has 2"),
    ("d.csv", 'prompt,answer\na,"1\n', {}, "line 2: unexpected end of data"),
    ("csv/train.csv", "prompt,answer\na,1,2\n", {}, "more fields than the header"),
    ("json/train.jsonl", '{"prompt": "a", "answer": "2024-01-05"}\n', ANSWER, "texts in column 'answer' into dates"),
    ("d.parquet", "not parquet", {}, "Parquet"),
    ("d.txt", "hello", {}, "must end in .jsonl, .json, .csv or .parquet"),
    ("empty/config.json.bak", "{}", {}, "corresponds to no data"),
    ("d.jsonl", P, {"train_split": "test"}, "Unknown split \"test\". Should be one of ['train']"),
    ("d.jsonl", P, {"train_split": "train[:x]"}, "train[:x]"),
    ("d.jsonl", P, {"train_split": "train[:0]"}, "d.jsonl has no rows"),
    ("d.jsonl", P, {"prompt_column": "question"}, "data.prompt_column=question: "),
    ("d.jsonl", P, {"answer_column": "gold"}, "no such column; it has prompt, answer"),
    ("d.jsonl", '{"prompt": "a", "answer": null}\n', ANSWER, "it is empty in every row"),
    ("d.jsonl", P, PATTERN, "answer_pattern='#### (.+)' matches nothing in '7'"),
    ("d.jsonl", '{"prompt": "a", "answer": null}\n' + P, PATTERN, "matches nothing in '7' and all others"),
    ("d.jsonl", '{"prompt": "a", "answer": null}\n', PATTERN, "it is empty in every row"),
    ("d.jsonl", P, ANSWER | {"answer_pattern": "("}, "is not a regular expression that works: missing )"),
    ("d.jsonl", P.replace("7", "a" * 60 + "b"), ANSWER | {"answer_pattern": "(a|aa)+$"}, "regex timed out"),
    ("d.jsonl", P, {"answer_pattern": "(.+)"}, "needs data.answer_column"),
    (
        "d.jsonl",
        P + '{"prompt": "b", "answer": {"value": "7"}}',
        ANSWER | {"answer_pattern": "(.+)"},
        "d.jsonl, line 2, column answer holds a dict: data.answer_pattern searches text",
    ),
    (
        "d.jsonl",
        '{"prompt": "a", "answer": {"value": "7", "style": "rule"}}',
        {"answer_column": "answer.gold"},
        "data.answer_column=answer.gold: column answer of data.dataset=",
    ),
    ("d.jsonl", P, {"answer_column": "answer.gold"}, "has no gold; it holds str"),
    (
        "d.jsonl",
        "\n" + P + '\n{"prompt": 7}\n',
        {"train_split": "train[1:]"},
        "d.jsonl, line 4: a prompt is text, or a",
    ),
    ("d.json", '[{"prompt": "a"}, {"prompt": 7}]', {"train_split": "train[1:]"}, "d.json, row 2: a prompt is text"),
    ("d.jsonl", '{"prompt": []}\n', {}, "line 1: a prompt is text"),
    (
        "d.jsonl",
        '{"prompt": [{"role": "user", "content": ["an image"]}]}\n',
        {},
        "message 1 of the prompt: the content of the user's message must be text, and is of type list",
    ),
    ("d.jsonl", '{"prompt": [{"role": "system", "content": "a"}]}\n', {}, "ends with the user's"),
    ("python:rows", "", {}, "stands for rows passed to grpo.train()"),
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
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1


def test_gsm8k_loads_whole_and_every_answer_is_a_number(assets):
    folder = assets / "data" / "gsm8k"
    columns = {"prompt_column": "question", "answer_column": "answer", "answer_pattern": r"####\s*(.+)"}
    for train, count in ((True, 7473), (False, 1319)):
        rows = rows_in(f"{folder}/train.jsonl", eval_dataset=f"{folder}/test.jsonl", train=train, **columns)
        assert (len(rows.prompts), rows.num_without_answer) == (count, 0)
        answers = [columns["answer"] for columns in rows.columns]
        assert all(float(answer.replace(",", "")) == int(answer.replace(",", "")) for answer in answers)
        assert any("," in answer for answer in answers)  # "1,234" stays as written: the reward compares


def test_seeds_of_an_environment_are_those_that_numpy_takes():
    """Different for each row, each split and each seed of the run, and below 2**31."""
    config = DataConfig(dataset="environment:prompts")
    found = []
    for train, seed in ((True, 0), (True, 1), (False, 0)):
        rows = load_rows(config, train=train, seed=seed)
        found += [row["seed"] for row in rows.columns]
    assert len(found) == 2 * 4096 + 128 and len(set(found)) == len(found)
    assert min(found) >= 0 and 2**30 < max(found) < 2**31


def test_gym_rows_are_seeded_different_and_never_in_both_splits():
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install -e '.[gym]'")
    config = DataConfig(dataset="reasoning_gym:chain_sum", max_train_samples=60, max_eval_samples=30)
    train, evaluation = (load_rows(config, train=train, seed=3) for train in (True, False))
    assert (len(set(train.prompts)), len(set(evaluation.prompts))) == (60, 30)
    assert not set(train.prompts) & set(load_rows(config, train=False, seed=4).prompts), "for any other seed too"
    assert train.prompts == load_rows(config, train=True, seed=3).prompts
    assert train.prompts != load_rows(config, train=True, seed=4).prompts
    assert "<answer>" in train.instructions
    with pytest.raises(ValueError, match="chain_sun"):
        rows_in("reasoning_gym:chain_sun")
    # A task with many right answers names none: its scorer reads the metadata.
    many = rows_in("reasoning_gym:graph_color", max_train_samples=4)
    assert [row["answer"] for row in many.columns] == [None] * 4
    assert many.num_without_answer == 0
    gold = train.columns[0]["answer"]
    texts = [f"<answer>{gold}</answer>", gold, "<answer>banana</answer>", f"<answer>it is {gold}</answer>"]
    columns = {name: [value] * 4 for name, value in train.columns[0].items()}
    values = load_reward("reasoning_gym")(train.prompts[:1] * 4, texts, **columns)
    # This scorer rewards the answer among other words in part: `eval.correct_above` must lie above that.
    assert values[:3] == [1.0, 0.0, 0.0] and 0 < values[3] < 0.99


def test_tasks_of_reasoning_gym_take_arguments(tmp_path):
    """A sum of two terms, and two tasks in one; the scorer has the arguments too."""
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install -e '.[gym]'")
    file = tmp_path / "gym.yaml"
    file.write_text("data:\n  dataset: reasoning_gym:chain_sum\n  config_name: {min_terms: 2, max_terms: 2}\n")
    data = load_config([f"--config={file}", "data.max_train_samples=9"]).data
    assert all(len(row["metadata"]["expression"].split()) == 3 for row in load_rows(data, train=True, seed=0).columns)

    precise = {"min_num_decimal_places": 6, "max_num_decimal_places": 6, "max_terms": 2}
    specs = [
        {"name": "decimal_arithmetic", "weight": 1, "config": precise},
        {"name": "prime_factorization", "weight": 1, "config": {}},
    ]
    rows = rows_in("reasoning_gym:composite", config_name={"datasets": specs}, max_train_samples=20)
    tasks = [row["metadata"]["source_dataset"] for row in rows.columns]
    assert {*tasks} == {"decimal_arithmetic", "prime_factorization"}
    sum_row, primes = (tasks.index(spec["name"]) for spec in specs)
    answer = Decimal(rows.columns[sum_row]["answer"]) + Decimal("0.00005")
    cases = [(sum_row, rows.columns[sum_row]["answer"]), (sum_row, answer), (primes, rows.columns[primes]["answer"])]
    cases.append((primes, "two times three"))  # on which the scorer of this task raises
    values = load_reward("reasoning_gym")(
        [rows.prompts[row] for row, _ in cases],
        [f"<answer>{text}</answer>" for _, text in cases],
        **{name: [rows.columns[row][name] for row, _ in cases] for name in ("answer", "metadata")},
    )
    assert values == [1.0, 0.0, 1.0, 0.0]

    for wrong, message in (
        ({"min_term": 2}, "unexpected keyword argument 'min_term'"),
        ({"min_terms": 9}, "max_terms must be"),
        ({"seed": 2}, "multiple values for keyword argument 'seed'"),
    ):
        with pytest.raises(ValueError, match=f"data.dataset=reasoning_gym:chain_sum: .*{message}"):
            rows_in("reasoning_gym:chain_sum", config_name=wrong)
