"""Servers that the trainer starts: their options, environment, errors, and their end."""

import contextlib
import json
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import pytest
from conftest import ROOT

from grpo.config import ConfigError
from grpo.vllm.server import StartedServer

PROGRAM = """
import http.server, json, os, subprocess, sys
child = subprocess.Popen(["sleep", "1000"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps([os.getpid(), child.pid, sys.argv, dict(os.environ)]).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1].removeprefix("--port="))), Handler).serve_forever()
"""


@pytest.fixture
def command(tmp_path):
    """A server with a child, in place of vLLM; the test with the real one is slow."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return f"env NAME=value {sys.executable} {program} {{model}}"


def state(server) -> list:
    with urllib.request.urlopen(f"{server.address}/", timeout=10) as answer:
        return json.loads(answer.read())


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 60
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """True for a zombie, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_options_and_environment_of_a_server_which_ends_with_its_children(
    command, tmp_path, monkeypatch
):
    for name in ("RANK", "TORCHELASTIC_RUN_ID", "HF_TOKEN"):
        monkeypatch.setenv(name, "1")
    options = ["--dtype=float32", "--enable-lora"]
    server = StartedServer(
        f"{command} --dtype=half --port=80", "/models/m", options, tmp_path / "log"
    )
    server.wait(60)
    pid, child, words, env = state(server)
    port = server.address.rpartition(":")[2]
    # The last of two values counts.
    own = ["--dtype=half", "--port=80"]
    assert words[1:] == ["/models/m", *options, *own, "--host=127.0.0.1", f"--port={port}"]
    assert not env.keys() & {"RANK", "TORCHELASTIC_RUN_ID"} and env["HF_TOKEN"] == "1"
    assert (env["VLLM_SERVER_DEV_MODE"], env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]) == ("1", "True")
    server.close()
    wait_until_gone(pid, child)
    assert server.explain("").startswith("has ended (exit code -15): see ")


@pytest.mark.slow
def test_a_server_ends_with_its_killed_trainer(command, tmp_path):
    """vLLM's front end ends its own processes; here the one that gets the signal counts."""
    script = f"""
        import sys, time
        from pathlib import Path
        from grpo.vllm.server import StartedServer
        server = StartedServer({command!r}, "/m", [], Path({str(tmp_path / "log")!r}))
        server.wait(60)
        print(server.process.pid, flush=True)
        time.sleep(1000)
    """
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, cwd=ROOT
    )
    pid = int(trainer.stdout.readline())
    trainer.kill()
    trainer.wait()
    wait_until_gone(pid)


def test_a_server_that_cannot_start(tmp_path):
    server = StartedServer("no-such-program {model}", "9", [], tmp_path / "log")
    with (
        contextlib.closing(server),
        pytest.raises(ConfigError, match=r"has ended .exit code 1.: see "),
    ):
        server.wait(60)
