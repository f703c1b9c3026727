"""Datasets to problems: every source reads the same, prompts are rendered exactly, nothing is changed silently; and the schedule."""

import copy
import dataclasses
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from grpo.algorithm.batch import Problem
from grpo.config import DataConfig
from grpo.data import Schedule, check_enough, load_rows, make_problems, render
from grpo.data.tiny import build_tokenizer
from grpo.rewards import load_reward

ROWS = [{"prompt": f"{i}+1=", "answer": f"so #### {i + 1}", "level": i % 3} for i in range(20)]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def plain_tokenizer(template: str = "<s> $A") -> PreTrainedTokenizerFast:
    """Words to ids, no chat template; ``template`` says which special tokens it adds by itself."""
    words = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", "one", "two", "three", "four"])}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    inner.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


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
    return str(path)


def rows_of(source: str, *, train: bool = True, **settings):
    return load_rows(DataConfig(dataset=source, **settings), train=train, seed=0)


# --- reading

KINDS = ["jsonl", "json", "csv", "parquet", "folder", "folder of splits"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_the_same_rows(tmp_path, kind):
    rows = rows_of(save(tmp_path, kind), answer_column="answer")
    assert rows.prompts == [row["prompt"] for row in ROWS]
    assert rows.columns == [{"answer": row["answer"], "level": row["level"]} for row in ROWS]


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_can_be_sliced_into_training_and_evaluation(tmp_path, kind):
    source = save(tmp_path, kind)
    splits = {"train_split": "train[:90%]", "eval_split": "train[90%:]"}
    train, evaluation = rows_of(source, **splits), rows_of(source, train=False, **splits)
    assert train.prompts == [row["prompt"] for row in ROWS[:18]]
    assert evaluation.prompts == [row["prompt"] for row in ROWS[18:]]
    assert rows_of(source, train_split="train[5:7]").prompts == ["5+1=", "6+1="]


def test_named_splits_of_a_saved_folder(tmp_path):
    source = save(tmp_path, "folder of splits")
    assert rows_of(source, train=False, eval_split="test").prompts == ["0+1=", "1+1=", "2+1="]
    with pytest.raises(ValueError, match=r"validation.*'train', 'test'"):
        rows_of(source, train_split="validation")


def test_evaluation_data_in_a_second_file(tmp_path):
    source = save(tmp_path, "jsonl")
    other = save(tmp_path, "csv", ROWS[:4])
    assert len(rows_of(source, train=False, eval_dataset=other).prompts) == 4
    assert len(rows_of(source, train=False, eval_dataset=other, eval_split="train[:50%]").prompts) == 2
    assert len(rows_of(source, eval_dataset=other).prompts) == 20
    assert rows_of(source, train=False) is None  # nothing to evaluate on was named


def test_only_the_first_rows_if_asked_for(tmp_path):
    source = save(tmp_path, "parquet")
    settings = {"max_train_samples": 3, "max_eval_samples": 100, "eval_split": "train"}
    assert rows_of(source, **settings).prompts == ["0+1=", "1+1=", "2+1="]
    assert len(rows_of(source, train=False, **settings).prompts) == 20


def test_a_path_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path, "jsonl")
    assert len(rows_of("~/data.jsonl").prompts) == 20


