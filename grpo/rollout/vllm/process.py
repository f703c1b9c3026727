"""vLLM servers that the trainer starts on its own machine (``rollout.server=start``) and ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo.config import ConfigError
from grpo.rollout.vllm.check import max_lora_rank
from grpo.rollout.vllm.keeper import KeptLog
from grpo.system.environment_defaults import without_environment_defaults
from grpo.system.masking import masked

KEEPER = Path(__file__).with_name("keeper.py")
END_S = 30.0
"""Seconds that a keeper has to end its server. Longer than its own limits."""
LAUNCHER_VARIABLES = re.compile(
    "RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_.*|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|TORCH_NCCL_.*"
)
"""Environment variables of the trainer's launcher, which would make the server look for other ranks."""
ERROR_LINE = re.compile(r"(\b\w*(Error|Exception)|\berror): ")
WITHOUT_CAUSE = ("Engine core initialization failed", "Engine process failed to start")
"""Errors of vLLM's front end that only say that there was an error before."""


@dataclass(frozen=True)
class _Started:
    keeper: subprocess.Popen
    host: str
    port: int
    log: Path
    log_start: int
    """Bytes of the log before this start."""


class StartedServers:
    """Servers of one model on this machine, each with a keeper process that restarts it, and ends it when this process has gone."""

    def __init__(
        self,
        command: str,
        model_path: str,
        *,
        num: int,
        dtype: str,
        max_model_len: int | None,
        lora_rank: int | None,
        weight_transfer: str = "file",
        folder: str | Path,
        timeout_s: float,
        show: Callable[[str], None] = print,
    ):
        """Start the servers and wait until all of them answer.

        Args:
            command: ``rollout.vllm_command``.
            model_path: a local folder.
            dtype: ``float32`` or ``bfloat16``.
            max_model_len: most tokens of a prompt and its completion; None: what the model allows.
            lora_rank: of the adapters that the server will get; None: none.
            weight_transfer: ``rollout.weight_transfer``.
            folder: gets the logs, ``vllm-<index>.log``.
            show: prints a line.

        Raises:
            ConfigError: one line, if a server cannot be started or does not answer in ``timeout_s`` seconds.
        """
        self._servers: list[_Started] = []
        options = {"--dtype": dtype, "--max-model-len": max_model_len, "--logprobs-mode": "processed_logprobs"}
        if lora_rank is not None:
            options |= {"--enable-lora": "", "--max-lora-rank": max_lora_rank(lora_rank)}
        elif weight_transfer != "file":
            options["--weight-transfer-config"] = json.dumps({"backend": weight_transfer})
        environment = server_environment(lora=lora_rank is not None, ipc=weight_transfer == "ipc")
        try:
            for index in range(num):
                self._start(
                    command_words(command, model_path, index), options, environment, Path(folder, f"vllm-{index}.log")
                )
            show(f"starting vLLM (log: {', '.join(str(server.log) for server in self._servers)}) ...")
            deadline = time.monotonic() + timeout_s
            for server in self._servers:
                _wait(server, deadline, timeout_s)
                server.keeper.send_signal(signal.SIGUSR1)  # from now on it restarts the server
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> list[str]:
        return [f"http://{server.host}:{server.port}" for server in self._servers]

    @property
    def logs(self) -> list[KeptLog]:
        return [KeptLog(server.log, server.keeper.pid) for server in self._servers]

    def close(self) -> None:
        """End all servers and their keepers."""
        for server in self._servers:
            server.keeper.terminate()
        for server in self._servers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.keeper.wait(END_S)
            server.keeper.kill()
            server.keeper.wait()
        self._servers = []

    def _start(self, words: list[str], options: dict, environment: dict[str, str], log: Path) -> None:
        given = _options_of(words)
        program = shutil.which(words[0], path=environment.get("PATH"))
        if program is None:
            raise ConfigError(
                f"rollout.vllm_command: {words[0]} is not found: install vLLM (it may be in an environment of its own) and name its "
                "program, /path/bin/vllm serve {model}"
            )
        host = given.get("--host", "127.0.0.1")
        if "--port" in given and self._servers:
            raise ConfigError(
                f"rollout.vllm_command: several servers cannot have one port ({given['--port']}): leave --port out, then free ones are taken"
            )
        port = _port(given.get("--port"), "" if host in ("0.0.0.0", "::") else host)
        # Only this machine may reach the routes that change weights.
        options = {"--host": host, "--port": port, **options, "--disable-uvicorn-access-log": ""}
        for name, value in options.items():
            if name not in given and value is not None:
                words = [*words, name, *([str(value)] if value != "" else [])]
        with open(log, "a", encoding="utf-8") as file:
            print(f"grpo: {time.strftime('%Y-%m-%d %H:%M:%S')} {shown(words)}", file=file)
        host = "127.0.0.1" if host in ("0.0.0.0", "::", "localhost") else host
        arguments = [str(os.getpid()), str(log.absolute()), host, str(port), program, *words[1:]]
        # A session of its own: Ctrl-C in the terminal is for the trainer, which still needs the server.
        keeper = subprocess.Popen(
            [sys.executable, "-I", str(KEEPER), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._servers.append(_Started(keeper, host, port, log, log.stat().st_size))


def command_words(command: str, model_path: str, index: int) -> list[str]:
    """The words of ``rollout.vllm_command``, without a shell, with its placeholders filled."""
    return [w.replace("{model}", str(model_path)).replace("{index}", str(index)) for w in shlex.split(command)]


def shown(words: list[str]) -> str:
    """The words as one text, with secrets masked as :func:`grpo.system.masking.masked` finds them, in ``NAME=VALUE`` and ``--name VALUE`` too."""
    found = []
    for before, word in zip(["", *words], words, strict=False):
        name, equals, value = word.partition("=")
        if equals:
            word = f"{name}={masked({name: value})[name]}"
        elif before.startswith("--") and not word.startswith("--"):
            word = masked({before: word})[before]
        found.append(word)
    return shlex.join(found)


def server_environment(*, lora: bool, ipc: bool = False) -> dict[str, str]:
    """The trainer's environment without what its launcher and this package set for it, and with the routes that load weights."""
    environment = without_environment_defaults(os.environ)
    # torchrun sets 1 for its processes unless the user has set a number.
    if "TORCHELASTIC_RUN_ID" in environment and environment.get("OMP_NUM_THREADS") == "1":
        del environment["OMP_NUM_THREADS"]
    environment = {name: value for name, value in environment.items() if not LAUNCHER_VARIABLES.fullmatch(name)}
    environment["VLLM_SERVER_DEV_MODE"] = "1"
    if lora:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if ipc:  # handles of memory are pickled
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return environment


def _options_of(words: list[str]) -> dict[str, str]:
    """The options of a command by name, ``--max-model-len`` also where it is written ``--max_model_len=N``; the value of any other option is the word behind it."""
    found = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name.replace("_", "-")] = value if equals else following
    return found


def _port(given: str | None, host: str) -> int:
    """The port of the command, which must be free, or a free one."""
    if given is not None and not (given.isdecimal() and int(given) < 2**16):
        raise ConfigError(
            f"rollout.vllm_command: --port {given} is not a port: leave --port out, then a free one is taken"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(given or 0)))
        except OSError as error:
            raise ConfigError(
                f"rollout.vllm_command: port {given} cannot be used ({error.strerror}): end what uses it, or leave --port out, "
                "then a free one is taken"
            ) from None
        return probe.getsockname()[1]


