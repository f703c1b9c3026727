"""Print the YAML file of a TRL script.

The script runs, in an environment with TRL, until it makes its GRPOTrainer. There it ends: nothing
is trained. What a person has to do follows as comments. docs/from_trl.md says what behaves
differently.
"""

import argparse
import ast
import functools
import inspect
import math
import re
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig
from trl import GRPOConfig

from grpo.config import Config, ConfigError, keys_of, make_config, unknown_key

FIELDS = keys_of(Config)
KEYS = list(FIELDS)
# Of keys with the same end, the first is meant: max_completion_length is the rollout's.
SAME_VALUES = {key.rpartition(".")[2]: key for key in reversed(KEYS)} | {
    "num_train_epochs": "optim.num_epochs",
    "warmup_ratio": "optim.warmup_steps",
    "importance_sampling_level": "algorithm.importance_level",
    "vllm_importance_sampling_clip_max": "algorithm.sampler_correction_max",
    "vllm_importance_sampling_clip_min": "algorithm.sampler_correction_min",
    "activation_checkpointing": "model.gradient_checkpointing",
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
    "generation_batch_size",
    "max_steps",
    "eval_on_start",
    "eval_strategy",
    "eval_steps",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "logging_steps",
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
    "lr_scheduler_kwargs",
    "generation_kwargs",
    "model_init_kwargs",
}
"""Settings whose values have another form here: the functions below translate them."""
NOT_NEEDED = [
    "per_device_eval_batch_size",
    "eval_accumulation_steps",
    "logging_first_step",
    "logging_strategy",
    "gradient_checkpointing_kwargs",
    "activation_checkpointing_kwargs",
    "use_liger_kernel",
    "disable_tqdm",
    "remove_unused_columns",
    "save_safetensors",
    "save_only_model",
    "ddp_find_unused_parameters",
    "log_level",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "dataloader_drop_last",
    "group_by_length",
]
"""Settings that change memory, speed or output alone, and have no use here."""
OTHER_DEFAULTS = ("num_train_epochs", "lr_scheduler_type", "gradient_checkpointing", "seed")
"""Settings with another default in TRL, which matter though a script does not set them."""
ALWAYS_SHOWN = ("algorithm.name", "algorithm.scale", "algorithm.beta", "rollout.prompts_per_step")
"""Keys that are printed even if their value is the default."""
DEFAULTS = defaultdict(lambda: None, {each.name: each.default for each in fields(GRPOConfig)})
"""TRL's name of a setting -> its default; None for a name that TRL has removed."""
MAX_CHARACTERS = 1000
"""Prompts of this length have fewer tokens than data.max_prompt_length, unless it is set."""
MOVED = "my_functions.py"
"""File for functions that the script defines: worker processes import it."""


@dataclass
class Translation:
    """The configuration of a script, and what is left for a person to do."""

    keys: dict[str, Any] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    """A line for each part of the script that no value of a key says."""
    not_needed: list[str] = field(default_factory=list)
    """Names of the script's settings that have no use here."""


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


def add_algorithm(found: Translation, args: GRPOConfig) -> None:
    """Add the keys of the loss and of the advantages."""
    keys = found.keys
    # TRL takes True and False, too.
    scales = {"True": "group", "False": "none"}
    keys["algorithm.scale"] = scales.get(str(args.scale_rewards), args.scale_rewards)
    keys["algorithm.beta"] = args.beta
    if args.beta:
        keys["algorithm.unbiased_kl"] = args.use_bias_correction_kl
    if args.loss_type in ("dapo", "bnpo"):
        keys["algorithm.aggregation"] = "token_mean"
    elif args.loss_type == "dr_grpo":
        keys["algorithm.aggregation"] = "constant"
    else:
        # The configuration refuses a loss that this project does not have, by its name.
        keys["algorithm.name"] = args.loss_type
    if args.loss_type == "bnpo" and args.gradient_accumulation_steps > 1:
        found.left.append("loss_type='bnpo': token_mean is over an update, bnpo over a micro-batch")
    if args.mask_truncated_completions and args.loss_type in ("grpo", "sapo"):
        found.left.append(f"mask_truncated_completions: {answer('mask_truncated_completions')}")

    if args.loss_type != "cispo":
        if args.epsilon_high is not None:
            keys["algorithm.epsilon_high"] = args.epsilon_high
        return
    # TRL's value is the cap itself.
    cap = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if cap >= 1:
        keys["algorithm.epsilon_high"] = cap - 1
    else:
        found.left.append(
            f"loss_type='cispo': its weights are capped at {cap}, so all are about {cap}; here at "
            "1 + algorithm.epsilon_high, which is 6 unless it is set"
        )


