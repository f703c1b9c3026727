"""Print the YAML file of a TRL script: python examples/yaml_from_trl.py SCRIPT.py [ITS ARGUMENTS]

The script runs, in an environment with TRL, until it makes its GRPOTrainer. There it ends: nothing
is trained. What a person has to do follows as comments. docs/from_trl.md says what behaves
differently.
"""

import inspect
import math
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import yaml
from trl import GRPOConfig, GRPOTrainer

from grpo.config import Config, ConfigError, keys_of, make_config, unknown_key

FIELDS = keys_of(Config)
KEYS = list(FIELDS)
# Of keys with the same end, the first is meant: max_completion_length is the rollout's.
SAME_VALUES = {key.rpartition(".")[2]: key for key in reversed(KEYS)} | {
    "num_train_epochs": "optim.num_epochs",
    "importance_sampling_level": "algorithm.importance_level",
    "vllm_importance_sampling_clip_max": "algorithm.sampler_correction_max",
    "vllm_importance_sampling_clip_min": "algorithm.sampler_correction_min",
    "activation_checkpointing": "model.gradient_checkpointing",
    "logging_steps": "logging.every",
    "eval_on_start": "eval.before_training",
}
"""TRL's name of a setting -> the key that takes the same values. Most have the key's name."""
TRANSLATED = {
    "beta",
    "scale_rewards",
    "use_bias_correction_kl",
    "loss_type",
    "epsilon_high",
    "reward_weights",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "max_steps",
    "eval_strategy",
    "eval_steps",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "sync_ref_model",
    "ref_model_sync_steps",
    "ref_model_mixup_alpha",
    "adam_beta1",
    "adam_beta2",
    "max_grad_norm",
    "optim",
    "use_vllm",
    "bf16",
    "use_cpu",
    "report_to",
    "log_completions",
    "num_completions_to_print",
}
"""Settings whose values have another form here: the functions below translate them."""
OTHER_DEFAULTS = ("num_train_epochs", "lr_scheduler_type", "gradient_checkpointing", "seed")
"""Settings with another default in TRL, which matter though a script does not set them."""
ALWAYS_SHOWN = ("algorithm.name", "algorithm.scale", "algorithm.beta", "rollout.prompts_per_step")
"""Keys that are printed even if their value is the default."""

MOVED = "my_functions.py"
"""File for functions that the script defines. An import of the script would train."""


