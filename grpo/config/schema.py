"""Sections of the configuration, except ``algorithm``: keys, defaults, checks, and the texts of
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

Folder = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""Path in which ``~`` stands for the home folder. The shell replaces ``~`` only at the start of a
word, not after ``=``."""
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]


def _read_text_file(value: str) -> str:
    """Return the text of a .jinja, .txt or .md file, and any other value unchanged."""
    # A text of several lines is no file name, even if it ends like one.
    if not value.endswith((".jinja", ".txt", ".md")) or "\n" in value:
        return value
    return Path(value).expanduser().read_text(encoding="utf-8").rstrip("\n")


# The configuration holds the text itself: so config.yaml starts the same run after the file was
# edited or moved, and a continued run notices that its text has changed.
TextOrFile = Annotated[str, AfterValidator(_read_text_file)]
"""A text, or the name of a file that holds the text."""


class Section(BaseModel):
    """Base class of all sections. The docstring under a key is the description of the key in
    ``--help``."""

    # Without these, a misspelt key would be ignored, a NaN would spread into every weight, and code
    # that changes a value would act against the configuration that was checked and saved.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="wrap")
    @classmethod
    def _read_value(cls, value: Any, read: Callable[[Any], Any], info: ValidationInfo) -> Any:
        """Read a value as pydantic does, but read ``none`` as None, and refuse a boolean for a
        number."""
        # --help and the documents write `none`, which is a text in YAML. For a key that cannot be
        # None, `none` may be the name of a choice, such as algorithm.scale=none.
        annotation = cls.model_fields[info.field_name].annotation
        if value == "none" and type(None) in get_args(annotation):
            return None
        result = read(value)
        # pydantic takes true for 1: `lora.rank=true` would train adapters of rank 1.
        if isinstance(value, bool) and not isinstance(result, bool):
            raise ValueError("this key is a number, not true or false")
        return result


class ModelConfig(Section):
    name_or_path: str = "builtin:tiny"
    """Hub id, local folder, or builtin:tiny (1M parameters, trained on the built-in task at first
    use, then cached)."""
    adapter: Folder | None = None
    """Folder of a LoRA adapter of the model. Training continues from the adapter, and the reference
    model of the KL contains the adapter. Default: no adapter."""
    chat_template: TextOrFile | None = None
    """Chat template: its text, or a .jinja file. Checkpoints contain the template. Default: the
    model's chat template."""
    attn_implementation: str = "sdpa"
    """Attention implementation, as transformers names it: sdpa, eager, flash_attention_2, ..."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    reference: str | None = None
    """Hub id or folder of the reference model of the KL. It must have the vocabulary of the trained
    model. Default: the model that training starts from."""
    disable_dropout: bool = True
    """Set every dropout, layerdrop and router noise to 0, so that tokens are scored by the policy
    that sampled them."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class LoraConfig(Section):
    """Settings of LoRA adapters. Their names resemble the names in peft's ``LoraConfig``."""

    rank: NonNegativeInt = 0
    """Rank of the adapters. With 0 there are no adapters, and all weights are trained."""
    alpha: PositiveInt | None = None
    """The adapters' change of a weight is multiplied by alpha / rank. Default: 2 * rank, as in TRL
    (r 16, alpha 32)."""
    dropout: FractionBelowOne = 0.0
    """Dropout of the adapters' inputs while training. A value above 0 needs
    model.disable_dropout=false."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers that get adapters: all-linear (all but the head), a list of suffixes of layer
    names (q_proj, v_proj), or a regular expression that matches full names."""
    rslora: bool = False
    """Rank-stabilised LoRA: the factor is alpha / sqrt(rank) instead of alpha / rank."""
    init: Literal[True, "gaussian"] = True
    """Initial values of an adapter's first matrix: true (uniform, as in nn.Linear), or gaussian.
    The second matrix begins at 0."""
    base_precision: Literal["bf16", "fp32"] = "bf16"
    """Precision in which frozen weights are stored. bf16 applies only to weights that autocast
    would round to bf16 anyway."""


