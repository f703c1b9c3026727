"""Turns as text and as tokens: read the calls in a turn, and encode the answer to the turn.

The text of a turn is never encoded again: it might be split into other tokens, which the model did
not sample. Only the answers of tools and environments are encoded. The text of an answer comes from
the chat template. The template renders a short conversation without and with the answer, and the
difference is the text that follows the model's turn.
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
"""First message of the short conversation with which the text of an answer is rendered."""
THINKING = "<think>\nx\n</think>\n\n"
"""Thinking at the start of the model's turn in the short conversation."""
TURN_TEXT = "said."
"""Text of the model's turn in the short conversation, and value of each argument of its call."""
SPLIT_MARK = "\ue000"
"""Character without a meaning. The text of an answer is split at it before the text is encoded."""

Message = dict[str, Any]


class TurnFormat:
    """Reader and writer of turns for one tokenizer. Several threads may call the methods.

    Args:
        eos_ids: every token that ends a turn.
        tools_format: ``"auto"`` or ``"tags"``, as in the configuration.
        template_kwargs: variables of the chat template, the same as for the prompts.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Sequence[int],
        tools_format: str,
        template_kwargs: Mapping[str, Any],
    ):
        self.tokenizer = tokenizer
        self.eos_ids = list(eos_ids)
        self._is_auto = tools_format == "auto"
        self._read_calls = read_tags
        self._eos_tokens = tokenizer.convert_ids_to_tokens(self.eos_ids)
        self._render = partial(
            apply_template,
            tokenizer,
            template_kwargs=template_kwargs,
        )

        # Some tokenizers have added tokens of white space, which are no control tokens.
        added = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        control_tokens = [token for token in added if token.startswith(("<", "["))]
        # Longest first: one control token may be a prefix of another.
        self._control_tokens = sorted(control_tokens, key=len, reverse=True)
        # Tokenizers written in Rust raise if two threads use them at the same time.
        self._lock = threading.Lock()

    def check(self, *, uses_tools: bool, schemas: Schemas) -> str:
        """Check the chat template, and choose the reader of calls. Returns a note for the user, or
        an empty text.

        Raises:
            ValueError: if the template cannot render the turns of the run. Also if it changes
                earlier turns when an answer follows, since sampled tokens cannot change. Also if
                it shows the tools, and no reader can read the calls that it writes.
        """
        role = "tool" if uses_tools else "user"
        # A turn may have several calls.
        num_answers = 1 + uses_tools
        try:
            # A template may render answers to the first turn in another way than to later turns.
            for num_earlier in (0, 1):
                for content in ("x", ""):  # a tool may return an empty text
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

        can_read = not self._is_auto or self._find_reader(schemas)
        with_tools = self._render([QUESTION], schemas=schemas)
        if with_tools != self._render([QUESTION]):
            # The model would write calls in the form that the template shows, and no call would be
            # read.
            if not can_read:
                raise ValueError(
                    "the model's chat template shows the tools, and no reader reads the calls that "
                    "it writes: set tools_format=tags, and say in data.system_prompt that a call "
                    'is <tool_call>{"name": .., "arguments": {..}}</tool_call>'
                )
        elif uses_tools:
            return (
                "note: the chat template does not show the tools, and data.system_prompt and "
                "data.few_shot lack some of the line `tools`: name all there, or in the rows (a "
                "method that is no tool has a name that begins with _)"
                if schemas
                else "warning: the model can call nothing, and has one turn: the environment has "
                "no public method besides reset and get_reward"
            )
        return ""

    def _find_reader(self, schemas: Schemas) -> bool:
        """Find a reader that reads the chat template's calls. Returns False if no reader does."""
        for reader in READERS:
            self._read_calls = reader
            if self._reads_template(schemas):
                return True
        # Calls in tags are read in any case, since the system prompt may ask for tags.
        self._read_calls = read_tags
        return False

    def _reads_template(self, schemas: Schemas) -> bool:
        """True if the reader reads a call of each tool back from the text of the chat template."""
        eos_pattern = "|".join(map(re.escape, self._eos_tokens))
        plain_turn = {"role": "assistant", "content": TURN_TEXT}
        render = partial(self._render, schemas=schemas, begins_next_turn=False)
        for schema in schemas:
            function = schema["function"]
            arguments = dict.fromkeys(function["parameters"]["properties"], TURN_TEXT)
            call = (function["name"], arguments)
            try:
                before_turn, _, _ = render([QUESTION, plain_turn]).rpartition(TURN_TEXT)
                with_call = render([QUESTION, self._turn("", call)])
            except Exception:  # a chat template is a program that comes with the model
                return False

            # A template may begin a turn with a call in another way than a turn without a call. So
            # the turn begins where the two texts differ.
            while not with_call.startswith(before_turn):
                before_turn = before_turn[:-1]
            turn = with_call.removeprefix(before_turn)
            text, *_ = re.split(eos_pattern, turn)
            _, calls = self.read(text, schemas)
            if calls != [call]:
                return False
        return True

    def _turn(self, content: str, call: Call) -> Message:
        """Return a message of the model that has a text and one tool call."""
        tool_calls = [as_message(*call)]
        return {"role": "assistant", "content": content, "tool_calls": tool_calls}

    def _encode(self, text: str) -> list[int]:
        with self._lock:
            return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def read(self, text: str, schemas: Schemas) -> tuple[Message, list[Call]]:
        """Return the message of a turn, and the tool calls in the turn.

        Args:
            text: the text of the turn, from :meth:`grpo.rollout.Stops.text`.
            schemas: schemas of the tools that the turn may call. Without tools, no calls are read.
        """
        message = {"role": "assistant", "content": text}
        if not schemas:
            return message, []
        # A call that the model only thinks about is not meant to be made.
        answer = after_thinking(text)
        calls = self._read_calls(answer, schemas) or read_tags(answer, schemas)
        if calls:
            message["tool_calls"] = [as_message(*call) for call in calls]
        return message, calls

    def truncate(self, text: str, max_tokens: int) -> str:
        """Return a text. If it has more than ``max_tokens`` tokens, cut it and add three dots."""
        ids = self._encode(text)
        if len(ids) <= max_tokens:
            return text
        with self._lock:
            return self.tokenizer.decode(ids[:max_tokens]) + " ..."

    def answer(
        self,
        messages: Sequence[Message],
        last_id: int,
        room: int,
    ) -> list[int] | None:
        """Return the tokens of an answer, and of the text that begins the model's next turn.

        Return None if these tokens would leave no room for a token of the next turn.

        Args:
            messages: results of tools, or a message of the user.
            last_id: the last token of the turn that is answered. If it is no EOS token, the result
                begins with the EOS token with which the chat template ends turns.
            room: number of tokens that the completion may still have.
        """
        # A control token in a result must become plain text, or a tool could end the turn and begin
        # another. So the text of the control token is encoded in two parts. Control tokens that the
        # template writes around a result stay control tokens.
        answers = []
        for message in messages:
            content = message["content"]
            for token in self._control_tokens:
                parts = ["", token[:1], token[1:], ""]
                content = content.replace(token, SPLIT_MARK.join(parts))
            answers.append({**message, "content": content})

        suffix, end_id = self._suffix(answers)
        ids = [] if last_id in self.eos_ids else [end_id]
        for part in suffix.split(SPLIT_MARK):
            ids += self._encode(part)
        if len(ids) >= room:
            return None
        return ids

    def _suffix(self, answers: list[Message], num_earlier: int = 0) -> tuple[str, int]:
        """Return the text that the chat template writes after a turn, and the turn's EOS token.

        The text contains the answers, and the start of the next turn. The EOS token is an id.

        Args:
            num_earlier: number of turns before the turn, each with the same answers.

        Raises:
            ValueError: if the template ends no turn with an EOS token, or changes earlier turns.
        """
        templates = self.tokenizer.chat_template
        # Some templates drop the thinking of earlier turns. This turn has thinking, so that the
        # comparison below detects such a template.
        text = TURN_TEXT
        if "<think>" in str(templates):
            text = THINKING + TURN_TEXT
        turn = {"role": "assistant", "content": text}
        template_name = None
        if answers[0]["role"] == "tool":
            # Some templates render a result only after the call that it answers.
            turn = self._turn(text, (answers[0]["name"], {"x": TURN_TEXT}))
            # A tokenizer may have several templates. This one renders prompts with tools.
            if isinstance(templates, dict) and "tool_use" in templates:
                template_name = "tool_use"

        messages = [QUESTION, *[turn, *answers] * num_earlier, turn]
        before = self._render(messages, begins_next_turn=False, name=template_name)
        after = self._render([*messages, *answers], name=template_name)

        # Some of the model's EOS tokens may end other things than turns, such as documents. The
        # last EOS token after the turn's text is the token that ends turns.
        eos_at_end = {}
        text_start = before.rfind(TURN_TEXT)
        for eos_id, token in zip(self.eos_ids, self._eos_tokens, strict=True):
            position = before.rfind(token, text_start)
            if position >= 0:
                eos_at_end[position + len(token)] = eos_id
        if not eos_at_end:  # GLM ends a turn by the beginning of the next message
            raise ValueError("it ends no turn with an EOS token")
        end = max(eos_at_end)
        if after[:end] != before[:end]:
            raise ValueError("it changes earlier turns, as Qwen3's drops their thinking")
        return after[end:], eos_at_end[end]
