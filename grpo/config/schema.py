"""Every number of a run has one home: here. Frozen pydantic models, filled from YAML and ``section.key=value`` overrides.

The docstring under a field is its line in ``--help``. ``load_config`` reports a user's
mistake as a :class:`ConfigError` of one line per mistake, naming the key, the value and what would work.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from grpo.config.agreement import add_what_is_implied, check_sections_agree, check_world_size
from grpo.config.arguments import ConfigError, help_text, parse_arguments, text_of_file, validate
from grpo.config.presets import PRESETS

__all__ = ["PRESETS", "Config", "ConfigError", "check_world_size", "help_text", "load_config"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class ModelConfig(Section):
    name_or_path: str = "builtin:tiny"
    """Hub id, local folder, or builtin:tiny (1M parameters, warm-started on the built-in task, cached)."""
    attn_implementation: str = "sdpa"
    """Attention kernel, as transformers names it: sdpa, eager, flash_attention_2, ..."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    disable_dropout: bool = True
    """Set every dropout to 0, so that scoring sees the policy that sampled."""
    fp32_head: bool = False
    """Compute logits in fp32 under bf16 autocast, when sampling and when scoring: slower, and log-probs of both agree better."""
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
    """Split to evaluate on (slices too); none: no evaluation, except for built-in tasks, which have their own."""
    eval_dataset: str | None = None
    """Where the evaluation split lies if not in `dataset` (a second file, say)."""
    prompt_column: str = "prompt"
    """Column with the question: text, or a list of chat messages."""
    answer_column: str | None = None
    """Column with the reference answer; rewards see it as `answer`."""
    answer_pattern: str | None = None
    """Regular expression whose first group (or whole match) is the answer inside the answer column."""
    system_prompt: str | None = None
    """System message put before each prompt: the text, or the name of a .txt or .md file that holds it; none: that of the row,
    or what a built-in task asks for."""
    prompt_template: str | None = None
    """Text with {prompt} in place of the question, given to the model instead of its chat template (base models)."""
    few_shot: list[dict[str, str]] = []
    """Worked examples put before each question as chat turns: a list of {prompt, completion}."""
    max_prompt_length: int = Field(512, ge=1)
    """Longest prompt in tokens; longer ones are left out and counted, never truncated."""
    max_train_samples: int | None = Field(None, ge=1)
    """Use only the first N training problems."""
    max_eval_samples: int | None = Field(None, ge=1)
    """Load only the first N evaluation problems."""

    @field_validator("system_prompt")
    @classmethod
    def _text_of_a_file(cls, value: str | None) -> str | None:
        """Read here, so that the resolved configuration says what the model was told."""
        return text_of_file(value) if value and value.endswith((".txt", ".md")) and "\n" not in value else value

    @field_validator("prompt_template")
    @classmethod
    def _has_a_place_for_the_prompt(cls, value: str | None) -> str | None:
        if value is not None and "{prompt}" not in value:
            raise ValueError("it has no {prompt}, the place for the question")
        return value

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> DataConfig:
        if self.prompt_template is not None and (self.system_prompt is not None or self.few_shot):
            raise ValueError(
                "data.prompt_template is the whole prompt: write system_prompt and few_shot into it, and leave them out"
            )
        return self


