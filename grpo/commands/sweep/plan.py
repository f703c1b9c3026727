"""The runs of a sweep: every variant of the configuration with every seed. All are checked before the first one starts."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from grpo.config import Config, ConfigError, load_config, masked_argument

BASE = "base"
"""The variant that is the configuration as it is."""
OWN_KEYS = {
    "output_dir": "each run gets a folder of its own: use --output",
    "seed": "each variant runs with several seeds: use --seeds",
    "debug": "this is for a single run: python train_grpo.py --config FILE --debug",
}
"""Keys that cannot be set in a sweep, and what to write instead."""
MAX_NAME = 150
"""Bytes of a folder's name; file systems allow 255."""


@dataclass(frozen=True)
class Variant:
    """The configuration with one value of each varied key."""

    name: str
    """``base``, or ``section.key=value``, joined by commas if there are several; secrets are masked."""
    overrides: tuple[str, ...] = ()
    """Arguments of the command line: ``section.key=value``."""


@dataclass(frozen=True, eq=False)  # each is itself: a dictionary's key
class PlannedRun:
    """One variant with one seed: an ordinary run."""

    variant: str
    seed: int
    folder: Path
    """``output_dir`` of the run."""
    arguments: tuple[str, ...]
    """The training script's command line."""
    config: Config

    @property
    def log(self) -> Path:
        """The file with what the run prints."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


def read_vary(text: str) -> tuple[str, list[str]]:
    """``section.key=value,value,...`` as key and values. A comma inside brackets or quotes belongs to its value."""
    key, equals, rest = text.partition("=")
    values = [value.strip() for value in _split_at_commas(rest)]
    if not equals or not key or "" in values:
        raise ConfigError(f"--vary {text}: write section.key=value,value,... (an empty text is '')")
    return key.strip(), values


def _split_at_commas(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and (depth or not parts[-1].strip()):
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        if character == "," and depth <= 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def read_seeds(text: str) -> list[int]:
    """``0,1,2`` as numbers."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words) or len(set(map(int, words))) < len(words):
        raise ConfigError(f"--seeds {text}: write different whole numbers, 0,1,2 for example")
    return list(map(int, words))


def make_variants(varied: Sequence[tuple[str, list[str]]], *, one_at_a_time: bool) -> list[Variant]:
    """Every combination of the values, in order; or, with ``one_at_a_time``, ``base`` and each value alone.

    Args:
        varied: key and values of each ``--vary``.
    """
    for key, _ in varied:
        if key in OWN_KEYS:
            raise ConfigError(f"--vary {key}: {OWN_KEYS[key]}")
        if [other for other, _ in varied].count(key) > 1:
            raise ConfigError(f"--vary {key} is given twice: write all its values after one, with commas between them")
    options = [[f"{key}={value}" for value in values] for key, values in varied]
    if one_at_a_time:
        return [Variant(BASE), *(_variant((option,)) for option in itertools.chain(*options))]
    return [_variant(combination) for combination in itertools.product(*options)]


def _variant(overrides: tuple[str, ...]) -> Variant:
    return Variant(",".join(map(masked_argument, overrides)) or BASE, overrides)


def folder_name(name: str) -> str:
    """The name of a variant's folder: every other character becomes ``-``; a long name is cut and ends in a digest of the whole."""
    clean = re.sub(r"[^\w.=,+-]+", "-", name).strip("-")
    if len(clean.encode()) <= MAX_NAME:
        return clean
    return f"{clean.encode()[: MAX_NAME - 9].decode(errors='ignore')}-{_digest(name)}"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def make_plan(
    file: str,
    overrides: Sequence[str],
    variants: Sequence[Variant],
    seeds: Sequence[int],
    output: Path,
) -> tuple[list[PlannedRun], list[str]]:
    """All runs, seed by seed, and notes on variants that are left out because an earlier one has the same settings.

    ConfigError: one line per mistake, in the words of a run and with the variant's name.
    """
    for override in overrides:
        if (key := override.partition("=")[0].lstrip("-")) in OWN_KEYS:
            raise ConfigError(f"{override}: {OWN_KEYS[key]}")
    kept: list[tuple[Variant, str, dict]] = []
    mistakes: dict[str, list[str]] = {}
    notes = []
    for variant in variants:
        try:
            arguments = ["--config", file, *overrides, *variant.overrides]
            settings = load_config(arguments).model_dump(mode="json")
        except ConfigError as error:
            for line in str(error).split("\n"):
                mistakes.setdefault(line, []).append(variant.name)
            continue
        if same := next((other.name for other, _, others in kept if others == settings), None):
            notes.append(f"{variant.name} has the settings of {same} and is left out")
            continue
        name = folder_name(variant.name)
        if any(name == other for _, other, _ in kept):
            name = f"{name}-{_digest(variant.name)}"
        kept.append((variant, name, settings))
    if mistakes:
        of_all = {line for line, names in mistakes.items() if len(names) == len(variants)}
        raise ConfigError(
            "\n".join(line if line in of_all else f"{names[0]}: {line}" for line, names in mistakes.items())
        )
    runs = []
    for seed in seeds:
        for variant, name, settings in kept:
            folder = output / name / f"seed-{seed}"
            own = {"seed": seed, "output_dir": str(folder)}
            if settings["logging"]["wandb"] != "disabled":
                own["logging.run_name"] = f"{variant.name}, seed {seed}"
            written = [f"{key}={_as_yaml(value)}" for key, value in own.items()]
            arguments = ["--config", file, *overrides, *variant.overrides, *written]
            config = load_config(arguments)
            runs.append(PlannedRun(variant.name, seed, folder, tuple(arguments), config))
    return runs, notes


def _as_yaml(value: int | str) -> str:
    """A value as the command line reads it: a text that would be read as something else is quoted."""
    return yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=math.inf).strip()[1:-1]
