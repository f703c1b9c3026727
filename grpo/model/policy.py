"""Policy, reference and tokenizer."""

from __future__ import annotations

import contextlib
import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from grpo.batch import Problem
from grpo.hub import hub_answers
from grpo.rollout.cuda_graphs import Graphs
from grpo.rollout.llama_decoder import Decoder, agrees
from grpo.rollout.weights import Product, rollout_weights
from grpo.tasks.tiny import build_tiny_model

transformers_logging.disable_progress_bar()  # one bar a shard, from every rank


@dataclass
class Policy:
    """A causal language model with what sampling and scoring need to know about it."""

    model: nn.Module
    """The bare model, fp32 master weights; DDP wraps a scorer around it, never this attribute."""
    tokenizer: Any
    eos_ids: tuple[int, ...]
    """Every id that ends a completion: the union of what tokenizer, config and generation config name."""
    pad_id: int
    """Fills unused places; never used to tell padding from tokens."""
    device: torch.device
    precision: str
    """``bf16`` (autocast) or ``fp32``."""
    decoder: Decoder | None = field(default=None, init=False, repr=False)
    """While sampling, for models that have one: decodes a token per row without the model's own modules."""
    fast_decode: bool = True
    """Whether decode steps are written out, with weights copied once a rollout; else transformers' modules compute them."""
    capture: bool = False
    """Whether decode steps are captured in CUDA graphs, where the device and the model allow it."""
    graphs: Graphs | None = field(default=None, init=False, repr=False)
    say: Callable[[str], None] = field(default=print, init=False, repr=False)
    _has_decoder: bool | None = field(default=None, init=False, repr=False)
    _kept: dict[nn.Linear, Product] = field(default_factory=dict, init=False, repr=False)

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Eval mode, no grad, autocast; the mode before is restored whatever happens.

        In train mode gradient checkpointing silently drops the KV cache, and dropout would change the policy.
        """
        was_training = self.model.training
        self.model.eval()
        assert not any(module.training for module in self.model.modules())
        try:
            if self._has_decoder is None:
                self._has_decoder = self.fast_decode and agrees(self.model)
            captures = self.capture and self._has_decoder and self.device.type == "cuda"
            kept = self._kept if captures else None
            copies = (
                rollout_weights(self.model, self.precision, kept) if self.fast_decode else contextlib.nullcontext({})
            )
            with torch.no_grad(), self.autocast(), copies as products:
                if self._has_decoder:
                    self.decoder = Decoder(getattr(self.model, self.model.base_model_prefix), products)
                if captures and self.graphs is None:
                    self.graphs = Graphs(self.decoder, self.model.get_output_embeddings(), self.eos_ids, self.device)
                yield
        finally:
            self.decoder = None
            if self.graphs is not None:
                self.graphs.tidy()
            self.model.train(was_training)

    def without_graphs(self, reason: str) -> None:
        """From now on decode steps are launched operation by operation."""
        if self.graphs is not None:
            self.graphs.let_go()
        self.capture, self.graphs, self._kept = False, None, {}
        self.say(f"note: decode steps are not captured in CUDA graphs ({reason})")

    @property
    def context_length(self) -> int | None:
        """Tokens the model's positions reach, None if it does not say."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)