def add_counts(
    found: Translation,
    args: GRPOConfig,
    given: dict[str, Any],
    num_rows: int | None,
) -> None:
    """Add the keys that count problems and steps."""
    keys = found.keys
    # A rollout has at least the completions of one update.
    accumulated = args.gradient_accumulation_steps
    passes = max(args.steps_per_generation, accumulated)
    minibatches = passes / accumulated
    updates = minibatches * args.num_iterations
    completions = args.per_device_train_batch_size * passes * args.world_size
    keys["rollout.prompts_per_step"] = completions / args.num_generations
    keys["algorithm.num_minibatches"] = minibatches
    if args.steps_per_generation < accumulated and args.num_iterations > 1:
        found.left.append(
            "steps_per_generation below gradient_accumulation_steps: with several iterations TRL's "
            "update has the same completions more than once; here it has more of them"
        )

    def count(key: str, name: str, num_updates: float) -> None:
        # TRL counts updates, or takes a fraction of them. These keys count rollouts.
        if num_updates < 1:
            num_updates = math.ceil(num_updates * max(args.max_steps, 0))
        if not num_updates:
            found.left.append(f"{name}: {key} is a number of rollouts, not a fraction")
            return
        rollouts = math.ceil(num_updates / updates)
        keys[key] = rollouts
        if num_updates % updates and key != "logging.every":
            found.left.append(
                f"{name}: {num_updates:g} updates are no whole number of rollouts; {rollouts} "
                f"rollouts are {rollouts * updates:g} updates"
            )

    def once_an_epoch(key: str, name: str) -> None:
        if num_rows is None:
            found.left.append(f"{name}='epoch': {key}=ROWS / rollout.prompts_per_step")
        else:
            keys[key] = max(int(num_rows / keys["rollout.prompts_per_step"]), 1)

    if args.max_steps > 0:
        count("optim.max_steps", "max_steps", args.max_steps)
    if "logging_steps" in given:
        count("logging.every", "logging_steps", args.logging_steps)
    if args.sync_ref_model:
        count("algorithm.ref_sync_steps", "ref_model_sync_steps", args.ref_model_sync_steps)
        keys["algorithm.ref_sync_alpha"] = args.ref_model_mixup_alpha
    strategy = plain(args.eval_strategy)
    if strategy != "no":
        keys["eval.before_training"] = args.eval_on_start
    if strategy == "steps":
        count("eval.every", "eval_steps", args.eval_steps or args.logging_steps)
    elif strategy == "epoch":
        once_an_epoch("eval.every", "eval_strategy")
    strategy = plain(args.save_strategy)
    if strategy == "steps":
        count("checkpoint.save_steps", "save_steps", args.save_steps)
    elif strategy == "epoch":
        once_an_epoch("checkpoint.save_steps", "save_strategy")
    elif strategy != "no":
        found.left.append(f"save_strategy={strategy!r}: checkpoint.keep_best keeps the best")
    if strategy != "no":
        keys["checkpoint.keep"] = args.save_total_limit or 1000


