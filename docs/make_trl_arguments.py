"""Write trl_arguments.md, the table of TRL's settings: python docs/make_trl_arguments.py [--check]

The keys come from the configuration, and the defaults from both programs. With --check nothing is
written, and the exit code is 1 if the page is not what this script writes.
"""

import dataclasses
import fnmatch
import re
import sys
import textwrap
from pathlib import Path

from transformers import TrainingArguments
from trl import GRPOConfig

from grpo.config import Config
from grpo.config.help import as_yaml, keys_of, unknown_key

PAGE = Path(__file__).with_name("trl_arguments.md")
KEYS = keys_of(Config)
BEGINNING = """\
# Each setting of TRL's GRPOConfig

For TRL 1.16.0; [Coming from TRL](from_trl.md) has the rest. This page is written by
`docs/make_trl_arguments.py`.

The column "here", without its notes, is what the command line answers to a name of TRL:
`save_total_limit=3` ends with `did you mean 'checkpoint.keep'?`. Both defaults are shown where a value means the same on both
sides; **those that differ are bold**. TRL's own settings come first, then those of
`transformers.TrainingArguments`. Settings that nothing replaces are
[at the end](#without-a-counterpart).

| TRL | here | TRL's default | default here |
|---|---|---|---|
"""
ENDING = """
## Without a counterpart

The settings of TRL that no key replaces, with the reason:

"""
COMPARABLE = """
    loss_type importance_sampling_level scale_rewards use_bias_correction_kl ref_model_mixup_alpha
    ref_model_sync_steps vllm_importance_sampling_mode vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min num_train_epochs logging_steps save_total_limit eval_on_start
    full_determinism ddp_timeout
"""
"""Settings of TRL whose values mean the same under a key of another name."""
NOTES = {
    "disable_dropout": "leave it true: most models have no dropout, and false is slower",
    "num_generations_eval": "sampled at `eval.temperature`, beside one greedy completion",
    "vllm_server_timeout": "a third of it, 600 s; in TRL 240",
    "vllm_group_port": "the weights go through files",
    "vllm_gpu_memory_utilization": "TRL's 0.3 is written `--gpu-memory-utilization 0.3`",
    "epsilon_high": "for `cispo` subtract 1 from TRL's value, which is the cap itself. Unset, the "
    "cap is 6 here, and in TRL `epsilon`, 0.2",
    "loss_type": "[more](from_trl.md#what-behaves-differently)",
    "mask_truncated_completions": "the [average](from_trl.md#what-behaves-differently) differs",
    "ref_model_sync_steps": "counts rollouts, in TRL updates; 0 is off, as without `sync_ref_model`",
    "ref_model_mixup_alpha": "always 1 with LoRA",
    "top_entropy_quantile": "of the tokens of a step, in TRL of a micro-batch",
    "vllm_importance_sampling_mode": "with vLLM `token_truncate` unless it is set",
    "log_completions": "a number of completions",
    "max_steps": "counts rollouts, in TRL updates",
    "save_steps": "counts rollouts, in TRL updates; no fractions",
    "save_total_limit": "a large number keeps all",
    "metric_for_best_model": "an `eval/...` metric; none is the weighted sum of the rewards",
    "beta": "0 with each preset but `grpo`",
    "lr_scheduler_kwargs": "of `cosine_with_min_lr`; the other schedules take no arguments",
    "bf16": "bf16 is the default on both sides",
    "load_best_model_at_end": "kept and named; the run ends with the weights of the last step",
    "resume_from_checkpoint": "the same command continues by itself",
}
REASONS = {
    "no such loss or bonus; the metric `entropy` is logged": "router_aux_loss_coef vespo_* "
    "entropy_* use_adaptive_entropy",
    "fixed at TRL's defaults, 1.05 and 1": "sapo_temperature_*",
    "log-probs are always computed in fp32": "cast_lm_head_to_fp32",
    "it would sample from another policy than the one that is scored": "repetition_penalty "
    "vllm_structured_outputs_regex",
    "data is always shuffled, from the seed": "shuffle_dataset train_sampling_strategy",
    "scoring packs rows without padding": "pad_to_multiple_of length_column_name",
    "finished completions always leave the batch": "*transformers_continuous_batching* "
    "use_transformers_paged",
    "a vLLM server keeps its memory, and is told the longest length": "vllm_enable_sleep_mode "
    "vllm_max_model_length",
    "text only": "log_multimodal",
    "two completions of each problem are logged": "log_unique_prompts",
    "nothing is uploaded; trackio shows runs of this machine": "log_completions_hub_repo "
    "trackio_* push_to_hub hub_*",
    "AdamW has PyTorch's epsilon, 1e-8, and trains all weights that are not frozen": "adam_epsilon "
    "optim_args optim_target_modules",
    "there are no labels": "label_smoothing_factor label_names",
    "evaluation has the precision of training": "*_full_eval",
    "PyTorch's own setting counts": "tf32",
    "checkpointing is always non-reentrant": "*_checkpointing_kwargs",
    "sampling has a KV cache, scoring none": "use_cache",
    "head and cross-entropy are computed in chunks": "*liger_kernel*",
    "`runtime.try_largest_step` finds what fits; TRL refuses it, too": "auto_find_batch_size",
    "not supported": "torch_compile* neftune_noise_alpha torch_empty_cache_steps log_level* "
    "eval_delay skip_memory_metrics",
    "the main rank alone logs": "log_on_each_node",
    "NaN is logged as null": "logging_nan_inf_filter",
    "`num_tokens` is always logged": "include_num_input_tokens_seen",
    "progress bars are shown in a terminal alone": "disable_tqdm",
    "evaluation counts right answers, and has no loss": "prediction_loss_only include_for_metrics "
    "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps batch_eval_metrics",
    "a run trains; `python -m grpo.evaluation` evaluates": "do_*",
    "checkpoints are complete, in one folder for all machines": "save_only_model save_on_each_node",
    "SIGTERM always saves": "enable_jit_checkpoint",
    "the highest value is the best": "greater_is_better",
    "the place in the data follows from the step": "ignore_data_skip",
    "there are no callbacks": "restore_callback_states_from_checkpoint",
    "torchrun, with DDP or FSDP2; the loss is averaged over all ranks": "accelerator_config "
    "parallelism_config local_rank ds3_gather_for_generation average_tokens_across_devices "
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph",
    "prompts are tokenized once, and a step has all its problems": "dataloader_*",
    "rewards get every column": "remove_unused_columns",
    "`--debug` is another feature": "debug",
}
"""Reason -> patterns of the names of settings that nothing replaces."""


