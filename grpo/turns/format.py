"""The form of turns in tokens: calls read from what the model wrote, and the tokens of an answer.

Sampled tokens are never encoded again. The tokens of an answer come from the chat template: it is rendered behind a
short conversation, and what stands before the end of that conversation's last turn is cut off.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo.data.chat import apply_template
from grpo.rewards.answers import after_thinking

CALL_TAG = "tool_call"
"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write calls."""
THOUGHT, SAID = "<think>\nx\n</think>\n\n", "said."
MAX_CHARACTERS_PER_TOKEN = 1000
"""No token is longer, so that a text of more characters per token does not fit, and is not encoded."""

Call = tuple[str, dict[str, Any] | str]
"""The name of a tool and its arguments; text in their place says what is wrong with the call."""


class TurnFormat:
    """Reads and writes turns for one tokenizer. Its methods may be called by several threads."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Sequence[int],
        tools_format: str,
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        """``template_kwargs``: variables of the chat template, as the prompts have them."""
        self.tokenizer = tokenizer
        self.eos_ids = list(eos_ids)
        self.template_kwargs = template_kwargs
        self.uses_template = tools_format == "auto" and getattr(tokenizer, "response_template", None) is not None
        self._ends = [tokenizer.convert_ids_to_tokens(id) for id in self.eos_ids]
        controls = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        self._controls = sorted((token for token in controls if token[:1] in "<["), key=len, reverse=True)
        self._lock = threading.Lock()

    def check(self, *, uses_tools: bool, schemas: Sequence[dict[str, Any]]) -> list[str]:
        """Notes for the user; ValueError unless the chat template can render the conversations of the run.

        It must keep earlier turns as they are when an answer follows: the model is trained on these.
        """
        if not self.tokenizer.chat_template:
            raise ValueError("turns need a chat template, and the model has none: set model.chat_template=FILE")
        role = "tool" if uses_tools else "user"
        turn, answer = self._turn("f"), {"role": role, "name": "f", "content": "x"}
        question = {"role": "user", "content": "x"}
        try:
            for before in ([question, turn], [question, turn, answer, turn]):
                suffix = self._suffix(before, [answer])
                if "x" not in suffix:
                    raise ValueError(f"it does not show messages of the role {role}")
        except Exception as error:  # a chat template is a program that comes with the model
            reason = str(error).splitlines()[0][:200]
            raise ValueError(
                f"the model's chat template cannot go on after a message of the role {role} ({reason}): set "
                "model.chat_template=FILE to one that keeps earlier turns as they are"
            ) from error
        with_tools = self._render([question], schemas=schemas)
        shows_tools = not schemas or with_tools != self._render([question])
        if shows_tools:
            return []
        return ["note: the chat template does not show the tools: describe them in data.system_prompt"]

    def read(
        self,
        text: str,
        ids: Sequence[int],
        prefix: Sequence[int],
        schemas: Sequence[dict[str, Any]],
    ) -> tuple[dict[str, Any], list[Call]]:
        """The message of a turn, and its calls.

        Args:
            text: the turn as :meth:`grpo.rollout.Stops.text` gives it.
            ids: its tokens, from which the tokenizer's own response template reads it, if it has one.
            prefix: the tokens before it, which may have opened its reasoning.
            schemas: of the tools.
        """
        if self.uses_template and schemas:
            with self._lock:
                try:
                    return self._read_by_template(ids, prefix, schemas)
                except Exception:
                    # What the model wrote may be anything: then it is text without a call.
                    return {"role": "assistant", "content": text}, []

        message: dict[str, Any] = {"role": "assistant", "content": text}
        calls = _calls_in_tags(after_thinking(text), schemas)
        if calls:
            message["tool_calls"] = []
        for name, arguments in calls:
            is_readable = isinstance(arguments, dict)
            function = {"name": name, "arguments": arguments if is_readable else {}}
            message["tool_calls"].append({"type": "function", "function": function})
        return message, calls

    def _read_by_template(
        self,
        ids: Sequence[int],
        prefix: Sequence[int],
        schemas: Sequence[dict[str, Any]],
    ) -> tuple[dict[str, Any], list[Call]]:
        message = self.tokenizer.parse_response(
            list(ids),
            prefix=list(prefix),
            tools=list(schemas),
        )
        calls = []
        for call in message.get("tool_calls") or []:
            function = call["function"]
            if not isinstance(function["name"], str):
                raise ValueError("the name of a tool is a text")
            if function.get("arguments") is None:  # as some templates write a call without any
                function["arguments"] = {}
            calls.append((function["name"], _mapping(function["arguments"])))
        return {"role": "assistant", "content": "", **message}, calls

    def cut(self, text: str, most: int) -> str:
        """The text, or its first ``most`` tokens and three dots."""
        with self._lock:
            longest = MAX_CHARACTERS_PER_TOKEN * most
            ids = self.tokenizer.encode(text[:longest], add_special_tokens=False)
            is_long = len(ids) > most or len(text) > longest
            return self.tokenizer.decode(ids[:most]) + " ..." if is_long else text

    def answer(self, messages: Sequence[dict[str, Any]], last_id: int, room: int) -> list[int] | None:
        """The tokens of an answer and of the beginning of the next turn; None if there are not fewer than ``room``.

        Args:
            messages: results of tools, or of the user.
            last_id: the last token of the turn before. If it ends no turn, because a stop string did, an EOS is added.
        """
        messages = [dict(message) for message in messages]
        if sum(len(message["content"]) for message in messages) > MAX_CHARACTERS_PER_TOKEN * room:
            return None
        with self._lock:
            marks: list[str] = []
            for message in messages:
                message["content"] = re.sub("[\ue000\ue001]", "", message["content"])
                for token in self._controls:
                    if token in message["content"]:
                        marks.append(token)
                        message["content"] = message["content"].replace(token, f"\ue000{len(marks) - 1}\ue001")
            before = [{"role": "user", "content": "x"}, self._turn(messages[0].get("name", "f"))]
            if messages[0]["role"] != "tool":
                before[1].pop("tool_calls", None)
            ids: list[int] = []
            for number, part in enumerate(re.split("\ue000(\\d+)\ue001", self._suffix(before, messages))):
                # Control tokens inside a result are text: encoded in two halves, they are no tokens.
                halves = (marks[int(part)][:1], marks[int(part)][1:]) if number % 2 else (part,)
                ids += [id for half in halves for id in self.tokenizer.encode(half, add_special_tokens=False)]
        ids = ids if last_id in self.eos_ids else [self.eos_ids[0], *ids]
        return ids if len(ids) < room else None

    def _turn(self, name: str) -> dict[str, Any]:
        """A turn of the model before an answer: with thinking, if the template knows of it, and a call."""
        content = THOUGHT * ("<think>" in str(self.tokenizer.chat_template)) + SAID
        call = {"type": "function", "function": {"name": name, "arguments": {}}}
        return {"role": "assistant", "content": content} | ({"tool_calls": [call]} if self.uses_template else {})

    def _suffix(self, before: list[dict[str, Any]], messages: list[dict[str, Any]]) -> str:
        """The template's text from the end of the last turn of ``before`` to the beginning of the next turn."""
        # Of several templates, prompts with tools are rendered in `tool_use`, so results of tools are too.
        templates = self.tokenizer.chat_template
        has_tool_template = isinstance(templates, dict) and "tool_use" in templates
        name = "tool_use" if has_tool_template and messages[0]["role"] == "tool" else None
        start = self._render(before, begins_next_turn=False, name=name)
        whole = self._render([*before, *messages], name=name)
        ends = [start.rfind(end) + len(end) for end in self._ends if end in start[start.rfind(SAID) :]]
        if not ends:  # GLM's is the beginning of the next message
            raise ValueError("it ends no turn with an EOS token")
        if whole[: max(ends)] != start[: max(ends)]:
            raise ValueError("it changes earlier turns, as Qwen3's drops their thinking")
        return whole[max(ends) :]

    def _render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        return apply_template(self.tokenizer, messages, template_kwargs=self.template_kwargs, **options)


