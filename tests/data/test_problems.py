"""Prompts are rendered exactly and never cut, and rewards get them in the form that is
configured."""

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
from grpo.data import PYTHON_ROWS, Rows, load_rows, make_problems, rows_from_table
from grpo.data.chat import apply_template
from grpo.data.tiny import build_tokenizer
from grpo.rewards.scores import score_groups

TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "1+1="},
]
BRIEF = {"role": "system", "content": "Be brief."}
SHOT = {"prompt": "2+2=", "completion": "4"}
ROLES = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}<|assistant|>\n"
INST = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def plain_tokenizer(template: str = "<s> $A") -> PreTrainedTokenizerFast:
    """Words to ids, no chat template; ``template`` says which special tokens it adds by itself."""
    words = {
        word: i
        for i, word in enumerate(["<s>", "</s>", "<unk>", "one", "two", "three", "four", "<sop>"])
    }
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    inner.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1), ("<sop>", 7)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<sop>"],
    )


def with_template(template, *special):
    tokenizer = build_tokenizer()
    for token in special:
        tokenizer.add_tokens(AddedToken(token, special=True), special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def problem_set(prompts, tokenizer, columns=None, **settings):
    config = DataConfig(dataset=PYTHON_ROWS, **settings)
    rows = [{"prompt": prompt, "row": i} | (columns or {}) for i, prompt in enumerate(prompts)]
    return make_problems(load_rows(config, train=True, seed=0, table=rows), config, tokenizer)


def problem_of(prompt, tokenizer, columns=None, **settings):
    (problem,) = problem_set([prompt], tokenizer, columns, **settings).problems
    return problem


def user_message(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_has_system_prompt_worked_examples_and_turns(tokenizer):
    problem = problem_of("3+3=", tokenizer, system_prompt="Be brief.", few_shot=[SHOT])
    shown = "<|im_start|>system\n{}<|im_end|>\n" + user_message("2+2=") + "4<|im_end|>\n"
    text = shown.format("Be brief.") + user_message("3+3=")
    assert list(problem.prompt_ids) == tokenizer.encode(text, add_special_tokens=False)
    # A worked example may call a tool.
    completion = [
        {"role": "assistant", "content": "<calc>2+2</calc>"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
    ]
    shot = {"prompt": "2+2=", "completion": completion}
    problem = problem_of("3+3=", tokenizer, few_shot=[shot])
    messages = [
        {"role": "user", "content": "2+2="},
        *completion,
        {"role": "user", "content": "3+3="},
    ]
    assert tokenizer.decode(problem.prompt_ids) == apply_template(tokenizer, messages)
    turns = [{"role": "system", "content": "Mine."}, *TURNS]
    problem = problem_of(turns, tokenizer, system_prompt="Yours.", few_shot=[SHOT])
    text = shown.format("Mine.") + user_message("Hi") + "Yes?<|im_end|>\n" + user_message("1+1=")
    assert tokenizer.decode(problem.prompt_ids) == text


@pytest.mark.parametrize(
    ("template", "before"),
    [
        ("$A", ()),
        ("<s> $A </s>", (0,)),  # an EOS at the end of a prompt would end what has not begun
        ("<s> <sop> $A", (0, 7)),  # as ChatGLM
    ],
)
def test_without_a_chat_template_the_prompt_is_plain_text_behind_one_bos(template, before):
    tokenizer = plain_tokenizer(template)
    rendered = tokenizer.decode(list(before)) + " one two"
    for prompt in ("one two", rendered):
        assert problem_of(prompt, tokenizer).prompt_ids == (*before, 3, 4)
        assert problem_of(prompt, tokenizer, prompt_template="{prompt}").prompt_ids == (
            *before,
            3,
            4,
        )
    found = problem_of(
        "two", tokenizer, system_prompt="one", few_shot=[{"prompt": "three", "completion": "four"}]
    )
    assert found.prompt_ids == (*before, 3, 5, 6, 4)


def test_with_a_chat_template_no_second_bos_is_added():
    with_bos = plain_tokenizer("<s> $A")
    end = "{% if add_generation_prompt %} four{% endif %}"
    with_bos.chat_template = (
        "{{ bos_token }}{% for m in messages %} {{ m['content'] }}{% endfor %}" + end
    )
    assert problem_of("one two", with_bos).prompt_ids == (0, 3, 4, 6)


def test_prompts_too_long_are_left_out_and_counted_never_cut():
    texts = ["one", "one two", "one two three", "", "one two three four", "two", None, " "]
    # with its BOS, "one two" has exactly 3
    found = problem_set(texts, plain_tokenizer(), max_prompt_length=3)
    assert [problem.prompt_ids for problem in found.problems] == [(0, 3), (0, 3, 4), (0, 4)]
    assert (found.num_too_long, found.num_empty) == (2, 3)
    # The index is the row's place in the file: randomness hangs on it, so it must not move with the
    # filter.
    assert [problem.index for problem in found.problems] == [0, 1, 5]
    assert [problem.columns["row"] for problem in found.problems] == [0, 1, 5]


def test_a_prompt_template_is_the_whole_prompt(tokenizer):
    for prompt in ("1+1=", TURNS[2:]):
        problem = problem_of(prompt, tokenizer, prompt_template="Q {prompt} so")
        assert tokenizer.decode(problem.prompt_ids) == "Q 1+1= so"


def test_a_system_prompt_may_be_a_file(tmp_path):
    (tmp_path / "brief.txt").write_text("Be brief.\nBe right.\n")
    assert DataConfig(system_prompt=f"{tmp_path}/brief.txt").system_prompt == "Be brief.\nBe right."


def test_a_question_template_formats_the_user_message_inside_the_chat_template(tokenizer):
    columns = {
        "tests": ["a", "b"],
        "note": None,
        "set": "{prompt}",
        "choices": {"text": ["x", "y"]},
    }
    template = "{prompt} {note}{unknown} {x y} {set}\n{tests} {choices.text} {a.b}"
    problem = problem_of("1+1=", tokenizer, columns, question_template=template)
    text = "1+1= {unknown} {x y} {prompt}\na\nb x\ny {a.b}"
    assert tokenizer.decode(problem.prompt_ids) == user_message(text)
    assert problem.prompt == "1+1=", "as in the row"
    assert problem.reward_prompt is None, "text rows stay text"
    shown = problem_of(
        TURNS, tokenizer, question_template="Q: {prompt}", few_shot=[SHOT]
    ).reward_prompt
    contents = [message["content"] for message in shown]
    assert contents == ["2+2=", "4", "Hi", "Yes?", "Q: 1+1="], "the last message alone"


@pytest.mark.parametrize(
    ("settings", "of_other", "of_tiny"),
    [
        ({}, "Solve the problem. Show", None),
        ({"system_prompt": ""}, None, None),
        ({"system_prompt": "Be brief."}, "Be brief.", "Be brief."),
    ],
)
def test_a_built_in_task_instructs_every_model_but_the_tiny_one(
    tokenizer, settings, of_other, of_tiny
):
    """The tiny model was trained without instructions."""
    other = build_tokenizer()
    other.add_tokens(["more"])
    config = DataConfig(max_train_samples=1, **settings)
    rows = load_rows(config, train=True, seed=0)
    for model, expected in ((other, of_other), (tokenizer, of_tiny)):
        (problem,) = make_problems(rows, config, model).problems
        text = model.decode(problem.prompt_ids)
        assert expected in text if expected else "system" not in text


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        (
            TURNS,
            {"prompt_template": "{prompt} so"},
            "conversation of 3 messages, and no chat template",
        ),
        ('[{"role": "user", "content": "Hi"}]', {}, "no text of such a list"),
        (
            "1+" * 99,
            {"max_prompt_length": 3},
            "all 1 prompts of .*max_prompt_length=3 .*the shortest has",
        ),
        (
            [BRIEF, *TURNS],
            {},
            "row 1: the model's chat template refuses .*Be brief.*: no system role",
        ),
        ("1+\ud83d", {}, "row 1: .*surrogates not allowed"),  # half of a character
        (
            [{"from": "human", "value": "Hi"}],
            {},
            "row 1: a message .* text as content, and one is {'from': 'human'",
        ),
    ],
)
def test_prompts_that_are_refused(prompt, settings, message, tokenizer):
    refusal = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    )
    with pytest.raises(ValueError, match=message):
        problem_of(prompt, with_template(refusal + tokenizer.chat_template), **settings)


