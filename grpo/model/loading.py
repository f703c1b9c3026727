"""From a model's name to a policy: find the model, load tokenizer and weights, and check that a run can work with them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from grpo.batch import Problem
from grpo.hub import hub_answers
from grpo.model.fp32_head import use_fp32_head
from grpo.model.lora import base_of, is_adapter, read_adapter
from grpo.model.policy import Policy, context_limit
from grpo.model.randomness import turn_randomness_off
from grpo.system import first_line
from grpo.tasks.tiny import build_tiny_model

transformers_logging.disable_progress_bar()  # every rank would show one per weight file


REFERENCE = "model.reference"
"""The key that names another reference model, for messages."""


def resolve_model(
    name_or_path: str,
    dataset: str,
    *,
    trust_remote_code: bool = False,
    setting: str = "model.name_or_path",
    adapters: bool = False,
) -> str:
    """The folder or Hub id to load from. For ``builtin:tiny``: the cached folder of the tiny model, which is built if it is missing.

    ValueError, which begins with ``setting``, if the folder or Hub id holds no model that transformers can load, or if it is the folder of a
    LoRA adapter and ``adapters`` is False.
    """
    if name_or_path == "builtin:tiny":
        return _build_tiny_model(dataset)
    name_or_path = os.path.expanduser(name_or_path)
    given = f"{setting}={name_or_path}"
    if name_or_path.startswith("builtin:"):
        raise ValueError(f"{given}: the only built-in model is builtin:tiny")
    if is_adapter(name_or_path):
        base = base_of(name_or_path, setting)
        if not adapters:
            merge = "python -m grpo.merge makes it a whole model"
            train = f"model.adapter={name_or_path} with model.name_or_path={base} continues it, " * (
                setting != REFERENCE
            )
            raise ValueError(f"{given} is a LoRA adapter of {base}: {train}{merge}")
        resolve_model(base, dataset, trust_remote_code=trust_remote_code, setting=f"{given}: its model")
        return name_or_path
    if os.path.isdir(name_or_path) and not os.path.exists(os.path.join(name_or_path, "config.json")):
        inside = ", ".join(sorted(os.listdir(name_or_path))[:5]) or "nothing"
        raise ValueError(f"{given} is not a model folder: it has no config.json (it has {inside})")
    if os.path.isfile(name_or_path):
        raise ValueError(f"{given} is a file: give the folder that holds config.json")
    looks_local = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if looks_local and not os.path.exists(name_or_path):
        raise ValueError(f"{given} does not exist")
    is_offline = not os.path.exists(name_or_path) and not hub_answers()
    try:
        AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises errors of many types for a broken folder
        reason = f"cannot be loaded: {first_line(error)}"
        if is_offline:
            reason = "is no local folder, the Hub cannot be reached, and its cache has no copy of that name"
        raise ValueError(f"{given} {reason}") from None
    return name_or_path


def _build_tiny_model(dataset: str) -> str:
    task = dataset.removeprefix("builtin:") if dataset.startswith("builtin:") else "arithmetic"
    with tqdm(desc="warm start", unit="step", disable=None, leave=False) as bar:

        def show(done: int, total: int, loss: float) -> None:
            bar.total = total
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update(1)

        return str(build_tiny_model(task, seed=0, on_progress=show))


def check_context(
    path: str,
    problems: Sequence[Problem],
    max_length: int,
    *,
    key: str = "rollout.max_completion_length",
    trust_remote_code: bool = False,
) -> None:
    """Raise a ValueError, before weights are loaded, if a prompt and a completion of ``max_length`` tokens exceed the model's context.

    The message names ``key``, the setting that ``max_length`` comes from.
    """
    config = AutoConfig.from_pretrained(base_of(path), trust_remote_code=trust_remote_code)
    context, what = context_limit(config)
    longest = max(len(problem.prompt_ids) for problem in problems)
    if context is not None and longest + max_length > context:
        fits = f"at most {context - longest}" if context > longest else f"data.max_prompt_length below {context}"
        raise ValueError(
            f"{key}={max_length} + the longest prompt of {longest} tokens exceed {what} of {context}: use {fits}"
        )


def load_tokenizer(
    path: str, *, trust_remote_code: bool = False, setting: str = "model.name_or_path"
) -> PreTrainedTokenizerBase:
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

    It needs the same tokens with the same ids, as a KL compares the log-probs of token ids, and a context for prompt and completion.
    """
    own = tokenizer.get_vocab()
    other = load_tokenizer(path, trust_remote_code=trust_remote_code, setting=REFERENCE).get_vocab()
    differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
    if differing:
        token = differing[0]
        raise ValueError(
            f"{REFERENCE}={path} has another vocabulary than the model that is trained ({len(other)} tokens and {len(own)}, "
            f"{len(differing)} differ; {token!r} is {other.get(token)} and {own.get(token)}): take a reference with the same tokenizer"
        )
    try:
        check_context(path, problems, max_length, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise ValueError(f"{REFERENCE}={path}: {error}") from None


def load_policy(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    precision: str = "bf16",
    attn_implementation: str = "sdpa",
    gradient_checkpointing: bool = False,
    disable_dropout: bool = True,
    fp32_head: bool = False,
    trust_remote_code: bool = False,
    base_precision: str = "bf16",
    setting: str = "model.name_or_path",
) -> Policy:
    """Load a model with fp32 master weights, whatever dtype the checkpoint has: updates at a learning rate of 1e-6 round away in bf16.

    The folder of a LoRA adapter gives its model with the adapter in it; ``base_precision`` is then that of ``lora.base_precision``.

    ValueError, which begins with ``setting``, if the weights do not load or are incomplete, if tokenizer and model do not fit each other, or
    if neither names an EOS token. ValueError also if ``fp32_head`` is asked for and the model's head cannot be computed in fp32.
    """
    options = dict(attn_implementation=attn_implementation, trust_remote_code=trust_remote_code)
    base = base_of(path, setting)
    model = load_weights(base, setting, dtype=torch.float32, **options)
    settings = dict(gradient_checkpointing=gradient_checkpointing, fp32_head=fp32_head)
    policy = make_policy(path, model, tokenizer, device=device, precision=precision, setting=setting, **settings)
    model.to(device)
    check_finite(base, model, setting)
    if disable_dropout:
        turn_randomness_off(policy)
    if base != path:
        read_adapter(policy, path, setting=setting, base=base, base_precision=base_precision)
    return policy


def make_policy(
    path: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    precision: str,
    gradient_checkpointing: bool,
    fp32_head: bool,
    setting: str,
) -> Policy:
    """The policy of a model whose weights may still be on the meta device or on the CPU; the errors of :func:`load_policy` about the two."""
    if device.type == "cuda":
        # PyTorch prefers cuDNN's attention on Hopper since 2.11. cuDNN makes a new plan for every shape, and shapes hardly repeat here;
        # with a mask its gradients can be NaN (pytorch/pytorch#196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
    if fp32_head and precision == "bf16":  # in fp32 every head computes in fp32, and nn.Linear is faster in rollouts
        use_fp32_head(model)
    if gradient_checkpointing:
        # Renamed in transformers 5.23, where the old name still works and warns.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    eos_ids = end_tokens(model, tokenizer)
    problem, vocabulary = None, model.get_input_embeddings().weight.shape[0]
    if not eos_ids:
        problem = "neither tokenizer nor config names an EOS token, so no completion can end"
    elif len(tokenizer) > vocabulary:
        problem = f"the tokenizer has {len(tokenizer)} tokens, the embedding only {vocabulary} rows"
    if problem:
        raise ValueError(f"{setting}={path}: {problem}")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    return Policy(model, tokenizer, eos_ids, pad_id, device, precision)


def load_weights(path: str, setting: str, **options: Any) -> PreTrainedModel:
    """The model; ValueError if weights are missing or have other shapes. transformers would initialise these at random and continue."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)  # it prints a table of the errors raised below
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, ignore_mismatched_sizes=True, output_loading_info=True, **options
        )
    except Exception as error:  # as in resolve_model; SafetensorError and others have no common base
        if "scaled_dot_product_attention" in str(error):
            kind = f"{str(error).split()[0]} has no attention of the name sdpa"
            raise ValueError(f"{setting}={path}: {kind}: set model.attn_implementation=eager") from None
        raise ValueError(f"{setting}={path} cannot be loaded: {first_line(error)}") from None
    finally:
        transformers_logging.set_verbosity(verbosity)
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if mismatched:
        name, found, expected = mismatched[0]
        problem = f"{len(mismatched)} weights are not of the shape that config.json asks for, such as {name}"
        raise ValueError(f"{setting}={path}: {problem}: {list(found)}, expected {list(expected)}")
    if missing:
        problem = f"the file lacks {len(missing)} weights that config.json asks for, such as {missing[0]}"
        raise ValueError(f"{setting}={path}: {problem}")
    return model


def check_finite(
    path: str, model: torch.nn.Module, setting: str = "model.name_or_path", *, recurse: bool = True
) -> None:
    """ValueError if a weight is NaN or infinite. Buffers may hold infinities, as causal masks do."""
    # aminmax takes a tenth of the time of isfinite() on CPU, and is NaN where a value is.
    extremes = {name: torch.stack(p.aminmax()) for name, p in model.named_parameters(recurse=recurse) if p.numel()}
    bad = [name for name, pair in extremes.items() if not pair.isfinite().all()]
    bad += [name for name, buffer in model.named_buffers(recurse=recurse) if buffer.isnan().any()]
    if bad:
        names = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        raise ValueError(f"{setting}={path}: its weights contain NaN or infinity: {names}; take another checkpoint")


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every EOS id that tokenizer, config or generation config name. Nothing else is read from ``generation_config.json``."""
    ids = set()
    for source in (tokenizer, model.config, getattr(model, "generation_config", None)):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return tuple(sorted(ids))
