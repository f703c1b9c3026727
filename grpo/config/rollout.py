"""The section ``rollout``: how completions are sampled, and by which engine."""

import re
import shlex
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from grpo.config.schema import Folder, Section
from grpo.config.secrets import is_secret

SERVER_KEYS = ("server", "num_servers", "vllm_command", "server_timeout_s", "weights_folder")
"""Keys that are read with ``engine=vllm`` alone. They do not change the algorithm, so they may differ when a run continues."""


class RolloutConfig(Section):
    prompts_per_step: int = Field(8, ge=1)
    """Problems per step, over all ranks."""
    prompts_per_rank: int | None = Field(None, ge=1)
    """Problems per step and rank, in place of prompts_per_step, which becomes this number times the ranks; none: prompts_per_step says it."""
    num_generations: int = Field(8, ge=1)
    """Completions per problem (G)."""
    max_completion_length: int = Field(256, ge=1)
    """Longest completion in tokens; longer ones are truncated."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; log-probs are computed at the same temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample only among the likeliest tokens that have this probability together; below 1, see keep_sampling_mask."""
    top_k: int = Field(0, ge=0)
    """Sample only among the k likeliest tokens; 0: all. Above 0, see keep_sampling_mask."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Do not sample tokens with less than this fraction of the likeliest token's probability; above 0, see keep_sampling_mask."""
    keep_sampling_mask: bool = False
    """Compute log-probs by a softmax over the tokens that top_p, top_k and min_p kept when the token was sampled, as DeepSeek-V3.2 does.
    False: over the whole vocabulary, and with any of these three the gradient estimate is biased."""
    stop: list[str] = []
    """Strings that end a completion; they stay part of it. A special token is found by its id and must stand alone in its string."""
    tokens_in_flight: int | None = Field(None, ge=1)
    """Most tokens (prompt + completion) in the KV cache at once, per rank; none: the whole batch, or what the dry run finds to fit."""
    engine: Literal["builtin", "vllm"] = "builtin"
    """Sampler of the completions: builtin, in the training process with its own weights; vllm, servers that get the weights before each
    rollout (docs/vllm.md)."""
    server: str | list[str] = "start"
    """With engine=vllm: start, then the trainer starts vLLM on this machine; or the address of a server, http://host:8000, or several,
    which the ranks share."""
    num_servers: int = Field(1, ge=1)
    """With server=start: number of servers to start."""
    vllm_command: str = "vllm serve {model}"
    """With server=start: the command, to which port, precision and lengths are added; {model} is the model's folder, {index} the number of
    the server, from 0. vLLM may be in an environment of its own: /path/bin/vllm serve {model}."""
    server_timeout_s: float = Field(600.0, gt=0)
    """With engine=vllm: seconds that a server may take to start, or to answer one request (sample one completion, load the weights)."""
    weights_folder: Folder = "/dev/shm"
    """With engine=vllm: folder through which the servers get the weights; /dev/shm is memory. For servers on other machines: a folder
    that all machines see."""

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty string would end every completion at its first token")
        return value

    @field_validator("server", mode="before")
    @classmethod
    def _addresses(cls, value: Any) -> str | list[str]:
        """``start``, or addresses without a slash at the end."""
        return value if value == "start" else checked_addresses(value)

    @field_validator("vllm_command")
    @classmethod
    def _command(cls, value: str) -> str:
        return checked_command(value)

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.engine == "vllm" and self.keep_sampling_mask:
            raise ValueError(
                "rollout.keep_sampling_mask=true needs the tokens that could be drawn, which rollout.engine=vllm does not get from the server: use "
                "engine=builtin, or keep_sampling_mask=false"
            )
        if self.num_servers > 1 and self.server != "start":
            raise ValueError(
                f"rollout.num_servers={self.num_servers} is for server=start: with addresses, name each server in rollout.server"
            )
        return self

    @property
    def addresses(self) -> list[str] | None:
        """Addresses of servers that run already; None: the trainer starts servers."""
        if self.server == "start":
            return None
        return [self.server] if isinstance(self.server, str) else self.server

    @property
    def without_effect(self) -> list[tuple[str, str]]:
        """``(key, "other=value")`` of each key that differs from its default, but has no effect with that value of another key."""
        ignored = [(key, "engine=builtin", self.engine == "builtin") for key in SERVER_KEYS]
        ignored.append(("vllm_command", "server=ADDRESS", self.engine == "vllm" and self.server != "start"))
        ignored.append(("tokens_in_flight", "engine=vllm", self.engine == "vllm"))
        keys = type(self).model_fields
        return [(key, o) for key, o, is_ignored in ignored if is_ignored and getattr(self, key) != keys[key].default]


def engine_overrides(engine: str) -> list[str]:
    """``section.key=value`` for an evaluation or a chat: the engine, and with vLLM a server of its own, not those of the model's run."""
    return [f"rollout.engine={engine}", "rollout.server=start", "rollout.num_servers=1"]


def checked_addresses(value: Any) -> str | list[str]:
    """Addresses of servers, without a slash at the end; ValueError for what is none."""
    given = value if isinstance(value, list | tuple) else [value]
    addresses = [address.rstrip("/") if isinstance(address, str) else address for address in given]
    if not addresses:
        raise ValueError("an empty list: name an address, http://host:8000, or start")
    if any("@" in str(address) for address in addresses):
        raise ValueError("a password in an address is a secret: set VLLM_API_KEY in the environment instead")
    for address in addresses:
        if not _is_address(address):
            raise ValueError(f"{address!r} is neither start nor an address: use start, or http://host:8000")
    if twice := sorted({address for address in addresses if addresses.count(address) > 1}):
        raise ValueError(f"{', '.join(twice)} is named twice")
    return addresses[0] if isinstance(value, str) else addresses


def _is_address(value: Any) -> bool:
    try:
        parts = urlsplit(value if isinstance(value, str) else "")
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not parts.query
    except ValueError:  # a port that is no number
        return False


def checked_command(value: str) -> str:
    """A command that names the model; ValueError for other placeholders and open quotes."""
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValueError(f"{value!r} cannot be cut into words: {error}") from None
    if unknown := sorted(set(re.findall(r"\{\w*\}", value)) - {"{model}", "{index}"}):
        raise ValueError(f"{', '.join(unknown)} is not known: there are {{model}} and {{index}}")
    pairs = [word.partition("=") for word in words]
    secrets = [name for name, equals, value in pairs if name == "--api-key" or (equals and is_secret(name, value))]
    if secrets:
        raise ValueError(
            f"{secrets[0]} is a secret: set it in the environment (VLLM_API_KEY), which the server gets too"
        )
    if not any("{model}" in word for word in words[1:]):
        raise ValueError("it needs {model} where the model's folder goes, as in: vllm serve {model}")
    return value
