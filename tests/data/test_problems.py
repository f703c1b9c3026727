"""Prompts are rendered exactly and never cut, and rewards get them in the form that is configured."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from grpo.algorithm.batch import Completion, Group
from grpo.config import DataConfig
from grpo.data import PYTHON_ROWS, load_rows, make_problems, render
from grpo.data.tiny import build_tokenizer
from grpo.rewards.scores import score_groups

TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "1+1="},
]
BRIEF = {"role": "system", "content": "Be brief."}
SHOT = {"prompt": "2+2=", "completion": "4"}
EXAMPLE = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]


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


def problem_set(prompts, tokenizer, columns=None, **settings):
    config = DataConfig(dataset=PYTHON_ROWS, **settings)
    rows = [{"prompt": prompt, "row": i} | (columns or {}) for i, prompt in enumerate(prompts)]
    return make_problems(load_rows(config, train=True, seed=0, table=rows), config, tokenizer)


def problem_of(prompt, tokenizer, columns=None, **settings):
    (problem,) = problem_set([prompt], tokenizer, columns, **settings).problems
    return problem


def test_system_prompt_worked_examples_and_question_are_turns_of_the_chat_template(tokenizer):
    few_shot = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+2=", "completion": "3"}]
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
        "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
    )
    problem = problem_of("2+2=", tokenizer, system_prompt="Be brief.", few_shot=few_shot)
    assert tokenizer.decode(problem.prompt_ids) == text
    assert list(problem.prompt_ids) == tokenizer.encode(text, add_special_tokens=False)
    assert problem_of("2+2=", tokenizer).prompt_ids == tuple(tokenizer.encode(text[text.rindex("<|im_start|>user") :]))


def test_a_conversation_keeps_its_turns_and_its_own_system_prompt(tokenizer):
    turns = [{"role": "system", "content": "Mine.", "name": "fields beside role and content have no effect"}, *TURNS]
    problem = problem_of(turns, tokenizer, system_prompt="Yours.", few_shot=[SHOT])
    assert tokenizer.decode(problem.prompt_ids) == (
        "<|im_start|>system\nMine.<|im_end|>\n"
        "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    )
    text = tokenizer.decode(problem_of(TURNS, tokenizer, system_prompt="Yours.").prompt_ids)
    assert text.startswith("<|im_start|>system\nYours.<|im_end|>\n<|im_start|>user\nHi")


@pytest.mark.parametrize(
    ("template", "ids"),
    [
        ("<s> $A", (0, 3, 4)),  # the tokenizer adds a BOS: the model was trained with it
        ("$A", (3, 4)),
        ("<s> $A </s>", (0, 3, 4)),  # an EOS at the end of a prompt would end what has not begun
    ],
)
def test_without_a_chat_template_the_prompt_is_plain_text_in_paragraphs(template, ids):
    tokenizer = plain_tokenizer(template)
    assert problem_of("one two", tokenizer).prompt_ids == ids
    few_shot = [{"prompt": "Q1", "completion": "A1"}]
    assert render("Q2", tokenizer, "Be brief.", few_shot) == "Be brief.\n\nQ1\n\nA1\n\nQ2"


def test_with_a_chat_template_no_second_bos_is_added():
    tokenizer = plain_tokenizer("<s> $A")
    end = "{% if add_generation_prompt %} four{% endif %}"
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %} {{ m['content'] }}{% endfor %}" + end
    assert problem_of("one two", tokenizer).prompt_ids == (0, 3, 4, 6)


def test_prompts_too_long_are_left_out_and_counted_never_cut():
    texts = ["one", "one two", "one two three", "", "one two three four", "two", None, " "]
    found = problem_set(texts, plain_tokenizer(), max_prompt_length=3)  # with its BOS, "one two" has exactly 3
    assert [p.prompt_ids for p in found.problems] == [(0, 3), (0, 3, 4), (0, 4)]
    assert (found.num_too_long, found.num_empty) == (2, 3)
    # The index is the row's place in the file: randomness hangs on it, so it must not move with the filter.
    assert [p.index for p in found.problems] == [0, 1, 5] == [p.columns["row"] for p in found.problems]
    with pytest.raises(
        ValueError, match=r"are longer than data.max_prompt_length=1 tokens or empty: the shortest has 2"
    ):
        problem_set(texts, plain_tokenizer(), max_prompt_length=1)


def test_columns_survive_from_the_row_to_the_problem(tokenizer):
    columns = {"gold": "#### 2", "tests": ["t1", "t2"], "meta": {"source": "book", "page": 3}}
    problem = problem_of("1+1", tokenizer, columns, answer_column="gold", answer_pattern="#### (.+)")
    assert problem.prompt == "1+1"
    assert problem.columns == {"row": 0, "answer": "2", **columns}


def test_a_prompt_template_is_the_whole_prompt_and_may_come_from_a_file(tmp_path, tokenizer):
    for prompt in ("1+1=", TURNS[2:]):
        problem = problem_of(prompt, tokenizer, prompt_template="Q {prompt} so")
        assert tokenizer.decode(problem.prompt_ids) == "Q 1+1= so"
    (tmp_path / "brief.txt").write_text("Be brief.\nBe right.\n")
    assert DataConfig(system_prompt=f"{tmp_path}/brief.txt").system_prompt == "Be brief.\nBe right."
    assert DataConfig(system_prompt="Answer as in notes.txt, please").system_prompt == "Answer as in notes.txt, please"


def test_a_question_template_formats_the_user_message_inside_the_chat_template(tokenizer):
    columns = {"tests": ["a", "b"], "note": None, "set": "{prompt}"}
    problem = problem_of("1+1=", tokenizer, columns, question_template="Question: {prompt}", few_shot=[SHOT])
    assert tokenizer.decode(problem.prompt_ids) == (
        "<|im_start|>user\nQuestion: 2+2=<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nQuestion: 1+1=<|im_end|>\n<|im_start|>assistant\n"
    )
    assert problem.prompt == "1+1=", "as in the row"
    assert [message["content"] for message in problem.reward_prompt] == ["Question: 2+2=", "4", "Question: 1+1="]
    problem = problem_of("1+1=", tokenizer, columns, question_template="{prompt} {note}{unknown} {x y} {set}\n{tests}")
    text = "1+1= {unknown} {x y} {prompt}\na\nb"
    assert tokenizer.decode(problem.prompt_ids) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert problem.reward_prompt is None, "text rows stay text"
    contents = [m["content"] for m in problem_of(TURNS, tokenizer, question_template="Q: {prompt}").reward_prompt]
    assert contents == ["Hi", "Yes?", "Q: 1+1="], "of a conversation, the last message"


def test_a_built_in_task_instructs_every_model_but_the_tiny_one(tokenizer):
    """The tiny model was trained without instructions."""
    for settings in ({}, {"system_prompt": ""}, {"system_prompt": "Be brief."}):
        config = DataConfig(max_train_samples=1, **settings)
        rows = load_rows(config, train=True, seed=0)
        other = build_tokenizer()
        other.add_tokens(["more"])
        of_tiny, of_other = (
            t.decode(make_problems(rows, config, t).problems[0].prompt_ids) for t in (tokenizer, other)
        )
        assert of_other == of_tiny if settings else of_other.startswith("<|im_start|>system\nSolve the problem. Show")
        assert ("system" in of_tiny) == bool(settings.get("system_prompt"))


REFUSED = {
    "template of a conversation": (TURNS, {"prompt_template": "{prompt} so"}, "takes one question, .* 3 messages"),
    "column in worked examples": (
        "a",
        {"question_template": "{prompt}{row}", "few_shot": [SHOT]},
        r"\{row\} is a column",
    ),
    "all too long": ("1+" * 99, {"max_prompt_length": 3}, "all 1 prompts of .*max_prompt_length=3 .*the shortest has"),
    "chat template": ([BRIEF, *TURNS], {}, "chat template refuses .*Be brief.*: no system role"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_prompts_that_are_refused(case):
    prompt, settings, message = REFUSED[case]
    tokenizer = build_tokenizer()
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    with pytest.raises(ValueError, match=message):
        problem_of(prompt, tokenizer, **settings)


@pytest.mark.parametrize(
    ("prompt", "settings", "seen"),
    [
        ("1+1=", {}, "1+1="),
        ("1+1=", {"system_prompt": ""}, "1+1="),
        ("1+1=", {"system_prompt": "Be brief."}, [BRIEF, TURNS[-1]]),
        ("1+1=", {"few_shot": [SHOT]}, [*EXAMPLE, TURNS[-1]]),
        ("1+1=", {"system_prompt": "Be brief.", "conversational": False}, "1+1="),
        ("1+1=", {"conversational": True}, [TURNS[-1]]),
        ("1+1=", {"conversational": True, "prompt_template": "Q: {prompt}"}, [TURNS[-1]]),
        (TURNS, {}, TURNS),
        (TURNS, {"system_prompt": "Be brief."}, [BRIEF, *TURNS]),
        (TURNS, {"system_prompt": "Be brief.", "conversational": False}, "1+1="),
        ("no template", {"system_prompt": "Be brief."}, "no template"),
    ],
)
def test_the_form_in_which_rewards_get_prompts_and_completions(tokenizer, prompt, settings, seen):
    if prompt == "no template":
        tokenizer = build_tokenizer()
        tokenizer.chat_template = None
    problem = problem_of(prompt, tokenizer, **settings)
    assert problem.prompt == prompt, "for samples, reports and files: as in the row"
    passed = {}
    runner = SimpleNamespace(score=lambda **arguments: passed.update(arguments) or SimpleNamespace())
    score_groups(runner, [Group(problem, (Completion((1,), "2", True),))])
    assert (passed["prompts"], passed["columns"]) == ([seen], {"row": [0]})
    assert passed["completions"] == ["2" if isinstance(seen, str) else [{"role": "assistant", "content": "2"}]]
