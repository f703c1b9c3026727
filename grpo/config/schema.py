"""The sections of the configuration, except ``algorithm``, ``eval`` and ``logging``: keys with type, default and meaning, and checks within a section.

The text under a key is what ``--help`` prints.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

Folder = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path in which ``~`` is the home folder: the shell replaces it at the start of a word only, not after ``=``."""


class Section(BaseModel):
    """Frozen. An unknown key, NaN and infinity are errors. The docstring under a key is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, values: Any) -> Any:
        """Read ``none``, as ``--help`` and the documents write it, like YAML's ``null``, where a key can be unset."""
        if not isinstance(values, dict):
            return values
        optional = {name for name, field in cls.model_fields.items() if type(None) in get_args(field.annotation)}
        return {key: None if key in optional and value == "none" else value for key, value in values.items()}


class ModelConfig(Section):
    name_or_path: str = "builtin:tiny"
    """Hub id, local folder, or builtin:tiny (1M parameters, trained on the built-in task at first use, then cached)."""
    adapter: Folder | None = None
    """Folder of a LoRA adapter that training continues (adapter_config.json, adapter_model.safetensors); name_or_path is its model. Its
    rank, alpha and layers count, and the reference of the KL is the model with this adapter."""
    attn_implementation: str = "sdpa"
    """Attention implementation, as transformers names it: sdpa, eager, flash_attention_2, ..."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    reference: str | None = None
    """Hub id or local folder of the reference model of the KL, if it is not the model that training starts from. Its tokenizer must have the
    same tokens. No effect with algorithm.beta=0."""
    disable_dropout: bool = True
    """Set every dropout, layerdrop and router noise to 0, so that tokens are scored by the same policy that sampled them; checked at start."""
    fp32_head: bool = False
    """Compute logits in fp32 under bf16 autocast: log-probs of sampling and of scoring agree better; slower."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class DataConfig(Section):
    dataset: str = "builtin:arithmetic"
    """Hub id, .jsonl/.json/.csv/.parquet file, folder saved by datasets, builtin:arithmetic, builtin:countdown, or
    reasoning_gym:<task>."""
    config_name: str | None = None
    """Configuration of a Hub dataset (gsm8k has main and socratic)."""
    train_split: str = "train"
    """Split to train on; slices such as train[:90%] work."""
    eval_split: str | None = None
    """Split to evaluate on; slices work. none: no evaluation, except for built-in tasks, which have an evaluation split."""
    eval_dataset: str | None = None
    """Dataset that has the evaluation split, if it is not `dataset` (a second file, for example)."""
    prompt_column: str = "prompt"
    """Column with the question: text, or a list of chat messages."""
    answer_column: str | None = None
    """Column with the reference answer; rewards get it as `answer`."""
    answer_pattern: str | None = None
    """Regular expression (of the package regex, which extends re) that finds the answer in the answer column: its first group, or the
    whole match if it has no group."""
    system_prompt: str | None = None
    """System message before each prompt: the text, or the name of a .txt or .md file. none: the one of the dataset row, or of the
    built-in task."""
    prompt_template: str | None = None
    """Text that the model gets instead of its chat template, with {prompt} where the question goes (for base models)."""
    question_template: str | None = None
    """Text of the user message, with {prompt} where the question goes ("Question: {prompt}"), inside the chat template. {NAME} stands for the
    column NAME of the row; a list has one item per line. Questions of few_shot are written in the same way."""
    few_shot: list[dict[str, str]] = []
    """Worked examples before each question, as chat turns: a list of {prompt, completion}."""
    conversational: Literal["auto", True, False] = "auto"
    """Form in which rewards get prompts and completions. true: lists of messages. false: text (of a conversation, its last message). auto:
    messages if the row is a conversation, or if system_prompt or few_shot is used with a chat template; else text."""
    max_prompt_length: int = Field(512, ge=1)
    """Longest prompt in tokens. Problems with longer prompts are left out and counted; nothing is truncated."""
    max_train_samples: int | None = Field(None, ge=1)
    """Use only the first N training problems; none: all."""
    max_eval_samples: int | None = Field(None, ge=1)
    """Load only the first N evaluation problems; none: all."""

    @field_validator("system_prompt")
    @classmethod
    def _read_file(cls, value: str | None) -> str | None:
        """Read here, so that the configuration of a run holds the text and not a file that may change."""
        if not value or not value.endswith((".txt", ".md")) or "\n" in value:
            return value
        try:
            return Path(value).expanduser().read_text(encoding="utf-8").rstrip("\n")
        except OSError as error:
            raise ValueError(f"the file cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"the file is not UTF-8 text ({error.reason}, byte {error.start})") from None

    @field_validator("prompt_template", "question_template")
    @classmethod
    def _has_prompt(cls, value: str | None) -> str | None:
        if value is not None and "{prompt}" not in value:
            raise ValueError("it has no {prompt}, where the question goes")
        return value

    @field_validator("few_shot")
    @classmethod
    def _has_prompt_and_completion(cls, value: list[dict[str, str]]) -> list[dict[str, str]]:
        for example in value:
            if set(example) != {"prompt", "completion"}:
                raise ValueError(f"each entry must be {{prompt, completion}}, got keys {sorted(example)}")
        return value

    @model_validator(mode="after")
    def _template_is_the_whole_prompt(self) -> Self:
        others = (self.system_prompt, self.question_template, self.few_shot or None)
        if self.prompt_template is not None and any(value is not None for value in others):
            raise ValueError(
                "data.prompt_template is the whole prompt: write system_prompt, question_template and few_shot into it, and leave them out"
            )
        return self


class RewardFunction(Section):
    name: str
    """Name of a built-in reward, package.module:function, path/to/file.py:function, or classifier:<model>."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""


class RewardConfig(Section):
    functions: list[RewardFunction] = Field([RewardFunction(name="accuracy")], min_length=1)
    """Reward functions, summed with their weights: a list of {name, weight, args}, or of names alone."""
    timeout_s: float = Field(10.0, gt=0)
    """Seconds after which a reward function that does not return is killed; its completion has no reward then."""
    num_workers: int | None = Field(None, ge=1)
    """Processes per rank that run the reward functions; none: 1."""

    @field_validator("functions", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        is_list = isinstance(value, list)
        return [{"name": item} if isinstance(item, str) else item for item in value] if is_list else value


class OptimConfig(Section):
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two running averages."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, of matrices only."""
    name: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw; adamw8bit: torchao's, whose two averages take 2 bytes a parameter in place of 8 (pip install -e ".[adamw8bit]")."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients of a larger norm are scaled down to this norm."""
    lr_scheduler_type: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr",
        "polynomial", "inverse_sqrt",
    ] = "constant"  # fmt: skip
    """Learning rate schedule, as transformers.get_scheduler names it."""
    warmup_steps: float = Field(0, ge=0)
    """Warm-up in optimizer updates; below 1: as a fraction of all updates."""
    min_lr: float | None = Field(None, ge=0)
    """Learning rate at the end of a cosine schedule; none: 0."""
    max_steps: int | None = Field(None, ge=1)
    """Steps (batches of completions) to train; none: as many as num_epochs gives."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """If a gradient is not finite on any rank: skip omits the update on all ranks (10 in a row stop the run), stop ends the run."""
    num_epochs: float = Field(1.0, gt=0)
    """Passes over the training problems, if max_steps is none."""
    tokens_per_microbatch: int = Field(16384, ge=1)
    """Most tokens of one forward and backward pass: prompts (each once per group) and completions together. Unless set, the dry run
    lowers it if it does not fit."""
    reduce_each_microbatch: bool = False
    """With fsdp: divide the gradients over the ranks after every micro-batch; false: after the last one, with less communication and whole
    gradients (4 bytes a parameter) until then. The results are the same up to rounding."""

    @field_validator("betas")
    @classmethod
    def _below_1(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both must lie in [0, 1)")
        return value

    @model_validator(mode="after")
    def _check_min_lr(self) -> Self:
        schedule, min_lr = self.lr_scheduler_type, self.min_lr
        if min_lr is None and schedule == "cosine_with_min_lr":
            raise ValueError(f"optim.lr_scheduler_type={schedule} needs optim.min_lr")
        if min_lr is not None and schedule not in ("cosine", "cosine_with_min_lr"):
            raise ValueError(f"optim.min_lr needs lr_scheduler_type=cosine, got lr_scheduler_type={schedule}")
        if min_lr is not None and min_lr > self.learning_rate:
            raise ValueError(
                f"optim.min_lr={min_lr:g}, where the schedule ends, is above optim.learning_rate={self.learning_rate:g}, "
                "where it starts"
            )
        return self


class CheckpointConfig(Section):
    save_steps: int | None = Field(None, ge=1)
    """Save a checkpoint every N steps; the last step is always saved."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep; older ones are deleted."""
    keep_best: str | None = Field(None, pattern=r"^eval/")
    """Also keep the checkpoint with the highest value of this evaluation metric (eval/greedy_accuracy, for example)."""
    background: bool = False
    """Copy the state to host memory and write it to disk while training continues."""
    merge: bool = False
    """With LoRA: write the whole model with the adapter added to its weights too, to checkpoint-<step>/merged; python -m grpo.merge does
    it later."""
    resume: Folder = "auto"
    """auto: continue from the newest valid checkpoint in output_dir; never: start at step 0; a checkpoint folder: start from it."""
    accept_changes: bool = False
    """Continue even if model, data, rewards, algorithm, optimizer, rollout, precision or seed differ from the checkpoint's."""


