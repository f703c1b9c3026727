"""Readers of tool calls in the text that a model writes: one reader for each form of calls.

A reader gets the text of a turn after its thinking. The model may have written anything, so a
reader never raises, and its time is linear in the length of the text.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

CALL_TAG = "tool_call"
"""Name of the tag around a call. A call without a readable tool name gets this name, too."""
JSON_LITERALS = {"True": "true", "False": "false", "None": "null"}
"""Literals of Python -> literals of JSON."""

Schemas = Sequence[dict[str, Any]]
"""The JSON schemas of tools, as ``transformers.utils.get_json_schema`` makes them."""
Arguments = dict[str, Any] | str
"""Name -> value of each argument of a call, or an error message about unreadable arguments."""
Call = tuple[str, Arguments]
"""Name of a tool, and the arguments of the call."""


def read_tags(text: str, schemas: Schemas) -> list[Call]:
    """Read ``<tool_call>{"name": .., "arguments": {..}}</tool_call>`` (Hermes, Qwen2.5, Qwen3).

    Read ``<NAME>..</NAME>``, too, where NAME is the name of a tool. The content is the argument as
    plain text if the tool has one argument, else a JSON object of the arguments.
    """
    parameters = parameters_by_tool(schemas)
    # Only the names of tools are tags: other tags, such as <answer>, belong to the text.
    names = "|".join(map(re.escape, [CALL_TAG, *parameters]))
    calls = []
    for name, content in _blocks(text, f"<({names})>", "</{}>"):
        content = content.strip()
        if name == CALL_TAG:
            value = _parse_json(content)
            calls += _calls_in(value)
        elif len(parameters[name]) == 1:
            ((argument, schema),) = parameters[name].items()
            calls.append((name, {argument: _argument_value(content, schema)}))
        else:
            # A tool without arguments is called by an empty tag.
            arguments = _parse_json(content or "{}")
            calls.append((name, _as_arguments(arguments)))
    return calls


def read_json(text: str, schemas: Schemas) -> list[Call]:
    """Read a turn that consists of ``{"name": .., "parameters": {..}}`` (Llama 3.1 and 3.2)."""
    text = text.strip().removeprefix("<|python_tag|>")
    call = _parse_json(text)
    # A turn without a call may be JSON as well: an answer to the user.
    if not isinstance(call, dict) or "name" not in call:
        return []
    if not {"parameters", "arguments"} & call.keys():
        return []
    return _calls_in(call)


def read_xml(text: str, schemas: Schemas) -> list[Call]:
    """Read ``<function=NAME><parameter=ARGUMENT>..</parameter>..</function>`` (Qwen3-Coder).

    The call is inside ``<tool_call>..</tool_call>``. Qwen3.5 and Nemotron 3 write the same form.
    """
    parameters = parameters_by_tool(schemas)
    calls = []
    for _, block in _blocks(text, f"<({CALL_TAG})>", "</{}>"):
        for name, body in _blocks(block, r"<function=([^<>\s]+)>", "</function>"):
            # An unknown name is a call, too: the model then reads that there is no such tool.
            tool_parameters = parameters.get(name, {})
            arguments = {}
            for argument, content in _blocks(body, r"<parameter=([^<>\s]+)>", "</parameter>"):
                # The chat template writes one line break on each side. Any other line break belongs
                # to the value.
                content = content.removeprefix("\n").removesuffix("\n")
                schema = tool_parameters.get(argument, {})
                arguments[argument] = _argument_value(content, schema)
            calls.append((name, arguments))
    return calls


READERS = (
    read_tags,
    read_json,
    read_xml,
)
"""All readers, in the order in which a run tries them.

A run uses the first reader that reads the calls of its chat template. A turn in which that reader
reads no call is read by ``read_tags``.
"""


def as_message(name: str, arguments: Arguments) -> dict[str, Any]:
    """Return a call as an entry of ``tool_calls`` in a message.

    The entry has no arguments if the arguments cannot be read.
    """
    # Chat templates expect a mapping, and some raise for a text.
    if isinstance(arguments, str):
        arguments = {}
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "function": function}


def _blocks(
    text: str,
    opening: str,
    closing: str,
) -> list[tuple[str, str]]:
    """Return the name and the content of each block in a text.

    Args:
        opening: pattern of the mark before a block. The group of the pattern is the name.
        closing: text of the mark after a block, with {} for the name.
    """
    blocks = []
    end = 0
    unclosed = set()
    for match in re.finditer(opening, text):
        name = match[1]
        mark = closing.format(name)
        # The model may open many blocks and close none. A failed search for a closing mark reads
        # the rest of the text. So a mark that was not found is not searched for again: the time
        # would grow as the square of the length.
        if match.start() < end or mark in unclosed:
            continue
        mark_start = text.find(mark, match.end())
        if mark_start < 0:
            unclosed.add(mark)
            continue
        content = text[match.end() : mark_start]
        blocks.append((name, content))
        end = mark_start + len(mark)
    return blocks


def parameters_by_tool(schemas: Schemas) -> dict[str, dict[str, Any]]:
    """Return the schemas of all arguments: name of a tool -> name of an argument -> schema."""
    parameters = {}
    for schema in schemas:
        function = schema["function"]
        parameters[function["name"]] = function["parameters"]["properties"]
    return parameters


def _calls_in(value: Any) -> list[Call]:
    """Return the calls in a result of :func:`_parse_json`. A list has one call per item."""
    items = value if isinstance(value, list) else [value]
    calls = []
    for item in items:
        # An item without a name is a call, too: the model tried to call, and reads an error.
        name = CALL_TAG
        arguments = item
        if isinstance(item, dict):
            name = str(item.get("name", CALL_TAG))
            arguments = item.get("arguments") or item.get("parameters") or {}
        calls.append((name, _as_arguments(arguments)))
    return calls


def _argument_value(text: str, schema: dict[str, Any]) -> Any:
    """Return the value of an argument that was written as plain text.

    A string argument is the text. Any other argument is read as JSON if the text is JSON.
    """
    if schema.get("type") == "string":
        return text
    # Qwen's chat templates write True, and its models also true.
    literal = JSON_LITERALS.get(text, text)
    value = _parse_json(literal)
    if isinstance(value, Exception):
        return text
    return value


def _as_arguments(value: Any) -> Arguments:
    """Return a result of :func:`_parse_json` as arguments, or an error message about the result."""
    if isinstance(value, dict):
        return value
    if isinstance(value, Exception):
        return f"the arguments are not JSON: {value}"
    return "the arguments are not a JSON object"


def _parse_json(text: str) -> Any:
    """Return the value of a JSON text, or the error if the text is not JSON."""
    try:
        # Models break the lines of long strings, such as programs, without an escape.
        return json.loads(text, strict=False)
    # Python's parser recurses into nested lists, of which the model may write any number.
    except (ValueError, RecursionError) as error:
        return error
