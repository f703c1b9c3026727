"""The sections of the configuration, except ``algorithm``: keys, defaults, checks, and the texts of
``--help``."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict

from grpo.config.secrets import names_a_secret

Folder = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path in which ``~`` is the home folder: the shell replaces it at the start of a word only, not
after ``=``."""
Probability = Annotated[float, Field(ge=0, le=1)]
Proportion = Annotated[float, Field(gt=0, le=1)]
"""A share that cannot be 0."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
"""A share that cannot be 1."""


def _text_of(value: str) -> str:
    """The text of a file with one of these endings; any other value as it is."""
    if not value.endswith((".jinja", ".txt", ".md")) or "\n" in value:
        return value
    return Path(value).expanduser().read_text(encoding="utf-8").rstrip("\n")


TextOrFile = Annotated[str, AfterValidator(_text_of)]
"""A text, or the name of its file. The configuration of a run holds the text: the file may
change."""


class Section(BaseModel):
    """Frozen. An unknown key, NaN and infinity are errors. The docstring under a key is its
    description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="wrap")
    @classmethod
    def _read(cls, value: Any, read: Callable[[Any], Any], info: ValidationInfo) -> Any:
        """``none``, as ``--help`` and the documents write it, is YAML's ``null`` where a key can be
        unset."""
        annotation = cls.model_fields[info.field_name].annotation
        if value == "none" and type(None) in get_args(annotation):
            return None
        if isinstance(value, bool) and not isinstance(
            read(value), bool
        ):  # pydantic reads it as 1 or 0
            raise ValueError("this key is a number, not true or false")
        return read(value)


class ModelConfig(Section):
    name_or_path: str = "builtin:tiny"
    """Hub id, local folder, or builtin:tiny (1M parameters, trained on the built-in task at first
    use, then cached)."""
    adapter: Folder | None = None
    """Folder of a LoRA adapter of the model, which training continues from, and which is part of
    the KL's reference."""
    chat_template: TextOrFile | None = None
    """Chat template in place of the model's own: the text of it, or a .jinja file. Checkpoints have
    it too."""
    attn_implementation: str = "sdpa"
    """Attention implementation, as transformers names it: sdpa, eager, flash_attention_2, ..."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    reference: str | None = None
    """Hub id or folder of the reference model of the KL, with the same tokens; none: the model of
    the start."""
    disable_dropout: bool = True
    """Set every dropout, layerdrop and router noise to 0, so that tokens are scored by the policy
    that sampled them."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class LoraConfig(Section):
    """Names follow peft's ``LoraConfig``."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0: no adapters, all weights are trained."""
    alpha: PositiveInt | None = None
    """The adapters' change of a weight is multiplied by alpha / rank; none: 2 * rank, as in TRL (r
    16, alpha 32)."""
    dropout: Fraction = 0.0
    """Dropout of the adapters' inputs while training; above 0 it needs
    model.disable_dropout=false."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers that get adapters: all-linear (all but the head), a list of the ends of their
    names (q_proj, v_proj), or a regular expression that matches whole names."""
    rslora: bool = False
    """Rank-stabilised LoRA: multiply by alpha / sqrt(rank) instead."""
    init: Literal[True, "gaussian"] = True
    """First values of the first matrix: true (uniform, as an nn.Linear), or gaussian; the second
    begins at 0."""
    base_precision: Literal["bf16", "fp32"] = "bf16"
    """Precision in which frozen weights are stored; bf16 only where the bits under autocast are the
    same."""


