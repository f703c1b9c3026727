"""Write trl_arguments.md, the table of TRL's settings: python docs/make_trl_arguments.py [--check]

The answers come from grpo/config/other_names.yaml and from names that are alike, the defaults from
both programs. With --check nothing is written, and the exit code is 1 if the page is not what this
script writes.
"""

import dataclasses
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

The column "here" is what the command line answers to a name of TRL: `save_total_limit=3` ends with
`did you mean 'checkpoint.keep'? a large number keeps all`. Both defaults are shown where a value
means the same on both sides; **those that differ are bold**. TRL's own settings come first, then
those of `transformers.TrainingArguments`. Settings that nothing replaces are
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
NO_COUNTERPART = "no counterpart; "
"""Begins the answer to a setting that no key replaces. The reason follows."""


def fields_of_trl() -> list[dataclasses.Field]:
    """Return the settings of GRPOConfig: its own first, then those of TrainingArguments."""
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    return sorted(dataclasses.fields(GRPOConfig), key=lambda field: field.name in inherited)


def replacement(name: str) -> str:
    """Return what the command line answers to a name of TRL: a key with or without a note, or a
    sentence."""
    message = unknown_key(name, list(KEYS))
    answer = re.sub(r"^unknown key '\w+'(: |; did you mean |; see .*)", "", message)
    # 'KEY'? NOTE
    answer = re.sub(r"^'(\S+)'\?$", r"\1", answer)
    answer = re.sub(r"^'(\S+)'\? ", r"\1; ", answer)
    if not answer:
        raise ValueError(f"{name} has neither a key nor a reason")
    return answer


def with_code(text: str) -> str:
    """Return a text with backticks around keys, some with a value, and names of settings."""
    if text in KEYS:  # `seed` looks like a word
        return f"`{text}`"
    text = re.sub(r"\b[a-z]+\.\w+(=\w+)?|\b[a-z0-9]+(_[a-z0-9]+)+", r"`\g<0>`", text)
    return text.replace("more: docs/`from_trl`.md", "[more](from_trl.md#what-behaves-differently)")


def row(field: dataclasses.Field) -> str:
    """Return the row of the table for a setting of TRL."""
    here = with_code(replacement(field.name))
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
    return f"| `{field.name}` | {here} | {' | '.join(defaults)} |"


def page() -> str:
    """Return the text of the page."""
    rows = []
    names_of_reason = {}
    for field in fields_of_trl():
        answer = replacement(field.name)
        if answer.startswith(NO_COUNTERPART):
            reason = with_code(answer.removeprefix(NO_COUNTERPART))
            names_of_reason.setdefault(reason, []).append(field.name)
        else:
            rows.append(row(field))
    reasons = []
    for reason, names in names_of_reason.items():
        line = f"- {reason}: " + ", ".join(f"`{name}`" for name in names)
        reasons.append(textwrap.fill(line, 140, subsequent_indent="  ", break_on_hyphens=False))
    return BEGINNING + "\n".join(rows) + "\n" + ENDING + "\n".join(reasons) + "\n"


if __name__ == "__main__":
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.name} is not up to date: run python docs/make_trl_arguments.py")
