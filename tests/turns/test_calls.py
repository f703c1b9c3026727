"""Calls in each form that models write, and the check at the start that finds the form of a run.

The templates are written here, as short as they can be, in the form of those that the models have on the Hub.
"""

import random

import pytest
from conftest import load
from test_conversations import Scripted, play, results
from test_templates import CHATML, form_of

from grpo.rollout import SamplingParams, Stops
from grpo.turns import calls as forms
from grpo.turns.function import _completion


def chatml(calls, *, shows_tools=True, content="{{ m.content }}"):
    """A template whose assistant messages have their calls as ``calls`` writes them."""
    shown = "{% if tools %}{{ tools | tojson }}\n{% endif %}" if shows_tools else ""
    return (
        shown + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}" + calls + "{% else %}"
        f"{content}{{% endif %}}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
END = "{% endfor %}"
HERMES = chatml(EACH + "<tool_call>\n{{ f | tojson }}\n</tool_call>" + END)
LLAMA = chatml(  # Llama 3.1 and 3.2 take one call in a turn
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}" + EACH
    + """{{ '{"name": "' + f.name + '", "parameters": ' }}{{ f.arguments | tojson }}}""" + END
)  # fmt: skip
LFM2 = chatml(
    "<|tool_call_start|>[" + EACH + "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="
    """{{ "'" + v + "'" if v is string else v | string }}{{ '' if loop.last else ', ' }}{% endfor %})"""
    "{{ '' if loop.last else ', ' }}" + END + "]<|tool_call_end|>"
)
QWEN_XML = chatml(  # Qwen3-Coder, Qwen3.5, Nemotron 3
    EACH + "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>" + END
)
# As DeepSeek V3.1 and GLM 4.5 write calls: nothing here reads them.
OTHER = chatml(EACH + "<|call|>{{ f.name }}<|sep|>{{ f.arguments | tojson }}" + END)
DEAF = CHATML.replace("{% for m", "{{ tools | tojson if tools }}{% for m", 1)  # LFM2's first one shows tools alone


