"""``python -m grpo.data``: prompts as the model reads them, and the numbers of rows."""

import json

from grpo.commands.data import main


def test_the_preview_shows_prompts_as_the_model_sees_them_and_what_is_left_out(tmp_path, random_model, capsys):
    rows = [{"q": f"{i}+{i}=", "gold": f"#### {2 * i}" if i % 4 else "none", "level": i} for i in range(10)]
    rows[1]["q"] = "1+" * 100
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = main([
        f"model.name_or_path={random_model}", f"data.dataset={tmp_path}/d.jsonl", "data.prompt_column=q",
        "data.answer_column=gold", "data.answer_pattern=#### (.+)", "data.system_prompt=Be brief.",
        "data.max_prompt_length=80", "data.eval_split=train[:20%]",
    ])  # fmt: skip
    shown, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert shown.count("--- prompt ") == 3
    system, question = "| <|im_start|>system\n| Be brief.<|im_end|>", "| <|im_start|>user\n| 2+2=<|im_end|>"
    assert f"{system}\n{question}\n| <|im_start|>assistant\n" in shown
    assert "--- prompt 2 of 9 (row 3), " in shown
    assert "  answer = '4'\n" in shown and "  level = 2\n" in shown and "  gold = '#### 4'\n" in shown
    assert "10 rows, 9 used; prompt tokens: shortest " in shown
    assert "left out: 1 longer than data.max_prompt_length=80 tokens" in shown
    assert "kept: 3 in which data.answer_pattern matches nothing" in shown
    assert "2 rows, 1 used" in shown.split("--- evaluation")[1]
