"""Calls in each form that models write, and the check at the start that finds the form of a run.

The templates are written here, as short as they can be, in the form of those that the models have
on the Hub."""

import random

import pytest
from test_templates import CHATML, form_of

from grpo.turns import calls as forms


def chatml(calls, *, shows_tools=True, content="{{ m.content }}"):
    """A template whose assistant messages have their calls as ``calls`` writes them."""
    shown = "{% if tools %}{{ tools | tojson }}\n{% endif %}" if shows_tools else ""
    return (
        shown
        + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}"
        + calls
        + "{% else %}"
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
QWEN_XML = chatml(  # Qwen3-Coder, Qwen3.5, Nemotron 3
    EACH
    + "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>" + END
)
# As DeepSeek V3.1 and GLM 4.5 write calls: nothing here reads them.
OTHER = chatml(EACH + "<|call|>{{ f.name }}<|sep|>{{ f.arguments | tojson }}" + END)
# LFM2's first one shows tools alone
DEAF = CHATML.replace("{% for m", "{{ tools | tojson if tools }}{% for m", 1)


def schema(name, **types):
    properties = {key: {"type": kind, "description": "d"} for key, kind in types.items()}
    function = {
        "name": name,
        "description": "d",
        "parameters": {"type": "object", "properties": properties},
    }
    return {"type": "function", "function": function}


SCHEMAS = [
    schema("look", word="string", most="integer", deep="boolean", more="object"),
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
    "qwen xml": (
        QWEN_XML, "read_xml",
        "<tool_call>\n<function=look>\n<parameter=word>\n a\n\n1 < 2\n</parameter>\n<parameter=most>\n7\n</parameter>\n"
        "<parameter=deep>\nTrue\n</parameter>\n<parameter=more>\n{\"a\": null}\n</parameter>\n</function>\n</tool_call>"
        "<tool_call><function=now></function></tool_call>",
        [("look", {"word": " a\n\n1 < 2", "most": 7, "deep": True, "more": {"a": None}}), ("now", {})],
    ),
}  # fmt: skip


def read(form, text):
    return form.read(text, SCHEMAS)[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_of_calls_is_found_in_the_chat_template(family):
    template, reader, text, expected = FAMILIES[family]
    form = form_of(template, "<|im_end|>", "auto")
    assert form.check(uses_tools=True, schemas=SCHEMAS) == ""
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


@pytest.mark.parametrize("template", [OTHER, DEAF])
def test_a_template_whose_calls_nobody_reads_is_refused(template):
    with pytest.raises(
        ValueError,
        match=r"^the model's chat template shows the tools, and no reader .* tools_format=tags.*$",
    ) as found:
        form_of(template, "<|im_end|>", "auto").check(uses_tools=True, schemas=SCHEMAS)
    assert "data.system_prompt" in str(found.value)
    form = form_of(template, "<|im_end|>", "tags")
    form.check(uses_tools=True, schemas=SCHEMAS)
    assert read(form, "<now></now>") == [("now", {})]
    form = form_of(template, "<|im_end|>", "auto")
    form.check(uses_tools=False, schemas=[])  # an environment that takes whole turns


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}',
        '{"parameters": {}}',
        '{"name": "now", "parameters":',
        "[]",
        "3",
    ],
)
def test_json_that_is_no_call(text):
    assert forms.read_json(text, SCHEMAS) == []


PIECES = [
    "<tool_call>", "</tool_call>", "<calculator>", "</calculator>", "<look>", "</look>", "<function=look>", "<function=", "</function>",
    "<parameter=word>", "<parameter=", "</parameter>", "<|python_tag|>", "now", "[", "{", "}", ":", ",", '"', "\\", "1", "1e999", "None",
    '"name":', '"parameters":', '"arguments":', "{}", "\x00", "\ud800", "<think>", "</think>",
]  # fmt: skip


def test_readers_take_any_text_in_linear_time():
    """The model may write anything. A time that grows as the square of the length would be hours
    here."""
    draw = random.Random(0)
    for _ in range(1000):
        text = "".join(draw.choices(PIECES, k=draw.randrange(1, 30)))
        for reader in forms.READERS:
            for name, arguments in reader(text, SCHEMAS):
                assert isinstance(name, str)
                assert isinstance(arguments, dict | str)
    for piece in PIECES:
        for text in (piece * 200_000, "<tool_call>" + piece * 200_000 + "</tool_call>"):
            for reader in forms.READERS:
                reader(text, SCHEMAS)
    many = "".join(f"<function=f{n}><parameter=p{n}>" for n in range(100_000))
    assert forms.read_xml(f"<tool_call>{many}</tool_call>", SCHEMAS) == []
    # Another tag that closes comes last.
    for reader in forms.READERS:
        assert reader("<tool_call>" * 100_000 + "</lookup>", SCHEMAS) == []


# As gpt-oss: the last turn ends in another token than earlier ones; a result needs a call before
# it.
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
