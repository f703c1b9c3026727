"""The tokenizer of the conversations that TRL was recorded with, and of the runs with TRL.

The recorder of ``trl_conversations.json`` is ``tests/turns/dump_trl_environment.py`` of commit
6613723."""

from grpo.data.tiny import build_tokenizer as build_tiny_tokenizer

TEMPLATE = r"""
{%- if tools %}{{ '<|im_start|>system\n# Tools\n<tools>' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}{% endif %}
{%- for m in messages %}{% if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
CALL = {
    "open": "<tool_call>",
    "close_pattern": r"</tool_call>\s*",
    "repeats": True,
    "content": "json",
}
CALL["transform"] = {"type": "function", "function": "{content}"}
RESPONSE = {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n"}
RESPONSE["fields"] = {
    "tool_calls": CALL,
    "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
}


def build_tokenizer():
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = RESPONSE  # with which TRL reads calls
    return tokenizer
