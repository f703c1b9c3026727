"""Load and check models from Hugging Face folders, save weights, and compute digests of files."""

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
from grpo.model.lora import TRAINED_ADAPTER, base_of, read_adapter
from grpo.model.policy import (
    Policy,
    as_value_error,
    check_finite,
    context_limit,
    store_frozen_in_bf16,
)
from grpo.system import publish

BLOCK_BYTES = 2**20
NUM_BLOCKS = 64
"""Size and number of the blocks that :func:`file_digest` reads from a large file. A smaller file is
read as a whole."""
WEIGHT_SUFFIXES = (".safetensors", ".bin")
MODEL_SUFFIXES = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt", *WEIGHT_SUFFIXES)
"""Suffixes of the files that determine what a model and its tokenizer compute."""
REFERENCE_KEY = "model.reference"
"""Key of the reference model in the configuration, for error messages."""

# Every rank would show a bar for each file of weights.
transformers_logging.disable_progress_bar()


def resolve_model(
    name_or_path: str,
    dataset: str,
    *,
    trust_remote_code: bool = False,
    adapters: bool = False,
) -> str:
    """Return the folder or Hub id to load a model from. ``builtin:tiny`` is built if it is not in
    the cache.

    Args:
        dataset: value of ``data.dataset``. It names the task that ``builtin:tiny`` is built for.
        adapters: True allows the folder of a LoRA adapter.

    Raises:
        ValueError: if transformers finds no configuration of the model, or if the folder holds
            an adapter and ``adapters`` is False.
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
            f"{path} is a LoRA adapter: model.adapter={path} with model.name_or_path={base} "
            "continues it, python -m grpo.merge makes it a model"
        )
    # The Hub's ids have one slash. For other names its message would be about ids, not folders.
    if base.count("/") > 1 and not os.path.exists(base):
        raise ValueError(f"{base}: there is no such folder")
    # A wrong name ends the run here, before weights are downloaded.
    with as_value_error(f"{base} cannot be loaded"):
        AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    return path


def check_context(
    path: str,
    problems: Sequence[Problem],
    max_length: int,
    *,
    key: str = "rollout.max_completion_length",
    trust_remote_code: bool,
) -> None:
    """Raise a ValueError if the longest prompt and a completion of ``max_length`` tokens together
    exceed the model's context.

    ``key`` is the setting that holds ``max_length``, for the message.
    """
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
    """Return the tokenizer of a model folder or Hub id. If an adapter folder has no tokenizer, the
    tokenizer of the base model is loaded.

    Args:
        chat_template: replaces the tokenizer's chat template. Default: no change.

    Raises:
        ValueError: if there is no tokenizer, or if it cannot be loaded.
    """
    if not os.path.exists(os.path.join(path, "tokenizer_config.json")):
        path = base_of(path)
    with as_value_error(f"the tokenizer of {path} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    # Without any tokenizer file transformers raises no error: it returns a tokenizer with special
    # tokens alone.
    ordinary_tokens = tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
    if not ordinary_tokens:
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
    trust_remote_code: bool,
) -> None:
    """Raise a ValueError unless the model at ``path`` can be the reference.

    The reference needs the policy's vocabulary, and a context that holds the longest prompt and a
    completion of ``max_length`` tokens.
    """
    ref_tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    # The reference scores the policy's token ids, which must mean the same tokens in both models.
    if ref_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"{REFERENCE_KEY}={path} has another vocabulary than the model that is trained"
        )
    check_context(path, problems, max_length, trust_remote_code=trust_remote_code)


def load_policy(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    precision: str,
    attn_implementation: str = "sdpa",
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    base_precision: str = "bf16",
) -> Policy:
    """Load a model with fp32 master weights, and check that the model fits its tokenizer.

    If ``path`` is the folder of a LoRA adapter, the base model is loaded and the adapter put into
    it. With ``base_precision="bf16"``, and a run in bf16, frozen linear layers are then stored in
    bf16 (:func:`grpo.model.policy.store_frozen_in_bf16`).

    Raises:
        ValueError: if weights cannot be loaded, are missing or are not finite, if tokenizer and
            model name no EOS token, or if the embedding has fewer rows than the tokenizer has
            tokens.
    """
    base = base_of(path)
    with as_value_error(f"{base} cannot be loaded"):
        model, report = AutoModelForCausalLM.from_pretrained(
            base,
            # Updates at a learning rate of 1e-6 round away in bf16.
            dtype=torch.float32,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    # transformers gives missing weights random values, with no more than a warning.
    if report["missing_keys"]:
        raise ValueError(
            f"{base}: the files lack weights that config.json asks for: "
            f"{min(report['missing_keys'])} is missing"
        )

    if torch.device(device).type == "cuda":
        # PyTorch prefers cuDNN's attention on Hopper since 2.11. It makes a new plan for every
        # shape, and shapes hardly repeat here; with a mask its gradients can be NaN
        # (pytorch/pytorch#196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
    if gradient_checkpointing:
        # transformers 5.23 renamed this method. The old name still works there, with a warning.
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        # Reentrant checkpointing would need inputs that require a gradient. With LoRA the
        # embeddings are frozen, and their outputs require none.
        enable({"use_reentrant": False})

    eos_ids = end_tokens(model, tokenizer)
    if not eos_ids:
        raise ValueError(
            f"{path}: neither tokenizer nor config names an EOS token, so no completion can end"
        )
    # More rows than tokens are usual, because the size of the matrix is rounded up.
    vocabulary = len(model.get_input_embeddings().weight)
    if len(tokenizer) > vocabulary:
        raise ValueError(
            f"{path}: the tokenizer has {len(tokenizer)} tokens, "
            f"the embedding only {vocabulary} rows"
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


def check_base(adapter: str, base: str) -> None:
    """Raise a ValueError if the weights of the base model have changed since the adapter was
    trained.

    The adapter's folder records digests of these weights if it is a checkpoint of this trainer.
    Otherwise nothing is checked.

    Args:
        adapter: folder of the adapter.
        base: folder or Hub id of the base model.
    """
    state_file = Path(adapter, "trainer", "state.json")
    # Only a checkpoint of this trainer records digests of the base model.
    if not state_file.exists():
        return
    state = json.loads(state_file.read_bytes())
    name = state["config"]["model"]["name_or_path"]
    digests = model_digests(name, base)
    for file, recorded in state["content"].items():
        # The record also has files of the tokenizer and the user's functions. A model of the Hub
        # has one entry: its name, with its commit.
        is_weights = file.endswith((*WEIGHT_SUFFIXES, name))
        # A file that is gone is not compared: the weights may lie in other files now.
        if is_weights and digests.get(file, recorded) != recorded:
            raise ValueError(
                f"{file} has changed since the adapter {adapter} was trained on it: "
                "put the old file back, "
                f"or delete {adapter}/trainer to use the adapter with the new one"
            )


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every EOS id that the tokenizer, the config or the generation config names, sorted."""
    ids = set()
    # Nothing else is read from the generation config: its temperature or penalties would silently
    # change what is sampled.
    for source in (tokenizer, model.config, model.generation_config):
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, int):
            ids.add(value)
        elif value is not None:
            ids.update(value)
    return tuple(sorted(ids))


