"""EOS tokens and stop strings (``rollout.stop``), which end completions, and completions' texts."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from grpo.data.chat import special_tokens, tag_tokens
from grpo.model import Policy


class Stops:
    """Tokens and strings that end a turn. A completion without tools is one turn."""

    def __init__(self, policy: Policy, stop: Sequence[str]):
        self.tokenizer = policy.tokenizer
        special_ids, self.strings = split_stop(self.tokenizer, stop)
        self.ids = [*policy.eos_ids, *special_ids]
        """Ids of the tokens that end a turn."""

        # A tag such as </answer> stays in the text, as a stop string does.
        tags = tag_tokens(self.tokenizer) if special_ids else set()
        self.ids_without_text = {*policy.eos_ids, policy.pad_id}
        for id in special_ids:
            token = self.tokenizer.convert_ids_to_tokens(id)
            if token not in tags:
                self.ids_without_text.add(id)

        longest = max(map(len, self.strings), default=0)
        self.search_length = 4 * longest + 4
        """Number of tokens at the end of a turn that are searched for a stop string. With a
        byte-level vocabulary, n characters have at most 4n tokens. 4 more tokens hold a character
        that the search cuts in two."""

        # The text of a sequence usually contains the text of each part of the sequence. Then one
        # search in the text of all tokens can show that no part contains a stop string. Exceptions
        # are tokenizers that remove spaces, and a stop string with U+FFFD. This is the text of half
        # a character, and is gone as soon as the next token completes the character.
        cleans_up = getattr(self.tokenizer, "clean_up_tokenization_spaces", False)
        self.text_contains_parts = not cleans_up and "\ufffd" not in "".join(stop)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion or turn.

        EOS, padding and stop tokens are left out. Stop tokens that are tags, such as ``</answer>``,
        and other special tokens stay.
        """
        ids = [id for id in tokens if id not in self.ids_without_text]
        return self.tokenizer.decode(ids)

    def has_ended(self, turn: Sequence[int]) -> bool:
        """Return True if a turn ends with its last token.

        ``turn`` may be the last ``search_length`` tokens of the turn alone.
        """
        if turn[-1] in self.ids:
            return True
        if not self.strings:  # decoding the text would take long, at every token
            return False
        return self._contains_stop(turn)

    def first_end(self, tokens: Sequence[int]) -> int | None:
        """Length of the shortest prefix of ``tokens`` that contains a stop string, or None.

        The vLLM engine calls this, because a server returns all tokens of a turn at once.
        """
        if self.text_contains_parts and not self._contains_stop(tokens):
            return None
        # The search is token by token, as in the built-in engine. So a turn ends at the same token
        # in all engines.
        for end in range(1, len(tokens) + 1):
            first = max(end - self.search_length, 0)
            if self._contains_stop(tokens[first:end]):
                return end
        return None

    def _contains_stop(self, tokens: Sequence[int]) -> bool:
        """True if the text without special tokens, which vLLM searches too, has a stop string."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return any(string in text for string in self.strings)


def split_stop(
    tokenizer: PreTrainedTokenizerBase,
    stop: Sequence[str],
) -> tuple[list[int], list[str]]:
    """Return the ids of the stop strings that are special tokens, and the other stop strings.

    A special token must be found by id, because the searched text is without special tokens.

    ValueError for a string that contains a special token and other text.
    """
    ids = []
    strings = []
    special = special_tokens(tokenizer) if stop else set()
    for string in stop:
        if string in special:
            ids.append(tokenizer.convert_tokens_to_ids(string))
            continue
        strings.append(string)
        for token in sorted(special):
            if token in string:
                raise ValueError(
                    f"rollout.stop: {string!r} holds "
                    f"the special token {token!r} beside other text: "
                    f"give {token!r} alone"
                )
    return ids, strings