def plain(value: Any) -> Any:
    """Return a setting as YAML can hold it: enumerations by their value, sets and pairs as
    lists."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, tuple):
        return list(value)
    return value


def answer(name: str) -> str:
    """Return what the command line answers to a name of TRL: a key, a key with a note (``KEY;
    NOTE``), or why there is none."""
    text = unknown_key(name, KEYS).removeprefix(f"unknown key {name!r}").lstrip(":; ")
    return re.sub(r"^did you mean '(\S+)'\?", r"\1;", text).removesuffix(";")


def algorithm_keys(args: GRPOConfig) -> dict[str, Any]:
    """Return the keys of the loss and of the advantages."""
    # TRL takes True and False, too.
    scale = {"True": "group", "False": "none"}.get(str(args.scale_rewards), args.scale_rewards)
    keys = {"algorithm.scale": scale, "algorithm.beta": args.beta}
    if args.beta:
        keys["algorithm.unbiased_kl"] = args.use_bias_correction_kl
    if args.loss_type in ("dapo", "bnpo"):
        keys["algorithm.aggregation"] = "token_mean"
    elif args.loss_type == "dr_grpo":
        keys["algorithm.aggregation"] = "constant"
    else:
        # The configuration refuses a loss that this project does not have, by its name.
        keys["algorithm.name"] = args.loss_type
    if args.epsilon_high is not None:
        # TRL's value for CISPO is the cap itself.
        keys["algorithm.epsilon_high"] = args.epsilon_high - (args.loss_type == "cispo")
    return keys


def counted_keys(args: GRPOConfig) -> dict[str, Any]:
    """Return the keys that count problems and steps, for one GPU."""
    # A rollout has at least the completions of one update.
    accumulated = args.gradient_accumulation_steps
    passes = max(args.steps_per_generation, accumulated)
    minibatches = passes / accumulated
    updates = minibatches * args.num_iterations
    problems = args.per_device_train_batch_size * passes / args.num_generations
    keys = {"rollout.prompts_per_step": problems, "algorithm.num_minibatches": minibatches}
    # TRL counts updates, and these keys count rollouts.
    if args.max_steps > 0:
        keys["optim.max_steps"] = math.ceil(args.max_steps / updates)
    if plain(args.eval_strategy) == "steps":
        keys["eval.every"] = math.ceil((args.eval_steps or args.logging_steps) / updates)
    if plain(args.save_strategy) == "steps" and args.save_steps >= 1:
        keys["checkpoint.save_steps"] = math.ceil(args.save_steps / updates)
        keys["checkpoint.keep"] = args.save_total_limit or 1000
    if args.sync_ref_model:
        keys["algorithm.ref_sync_steps"] = math.ceil(args.ref_model_sync_steps / updates)
        keys["algorithm.ref_sync_alpha"] = args.ref_model_mixup_alpha
    return keys


def other_keys(args: GRPOConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Return the other keys whose values have another form in TRL."""
    keys = {
        "optim.name": "adamw8bit" if "8bit" in plain(args.optim) else "adamw",
        "optim.betas": (args.adam_beta1, args.adam_beta2),
        # 0 switches clipping off in TRL. So does a norm that no gradient has.
        "optim.max_grad_norm": args.max_grad_norm or 1e9,
    }
    if args.use_vllm:
        keys |= {"rollout.engine": "vllm", "rollout.server": "start"}
    if given.get("bf16") is False:
        keys["runtime.precision"] = "fp32"
    if given.get("use_cpu"):
        keys["runtime.device"] = "cpu"
    if args.log_completions and args.num_completions_to_print:
        keys["logging.log_completions"] = args.num_completions_to_print
    for dashboard in args.report_to:
        keys[f"logging.{dashboard}"] = "online" if dashboard == "wandb" else True
    return keys