class Message(TypedDict):
    # Chat templates read further keys, such as tool_calls.
    __pydantic_config__ = {"extra": "allow"}
    role: str
    content: str


class Example(TypedDict):
    # pydantic drops unknown keys of a TypedDict unless this forbids them.
    __pydantic_config__ = {"extra": "forbid"}
    prompt: str
    completion: str | list[Message]


class DataConfig(Section):
    dataset: str = "builtin:arithmetic"
    """Hub id, .jsonl/.json/.csv/.parquet file, folder saved by datasets, builtin:arithmetic,
    builtin:countdown, builtin:calculator, builtin:guess_number, or reasoning_gym:<task>. With
    `environment`, none takes the prompts from the environment's reset."""
    config_name: str | dict[str, Any] | None = None
    """Configuration of a Hub dataset (gsm8k has main and socratic), or a mapping of arguments for
    reasoning_gym:<task>. Default: the dataset's default."""
    train_split: str = "train"
    """Split to train on; slices such as train[:90%] work."""
    eval_split: str | None = "auto"
    """Split to evaluate on; slices work. auto: the evaluation split of a built-in task, or the rows
    of `eval_dataset`. none disables evaluations."""
    eval_dataset: str | None = None
    """Dataset that has the evaluation split (a second file, for example). Default: `dataset`."""
    prompt_column: str = "prompt"
    """Column with the question, which is text or a list of chat messages. column.field names a
    field in a column. If the rows of an environment lack the column `prompt`, the environment's
    reset makes the prompts."""
    answer_column: str | None = None
    """Column with the reference answer, or a field in a column (reward_model.ground_truth). Reward
    functions get the value as `answer`. If the value is a list, each item is a right answer.
    Default: the column `answer` as it is, if there is one."""
    answer_pattern: str | None = None
    """Regular expression (of the package regex) that finds the answer in the answer column: the
    first group, or the whole match. Default: the answer is the whole value."""
    system_prompt: TextOrFile | None = None
    """System message before each prompt: the text, or a .txt or .md file. Default: the system
    message of the row or of the built-in task."""
    # A template without {prompt} would give every problem the same text.
    prompt_template: str | None = Field(None, pattern=r"\{prompt\}")
    """Text that replaces the chat template, with {prompt} for the question; useful for base models.
    Use {prompt} alone if prompts are rendered already. Default: the chat template, if the tokenizer
    has one."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables for the chat template, such as {enable_thinking: false} for Qwen3. They are used
    for prompts and for tool results."""
    question_template: str | None = Field(None, pattern=r"\{prompt\}")
    """Text of the user message inside the chat template, with {prompt} for the question ("Question:
    {prompt}"). {NAME} stands for the column NAME of the row; a list is written with one item per
    line. The template does not change few_shot. Default: {prompt}."""
    few_shot: list[Example] = []
    """Worked examples before each question, as chat turns: a list of {prompt, completion}. A
    completion is text, or a list of chat messages {role, content}, as for a call of a tool."""
    conversational: Literal["auto", True, False] = "auto"
    """Form in which reward functions get prompts and completions. true: lists of messages. false:
    text; for a conversation, the text of its last message. auto: messages if the row's prompt is a
    list of messages, if system_prompt or few_shot is set and there is a chat template, or with
    tools or an environment; else text."""
    max_prompt_length: PositiveInt = 512
    """Limit on the tokens of a prompt. Problems with longer prompts are left out and counted;
    nothing is truncated."""
    max_train_samples: PositiveInt | None = None
    """Use only the first N training problems. Default: all."""
    max_eval_samples: PositiveInt | None = None
    """Load only the first N evaluation problems. Default: all."""


