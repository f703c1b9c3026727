"""A game of GEM, which is in the extra ``environments``."""

import pytest
from replays import check_metrics, replay, reset_seed, train

from examples.environments import Sudoku

gem = pytest.importorskip("gem", reason="needs GEM: pip install -e '.[environments]'")


def in_a_box(text: str) -> str:
    """A move from whatever an untrained model says: row, column and number are counted in it."""
    return f"\\boxed{{{len(text) % 4 + 1} {text.count(' ') % 4 + 1} {len(text) % 3 + 1}}}"


class Game(Sudoku):
    def step(self, action):
        return super().step(in_a_box(action))


def begin(row):
    game = gem.make("game:Sudoku-v0-easy")
    text, info = game.reset(reset_seed(row["problem"]))

    def step(action):
        text, reward, terminated, truncated, info = game.step(in_a_box(action))
        return f"{text}\n{info['suffix']}", reward, terminated or truncated

    return text + info["suffix"], step


@pytest.mark.slow
def test_a_training_with_a_game_is_replayed_by_hand(tmp_path):
    output = train(tmp_path, f"{__file__}:Game")
    check_metrics(output, "Game")
    rows = replay(output, begin)
    assert len({row["prompt"] for row in rows}) == 4, "each problem has a board of its own"
    assert len({row["reward"] for row in rows}) > 1