def add_other_forms(found: Translation, args: GRPOConfig, given: dict[str, Any]) -> None:
    """Add the other keys whose values have another form in TRL."""
    keys = found.keys
    keys["optim.betas"] = (args.adam_beta1, args.adam_beta2)
    # 0 switches clipping off in TRL. So does a norm that no gradient has.
    keys["optim.max_grad_norm"] = args.max_grad_norm or 1e9
    optimizer = plain(args.optim)
    if re.fullmatch(r"(paged_)?adamw(_bnb|_torch)?_8bit", optimizer):
        keys["optim.name"] = "adamw8bit"
    elif not re.fullmatch(r"(paged_)?adamw(_torch)?(_fused|_32bit)?", optimizer):
        found.left.append(f"optim={optimizer!r}: {answer('optim')}")
    if args.use_vllm:
        keys |= {"rollout.engine": "vllm", "rollout.server": "start"}
    if given.get("bf16") is False:
        keys["runtime.precision"] = "fp32"
    if given.get("use_cpu"):
        keys["runtime.device"] = "cpu"
    if args.log_completions and args.num_completions_to_print:
        keys["logging.log_completions"] = args.num_completions_to_print
    for dashboard in args.report_to:
        if f"logging.{dashboard}" in FIELDS:
            keys[f"logging.{dashboard}"] = "online" if dashboard == "wandb" else True
        else:
            found.left.append(f"report_to={dashboard!r}: {answer('report_to')}")


def add_mappings(found: Translation, args: GRPOConfig) -> None:
    """Add the keys of settings that are mappings themselves."""
    keys = found.keys
    for name, value in (args.lr_scheduler_kwargs or {}).items():
        if name == "min_lr":
            keys["optim.min_lr"] = value
        elif name == "min_lr_rate":
            keys["optim.min_lr"] = value * args.learning_rate
        else:
            found.left.append(f"lr_scheduler_kwargs {name}={value!r}: schedules have no arguments")
    for name, value in (args.generation_kwargs or {}).items():
        if name == "stop_strings":
            keys["rollout.stop"] = [value] if isinstance(value, str) else value
        elif f"rollout.{name}" in FIELDS:
            keys[f"rollout.{name}"] = value
        elif (name, value) != ("do_sample", True):
            found.left.append(f"generation_kwargs {name}={value!r}: {answer('generation_kwargs')}")
    for name, value in (args.model_init_kwargs or {}).items():
        if f"model.{name}" in FIELDS:
            keys[f"model.{name}"] = value
        elif name not in ("dtype", "torch_dtype", "use_cache", "device_map"):
            found.left.append(f"model_init_kwargs {name}={value!r}: {answer('model_init_kwargs')}")


def add_settings(
    found: Translation,
    args: GRPOConfig,
    given: dict[str, Any],
    num_rows: int | None = None,
) -> None:
    """Add the keys of all settings.

    Args:
        given: the settings that the script gives.
        num_rows: number of training rows. Default: not known, as for a stream.
    """
    translated = Translation()
    add_algorithm(translated, args)
    add_counts(translated, args, given, num_rows)
    add_other_forms(translated, args, given)
    add_mappings(translated, args)
    found.left += translated.left
    for key, value in translated.keys.items():
        is_default = key in FIELDS and value == FIELDS[key].default
        if key in ALWAYS_SHOWN or not is_default:
            found.keys[key] = value

    for name in OTHER_DEFAULTS:
        found.keys[SAME_VALUES[name]] = getattr(args, name)
    for name, value in given.items():
        if name in TRANSLATED:
            continue
        if value is None:
            if DEFAULTS[name] not in (None, MISSING):
                found.left.append(f"{name}=None: {answer(name)}")
            continue
        if name in NOT_NEEDED:
            found.not_needed.append(name)
            continue
        if name not in SAME_VALUES:
            # TRL's own default behaves as this project does.
            if value == DEFAULTS[name]:
                continue
            found.left.append(f"{name}={plain(value)!r}: {answer(name)}")
            continue
        key = SAME_VALUES[name]
        # A name that TRL has removed is no attribute.
        value = getattr(args, name, value)
        found.keys[key] = value
        _, _, note = answer(name).partition("; ")
        is_said = name in ("mask_truncated_completions", "warmup_ratio")
        if note and value != FIELDS[key].default and not is_said:
            found.left.append(f"{key}: {note}")


