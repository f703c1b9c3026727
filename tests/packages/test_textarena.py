"""Games of TextArena, which is in the extra ``environments``."""

import random

import pytest
from replays import check_metrics, replay, reset_seed, train

from examples.environments import TicTacToe

textarena = pytest.importorskip(
    "textarena", reason="needs TextArena: pip install -e '.[environments]'"
)


def move(text: str) -> str:
    """A move from whatever an untrained model says."""
    return f"[{len(text) % 9}]"


class Game(TicTacToe):
    def step(self, action):
        return super().step(move(action))


def begin(row):
    """The opponent draws from the free cells, with the generator that the trainer seeds before each
    step."""
    game = textarena.make("TicTacToe-v0-raw")
    game.reset(num_players=2, seed=reset_seed(row["problem"]))

    def observe():
        player, messages = game.get_observation()
        assert player == 0
        return "\n".join(text for sender, text, _ in messages if sender != 0)

    def step(action):
        done, _ = game.step(move(action))
        while not done and game.state.current_player_id == 1:
            marks = [mark for line in game.state.game_state["board"] for mark in line]
            cell = random.choice([cell for cell in range(9) if marks[cell] == ""])
            done, _ = game.step(f"[{cell}]")
        rewards, _ = game.close()
        return (None, rewards[0], True) if done else (observe(), 0.0, False)

    return observe(), step


@pytest.mark.slow
def test_a_training_with_a_game_for_two_is_replayed_by_hand(tmp_path):
    output = train(tmp_path, f"{__file__}:Game")
    check_metrics(output, "Game")
    rows = replay(output, begin)
    assert {row["stop_reason"] for row in rows} >= {"environment"}
    assert {row["reward"] for row in rows} >= {-1.0, 1.0}
