"""Files to problems, and problems to each rank's share of a step."""

import json

import datasets
import pytest
from conftest import load

from grpo.batch import Problem
from grpo.config import DataConfig
from grpo.data import Schedule, count_shared, load_rows, make_problems, render

ROWS = [{"question": f"What is {i}+1?", "answer": f"count\n#### {i + 1},000", "level": i % 3} for i in range(10)]


def config(dataset, **changes) -> DataConfig:
    settings = {"prompt_column": "question", "answer_column": "answer", "answer_pattern": r"####\s*(.+)"}
    return DataConfig(dataset=str(dataset), **settings | changes)


def save_as(kind: str, folder) -> str:
    rows = datasets.Dataset.from_list(ROWS)
    if kind == "jsonl":
        (folder / "d.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
        return folder / "d.jsonl"
    if kind == "csv":
        rows.to_csv(folder / "d.csv")
        return folder / "d.csv"
    if kind == "parquet":
        rows.to_parquet(folder / "d.parquet")
        return folder / "d.parquet"
    saved = rows if kind == "saved dataset" else datasets.DatasetDict({"train": rows, "test": rows.select(range(3))})
    saved.save_to_disk(folder / "saved")
    return folder / "saved"


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "saved dataset", "saved dict"])
def test_every_format_gives_the_same_problems(tmp_path, policy, kind):
    path = save_as(kind, tmp_path)
    found = make_problems(load_rows(config(path), train=True, seed=0), config(path), policy.tokenizer)
    assert [p.prompt for p in found.problems] == [row["question"] for row in ROWS]
    assert [p.columns for p in found.problems] == [{"answer": f"{i + 1},000", "level": i % 3} for i in range(10)]
    halves = config(path, train_split="train[:70%]", eval_split="train[70%:]")
    train, held_out = (load_rows(halves, train=train, seed=0).prompts for train in (True, False))
    assert (len(train), len(held_out)) == (7, 3)
    assert train + held_out == [row["question"] for row in ROWS]
    if kind == "saved dict":
        assert len(load_rows(config(path, eval_split="test"), train=False, seed=0).prompts) == 3


def test_evaluation_rows_from_a_second_file(tmp_path):
    path = save_as("jsonl", tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(ROWS[4]))
    assert load_rows(config(path), train=False, seed=0) is None
    assert load_rows(config(path, eval_dataset=str(other)), train=False, seed=0).prompts == ["What is 4+1?"]
    assert len(load_rows(config(path, max_train_samples=4), train=True, seed=0).prompts) == 4


def test_prompt_text_is_exact(policy):
    few_shot = [{"prompt": "2+2", "completion": "4"}]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n3+3<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render("3+3", policy.tokenizer, "Be brief.", few_shot) == expected
    messages = [{"role": "user", "content": "3+3"}]
    assert render(messages, policy.tokenizer, "Be brief.", few_shot) == expected
    own = [{"role": "system", "content": "Mine."}, *messages]
    assert render(own, policy.tokenizer, "Be brief.", []).startswith("<|im_start|>system\nMine.<|im_end|>")
    assert render("3+3", policy.tokenizer, None, []).startswith("<|im_start|>user\n3+3")


def test_no_chat_template_gives_the_plain_prompt(random_model):
    tokenizer = load(random_model).tokenizer
    tokenizer.chat_template = None
    assert render("3+3", tokenizer, None, []) == "3+3"
    assert render("3+3", tokenizer, "Be brief.", [{"prompt": "2+2", "completion": "4"}]) == "Be brief.\n\n2+2\n\n4\n\n3+3"


