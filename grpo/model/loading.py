"""Hugging Face folders: from a model's name to a checked policy, and back to a folder; digests of
files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from grpo.algorithm.batch import Problem
from grpo.data.tiny import build_tiny_model
from grpo.model.lora import TRAINED, base_of, read_adapter
from grpo.model.policy import Policy, check_finite, context_limit, reading, store_frozen_in_bf16
from grpo.system import publish

BLOCK = 2**20
BLOCKS = 64
"""Of a larger file than ``BLOCKS`` blocks of ``BLOCK`` bytes, :func:`digest` reads about so many,
evenly spread."""
WEIGHTS = (".safetensors", ".bin")
MODEL_FILES = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt", *WEIGHTS)
REFERENCE = "model.reference"
transformers_logging.disable_progress_bar()  # every rank would show one per weight file


def resolve_model(
    name_or_path: str,
    dataset: str,
    *,
    trust_remote_code: bool = False,
    adapters: bool = False,
) -> str:
    """The folder or Hub id to load from; for ``builtin:tiny`` the tiny model's, which is built if
    it is missing.

    ValueError if transformers knows no model there, or if it is the folder of a LoRA adapter and
    ``adapters`` is False.
    """
    if name_or_path == "builtin:tiny":
        task = "arithmetic"
        if dataset.startswith("builtin:"):
            task = dataset.removeprefix("builtin:")
        return str(build_tiny_model(task))
    path = os.path.expanduser(name_or_path)
    base = base_of(path)
    if base != path and not adapters:
        raise ValueError(
            f"{path} is a LoRA adapter: model.adapter={path} with model.name_or_path={base} continues it, "
            "python -m grpo.merge makes it a model"
        )
    with reading(f"{base} cannot be loaded"):
        AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    return path


def check_context(
    path: str,
    problems: Sequence[Problem],
    max_length: int,
    *,
    key: str = "rollout.max_completion_length",
    trust_remote_code: bool = False,
) -> None:
    """ValueError if the longest prompt and a completion of ``max_length`` (``key``) exceed the
    model's context."""
    config = AutoConfig.from_pretrained(base_of(path), trust_remote_code=trust_remote_code)
    context = context_limit(config)
    longest = max(len(problem.prompt_ids) for problem in problems)
    if context is not None and longest + max_length > context:
        raise ValueError(
            f"{key}={max_length} + the longest prompt of {longest} tokens exceed the context of "
            f"{context} tokens of {path}: use at most {context - longest}"
        )


def load_tokenizer(
    path: str,
    *,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or Hub id, or ValueError. An adapter folder without one has
    that of its model."""
    if not os.path.exists(os.path.join(path, "tokenizer_config.json")):
        path = base_of(path)
    with reading(f"the tokenizer of {path} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    # Without any tokenizer file transformers returns a tokenizer that has special tokens only.
    words = tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
    if not words:
        raise ValueError(
            f"{path} has no tokenizer: put tokenizer.json (or vocab files) beside the model"
        )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def check_reference(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    max_length: int,
    *,
    trust_remote_code: bool = False,
) -> None:
    """ValueError unless ``model.reference`` has the policy's tokens, and a context for prompt and
    completion."""
    other = load_tokenizer(path, trust_remote_code=trust_remote_code)
    if other.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"{REFERENCE}={path} has another vocabulary than the model that is trained"
        )
    check_context(path, problems, max_length, trust_remote_code=trust_remote_code)


def load_policy(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    precision: str = "bf16",
    attn_implementation: str = "sdpa",
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    base_precision: str = "bf16",
) -> Policy:
    """Load a model with fp32 master weights: updates at a learning rate of 1e-6 round away in bf16.

    The folder of a LoRA adapter gives its model with the adapter in it, frozen weights in
    ``base_precision``.

    ValueError if weights do not load, are incomplete or not finite, or if model, tokenizer and
    settings do not fit.
    """
    base = base_of(path)
    model = _load_weights(
        base,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    if torch.device(device).type == "cuda":
        # PyTorch prefers cuDNN's attention on Hopper since 2.11. It makes a new plan for every
        # shape, and shapes hardly repeat here; with a mask its gradients can be NaN
        # (pytorch/pytorch#196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
    if gradient_checkpointing:
        # Renamed in transformers 5.23, where the old name still works and warns.
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
    eos_ids = end_tokens(model, tokenizer)
    if not eos_ids:
        raise ValueError(
            f"{path}: neither tokenizer nor config names an EOS token, so no completion can end"
        )
    vocabulary = len(model.get_input_embeddings().weight)
    if len(tokenizer) > vocabulary:
        raise ValueError(
            f"{path}: the tokenizer has {len(tokenizer)} tokens, the embedding only {vocabulary} rows"
        )
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        pad_id = eos_ids[0]
    policy = Policy(model.to(device), tokenizer, eos_ids, pad_id, device, precision)
    check_finite(model, base)
    if base != path:
        check_base(path, base)
        read_adapter(policy, path, base=base)
        if base_precision == "bf16":
            store_frozen_in_bf16(policy)
    return policy


def _load_weights(path: str, **options: Any) -> PreTrainedModel:
    """The model in fp32; ValueError also if weights are missing, which transformers would draw at
    random."""
    with reading(f"{path} cannot be loaded"):
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            output_loading_info=True,
            **options,
        )
    if report["missing_keys"]:
        missing = min(report["missing_keys"])
        raise ValueError(
            f"{path}: the files lack weights that config.json asks for: {missing} is missing"
        )
    return model


def check_base(adapter: str, base: str) -> None:
    """ValueError if the weights of an adapter's model are not those that a run of this project
    trained it with."""
    state_file = Path(adapter, "trainer", "state.json")
    if not state_file.exists():
        return
    state = json.loads(state_file.read_text(encoding="utf-8"))
    name = state["config"]["model"]["name_or_path"]
    digests = model_digests(name, base, with_weights=True)
    for file, digest_then in state["content"].items():
        is_weights = file.endswith((*WEIGHTS, name))
        if is_weights and digests.get(file, digest_then) != digest_then:
            raise ValueError(
                f"{file} has changed since the adapter {adapter} was trained on it: put the old file back, "
                f"or delete {adapter}/trainer to use the adapter with the new one"
            )


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every EOS id that tokenizer, config or generation config name; nothing else is read from the
    last."""
    ids = set()
    for source in (tokenizer, model.config, model.generation_config):
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, int):
            ids.add(value)
        elif value is not None:
            ids.update(value)
    return tuple(sorted(ids))