@pytest.mark.parametrize(
    ("prompt", "settings", "seen"),
    [
        ("1+1=", {"system_prompt": "Be brief."}, [BRIEF, TURNS[-1]]),
        ("1+1=", {"conversational": True, "prompt_template": "Q: {prompt}"}, [TURNS[-1]]),
        (TURNS, {}, TURNS),
        (TURNS, {"system_prompt": "Be brief.", "conversational": False}, "1+1="),
        ("no template", {"system_prompt": "Be brief."}, "no template"),
    ],
)
def test_the_form_in_which_rewards_get_prompts_and_completions(tokenizer, prompt, settings, seen):
    if prompt == "no template":
        tokenizer = with_template(None)
    problem = problem_of(prompt, tokenizer, **settings)
    assert problem.prompt == prompt, "for samples, reports and files: as in the row"
    passed = {}
    runner = SimpleNamespace(
        score=lambda **arguments: passed.update(arguments) or SimpleNamespace()
    )
    score_groups(runner, [Group(problem, (Completion((1,), "2", True),))])
    assert (passed["prompts"], passed["columns"]) == ([seen], {"row": [0]})
    assert passed["completions"] == [
        "2" if isinstance(seen, str) else [{"role": "assistant", "content": "2"}]
    ]


@pytest.mark.parametrize(
    ("template", "special", "prompt", "mark"),
    [
        (ROLES, (), "<|user|>\nHi", "user"),  # Zephyr's marks are plain text
        (INST, ("[INST]", "[/INST]"), "[INST] Hi [/INST]", "INST"),  # Mistral
    ],
)
def test_a_rendered_prompt_is_refused(template, special, prompt, mark):
    tokenizer = with_template(template, *special)
    with pytest.raises(ValueError, match=f"the prompt holds .*{mark}"):
        problem_of(prompt, tokenizer)
    # What an environment says is no row of a dataset.
    (problem,) = make_problems(Rows("the reset", [prompt], [{}]), DataConfig(), tokenizer).problems
    assert prompt in tokenizer.decode(problem.prompt_ids)