class RewardFunction(Section):
    name: str
    """Registry name, package.module:function, path/to/file.py:function, or classifier:<model>."""
    weight: float = 1.0
    """Factor in the sum of rewards."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""


class RewardConfig(Section):
    functions: list[RewardFunction] = Field([RewardFunction(name="accuracy")], min_length=1)
    """Reward functions, summed with their weights: a list of {name, weight, args}."""
    timeout_s: float = Field(10.0, gt=0)
    """Seconds after which a hanging reward is killed and scores None."""
    num_workers: int | None = Field(None, ge=1)
    """Worker processes per rank that run the rewards; none: 1."""

    @field_validator("functions", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        return (
            [{"name": item} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value
        )


class RolloutConfig(Section):
    prompts_per_step: int = Field(8, ge=1)
    """Problems per step, over all ranks."""
    num_generations: int = Field(8, ge=1)
    """Completions per problem (G)."""
    max_completion_length: int = Field(256, ge=1)
    """Longest completion in tokens; longer ones are cut and count as truncated."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; log-probs are taken at the same one."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; below 1 it biases the estimate."""
    top_k: int = Field(0, ge=0)
    """Sample among the k likeliest tokens; 0: all. Above 0 it biases the estimate."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Leave out tokens below this fraction of the likeliest one's probability; above 0 it biases the estimate."""
    stop: list[str] = []
    """Strings that end a completion (they stay part of it)."""
    tokens_in_flight: int | None = Field(None, ge=1)
    """Bound on prompt + completion tokens held in the KV cache at once, per rank; none: the whole batch."""

    @field_validator("stop")
    @classmethod
    def _stop(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty string would end every completion at its first token")
        return value


class AlgorithmConfig(Section):
    name: Literal[tuple(PRESETS)] = "grpo"  # type: ignore[valid-type]
    """Preset that fills the other keys of this section; any of them can still be set."""
    objective: Literal["clip", "cispo", "reinforce"] = "clip"
    """Per-token policy loss."""
    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What is subtracted from a reward within its group."""
    scale: Literal["group", "batch", "none"] = "group"
    """What the centred reward is divided by: std of the group, of the whole batch, or 1."""
    aggregation: Literal["response_mean", "token_mean", "constant"] = "response_mean"
    """What the loss is averaged over: responses, tokens, or responses x max_completion_length."""
    importance_level: Literal["token", "sequence"] = "token"
    """Importance ratio of each token, or of the whole response (GSPO)."""
    epsilon: float = Field(0.2, ge=0)
    """Clip range below 1."""
    epsilon_high: float | None = Field(None, ge=0)
    """Clip range above 1; none: the same as epsilon."""
    delta: float | None = Field(None, gt=1)
    """Cap on the ratio in the unclipped branch (two-sided clipping)."""
    beta: float = Field(0.04, ge=0)
    """Weight of the KL to the reference model; 0: no reference model is kept."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL."""
    num_iterations: int = Field(1, ge=1)
    """Passes over each rollout batch."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer updates per pass."""
    mask_truncated_completions: bool = False
    """Leave truncated completions out of the loss."""
    dynamic_sampling: bool = False
    """Replace groups of equal rewards by groups of other problems (DAPO)."""
    dynamic_sampling_attempts: int = Field(3, ge=1)
    """How often one place in the batch is given to another problem before its group is kept as it is."""
    ref_sync_steps: int = Field(0, ge=0)
    """Move the reference towards the policy every N steps; 0: never."""
    ref_sync_alpha: float = Field(1.0, gt=0, le=1)
    """How far it moves: ref = alpha * policy + (1 - alpha) * ref."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if isinstance(values, dict):
            name = values.get("name", "grpo")
            return (PRESETS.get(name, {}) if isinstance(name, str) else {}) | values
        return values

    @property
    def updates_per_step(self) -> int:
        return self.num_iterations * self.num_minibatches

    @property
    def clip_high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class OptimConfig(Section):
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's averaging factors."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm."""
    lr_scheduler_type: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr",
        "polynomial", "inverse_sqrt",
    ] = "constant"  # fmt: skip
    """Schedule, as transformers.get_scheduler names it."""
    warmup_steps: float = Field(0, ge=0)
    """Warm-up in optimizer updates; a value below 1 is a fraction of all updates."""
    min_lr: float | None = Field(None, ge=0)
    """Floor of a cosine schedule."""
    max_steps: int | None = Field(None, ge=1)
    """Steps (rollout batches) to train; overrides num_epochs."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """What all ranks do when a gradient is not finite: leave out that update (10 in a row stop the run), or stop at once."""
    num_epochs: float = Field(1.0, gt=0)
    """Passes over the data, if max_steps is not set."""
    tokens_per_microbatch: int = Field(16384, ge=1)
    """Bound on the tokens of one forward and backward pass: of its prompts, each once, and their completions."""

    @field_validator("betas")
    @classmethod
    def _betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both must lie in [0, 1)")
        return value


class EvalConfig(Section):
    every: int | None = Field(None, ge=1)
    """Evaluate every N steps; none: only before and after training."""
    before_training: bool = True
    """Evaluate before the first step, so that the end has something to be compared with."""
    num_samples: int = Field(1, ge=1)
    """Completions per problem for mean@k and pass@k, beside the greedy one; 1: greedy only."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of those completions."""
    max_samples: int | None = Field(None, ge=1)
    """Evaluate on the first N evaluation problems."""
    correctness: str | None = None
    """Name of the reward that decides what is correct; none: the first one that checks answers."""
    correct_above: float = 0.0
    """Its value above which a completion is correct (0.99 where a wrong answer earns something too)."""
    format: str | None = None
    """Name of the reward whose value above 0 means well-formed; none: `format`, else <think>..</think> <answer>..</answer>."""