def test_only_empty_cells_of_a_csv_file_are_missing_values(tmp_path):
    path = tmp_path / "d.csv"
    path.write_text('prompt,answer\nNA,None\n"two\nlines, quoted ""so""",null\nempty,\n', encoding="utf-8")
    rows = rows_of(str(path), answer_column="answer")
    assert rows.prompts == ["NA", 'two\nlines, quoted "so"', "empty"]
    assert [columns["answer"] for columns in rows.columns] == ["None", "null", None]


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_json_values_stay_as_they_are_written(tmp_path, kind):
    answers = ["2024-01-05", "2024-01-05T10:00:00Z", "10:30", 12, 12.5, "12", True, None, [1, "a"], {"b": "2024-01-05"}]
    rows = [{"prompt": "a", "answer": answer} for answer in answers] + [{"prompt": "b", "level": 1}]
    path = tmp_path / f"d.{kind}"
    path.write_text(json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    found = rows_of(str(path), answer_column="answer").columns
    assert [repr(columns["answer"]) for columns in found] == [repr(answer) for answer in [*answers, None]]
    assert [columns["level"] for columns in found] == [None] * len(answers) + [1]


def test_a_csv_column_is_of_numbers_only_where_this_changes_no_cell(tmp_path):
    path = tmp_path / "d.csv"
    path.write_text(
        "prompt,answer,level,price,code,true,day,flag\n1,12,12,0.5,007,true,2024-01-05,True\n2,,,2,1e5,false,1.50,False\n"
    )
    found = rows_of(str(path), answer_column="answer")
    assert found.prompts == ["1", "2"]
    assert found.columns == [
        {"answer": "12", "level": 12, "price": 0.5, "code": "007", "true": "true", "day": "2024-01-05", "flag": True},
        {"answer": None, "level": None, "price": 2, "code": "1e5", "true": "false", "day": "1.50", "flag": False},
    ]
    assert load_reward("accuracy")([""], ["<answer>12</answer>"], answer=[found.columns[0]["answer"]]) == [1.0]


def test_a_folder_of_files_is_read_as_they_are_written_or_refused(tmp_path):
    for name in ("csv", "json"):
        (tmp_path / name).mkdir()
    (tmp_path / "csv" / "train.csv").write_text("prompt,answer,level\nNA,12,3\nb,,4\n")
    found = rows_of(f"{tmp_path}/csv", answer_column="answer")
    assert found.prompts == ["NA", "b"]
    assert found.columns == [{"answer": "12", "level": 3}, {"answer": None, "level": 4}]
    (tmp_path / "json" / "train.jsonl").write_text('{"prompt": "a", "answer": "2024-01-05"}\n')
    with pytest.raises(ValueError, match=r"column 'answer' look like dates.*give a file"):
        rows_of(f"{tmp_path}/json", answer_column="answer")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,answer,answer\na,1,2\n", "'answer' is there more than once"),
        ("prompt,answer\na,1\nb,2,3\n", "d.csv:3: 3 fields, but the header has 2"),
        ("prompt,answer\na,1\nb\n", "d.csv:3: 1 fields, but the header has 2"),
    ],
)
def test_a_csv_file_with_rows_that_do_not_suit_its_header_is_refused(tmp_path, text, message):
    path = tmp_path / "d.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"data\.dataset=") as caught:
        rows_of(str(path))
    assert message in str(caught.value)


def test_builtin_tasks_have_their_own_splits_and_never_share_a_problem():
    for name in ("arithmetic", "countdown"):
        train, evaluation = rows_of(f"builtin:{name}"), rows_of(f"builtin:{name}", train=False, eval_split="test")
        assert not set(map(str, train.prompts)) & set(map(str, evaluation.prompts))
        assert all(columns["answer"] for columns in train.columns)
        assert rows_of(f"builtin:{name}").prompts == train.prompts


# --- columns and answers


def test_every_other_column_reaches_the_rewards():
    from grpo.algorithm.batch import Completion, Group
    from grpo.rewards.scores import score_groups

    problem = Problem(0, "q", (1,), {"answer": "2", "level": 7, "tests": ["a", "b"]})
    other = Problem(1, "r", (1,), {"answer": "3", "level": None, "tests": []})
    seen = {}
    runner = SimpleNamespace(score=lambda **given: seen.update(given))
    groups = [
        Group(p, tuple(Completion(ids=(5,), sampling_logprobs=(0.0,), finished=True, text=t) for t in "xy"))
        for p in (problem, other)
    ]
    score_groups(runner, groups)
    assert seen["columns"] == {
        "answer": ["2", "2", "3", "3"],
        "level": [7, 7, None, None],
        "tests": [["a", "b"]] * 2 + [[]] * 2,
    }
    assert seen["prompts"] == ["q", "q", "r", "r"]
    assert seen["completions"] == ["x", "y", "x", "y"]