class Example(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")
    prompt: str
    completion: str


class DataConfig(Section):
    dataset: str = "builtin:arithmetic"
    """Hub id, .jsonl/.json/.csv/.parquet file, folder saved by datasets, builtin:arithmetic,
    builtin:countdown, builtin:calculator, builtin:guess_number, or reasoning_gym:<task>. none, with
    `environment`: its own prompts."""
    config_name: str | dict[str, Any] | None = None
    """Configuration of a Hub dataset (gsm8k has main and socratic). Of reasoning_gym:<task>, a
    mapping of arguments."""
    train_split: str = "train"
    """Split to train on; slices such as train[:90%] work."""
    eval_split: str | None = "auto"
    """Split to evaluate on; slices work. auto: that of a built-in task, or the rows of
    `eval_dataset`; none: no evaluation."""
    eval_dataset: str | None = None
    """Dataset that has the evaluation split, if it is not `dataset` (a second file, for
    example)."""
    prompt_column: str = "prompt"
    """Column with the question: text, or a list of chat messages. A field in a column:
    column.field. Rows of an environment may lack the column `prompt`: its reset makes the prompts
    then."""
    answer_column: str | None = None
    """Column with the reference answer, or a field in one (reward_model.ground_truth); rewards get
    it as `answer`. Of a list, each item is right."""
    answer_pattern: str | None = None
    """Regular expression (of the package regex) that finds the answer in its column: the first
    group, or the match."""
    system_prompt: TextOrFile | None = None
    """System message before each prompt: the text, or a .txt or .md file. none: that of the row or
    built-in task."""
    prompt_template: str | None = Field(None, pattern=r"\{prompt\}")
    """Text that the model gets instead of its chat template, with {prompt} for the question: for
    base models, and, as {prompt} alone, for prompts that are rendered already."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, for prompts and the answers of tools: {enable_thinking:
    false} for Qwen3."""
    question_template: str | None = Field(None, pattern=r"\{prompt\}")
    """Text of the user message, with {prompt} where the question goes ("Question: {prompt}"),
    inside the chat template. {NAME} stands for the column NAME of the row; a list has one item per
    line. few_shot is shown as it is written."""
    few_shot: list[Example] = []
    """Worked examples before each question, as chat turns: a list of {prompt, completion}."""
    conversational: Literal["auto", True, False] = "auto"
    """Form in which rewards get prompts and completions. true: lists of messages. false: text (of a
    conversation, its last message). auto: messages if the row is one, or with system_prompt or
    few_shot and a chat template."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens. Problems with longer prompts are left out and counted; nothing is
    truncated."""
    max_train_samples: PositiveInt | None = None
    """Use only the first N training problems; none: all."""
    max_eval_samples: PositiveInt | None = None
    """Load only the first N evaluation problems; none: all."""


class Tool(Section):
    """A function of the user, or a built-in one. In a list, its name alone may stand for it."""

    name: str
    """calculator, python, package.module:function, or path/to/file.py:function."""
    args: dict[str, Any] = {}
    """Arguments that the model does not choose."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class RewardFunction(Tool):
    """A tool's fields, for a reward: name of a built-in one, package.module:function, or
    path/to/file.py:function, and keyword arguments."""

    weight: float = 1.0
    """Factor of this reward in the sum."""


class RewardConfig(Section):
    functions: list[RewardFunction] = [RewardFunction(name="accuracy")]
    """Reward functions, summed with their weights: a list of {name, weight, args}, or of names
    alone."""
    timeout_s: PositiveFloat = 10.0
    """Seconds after which a reward function that does not return is killed; its completion has no
    reward then. A tool is killed too, and the model gets an error as its result."""
    num_workers: PositiveInt | None = None
    """Processes per rank that run the reward functions, and as many for tools; none: 1, and 8 for
    tools."""


class RolloutConfig(Section):
    prompts_per_step: PositiveInt = 8
    """Problems per step, over all ranks."""
    num_generations: PositiveInt = 8
    """Completions per problem (G)."""
    max_completion_length: PositiveInt = 512
    """Longest completion in tokens; longer ones are truncated."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probs are computed at the same temperature."""
    top_p: Proportion = 1.0
    """Sample only among the likeliest tokens that have this probability together; below 1 the
    gradient is biased."""
    top_k: NonNegativeInt = 0
    """Sample only among the k likeliest tokens; 0: all. Above 0 the gradient is biased."""
    min_p: Probability = 0.0
    """Do not sample tokens below this fraction of the likeliest one's probability; above 0 the
    gradient is biased."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that end a completion; they stay part of it. A special token is found by its id and
    must stand alone; in the text for rewards it stays if it is a tag, such as </answer>."""
    tokens_in_flight: PositiveInt | None = None
    """Most tokens (prompt + completion) in the KV cache at once, per rank; none: all, or what fits
    in the dry run."""
    max_turns: PositiveInt | None = None
    """Most turns of the model in a completion; none: as many as fit into max_completion_length with
    the answers."""
    max_tool_tokens: PositiveInt | None = None
    """Longest result of a tool in tokens; longer ones are cut. none: one that does not fit ends the
    completion."""
    engine: Literal["builtin", "vllm"] = "builtin"
    """Sampler: builtin, in the training process; vllm, servers that get the weights
    (docs/vllm.md)."""
    server: str | list[str] = "start"
    """With engine=vllm: start (by the trainer), or addresses of servers, http://host:8000, which
    the ranks share."""
    vllm_command: str = Field("vllm serve {model}", pattern=r"\{model\}")
    """With server=start: the command, to which port, precision and lengths are added; {model} is
    the model's folder. vLLM may be in another environment: /path/bin/vllm serve {model}."""
    weights_folder: Folder = "/dev/shm"
    """With engine=vllm: folder through which servers get the weights, which all machines see;
    /dev/shm is memory."""

    @field_validator("server")
    @classmethod
    def _check_addresses(cls, value: str | list[str]) -> str | list[str]:
        if not value or "@" in str(value):
            secret = "a password is a secret, which VLLM_API_KEY in the environment has"
            raise ValueError(f"use start, http://host:8000, or a list of such addresses; {secret}")
        return value

    @field_validator("vllm_command")
    @classmethod
    def _check_command(cls, value: str) -> str:
        for word in value.split():
            name = word.partition("=")[0]
            if names_a_secret(name):
                raise ValueError(
                    f"{name} is a secret: set it in the environment, which the server gets too"
                )
        return value

    @property
    def addresses(self) -> list[str] | None:
        """Addresses of servers that run already; None: the trainer starts servers."""
        if self.server == "start":
            return None
        addresses = [self.server] if isinstance(self.server, str) else self.server
        return [address.rstrip("/") for address in addresses]


class OptimConfig(Section):
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of AdamW's two running averages."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, of matrices only."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients of a larger norm are scaled down to this norm."""
    lr_scheduler_type: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr",
        "polynomial", "inverse_sqrt",
    ] = "constant"  # fmt: skip
    """Learning rate schedule, as transformers.get_scheduler names it."""
    warmup_steps: NonNegativeFloat = 0
    """Warm-up in optimizer updates; below 1: as a fraction of all updates."""
    min_lr: NonNegativeFloat | None = None
    """Learning rate at the end of a cosine schedule; none: 0."""
    max_steps: PositiveInt | None = None
    """Steps (batches of completions) to train; none: as many as num_epochs gives."""
    num_epochs: PositiveFloat = 1.0
    """Passes over the training problems, if max_steps is none."""
    tokens_per_microbatch: PositiveInt = 16384
    """Most tokens of one forward and backward pass: prompts (each once per group) and completions.
    Unless set, the dry run lowers it if it does not fit."""