def schema(name, **types):
    properties = {key: {"type": kind, "description": "d"} for key, kind in types.items()}
    function = {"name": name, "description": "d", "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


SCHEMAS = [
    schema("look", word="string", most="integer", share="number", deep="boolean", only="array", more="object"),
    schema("calculator", expression="string"),
    schema("now"),
]
FAMILIES = {  # template, its reader, a turn with calls, the calls
    "hermes": (
        HERMES, "read_tags", 'So:\n<tool_call>\n{"name": "look", "arguments": {"most": 1}}\n</tool_call><now></now>',
        [("look", {"most": 1}), ("now", {})],
    ),
    "llama": (
        LLAMA, "read_json", '<|python_tag|>{"name": "look", "parameters": {"word": "{\\"a\\"}"}}', [("look", {"word": '{"a"}'})],
    ),
    "llama, as others write it": (
        LLAMA, "read_json", ' {"type": "function", "name" : "now", "arguments": {}}\n', [("now", {})],
    ),
    "lfm2": (
        LFM2, "read_python", "<|tool_call_start|>[look(word=\"a'b\", only=[1, 'x'], deep=True), now()]<|tool_call_end|>Well",
        [("look", {"word": "a'b", "only": [1, "x"], "deep": True}), ("now", {})],
    ),
    "qwen xml": (
        QWEN_XML, "read_xml",
        "<tool_call>\n<function=look>\n<parameter=word>\n a\n\n1 < 2\n</parameter>\n<parameter=most>\n7\n</parameter>\n"
        "<parameter=deep>\nTrue\n</parameter>\n<parameter=more>\n{\"a\": null}\n</parameter>\n</function>\n</tool_call>"
        "<tool_call><function=now></function></tool_call>",
        [("look", {"word": " a\n\n1 < 2", "most": 7, "deep": True, "more": {"a": None}}), ("now", {})],
    ),
}  # fmt: skip


def read(form, text, prompt="<|im_start|>assistant\n"):
    encode = form.tokenizer.encode
    return form.read(text, encode(text), encode(prompt), SCHEMAS)[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_of_calls_is_found_in_the_chat_template(family):
    template, reader, text, expected = FAMILIES[family]
    form = form_of(template, "<|im_end|>", "auto")
    assert form.check(uses_tools=True, schemas=SCHEMAS) == []
    assert read(form, text) == expected
    # Tags are read in every run. The form of another family is text, such as an answer in JSON.
    assert read(form, "<calculator>1+1</calculator>") == [("calculator", {"expression": "1+1"})]
    for other, (_, other_reader, other_text, _) in FAMILIES.items():
        if other_reader not in (reader, "read_tags", "read_xml"):
            assert read(form, other_text) == [], other
    # The answer has the same tokens as behind a turn without calls.
    result = {"role": "tool", "name": "look", "content": "7"}
    suffix = "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    assert form.tokenizer.decode(form.answer([result], form.eos_ids[-1], 99)) == suffix


@pytest.mark.parametrize("template", [OTHER, DEAF, chatml("{{ m.tool_calls }}", shows_tools=False)])
def test_a_template_whose_calls_nobody_reads_is_refused(template):
    with pytest.raises(
        ValueError, match=r"^the model's chat template writes no calls .* tools_format=tags.*$"
    ) as found:
        form_of(template, "<|im_end|>", "auto").check(uses_tools=True, schemas=SCHEMAS)
    assert "data.system_prompt" in str(found.value)
    form = form_of(template, "<|im_end|>", "tags")
    form.check(uses_tools=True, schemas=SCHEMAS)
    assert read(form, "<now></now>") == [("now", {})]
    form = form_of(template, "<|im_end|>", "auto")
    form.check(uses_tools=False, schemas=[])  # an environment that takes whole turns


def test_a_template_without_calls_and_tools_gets_a_note():
    (note,) = form_of(CHATML, "<|im_end|>", "auto").check(uses_tools=True, schemas=SCHEMAS)
    assert "does not show the tools" in note


BAD = [  # reader, text, what is wrong with the call
    ("read_tags", '<tool_call>{"name": </tool_call>', "not JSON"),
    ("read_tags", "<tool_call>3</tool_call>", "not a JSON object"),
    ("read_tags", '<tool_call>{"name": "now", "arguments": 3}</tool_call>', "not a JSON object"),
    ("read_python", "<|tool_call_start|>[now('x')]<|tool_call_end|>", "not [NAME(ARGUMENT=VALUE, ..), ..]"),
    ("read_python", "<|tool_call_start|>now()<|tool_call_end|>", "not [NAME(ARGUMENT=VALUE, ..), ..]"),
    ("read_python", "<|tool_call_start|>[now(a=b'x')]<|tool_call_end|>", "not [NAME(ARGUMENT=VALUE, ..), ..]"),
    ("read_python", "<|tool_call_start|>[now(a=open('x'))]<|tool_call_end|>", "not [NAME(ARGUMENT=VALUE, ..), ..]"),
    (
        "read_python",
        f"<|tool_call_start|>[now(a=0x{'f' * 5000})]<|tool_call_end|>",
        "not [NAME(ARGUMENT=VALUE, ..), ..]",
    ),
    ("read_python", "<|tool_call_start|>[now(a=\x00)]<|tool_call_end|>", "not [NAME(ARGUMENT=VALUE, ..), ..]"),
]


@pytest.mark.parametrize(("reader", "text", "reason"), BAD)
def test_what_is_wrong_with_a_call(reader, text, reason):
    ((_, arguments),) = getattr(forms, reader)(text, SCHEMAS)
    assert isinstance(arguments, str) and reason in arguments


@pytest.mark.parametrize(
    "text", ['{"name": "Bob", "age": 3}', '{"parameters": {}}', '{"name": "now", "parameters":', "[]", "3"]
)
def test_json_that_is_no_call(text):
    assert forms.read_json(text, SCHEMAS) == []


PIECES = [
    "<tool_call>", "</tool_call>", "<calculator>", "</calculator>", "<look>", "</look>", "<function=look>", "<function=", "</function>",
    "<parameter=word>", "<parameter=", "</parameter>", "<|tool_call_start|>", "<|tool_call_end|>",
    "<|python_tag|>", "look", "now", "(", ")", "[", "]", "{", "}", ":", ",", "=", '"', "'", "\\", "\n", " ", "1", "-", "1e999", "0x", "None",
    "true", '"name":', '"parameters":', '"arguments":', "{}", "\x00", "\ud800", "é", "*", "**", "lambda:", "f'{", "<think>", "</think>",
]  # fmt: skip


def test_readers_take_any_text_in_linear_time():
    """The model may write anything. A time that grows as the square of the length would be hours here."""
    draw = random.Random(0)
    for _ in range(1000):
        text = "".join(draw.choices(PIECES, k=draw.randrange(1, 30)))
        for reader in forms.READERS:
            for name, arguments in reader(text, SCHEMAS):
                assert isinstance(name, str) and isinstance(arguments, dict | str)
    for piece in PIECES:
        for text in (piece * 200_000, "<tool_call>" + piece * 200_000 + "</tool_call>"):
            for reader in forms.READERS:
                reader(text, SCHEMAS)
    many = "".join(f"<function=f{n}><parameter=p{n}>" for n in range(100_000))
    assert forms.read_xml(f"<tool_call>{many}</tool_call>", SCHEMAS) == []


def test_calls_inside_a_thought_that_the_prompt_opened_are_none():
    form = form_of(HERMES, "<|im_end|>", "auto")
    form.check(uses_tools=True, schemas=SCHEMAS)
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    opened = "<|im_start|>assistant\n<think>\n"
    assert read(form, f"I could {call}, but", opened) == []
    assert read(form, f"I could {call}</think>{call}", opened) == [("now", {})]
    assert read(form, call, opened + "\n</think>\n\n") == read(form, call) == [("now", {})]


# As gpt-oss: the last turn ends in another token than earlier ones; a result needs a call before it.
GPT_OSS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.tool_calls %} to={{ m.tool_calls[0].function.name }}"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|im_end|>{% elif m.role == 'tool' and not"
    " loop.previtem.tool_calls %}{{ raise_exception('no call before') }}{% else %}<|message|>{{ m.content }}"
    "{{ '<|im_end|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_the_check_renders_what_a_run_renders():
    empty = CHATML.replace("{{ m.content }}", "{{ m.content or raise_exception('nothing said') }}")
    twice = "{% if m.role == 'tool' and not loop.first and loop.previtem.role == 'tool' %}{{ raise_exception('two') }}{% endif %}"
    two = CHATML.replace("{{ m.content }}", twice + "{{ m.content }}")
    for template, uses_tools, reason in (
        (empty, True, "nothing said"),
        (empty, False, "nothing said"),
        (two, True, "two"),  # two calls in a turn
        (GPT_OSS, False, "changes earlier turns"),
    ):
        with pytest.raises(ValueError, match=rf"^.*{reason}.*: set model\.chat_template=FILE .*$"):
            form_of(template, "<|im_end|>", "tags").check(uses_tools=uses_tools, schemas=[])
    form = form_of(two, "<|im_end|>", "tags")
    form.check(uses_tools=False, schemas=[])


@pytest.mark.slow
def test_calls_in_the_form_of_llama_reach_the_tool(random_model):
    """In a whole conversation. Names that no tool has are in the warning, once each."""
    policy = load(random_model)
    policy.tokenizer.chat_template = LLAMA
    call = '{"name": "calculator", "parameters": {"expression": "6*7"}}'
    typo = '{"name": "calc\\n", "parameters": {"expression": "6*7"}}'
    script = [[call, "42"], [typo, typo, "42"], [typo, "42"]]
    right, wrong, _ = play(policy, script, "tools=[calculator]", times=2)
    assert results(right) == ["42"] and right.messages[0]["tool_calls"][0]["function"]["name"] == "calculator"
    assert "Tool calc\\n not found" in results(wrong)[0]
    # 3 calls in each of two rollouts.
    assert play.warnings == ["warning: all 3 calls of 'calc\\n' failed, first with 'Tool calc\\n not found.'"]
    flood = [[f'{{"name": "{"x" * 9999}{n}", "parameters": {{}}}}', "no"] for n in range(30)]
    play(policy, flood, "tools=[calculator]", length=20_000)
    assert len(play.warnings) == 10 and all(len(line) < 400 for line in play.warnings)


@pytest.mark.slow
def test_a_prompt_template_hides_the_tools(random_model):
    policy = load(random_model)
    policy.tokenizer.add_tokens(["<other>"])  # else it is the tiny model's, whose demos need no notes
    policy.tokenizer.chat_template = HERMES
    play(policy, [["x"]], "tools=[calculator]")
    assert play.warnings == []
    play(policy, [["x"]], "tools=[calculator]", "data.prompt_template=Q: {prompt}")
    assert play.warnings == ["note: data.prompt_template does not show the tools: describe them in it"]


def test_a_stop_string_finishes_a_completion_of_a_rollout_function(random_model):
    policy = load(random_model)
    encode = policy.tokenizer.encode
    ended, cut = encode("so</answer>"), encode("</answer> and on and")
    others = encode("</answer>")
    sampled = {
        "a stop string": (ended, [1] * len(ended), True),
        "cut": (encode("so </answ"), None, False),
        "in the text of another": (others + encode("o"), [0] * len(others) + [1], False),
        "EOS": ([*cut, policy.eos_ids[0]], None, True),
    }
    for what, (ids, mask, finished) in sampled.items():
        record = {"completion_ids": ids, "logprobs": [0.0] * len(ids), "env_mask": mask or [1] * len(ids)}
        found = _completion(record, Stops(policy, ["</answer>"]), Scripted(policy, []), SamplingParams(1, 99), "f")
        assert (found.finished, found.stop_reason) == (finished, "stop" if finished else "length"), what