def test_columns_survive_from_the_file_to_the_problem(tmp_path, tokenizer):
    rows = [{"q": "1+1", "gold": "#### 2", "tests": ["t1", "t2"], "meta": {"source": "book", "page": 3}}]
    config = DataConfig(
        dataset=save(tmp_path, "parquet", rows), prompt_column="q", answer_column="gold", answer_pattern="#### (.+)"
    )
    problem = make_problems(load_rows(config, train=True, seed=0), config, tokenizer).problems[0]
    assert problem.prompt == "1+1"
    assert problem.columns == {
        "gold": "#### 2", "answer": "2", "tests": ["t1", "t2"], "meta": {"source": "book", "page": 3}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (r"#### (.+)", "He has 1,000 + 234.\n#### 1,234", "1,234"),
        (r"####\s*(.+)", "so\n####  -5 ", "-5"),
        (r"\d+", "about 42 or 43", "42"),  # no group: the whole match
        (r"(?:is|=) (\S+)", "x = 3", "3"),
        (r"#### (.+)", "no answer here", None),
        (r"####(.*)", "nothing follows\n#### ", None),
        (r"(?:is (\S+)|#### 7)", "a group that takes no part: #### 7", None),
        (None, "#### 7", "#### 7"),
    ],
)
def test_answers_are_taken_out_of_their_column(tmp_path, pattern, text, answer):
    rows = [{"prompt": "a", "answer": text}, {"prompt": "b", "answer": "is 5 #### 5"}]
    found = rows_of(save(tmp_path, "jsonl", rows), answer_column="answer", answer_pattern=pattern)
    assert found.columns[0]["answer"] == answer
    assert found.num_without_answer == (answer is None)


def test_a_pattern_that_backtracks_is_stopped_and_names_the_row(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.data.problems.PATTERN_SECONDS", 0.2)
    rows = [{"prompt": "a", "answer": "a"}, {"prompt": "b", "answer": "a" * 60 + "b"}]
    with pytest.raises(
        ValueError,
        match=r"answer_pattern='\(a\|aa\)\+\$' takes more than 0\.2 s on row 2 of data\.dataset=.*, column answer",
    ):
        rows_of(save(tmp_path, "jsonl", rows), answer_column="answer", answer_pattern="(a|aa)+$")


def test_rows_without_an_answer_are_kept_and_counted(tmp_path, tokenizer):
    rows = [{"prompt": "a", "answer": "#### 1"}, {"prompt": "b", "answer": "none"}, {"prompt": "c", "answer": None}]
    config = DataConfig(dataset=save(tmp_path, "jsonl", rows), answer_column="answer", answer_pattern="#### (.+)")
    found = make_problems(load_rows(config, train=True, seed=0), config, tokenizer)
    assert [p.columns["answer"] for p in found.problems] == ["1", None, None]
    assert (found.num_without_answer, found.num_too_long) == (2, 0)


# --- prompts


def test_the_chat_template_is_rendered_with_its_generation_prompt(tokenizer):
    assert render("2+2=", tokenizer, None, []) == "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"


def test_system_prompt_and_worked_examples_are_turns_of_their_own(tokenizer):
    few_shot = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+2=", "completion": "3"}]
    assert render("2+2=", tokenizer, "Be brief.", few_shot) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
        "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_conversation_keeps_its_turns_and_its_own_system_prompt(tokenizer):
    turns = [
        {"role": "system", "content": "Mine."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "2+2="},
    ]
    few_shot = [{"prompt": "1+1=", "completion": "2"}]
    assert render(turns, tokenizer, "Yours.", few_shot) == (
        "<|im_start|>system\nMine.<|im_end|>\n"
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
        "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(turns[1:], tokenizer, "Yours.", []).startswith(
        "<|im_start|>system\nYours.<|im_end|>\n<|im_start|>user\nHi"
    )
    assert len(turns) == 4  # the row itself is not touched


def test_the_ids_are_those_of_the_rendered_text_and_nothing_more(tmp_path, tokenizer):
    config = DataConfig(dataset=save(tmp_path, "jsonl"), system_prompt="Be brief.")
    problem = make_problems(load_rows(config, train=True, seed=0), config, tokenizer).problems[3]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n3+1=<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(problem.prompt_ids) == text
    assert list(problem.prompt_ids) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_conversational_prompts_are_read_from_files(tmp_path, tokenizer, kind):
    rows = [{"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": f"{i}?"}]} for i in range(3)]
    config = DataConfig(dataset=save(tmp_path, kind, rows))
    problems = make_problems(load_rows(config, train=True, seed=0), config, tokenizer).problems
    assert problems[1].prompt == rows[1]["prompt"]
    text = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(problems[1].prompt_ids) == text


