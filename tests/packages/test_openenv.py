"""A client of OpenEnv as a reset/step environment, with a real server. See also
``test_trl_forms.py``."""

import pytest

pytest.importorskip("openenv", reason="needs OpenEnv: pip install -e '.[environments]'")
from openenv import GenericEnvClient
from openenv_game import running_server
from replays import check_metrics, replay, reset_seed, train

from examples.environments import OpenEnvGame


class Letters(OpenEnvGame):
    """Says three letters, whatever an untrained model says."""

    def step(self, action):
        return super().step(letters_of(action))


def letters_of(text: str) -> str:
    return "".join("dabc"[text.count(letter) % 4] for letter in " ea")


@pytest.mark.slow
def test_a_training_with_a_server_is_replayed_by_hand(tmp_path, monkeypatch):
    """The model reads the game's words. A run opens as many sessions as a step has completions."""
    log = tmp_path / "sessions"
    with running_server(4, log) as address:
        monkeypatch.setenv("GAME_URL", address)
        output = train(tmp_path, f"{__file__}:Letters")
        assert len(log.read_text().splitlines()) == 4
        check_metrics(output, "Letters")
        with GenericEnvClient(base_url=address).sync() as client:

            def begin(row):
                prompt = client.reset(seed=reset_seed(row["problem"])).observation["echoed_message"]
                return prompt, step

            def step(action):
                result = client.step({"message": letters_of(action)})
                return result.observation["echoed_message"], result.reward, result.done

            rows = replay(output, begin)
    assert len({row["prompt"] for row in rows}) == 4
    assert len({row["reward"] for row in rows}) > 1
