"""An environment of SkyRL-gym, which is in the extra ``environments``."""

import json

import pytest
from replays import check_metrics, replay, train

from examples.environments import SkyGsm8k

skyrl_gym = pytest.importorskip(
    "skyrl_gym", reason="needs SkyRL-gym: pip install -e '.[environments]'"
)


def row_of_gsm8k(number: int) -> dict:
    """A row as SkyRL's own script writes it."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {number}+0? End with ####."}],
        "env_class": "gsm8k_multi_turn",
        "reward_spec": {"method": "rule", "ground_truth": str(number)},
        "extra_info": {"split": "train", "index": number, "max_turns": 3},
    }


def answer(text: str) -> str:
    """An answer from whatever an untrained model says."""
    return f"#### {len(text) % 4}"


class Game(SkyGsm8k):
    def step(self, action):
        return super().step(answer(action))


def begin(row):
    """The package's own ``make``, and the columns that SkyRL gives it."""
    extras = row_of_gsm8k(row["problem"])
    prompt = extras.pop("prompt")
    game = skyrl_gym.make(extras.pop("env_class"), extras=extras)
    prompt, _ = game.init(prompt)

    def step(action):
        result = game.step(answer(action))
        text = "".join(message["content"] for message in result["observations"])
        return text, result["reward"], result["done"]

    return json.dumps(prompt), step


@pytest.mark.slow
def test_a_training_with_skyrls_rows_is_replayed_by_hand(tmp_path):
    dataset = tmp_path / "gsm8k.jsonl"
    with open(dataset, "w") as file:
        for number in range(4):
            print(json.dumps(row_of_gsm8k(number)), file=file)
    output = train(
        tmp_path,
        f"{__file__}:Game",
        f"data.dataset={dataset}",
        f"data.eval_dataset={dataset}",
    )
    check_metrics(output, "Game")
    rows = replay(output, begin)
    assert len({row["reward"] for row in rows}) > 2
    assert {row["stop_reason"] for row in rows} == {"environment"}