class Tool(Section):
    """A tool: a function of the user, or a built-in function. ``calculator`` in a list means
    ``{name: calculator}``."""

    name: str
    """The tool: calculator, python, package.module:function, or path/to/file.py:function."""
    args: dict[str, Any] = {}
    """Arguments that the configuration sets, and the model cannot choose."""

    @model_validator(mode="before")
    @classmethod
    def _read_name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class RewardFunction(Tool):
    """A reward function. ``name`` is that of a built-in function, package.module:function, or
    path/to/file.py:function. ``args`` are keyword arguments."""

    weight: float = 1.0
    """Factor of this reward in the sum."""


class RewardConfig(Section):
    functions: list[RewardFunction] = [RewardFunction(name="accuracy")]
    """Reward functions, whose values are summed with their weights: a list of {name, weight, args},
    or of names alone."""
    timeout_s: PositiveFloat = 10.0
    """Time limit of a call in seconds. A reward function that takes longer is killed, and the
    completion has no reward. A tool that takes longer is killed, and the model gets an error as its
    result; a method of an environment ends the conversation, without a reward."""
    num_workers: PositiveInt | None = None
    """Number of processes per rank that run reward functions, and number of further processes that
    run tools. Default: 1 for reward functions, 8 for tools."""


class RolloutConfig(Section):
    prompts_per_step: PositiveInt = 8
    """Problems per step, over all ranks."""
    num_generations: PositiveInt = 8
    """Completions per problem (G)."""
    max_completion_length: PositiveInt = 512
    """Limit on the tokens of a completion. Longer completions are truncated."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probs are computed at the same temperature."""
    # The log-probs in the loss are computed over all tokens. If some tokens are never sampled,
    # these log-probs are not those of the distribution that was sampled from.
    top_p: PositiveFraction = 1.0
    """Sample only among the likeliest tokens whose probabilities add up to this value; 1 disables
    top-p. Below 1 the gradient is biased."""
    top_k: NonNegativeInt = 0
    """Sample only among the k likeliest tokens; 0 disables top-k. Above 0 the gradient is
    biased."""
    min_p: Fraction = 0.0
    """Do not sample tokens with less than this fraction of the likeliest token's probability; 0
    disables min-p. Above 0 the gradient is biased."""
    # Every text contains the empty string, which would end each completion at once.
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that end a completion, and stay part of it. A special token is recognized by its id,
    so it must be a separate entry of this list. Reward functions see a special token only if it is
    a tag, such as </answer>."""
    tokens_in_flight: PositiveInt | None = None
    """Limit on the tokens (prompt + completion) in the KV cache at once, per rank. Default: no
    limit, or the limit that the dry run finds (runtime.try_largest_step)."""
    max_turns: PositiveInt | None = None
    """Limit on the turns of the model in a completion, separated by tool results. Default: as many
    as fit into max_completion_length together with the tool results."""
    max_tool_tokens: PositiveInt | None = None
    """Limit on the tokens of a tool result; longer results are cut. Default: results are not cut. A
    result that does not fit into the completion ends the completion."""
    engine: Literal["builtin", "vllm"] = "builtin"
    """Sampler. builtin: code in the training process. vllm: vLLM servers, which get the weights
    (docs/vllm.md)."""
    # Secrets are masked by the names of keys, and `server` and `vllm_command` are no names of
    # secrets. A password in their values would be written to config.yaml and to wandb.
    server: str | list[str] = "start"
    """Servers of engine=vllm: start (the trainer starts them), or their addresses,
    http://host:8000, which the ranks share."""
    # The trainer writes the model's folder in place of {model}. A command without {model} would
    # serve another model.
    vllm_command: str = Field("vllm serve {model}", pattern=r"\{model\}")
    """Command with which server=start starts a server. {model} is the model's folder; port,
    precision and lengths are added. vLLM may be in another environment: /path/bin/vllm serve
    {model}."""
    weights_folder: Folder = "/dev/shm"
    """Folder through which the servers of engine=vllm get the weights. All machines must share the
    folder; /dev/shm is in memory."""

    @field_validator("server")
    @classmethod
    def _check_addresses(cls, value: str | list[str]) -> str | list[str]:
        if not value or "@" in str(value):
            raise ValueError(
                "use start, http://host:8000, or a list of such addresses; "
                "a password is a secret, which VLLM_API_KEY in the environment has"
            )
        return value

    @field_validator("vllm_command")
    @classmethod
    def _check_command(cls, value: str) -> str:
        for word in value.split():
            # Both `--api-key=x` and `HF_TOKEN=x vllm serve` name the secret before a "=".
            name = word.partition("=")[0]
            if names_a_secret(name):
                raise ValueError(
                    f"{name} is a secret: set it in the environment, which the server gets too"
                )
        return value

    @property
    def addresses(self) -> list[str] | None:
        """Addresses of servers that the user has started; None if the trainer starts servers."""
        if self.server == "start":
            return None
        addresses = [self.server] if isinstance(self.server, str) else self.server
        return [address.rstrip("/") for address in addresses]


