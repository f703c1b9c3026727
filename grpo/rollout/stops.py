"""The ends of a completion: EOS tokens and stop strings (``rollout.stop``)."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from grpo.model import Policy


class Stops:
    """The ends of a rollout's completions: tokens, found by their ids, and strings, found in the text."""

    def __init__(self, policy: Policy, stop: Sequence[str]):
        self.tokenizer = policy.tokenizer
        special_ids, self.strings = split_stop(self.tokenizer, stop)
        self.ids = [*policy.eos_ids, *special_ids]
        self.span = 4 * max(map(len, self.strings), default=0) + 4
        """Tokens at the end of a text that are searched: n characters span at most 4n byte-level tokens."""
        # With most tokenizers, a string in the text of some tokens is also in the text of these and their neighbours.
        # Then one search in all new tokens can show that none of them ends a stop string.
        cleans_up = getattr(self.tokenizer, "clean_up_tokenization_spaces", False)
        self.neighbours_keep_text = not cleans_up and "\ufffd" not in "".join(stop)

    def first_end(self, tokens: Sequence[int], num_searched: int) -> int | None:
        """The least n > ``num_searched`` so that the last ``span`` of ``tokens[:n]`` contain a stop string, or None."""
        if self.neighbours_keep_text and not self._has_stop(tokens[max(num_searched + 1 - self.span, 0) :]):
            return None
        ends = range(num_searched + 1, len(tokens) + 1)
        return next((n for n in ends if self._has_stop(tokens[max(n - self.span, 0) : n])), None)

    def _has_stop(self, tokens: Sequence[int]) -> bool:
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return any(string in text for string in self.strings)


def split_stop(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> tuple[list[int], list[str]]:
    """The ids of the stop strings that are special tokens, which no text contains, and the other strings.

    ValueError for a string with a special token beside other text.
    """
    tokens = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()} if stop else ()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    special = {token: id for token, id in ids.items() if not tokenizer.decode([id], skip_special_tokens=True)}
    strings = [string for string in stop if string not in special]
    if mixed := [(string, token) for string in strings for token in special if token in string]:
        string, token = mixed[0]
        raise ValueError(
            f"rollout.stop: {string!r} holds the special token {token!r} beside other text: give {token!r} alone"
        )
    return [special[string] for string in stop if string in special], strings
