"""``python -m grpo.data``: prompts as the model reads them, and the numbers of rows."""

import json

from grpo.commands.data import main


def test_the_preview_shows_prompts_as_the_model_sees_them_and_what_is_left_out(
    tmp_path, random_model, capsys
):
    rows = [
        {"q": f"{i}+{i}=", "gold": f"#### {2 * i}" if i % 4 else "none", "level": i}
        for i in range(10)
    ]
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
    training, evaluation = shown.split("=== evaluation: ")
    assert training.count("--- prompt of ") == 3
    system = "| <|im_start|>system\n| Be brief.<|im_end|>"
    question = "| <|im_start|>user\n| 2+2=<|im_end|>"
    assert "row 3, " in training
    assert f"{system}\n{question}\n| <|im_start|>assistant\n" in training
    assert (
        "  answer = '4'\n" in training
        and "  level = 2\n" in training
        and "  gold = '#### 4'\n" in training
    )
    assert training.endswith(
        "---\n12 rows, 10 used\n"
        "left out: 1 longer than data.max_prompt_length, 1 without text\n"
        "without an answer (empty, or data.answer_pattern finds none): 5\n"
        "the same prompt as another: 1\n"
    )
    assert "2 rows, 1 used" in evaluation and evaluation.endswith("also training prompts: 1\n")
    assert (
        main(
            [
                f"model.name_or_path={random_model}",
                "data.max_train_samples=3",
                "data.eval_split=none",
            ]
        )
        == 0
    )
    assert "=== evaluation" not in capsys.readouterr().out


def test_an_environment_that_cannot_be_loaded_is_named(random_model, tmp_path, capsys):
    file = tmp_path / "env.py"
    file.write_text("class E:\n    def __init__(self): {}['no such key']")
    assert main([f"model.name_or_path={random_model}", f"environment={file}:E"]) == 2
    assert f"error: environment '{file}:E': KeyError: 'no such key'" in capsys.readouterr().err