def _mapping(found: Any) -> dict[str, Any] | str:
    return found if isinstance(found, dict) else "the arguments are not a JSON object"


def _arguments(text: str) -> dict[str, Any] | str:
    try:
        return _mapping(json.loads(text))
    except (ValueError, RecursionError) as error:
        return f"the arguments are not JSON: {error}"


def _calls_in_tags(text: str, schemas: Sequence[dict[str, Any]]) -> list[Call]:
    """The calls ``<tool_call>{json}</tool_call>`` and ``<NAME>...</NAME>``, in their order.

    Between the tags of a tool stands its only argument as it is, or a JSON object of its arguments.
    """
    parameters = {s["function"]["name"]: s["function"]["parameters"]["properties"] for s in schemas}
    names = "|".join(map(re.escape, [CALL_TAG, *parameters]))
    calls: list[Call] = []
    for name, content in re.findall(f"<({names})>(.*?)</\\1>", text, re.DOTALL) if schemas else ():
        if name != CALL_TAG:
            calls.append((name, _tagged_arguments(content.strip(), parameters[name])))
            continue
        found = _arguments(content.strip())
        if isinstance(found, str):
            calls.append((CALL_TAG, found))
        else:
            calls.append((str(found.get("name")), _mapping(found.get("arguments") or {})))
    return calls


def _tagged_arguments(content: str, parameters: dict[str, Any]) -> dict[str, Any] | str:
    if len(parameters) != 1:
        return _arguments(content or "{}")
    ((name, schema),) = parameters.items()
    if schema.get("type") == "string":
        return {name: content}
    try:
        return {name: json.loads(content)}
    except (ValueError, RecursionError):
        return {name: content}
