"""Prompts: system prompts from files, prompt templates, reasoning-gym tasks."""

import json
import sys
from types import SimpleNamespace

import pytest

from grpo.algorithm.batch import Completion, Group
from grpo.config import DataConfig, load_config
from grpo.data import load_rows, make_problems, render
from grpo.data.tiny import build_tokenizer
from grpo.rewards import RewardRunner, RewardSpec, load_reward
from grpo.rewards.scores import score_groups


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


# --- system prompt and template


def test_a_system_prompt_is_read_from_a_file(tmp_path):
    (tmp_path / "told.txt").write_text("Be brief.\nBe right.\n")
    assert DataConfig(system_prompt=f"{tmp_path}/told.txt").system_prompt == "Be brief.\nBe right."
    assert DataConfig(system_prompt="Answer as in notes.txt, please").system_prompt == "Answer as in notes.txt, please"
    with pytest.raises(ValueError, match=r"data\.system_prompt='missing\.txt': the file cannot be read: No such file"):
        load_config(["data.system_prompt=missing.txt"])
    (tmp_path / "bytes.md").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"is not UTF-8 text"):
        load_config([f"data.system_prompt={tmp_path}/bytes.md"])


def test_a_template_is_the_whole_prompt(tmp_path, tokenizer):
    assert render("2+2=", tokenizer, None, [], "User: {prompt}\nAssistant:") == "User: 2+2=\nAssistant:"
    assert render([{"role": "user", "content": "2+2="}], tokenizer, None, [], "Q {prompt}") == "Q 2+2="
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+1="}\n')
    config = DataConfig(dataset=f"{tmp_path}/d.jsonl", prompt_template="{prompt} so")
    (problem,) = make_problems(load_rows(config, train=True, seed=0), config, tokenizer).problems
    assert tokenizer.decode(problem.prompt_ids) == "1+1= so"
    turns = [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"prompt": turns}) + "\n")
    config = DataConfig(dataset=f"{tmp_path}/talk.jsonl", prompt_template="{prompt} so")
    with pytest.raises(ValueError, match=r"row 1: data\.prompt_template takes a single question"):
        make_problems(load_rows(config, train=True, seed=0), config, tokenizer)


def test_a_template_without_placeholder_or_beside_a_system_prompt_is_refused():
    for key in ("prompt_template", "question_template"):
        with pytest.raises(ValueError, match=rf"data\.{key}.*it has no \{{prompt\}}"):
            load_config([f"data.{key}=Question"])
    with pytest.raises(ValueError, match=r"data\.prompt_template is the whole prompt"):
        load_config(["data.prompt_template='{prompt}'", "data.system_prompt=Be brief."])
    with pytest.raises(ValueError, match=r"data\.prompt_template is the whole prompt"):
        load_config(["data.prompt_template='{prompt}'", "data.question_template='Q {prompt}'"])