def test_fields_of_messages_beside_role_and_content_are_left_out(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "a", "name": "Eva"}]}]
    assert rows_of(save(tmp_path, "jsonl", rows)).prompts == [[{"role": "user", "content": "a"}]]


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": ["an image"]}],
        [{"role": None, "content": "a"}],
        [{"role": "system", "content": "only this"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    ],
)
def test_malformed_conversations_are_refused(tmp_path, prompt):
    with pytest.raises(ValueError, match=r"data.jsonl, row 1, column prompt: .*(messages|a prompt ends with)"):
        rows_of(save(tmp_path, "jsonl", [{"prompt": prompt}]))


@pytest.mark.parametrize(
    ("template", "ids"),
    [
        ("<s> $A", (0, 3, 4)),  # the tokenizer adds a BOS: the model was trained with it
        ("$A", (3, 4)),  # it does not: neither do we
        ("<s> $A </s>", (0, 3, 4)),  # an EOS at the end of a prompt would end what has not begun
    ],
)
def test_without_a_chat_template_the_prompt_is_plain(tmp_path, template, ids):
    config = DataConfig(dataset=save(tmp_path, "jsonl", [{"prompt": "one two"}]))
    problems = make_problems(load_rows(config, train=True, seed=0), config, plain_tokenizer(template)).problems
    assert problems[0].prompt_ids == ids


def test_with_a_chat_template_no_second_bos_is_added(tmp_path):
    tokenizer = plain_tokenizer("<s> $A")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %} {{ m['content'] }}{% endfor %}{% if add_generation_prompt %} four{% endif %}"
    config = DataConfig(dataset=save(tmp_path, "jsonl", [{"prompt": "one two"}]))
    problems = make_problems(load_rows(config, train=True, seed=0), config, tokenizer).problems
    assert problems[0].prompt_ids == (0, 3, 4, 6)


def test_without_a_chat_template_system_prompt_and_examples_are_paragraphs():
    few_shot = [{"prompt": "Q1", "completion": "A1"}]
    assert render("Q2", plain_tokenizer(), "Be brief.", few_shot) == "Be brief.\n\nQ1\n\nA1\n\nQ2"
    assert render("Q2", plain_tokenizer(), None, []) == "Q2"


def test_prompts_too_long_are_left_out_and_counted_never_cut(tmp_path):
    texts = ["one", "one two", "one two three", "one two three four", "two"]
    source = save(tmp_path, "jsonl", [{"prompt": text, "row": i} for i, text in enumerate(texts)])
    config = DataConfig(dataset=source, max_prompt_length=3)  # with its BOS, "one two" has exactly 3
    found = make_problems(load_rows(config, train=True, seed=0), config, plain_tokenizer())
    assert [p.prompt_ids for p in found.problems] == [(0, 3), (0, 3, 4), (0, 4)]
    assert found.num_too_long == 2
    # The index is the row's place in the file: randomness hangs on it, so it must not move with the filter.
    assert [p.index for p in found.problems] == [0, 1, 4] == [p.columns["row"] for p in found.problems]


def test_all_prompts_too_long_is_an_error(tmp_path):
    config = DataConfig(dataset=save(tmp_path, "jsonl", [{"prompt": "one two three"}] * 2), max_prompt_length=3)
    with pytest.raises(ValueError, match=r"all 2 prompts of data\.dataset=.*max_prompt_length=3 .* the shortest has 4"):
        make_problems(load_rows(config, train=True, seed=0), config, plain_tokenizer())


