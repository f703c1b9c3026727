"""Servers that the trainer starts: they are restarted when they die, and end with the trainer. The server is a small one of these tests."""

import http.client
import json
import multiprocessing
import os
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import load

from grpo.config import make_config
from grpo.distributed import World
from grpo.rollout import build_engine
from grpo.rollout.build import check_weight_transfer
from grpo.rollout.vllm import Server, ServerError
from grpo.rollout.vllm.keeper import KeptLog
from grpo.rollout.vllm.process import StartedServers, command_words, last_error, server_environment, shown
from grpo.system.environment_defaults import ALLOCATOR_NAMES

SERVER = """
import http.server, json, os, signal, subprocess, sys, threading
options = dict(zip(sys.argv[1:], sys.argv[2:]))
if "--fail" in sys.argv:
    print("Traceback (most recent call last):\\n(EngineCore pid=7) ValueError: no memory for the cache")
    print("(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    sys.exit(3)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as vLLM's engine core
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if "--sick" not in sys.argv else 503)
        self.end_headers()
        names = ("RANK", "VLLM_SERVER_DEV_MODE")
        self.wfile.write(json.dumps([os.getpid(), child.pid, sys.argv, {n: os.environ.get(n) for n in names}]).encode())
    def log_message(self, *_):
        pass
server = http.server.HTTPServer((options["--host"], int(options["--port"])), Handler)
signal.signal(signal.SIGUSR2, lambda *_: threading.Thread(target=server.shutdown).start())
server.serve_forever()
server.server_close()
while True:  # as vLLM's front end sometimes does when its engine has died
    signal.pause()
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    return shlex.join([sys.executable, str(tmp_path / "server.py")]) + " {model}"


def start(command, tmp_path, **changes):
    options = dict(
        num=1, dtype="float32", max_model_len=96, lora_rank=None, folder=tmp_path, timeout_s=60, show=lambda _: None
    )
    return StartedServers(command, "/models/m", **options | changes)


def state(address):
    """``[pid, pid of its child, argv, environment]`` of the server; None if it does not answer."""
    host, port = address.removeprefix("http://").split(":")
    try:
        connection = http.client.HTTPConnection(host, int(port), timeout=5)
        connection.request("GET", "/")
        return json.loads(connection.getresponse().read())
    except OSError:
        return None


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def exists(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_two_servers_start_with_what_the_command_leaves_out_and_end(command, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    lines = []
    servers = start(f"{command} --dtype=half --max_model_len 50", tmp_path, num=2, lora_rank=9, show=lines.append)
    logs = [tmp_path / "vllm-0.log", tmp_path / "vllm-1.log"]
    assert lines == [f"starting vLLM (log: {logs[0]}, {logs[1]}) ..."]
    assert len(set(servers.addresses)) == 2
    pids = []
    for address, log in zip(servers.addresses, logs, strict=True):
        pid, child, argv, environment = state(address)
        assert environment == {"RANK": None, "VLLM_SERVER_DEV_MODE": "1"}
        port = address.rpartition(":")[2]
        assert argv[1:] == [
            *("/models/m", "--dtype=half", "--max_model_len", "50", "--host", "127.0.0.1", "--port", port),
            *(
                "--logprobs-mode",
                "processed_logprobs",
                "--enable-lora",
                "--max-lora-rank",
                "16",
                "--disable-uvicorn-access-log",
            ),
        ]
        assert port in log.read_text()
        pids += [pid, child]
    servers.close()
    assert not any(map(exists, pids))


def test_a_server_that_dies_is_started_again_on_its_port_three_times(command, tmp_path):
    servers = start(command, tmp_path)
    (address,) = servers.addresses
    seen = []
    try:
        for restart in range(3):
            pid, child, *_ = state(address)
            seen += [pid, child]
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: state(address))
            assert f"the server ended (-9); restart {restart + 1} of 3" in (tmp_path / "vllm-0.log").read_text()
        os.kill(state(address)[0], signal.SIGKILL)
        wait_for(lambda: "does not start its server again" in (tmp_path / "vllm-0.log").read_text())
        assert state(address) is None and not any(map(exists, seen))
        (log,) = servers.logs
        assert log.end() and not KeptLog(log.path, os.getpid()).end(), "another keeper's server goes on"
        server = Server(address, 600, log=log)
        with pytest.raises(
            ServerError,
            match=rf"^{address} has ended too often and is not started again: see .*vllm-0\.log, and start the run again$",
        ):
            server.weight_version()
    finally:
        servers.close()


def test_a_server_that_listens_no_longer_is_ended_and_started_again(command, tmp_path):
    servers = start(command, tmp_path)
    (address,) = servers.addresses
    try:
        pid, child, *_ = state(address)
        os.kill(pid, signal.SIGUSR2)
        wait_for(lambda: (found := state(address)) and found[0] != pid)
        assert not exists(pid) and not exists(child)
        assert "the server listens no longer and is ended" in (tmp_path / "vllm-0.log").read_text()
    finally:
        servers.close()


def train(command, tmp_path, connection):
    """A process that starts a server, tells its address, and trains for a long time."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    connection.send(start(command, tmp_path).addresses[0])
    time.sleep(600)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_its_trainer(command, tmp_path, number):
    ours, theirs = multiprocessing.Pipe()
    trainer = multiprocessing.get_context("fork").Process(target=train, args=(command, tmp_path, theirs))
    trainer.start()
    assert ours.poll(60)
    pid, child, *_ = state(ours.recv())
    os.kill(trainer.pid, number)
    wait_for(lambda: not exists(pid) and not exists(child))
    trainer.join()