def save_weights(model: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write ``weights`` and the model's configuration into a folder as ``save_pretrained`` does,
    without a tokenizer.

    If ``model`` is peft's wrapper of a model, only the trained adapter is written.
    """
    if not isinstance(model, PreTrainedModel):
        model.save_pretrained(
            folder,
            state_dict=weights,
            selected_adapters=[TRAINED_ADAPTER],
            # By default peft asks the Hub whether the vocabulary has grown.
            save_embedding_layers=False,
        )
        return
    # transformers refuses to save the generation config of some models (a temperature without
    # do_sample). No run uses this config, so it is written beside the model without a check.
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
    trust_remote_code: bool,
) -> None:
    """Merge an adapter into its base model in fp32, and write the merged model and its tokenizer to
    the folder ``output``.

    The folder gets its name once all of its files are complete and on disk.

    Raises:
        ValueError: if ``output`` exists, if adapter and base model cannot be loaded or do not fit
            each other, or if the base model has changed since the adapter was trained.
    """
    adapter = str(adapter)
    output = Path(output)
    if output.exists():
        raise ValueError(f"{output} exists: delete it, or choose another folder with --output")
    tokenizer = load_tokenizer(adapter, trust_remote_code=trust_remote_code)
    # The files of the base model hold its weights in full. A run may have rounded its copy to bf16.
    policy = load_policy(
        adapter,
        tokenizer,
        device=torch.device("cpu"),
        precision="fp32",
        trust_remote_code=trust_remote_code,
    )
    model = policy.adapter.merge_and_unload()
    # A merge that is killed leaves a folder of this name, which the next merge deletes.
    partial = output.with_name(f".partial-{output.name}")
    shutil.rmtree(partial, ignore_errors=True)
    save_weights(model, model.state_dict(), partial)
    tokenizer.save_pretrained(partial)
    publish(partial, output)


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file's size and content. Only 64 blocks of 1 MiB are read from a file above 64
    MiB.

    Every start of a run compares the weights with their digests, and reading large files as a whole
    would take minutes.
    """
    size = os.path.getsize(path)
    sha = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        if size <= BLOCK_BYTES * NUM_BLOCKS:
            sha.update(file.read())
        else:
            # Evenly spread, from the first block of the file to the last.
            for number in range(NUM_BLOCKS):
                file.seek((size - BLOCK_BYTES) * number // (NUM_BLOCKS - 1))
                sha.update(file.read(BLOCK_BYTES))
    return sha.hexdigest()


def model_digests(name: str, path: str) -> dict[str, str]:
    """Digests of a model's files, by ``name/<file>``. A model of the Hub has one entry, from
    ``name`` to the commit in the cache.

    Args:
        name: the model's name in the configuration.
        path: folder or Hub id that the name stands for.
    """
    digests = {}
    if os.path.isdir(path):
        for file in sorted(Path(path).iterdir()):
            if file.suffix in MODEL_SUFFIXES:
                digests[f"{name}/{file.name}"] = file_digest(file)
    else:
        # The cached file of the newest commit lies in a folder with the name of that commit.
        cached = huggingface_hub.try_to_load_from_cache(path, "config.json")
        if isinstance(cached, str):
            digests[name] = Path(cached).parent.name
    return digests
