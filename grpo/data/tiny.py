"""The tiny model: a Qwen2 of about a million parameters that is trained in minutes, for
the demo and the tests.

The model is trained on correct demonstrations of a task first, then on demonstrations with mistakes
(``Task.demonstration``). GRPO then starts from a model that can solve the task but often makes
mistakes.

Shapes: ``B`` demonstrations, ``S`` tokens of prompt and response, ``V`` tokens of the vocabulary.
"""

import hashlib
import json
import math
import os
import random
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, pre_tokenizers
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from grpo.algorithm.batch import IGNORE_INDEX, right_pad
from grpo.algorithm.seeding import derive_seed
from grpo.data.tasks import Task, load_task
from grpo.system import signs_of_life

CONTEXT = 1024
"""Context length: the largest number of tokens of a prompt with its completion. It leaves room for
the default of ``rollout.max_completion_length``."""
SEED = 0
"""Seed of weights and demonstrations. It does not depend on the run, so that all runs of a task
start from the same model."""
RECIPE_VERSION = 3
"""Version of the training, as part of the cache key. Increase it with any change to the
demonstrations, the tokenizer or the training below."""

PAD = "<|pad|>"
EOS = "<|im_end|>"
TURN = "<|im_start|>"
TAGS_AND_ROLES = ("<think>", "</think>", "<answer>", "</answer>", "system", "user", "assistant")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """Settings of architecture and training. Together with task and seed, they determine the
    weights."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    # With the usual 0.02, which suits wider models, this model learns slowly at first.
    initializer_range: float = 0.06
    clean_steps: int = 500
    """Number of steps on correct demonstrations. They come first: the model learns the task."""
    noisy_steps: int = 250
    """Number of steps on noisy demonstrations. The model learns the mistakes that GRPO then
    removes."""
    batch_size: int = 32
    learning_rate: float = 2e-3
    warmup_steps: int = 40
    weight_decay: float = 0.01

    @property
    def steps(self) -> int:
        return self.clean_steps + self.noisy_steps


# These recipes give models that are correct often enough for GRPO to find right completions in most
# groups, and wrong often enough to have something to learn.
RECIPES = {
    "arithmetic": Recipe(),
    "countdown": Recipe(clean_steps=1000),
    "calculator": Recipe(
        hidden_size=96, intermediate_size=256, clean_steps=600, noisy_steps=200, batch_size=16
    ),
    "guess_number": Recipe(
        hidden_size=96, intermediate_size=256, clean_steps=800, noisy_steps=150, batch_size=12
    ),
}


def build_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with one token per UTF-8 byte, special token, tag and role.

    Decoding restores every text that is in Unicode's form NFC. Tags and roles are added tokens but
    not special tokens, so ``decode(..., skip_special_tokens=True)`` leaves them in the text.
    """
    # transformers 5 loads the tokenizer of any Qwen2 model with Qwen2Tokenizer, whatever class was
    # saved, so this class is used. A vocabulary of bytes without merges is small enough for a tiny
    # model, and every text can be written in it.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: id for id, symbol in enumerate((PAD, EOS, TURN, *alphabet))}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        padding_side="left",
        model_max_length=CONTEXT,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=None,
        additional_special_tokens=[TURN],
    )
    for text in TAGS_AND_ROLES:
        tokenizer.add_tokens(AddedToken(text, normalized=False))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def is_tiny_tokenizer(tokenizer: Any) -> bool:
    """True for a tokenizer made by :func:`build_tokenizer`, also if it was loaded from a folder."""
    # A checkpoint of the tiny model may have any name, so the vocabularies are compared.
    return tokenizer.get_vocab() == build_tokenizer().get_vocab()