def settings_keys(
    args: GRPOConfig,
    given: dict[str, Any],
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of all settings, and a line for each setting that needs a person.

    Args:
        given: the settings that the script gives.
    """
    keys = {}
    translated = algorithm_keys(args) | counted_keys(args) | other_keys(args, given)
    for key, value in translated.items():
        is_default = key in FIELDS and value == FIELDS[key].default
        if key in ALWAYS_SHOWN or not is_default:
            keys[key] = value
    for name in OTHER_DEFAULTS:
        keys[SAME_VALUES[name]] = getattr(args, name)
    left = []
    for name, value in given.items():
        if name in TRANSLATED:
            continue
        key, _, note = answer(name).partition("; ")
        if name not in SAME_VALUES:
            left.append(f"{name}={plain(value)!r}: {answer(name)}")
            continue
        keys[SAME_VALUES[name]] = value
        if note:
            left.append(f"{key}: {note}")
    return keys, left


def set_fields(settings: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that have another value than their default."""
    found = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if field.init and value != default:
            found[field.name] = value
    return found


def lora_keys(peft_config: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of a LoraConfig, and a line for each setting that needs a person."""
    keys = {"lora.rank": peft_config.r, "lora.alpha": peft_config.lora_alpha}
    if peft_config.lora_dropout:
        keys["model.disable_dropout"] = False
    left = []
    for name, value in set_fields(peft_config).items():
        key = answer(f"lora.{name}" if name == "bias" else name)
        if key in FIELDS:
            keys[key] = value
        elif name not in ("peft_type", "task_type", "peft_version"):
            left.append(f"LoraConfig {name}={value!r:.60}: {key}")
    return keys, left


def name_of(function: Callable, script: Path) -> str:
    """Return a function or a class as the configuration names it: worker processes import it."""
    file = Path(inspect.getsourcefile(function)).resolve()
    if file == script.resolve():
        return f"{MOVED}:{function.__name__}"
    if file.is_relative_to(Path.cwd()):
        return f"{file.relative_to(Path.cwd())}:{function.__name__}"
    return f"{function.__module__}:{function.__name__}"


def reward_entries(
    functions: Any,
    weights: list[float] | None,
    script: Path,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return ``reward.functions``, and a line for each reward without a name, or reward model."""
    if not isinstance(functions, list):
        functions = [functions]
    entries = []
    left = []
    for number, function in enumerate(functions):
        arguments = getattr(function, "keywords", {})  # of functools.partial
        function = getattr(function, "func", function)
        if not inspect.isfunction(function):
            left.append(f"a function in {MOVED} for {function!r:.60}: docs/rewards.md")
            continue
        entry = {"name": name_of(function, script)}
        if arguments:
            entry["args"] = arguments
        if weights:
            entry["weight"] = weights[number]
        entries.append(entry)
    return entries, left


def argument_keys(
    given: dict[str, Any],
    weights: list[float] | None,
    script: Path,
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of GRPOTrainer's arguments, and a line for each that needs a person."""
    keys = {}
    left = []
    for name, value in given.items():
        if value is None:
            continue
        if name == "model":
            keys["model.name_or_path"] = value if isinstance(value, str) else value.name_or_path
        elif name == "reward_funcs":
            keys["reward.functions"], lines = reward_entries(value, weights, script)
            left += lines
        elif name == "train_dataset":
            keys["data.dataset"] = "data/train"
            left.append('rows: dataset.save_to_disk("data/train") once, or data.dataset=SOURCE')
            # TRL gives text to the model as it is, without a chat template.
            if isinstance(next(iter(value)).get("prompt"), str):
                keys["data.prompt_template"] = "{prompt}"
        elif name == "eval_dataset":
            keys["data.eval_dataset"] = "data/eval"
            left.append('rows: eval_dataset.save_to_disk("data/eval")')
        elif name == "peft_config":
            lora, lines = lora_keys(value)
            keys |= lora
            left += lines
        elif name == "tools":
            keys["tools"] = [name_of(tool, script) for tool in value]
        elif name == "environment_factory":
            keys["environment"] = name_of(value, script)
        else:
            left.append(f"{name}: {answer(name)}")
    if MOVED in str(keys):
        left.append(f"functions: move those of the script into {MOVED}")
    return keys, left


def yaml_text(keys: dict[str, Any]) -> str:
    """Return keys as YAML, in the order of the schema."""
    values = {}
    for key in sorted(keys, key=lambda key: KEYS.index(key) if key in KEYS else -1):
        section, _, name = key.rpartition(".")
        inner = values.setdefault(section, {}) if section else values
        inner[name] = plain(keys[key])
    return yaml.safe_dump(values, sort_keys=False, width=100)


def main(argv: list[str]) -> None:
    if not argv:
        sys.exit(__doc__)
    script = Path(argv[0])
    make_args = GRPOConfig.__init__
    parameters = inspect.signature(GRPOTrainer.__init__)
    names = [field.name for field in fields(GRPOConfig) if field.init]
    given = {}

    def remember(args: GRPOConfig, *positional, **by_name) -> None:
        settings = dict(zip(names, positional, strict=False)) | by_name
        # Names that TRL has removed are answered, too.
        known = {name: value for name, value in settings.items() if name in names}
        # Without a GPU, TRL refuses bf16, its default.
        on_cpu = {} if torch.cuda.is_available() else {"use_cpu": True, "bf16": False}
        make_args(args, **known | on_cpu)
        given.update(settings)
        # A parser of command lines gives all settings.
        if len(known) == len(names):
            changed = set_fields(args)
            for name in names:
                if name not in changed or known[name] is None:
                    del given[name]

    def show(trainer: GRPOTrainer, *positional, **by_name) -> None:
        arguments = parameters.bind(trainer, *positional, **by_name).arguments
        del arguments["self"]
        args = arguments.pop("args", None) or GRPOConfig()
        keys, left = settings_keys(args, given)
        more_keys, more_left = argument_keys(arguments, args.reward_weights, script)
        keys |= more_keys
        left += more_left
        try:
            make_config({key: plain(value) for key, value in keys.items()})
        except ConfigError as error:
            left += str(error).splitlines()
        print(f"# {script.name} on one GPU. What it does not set has TRL's defaults.")
        print(yaml_text(keys), end="")
        for line in left:
            print(f"# TO DO: {line}")
        sys.exit()

    GRPOConfig.__init__ = remember
    GRPOTrainer.__init__ = show
    sys.argv = argv
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    sys.exit(f"{script} made no GRPOTrainer")


if __name__ == "__main__":
    main(sys.argv[1:])
