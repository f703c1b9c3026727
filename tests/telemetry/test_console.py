"""The console of a whole run: no noise of libraries and a summary at the start."""

import re

import pytest
from conftest import run_trainer, small_run


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
