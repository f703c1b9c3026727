"""The console of a whole run: no noise of libraries, a summary at the start, one line per user error."""

import re

import pytest
from conftest import run_trainer, small_run

import train_grpo


@pytest.mark.slow
def test_libraries_print_nothing_and_the_run_starts_with_a_summary(tmp_path, random_model):
    done = run_trainer(
        *small_run(random_model, tmp_path / "run"), "model.gradient_checkpointing=true", "optim.max_steps=1",
        ranks=2, fresh=True,
    )  # fmt: skip
    noise = [line for line in done.stderr.splitlines() if re.search(r"Warning|deprecated|Writing|Loading|it/s", line)]
    assert noise == []
    shown = done.stdout
    assert "6 problems x 4 completions = 24, over 2 rank(s); 1 update(s) from them; 1 steps" in shown
    assert f"{tmp_path}/run; the same command continues it" in shown
    assert shown.count("watch reward, not loss") == 1


def test_each_user_error_is_a_line_of_its_own(capsys):
    assert train_grpo.main(["optim.learning_rate=-1", "rollout.num_generations=0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("=")[0] for line in lines] == ["error: rollout.num_generations", "error: optim.learning_rate"]
