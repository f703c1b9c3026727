"""A game of Gymnasium, which is in the extra ``environments``."""

import pytest
from replays import check_metrics, replay, reset_seed, train

from examples.environments import Blackjack

gymnasium = pytest.importorskip(
    "gymnasium", reason="needs Gymnasium: pip install -e '.[environments]'"
)


class Game(Blackjack):
    """Blackjack for an untrained model."""

    def step(self, action):
        return super().step("hit" if len(action) % 2 else "stick")


def begin(row):
    game = gymnasium.make("Blackjack-v1")
    (total, shown, _), _ = game.reset(seed=reset_seed(row["problem"]))

    def step(action):
        (total, _, _), reward, terminated, truncated, _ = game.step(len(action) % 2)
        return (
            f"Your cards count {total}. Do you hit or stick?",
            reward,
            terminated or truncated,
        )

    return f"Your cards count {total}, the dealer shows {shown}. Do you hit or stick?", step


@pytest.mark.slow
def test_a_training_with_a_game_is_replayed_by_hand(tmp_path):
    output = train(tmp_path, f"{__file__}:Game")
    check_metrics(output, "Game")
    rows = replay(output, begin)
    assert {row["stop_reason"] for row in rows} >= {"environment"}
    assert len({row["reward"] for row in rows}) > 1
