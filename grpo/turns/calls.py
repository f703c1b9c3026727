"""Calls of tools in the text that a model writes: one reader for each form.

A reader gets the text of a turn after its thinking. The model may have written anything, so a
reader never raises, and its time is linear in the length of the text.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

CALL_TAG = "tool_call"
"""The tag around a call. Also the name of a call that cannot be read."""
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's words for values -> those of JSON."""

Schemas = Sequence[dict[str, Any]]
Arguments = dict[str, Any] | str
"""The arguments of a call; text in their place says what is wrong with the call."""
Call = tuple[str, Arguments]
"""The name of a tool and its arguments."""


def read_tags(text: str, schemas: Schemas) -> list[Call]:
    """Read ``<tool_call>{"name": .., "arguments": {..}}</tool_call>`` (Hermes, Qwen2.5, Qwen3).

    Also ``<NAME>..</NAME>``, with the only argument of the tool NAME as it is, or with a JSON
    object, if the tool has several.
    """
    parameters = _parameters(schemas)
    names = "|".join(map(re.escape, [CALL_TAG, *parameters]))
    calls = []
    for name, content in _blocks(text, f"<({names})>", "</{}>"):
        content = content.strip()
        if name == CALL_TAG:
            calls += _calls_in(_from_json(content))
        elif len(parameters[name]) == 1:
            ((argument, schema),) = parameters[name].items()
            calls.append((name, {argument: _value(content, schema)}))
        else:
            arguments = _from_json(content or "{}")
            calls.append((name, _mapping(arguments)))
    return calls


def read_json(text: str, schemas: Schemas) -> list[Call]:
    """Read ``{"name": .., "parameters": {..}}`` as the whole turn (Llama 3.1 and 3.2)."""
    text = text.strip().removeprefix("<|python_tag|>")
    written = _from_json(text)
    # A turn without a call may be JSON as well: an answer to the user.
    if not isinstance(written, dict) or "name" not in written:
        return []
    if not {"parameters", "arguments"} & written.keys():
        return []
    return _calls_in(written)


def read_xml(text: str, schemas: Schemas) -> list[Call]:
    """Read ``<function=NAME><parameter=ARGUMENT>..</parameter>..</function>`` (Qwen3-Coder).

    ``<tool_call>`` and ``</tool_call>`` stand around it. Qwen3.5 and Nemotron 3 write it, too.
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
    read_xml,
)
"""A run has the first one that reads the calls that its chat template writes, and ``read_tags``."""


def as_message(name: str, arguments: Arguments) -> dict[str, Any]:
    """The entry of ``tool_calls`` for a call; arguments that could not be read are left out."""
    if isinstance(arguments, str):
        arguments = {}
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "function": function}


def _blocks(
    text: str,
    opening: str,
    closing: str,
) -> list[tuple[str, str]]:
    """The name and the content of each block in a text.

    Args:
        opening: a pattern of the text before a block. Its group is the name.
        closing: the text after a block, with {} for the name.
    """
    blocks = []
    end = 0
    unclosed = set()
    for match in re.finditer(opening, text):
        name = match[1]
        mark = closing.format(name)
        # The model may open many blocks and close none. A search that fails reads the rest of the
        # text, so it is made once for each mark.
        if match.start() < end or mark in unclosed:
            continue
        last = text.find(mark, match.end())
        if last < 0:
            unclosed.add(mark)
            continue
        blocks.append((name, text[match.end() : last]))
        end = last + len(mark)
    return blocks


def _parameters(schemas: Schemas) -> dict[str, dict[str, Any]]:
    """The schemas of the arguments of each tool, by its name."""
    parameters = {}
    for schema in schemas:
        function = schema["function"]
        parameters[function["name"]] = function["parameters"]["properties"]
    return parameters


def _calls_in(written: Any) -> list[Call]:
    """The calls in what :func:`_from_json` returned: an object is one, a list may hold several."""
    if not isinstance(written, list):
        written = [written]
    calls = []
    for call in written:
        name = CALL_TAG
        arguments = call
        if isinstance(call, dict):
            name = str(call.get("name", CALL_TAG))
            arguments = call.get("arguments") or call.get("parameters") or {}
        calls.append((name, _mapping(arguments)))
    return calls


def _value(text: str, schema: dict[str, Any]) -> Any:
    """The value of an argument that stands alone: text for a string, else JSON if it is JSON."""
    if schema.get("type") == "string":
        return text
    # Qwen's chat templates write True, and its models also true.
    word = PYTHON_WORDS.get(text, text)
    value = _from_json(word)
    return text if isinstance(value, Exception) else value


def _mapping(value: Any) -> Arguments:
    """The arguments in what :func:`_from_json` returned, or what is wrong with them."""
    if isinstance(value, dict):
        return value
    if isinstance(value, Exception):
        return f"the arguments are not JSON: {value}"
    return "the arguments are not a JSON object"


def _from_json(text: str) -> Any:
    """The value of a JSON text, or the error if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return error
