"""A model that calls tools without having learned it: each call is one of its tokens."""

import json
from itertools import groupby
from pathlib import Path


def call(name: str, **arguments) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def save_speaking_model(folder: Path, phrases: list[str]) -> Path:
    """A random Qwen2 for which each phrase is one token, and which samples only phrases and EOS."""
    import torch
    from conftest import save_random_model
    from tokenizers import AddedToken
    from transformers import Qwen2ForCausalLM
    from trl_tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.add_tokens(
        [AddedToken(phrase, normalized=False, special=False) for phrase in phrases]
    )
    save_random_model(folder, vocab_size=len(tokenizer), max_position_embeddings=4096)
    tokenizer.save_pretrained(folder)
    model = Qwen2ForCausalLM.from_pretrained(folder)
    said = tokenizer.convert_tokens_to_ids([*phrases, tokenizer.eos_token])
    with torch.no_grad():
        # The first number of the hidden state is large for every token. It lowers all logits but
        # those of the phrases and of EOS.
        model.model.embed_tokens.weight[:, 0] = 20.0
        model.lm_head.weight *= 0.5
        model.lm_head.weight[:, 0] = -10.0
        model.lm_head.weight[said, 0] = 0.0
        model.lm_head.weight[tokenizer.eos_token_id, 0] = 0.2
    model.save_pretrained(folder)
    return folder


def check_tokens(row: dict, tokenizer) -> None:
    """The tokens of a saved completion are those of its messages, and those of results alone are
    masked."""
    messages = json.loads(row["messages"])
    expected = []
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        text = ""
        if is_result:
            results = "".join(
                f"\n<tool_response>\n{message['content']}\n</tool_response>" for message in group
            )
            text = f"\n<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n"
        expected.append((not is_result, text))
    mask = row["sampled"] or [True] * len(row["token_ids"])
    found = []
    for is_sampled, pairs in groupby(
        zip(row["token_ids"], mask, strict=True), lambda pair: pair[1]
    ):
        text = tokenizer.decode([token for token, _ in pairs])
        found.append((is_sampled, "" if is_sampled else text))
    assert found == expected