class EvalConfig(Section):
    every: PositiveInt | None = None
    """Evaluate every N steps; none: only before and after training."""
    before_training: bool = True
    """Evaluate before the first step, to compare the end of training with."""
    num_samples: PositiveInt = 1
    """Sampled completions per problem for mean@k and pass@k, besides the greedy one; at temperature
    0 none."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the sampled completions; 0: the greedy completion only."""
    top_p: Proportion = 1.0
    """Sample only among the likeliest tokens that have this probability together; not for the
    greedy completion."""
    top_k: NonNegativeInt = 0
    """Sample only among the k likeliest tokens; 0: all."""
    min_p: Probability = 0.0
    """Do not sample tokens with less than this fraction of the likeliest token's probability."""
    max_completion_length: PositiveInt | None = None
    """Longest completion of an evaluation in tokens, greedy ones too; none:
    rollout.max_completion_length."""
    max_samples: PositiveInt | None = None
    """Evaluate on the first N evaluation problems; none: all."""
    correctness: str | None = None
    """Name of the reward that tells if a completion is correct; none: the first reward that checks
    answers."""
    correct_above: float = 0.0
    """A completion is correct if the reward `correctness` is above this (0.99 where a wrong answer
    earns a part)."""
    format: str | None = None
    """Reward that is above 0 for a well-formed completion; none: `format`. Without it: one with an
    answer as `accuracy` in the mode boxed or #### reads it, or of the form <think>..</think>
    <answer>..</answer>."""

    @property
    def num_sampled(self) -> int:
        """Sampled completions per problem: ``num_samples``, or 0 at temperature 0."""
        return self.num_samples if self.temperature > 0 else 0