def _wait(server: _Started, deadline: float, timeout_s: float) -> None:
    """Return when the server answers.

    Raises:
        ConfigError: if it has ended, or the deadline has passed.
    """
    while True:
        if server.keeper.poll() is not None:
            raise ConfigError(
                f"vLLM ended while it started (exit code {server.keeper.returncode}): {last_error(server.log, server.log_start)} (log: "
                f"{server.log})"
            )
        if _is_healthy(server):
            return
        if time.monotonic() > deadline:
            raise ConfigError(
                f"vLLM at http://{server.host}:{server.port} does not answer after {timeout_s:g} s (log: {server.log}): see its log, or "
                "raise rollout.server_timeout_s"
            )
        time.sleep(0.2)


def _is_healthy(server: _Started) -> bool:
    # http.client knows no proxies: requests to this machine must not go through one.
    connection = http.client.HTTPConnection(server.host, server.port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def last_error(log: Path, start: int) -> str:
    """The last line of a log, from byte ``start`` on, that names an error and its cause; else the last line."""
    with open(log, "rb") as file:
        file.seek(max(start, log.stat().st_size - 2**20))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("grpo: ")]
    errors = [line for line in lines if ERROR_LINE.search(line) and not any(words in line for words in WITHOUT_CAUSE)]
    found = [*lines[-1:], *errors[-1:]]
    # Without vLLM's prefix of process, date and source file.
    return (
        re.sub(r"^(\(\w+ pid=\d+\) )?((ERROR|INFO|WARNING) [\d-]+ [\d:]+ \[[^\]]*\] )?", "", found[-1])
        if found
        else "no output"
    )