def resolve_model(name_or_path: str, dataset: str, *, trust_remote_code: bool = False) -> str:
    """``builtin:tiny`` to the folder of the (cached) tiny model, anything else unchanged after a look at its config.

    Raises:
        ValueError: if the folder or Hub id holds no model that transformers can load.
    """
    if name_or_path.startswith("builtin:"):
        if name_or_path != "builtin:tiny":
            raise ValueError(f"model.name_or_path={name_or_path}: the only built-in model is builtin:tiny")
        task = dataset.removeprefix("builtin:") if dataset.startswith("builtin:") else "arithmetic"
        with tqdm(desc="warm start", unit="step", disable=None, leave=False) as bar:

            def show(done: int, total: int, loss: float) -> None:
                bar.total = total
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update(1)

            return str(build_tiny_model(task, seed=0, on_progress=show))
    name_or_path = os.path.expanduser(name_or_path)
    if os.path.isdir(name_or_path) and not os.path.exists(os.path.join(name_or_path, "config.json")):
        inside = ", ".join(sorted(os.listdir(name_or_path))[:5]) or "nothing"
        raise ValueError(
            f"model.name_or_path={name_or_path} is not a model folder: it has no config.json (it has {inside})"
        )
    if os.path.isfile(name_or_path):
        raise ValueError(f"model.name_or_path={name_or_path} is a file: give the folder that holds config.json")
    looks_local = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if looks_local and not os.path.exists(name_or_path):
        raise ValueError(f"model.name_or_path={name_or_path} does not exist")
    is_away = not os.path.exists(name_or_path) and not hub_answers()
    try:
        AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except Exception as error:  # a model folder is others' text, and can break transformers in every way it knows
        reason = f"cannot be loaded: {_first_line(error)}"
        if is_away:
            reason = "is no folder here, the Hub cannot be reached, and its cache has no copy of that name"
        raise ValueError(f"model.name_or_path={name_or_path} {reason}") from None
    return name_or_path


def context_length(path: str, *, trust_remote_code: bool = False) -> int | None:
    """Tokens the model's positions reach, before its weights are loaded; None if its config does not say."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_context(path: str, problems: Sequence[Problem], max_length: int, *, trust_remote_code: bool = False) -> None:
    """Refuse prompts and completions (of ``max_length`` tokens) that do not fit the model's positions.

    Raises:
        ValueError: naming what would.
    """
    context = context_length(path, trust_remote_code=trust_remote_code)
    longest = max(len(problem.prompt_ids) for problem in problems)
    if context is not None and longest + max_length > context:
        raise ValueError(
            f"rollout.max_completion_length={max_length} + the longest prompt of {longest} tokens exceed the model's "
            f"context of {context}: use "
            + (f"at most {context - longest}" if context > longest else f"data.max_prompt_length below {context}")
        )


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model folder or Hub id.

    Raises:
        ValueError: if there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # as in resolve_model
        raise ValueError(f"model.name_or_path={path} has no tokenizer that loads: {_first_line(error)}") from None
    if (
        not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
    ):  # what transformers makes of no files at all
        raise ValueError(
            f"model.name_or_path={path} has no tokenizer: put tokenizer.json (or vocab files) beside the model"
        )
    return tokenizer


def load_policy(
    path: str,
    tokenizer: Any,
    *,
    device: torch.device,
    precision: str = "bf16",
    attn_implementation: str = "sdpa",
    gradient_checkpointing: bool = False,
    disable_dropout: bool = True,
    fp32_head: bool = False,
    trust_remote_code: bool = False,
) -> Policy:
    """Load fp32 master weights, whatever the checkpoint's dtype: bf16 parameters round away updates at 1e-6.

    Raises:
        ValueError: if the weights do not load or are not all there, nothing says which token ends a completion, or the head is none
            that ``fp32_head`` can be had for.
    """
    if device.type == "cuda":
        # First choice on Hopper since torch 2.11. It plans anew for every shape, which packed tiles hardly repeat, and with a mask its
        # gradients can be NaN (pytorch/pytorch#196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)  # its report of the mistakes below is a table
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # as in resolve_model; SafetensorError and others have no common base
        raise ValueError(f"model.name_or_path={path} cannot be loaded: {_first_line(error)}") from None
    finally:
        transformers_logging.set_verbosity(verbosity)
    _check_weights(path, loaded)
    if disable_dropout:
        turn_dropout_off(model)
    if fp32_head and precision == "bf16":  # in fp32 it would only keep the rollout from its faster product
        use_fp32_head(model)
    if gradient_checkpointing:
        # Renamed in transformers 5.23, where the old name still works and warns.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    model.to(device)
    eos_ids = end_tokens(model, tokenizer)
    if not eos_ids:
        raise ValueError(
            f"model.name_or_path={path}: neither tokenizer nor config names an EOS token, so no completion can end"
        )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > vocabulary:
        raise ValueError(
            f"model.name_or_path={path}: the tokenizer has {len(tokenizer)} tokens, the embedding only {vocabulary} rows"
        )
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    return Policy(model, tokenizer, eos_ids, pad_id, device, precision)


class FP32Head(nn.Linear):
    """Hidden states to logits in fp32 also under autocast. bf16 keeps 8 bits: logits of 20 are off by up to 0.06."""

    computes_in = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight, self.bias)


def use_fp32_head(model: nn.Module) -> None:
    """The same weights, wherever they are tied to, under another ``forward``.

    Raises:
        ValueError: if the model's head is not a plain ``nn.Linear``.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(
            f"model.fp32_head=true needs a head that is a plain nn.Linear, and it is {type(head).__name__}"
        )
    head.__class__ = FP32Head


