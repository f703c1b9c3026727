"""``python -m grpo.data``: prompts as the model reads them, and the numbers of rows."""

import json
from pathlib import Path

import pytest

from grpo.commands.data import main

USER = Path(__file__).parents[1] / "turns" / "user_tools.py"


def test_the_preview_shows_prompts_as_the_model_sees_them_and_what_is_left_out(tmp_path, random_model, capsys):
    rows = [{"q": f"{i}+{i}=", "gold": f"#### {2 * i}" if i % 4 else "none", "level": i} for i in range(10)]
    rows[1]["q"] = "1+" * 100
    rows += [rows[0], {"q": None, "gold": "", "level": 1}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = main([
        f"model.name_or_path={random_model}", f"data.dataset={tmp_path}/d.jsonl", "data.prompt_column=q",
        "data.answer_column=gold", "data.answer_pattern=#### (.+)", "data.system_prompt=Be brief.",
        "data.max_prompt_length=80", "data.eval_split=train[:2]",
    ])  # fmt: skip
    shown, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert shown.count("--- prompt ") == 3
    system, question = "| <|im_start|>system\n| Be brief.<|im_end|>", "| <|im_start|>user\n| 2+2=<|im_end|>"
    assert f"{system}\n{question}\n| <|im_start|>assistant\n" in shown
    assert "--- prompt 2 of 10 (row 3), " in shown
    assert "  answer = '4'\n" in shown and "  level = 2\n" in shown and "  gold = '#### 4'\n" in shown
    assert "12 rows, 10 used; prompt tokens: shortest " in shown
    assert "left out: 1 longer than data.max_prompt_length=80 tokens" in shown
    assert "left out: 1 without text" in shown
    assert "kept: 5 without an answer" in shown
    assert "duplicates: 1 prompts that came before\n" in shown
    evaluation = shown.split("--- evaluation")[1]
    assert "2 rows, 1 used" in evaluation and "in both splits: 1 prompts\n" in evaluation
    assert main([f"model.name_or_path={random_model}", "data.max_train_samples=3", "data.eval_split=none"]) == 0
    shown = capsys.readouterr().out
    assert "answer_pattern" not in shown and "--- evaluation" not in shown


@pytest.mark.slow
def test_prompts_are_those_that_the_environment_resets(random_model, tmp_path, capsys):
    """Its own, or the dataset's with what reset says; a row that cannot be reset says why."""
    settings = [f"model.name_or_path={random_model}", "data.eval_split=none"]
    assert main([*settings, f"environment={USER}:Prompting", "data.dataset=none"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("| <|im_start|>user\n| Count to ") == 3
    assert shown.endswith("4096 seeds, from which reset() makes the prompts\n")

    (tmp_path / "d.jsonl").write_text('{"prompt": "Count", "start": "broken"}\n{"prompt": "Count", "start": "7"}\n')
    assert main([*settings, f"environment={USER}:Counter", f"data.dataset={tmp_path}/d.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert "| <|im_start|>user\n| Count from 7<|im_end|>" in shown and "prompt tokens before reset(): " in shown
    line = next(n for n, text in enumerate(USER.read_text().splitlines(), 1) if "cannot be reset" in text)
    assert f"  failed: reset: ValueError: this row cannot be reset ({USER}, line {line})\n" in shown


def test_an_environment_that_cannot_be_loaded_is_named(random_model, tmp_path, capsys):
    file = tmp_path / "env.py"
    for source, what in (
        ("class E:\n    def __init__(self): {}['no such key']", "KeyError: 'no such key'"),
        ("class E:\n    def __init__(self, name): pass", "TypeError: E.__init__() missing 1 required positional"),
        ("import no_such_module", f"importing {file} (line 1) raised ModuleNotFoundError"),
        ("class Other: pass", f"{file} has no function or class 'E'"),
    ):
        file.write_text(source)
        assert main([f"model.name_or_path={random_model}", f"environment={file}:E"]) == 2
        assert f"error: environment '{file}:E': {what}" in capsys.readouterr().err