def test_a_prompt_of_megabytes_is_too_long_without_being_tokenized(tmp_path, tokenizer):
    rows = [{"prompt": "1+" * 2**20}] + [{"prompt": f"{i}+1="} for i in range(200)]
    config = DataConfig(dataset=save(tmp_path, "jsonl", rows), max_prompt_length=20)
    sizes = []

    class Counting(type(tokenizer)):
        def __call__(self, texts, **options):
            sizes.append(sum(map(len, texts)))
            return super().__call__(texts, **options)

    tokenizer = copy.copy(tokenizer)
    tokenizer.__class__ = Counting
    found = make_problems(load_rows(config, train=True, seed=0), config, tokenizer)
    assert (len(found.problems), found.num_too_long) == (200, 1)
    assert [tokenizer.decode(p.prompt_ids) for p in found.problems] == [
        render(p.prompt, tokenizer, None, []) for p in found.problems
    ]
    assert max(sizes) < 10_000 and len(sizes) > 1  # one call for all cannot be interrupted
    config = config.model_copy(update={"max_train_samples": 1})
    with pytest.raises(ValueError, match=r"all 1 prompts .*max_prompt_length=20 tokens .*: the shortest has 2\d+ char"):
        make_problems(load_rows(config, train=True, seed=0), config, tokenizer)


def test_a_chat_template_that_refuses_a_row_names_it(tmp_path):
    tokenizer = plain_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    )
    rows = [{"prompt": "one"}, {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]}]
    config = DataConfig(dataset=save(tmp_path, "jsonl", rows[1:]))
    with pytest.raises(ValueError, match=r"chat template .* row 1 of data.dataset=.*: no system role"):
        make_problems(load_rows(config, train=True, seed=0), config, tokenizer)


# --- the schedule


def problems(count: int) -> list[Problem]:
    return [Problem(1000 + i, f"p{i}", (i,), {}) for i in range(count)]