def problem_of(tmp_path, tokenizer, row, **settings):
    (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n")
    config = DataConfig(dataset=f"{tmp_path}/d.jsonl", **settings)
    return make_problems(load_rows(config, train=True, seed=0), config, tokenizer).problems[0]


def test_a_question_template_formats_the_user_message_inside_the_chat_template(tmp_path, tokenizer):
    few_shot = [{"prompt": "2+2=", "completion": "4"}]
    row = {"prompt": "1+1=", "tests": ["a", "b"], "note": None, "set": "{prompt}"}
    problem = problem_of(tmp_path, tokenizer, row, question_template="Question: {prompt}", few_shot=few_shot)
    assert tokenizer.decode(problem.prompt_ids) == (
        "<|im_start|>user\nQuestion: 2+2=<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nQuestion: 1+1=<|im_end|>\n<|im_start|>assistant\n"
    )
    assert problem.prompt == "1+1=", "as in the row"
    assert [message["content"] for message in problem.reward_prompt] == ["Question: 2+2=", "4", "Question: 1+1="]

    template = "{prompt} {note}{unknown} {x y} {set}\n{tests}"
    problem = problem_of(tmp_path, tokenizer, row, question_template=template)
    text = "1+1= {unknown} {x y} {prompt}\na\nb"
    assert tokenizer.decode(problem.prompt_ids) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert problem.reward_prompt is None, "text rows stay text"
    problem = problem_of(tmp_path, tokenizer, {"prompt": TURNS}, question_template="Q: {prompt}")
    contents = [message["content"] for message in problem.reward_prompt]
    assert contents == ["Hi", "Yes?", "Q: 1+1="], "of a conversation, the last message"
    with pytest.raises(
        ValueError, match=r"question_template: \{tests\} stands for a column .* data\.few_shot have no columns"
    ):
        problem_of(tmp_path, tokenizer, row, question_template=template, few_shot=few_shot)


def test_conversational_rows_reach_the_rewards_as_conversations(tmp_path, tokenizer):
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "1+1="},
    ]
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": turns, "answer": "2", "source": "book"}) + "\n")
    config = DataConfig(dataset=f"{tmp_path}/d.jsonl", answer_column="answer")
    (problem,) = make_problems(load_rows(config, train=True, seed=0), config, tokenizer).problems
    assert tokenizer.decode(problem.prompt_ids).endswith("user\n1+1=<|im_end|>\n<|im_start|>assistant\n")
    rewards = tmp_path / "seen.py"
    rewards.write_text("""
def seen(prompts, completions, answer, source, **columns):
    assert [m["role"] for m in prompts[0]] == ["user", "assistant", "user"], prompts
    assert not columns.keys() - {"completion_ids"}, columns
    return [float(c == [{"role": "assistant", "content": a}] and s == "book") for c, a, s in zip(completions, answer, source)]
""")
    group = Group(problem, (Completion((1,), "2", True), Completion((1,), "3", True)))
    with RewardRunner([RewardSpec(f"{rewards}:seen", 1.0, {})]) as runner:
        result = score_groups(runner, [group])
    assert result.values == [[1.0], [0.0]] and result.failures == [0]


TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "1+1="},
]
TOLD, QUESTION = {"role": "system", "content": "Be brief."}, TURNS[-1]
EXAMPLE = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    ("prompt", "settings", "seen"),
    [
        ("1+1=", {}, "1+1="),
        ("1+1=", {"system_prompt": ""}, "1+1="),
        ("1+1=", {"system_prompt": "Be brief."}, [TOLD, QUESTION]),
        ("1+1=", {"few_shot": [{"prompt": "2+2=", "completion": "4"}]}, [*EXAMPLE, QUESTION]),
        ("1+1=", {"system_prompt": "Be brief.", "conversational": False}, "1+1="),
        ("1+1=", {"conversational": True}, [QUESTION]),
        ("1+1=", {"conversational": True, "prompt_template": "Q: {prompt}"}, [QUESTION]),
        (TURNS, {}, TURNS),
        (TURNS, {"system_prompt": "Be brief."}, [TOLD, *TURNS]),
        (TURNS, {"system_prompt": "Be brief.", "conversational": False}, "1+1="),
        ("no template", {"system_prompt": "Be brief."}, "no template"),
    ],
)
def test_the_form_in_which_rewards_get_prompts_and_completions(tmp_path, tokenizer, prompt, settings, seen):
    if prompt == "no template":
        tokenizer = build_tokenizer()
        tokenizer.chat_template = None
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "2"}) + "\n")
    config = DataConfig(dataset=f"{tmp_path}/d.jsonl", answer_column="answer", **settings)
    (problem,) = make_problems(load_rows(config, train=True, seed=0), config, tokenizer).problems
    assert problem.prompt == prompt, "for samples, reports and files: as in the row"
    given = {}
    runner = SimpleNamespace(score=lambda **arguments: given.update(arguments))
    score_groups(runner, [Group(problem, (Completion((1,), "2", True),))])
    assert given["prompts"] == [seen]
    assert given["completions"] == ["2" if isinstance(seen, str) else [{"role": "assistant", "content": "2"}]]