def fields_of_trl() -> list[dataclasses.Field]:
    """Return the settings of GRPOConfig: its own first, then those of TrainingArguments."""
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    return sorted(dataclasses.fields(GRPOConfig), key=lambda field: field.name in inherited)


def replacement(name: str) -> str:
    """Return what the command line answers to a name of TRL: a key, or a sentence with keys."""
    message = unknown_key(name, list(KEYS))
    answer = re.sub(r"^unknown key '\w+'(: |; did you mean |; see .*)", "", message).strip("?'")
    if not answer:
        raise ValueError(f"{name} has neither a key nor a reason")
    if answer in KEYS:
        return f"`{answer}`"
    # Keys, some with a value, and names of TRL.
    return re.sub(r"\b[a-z]+\.\w+(=\w+)?|\b[a-z0-9]+(_[a-z0-9]+)+", r"`\g<0>`", answer)


def row(field: dataclasses.Field) -> str:
    """Return the row of the table for a setting of TRL."""
    here = replacement(field.name)
    defaults = ["", ""]
    key = re.search(r"`([\w.]+)", here)[1]
    if field.name == key.rpartition(".")[2] or field.name in COMPARABLE.split():
        # TRL writes -1 for a limit that is not set.
        theirs = None if field.default == -1 else field.default
        ours = KEYS[key].default
        defaults = [as_yaml(theirs), as_yaml(ours)]
        # None, 0 and an empty mapping all stand for "off".
        if theirs != ours and (theirs or ours):
            defaults = [f"**{text}**" for text in defaults]
    if field.name in NOTES:
        here += f"; {NOTES[field.name]}"
    return f"| `{field.name}` | {here} | {' | '.join(defaults)} |"


def page() -> str:
    """Return the text of the page."""
    fields = {field.name: field for field in fields_of_trl()}
    reasons = []
    for reason, patterns in REASONS.items():
        names = [name for pattern in patterns.split() for name in fnmatch.filter(fields, pattern)]
        for name in names:
            del fields[name]
        line = f"- {reason}: " + ", ".join(f"`{name}`" for name in names)
        reasons.append(textwrap.fill(line, 140, subsequent_indent="  ", break_on_hyphens=False))
    rows = map(row, fields.values())
    return BEGINNING + "\n".join(rows) + "\n" + ENDING + "\n".join(reasons) + "\n"


if __name__ == "__main__":
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.name} is not up to date: run python docs/make_trl_arguments.py")
