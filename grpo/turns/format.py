"""The form of turns in tokens: calls read from what the model wrote, and the tokens of an answer.

Sampled tokens are never encoded again. The tokens of an answer come from the chat template: it is
rendered after a short conversation, and all text up to the end of that conversation's last turn is
cut off.
"""

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
from grpo.turns.calls import READERS, Call, Schemas, as_message, read_message, read_tags

QUESTION = {"role": "user", "content": "x"}
"""The first message of the short conversation."""
THOUGHT = "<think>\nx\n</think>\n\n"
"""The thinking of the model's turn in the short conversation."""
SAID = "said."
"""The model's turn in the short conversation, after its thinking."""
BREAK = "\ue000"
"""A character without a meaning, at which the text of an answer is split before it is encoded."""
MAX_CHARACTERS_PER_TOKEN = 1000
"""Upper bound of a token's length: a text that cannot fit for its length alone is not encoded."""

TOKENS_OF_TAG = 16
"""Upper bound of the tokens of ``<think>`` and the white space after it."""
EXAMPLES = {"integer": 1, "number": 0.5, "boolean": True, "array": [], "object": {}}
"""Type of an argument -> its value in the call that shows which form is read. Default: ``SAID``."""

Message = dict[str, Any]


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
        self.finds_form = tools_format == "auto"
        response_template = getattr(tokenizer, "response_template", None)
        self.uses_response_template = self.finds_form and response_template is not None
        self._read_calls = read_tags
        self._writes_calls = False
        """True if the chat template writes the calls of a message."""
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

        The template must keep earlier turns as they are when an answer follows, since the tokens
        of these turns stay as they are.
        """
        if not self.tokenizer.chat_template:
            raise ValueError(
                "turns need a chat template, and the model has none: set model.chat_template=FILE",
            )
        can_read = self._find_form(schemas)
        role = "tool" if uses_tools else "user"
        # A turn may have several calls.
        num_answers = 2 if uses_tools else 1
        try:
            for num_earlier in (0, 1):
                for content in ("x", ""):  # a tool may say nothing
                    answer = {"role": role, "name": "f", "content": content}
                    suffix, _ = self._suffix([answer] * num_answers, num_earlier)
                    if content not in suffix:
                        raise ValueError(f"it does not show messages of the role {role}")
        except Exception as error:  # a chat template is a program that comes with the model
            reason = first_line(error)[:200]
            raise ValueError(
                f"the model's chat template cannot go on after a message of the role {role} "
                f"({reason}): set model.chat_template=FILE to one that keeps earlier turns as "
                "they are"
            ) from error

        shows_tools = self._render([QUESTION], schemas=schemas) != self._render([QUESTION])
        if not can_read and (shows_tools or self._writes_calls):
            raise ValueError(
                "the model's chat template writes no calls of the tools that can be read: set "
                "tools_format=tags, and say in data.system_prompt that a call is "
                '<tool_call>{"name": .., "arguments": {..}}</tool_call>'
            )
        if not schemas or shows_tools:
            return []
        return [
            "note: the chat template does not show the tools: describe them in data.system_prompt",
        ]

    def _find_form(self, schemas: Schemas) -> bool:
        """Find the reader of the calls that the chat template writes. Returns False without one.

        Tags are read in any case.
        """
        turn = self._turn("", ("f", {"x": SAID}))
        with suppress(Exception):  # a chat template is a program that comes with the model
            text = self._render([QUESTION, turn], schemas=schemas, begins_next_turn=False)
            self._writes_calls = SAID in text
        if not self.finds_form or (self.uses_response_template and self._can_read(schemas)):
            return True
        self.uses_response_template = False
        for reader in READERS:
            self._read_calls = reader
            if self._can_read(schemas):
                return True
        self._read_calls = read_tags
        return False

    def _can_read(self, schemas: Schemas) -> bool:
        """True if a call of each tool, written by the chat template, is read as the same call."""
        ends = "|".join(map(re.escape, self._ends))
        plain = {"role": "assistant", "content": SAID}
        render = partial(self._render, schemas=schemas, begins_next_turn=False)
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        for schema in schemas:
            function = schema["function"]
            arguments = {}
            for name, argument in function["parameters"]["properties"].items():
                arguments[name] = EXAMPLES.get(str(argument.get("type")), SAID)
            call = (function["name"], arguments)
            try:
                whole = render([QUESTION, self._turn("", call)])
                before = render([QUESTION, plain]).rpartition(SAID)[0]
            except Exception:  # a chat template is a program that comes with the model
                return False

            # A template may begin a turn with a call in another way than one without.
            while not whole.startswith(before):
                before = before[:-1]
            turn = whole[len(before) :]
            text, end = re.match(f"(.*?)({ends}|$)", turn, re.DOTALL).groups()
            ids = encode(text + end)
            _, calls = self.read(text, ids, encode(before), schemas)
            if calls != [call]:
                return False
        return True

    def _turn(self, content: str, call: Call) -> Message:
        """A turn of the model with a call."""
        return {"role": "assistant", "content": content, "tool_calls": [as_message(*call)]}

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
            prefix: the tokens before it, which may have opened its thinking.
            schemas: of the tools that it may call. Without any, calls are not read.
        """
        message = {"role": "assistant", "content": text}
        if not schemas:
            return message, []
        if self.uses_response_template:
            try:
                with self._lock:
                    parsed = self.tokenizer.parse_response(
                        list(ids),
                        prefix=list(prefix),
                        tools=list(schemas),
                    )
                return message | {"content": ""} | parsed, read_message(parsed)
            except Exception:
                # The model may have written anything. What cannot be parsed is text without a call.
                return message, []

        with self._lock:
            before = self.tokenizer.decode(list(prefix[-TOKENS_OF_TAG:]))
        # The prompt may have opened the thinking with which the turn begins.
        thought = "<think>" if before.rstrip().endswith("<think>") else ""
        said = after_thinking(thought + text)
        calls = self._read_calls(said, schemas) or read_tags(said, schemas)
        if calls:
            message["tool_calls"] = [as_message(*call) for call in calls]
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
        """The tokens of an answer and of the beginning of the model's next turn.

        None unless they are fewer than ``room``: the model needs one more for its turn.

        Args:
            messages: results of tools, or of the user.
            last_id: the last token of the turn before. If it ends no turn, because a stop string
                did, the token with which the chat template ends turns is added.
        """
        num_characters = sum(len(message["content"]) for message in messages)
        if num_characters > MAX_CHARACTERS_PER_TOKEN * room:
            return None

        # Control tokens inside a result must become text, so each is encoded in two parts. Those
        # that the template writes around a result stay whole.
        answers = []
        for message in messages:
            content = message["content"].replace(BREAK, "")
            for token in self._controls:
                parts = f"{BREAK}{token[:1]}{BREAK}{token[1:]}{BREAK}"
                content = content.replace(token, parts)
            answers.append({**message, "content": content})

        suffix, end_id = self._suffix(answers)
        ids = [] if last_id in self.eos_ids else [end_id]
        with self._lock:
            for part in suffix.split(BREAK):
                ids += self.tokenizer.encode(part, add_special_tokens=False)
        return ids if len(ids) < room else None

    def _suffix(self, answers: list[Message], num_earlier: int = 0) -> tuple[str, int]:
        """The template's text from the end of a turn, over its answers, to the start of the next.

        The second value is the id of the token that ends the turn. Before it stand ``num_earlier``
        turns with the same answers.
        """
        templates = self.tokenizer.chat_template
        # Some templates drop the thinking of earlier turns. This turn has thinking, so that the
        # comparison below notices.
        thought = THOUGHT if "<think>" in str(templates) else ""
        turn = {"role": "assistant", "content": thought + SAID}
        name = None
        if answers[0]["role"] == "tool":
            if self._writes_calls:
                call = (answers[0].get("name", "f"), {"x": SAID})
                turn = self._turn(thought + SAID, call)
            # Of several templates, prompts with tools are rendered in this one, so results are too.
            if isinstance(templates, dict) and "tool_use" in templates:
                name = "tool_use"

        before = [QUESTION, *[turn, *answers] * num_earlier, turn]
        start = self._render(before, begins_next_turn=False, name=name)
        whole = self._render([*before, *answers], name=name)

        ends = {}
        for eos_id, token in zip(self.eos_ids, self._ends, strict=True):
            position = start.rfind(token, start.rfind(SAID))
            if position >= 0:
                ends[position + len(token)] = eos_id
        if not ends:  # GLM ends a turn by the beginning of the next message
            raise ValueError("it ends no turn with an EOS token")
        end = max(ends)
        if whole[:end] != start[:end]:
            raise ValueError("it changes earlier turns, as Qwen3's drops their thinking")
        return whole[end:], ends[end]
