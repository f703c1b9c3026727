"""``classifier:<model>``: a Hugging Face sequence classifier with one label as a reward model.

It runs in the training process on the rank's device, because a worker process would need a CUDA
context of its own.
"""

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from grpo.rewards.answers import completion_text


class ClassifierReward:
    """``fn(prompts, completions) -> [B]`` logits of the model's only label."""

    def __init__(self, name_or_path: str):
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            name_or_path,
            output_loading_info=True,
        )
        untrained = sorted(loaded["missing_keys"])
        if model.config.num_labels != 1 or untrained:
            raise ValueError(
                "a reward model has num_labels=1, and its one logit is the reward; this one has "
                f"{model.config.num_labels} labels, untrained weights: {untrained}"
            )
        # Decoder classifiers read the logit at the last token that is not this pad id, and expect
        # padding on the right.
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        tokenizer.padding_side = "right"
        model.config.pad_token_id = tokenizer.pad_token_id
        self.tokenizer = tokenizer
        self.model = model.requires_grad_(False)

    def __call__(
        self,
        prompts,
        completions,
        *,
        batch_size=16,
        max_length=None,
    ) -> list[float]:
        """Score prompt and completion together: text is concatenated, messages go through the chat
        template, if any.

        ``max_length`` (tokens) truncates; by default nothing is truncated.
        """
        texts = list(map(self._text, prompts, completions))
        # A chat template writes the special tokens into the text, so the tokenizer must not add
        # them again.
        is_chat = prompts and not isinstance(prompts[0], str) and self.tokenizer.chat_template
        rewards = []
        for start in range(0, len(texts), batch_size):
            tokens = self.tokenizer(
                texts[start : start + batch_size],
                return_tensors="pt",
                padding=True,
                truncation=max_length is not None,
                max_length=max_length,
                add_special_tokens=not is_chat,
            )
            with torch.inference_mode():
                logits = self.model(**tokens.to(self.model.device)).logits
            rewards += logits[:, 0].tolist()
        return rewards

    def _text(self, prompt: str | list[dict], completion: str | list[dict]) -> str:
        text = completion_text(completion)
        if isinstance(prompt, str):
            return prompt + text
        # Prompts are rendered in this way for a model without a chat template.
        if not self.tokenizer.chat_template:
            return "\n\n".join(message["content"] for message in prompt) + text
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        return self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
