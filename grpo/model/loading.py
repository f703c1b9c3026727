"""Hugging Face folders: from a model's name to a checked policy, and back to a folder; digests of files."""

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
from grpo.model.lora import TRAINED, base_of, is_adapter, load_peft, read_adapter, store_frozen_in_bf16
from grpo.model.policy import Policy, context_limit
from grpo.model.randomness import turn_randomness_off
from grpo.system import first_line, open_regular, publish

BLOCK, BLOCKS = 2**20, 64
"""Of a file of more than ``BLOCKS`` blocks of ``BLOCK`` bytes, so many are read: first, last and evenly spread ones."""
WEIGHTS = (".safetensors", ".bin")
MODEL_FILES = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt", *WEIGHTS)
transformers_logging.disable_progress_bar()  # every rank would show one per weight file


NAME, REFERENCE = "model.name_or_path", "model.reference"
"""The keys that name the model and another reference, for messages."""


def resolve_model(
    name_or_path: str, dataset: str, *, trust_remote_code: bool = False, setting: str = NAME, adapters: bool = False
) -> str:
    """The folder or Hub id to load from; for ``builtin:tiny`` the tiny model's, which is built if it is missing.

    ValueError, which begins with ``setting``, if transformers can load no model from it, or if it is the folder of a
    LoRA adapter and ``adapters`` is False.
    """
    if name_or_path == "builtin:tiny":
        return str(
            build_tiny_model(dataset.removeprefix("builtin:") if dataset.startswith("builtin:") else "arithmetic")
        )
    path = os.path.expanduser(name_or_path)
    given = f"{setting}={path}"
    if is_adapter(path):
        base = base_of(path, setting)
        if not adapters:
            train = f"model.adapter={path} with model.name_or_path={base} continues it, " * (setting != REFERENCE)
            raise ValueError(f"{given} is a LoRA adapter of {base}: {train}python -m grpo.merge makes it a whole model")
        resolve_model(base, dataset, trust_remote_code=trust_remote_code, setting=f"{given}: its model")
        return path
    is_folder = path.startswith((".", "/", "builtin:")) or path.count("/") > 1
    if is_folder and not os.path.exists(path):
        raise ValueError(f"{given}: no such folder (the only built-in model is builtin:tiny)")
    try:
        AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises errors of many types for a broken folder
        raise ValueError(f"{given} cannot be loaded: {first_line(error)}") from None
    return path


def check_context(
    path: str,
    problems: Sequence[Problem],
    max_length: int,
    *,
    key: str = "rollout.max_completion_length",
    trust_remote_code: bool = False,
) -> None:
    """ValueError if the longest prompt and a completion of ``max_length`` tokens exceed the model's context.

    It comes before weights are loaded, and names ``key``, the setting that ``max_length`` comes from.
    """
    context, what = context_limit(AutoConfig.from_pretrained(base_of(path), trust_remote_code=trust_remote_code))
    longest = max(len(problem.prompt_ids) for problem in problems)
    if context is not None and longest + max_length > context:
        fits = f"at most {context - longest}" if context > longest else f"data.max_prompt_length below {context}"
        exceed = f"the longest prompt of {longest} tokens exceed {what} of {context}"
        raise ValueError(f"{key}={max_length} + {exceed}: use {fits}")


