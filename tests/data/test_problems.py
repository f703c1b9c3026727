"""Prompts are rendered exactly and never cut, and rewards get them in the form that is configured."""

import json
import re
from types import SimpleNamespace

import datasets
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from grpo.algorithm.batch import Completion, Group
from grpo.config import DataConfig
from grpo.data import PYTHON_ROWS, Rows, load_rows, make_problems, render, rows_of
from grpo.data.tiny import build_tokenizer
from grpo.rewards.scores import score_groups

TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "1+1="},
]
BRIEF = {"role": "system", "content": "Be brief."}
SHOT = {"prompt": "2+2=", "completion": "4"}
RENDERED = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n<think>"
"""The text of a chat template with the beginning of an answer, as many published datasets hold it."""
EXAMPLE = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def plain_tokenizer(template: str = "<s> $A") -> PreTrainedTokenizerFast:
    """Words to ids, no chat template; ``template`` says which special tokens it adds by itself."""
    words = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", "one", "two", "three", "four"])}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    inner.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1), ("<unk>", 2)])
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
    turns = [{"role": "system", "content": "Mine."}, *TURNS]
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
    columns = {"tests": ["a", "b"], "note": None, "set": "{prompt}", "choices": {"text": ["x", "y"], "label": ["A"]}}
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
    problem = problem_of("1+1=", tokenizer, columns, question_template="{prompt} {choices.text} {choices} {a.b}")
    text = '1+1= x\ny {"text": ["x", "y"], "label": ["A"]} {a.b}'
    assert tokenizer.decode(problem.prompt_ids) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
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
    "field in worked examples": (
        "a",
        {"question_template": "{prompt}{row.x}", "few_shot": [SHOT]},
        r"\{row\} is a column",
    ),
    "text of messages": (
        '[{"role": "user", "content": "Hi"}]',
        {},
        "is the text of a list of messages, .*: store it as",
    ),
    "messages as Python prints them": ("[{'content': 'Hi', 'role': 'user'}]", {}, "is the text of a list of messages"),
    "all too long": ("1+" * 99, {"max_prompt_length": 3}, "all 1 prompts of .*max_prompt_length=3 .*the shortest has"),
    "chat template": (
        [BRIEF, *TURNS],
        {},
        "row 1 of the split: the model's chat template refuses .*Be brief.*: no system role",
    ),
    "rendered already": (
        RENDERED,
        {},
        r"row 1 of the split: the prompt holds '<\|im_start\|>', .*: data.prompt_template='\{prompt\}' takes it as it is",
    ),
    "rendered by a question template": (
        "1+1=",
        {"question_template": "<|im_start|>user {prompt}"},
        r"the prompt holds '<\|im_start\|>'",
    ),
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


def test_a_rendered_prompt_is_taken_as_it_is_with_one_bos(tokenizer):
    problem = problem_of(RENDERED, tokenizer, prompt_template="{prompt}")
    assert list(problem.prompt_ids) == tokenizer.encode(RENDERED)
    for added in ("<s> $A", "<s> $A </s>"):
        with_bos = plain_tokenizer(added)
        assert problem_of("one two", with_bos, prompt_template="{prompt}").prompt_ids == (0, 3, 4)
        assert problem_of("<s> one two", with_bos, prompt_template="{prompt}").prompt_ids == (0, 3, 4)
    two = plain_tokenizer("<s> <unk> $A")  # as ChatGLM, which begins with [gMASK]<sop>
    prompts = ["one", "<s> <unk> two", ""]
    found = problem_set(prompts, two, prompt_template="{prompt}").problems
    assert [problem.prompt_ids for problem in found] == [(0, 2, 3), (0, 2, 4)]
    found = problem_set(["<s>", "one"], plain_tokenizer(), prompt_template="{prompt}").problems
    assert [problem.prompt_ids for problem in found] == [(0,), (0, 3)], "a first text that shows nothing"


def with_tokens(template, *special):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True) for token in special], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


ROLES = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}<|assistant|>\n"
INST = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


