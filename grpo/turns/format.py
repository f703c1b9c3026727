"""The form of turns in tokens: calls read from what the model wrote, and the tokens of an answer.

Sampled tokens are never encoded again. The tokens of an answer come from the chat template: it is
rendered after a short conversation, and all text up to the end of that conversation's last turn is
cut off.
"""

import re
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo.data.chat import apply_template
from grpo.rewards.answers import after_thinking
from grpo.system import first_line
from grpo.turns.calls import READERS, Call, Schemas, as_message, read_tags

QUESTION = {"role": "user", "content": "x"}
"""The first message of the short conversation."""
THOUGHT = "<think>\nx\n</think>\n\n"
"""The thinking of the model's turn in the short conversation."""
SAID = "said."
"""The model's turn in the short conversation, after its thinking, and each argument of its call."""
BREAK = "\ue000"
"""A character without a meaning, at which the text of an answer is split before it is encoded."""

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
        self._read_calls = read_tags
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
                f"the model's chat template, if any, cannot go on after a message of the role "
                f"{role} ({reason}): set model.chat_template=FILE to one that keeps earlier turns "
                "as they are"
            ) from error

        can_read = not self.finds_form or self._find_form(schemas)
        if self._render([QUESTION], schemas=schemas) != self._render([QUESTION]):
            if not can_read:
                raise ValueError(
                    "the model's chat template shows the tools, and no reader reads the calls that "
                    "it writes: set tools_format=tags, and say in data.system_prompt that a call "
                    'is <tool_call>{"name": .., "arguments": {..}}</tool_call>'
                )
        elif schemas:
            note = "note: the chat template does not show the tools: "
            return [f"{note}describe them in data.system_prompt"]
        return []

    def _find_form(self, schemas: Schemas) -> bool:
        """Find the reader of the calls that the chat template writes. Returns False without one.

        Tags are read in any case.
        """
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
        for schema in schemas:
            function = schema["function"]
            call = (function["name"], dict.fromkeys(function["parameters"]["properties"], SAID))
            try:
                before = render([QUESTION, plain]).rpartition(SAID)[0]
                whole = render([QUESTION, self._turn("", call)])
            except Exception:  # a chat template is a program that comes with the model
                return False

            # A template may begin a turn with a call in another way than one without.
            while not whole.startswith(before):
                before = before[:-1]
            turn = re.split(ends, whole[len(before) :])[0]
            _, calls = self.read(turn, schemas)
            if calls != [call]:
                return False
        return True

    def _turn(self, content: str, call: Call) -> Message:
        """A turn of the model with a call."""
        return {"role": "assistant", "content": content, "tool_calls": [as_message(*call)]}

    def _encode(self, text: str) -> list[int]:
        with self._lock:
            return self.tokenizer.encode(text, add_special_tokens=False)

    def read(self, text: str, schemas: Schemas) -> tuple[Message, list[Call]]:
        """The message of a turn, and its calls.

        Args:
            text: the turn as :meth:`grpo.rollout.Stops.text` gives it.
            schemas: of the tools that it may call. Without any, calls are not read.
        """
        message = {"role": "assistant", "content": text}
        if not schemas:
            return message, []
        said = after_thinking(text)
        calls = self._read_calls(said, schemas) or read_tags(said, schemas)
        if calls:
            message["tool_calls"] = [as_message(*call) for call in calls]
        return message, calls

    def cut(self, text: str, most: int) -> str:
        """The text, or its first ``most`` tokens and three dots."""
        ids = self._encode(text)
        if len(ids) <= most:
            return text
        with self._lock:
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
        # Control tokens inside a result must become text, so each is encoded in two parts. Those
        # that the template writes around a result stay whole.
        answers = []
        for message in messages:
            content = message["content"]
            for token in self._controls:
                content = content.replace(token, BREAK.join(["", token[:1], token[1:], ""]))
            answers.append({**message, "content": content})

        suffix, end_id = self._suffix(answers)
        ids = [] if last_id in self.eos_ids else [end_id]
        for part in suffix.split(BREAK):
            ids += self._encode(part)
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
            # Some templates render a result only behind its call.
            turn = self._turn(thought + SAID, (answers[0]["name"], {"x": SAID}))
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