@pytest.mark.parametrize(
    ("special", "prompt"),
    [
        (("<s>", "</s>"), "Is it <s> or </s>?"),
        # Tags are no marks of turns, also where they are special tokens.
        (("<think>", "</think>"), "Think in <think> and </think>."),
    ],
)
def test_a_question_about_tokens_is_no_rendered_prompt(special, prompt):
    assert problem_of(prompt, with_template(ROLES, *special)).prompt == prompt


def test_a_template_that_takes_no_single_message_has_no_marks():
    tokenizer = with_template(
        "{{ raise_exception('no') if messages | length == 1 else messages[-1].content }}"
    )
    assert problem_of("[INST] Hi", tokenizer, few_shot=[SHOT]).prompt == "[INST] Hi"


HISTORY = [
    {"role": "user", "name": "alice", "content": "1+1?", "weight": None},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "plus",
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
]
EVERY_KEY = (
    "{% for m in messages %}({{ m.content }}|{{ m.name }}|{{ m.reasoning_content }}|{{ m.tool_call_id }}"
    "{% for c in m.tool_calls or [] %}|{{ c.function.arguments | tojson }}{% endfor %}){% endfor %}"
)


def test_every_key_of_a_message_reaches_the_template():
    # every message has every key
    arrow = rows_from_table(datasets.Dataset.from_list([{"prompt": HISTORY}]), "dataset", None)
    tokenizer = with_template(EVERY_KEY)
    for prompt in (HISTORY, arrow[0]["prompt"]):
        problem = problem_of(prompt, tokenizer)
        text = tokenizer.decode(problem.prompt_ids)
        assert text == '(1+1?|alice||)(||plus||{"a": 1, "b": null})(2|add||c1)'
        assert [message["content"] for message in problem.reward_prompt] == ["1+1?", "", "2"]
        assert problem.reward_prompt[2]["tool_call_id"] == "c1"
        assert "weight" not in problem.reward_prompt[0]


NO_SYSTEM = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
DATED = "{{ date_string or strftime_now('%d') }}" + PLAIN


@pytest.mark.parametrize(
    ("template", "settings", "note"),
    [
        (PLAIN, {}, None),
        (NO_SYSTEM, {"system_prompt": "In French."}, "does not hold data.system_prompt"),
        (DATED, {}, "today's date"),
        (DATED, {"chat_template_kwargs": {"date_string": "26 Jul 2024"}}, None),
        (
            PLAIN,
            {"chat_template_kwargs": {"enable_thinking": False}},
            "has no variable enable_thinking",
        ),
    ],
)
def test_notes_on_the_chat_template(template, settings, note):
    notes = problem_set(["1+1="], with_template(template), **settings).notes
    assert len(notes) == (note is not None)
    assert (note or "") in "".join(notes)


def test_variables_of_the_chat_template():
    thinks = with_template(PLAIN + "{% if not enable_thinking | default(true) %}<think>{% endif %}")
    problem = problem_of("a", thinks, chat_template_kwargs={"enable_thinking": False})
    assert thinks.decode(problem.prompt_ids) == "a<think>"
