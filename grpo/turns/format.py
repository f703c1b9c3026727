"""The form of turns in tokens: calls read from what the model wrote, and the tokens of an answer.

Sampled tokens are never encoded again. The tokens of an answer come from the chat template: it is
rendered behind a short conversation, and what stands before the end of that conversation's last
turn is cut off.
"""

import json
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo.data.chat import apply_template
from grpo.rewards.answers import after_thinking
from grpo.system import first_line

CALL_TAG = "tool_call"
"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write calls."""
QUESTION = {"role": "user", "content": "x"}
"""The first message of the short conversation."""
THOUGHT = "<think>\nx\n</think>\n\n"
SAID = "said."
"""The model's turn in the short conversation, behind its thinking."""
BREAK = "\ue000"
"""A character of no meaning, at which the text of an answer is split before it is encoded."""
MAX_CHARACTERS_PER_TOKEN = 1000
"""No token is longer: a text with more characters per token does not fit, and is not encoded."""

Message = dict[str, Any]
Schemas = Sequence[dict[str, Any]]
Arguments = dict[str, Any] | str
"""The arguments of a call; text in their place says what is wrong with the call."""
Call = tuple[str, Arguments]
"""The name of a tool and its arguments."""


class TurnFormat:
    """Reads and writes turns for one tokenizer. Several threads may call its methods."""

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
        has_template = getattr(tokenizer, "response_template", None) is not None
        self.uses_template = tools_format == "auto" and has_template
        self._ends = tokenizer.convert_ids_to_tokens(self.eos_ids)
        self._render = partial(
            apply_template,
            tokenizer,
            template_kwargs=template_kwargs,
        )

        # Some tokenizers have added tokens of white space, which control nothing.
        added = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        controls = [token for token in added if token.startswith(("<", "["))]
        self._controls = sorted(controls, key=len, reverse=True)
        # Tokenizers written in Rust raise if two threads use them at the same time.
        self._lock = threading.Lock()

    def check(self, *, uses_tools: bool, schemas: Schemas) -> list[str]:
        """Notes for the user; ValueError unless the chat template can render the turns of the run.

        It must keep earlier turns as they are when an answer follows: the model is
        trained on these.
        """
        if not self.tokenizer.chat_template:
            raise ValueError(
                "turns need a chat template, and the model has none: set model.chat_template=FILE",
            )
        role = "tool" if uses_tools else "user"
        answer = {"role": role, "name": "f", "content": "x"}
        try:
            for num_earlier in (0, 1):
                if "x" not in self._suffix([answer], num_earlier):
                    raise ValueError(f"it does not show messages of the role {role}")
        except Exception as error:  # a chat template is a program that comes with the model
            reason = first_line(error)[:200]
            raise ValueError(
                f"the model's chat template cannot go on after a message of the role {role} "
                f"({reason}): set model.chat_template=FILE to one that keeps earlier turns as "
                "they are"
            ) from error

        with_tools = self._render([QUESTION], schemas=schemas)
        if not schemas or with_tools != self._render([QUESTION]):
            return []
        return [
            "note: the chat template does not show the tools: describe them in data.system_prompt",
        ]

    def read(
        self,
        text: str,
        ids: Sequence[int],
        prefix: Sequence[int],
        schemas: Schemas,
    ) -> tuple[Message, list[Call]]:
        """The message of a turn, and its calls.

        Args:
            text: the turn as :meth:`grpo.rollout.Stops.text` gives it.
            ids: its tokens, which the tokenizer's own response template reads, if it has one.
            prefix: the tokens before it, which may have opened its reasoning.
            schemas: of the tools.
        """
        message = {"role": "assistant", "content": text}
        if not schemas:
            return message, []
        if self.uses_template:
            try:
                with self._lock:
                    parsed = self.tokenizer.parse_response(
                        list(ids),
                        prefix=list(prefix),
                        tools=list(schemas),
                    )
                return message | {"content": ""} | parsed, _calls_in_message(parsed)
            except Exception:
                # What the model wrote may be anything: then it is text without a call.
                return message, []

        calls = _calls_in_tags(after_thinking(text), schemas)
        if calls:
            message["tool_calls"] = [_as_message(*call) for call in calls]
        return message, calls

    def cut(self, text: str, most: int) -> str:
        """The text, or its first ``most`` tokens and three dots."""
        longest = MAX_CHARACTERS_PER_TOKEN * most
        with self._lock:
            ids = self.tokenizer.encode(text[:longest], add_special_tokens=False)
            if len(ids) <= most and len(text) <= longest:
                return text
            return self.tokenizer.decode(ids[:most]) + " ..."

    def answer(
        self,
        messages: Sequence[Message],
        last_id: int,
        room: int,
    ) -> list[int] | None:
        """The tokens of an answer and of the beginning of the next turn.

        None unless they are fewer than ``room``.

        Args:
            messages: results of tools, or of the user.
            last_id: the last token of the turn before. If it ends no turn, because a stop string
                did, an EOS is added.
        """
        num_characters = sum(len(message["content"]) for message in messages)
        if num_characters > MAX_CHARACTERS_PER_TOKEN * room:
            return None

        # Control tokens inside a result are text: encoded in two halves, they are no tokens. Those
        # that the template writes around a result stay whole.
        answers = []
        for message in messages:
            content = message["content"].replace(BREAK, "")
            for token in self._controls:
                halves = f"{BREAK}{token[:1]}{BREAK}{token[1:]}{BREAK}"
                content = content.replace(token, halves)
            answers.append({**message, "content": content})

        ids = [] if last_id in self.eos_ids else [self.eos_ids[0]]
        with self._lock:
            for part in self._suffix(answers).split(BREAK):
                ids += self.tokenizer.encode(part, add_special_tokens=False)
        return ids if len(ids) < room else None

    def _suffix(self, answers: list[Message], num_earlier: int = 0) -> str:
        """The template's text from the end of a turn, over its answers, to the start of the next.

        Before that turn stand ``num_earlier`` turns with the same answers.
        """
        templates = self.tokenizer.chat_template
        # Some templates drop the thinking of earlier turns. The turn has some, so that the check
        # below notices.
        thought = THOUGHT if "<think>" in str(templates) else ""
        turn = {"role": "assistant", "content": thought + SAID}
        name = None
        if answers[0]["role"] == "tool":
            if self.uses_template:
                call = _as_message(answers[0].get("name", "f"), {})
                turn["tool_calls"] = [call]
            # Of several templates, prompts with tools are rendered in this one, so results are too.
            if isinstance(templates, dict) and "tool_use" in templates:
                name = "tool_use"

        before = [QUESTION, *[turn, *answers] * num_earlier, turn]
        start = self._render(before, begins_next_turn=False, name=name)
        whole = self._render([*before, *answers], name=name)

        end = 0
        for token in self._ends:
            if token in start[start.rfind(SAID) :]:
                end = max(end, start.rfind(token) + len(token))
        if not end:  # GLM ends a turn by the beginning of the next message
            raise ValueError("it ends no turn with an EOS token")
        if whole[:end] != start[:end]:
            raise ValueError("it changes earlier turns, as Qwen3's drops their thinking")
        return whole[end:]