class CheckpointConfig(Section):
    save_steps: int | None = Field(None, ge=1)
    """Save every N steps; the last step is always saved."""
    keep: int = Field(2, ge=1)
    """Checkpoints to keep; older ones are deleted."""
    keep_best: str | None = Field(None, pattern=r"^eval/")
    """Also save and keep the checkpoint with the highest value of this evaluation metric (eval/greedy_accuracy, say)."""
    background: bool = False
    """Copy the state to host memory and write it while training goes on."""
    resume: str = "auto"
    """auto: continue from the newest valid checkpoint in output_dir; never: start afresh; or a checkpoint folder to begin from, once."""
    accept_changes: bool = False
    """Continue although model, data, algorithm, seed or batch differ from the checkpoint's."""


class LoggingConfig(Section):
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases mode; metrics.jsonl is always written."""
    project: str = "grpo"
    """wandb project."""
    run_name: str | None = None
    """wandb run name; none: the name of output_dir."""
    log_completions: int = Field(4, ge=0)
    """Completions written to completions/ (Parquet, with each token's log-probs) every N = `every` steps; 0: none."""
    every: int = Field(1, ge=1)
    """Console line, wandb point and completions every N steps (metrics.jsonl has every step)."""


class RuntimeConfig(Section):
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda)$")
    """auto (CUDA where there is one), cpu, or cuda."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16: autocast over fp32 master weights; fp32: no autocast."""
    packed: bool = True
    """Compute each prompt once per group when scoring; false: once per completion, in padded rows."""
    fast_decode: bool = True
    """Decode with steps written out for Llama-shaped models and weights copied once a rollout; false: with transformers' modules."""
    cuda_graphs: bool = True
    """Capture decode steps in CUDA graphs where the model allows it (CUDA; not yet run on any; needs fast_decode); false:
    launch them one by one."""
    timeout_s: float = Field(1800.0, gt=0)
    """Seconds a rank waits for the others before it gives up."""
    deterministic: bool = False
    """Only kernels that give the same bits every time (CUDA; slower)."""
    threads_per_rank: int | None = Field(None, ge=1)
    """CPU threads of each rank; none: cores / ranks on this machine."""
    rehearse: bool | None = None
    """Try a largest step at start, so that memory runs out in the first minute or never; none: on CUDA only."""
    profile: int | None = Field(None, ge=1)
    """Write a torch profiler trace of step N (counted from 1) to output_dir/trace_step_N.json.gz, for Perfetto."""


class Config(Section):
    output_dir: str = "runs/default"
    """Folder of the run: config.yaml, metrics.jsonl, completions/, checkpoint-<step>/."""
    seed: int = Field(0, ge=0, lt=2**63)
    """All randomness of the run follows from it."""
    debug: bool = False
    """The same as --debug: a single process, a handful of prompts, 2 steps, everything printed and checked."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="before")
    @classmethod
    def _implied(cls, values: Any) -> Any:
        return add_what_is_implied(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        check_sections_agree(self)
        return self


_DEBUG = {
    # What --debug makes of any config. Values are caps for sizes, replacements for the rest.
    "rollout": {"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 64},
    "data": {"max_train_samples": 32, "max_eval_samples": 4},
    "optim": {"max_steps": 2},
    "eval": {"num_samples": 1, "max_samples": 4},
    "checkpoint": {"resume": "never", "save_steps": None, "keep_best": None},
    "logging": {"wandb": "disabled", "every": 1},
}


def _debug_version(config: Config) -> Config:
    values = config.model_dump()
    for section, changes in _DEBUG.items():
        for key, value in changes.items():
            old = values[section][key]
            values[section][key] = min(old, value) if isinstance(value, int) and old is not None else value
    minibatches = values["algorithm"]["num_minibatches"]
    values["rollout"]["prompts_per_step"] = max(values["rollout"]["prompts_per_step"] // minibatches, 1) * minibatches
    folder = config.output_dir.rstrip("/")
    values |= {"debug": True, "output_dir": folder if config.debug and folder.endswith("-debug") else f"{folder}-debug"}
    return Config.model_validate(values)


def load_config(argv: list[str]) -> Config:
    """``["--config", "file.yaml", "section.key=value", "--debug"]`` -> a validated :class:`Config`.

    Later overrides win over earlier ones, all overrides over the file, the file over the defaults.

    Raises:
        ConfigError: a ``ValueError``; one line per mistake.
        SystemExit: with code 0 after ``--help``.
    """
    values, debug = parse_arguments(argv, Config)
    config = validate(Config, values)
    return _debug_version(config) if debug or config.debug else config