@pytest.mark.parametrize(
    ("template", "special", "prompt", "found"),
    [
        (ROLES, (), "<|user|>\nHi", "<|user|>"),  # Zephyr's marks are plain text
        (INST, (), "[INST] Hi [/INST]", "[INST]"),  # Llama 2
        (INST, ("[INST]", "[/INST]"), "[INST] Hi [/INST]", "[INST]"),  # Mistral
        (ROLES, ("<|eot|>",), "Hi<|eot|>", "<|eot|>"),
        (ROLES, ("<bos>",), "<bos>Hi", "<bos>"),
        # A question may be about tokens, and a system prompt of the template's own about anything.
        (ROLES, ("<filename>",), "python sort.py <filename>", None),
        (ROLES, ("<pad>",), "What does <pad> do?", None),
        (ROLES, ("<s>", "</s>"), "Is it <s> or </s>?", None),
        ("<|system|>\nAnswer after [ANSWER]\n" + ROLES, (), "What is [ANSWER]?", None),
        # Tags are no marks of turns, also where they are special tokens.
        (ROLES, ("<think>", "</think>"), "Think in <think> and </think>.", None),
        (ROLES, (), "a [B] <b> | list[int] <|> x<y and y>z", None),
        ("{{ raise_exception('no') if messages | length == 1 else messages[-1].content }}", (), "[INST] Hi", None),
    ],
)
def test_what_tells_a_rendered_prompt(template, special, prompt, found):
    tokenizer = with_tokens(template, *special)
    if found is None:
        few_shot = [SHOT] if "raise_exception" in template else []
        notes = problem_set([prompt], tokenizer, few_shot=few_shot).notes
        holds_special = "<filename>" in special or "<pad>" in special
        said = [note for note in notes if "1 prompts hold a special token of the tokenizer, first" in note]
        assert len(said) == holds_special
        return
    with pytest.raises(ValueError, match=re.escape(f"the prompt holds {found!r}")):
        problem_of(prompt, tokenizer)


def test_what_an_environment_says_about_tokens_is_no_rendered_prompt(tokenizer):
    (problem,) = make_problems(Rows("the reset", ["Guess <|im_end|> 8."], [{}]), DataConfig(), tokenizer).problems
    assert "Guess <|im_end|> 8." in tokenizer.decode(problem.prompt_ids)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "unit": None}}}
HISTORY = [
    {"role": "user", "name": "alice", "content": "1+1?", "weight": None},
    {"role": "assistant", "content": None, "reasoning_content": "plus", "tool_calls": [CALL]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"b": null}'}}]},
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
]
EVERY_KEY = (
    "{% for m in messages %}({{ m.content }}|{{ m.name }}|{{ m.reasoning_content }}|{{ m.tool_call_id }}"
    "{% for c in m.tool_calls or [] %}|{{ c.function.arguments | tojson }}{% endfor %}){% endfor %}"
)