def _check_weights(path: str, loaded: dict[str, Any]) -> None:
    """transformers fills weights that are missing or of another shape with noise, and goes on."""
    missing, mismatched = sorted(loaded["missing_keys"]), sorted(loaded["mismatched_keys"])
    if mismatched:
        name, found, expected = mismatched[0]
        raise ValueError(
            f"model.name_or_path={path}: {len(mismatched)} weights are not of the shape that config.json asks for, such as "
            f"{name}: {list(found)}, expected {list(expected)}"
        )
    if missing:
        raise ValueError(
            f"model.name_or_path={path}: the file lacks {len(missing)} weights that config.json asks for, such as {missing[0]}"
        )


def end_tokens(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Every EOS id that tokenizer, config or generation config name. Only these are read from ``generation_config.json``."""
    named = [tokenizer.eos_token_id, getattr(model.config, "eos_token_id", None)]
    named.append(getattr(getattr(model, "generation_config", None), "eos_token_id", None))
    ids = set()
    for value in named:
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return tuple(sorted(ids))


def turn_dropout_off(model: nn.Module) -> None:
    """Every dropout probability to 0: modules, and the attributes that attention functions read."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop")):
                setattr(module, name, 0.0)


def num_parameters(model: nn.Module) -> int:
    """All of them, shared ones once."""
    return sum(p.numel() for p in model.parameters())


def make_reference(model: nn.Module) -> nn.Module:
    """A frozen copy, in eval mode, of the same weights and under the same autocast: the KL at step 0 is exactly 0."""
    reference = copy.deepcopy(model).eval()
    return reference.requires_grad_(False)


@torch.no_grad()
def cast_reference_to_bf16(reference: nn.Module, policy: Policy) -> bool:
    """Keep weights of linear layers in bf16, as autocast would make them at every use: the same bits from half the memory.

    Weights that something else reads too (an embedding that is the head) stay in fp32.

    Returns:
        Whether it is so; False: the model computes something else then, and is left as it was.
    """
    if policy.precision != "bf16":
        return False
    readers = Counter(id(p) for module in reference.modules() for p in module.parameters(recurse=False))
    layers = [m for m in reference.modules() if type(m) is nn.Linear and readers[id(m.weight)] == 1]
    ids = torch.arange(16, device=policy.device)[None, :] % reference.get_input_embeddings().weight.shape[0]
    before = [(p, p.data) for layer in layers for p in layer.parameters(recurse=False)]
    with policy.autocast():
        expected = reference(input_ids=ids, use_cache=False).logits
        for parameter, _ in before:
            parameter.data = parameter.data.bfloat16()
        try:
            if torch.equal(reference(input_ids=ids, use_cache=False).logits, expected):
                return True
        except Exception:  # others' code, that multiplies with fp32 weights by itself
            pass
    for parameter, value in before:
        parameter.data = value
    return False


@torch.no_grad()
def sync_reference(reference: nn.Module, model: nn.Module, alpha: float) -> None:
    """``ref = alpha * policy + (1 - alpha) * ref``, in place."""
    for old, new in zip(reference.parameters(), model.parameters(), strict=True):
        old.lerp_(new, alpha)


def _first_line(error: BaseException) -> str:
    """The message up to the end of its first line, or of the line that a colon announces."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in (lines[:2] if lines[0].endswith(":") else lines[:1]))