def schedules(count: int, prompts_per_step: int, world_size: int, seed: int = 0) -> list[Schedule]:
    return [
        Schedule(problems(count), prompts_per_step=prompts_per_step, seed=seed, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]


def global_batch(ranks: list[Schedule], step: int) -> list[int]:
    """Indices in dataset order: global row i lies on rank i % world_size, as ``World.gather_rows`` has it."""
    shares = [[problem.index for problem in rank.at(step)] for rank in ranks]
    return [share[place] for place in range(len(shares[0])) for share in shares]


@pytest.mark.parametrize("count", [12, 40, 41, 43, 46])
def test_the_global_batch_is_the_same_for_every_world_size(count):
    by_world = {world: schedules(count, 6, world) for world in (1, 2, 3, 6)}
    for step in range(20):
        batches = {world: global_batch(ranks, step) for world, ranks in by_world.items()}
        assert all(batch == batches[1] for batch in batches.values())
        assert len(set(batches[1])) == 6


def test_an_epoch_covers_every_problem_once():
    for world in (1, 2, 3):
        ranks = schedules(42, 6, world)
        assert ranks[0].steps_per_epoch == 7
        for epoch in range(3):
            dealt = [i for step in range(7) for i in global_batch(ranks, 7 * epoch + step)]
            assert sorted(dealt) == [1000 + i for i in range(42)]


def test_problems_that_do_not_fill_a_step_are_left_out_of_the_epoch():
    (schedule,) = schedules(45, 6, 1)
    epochs = [[p.index for s in range(7) for p in schedule.at(7 * e + s)] for e in range(20)]
    assert all(len(set(epoch)) == 42 for epoch in epochs)  # none twice
    left_out = [set(range(1000, 1045)) - set(epoch) for epoch in epochs]
    assert len(set.union(*left_out)) > 30  # and not the same ones each time


def test_epochs_and_seeds_differ():
    (schedule,), (other,) = schedules(42, 6, 1), schedules(42, 6, 1, seed=1)
    orders = [tuple(i for step in range(7) for i in global_batch([schedule], 7 * e + step)) for e in range(4)]
    orders.append(tuple(i for step in range(7) for i in global_batch([other], step)))
    assert len(set(orders)) == 5


def test_the_problems_of_a_step_do_not_depend_on_earlier_calls():
    fresh = {step: global_batch(schedules(41, 6, 2), step) for step in range(15)}
    ranks = schedules(41, 6, 2)
    for step in (14, 0, 7, 7, 3, 13, 6, 1, 0, 14):
        ranks[0].substitute(step, 0, 0)
        assert global_batch(ranks, step) == fresh[step]


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    (schedule,) = schedules(20, 4, 1)
    first = (global_batch([schedule], 3), schedule.substitute(3, 1, 0).index)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    (schedule,) = schedules(20, 4, 1)
    assert (global_batch([schedule], 3), schedule.substitute(3, 1, 0).index) == first


@pytest.mark.parametrize("step", [0, 3, 9])
def test_substitutes_are_new_to_the_step_and_the_same_for_every_world_size(step):
    by_world = {}
    for world in (1, 2, 3):
        ranks = schedules(43, 6, world)
        batch = set(global_batch(ranks, step))
        found = {}
        for attempt in range(3):
            for rank, schedule in enumerate(ranks):
                for place in range(6 // world):
                    problem = schedule.substitute(step, place, attempt)
                    assert schedule.substitute(step, place, attempt) is problem
                    assert problem.index not in batch
                    found[attempt, place * world + rank] = problem.index
        assert max(Counter(found.values()).values()) == 1
        by_world[world] = found
    assert by_world[1] == by_world[2] == by_world[3]


def test_substitutes_run_out_and_every_problem_left_is_used():
    (schedule,) = schedules(16, 6, 1)  # 10 are not in the batch
    found = [schedule.substitute(0, place, attempt) for attempt in range(3) for place in range(6)]
    assert [p is None for p in found] == [False] * 10 + [True] * 8
    assert {p.index for p in found[:10]} | set(global_batch([schedule], 0)) == set(range(1000, 1016))
    elsewhere = [schedule.substitute(1, place, 0).index for place in range(6)]
    assert [p.index for p in found[:6]] != elsewhere  # another step, other substitutes


def test_fewer_problems_than_a_step_names_what_works():
    with pytest.raises(
        ValueError, match=r"5 training problems .*prompts_per_step=6: use prompts_per_step=4, or more data"
    ):
        schedules(5, 6, 2)
    with pytest.raises(ValueError, match=r"prompts_per_step=8: use prompts_per_step=6"):
        check_enough(7, 8, unit=3)
    with pytest.raises(ValueError, match=r"1 training problems .*: at least 2 are needed"):
        schedules(1, 6, 2)
    assert len(schedules(6, 6, 2)[0].at(0)) == 3


def test_the_tiny_model_gets_no_instructions_of_a_built_in_task(tokenizer):
    """The tiny model was warm-started without them."""
    config = DataConfig(max_train_samples=1)
    rows = load_rows(config, train=True, seed=0)
    assert rows.instructions.startswith("Solve the problem.")
    lengths = []
    for told in (
        rows,
        dataclasses.replace(rows, instructions=None),
        dataclasses.replace(rows, system_prompt="one", instructions=None),
    ):
        of_tiny = make_problems(told, config, tokenizer).problems[0]
        of_others = make_problems(told, config, plain_tokenizer("$A")).problems[0]
        lengths.append((len(of_tiny.prompt_ids), len(of_others.prompt_ids)))
    assert lengths[0][0] == lengths[1][0], "the tiny model hears no instructions"
    assert lengths[0][1] > lengths[2][1] > lengths[1][1]
    assert load_rows(DataConfig(max_train_samples=1, system_prompt="one"), train=True, seed=0).instructions is None
    gemma = plain_tokenizer("$A")
    gemma.chat_template = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ m['content'] }}{% endfor %}"
    assert len(make_problems(rows, config, gemma).problems[0].prompt_ids) == lengths[0][1]


# --- the real thing


def test_gsm8k_loads_whole_and_every_answer_is_a_number(assets):
    folder = assets / "data" / "gsm8k"
    config = DataConfig(
        dataset=str(folder / "train.jsonl"), eval_dataset=str(folder / "test.jsonl"),
        prompt_column="question", answer_column="answer", answer_pattern=r"####\s*(.+)",
    )  # fmt: skip
    for train, count in ((True, 7473), (False, 1319)):
        rows = load_rows(config, train=train, seed=0)
        assert len(rows.prompts) == count
        assert rows.num_without_answer == 0
        answers = [columns["answer"] for columns in rows.columns]
        assert all(float(answer.replace(",", "")) == int(answer.replace(",", "")) for answer in answers)
        assert any("," in answer for answer in answers)  # "1,234" is kept as written: comparing is the reward's part
