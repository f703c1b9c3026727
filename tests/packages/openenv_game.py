"""A server of OpenEnv with a small game, and its typed client, as a published environment has them.

``python openenv_game.py PORT MAX_SESSIONS LOG`` runs the server, which writes each new session to
the file LOG."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import BaseModel

SECRET = "dab"


class Said(BaseModel):
    content: str


class Guess(Action):
    message: str


class Feedback(Observation):
    echoed_message: str
    """What the game says."""
    messages: list[Said]
    """All that the game has said since the reset, as one message, in the manner of TextArena."""


class Game(Environment):
    """Guess three letters in three turns. The reward of a turn is the share of letters that are
    right."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.num_resets = 0

    def reset(self, seed=None, episode_id=None, **kwargs) -> Feedback:
        if self.num_resets == 0:
            with open(sys.argv[3], "a") as log:
                log.write(f"{id(self)}\n")
        self.num_resets += 1
        self.history = ""
        self.num_turns = 0
        return self._say(f"Guess three letters ({seed}).", None, False)

    def step(self, action, timeout_s=None, **kwargs) -> Feedback:
        self.num_turns += 1
        guess = action.message
        marks = ""
        for right, letter in zip(SECRET, guess, strict=False):
            marks += "G" if right == letter else "X"
        return self._say(
            f"\n{guess} {marks}",
            marks.count("G") / 3,
            guess == SECRET or self.num_turns == 3,
        )

    def _say(self, text: str, reward: float | None, done: bool) -> Feedback:
        self.history += text
        return Feedback(
            echoed_message=text,
            messages=[Said(content=self.history)],
            reward=reward,
            done=done,
            metadata={"turns": self.num_turns},
        )

    @property
    def state(self) -> State:
        return State(step_count=self.num_turns)


class GameClient(EnvClient[Guess, Feedback, State]):
    def _step_payload(self, action: Guess) -> dict[str, Any]:
        return action.model_dump()

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Feedback]:
        reward = payload["reward"]
        done = payload["done"]
        observation = Feedback(**payload["observation"], reward=reward, done=done)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


@contextlib.contextmanager
def running_server(max_sessions: int, log: Path) -> Iterator[str]:
    """The address of a server in a process of its own, which ends with the context."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log.write_text("")
    server = subprocess.Popen([sys.executable, __file__, str(port), str(max_sessions), str(log)])
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(OSError):  # not yet there
                urllib.request.urlopen(f"{address}/health").close()
                break
            assert server.poll() is None, "the server has ended"
            time.sleep(0.1)
        yield address
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    import uvicorn

    app = create_app(Game, Guess, Feedback, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
