"""Built-in tasks: the split, the demonstrations and the tiny model."""

import functools
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from grpo.config import Config
from grpo.data import tiny
from grpo.data.tasks import TASKS, Arithmetic, Calculator, Task, load_task, written_columns
from grpo.data.tiny import Recipe, build_tiny_model, build_tokenizer
from grpo.rewards.builtin import evaluate_expression

QUICK = Recipe(
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    clean_steps=1,
    noisy_steps=2,
    batch_size=4,
)
FORMAT = re.compile(r"<think>[^<]*</think>\n<answer>[^<]*</answer>")


@functools.cache
def rows_of(name: str, split: str, seed: int = 0) -> list[dict]:
    return load_task(name).rows(split, seed)


@pytest.mark.parametrize("name", TASKS)
def test_train_and_eval_share_no_problem_whatever_the_seed(name: str):
    task = load_task(name)
    train = [{task.problem_key(row) for row in rows_of(name, "train", seed)} for seed in range(2)]
    evaluation = [{task.problem_key(row) for row in rows_of(name, "eval", seed)} for seed in (0, 3)]
    assert not set.union(*train) & set.union(*evaluation)
    assert len(rows_of(name, "train")) == len(train[0]) == task.num_rows["train"], "no problem twice"
    assert len(rows_of(name, "eval")) == len(evaluation[0]) == task.num_rows["eval"]


def test_commutative_duplicates_are_one_problem():
    arithmetic = load_task("arithmetic")
    countdown = load_task("countdown")
    assert arithmetic.problem_key({"prompt": "47+35="}) == arithmetic.problem_key({"prompt": "35+47="})
    assert arithmetic.problem_key({"prompt": "47-35="}) != arithmetic.problem_key({"prompt": "47+35="})
    keys = {countdown.problem_key({"target": 8, "numbers": numbers}) for numbers in ([1, 2, 5], [5, 1, 2])}
    assert len(keys) == 1