# --- answers as GSM8K writes them


@pytest.mark.parametrize(
    ("solution", "answer", "right", "wrong"),
    [
        ("so 1,000 + 234\n#### 1,234", "1,234", ["1234", "1,234.00", "$1,234"], ["1", "234", "1.234"]),
        ("#### -15", "-15", ["-15", "\u221215", "-15.0"], ["15", "- 1 5"]),
        ("#### 3.50", "3.50", ["3.5", "$3.50", "7/2"], ["3", "350"]),
        ("#### $45", "$45", ["45", "$45.00", "45$"], ["-45", "45 cents"]),
        ("#### 25%", "25%", ["25", "25 %", "25\\%"], ["0.25", "2.5"]),
    ],
)
def test_answers_with_separators_signs_decimals_currency_and_percent(tmp_path, solution, answer, right, wrong):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": solution}) + "\n")
    config = DataConfig(
        dataset=str(path), prompt_column="question", answer_column="answer", answer_pattern=r"####\s*(.+)"
    )
    gold = load_rows(config, train=True, seed=0).columns[0]["answer"]
    assert gold == answer
    accuracy = load_reward("accuracy")
    for texts, value in ((right, 1.0), (wrong, 0.0)):
        given = [f"<answer>{text}</answer>" for text in texts]
        assert accuracy(["q"] * len(given), given, answer=[gold] * len(given)) == [value] * len(given), given


# --- reasoning-gym


def test_a_missing_package_is_an_error_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"needs the package reasoning_gym .*pip install -e .*gym"):
        load_rows(DataConfig(dataset="reasoning_gym:chain_sum"), train=True, seed=0)


def test_gym_rows_are_seeded_different_and_never_in_both_splits():
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install -e '.[gym]'")
    config = DataConfig(dataset="reasoning_gym:chain_sum", max_train_samples=60, max_eval_samples=30)
    train, evaluation = (load_rows(config, train=train, seed=3) for train in (True, False))
    assert (len(set(train.prompts)), len(set(evaluation.prompts))) == (60, 30)
    assert not set(train.prompts) & set(load_rows(config, train=False, seed=4).prompts), "for any other seed too"
    assert train.prompts == load_rows(config, train=True, seed=3).prompts
    assert train.prompts != load_rows(config, train=True, seed=4).prompts
    assert "<answer>" in train.system_prompt
    assert set(train.columns[0]) == {"answer", "metadata"}
    with pytest.raises(ValueError, match=r"no such task.*chain_sum"):
        load_rows(DataConfig(dataset="reasoning_gym:chain_sun"), train=True, seed=0)


def test_gym_answers_are_scored_by_the_tasks_own_scorer():
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install -e '.[gym]'")
    config = DataConfig(dataset="reasoning_gym:chain_sum", max_train_samples=2)
    rows = load_rows(config, train=True, seed=0)
    columns = {name: [row[name] for row in rows.columns for _ in range(4)] for name in ("answer", "metadata")}
    gold = rows.columns[0]["answer"], rows.columns[1]["answer"]
    texts = [
        t for g in gold for t in (f"<answer>{g}</answer>", g, "<answer>banana</answer>", f"<answer> {g} </answer>")
    ]
    reward = load_reward("reasoning_gym")
    assert reward(rows.prompts * 4, texts, **columns) == [1.0, 0.0, 0.0, 1.0] * 2
    assert reward(rows.prompts * 4, texts, value=2.0, **columns)[0] == 2.0
    # This scorer gives the answer among other words a part of the reward: `eval.correct_above` must lie above it.
    partly = load_rows(DataConfig(dataset="reasoning_gym:chain_sum", max_train_samples=1), train=True, seed=0)
    text = f"<answer>it is {partly.columns[0]['answer']}</answer>"
    (value,) = reward(partly.prompts, [text], **{k: [v] for k, v in partly.columns[0].items()})
    assert 0 < value < 0.99
