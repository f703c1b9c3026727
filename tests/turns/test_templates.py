"""The tokens of an answer for each family of chat templates, and templates that cannot go on. The
templates are written here, in the form of each family."""

import pytest
from tokenizers import AddedToken

from grpo.data.tiny import build_tokenizer
from grpo.turns.format import TurnFormat

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}{{ '\n<tool_response>\n' + m.content }}"
    "{{ '\n</tool_response>' }}{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Turns before the last question of the user lose their thinking, and the last turn gets an empty
# one.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}"
    "{% elif m.role == 'assistant' and loop.last and '<think>' not in m.content %}{{ '<think>\n\n</think>\n\n' + m.content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | tojson if m.role == 'tool' else m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
GEMMA = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
NO_TOOLS = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")

FAMILIES = {  # template, end of a turn; what stands behind it after the results 7 and 8, and after the user's text "go"
    "chatml": (
        CHATML, "<|im_end|>",
        "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>tool\n8<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen": (
        QWEN, "<|im_end|>",
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n",
        "\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3": (
        QWEN3, "<|im_end|>", "\n<|im_start|>user\n7<|im_end|>\n<|im_start|>user\n8<|im_end|>\n<|im_start|>assistant\n", None,
    ),
    "llama": (
        LLAMA, "<|eot_id|>",
        '<|start_header_id|>ipython<|end_header_id|>\n\n"7"<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"8"'
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|start_header_id|>user<|end_header_id|>\n\ngo<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": (
        MISTRAL, "</s>", "[TOOL_RESULTS] 7[/TOOL_RESULTS][TOOL_RESULTS] 8[/TOOL_RESULTS]", "[INST] go[/INST]",
    ),
    "gemma": (GEMMA, "<end_of_turn>", None, "\n<start_of_turn>user\ngo<end_of_turn>\n<start_of_turn>model\n"),
    "no tools": (NO_TOOLS, "<|im_end|>", None, "\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"),
}  # fmt: skip


def form_of(template, end, tools_format="tags"):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(end, special=True)], special_tokens=True)
    tokenizer.chat_template = template
    return TurnFormat(tokenizer, [tokenizer.convert_tokens_to_ids(end)], tools_format, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_of_each_family_of_templates(family):
    template, end, after_tools, after_user = FAMILIES[family]
    form = form_of(template, end)
    last_id = None
    (last_id,) = form.eos_ids
    results = [{"role": "tool", "name": "f", "content": text} for text in "78"]
    for expected, messages in (
        (after_tools, results),
        (after_user, [{"role": "user", "content": "go"}]),
    ):
        uses_tools = messages is results
        if expected is None:
            with pytest.raises(ValueError, match=r"set model\.chat_template=FILE"):
                form.check(uses_tools=uses_tools, schemas=[])
            continue
        form.check(uses_tools=uses_tools, schemas=[])
        ids = form.answer(messages, last_id, room=1000)
        assert form.tokenizer.decode(ids) == expected
        # a turn that a stop string ended gets its EOS
        assert form.answer(messages, 9, room=1000) == [
            last_id,
            *ids,
        ]
        assert form.answer(messages, last_id, room=len(ids)) is None


def test_a_turn_that_a_stop_string_ended_gets_the_token_with_which_the_template_ends_turns():
    """Not the first EOS: Qwen2.5 has the end of a document as well, Llama 3 the end of a message
    for the terminal."""
    tokenizer = form_of(CHATML, "<|im_end|>").tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    form = TurnFormat(tokenizer, [tokenizer.pad_token_id, end], "tags", {})
    messages = [{"role": "tool", "name": "f", "content": "7"}]
    suffix = form.answer(messages, end, room=99)
    assert form.answer(messages, 9, room=99) == [end, *suffix]
    assert form.answer(messages, tokenizer.pad_token_id, room=99) == suffix


def test_a_template_that_ends_no_turn_or_is_missing_is_refused():
    form = form_of(CHATML, "</s>")
    with pytest.raises(ValueError, match="it ends no turn with an EOS token"):
        form.check(uses_tools=True, schemas=[])
    form.tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"cannot go on .*: set model\.chat_template=FILE"):
        form.check(uses_tools=True, schemas=[])


def test_results_of_tools_have_the_template_that_prompts_with_tools_have():
    form = form_of({"default": CHATML, "tool_use": QWEN}, "<|im_end|>")
    schema = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {}}},
    }
    assert form.check(uses_tools=True, schemas=[schema]) == ""
    tool_use = FAMILIES["qwen"][2]
    default = FAMILIES["chatml"][3]
    results = [{"role": "tool", "name": "f", "content": content} for content in "78"]
    assert form.tokenizer.decode(form.answer(results, form.eos_ids[-1], 99)) == tool_use
    assert (
        form.tokenizer.decode(
            form.answer([{"role": "user", "content": "go"}], form.eos_ids[-1], 99)
        )
        == default
    )


def test_answers_have_the_variables_of_the_prompts():
    switch = "{% if add_generation_prompt %}{{ 'think' if enable_thinking | default(true) else 'answer' }}{% endif %}"
    tokenizer = form_of(CHATML + switch, "<|im_end|>").tokenizer
    for kwargs, end in (({}, "think"), ({"enable_thinking": False}, "answer")):
        form = TurnFormat(tokenizer, [tokenizer.eos_token_id], "auto", kwargs)
        ids = form.answer([{"role": "user", "content": "go"}], tokenizer.eos_token_id, 99)
        assert tokenizer.decode(ids).endswith(f"<|im_start|>assistant\n{end}")