class RuntimeConfig(Section):
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda)$")
    """auto (CUDA if there is a GPU), cpu, or cuda."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16: autocast, with fp32 weights; fp32: no autocast."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp: every rank holds the whole model; fsdp: the ranks share weights, gradients and optimizer states (FSDP2). One rank: as ddp."""
    shard_size: int | None = Field(None, ge=2)
    """With fsdp: neighbouring ranks that share one copy of the model, the GPUs of a machine for example; none: all ranks."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """With fsdp, into host memory: optimizer moves Adam's averages there between updates; all also weights and gradients
    (FSDP2 has these three together only). Without a GPU it changes nothing. Not yet run on a GPU."""
    packed: bool = True
    """Compute each prompt once per group when scoring; false: once per completion, in padded rows."""
    fast_decode: bool = True
    """Decode Llama-shaped models with this package's own code and a copy of the weights per rollout; false: with transformers' code."""
    cuda_graphs: bool = True
    """Run decode steps as CUDA graphs if the model allows it (CUDA only, needs fast_decode; not yet run on a GPU); false: kernel by
    kernel."""
    timeout_s: float = Field(1800.0, gt=0)
    """Seconds that a rank waits for the other ranks before it stops with an error."""
    deterministic: bool = False
    """Use only kernels that give the same bits every time (slower; needed on CUDA, and on CPU with several threads)."""
    threads_per_rank: int | None = Field(None, ge=1)
    """CPU threads of each rank; none: OMP_NUM_THREADS, else the cores of this machine / its ranks. (With several ranks OMP_NUM_THREADS=1
    does not count, because torchrun sets it: use this key.)"""
    try_largest_step: bool | None = None
    """Try the largest possible step at start, so that out of memory shows early; none: on CUDA only."""
    profile: int | None = Field(None, ge=1)
    """Write a torch profiler trace of step N (counted from 1) to output_dir/trace_step_N.json.gz, for Perfetto."""
