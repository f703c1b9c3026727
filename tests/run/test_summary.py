"""The summary that is printed before the first step."""

from conftest import run_trainer, small_run

from grpo.algorithm.batch import Problem
from grpo.config import Config, DataConfig
from grpo.data import ProblemSet
from grpo.run.summary import data_line, emulates_bf16, warnings_of


def problems(start: int, end: int) -> list[Problem]:
    return [Problem(n, f"question {n}", (n,)) for n in range(start, end)]


def test_evaluation_problems_that_are_trained_on_are_counted():
    shared = "warning: 5 evaluation problems are also trained on (see data.eval_split)"
    assert shared in list(
        warnings_of(
            Config(),
            problems(0, 15),
            problems(10, 20),
        )
    )
    assert not any(
        "also trained on" in line
        for line in warnings_of(
            Config(),
            problems(0, 15),
            problems(15, 20),
        )
    )


def test_rows_of_an_environment_are_compared_with_their_columns():
    """They may all have one prompt."""
    environment = Config.model_validate({"environment": "my_env.py:Env"})
    train, evaluation = (
        [Problem(n, "Play.", (1, 2), {"seed": n}) for n in numbers]
        for numbers in (range(10), range(8, 12))
    )
    (warning,) = [
        line for line in warnings_of(environment, train, evaluation) if "also trained" in line
    ]
    assert warning.startswith("warning: 2 evaluation problems are")


def test_worked_solutions_as_reference_answers_are_noticed():
    answers = ["1 + 2 = 3 #### 3", [r"So $x = \boxed{3}$."], "The answer is 3", "4", "Paris", None]
    train = [
        Problem(
            n,
            "question",
            (n,),
            {"answer": answer},
        )
        for n, answer in enumerate(answers)
    ]

    def warned(name):
        config = Config.model_validate({"reward": {"functions": [name]}})
        return [line for line in warnings_of(config, train, []) if "answers contain" in line]

    (line,) = warned("accuracy")
    assert line.startswith(
        'warning: 3 of 6 answers contain ####, \\boxed or the word "is", and accuracy compares the whole text: '
    )
    assert not warned("math_verify")


def test_problems_that_are_left_out_are_counted():
    train = ProblemSet(problems(0, 7), num_too_long=2, num_empty=1, num_without_answer=4)
    evaluation = ProblemSet(problems(0, 5), num_too_long=1, num_empty=1)
    line = data_line(
        DataConfig(dataset="file.jsonl", max_prompt_length=64), train, evaluation, num_evaluated=4
    )
    assert line == (
        "data      file.jsonl: 7 problems to train on, 4 of them with an empty answer; 4 to evaluate on; "
        "left out, as empty or longer than 64 tokens: 3 and 2"
    )
    line = data_line(DataConfig(), ProblemSet(problems(0, 7)), evaluation, num_evaluated=4)
    assert "7 problems to train on; 4 to evaluate on; " in line, "answers may not be asked for"


def test_bf16_on_a_cpu_that_emulates_it_is_noticed(tmp_path, random_model, monkeypatch):
    changes = ["runtime.precision=bf16", "optim.max_steps=1", "data.max_eval_samples=1"]
    done = run_trainer(*small_run(random_model, tmp_path), *changes)
    assert ("note: this CPU has no instructions for bf16" in done.stdout) == emulates_bf16()

    monkeypatch.setattr("torch.cpu._is_avx2_supported", lambda: True)
    for has_bf16 in (False, True):
        monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda has=has_bf16: has)
        assert emulates_bf16() is not has_bf16
    # A CPU that is not of x86, of which PyTorch says less.
    monkeypatch.setattr("torch.cpu._is_avx2_supported", lambda: False)
    assert not emulates_bf16()
