"""``classifier:<model>``: a Hugging Face sequence classifier with one label as a reward model.

It runs in the training process on the rank's device, because a worker process would need a CUDA context of its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from grpo.rewards.answers import completion_text


class ClassifierReward:
    """``fn(prompts, completions) -> [B]`` logits of the model's only label."""

    def __init__(self, name_or_path: str):
        self.tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        load_model = AutoModelForSequenceClassification.from_pretrained
        self.model, loaded = load_model(name_or_path, output_loading_info=True)
        if self.model.config.num_labels != 1 or loaded["missing_keys"]:
            found = f"{self.model.config.num_labels} labels, untrained weights: {sorted(loaded['missing_keys'])}"
            raise ValueError(f"a reward model has num_labels=1, and its one logit is the reward; this one has {found}")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        # Decoder classifiers read the logit at the last token that is not this pad id, and expect padding on the right.
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.tokenizer.padding_side = "right"
        self.model.eval().requires_grad_(False)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, batch_size: int = 16, max_length: int | None = None
    ) -> list[float]:
        """Score prompt and completion together: text is concatenated, messages go through the chat template, if any.

        ``max_length`` (tokens) truncates; by default nothing is truncated.
        """
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        # A chat template writes the special tokens into the text, so the tokenizer must not add them again.
        is_chat = bool(prompts) and not isinstance(prompts[0], str) and bool(self.tokenizer.chat_template)
        options = dict(truncation=max_length is not None, max_length=max_length, add_special_tokens=not is_chat)
        rewards: list[float] = []
        for start in range(0, len(texts), batch_size):
            tokens = self.tokenizer(texts[start : start + batch_size], return_tensors="pt", padding=True, **options)
            with torch.inference_mode():
                rewards += self.model(**tokens.to(self.model.device)).logits[:, 0].float().tolist()
        return rewards

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + completion_text(completion)
        if not self.tokenizer.chat_template:  # as prompts are rendered for a model without a chat template
            return "\n\n".join(message["content"] for message in prompt) + completion_text(completion)
        answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
        return self.tokenizer.apply_chat_template([*prompt, *answer], tokenize=False)