def load_tokenizer(path: str, *, trust_remote_code: bool = False, setting: str = NAME) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or Hub id; ValueError, which begins with ``setting``, if there is none.

    An adapter folder without one has that of its model.
    """
    if not os.path.exists(os.path.join(path, "tokenizer_config.json")):
        path = base_of(path, setting)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # as in resolve_model
        raise ValueError(f"{setting}={path} has no tokenizer that loads: {first_line(error)}") from None
    # Without any tokenizer file transformers returns a tokenizer that has special tokens only.
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        needed = "put tokenizer.json (or vocab files) beside the model"
        raise ValueError(f"{setting}={path} has no tokenizer: {needed}")
    return tokenizer


def check_reference(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    max_length: int,
    *,
    trust_remote_code: bool = False,
) -> None:
    """ValueError, before weights are loaded, unless ``model.reference`` can score the policy's completions.

    It needs the same tokens with the same ids, and a context for prompt and completion.
    """
    own = tokenizer.get_vocab()
    other = load_tokenizer(path, trust_remote_code=trust_remote_code, setting=REFERENCE).get_vocab()
    if differing := sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token)):
        token = differing[0]
        raise ValueError(
            f"{REFERENCE}={path} has another vocabulary than the model that is trained ({len(differing)} differ: "
            f"{token!r} is {other.get(token)} and {own.get(token)}): take a reference with the same tokenizer"
        )
    key = f"{REFERENCE}={path}: rollout.max_completion_length"
    check_context(path, problems, max_length, key=key, trust_remote_code=trust_remote_code)


def load_policy(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    precision: str = "bf16",
    attn_implementation: str = "sdpa",
    gradient_checkpointing: bool = False,
    disable_dropout: bool = True,
    trust_remote_code: bool = False,
    base_precision: str = "bf16",
    setting: str = NAME,
) -> Policy:
    """Load a model with fp32 master weights: updates at a learning rate of 1e-6 round away in bf16.

    The folder of a LoRA adapter gives its model with the adapter in it, frozen weights in ``base_precision``.

    ValueError, which begins with ``setting``, if weights do not load, are incomplete or not finite, if tokenizer and
    model do not fit each other, if neither names an EOS token, or if the head cannot be computed in fp32.
    """
    options = dict(attn_implementation=attn_implementation, trust_remote_code=trust_remote_code)
    base = base_of(path, setting)
    model = load_weights(base, setting, dtype=torch.float32, **options)
    without_cudnn_attention(device)
    if gradient_checkpointing:
        # Renamed in transformers 5.23, where the old name still works and warns.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    eos_ids, vocabulary = end_tokens(model, tokenizer), model.get_input_embeddings().weight.shape[0]
    if not eos_ids:
        raise ValueError(f"{setting}={path}: neither tokenizer nor config names an EOS token, so no completion can end")
    if len(tokenizer) > vocabulary:
        rows = f"the tokenizer has {len(tokenizer)} tokens, the embedding only {vocabulary} rows"
        raise ValueError(f"{setting}={path}: {rows}")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    policy = Policy(model.to(device), tokenizer, eos_ids, pad_id, device, precision)
    check_finite(base, model, setting)
    if disable_dropout:
        turn_randomness_off(policy)
    if base != path:
        check_base(path, base, setting)
        read_adapter(policy, path, setting=setting, base=base)
        if base_precision == "bf16":
            store_frozen_in_bf16(policy)
    return policy


def without_cudnn_attention(device: torch.device) -> None:
    """Keep PyTorch from cuDNN's attention, which it prefers on Hopper since 2.11.

    cuDNN makes a new plan for every shape, and shapes hardly repeat here; with a mask its gradients can be NaN
    (pytorch/pytorch#196678).
    """
    if torch.device(device).type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def check_base(adapter: str, base: str, setting: str) -> None:
    """ValueError if the weights of an adapter's model are not those that a run of this project trained it with."""
    file = Path(adapter, "trainer", "state.json")
    state = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    if state is None:
        return
    name = state["config"]["model"]["name_or_path"]
    found = model_digests(name, base, with_weights=True)
    for file, digest_then in state["content"].items():
        if file.endswith((*WEIGHTS, name)) and found.get(file, digest_then) != digest_then:
            raise ValueError(
                f"{setting}={adapter}: {file} has changed since this adapter was trained on it: put the old file "
                f"back, or delete {adapter}/trainer to use the adapter with the new one"
            )


def load_weights(path: str, setting: str, **options: Any) -> PreTrainedModel:
    """The model; ValueError if weights are missing or misshapen, which transformers would draw at random."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)  # it prints a table of the errors raised below
    try:
        options |= dict(ignore_mismatched_sizes=True, output_loading_info=True)
        model, report = AutoModelForCausalLM.from_pretrained(path, **options)
    except Exception as error:  # as in resolve_model; SafetensorError and others have no common base
        raise ValueError(f"{setting}={path}: cannot be loaded: {first_line(error)}") from None
    finally:
        transformers_logging.set_verbosity(verbosity)
    wrong = dict.fromkeys(report["missing_keys"], "is missing")
    wrong |= {name: f"is {list(found)}, not {list(asked)}" for name, found, asked in report["mismatched_keys"]}
    if wrong:
        name, problem = min(wrong.items())
        raise ValueError(f"{setting}={path}: config.json asks for other weights than the files have: {name} {problem}")
    return model


def check_finite(path: str, model: torch.nn.Module, setting: str = NAME) -> None:
    """ValueError if a weight is NaN or infinite. Buffers may hold infinities, as causal masks do."""
    # aminmax takes a tenth of the time of isfinite() on CPU, and is NaN where a value is.
    extremes = {name: torch.stack(p.aminmax()) for name, p in model.named_parameters() if p.numel()}
    bad = [name for name, pair in extremes.items() if not pair.isfinite().all()]
    bad += [name for name, buffer in model.named_buffers() if buffer.isnan().any()]
    if bad:
        names = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        raise ValueError(f"{setting}={path}: its weights contain NaN or infinity: {names}; take another checkpoint")


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every EOS id that tokenizer, config or generation config name; nothing else is read from the last."""
    ids = set()
    for source in (tokenizer, model.config, getattr(model, "generation_config", None)):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return tuple(sorted(ids))


def save_weights(model: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a model, or the adapter in peft's model, with the given weights and without a tokenizer."""
    if not isinstance(model, PreTrainedModel):
        model.save_pretrained(folder, state_dict=weights, selected_adapters=[TRAINED], save_embedding_layers=False)
        return
    # transformers refuses to save a generation config with inconsistent values (a temperature without do_sample), which
    # no run uses: the original is written without that check.
    original = getattr(model, "generation_config", None)
    model.generation_config = None if original is None else GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        model.generation_config = original
    if original is not None:
        original.to_json_file(str(folder / "generation_config.json"))


def write_merged(adapter: str | Path, output: str | Path, *, trust_remote_code: bool = False) -> None:
    """Write the whole model of an adapter folder, its weights added up in fp32 by peft, and its tokenizer.

    The model's own weights are read from its files: those that a run has in memory may be rounded to bf16. ``output``
    appears when it is complete and on disk.

    Raises:
        ValueError: if ``output`` exists, or if adapter or model cannot be loaded, do not fit, or the model has changed.
        OSError: if it cannot be written.
    """
    adapter, output, options = str(adapter), Path(output), dict(trust_remote_code=trust_remote_code)
    if output.exists():
        raise ValueError(f"{output} exists: delete it, or choose another folder with --output")
    base, setting = base_of(adapter, "adapter"), f"adapter={adapter}: its model"
    model = load_weights(resolve_model(base, "", setting=setting, **options), setting, dtype=torch.float32, **options)
    check_base(adapter, base, "adapter")
    try:
        model = load_peft().PeftModel.from_pretrained(model, adapter).merge_and_unload()
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"adapter={adapter} does not fit its model: {first_line(error)}") from None
    partial = output.with_name(f".partial-{output.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save_weights(model, model.state_dict(), partial)
        load_tokenizer(adapter, setting="adapter", **options).save_pretrained(partial)
        publish(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def digest(path: str | Path) -> str:
    """SHA-256 of a file's size and content; above 64 MiB of 64 blocks of 1 MiB, which takes little time."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        found = hashlib.sha256(str(size).encode())
        if size <= BLOCK * BLOCKS:
            found.update(file.read())
        else:
            for number in range(BLOCKS):
                file.seek((size - BLOCK) * number // (BLOCKS - 1))
                found.update(file.read(BLOCK))
    return found.hexdigest()


def model_digests(name: str, path: str, *, with_weights: bool) -> dict[str, str]:
    """``name/<file>`` -> digest for each file of a folder; for a model of the Hub ``name`` -> its cached commit."""
    if not os.path.isdir(path):
        cached = huggingface_hub.try_to_load_from_cache(path, "config.json")  # of the newest commit of the main branch
        return {name: Path(cached).parent.name} if isinstance(cached, str) else {}
    suffixes = [suffix for suffix in MODEL_FILES if with_weights or suffix not in WEIGHTS]
    return {f"{name}/{file.name}": digest(file) for file in sorted(Path(path).iterdir()) if file.suffix in suffixes}
