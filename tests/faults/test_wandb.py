"""wandb online in a whole run: a server that is or falls ill costs bounded time, and nothing of the
run."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from harness import Started, assert_same_run, run, tiny
from wandb_service import service

STEPS = 8
UNHURRIED = """
import time

def unhurried(prompts, completions, **columns):
    time.sleep(0.3)
    return [sum(c.isdigit() or c in "aeiou" for c in text) / max(len(text), 1) for text in completions]
"""
UNSENT = "Some run data will not be synced, but it will still be written to disk. Use `wandb sync`"
"""wandb's own words."""


def arguments(model, output, *more: str) -> list[str]:
    reward = output.parent / "unhurried.py"
    reward.write_text(UNHURRIED)
    return tiny(model, output, f"reward.functions=['{reward}:unhurried']", *more, steps=STEPS)


@pytest.fixture(scope="module")
def without(tmp_path_factory, random_model):
    """``ranks -> output`` of runs without wandb."""
    folder = tmp_path_factory.mktemp("without")
    outputs = {}

    def of(ranks: int):
        if ranks not in outputs:
            outputs[ranks] = folder / str(ranks)
            run(outputs[ranks], arguments(random_model, outputs[ranks]), ranks=ranks)
        return outputs[ranks]

    return of


def environment(url: str, home) -> dict[str, str]:
    return {
        "WANDB_BASE_URL": url, "WANDB_API_KEY": "0123456789" * 4, "HOME": str(home), "no_proxy": "127.0.0.1",
        "WANDB__DISABLE_STATS": "true", "WANDB_DISABLE_CODE": "true",
    }  # fmt: skip


@contextmanager
def online(mood: str, model, output, *, ranks: int):
    with service(mood) as server:
        env = environment(server.url, output.parent)
        yield (
            server,
            Started(
                output,
                arguments(model, output, "logging.wandb=online"),
                ranks=ranks,
                env=env,
            ),
        )


@pytest.mark.slow
@pytest.mark.parametrize("mood", ["refuses", "stalls"])
def test_a_server_that_fails_from_the_start(tmp_path, random_model, without, mood):
    output = tmp_path / "run"
    with online(mood, random_model, output, ranks=1) as (_, started):
        assert started.end() == 0
    assert started.text().count("warning: ") == 1
    assert "warning: wandb online failed" in started.text()
    assert "going on offline" in started.text()
    assert_same_run(without(1), output, STEPS)
    assert list(output.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.slow
@pytest.mark.parametrize(("mood", "ranks"), [("stalls", 1), ("refuses", 1), ("dead", 2)])
def test_a_server_that_fails_during_the_run(tmp_path, random_model, without, mood, ranks):
    """Tables, for which wandb waits, are due at every step here."""
    output = tmp_path / "run"
    with online("well", random_model, output, ranks=ranks) as (server, started):
        started.wait_for(f"\nstep 3/{STEPS}")
        server.become(mood)
        assert started.end() == 0
    assert started.text().count(UNSENT) == 1
    assert "warning: " not in started.text()
    assert_same_run(without(ranks), output, STEPS)
    (part,) = output.glob("wandb/run-*")
    with service("well") as server:
        env = os.environ | environment(server.url, tmp_path)
        command = [sys.executable, "-m", "wandb", "sync", "--no-skip-online", str(part)]
        subprocess.run(command, env=env, cwd=tmp_path, timeout=120, check=True)
        assert [line["step"] for line in server.lines] == list(range(STEPS + 1)), "sent later"
        assert all("completions" in line for line in server.lines[1:])


@pytest.mark.slow
def test_stopped_while_the_server_does_not_answer(tmp_path, random_model, without):
    """The state is on disk within torchrun's grace, before wandb is waited for; then the same
    command goes on."""
    output = tmp_path / "run"
    with online("well", random_model, output, ranks=2) as (server, started):
        started.wait_for(f"\nstep 2/{STEPS}")
        server.become("dead")
        started.wait_for(f"\nstep 3/{STEPS}")  # now its tables are waited for
        started.kill(signal.SIGTERM)
        assert started.end() != 0
    assert started.text().count("stopped at step ") == 1
    run(output, arguments(random_model, output), ranks=2)
    assert_same_run(without(2), output, STEPS)