def test_a_server_ends_with_its_keeper(command, tmp_path):
    servers = start(command, tmp_path)
    pid, child, *_ = state(servers.addresses[0])
    os.kill(servers._servers[0].keeper.pid, signal.SIGKILL)
    wait_for(lambda: not exists(pid))
    server = Server(servers.addresses[0], 600, log=servers.logs[0])
    with pytest.raises(
        ServerError, match=r"has lost the process that starts it again \(keeper\.py\): see .*vllm-0\.log"
    ):
        server.weight_version()
    os.kill(child, signal.SIGKILL)  # vLLM ends its own processes
    servers.close()


def test_a_server_that_cannot_start_is_one_line(command, tmp_path):
    def refusal(command, **changes):
        with pytest.raises(ValueError) as caught:
            start(command, tmp_path, **changes)
        return str(caught.value)

    log = tmp_path / "vllm-0.log"
    assert (
        refusal(f"{command} --fail")
        == f"vLLM ended while it started (exit code 3): ValueError: no memory for the cache (log: {log})"
    )
    assert "python-of-nobody is not found" in refusal("python-of-nobody serve {model}")
    assert "--port 99999 is not a port" in refusal(f"{command} --port 99999")
    message = refusal(f"{command} --sick", timeout_s=1)
    assert message.endswith(f"does not answer after 1 s (log: {log}): see its log, or raise rollout.server_timeout_s")
    assert "several servers cannot have one port (8123)" in refusal(f"{command} --port 8123", num=2)
    servers = start(command, tmp_path)
    taken = servers.addresses[0].rpartition(":")[2]
    assert f"port {taken} cannot be used (Address already in use)" in refusal(f"{command} --port {taken}")
    servers.close()


def test_words_of_the_command():
    assert command_words("env GPU={index} 'a b' {model} --x '{\"y\": 0}'", "/m n", 3) == [
        *("env", "GPU=3", "a b", "/m n", "--x", '{"y": 0}'),
    ]


def test_secrets_of_a_command_are_not_shown():
    words = shlex.split(
        "env VLLM_API_KEY=k1 vllm serve /m --api-key k2 --api-key=k3 --port 8 --enable-lora --dtype=half"
    )
    assert shown(words) == (
        "env 'VLLM_API_KEY=***' vllm serve /m --api-key '***' '--api-key=***' --port 8 --enable-lora --dtype=half"
    )


def test_environment_of_a_server(monkeypatch):
    for name, value in dict(
        MASTER_ADDR="a", TORCHELASTIC_RUN_ID="1", OMP_NUM_THREADS="1", LRU_CACHE_CAPACITY="64", HF_HUB_OFFLINE="1"
    ).items():
        monkeypatch.setenv(name, value)
    found = server_environment(lora=True)
    assert {"MASTER_ADDR", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "LRU_CACHE_CAPACITY"}.isdisjoint(found)
    assert found["HF_HUB_OFFLINE"] == "1" and found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert server_environment(lora=False)["OMP_NUM_THREADS"] == "4"


def test_the_last_error_of_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("ValueError: of an earlier start\n")
    start = log.stat().st_size
    assert last_error(log, start) == "no output"
    log.write_text(
        log.read_text() + "INFO 11-23 04:00:00 [a.py:1] hello\nusage: ...\nvllm: error: unrecognized arguments: --x\n\n"
    )
    assert last_error(log, start) == "vllm: error: unrecognized arguments: --x"
    log.write_text("(APIServer pid=1) ERROR 11-23 04:00:00 [core.py:1] OSError: disk\nbye\n")
    assert last_error(log, 0) == "OSError: disk"


def test_servers_are_started_on_one_machine_alone(random_model, tmp_path):
    policy = load(random_model)
    world = World(rank=0, size=1, local_rank=0, device=policy.device, num_machines=2)
    names = dict(
        path=str(random_model), root=policy.model, uses=(), probe_ids=(), folder=tmp_path, warn=print, builtin={}
    )
    with pytest.raises(ValueError, match=r"rollout\.server=start starts servers on one machine, and this run has 2"):
        build_engine(make_config({"rollout.engine": "vllm"}), world, policy, **names)
    missing = make_config({"rollout.engine": "vllm", "rollout.vllm_command": "vllm-of-nobody serve {model}"})
    with pytest.raises(ValueError, match="vllm-of-nobody is not found: install vLLM"):
        build_engine(missing, replace(world, num_machines=1), policy, **names)
    assert list(tmp_path.iterdir()) == []


def test_memory_that_a_server_cannot_map_is_refused(random_model, monkeypatch):
    """Without a GPU here, the policy only claims to be on one."""
    config = make_config({"rollout.engine": "vllm", "rollout.weight_transfer": "ipc"})
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    policy = SimpleNamespace(device=torch.device("cuda"), adapter=None)
    for name in ALLOCATOR_NAMES:
        monkeypatch.delenv(name, raising=False)
    check_weight_transfer(config, world, policy)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(ValueError, match=r"weight_transfer=ipc .* set PYTORCH_ALLOC_CONF=expandable_segments:False"):
        check_weight_transfer(config, world, policy)