def test_every_key_of_a_message_reaches_the_template():
    tokenizer = with_tokens(EVERY_KEY)
    openai = [dict(message) for message in HISTORY]  # calls have their arguments as text
    openai[1] = HISTORY[1] | {"tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
    arrow = rows_of(datasets.Dataset.from_list([{"prompt": openai}]), "dataset")  # every message has every key
    for rows in ([{"prompt": HISTORY}], arrow):
        config = DataConfig(dataset=PYTHON_ROWS)
        (problem,) = make_problems(load_rows(config, train=True, seed=0, table=rows), config, tokenizer).problems
        text = tokenizer.decode(problem.prompt_ids)
        assert text == '(1+1?|alice||)(||plus||{"a": 1})(||||{"b": null})(2|add||c1)'
        assert [message["content"] for message in problem.reward_prompt] == ["1+1?", "", "", "2"]
        assert problem.reward_prompt[3]["tool_call_id"] == "c1" and "weight" not in problem.reward_prompt[0]


@pytest.mark.parametrize(
    ("message", "mistake"),
    [
        ({"role": "user"}, "message 1 of the prompt: the content of the user's message must be text, and is missing"),
        ({"role": "user", "content": 7}, "must be text, and is of type int"),
        ({"from": "human", "value": "Hi"}, "is {'from': 'human', 'value': 'Hi'}, not a mapping with role and content"),
    ],
)
def test_a_message_without_text_is_refused_with_its_place(message, mistake, tokenizer):
    with pytest.raises(ValueError, match=re.escape(mistake)):
        problem_of([message], tokenizer)


def test_without_a_chat_template_one_turn_is_noted_and_several_are_refused():
    tokenizer = plain_tokenizer()
    assert problem_set(["one"], tokenizer).notes == ()
    (note,) = problem_set([[BRIEF, TURNS[0]]], tokenizer).notes
    assert "no chat template" in note
    assert problem_set(["one"], tokenizer, few_shot=[SHOT]).notes == (note,)
    with pytest.raises(
        ValueError, match=r"conversation of 3 turns, .* no chat template .*: set model.chat_template=FILE"
    ):
        problem_set([TURNS], tokenizer)


@pytest.mark.parametrize(
    ("template", "prompt", "settings", "role"),
    [
        # A template that knows only the user and the model, and one that reads content in parts.
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "1+1=", {"system_prompt": "In French."}, "system"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", [{"role": "developer", "content": "d"}, TURNS[0]], {}, "developer"),
        ("{% for m in messages %}User: {% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", "1+1=", {}, "user"),
        ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", " 1 +\n1= ", {"system_prompt": "\n a b"}, None),
        (ROLES, "1+1=", {"system_prompt": "In French.", "few_shot": [SHOT]}, None),
    ],
)  # fmt: skip
def test_a_message_that_the_template_hides_is_said(template, prompt, settings, role):
    notes = problem_set([prompt, prompt], with_tokens(template), **settings).notes
    assert len(notes) == (role is not None)
    for note in notes:
        assert note.startswith(f"warning: 2 prompts do not show the {role}'s message ")


def test_a_template_with_todays_date_and_a_column_of_tools_are_noted(tokenizer):
    dated = with_tokens("{{ date_string or strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    (note,) = problem_set(["a"], dated).notes
    assert "today's date" in note
    fixed = problem_set(["a"], dated, chat_template_kwargs={"date_string": "26 Jul 2024"})
    assert fixed.notes == () and dated.decode(fixed.problems[0].prompt_ids) == "26 Jul 2024a"
    (note,) = problem_set(["a"], tokenizer, {"tools": [{"type": "function"}]}).notes
    assert "column tools" in note
    assert problem_set(["a"], tokenizer, {"tools": None}).notes == ()


THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if not enable_thinking | default(true) %}<think>{% endif %}"
)


def test_variables_of_the_chat_template(tokenizer):
    thinks = with_tokens(THINKS)
    assert thinks.decode(problem_of("a", thinks).prompt_ids) == "a"
    found = problem_set(["a"], thinks, chat_template_kwargs={"enable_thinking": False})
    assert thinks.decode(found.problems[0].prompt_ids) == "a<think>"
    assert found.notes == ()
    for other, settings in ((tokenizer, {}), (thinks, {"prompt_template": "{prompt}"})):
        (note,) = problem_set(["a"], other, chat_template_kwargs={"enable_thinking": False}, **settings).notes
        assert "has no variable enable_thinking" in note
    with pytest.raises(ValueError, match="add_generation_prompt"):
        problem_of("a", thinks, chat_template_kwargs={"add_generation_prompt": False})


def test_half_a_character_is_read_as_the_replacement_character(tokenizer):
    cut = json.loads('"1+1= \\ud83d"')
    found = problem_set([cut, [{"role": "user", "content": cut}], "1+2= \U0001f600"], tokenizer)
    texts = [tokenizer.decode(problem.prompt_ids) for problem in found.problems]
    assert [text.count("\ufffd") for text in texts] == [1, 1, 0]
    assert found.num_repaired == 2
