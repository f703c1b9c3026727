"""Servers that the trainer starts: their options, environment, errors, and their end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import pytest
from conftest import ROOT

from grpo.config import ConfigError
from grpo.vllm.server import StartedServer, _environment

PROGRAM = """
import http.server, json, os, subprocess, sys
child = subprocess.Popen(["sleep", "1000"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps([os.getpid(), child.pid, sys.argv]).encode())
http.server.HTTPServer((sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def command(tmp_path):
    """A server with a child, in place of vLLM; the test with the real one is slow."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return f"env NAME=value {sys.executable} {program} {{model}} {{index}}"


def state(server) -> list:
    with urllib.request.urlopen(f"{server.address}/", timeout=10) as answer:
        return json.loads(answer.read())


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}/stat").exists() and not is_zombie(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_server_gets_the_options_of_the_run_before_those_of_its_command_and_ends_with_its_children(command, tmp_path):
    options = ["--dtype", "float32", "--enable-lora"]
    server = StartedServer(f"{command} --dtype=half --host=127.0.0.1", "/models/m", 1, options, tmp_path / "log")
    server.wait(60)
    pid, child, words = state(server)
    port = server.address.rpartition(":")[2]
    assert words[1:] == [
        *("/models/m", *options, "--host", "127.0.0.1", "--port", port),
        *("1", "--dtype=half", "--host=127.0.0.1"),  # the last of two values counts
    ]
    server.close()
    wait_until_gone(pid, child)
    assert server.explain("").startswith("has ended (exit code -15): ")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_its_trainer(command, tmp_path, number):
    """vLLM's front end ends its own processes; here the one that gets the signal counts."""
    script = f"""
        import sys, time
        from pathlib import Path
        from grpo.vllm.server import StartedServer
        server = StartedServer({command!r}, "/m", 0, [], Path({str(tmp_path / "log")!r}))
        server.wait(60)
        print(server.process.pid, flush=True)
        time.sleep(1000)
    """
    trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, cwd=ROOT)
    pid = int(trainer.stdout.readline())
    trainer.send_signal(number)
    trainer.wait()
    wait_until_gone(pid)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-program {model}", "rollout.vllm_command: no-such-program is not found: install vLLM"),
        ("python3 -c pass {model}", "vLLM has ended (exit code 0): no output (log: {log})"),
        ("python3 -c 'raise OSError(3)' {model}", "vLLM has ended (exit code 1): OSError: 3 (log: {log})"),
        (
            "python3 -c 'print(\"ValueError: too long\\nRuntimeError: Engine core initialization failed\");1/0' {model}",
            "vLLM has ended (exit code 1): ZeroDivisionError: division by zero (log: {log})",
        ),
        (
            "python3 -c 'import time; time.sleep(100)' {model}",
            "does not answer after 1 s (a third of runtime.timeout_s): see {log}",
        ),
    ],
)
def test_a_server_that_cannot_start_is_one_line(tmp_path, command, message):
    log = tmp_path / "log"
    log.write_text("ValueError: of a start before\n")
    with contextlib.ExitStack() as stack, pytest.raises(ConfigError) as error:
        stack.enter_context(contextlib.closing(StartedServer(command, "/m", 0, [], log))).wait(
            1 + 59 * ("ended" in message)
        )
    assert message.format(log=log, model="{model}") in str(error.value)


def test_environment_of_a_server(monkeypatch):
    for name, value in {"RANK": "0", "TORCHELASTIC_RUN_ID": "1", "OMP_NUM_THREADS": "1", "HF_TOKEN": "t"}.items():
        monkeypatch.setenv(name, value)
    found = _environment()
    assert not found.keys() & {"RANK", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"}
    assert (found["HF_TOKEN"], found["VLLM_SERVER_DEV_MODE"]) == ("t", "1")
    assert found.keys() - os.environ.keys() == {"VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"}