def _as_message(name: str, arguments: Arguments) -> dict[str, Any]:
    """A call as chat messages have it, without arguments that could not be read."""
    if isinstance(arguments, str):
        arguments = {}
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "function": function}


def _mapping(found: Any) -> Arguments:
    return found if isinstance(found, dict) else "the arguments are not a JSON object"


def _arguments(text: str) -> Arguments:
    try:
        return _mapping(json.loads(text))
    except (ValueError, RecursionError) as error:
        return f"the arguments are not JSON: {error}"


def _calls_in_message(message: Message) -> list[Call]:
    """The calls in a message that a response template has read."""
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


def _calls_in_tags(text: str, schemas: Schemas) -> list[Call]:
    """The calls ``<tool_call>{json}</tool_call>`` and ``<NAME>...</NAME>``, in their order.

    Between the tags of a tool stands its only argument as it is, or a JSON object of its arguments.
    """
    parameters = {}
    for schema in schemas:
        function = schema["function"]
        parameters[function["name"]] = function["parameters"]["properties"]
    names = "|".join(map(re.escape, [CALL_TAG, *parameters]))
    calls = []
    for name, content in re.findall(f"<({names})>(.*?)</\\1>", text, re.DOTALL):
        content = content.strip()
        if name == CALL_TAG:
            arguments = _arguments(content)
            if isinstance(arguments, dict):
                name = str(arguments.get("name"))
                arguments = _mapping(arguments.get("arguments") or {})
        elif len(parameters[name]) == 1:
            ((only, schema),) = parameters[name].items()
            arguments = {only: content}
            if schema.get("type") != "string":
                with suppress(ValueError, RecursionError):
                    arguments[only] = json.loads(content)
        else:
            arguments = _arguments(content or "{}")
        calls.append((name, arguments))
    return calls