def build_tiny_model(task: str) -> Path:
    """Return the folder of the tiny model for a task. The model is trained if the cache does not
    hold it.

    The folder holds the model (fp32) and its tokenizer. The cache is ``$XDG_CACHE_HOME/grpo``, or
    ``~/.cache/grpo`` if that variable is not set.

    Raises:
        ValueError: there is no task of this name.
    """
    load_task(task)
    recipe = RECIPES[task]
    facts = {
        "task": task,
        "seed": SEED,
        "version": RECIPE_VERSION,
        "torch": torch.__version__,
        **asdict(recipe),
    }
    # The folder's name has a hash of these facts, so a model made from other facts is never taken
    # for this one. Torch's version is one of the facts, because kernels of another version may
    # round differently. The number of threads changes the rounding, too, but is left out: the model
    # that was built first is used with any number of threads.
    text = json.dumps(facts, sort_keys=True)
    key = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo"
    folder = cache / f"tiny-{task}-seed{SEED}-{key}"
    if folder.exists():
        return folder
    print(f"building the tiny model, two to three minutes: {cache} has none ...", file=sys.stderr)

    cache.mkdir(parents=True, exist_ok=True)
    # The folder gets its name only when it is complete. So it is never half written, even if this
    # process is killed or two processes build the model at the same time.
    with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as unfinished:
        tokenizer = build_tokenizer()
        with signs_of_life("building the tiny model"):
            model = warm_start(task, tokenizer, recipe)
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        try:
            os.rename(unfinished, folder)
        except OSError:
            # If the folder exists, another process has finished the same model first.
            if not folder.exists():
                raise
    return folder


def warm_start(task_name: str, tokenizer: Qwen2Tokenizer, recipe: Recipe) -> Qwen2ForCausalLM:
    """Train a new model on demonstrations of training problems. The loss covers response tokens
    only."""
    # Demonstrations and weights have separate random generators, so that the caller's random state
    # is neither read nor changed.
    task = load_task(task_name)
    rng = random.Random(derive_seed(SEED, f"tiny/{task_name}/demonstrations"))
    model = _initial_model(tokenizer, recipe, derive_seed(SEED, f"tiny/{task_name}/weights"))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=recipe.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _learning_rate_factor(step, recipe)
    )
    for step in tqdm(range(recipe.steps), "warm start", unit="step", disable=None, leave=False):
        is_noisy = step >= recipe.clean_steps
        ids_BS, labels_BS = _demonstrations(task, rng, tokenizer, recipe.batch_size, is_noisy)
        # Padding is on the right, and causal attention looks to the left only, so no attention mask
        # is needed.
        logits_BSV = model(input_ids=ids_BS, use_cache=False).logits
        loss = cross_entropy(
            logits_BSV[:, :-1].flatten(0, 1),
            labels_BS[:, 1:].flatten(),
            ignore_index=IGNORE_INDEX,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


def _initial_model(tokenizer: Qwen2Tokenizer, recipe: Recipe, seed: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads,
        max_position_embeddings=CONTEXT,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).float()


def _learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Return the factor of the learning rate: linear warm-up, then cosine decay to zero."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    decay_steps = recipe.steps - recipe.warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - recipe.warmup_steps) / decay_steps))


def _demonstrations(
    task: Task,
    rng: random.Random,
    tokenizer: Qwen2Tokenizer,
    batch_size: int,
    noisy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw demonstrations of training problems. Returns token ids and labels, both ``[B, S]``,
    padded on the right.

    Tokens of the model's messages are their own labels. All other labels are ``IGNORE_INDEX``.
    """
    ids = []
    labels = []
    while len(ids) < batch_size:
        # Evaluation problems are skipped. A model trained on them would start with an accuracy that
        # it does not have on other problems.
        row = task.draw(rng)
        if task.split_of(row) != "train":
            continue
        response = task.demonstration(row, rng, noisy)
        if isinstance(response, str):
            response = [{"role": "assistant", "content": response}]

        row_ids = []
        row_labels = []
        for message in [{"role": "user", "content": row["prompt"]}, *response]:
            is_response = message["role"] == "assistant"
            # The header of the model's message is added to the message before it, and gets no
            # label. In a rollout, too, the prompt ends with this header.
            text = message["content"] + EOS
            if not is_response:
                text = tokenizer.apply_chat_template(
                    [message], tokenize=False, add_generation_prompt=True
                )
                if row_ids:
                    # The template writes a line end after each message, but the model's message
                    # ended with EOS.
                    text = "\n" + text
            message_ids = tokenizer.encode(text, add_special_tokens=False)
            row_ids += message_ids
            row_labels += message_ids if is_response else [IGNORE_INDEX] * len(message_ids)
        ids.append(row_ids)
        labels.append(row_labels)
    return right_pad(ids, tokenizer.pad_token_id), right_pad(labels, IGNORE_INDEX)