def set_fields(settings: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that have another value than their default."""
    found = {}
    for each in fields(settings):
        value = getattr(settings, each.name)
        default = each.default
        if each.default_factory is not MISSING:
            default = each.default_factory()
        if each.init and value != default:
            found[each.name] = value
    return found


def add_lora(found: Translation, peft_config: Any, model: str) -> None:
    """Add the keys of a LoraConfig."""
    found.keys["lora.rank"] = peft_config.r
    found.keys["lora.alpha"] = peft_config.lora_alpha
    if peft_config.lora_dropout:
        found.keys["model.disable_dropout"] = False
    if peft_config.target_modules is None:
        # peft chooses by the architecture. The default here is all linear layers.
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

        try:
            architecture = AutoConfig.from_pretrained(model).model_type
            names = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[architecture]
            found.keys["lora.target_modules"] = names
        except (OSError, KeyError):
            found.left.append("lora.target_modules: all linear layers; peft takes some of them")
    for name, value in set_fields(peft_config).items():
        key = answer(f"lora.{name}" if name == "bias" else name)
        if key in FIELDS:
            found.keys[key] = value
        elif name not in ("peft_type", "task_type", "peft_version"):
            found.left.append(f"LoraConfig {name}={value!r:.60}: {key}")


def add_model(found: Translation, model: Any) -> None:
    """Add the keys of the model, which is a name or an object."""
    if isinstance(model, str):
        found.keys["model.name_or_path"] = model
        return
    found.keys["model.name_or_path"] = model.name_or_path
    found.left.append(
        "model: the script passes an object. If it changed weights, precision or vocabulary: "
        "model.save_pretrained(FOLDER), the tokenizer's too, and model.name_or_path=FOLDER"
    )
    # A PeftModel has a configuration for each of its adapters.
    for name, peft_config in getattr(model, "peft_config", {}).items():
        add_lora(found, peft_config, model.name_or_path)
        found.left.append(
            f"lora: of the adapter {name!r}. If it is trained already, save it, and "
            "model.adapter=FOLDER"
        )


def add_own_trainer(found: Translation, trainer: type, base: type) -> None:
    """Say what a trainer of the script's own does in other ways than GRPOTrainer."""
    names = []
    for each in trainer.mro():
        if each is base:
            break
        names += [name for name, value in vars(each).items() if callable(value)]
    if names:
        found.left.append(
            f"{trainer.__name__} has its own {', '.join(names)}: a loss, advantages or a loop of "
            "your own (docs/algorithm.md)"
        )


def arguments_of(function: Any) -> dict[str, Any]:
    """Return the arguments that a functools.partial has, by name."""
    if not isinstance(function, functools.partial):
        return {}
    names = inspect.signature(function.func).parameters
    return dict(zip(names, function.args, strict=False)) | function.keywords


def name_of(function: Callable, script: Path) -> str:
    """Return a function or a class as the configuration names it."""
    file = Path(inspect.getsourcefile(function)).resolve()
    # An import of the script would train again, or load its model, unless both have a guard. A
    # function inside of a function cannot be imported.
    cannot_be_imported = not is_guarded(script) or "<locals>" in function.__qualname__
    if file == script.resolve() and cannot_be_imported:
        return f"{MOVED}:{function.__name__}"
    if file.is_relative_to(Path.cwd()):
        return f"{file.relative_to(Path.cwd())}:{function.__name__}"
    return f"{function.__module__}:{function.__name__}"


def is_guarded(script: Path) -> bool:
    """True if an import of the script makes no trainer: it stands in a function or under ``if
    __name__ == "__main__"``."""
    text = script.read_text()
    definitions = (ast.FunctionDef, ast.ClassDef, ast.If)
    at_import = [node for node in ast.parse(text).body if not isinstance(node, definitions)]
    makes_trainer = any("Trainer(" in ast.unparse(node) for node in at_import)
    return bool(re.search(r"^if __name__\b", text, re.MULTILINE)) and not makes_trainer


def add_rewards(
    found: Translation,
    functions: Any,
    weights: list[float] | None,
    script: Path,
) -> None:
    """Add ``reward.functions``."""
    if not isinstance(functions, list):
        functions = [functions]
    entries = []
    for number, function in enumerate(functions):
        entry = {}
        if weights:
            entry["weight"] = weights[number]
        arguments = arguments_of(function)
        if arguments:
            entry["args"] = arguments
        function = getattr(function, "func", function)
        if "trainer_state" in getattr(getattr(function, "__code__", None), "co_varnames", ()):
            found.left.append(f"{function.__name__}: trainer_state.global_step counts rollouts")
        if inspect.isfunction(function) and function.__name__ != "<lambda>":
            entries.append({"name": name_of(function, script)} | entry)
        elif type(function).__name__ == "_SoftOverlongPunishment":
            length = function.max_completion_len
            arguments = {"max_length": length, "cache_length": function.soft_punish_cache}
            entries.append({"name": "soft_overlong", "args": arguments} | entry)
        else:
            # A reward model, an object with __call__, a lambda.
            name = f"{MOVED}:reward_{number}"
            entries.append({"name": name} | entry)
            found.left.append(f"{name}: write a function for {function!r:.60} (docs/rewards.md)")
    found.keys["reward.functions"] = entries


def add_rows(found: Translation, key: str, rows: Any, folder: Path, save: bool) -> None:
    """Add a dataset, which the script has made in memory: it is saved, or a line says how.

    Args:
        key: ``data.dataset`` or ``data.eval_dataset``.
        save: write the rows to the folder.
    """
    found.keys[key] = str(folder)
    if not hasattr(rows, "save_to_disk"):
        found.left.append(f"{key}: a stream cannot be saved; name its source, or save some rows")
        return
    if save:
        rows.save_to_disk(folder)
    else:
        found.left.append(f"{key}: --save-rows writes the rows to {folder}; or name their source")
    longest = max((len(str(row.get("prompt"))) for row in rows), default=0)
    if longest > MAX_CHARACTERS:
        found.left.append(
            "data.max_prompt_length=512: longer prompts are left out, and TRL takes any length; "
            f"the longest has {longest} characters"
        )


def add_arguments(
    found: Translation,
    given: dict[str, Any],
    args: GRPOConfig,
    script: Path,
    save_rows: bool = False,
) -> None:
    """Add the keys of GRPOTrainer's arguments."""
    keys = found.keys
    left = found.left
    folder = Path("data") / script.stem
    for name, value in given.items():
        if value is None:
            continue
        if name == "model":
            add_model(found, value)
        elif name == "reward_funcs":
            add_rewards(found, value, args.reward_weights, script)
        elif name == "train_dataset":
            add_rows(found, "data.dataset", value, folder / "train", save_rows)
            # TRL gives text to the model as it is, without a chat template.
            if isinstance(next(iter(value)).get("prompt"), str):
                keys["data.prompt_template"] = "{prompt}"
        elif name == "eval_dataset" and isinstance(value, dict):
            left.append("eval_dataset: data.eval_dataset takes one dataset, not several")
        elif name == "eval_dataset" and plain(args.eval_strategy) == "no":
            left.append("eval_dataset: eval_strategy='no' never evaluates; data.eval_dataset would")
        elif name == "eval_dataset":
            add_rows(found, "data.eval_dataset", value, folder / "eval", save_rows)
        elif name == "peft_config":
            add_lora(found, value, keys["model.name_or_path"])
        elif name == "tools":
            keys["tools"] = [name_of(tool, script) for tool in value]
        elif name == "environment_factory":
            keys["environment"] = name_of(value, script)
        else:
            left.append(f"{name}: {answer(name)}")
    functions = [entry["name"] for entry in keys.get("reward.functions", [])]
    accuracies = [name for name in functions if name.startswith("trl.rewards.accuracy_rewards:")]
    if accuracies:
        keys["eval.correctness"] = accuracies[0].rpartition(":")[2]
    elif "data.eval_dataset" in keys and len(functions) > 1:
        left.append(
            f"eval.correctness: an evaluation counts as right what {functions[0]} gives more than "
            "eval.correct_above, 0; name the reward that checks answers"
        )
    # An object has its line already.
    if re.search(rf"{MOVED}:(?!reward_\d)", str(keys)):
        left.append(
            f"{MOVED}: move the script's functions there, as an import of the script would make "
            "its trainer again, or put trainer and training under if __name__ == '__main__'"
        )


def yaml_text(keys: dict[str, Any]) -> str:
    """Return keys as YAML, in the order of the schema."""
    values = {}
    for key in sorted(keys, key=lambda key: KEYS.index(key) if key in KEYS else -1):
        section, _, name = key.rpartition(".")
        inner = values.setdefault(section, {}) if section else values
        inner[name] = plain(keys[key])
    return yaml.safe_dump(values, sort_keys=False, width=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that the script was run on")
    parser.add_argument(
        "--save-rows", action="store_true", help="save the datasets to data/SCRIPT/"
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs="...", help="arguments of the script")
    options = parser.parse_args()
    script = options.script
    # Imported here, because this takes seconds.
    from trl import GRPOTrainer

    make_args = GRPOConfig.__init__
    parameters = inspect.signature(GRPOTrainer.__init__)
    names = [each.name for each in fields(GRPOConfig) if each.init]

    def remember(args: GRPOConfig, *positional, **by_name) -> None:
        settings = dict(zip(names, positional, strict=False)) | by_name
        # Names that TRL has removed are answered, too.
        known = {name: value for name, value in settings.items() if name in names}
        # Without a GPU, TRL refuses bf16, its default.
        on_cpu = {} if torch.cuda.is_available() else {"use_cpu": True, "bf16": False}
        make_args(args, **known | on_cpu)
        # A parser of command lines gives all settings.
        if len(known) == len(names):
            changed = set_fields(args)
            settings = {name: value for name, value in settings.items() if name in changed}
        args.given_settings = settings
        args.first_values = {name: getattr(args, name) for name in names}

    def show(trainer: Any, *positional, **by_name) -> None:
        arguments = parameters.bind(trainer, *positional, **by_name).arguments
        del arguments["self"]
        args = arguments.pop("args", None) or GRPOConfig()
        # A script may change settings after it has made them.
        given = dict(args.given_settings)
        for name, value in args.first_values.items():
            if getattr(args, name) != value:
                given[name] = getattr(args, name)
        rows = arguments.get("train_dataset")
        num_rows = len(rows) if hasattr(rows, "__len__") else None
        found = Translation()
        add_settings(found, args, given, num_rows)
        add_arguments(found, arguments, args, script, options.save_rows)
        add_own_trainer(found, type(trainer), GRPOTrainer)
        removed = ", ".join(given.keys() - set(names))
        # Workers import the script to find its rewards, without the wrapper of this program.
        if removed and f"{script.stem}.py:" in str(found.keys):
            found.left.append(
                f"{script.name}: this TRL has no {removed}, so an import of the script for its "
                "functions fails: remove that, or move the functions to a file of their own"
            )
        try:
            make_config({key: plain(value) for key, value in found.keys.items()})
        except ConfigError as error:
            found.left += str(error).splitlines()
        print(f"# {script.name}, GPUs: {options.gpus}, with TRL's defaults of what matters most.")
        print("# docs/from_trl.md: what behaves differently")
        print(yaml_text(found.keys), end="")
        for line in found.left:
            print(f"# TO DO: {line}")
        if found.not_needed:
            print(f"# Not needed here: {', '.join(found.not_needed)}")
        sys.exit()

    # TRL counts the completions of one GPU. It reads this attribute when it makes its arguments.
    GRPOConfig.world_size = options.gpus
    GRPOConfig.__init__ = remember
    GRPOTrainer.__init__ = show
    sys.argv = [str(script), *options.arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    sys.exit(f"{script} made no GRPOTrainer")


if __name__ == "__main__":
    main()
