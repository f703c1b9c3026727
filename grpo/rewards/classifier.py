"""``classifier:<model>``: a Hugging Face sequence classifier with one label as a reward model.

It runs in the training process on the rank's device, because a worker process would need a CUDA context of its own.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from grpo.rewards.answers import completion_text
from grpo.system import first_line


class ClassifierReward:
    """``fn(prompts, completions) -> [B]`` logits of the model's only label.

    Raises:
        ValueError: if the model cannot be loaded, has another number of labels, or has neither a pad nor an EOS token.
    """

    def __init__(self, name_or_path: str):
        reward = f"reward 'classifier:{name_or_path}'"
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name_or_path)
            load_model = AutoModelForSequenceClassification.from_pretrained
            self.model, loaded = load_model(name_or_path, output_loading_info=True)
        except Exception as error:  # transformers raises many types of exceptions for broken files
            raise ValueError(f"{reward} cannot be loaded: {first_line(error)}") from error
        num_labels, missing = self.model.config.num_labels, sorted(loaded["missing_keys"])
        if num_labels != 1:
            raise ValueError(
                f"{reward} has {num_labels} labels; a reward model has num_labels=1 and its one logit is the reward"
            )
        if missing:
            raise ValueError(f"{reward} is no trained classifier: it has no {', '.join(missing)}")
        if self.tokenizer.pad_token_id is None:
            if self.tokenizer.eos_token_id is None:
                raise ValueError(f"the tokenizer of 'classifier:{name_or_path}' has neither a pad nor an EOS token")
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # Decoder classifiers read the logit at the last token that is not this pad id, and expect padding on the right.
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.tokenizer.padding_side = "right"
        self.model.eval().requires_grad_(False)

    def to(self, device: torch.device | str) -> Self:
        self.model.to(device)
        return self

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, batch_size: int = 16, max_length: int | None = None
    ) -> list[float]:
        """Score prompt and completion together: text is concatenated, messages go through the chat template, if any.

        ``max_length`` (tokens) truncates; by default nothing is truncated.
        """
        for name, value in {"batch_size": batch_size, "max_length": 1 if max_length is None else max_length}.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
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