class OptimConfig(Section):
    name: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw, or adamw8bit: torchao's, whose two averages take 2 bytes a parameter in place of 8."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    # AdamW divides the averages by 1 - beta ** update, which would be 0 with a beta of 1.
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.999)
    """Decay rates of AdamW's two running averages."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, which is applied to matrices only."""
    max_grad_norm: PositiveFloat = 1.0
    """Limit on the norm of the gradient. A larger gradient is scaled down to this norm."""
    # Those schedules of transformers that need no arguments beyond the keys of this section.
    lr_scheduler_type: Literal[
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "polynomial",
        "inverse_sqrt",
    ] = "constant"
    """Learning rate schedule, as transformers.get_scheduler names it."""
    warmup_steps: NonNegativeFloat = 0
    """Optimizer updates of the warm-up. A value below 1 is a fraction of all updates."""
    min_lr: NonNegativeFloat | None = None
    """Learning rate at the end of a cosine schedule: the rate itself. Default: 0."""
    max_steps: PositiveInt | None = None
    """Steps (batches of completions) to train. Default: the number of steps in num_epochs."""
    num_epochs: PositiveFloat = 1.0
    """Passes over the training problems, if max_steps is none."""
    tokens_per_microbatch: PositiveInt = 16384
    """Token limit of one forward and backward pass: prompts (each counted once per group) and
    completions. If this key is not set, the dry run (runtime.try_largest_step) lowers the limit to
    what fits in memory."""


class EvalConfig(Section):
    every: PositiveInt | None = None
    """Evaluate every N steps. Default: only before and after training."""
    before_training: bool = True
    """Evaluate before the first step, as a baseline for the evaluation after training."""
    num_samples: PositiveInt = 1
    """Sampled completions per problem, for mean@k and pass@k, in addition to the greedy completion.
    At temperature 0 only the greedy completion is generated."""
    temperature: NonNegativeFloat = 0.0
    """Temperature of the sampled completions; with 0 only the greedy completion is generated."""
    top_p: PositiveFraction = 1.0
    """Sample only among the likeliest tokens whose probabilities add up to this value; 1 disables
    top-p. The greedy completion ignores top_p, top_k and min_p."""
    top_k: NonNegativeInt = 0
    """Sample only among the k likeliest tokens; 0 disables top-k."""
    min_p: Fraction = 0.0
    """Do not sample tokens with less than this fraction of the likeliest token's probability; 0
    disables min-p."""
    max_completion_length: PositiveInt | None = None
    """Limit on the tokens of a completion in evaluations, sampled or greedy. Default:
    rollout.max_completion_length."""
    max_samples: PositiveInt | None = None
    """Evaluate on the first N evaluation problems. Default: all."""
    correctness: str | None = None
    """Name of the reward that decides if a completion is correct. Default: the first reward that
    checks answers."""
    correct_above: float = 0.0
    """A completion is correct if the reward `correctness` is above this value. Use 0.99 for a
    reward that gives partly right answers a value between 0 and 1."""
    format: str | None = None
    """Name of the reward that is above 0 for a well-formed completion. Default: `format`, if there
    is a reward of this name. Without this reward, a completion is well-formed if it has the form
    <think>..</think> <answer>..</answer>, or, with `accuracy` in the mode boxed or ####, if it has
    an answer of that form."""

    @property
    def num_sampled(self) -> int:
        """Number of sampled completions per problem: ``num_samples``, or 0 at temperature 0."""
        return self.num_samples if self.temperature > 0 else 0


