"""Train on GSM8K with TRL 1.16.0. The script follows the "GRPO demo" of Will Brown (2025).

docs/from_trl.md ports the script to this project.
"""

import re

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

SYSTEM_PROMPT = """Write your reasoning and then the final number, exactly in this form:
<reasoning>
your reasoning
</reasoning>
<answer>
the number
</answer>
"""


def load_gsm8k(path, **options):
    """Return rows with a conversation as ``prompt``, and the number after #### as ``answer``."""

    def convert(row):
        messages = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": row["question"]},
        ]
        answer = row["answer"].split("####")[1].strip()
        return {"prompt": messages, "answer": answer}

    return load_dataset(path, split="train", **options).map(convert)


def response(completion):
    """Return the text of a completion, which is a list of one message."""
    return completion[0]["content"]


def extract_answer(text):
    """Return the text in the last <answer>."""
    _, _, after_tag = text.rpartition("<answer>")
    answer, _, _ = after_tag.partition("</answer>")
    return answer.strip()


def plain_number(text):
    """Return a number as the model is expected to write it: 1234 for $1,234."""
    return text.replace(",", "").replace("$", "")


def correctness_reward_func(prompts, completions, answer, **kwargs):
    """Score 2 for the right answer, else 0."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        is_right = extract_answer(response(completion)) == plain_number(right)
        rewards.append(2.0 if is_right else 0.0)
    return rewards


def int_reward_func(completions, **kwargs):
    """Score 0.5 for an answer of digits only, else 0."""
    rewards = []
    for completion in completions:
        answer = extract_answer(response(completion))
        rewards.append(0.5 if answer.isdigit() else 0.0)
    return rewards


def strict_format_reward_func(completions, **kwargs):
    """Score 0.5 for the form of the system prompt with each tag on its own line, else 0."""
    pattern = r"<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n?"
    rewards = []
    for completion in completions:
        match = re.fullmatch(pattern, response(completion), re.DOTALL)
        rewards.append(0.5 if match else 0.0)
    return rewards


def soft_format_reward_func(completions, **kwargs):
    """Score 0.5 if the response begins with both pairs of tags, in any spacing, else 0."""
    pattern = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"
    rewards = []
    for completion in completions:
        match = re.match(pattern, response(completion), re.DOTALL)
        rewards.append(0.5 if match else 0.0)
    return rewards


def xmlcount_reward_func(completions, **kwargs):
    """Score 0.125 for each tag that occurs once, less 0.001 for each character after </answer>."""
    tags = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
    rewards = []
    for completion in completions:
        text = response(completion)
        num_single_tags = sum(text.count(tag) == 1 for tag in tags)
        _, _, after_answer = text.partition("</answer>")
        num_trailing = len(after_answer.strip())
        rewards.append(0.125 * num_single_tags - 0.001 * num_trailing)
    return rewards


def main(model="Qwen/Qwen2.5-1.5B-Instruct", dataset=None, **changes):
    settings = dict(
        output_dir="runs/gsm8k_trl",
        learning_rate=5e-6,
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.1,
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        max_grad_norm=0.1,
        logging_steps=1,
        bf16=True,
        # TRL counts completions, not prompts: 16 x 4 are 4 prompts of 16 completions per update.
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
        num_generations=16,
        max_completion_length=786,
        num_train_epochs=1,
        save_steps=100,
        # These were TRL's defaults at the time of the demo, and have changed since.
        beta=0.04,
        loss_type="grpo",
        use_bias_correction_kl=False,
        report_to="wandb",
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[
            xmlcount_reward_func,
            soft_format_reward_func,
            strict_format_reward_func,
            int_reward_func,
            correctness_reward_func,
        ],
        args=GRPOConfig(**settings | changes),
        train_dataset=dataset or load_gsm8k("openai/gsm8k", name="main"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