def save_weights(model: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a model, or the adapter in peft's model, with the given weights and without a
    tokenizer."""
    if not isinstance(model, PreTrainedModel):
        model.save_pretrained(
            folder,
            state_dict=weights,
            selected_adapters=[TRAINED],
            save_embedding_layers=False,
        )
        return
    # transformers refuses to save some models' own generation config (a temperature without
    # do_sample), which no run uses: it is written beside the model without that check.
    original = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        model.generation_config = original
    original.to_json_file(str(folder / "generation_config.json"))


def write_merged(
    adapter: str | Path,
    output: str | Path,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Write the whole model of an adapter folder, its weights added up in fp32 by peft, and its
    tokenizer.

    The model's own weights are read from its files: those that a run has in memory may be rounded
    to bf16. ``output`` appears when it is complete and on disk. ValueError if it exists, if adapter
    or model cannot be loaded or do not fit, or if the model has changed.
    """
    adapter = str(adapter)
    output = Path(output)
    if output.exists():
        raise ValueError(f"{output} exists: delete it, or choose another folder with --output")
    tokenizer = load_tokenizer(adapter, trust_remote_code=trust_remote_code)
    policy = load_policy(
        adapter,
        tokenizer,
        device=torch.device("cpu"),
        precision="fp32",
        trust_remote_code=trust_remote_code,
    )
    model = policy.adapter.merge_and_unload()
    partial = output.with_name(f".partial-{output.name}")
    shutil.rmtree(partial, ignore_errors=True)
    save_weights(model, model.state_dict(), partial)
    tokenizer.save_pretrained(partial)
    publish(partial, output)


def digest(path: str | Path) -> str:
    """SHA-256 of a file's size and content; above 64 MiB of blocks of 1 MiB, which takes little
    time."""
    size = os.path.getsize(path)
    found = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        if size <= BLOCK * BLOCKS:
            found.update(file.read())
            return found.hexdigest()
        for number in range(BLOCKS):
            file.seek((size - BLOCK) * number // (BLOCKS - 1))
            found.update(file.read(BLOCK))
    return found.hexdigest()


def model_digests(name: str, path: str, *, with_weights: bool) -> dict[str, str]:
    """``name/<file>`` -> digest for each file of a folder; for a model of the Hub ``name`` -> its
    cached commit."""
    digests = {}
    if os.path.isdir(path):
        for file in sorted(Path(path).iterdir()):
            is_weights = file.suffix in WEIGHTS
            if file.suffix in MODEL_FILES and (with_weights or not is_weights):
                digests[f"{name}/{file.name}"] = digest(file)
    else:
        # The file of the newest commit of the main branch.
        cached = huggingface_hub.try_to_load_from_cache(path, "config.json")
        if isinstance(cached, str):
            digests[name] = Path(cached).parent.name
    return digests