class CheckpointConfig(Section):
    save_steps: PositiveInt | None = None
    """Save a checkpoint every N steps, and always at the last step. Default: only at the last
    step."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep; older ones are deleted."""
    # Metrics of a training step describe the weights before its update. Only metrics of an
    # evaluation describe the weights that are saved.
    keep_best: str | None = None
    """Also keep the checkpoint with the highest value of this evaluation metric
    (eval/greedy_accuracy, for example). Default: no metric."""
    resume: Folder = "auto"
    """auto: continue from the newest valid checkpoint in output_dir; never: start at step 0; or a
    checkpoint folder."""
    accept_changes: bool = False
    """Continue even if model, data, rewards, algorithm, optimizer, precision or seed differ from
    the run that saved the checkpoint."""


class LoggingConfig(Section):
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases mode; metrics.jsonl is always written."""
    project: str = "grpo"
    """Project in wandb and trackio."""
    run_name: str | None = None
    """Name of the run in wandb and trackio. Default: the name of output_dir (in trackio with its
    parent folders)."""
    trackio: bool = False
    """Show the run in trackio, a dashboard on this machine; needs the extra "trackio": pip install
    -e ".[trackio]"."""
    tensorboard: bool = False
    """Write TensorBoard's event files to output_dir/tensorboard; needs the extra "tensorboard"."""
    log_completions: NonNegativeInt = 4
    """Number of completions, two of each problem, that are written to completions/ (Parquet) after
    as many steps as logging.every says."""
    every: PositiveInt = 1
    """Print a line, add a point to dashboards, and write completions every N steps. metrics.jsonl
    has every step."""


class RuntimeConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto (CUDA if there is a GPU), cpu, or cuda."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16: autocast, with fp32 weights; fp32: no autocast."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp: every rank holds the full model; fsdp (FSDP2): weights, gradients and optimizer states
    are sharded."""
    # With one rank per copy nothing is sharded, so DDP does the same.
    shard_size: int | None = Field(None, ge=2)
    """Number of neighbouring ranks that hold one copy of the model together (only with fsdp), for
    example the GPUs of a machine. Default: all ranks."""
    offload: Literal["none", "all"] = "none"
    """all (only with fsdp): weights, gradients and Adam's averages are kept in host memory. This
    has no effect without a GPU, and has not yet been run on a GPU."""
    fast_decode: bool = True
    """true: decode Llama-shaped models with the code of this package, on a GPU in CUDA graphs.
    false: decode these models with transformers."""
    timeout_s: PositiveFloat = 1800.0
    """Seconds that a rank waits for the others. A vLLM server has a third of this time to start or
    to answer."""
    deterministic: bool = False
    """Use only kernels that give the same bits every time (slower; needed on CUDA, and on CPU with
    several threads)."""
    # A mistyped number must not start so many threads that the process dies without a message.
    threads_per_rank: Annotated[int, Field(gt=0, le=1024)] | None = None
    """CPU threads of each rank. Default: OMP_NUM_THREADS, unless there are several ranks and it is
    1, as torchrun sets it; else the cores of the machine divided by the number of its ranks."""
    try_largest_step: bool | None = None
    """Try the largest possible step at the start (dry run), so that a lack of memory shows before
    training. Default: true on CUDA, else false."""