class CheckpointConfig(Section):
    save_steps: PositiveInt | None = None
    """Save a checkpoint every N steps; the last step is always saved."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep; older ones are deleted."""
    keep_best: str | None = Field(None, pattern=r"^eval/")
    """Also keep the checkpoint with the highest value of this evaluation metric
    (eval/greedy_accuracy, for example)."""
    resume: Folder = "auto"
    """auto: continue from the newest valid checkpoint in output_dir; never: start at step 0; or a
    checkpoint folder."""
    accept_changes: bool = False
    """Continue even if model, data, rewards, algorithm, optimizer, precision or seed differ from
    the checkpoint's."""


class LoggingConfig(Section):
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases mode; metrics.jsonl is always written."""
    project: str = "grpo"
    """Project in wandb and trackio."""
    run_name: str | None = None
    """Name of the run in wandb and trackio; none: the name of output_dir (trackio: with its
    folders)."""
    trackio: bool = False
    """Show the run in trackio, a dashboard on this machine; needs the extra "trackio": pip install
    -e ".[trackio]"."""
    tensorboard: bool = False
    """Write TensorBoard's event files to output_dir/tensorboard; needs the extra "tensorboard"."""
    log_completions: NonNegativeInt = 4
    """Completions to write to completions/ (Parquet) every `every` steps, two of each problem; 0:
    none."""
    every: PositiveInt = 1
    """Console line, point on dashboards, and completions every N steps (metrics.jsonl has every
    step)."""


class RuntimeConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto (CUDA if there is a GPU), cpu, or cuda."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16: autocast, with fp32 weights; fp32: no autocast."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp: every rank holds the whole model; fsdp (FSDP2): weights, gradients and optimizer states
    are sharded."""
    shard_size: int | None = Field(None, ge=2)
    """With fsdp: neighbouring ranks that share one copy of the model, the GPUs of a machine for
    example; none: all."""
    offload: Literal["none", "all"] = "none"
    """With fsdp, all: weights, gradients and Adam's averages lie in host memory. Without a GPU it
    changes nothing. Not yet run on a GPU."""
    fast_decode: bool = True
    """Decode Llama-shaped models with own code, on a GPU in CUDA graphs; false: with transformers'
    code."""
    timeout_s: PositiveFloat = 1800.0
    """Seconds that a rank waits for the others; a vLLM server may take a third of them to start or
    to answer."""
    deterministic: bool = False
    """Use only kernels that give the same bits every time (slower; needed on CUDA, and on CPU with
    several threads)."""
    threads_per_rank: Annotated[int, Field(gt=0, le=1024)] | None = None
    """CPU threads of each rank; none: OMP_NUM_THREADS (unless torchrun's 1), else cores of the
    machine / its ranks."""
    try_largest_step: bool | None = None
    """Try the largest possible step at start, so that out of memory shows early; none: on CUDA
    only."""
