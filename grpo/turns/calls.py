"""Calls of tools in the text that a model writes: one reader for each form.

A reader gets the text of a turn behind its thinking. The model may have written anything, so a
reader never raises, and its time is linear in the length of the text.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

CALL_TAG = "tool_call"
"""Also the name of a call whose own name could not be read."""
CODE = "<call>"
"""The file name of what Python's parser gets. It warns of strings such as "\\d"."""
warnings.filterwarnings("ignore", module=CODE)
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}

Schemas = Sequence[dict[str, Any]]
Arguments = dict[str, Any] | str
"""The arguments of a call; text in their place says what is wrong with the call."""
Call = tuple[str, Arguments]
"""The name of a tool and its arguments."""


def read_tags(text: str, schemas: Schemas) -> list[Call]:
    """Hermes, Qwen: ``<tool_call>{"name": .., "arguments": {..}}</tool_call>``; ``<NAME>..</NAME>``.

    Between the tags of a tool stands its only argument as it is, or a JSON object of its arguments.
    """
    parameters = _parameters(schemas)
    names = "|".join(map(re.escape, [CALL_TAG, *parameters]))
    calls = []
    for name, content in _blocks(text, f"<({names})>", "</{}>"):
        content = content.strip()
        if name == CALL_TAG:
            calls += _calls_in_json(content)
        elif len(parameters[name]) == 1:
            ((only, schema),) = parameters[name].items()
            calls.append((name, {only: _value(content, schema)}))
        else:
            arguments = _from_json(content or "{}")
            calls.append((name, _mapping(arguments)))
    return calls


def read_json(text: str, schemas: Schemas) -> list[Call]:
    """Llama 3.1 and 3.2: ``{"name": .., "parameters": {..}}`` as the whole turn."""
    text = text.strip().removeprefix("<|python_tag|>")
    # An answer may be JSON, too.
    if not re.match(r'\{\s*"name":.*"(parameters|arguments)":', text, re.DOTALL):
        return []
    return [call for call in _calls_in_json(text) if isinstance(call[1], dict)]


def read_python(text: str, schemas: Schemas) -> list[Call]:
    """LFM2: ``<|tool_call_start|>[NAME(ARGUMENT=VALUE, ..), ..]<|tool_call_end|>``."""
    calls = []
    for _, content in _blocks(text, r"<\|(tool_call)_start\|>", "<|{}_end|>"):
        try:
            tree = ast.parse(content.strip(), CODE, mode="eval")
            for node in tree.body.elts:
                if node.args:
                    raise ValueError("arguments without names")
                arguments = {}
                for word in node.keywords:
                    arguments[word.arg] = ast.literal_eval(word.value)
                # Of Python's values, tools get those that JSON has.
                arguments = json.loads(json.dumps(arguments))
                calls.append((node.func.id, arguments))
        except Exception:  # Python's parser has many for text that is no list of calls
            # Not the error's message, which may hold the address of an object.
            calls.append((CALL_TAG, "the calls are not [NAME(ARGUMENT=VALUE, ..), ..]"))
    return calls


def read_xml(text: str, schemas: Schemas) -> list[Call]:
    """Qwen3-Coder, Qwen3.5: ``<function=NAME><parameter=ARGUMENT>..</parameter>..</function>``.

    ``<tool_call>`` and ``</tool_call>`` stand around it.
    """
    parameters = _parameters(schemas)
    calls = []
    for _, block in _blocks(text, f"<({CALL_TAG})>", "</{}>"):
        for name, body in _blocks(block, r"<function=([^<>\s]+)>", "</function>"):
            properties = parameters.get(name, {})
            arguments = {}
            for argument, content in _blocks(body, r"<parameter=([^<>\s]+)>", "</parameter>"):
                content = content.removeprefix("\n").removesuffix("\n")
                schema = properties.get(argument, {})
                arguments[argument] = _value(content, schema)
            calls.append((name, arguments))
    return calls


READERS = (
    read_tags,
    read_json,
    read_python,
    read_xml,
)
"""A run reads tags, and the first form here in which its chat template writes calls."""


def read_message(message: dict[str, Any]) -> list[Call]:
    """The calls in a message that a response template of transformers has read."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        if not isinstance(function["name"], str):
            raise ValueError("the name of a tool is a text")
        # Some templates write a call without any arguments.
        if function.get("arguments") is None:
            function["arguments"] = {}
        arguments = _mapping(function["arguments"])
        calls.append((function["name"], arguments))
    return calls


def as_message(name: str, arguments: Arguments) -> dict[str, Any]:
    """A call as chat messages have it, without arguments that could not be read."""
    if isinstance(arguments, str):
        arguments = {}
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "function": function}


def _blocks(
    text: str,
    opening: str,
    closing: str,
) -> Iterator[tuple[str, str]]:
    """The name and the content of each block in a text.

    Args:
        opening: a pattern, whose group is the name.
        closing: the text at the end of a block, with {} for the name.
    """
    end = 0
    unclosed = set()
    for found in re.finditer(opening, text):
        name = found[1]
        mark = closing.format(name)
        # A mark that is missing once is looked for no more: the model may open many blocks.
        if found.start() < end or mark in unclosed:
            continue
        last = text.find(mark, found.end())
        if last < 0:
            unclosed.add(mark)
            continue
        yield name, text[found.end() : last]
        end = last + len(mark)


def _parameters(schemas: Schemas) -> dict[str, dict[str, Any]]:
    """The schemas of the arguments of each tool."""
    parameters = {}
    for schema in schemas:
        function = schema["function"]
        parameters[function["name"]] = function["parameters"]["properties"]
    return parameters


def _calls_in_json(text: str) -> list[Call]:
    """The call in an object of JSON, or the calls in a list of them."""
    found = _from_json(text)
    if not isinstance(found, list):
        found = [found]
    calls = []
    for call in found:
        name = CALL_TAG
        arguments = call
        if isinstance(call, dict):
            name = str(call.get("name"))
            arguments = call.get("arguments") or call.get("parameters") or {}
        calls.append((name, _mapping(arguments)))
    return calls


def _value(text: str, schema: dict[str, Any]) -> Any:
    """An argument that stands alone, of the type in its schema."""
    if schema.get("type") == "string":
        return text
    # Qwen's chat templates write True, and its models also true.
    word = PYTHON_WORDS.get(text, text)
    found = _from_json(word)
    return text if isinstance(found, Exception) else found


def _mapping(found: Any) -> Arguments:
    if isinstance(found, dict):
        return found
    if isinstance(found, Exception):
        return f"the arguments are not JSON: {found}"
    return "the arguments are not a JSON object"


def _from_json(text: str) -> Any:
    """The value in a text of JSON, or the error if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return error