def test_conversational_rows_keep_their_messages(tmp_path, policy):
    row = {"prompt": [{"role": "user", "content": "hi"}], "kind": "greeting"}
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    plain = DataConfig(dataset=str(tmp_path / "d.jsonl"))
    (problem,) = make_problems(load_rows(plain, train=True, seed=0), plain, policy.tokenizer).problems
    assert problem.prompt == row["prompt"]
    assert problem.columns == {"kind": "greeting"}
    assert policy.tokenizer.decode(problem.prompt_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_long_prompts_are_left_out_counted_and_never_cut(tmp_path, policy):
    rows = [{"prompt": "a" * n} for n in (5, 50, 6)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    short = DataConfig(dataset=str(tmp_path / "d.jsonl"), max_prompt_length=30)
    found = make_problems(load_rows(short, train=True, seed=0), short, policy.tokenizer)
    assert found.num_too_long == 1
    assert [(p.index, p.prompt) for p in found.problems] == [(0, "a" * 5), (2, "a" * 6)], "numbers are those of the file"
    assert all("a" * len(p.prompt) in policy.tokenizer.decode(p.prompt_ids) for p in found.problems)


def test_rows_without_an_answer_are_counted(tmp_path, policy):
    rows = [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": "unknown"}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = make_problems(
        load_rows(config(tmp_path / "d.jsonl"), train=True, seed=0), config(tmp_path / "d.jsonl"), policy.tokenizer
    )
    assert found.num_without_answer == 1
    assert [p.columns["answer"] for p in found.problems] == ["1", None]


def test_gsm8k_as_published(assets):
    gsm8k = config(assets / "data/gsm8k/train.jsonl", eval_dataset=str(assets / "data/gsm8k/test.jsonl"))
    train, test = load_rows(gsm8k, train=True, seed=0), load_rows(gsm8k, train=False, seed=0)
    assert (len(train.prompts), len(test.prompts)) == (7473, 1319)
    for rows in (train, test):
        assert rows.num_without_answer == 0
        assert all(float(row["answer"].replace(",", "")) is not None for row in rows.columns)


def problems(count: int) -> list[Problem]:
    return [Problem(100 + i, str(i), (i,)) for i in range(count)]


def indices(found) -> list[int]:
    return [problem.index for problem in found]


def test_schedule_covers_an_epoch_and_shuffles_the_next():
    schedule = Schedule(problems(26), prompts_per_step=6, seed=3)
    assert schedule.steps_per_epoch == 4
    first, second = ([indices(schedule.at(4 * e + s)) for s in range(4)] for e in (0, 1))
    for epoch in (first, second):
        seen = sum(epoch, [])
        assert len(seen) == len(set(seen)) == 24, "the two left over are dropped"
    assert first != second
    assert indices(schedule.at(1)) == first[1], "asked again, out of order"
    assert indices(Schedule(problems(26), prompts_per_step=6, seed=4).at(0)) != first[0]


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_every_world_size_deals_the_same_step(world_size):
    single = Schedule(problems(26), prompts_per_step=6, seed=3)
    ranks = [Schedule(problems(26), prompts_per_step=6, seed=3, rank=r, world_size=world_size) for r in range(world_size)]
    for step in (0, 3, 4, 9):
        shares = [indices(rank.at(step)) for rank in ranks]
        dealt = [shares[i % world_size][i // world_size] for i in range(6)]
        assert dealt == indices(single.at(step))


def test_substitutes_are_new_and_the_same_for_every_world_size():
    single = Schedule(problems(40), prompts_per_step=6, seed=3)
    pair = [Schedule(problems(40), prompts_per_step=6, seed=3, rank=r, world_size=2) for r in range(2)]
    found = [single.substitute(5, place, attempt) for attempt in range(3) for place in range(6)]
    assert len(set(indices(found))) == 18, "each at most once in a step"
    assert not set(indices(found)) & set(indices(single.at(5)))
    by_two = [pair[place % 2].substitute(5, place // 2, attempt) for attempt in range(3) for place in range(6)]
    assert indices(by_two) == indices(found)
    assert single.substitute(5, 0, 6) is None, "40 - 6 problems are used up after five attempts and a bit"
    assert indices([single.substitute(6, 0, 0)]) != indices(found[:1])


def test_shared_problems_are_counted():
    assert count_shared(problems(5), [Problem(0, "x", (2,)), Problem(1, "y", (77,))]) == 1