@pytest.mark.slow
def test_rows_depend_on_the_seed_and_on_nothing_else():
    rows = {name: rows_of(name, "eval", 3)[:200] for name in TASKS}
    for name in TASKS:
        random.seed(1)
        assert load_task(name).rows("eval", 3, count=200) == rows[name] != load_task(name).rows("eval", 4, count=200)
    program = (
        "import json; from grpo.data.tasks import TASKS, load_task;"
        "print(json.dumps({name: load_task(name).rows('eval', 3, count=200) for name in TASKS}))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(other.stdout) == rows, "another process has other hash seeds"


def test_written_columns():
    assert written_columns(47, "+", 35) == (["7+5=12", "4+3=7+1=8"], 82)
    assert written_columns(47, "+", 35, carries=False) == (["7+5=12", "4+3=7"], 72)
    assert written_columns(52, "-", 37) == (["12-7=5", "5-3=2-1=1"], 15)
    assert written_columns(52, "-", 37, carries=False) == (["12-7=5", "5-3=2"], 25)
    assert written_columns(99, "+", 99) == (["9+9=18", "9+9=18+1=19"], 198)
    assert written_columns(8, "+", 51) == (["8+1=9", "0+5=5"], 59)
    for left in range(100):
        for right in range(100):
            assert written_columns(left, "+", right)[1] == left + right
            assert left < right or written_columns(left, "-", right)[1] == left - right


def _demonstrations(task: Task, noisy: bool) -> list[tuple[dict, str | list[dict]]]:
    rng = random.Random(0)
    return [(row, task.demonstration(row, rng, noisy)) for row in rows_of(task.name, "train")]


def _is_right(task: Task, row: dict, text: str) -> bool:
    found = re.search(r"<answer>(.*)</answer>", text)
    if task.name == "arithmetic":
        return found is not None and found[1] == row["answer"]
    return found is not None and evaluate_expression(found[1])[0] == row["target"]


@pytest.mark.parametrize("name", ["arithmetic", "countdown"])
def test_demonstrations_have_the_documented_shares_of_mistakes(name: str):
    task = load_task(name)
    assert all(
        FORMAT.fullmatch(text) and _is_right(task, row, text) for row, text in _demonstrations(task, noisy=False)
    )
    noisy = _demonstrations(task, noisy=True)
    in_format = sum(bool(FORMAT.fullmatch(text)) for _, text in noisy) / len(noisy)
    assert in_format == pytest.approx(1 - sum(task.untagged_shares.values()), abs=0.03)
    assert 0.4 < sum(_is_right(task, row, text) for row, text in noisy) / len(noisy) < 0.7
    if name == "arithmetic":
        doubtful = sum("hmm" in text for _, text in noisy) / len(noisy)
        assert doubtful == pytest.approx(Arithmetic.doubt_share, abs=0.03)
        carried = sum(bool(re.search(r"=\d+[+-]1=", text)) for _, text in noisy) / len(noisy)
        assert 0.18 < carried < 0.28  # 55% of the 42% of problems that have a carry or a borrow


def test_calculator_demonstrations_call_the_tool_in_the_documented_shares():
    task = load_task("calculator")
    for row, response in _demonstrations(task, noisy=False):
        expression = row["prompt"].removesuffix("=")
        assert str(evaluate_expression(expression)[0]) == row["answer"]
        turns = [response] if isinstance(response, str) else [message["content"] for message in response]
        assert turns[-1] == f"<answer>{row['answer']}</answer>"
        assert turns[:-1] == ([f"<calculator>{expression}</calculator>", row["answer"]] if len(turns) > 1 else [])
        assert len(turns) > 1 or "*" not in expression
    noisy = _demonstrations(task, noisy=True)
    direct = [response == f"<answer>{row['answer']}</answer>" for row, response in noisy if isinstance(response, str)]
    assert 1 - len(direct) / len(noisy) == pytest.approx(Calculator.calls_share, abs=0.03)
    assert sum(direct) / len(noisy) < 0.15, "without the tool few are right"


def test_guess_number_demonstrations_follow_the_hints_or_forget_them():
    right, noisy = (_demonstrations(load_task("guess_number"), noisy) for noisy in (False, True))
    assert {response[-2]["content"] for _, response in right} == {"right"}, "halving finds every number"
    assert 0.4 < sum(response[-2]["content"] == "right" for _, response in noisy) / len(noisy) < 0.5
    for row, response in noisy:
        *turns, last = [message["content"] for message in response]
        guesses = [int(re.fullmatch("<guess>([0-9]+)</guess>", turn)[1]) for turn in turns[::2]]
        secret = row["secret"]
        assert turns[1::2] == ["higher" if n < secret else "lower" if n > secret else "right" for n in guesses]
        assert len(guesses) <= 4 and last == "done"


def test_only_the_tokens_of_the_model_have_labels():
    tokenizer, start = build_tokenizer(), r"<\|im_start\|>assistant\n"
    batch = tiny._demonstrations(load_task("guess_number"), random.Random(0), tokenizer, batch_size=8, noisy=True)
    for ids, labels in zip(*(tensor.tolist() for tensor in batch), strict=True):
        tool = r"\n<\|im_start\|>tool\n(higher|lower|right)<\|im_end\|>\n" + start
        prompt, call = rf"<\|im_start\|>user\nGuess [0-9.]+<\|im_end\|>\n{start}", r"<guess>\d+</guess><\|im_end\|>"
        text, trained = (tokenizer.decode(t) for t in (ids, [i for i in labels if i != tiny.IGNORE_INDEX]))
        assert re.fullmatch(rf"{prompt}({call}{tool})+done<\|im_end\|>(<\|pad\|>)*", text)
        assert re.fullmatch(rf"({call})+done<\|im_end\|>", trained)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_every_countdown_problem_has_the_solution_it_names(split: str):
    for row in rows_of("countdown", split):
        value, used = evaluate_expression(row["answer"])
        assert value == row["target"] and sorted(used) == sorted(row["numbers"])
        assert len(row["numbers"]) in (3, 4)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for task in ("arithmetic", "countdown"):
        monkeypatch.setitem(tiny.RECIPES, task, QUICK)
    return tmp_path


def test_text_survives_the_tokenizer_as_saved_and_as_read_back(cache):
    text = "<think>a  b\n 7+5=12</think>\n<answer> 82 </answer>  users\té漢🙂\r\n\n "
    for tokenizer in (build_tokenizer(), AutoTokenizer.from_pretrained(build_tiny_model())):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text
        assert len(tokenizer.encode("<think></think><answer></answer>")) == 4
        assert len(tokenizer.encode("47+35=")) == 6
        assert len(tokenizer.encode("é")) == 2  # a character outside ASCII is its bytes; none vanishes
        assert tokenizer.decode(tokenizer.encode("82<|im_end|>"), skip_special_tokens=True) == "82"
        assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token_id != tokenizer.eos_token_id
        messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2="}]
        text_of_chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        turns = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
        assert text_of_chat == turns and len(tokenizer.encode(turns)) == 21


def test_a_second_build_is_read_from_the_cache_and_one_that_fails_leaves_nothing(cache, monkeypatch):
    first = build_tiny_model()
    assert first.parent == cache / "grpo"
    modified = (first / "model.safetensors").stat().st_mtime_ns
    assert build_tiny_model() == first
    assert (first / "model.safetensors").stat().st_mtime_ns == modified
    other = build_tiny_model("countdown")
    monkeypatch.setitem(tiny.RECIPES, "arithmetic", replace(QUICK, num_heads=0))
    with pytest.raises(ZeroDivisionError):
        build_tiny_model()
    with pytest.raises(ValueError, match="unknown task"):
        build_tiny_model("sudoku")
    assert {*first.parent.iterdir()} == {first, other}, "nothing half-written is left"


def _build(cache) -> str:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    tiny.RECIPES["arithmetic"] = QUICK
    return str(build_tiny_model())


@pytest.mark.slow
def test_processes_that_build_the_model_at_the_same_time_agree(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        folders = set(pool.map(_build, [tmp_path] * 2, chunksize=1))
    assert len(folders) == 1
    assert [str(path) for path in (tmp_path / "grpo").iterdir()] == list(folders)


def test_the_same_weights_each_time_and_global_randomness_is_left_alone():
    weights = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        random.seed(seed)
        state = torch.get_rng_state()
        python_state = random.getstate()
        model = tiny.warm_start("arithmetic", build_tokenizer(), QUICK)
        assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python_state
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(*weights)


def test_the_tiny_model_has_room_for_the_defaults():
    defaults = Config()
    longest = defaults.data.max_prompt_length + defaults.rollout.max_completion_length
    assert longest <= tiny.CONTEXT
