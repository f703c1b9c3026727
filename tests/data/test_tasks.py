"""Built-in tasks: the split, the demonstrations and the tiny model."""

import functools
import hashlib
import json
import multiprocessing
import os
import random
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from grpo.data import tiny
from grpo.data.tasks import TASKS, load_task
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


@functools.cache
def demonstrations(name: str, noisy: bool) -> list:
    rng = random.Random(0)
    return [load_task(name).demonstration(row, rng, noisy) for row in rows_of(name, "train")]


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("arithmetic", "b36f06d9c1f0f3fc5d43bf4b01f33a4b"),
        ("countdown", "5c4167cabc66c3e1923b746e5c9b1c81"),
        ("calculator", "1360a5b30ef7c2ea3fcb1485149403f8"),
        ("guess_number", "81cc11dbec375bfd28455b51ec28d7b4"),
    ],
)
def test_rows_and_demonstrations_are_these_in_every_process_and_version(name, digest):
    """What a seed gives is the basis of every measured run of a built-in task."""
    everything = [rows_of(name, "train"), rows_of(name, "eval", 3), demonstrations(name, True)]
    assert hashlib.md5(json.dumps(everything).encode()).hexdigest() == digest


@pytest.mark.parametrize("name", TASKS)
def test_train_and_eval_share_no_problem_whatever_the_seed(name):
    task = load_task(name)
    problems = {}
    for split, seed in (("train", 0), ("train", 1), ("eval", 0), ("eval", 3)):
        keys = {task.problem_key(row) for row in rows_of(name, split, seed)}
        assert len(keys) == len(rows_of(name, split, seed)) == task.num_rows[split], (
            "no problem twice"
        )
        problems[split, seed] = keys
    assert problems["train", 0] != problems["train", 1]
    train = problems["train", 0] | problems["train", 1]
    assert not train & (problems["eval", 0] | problems["eval", 3])


@pytest.mark.parametrize("name", ["arithmetic", "countdown"])
def test_demonstrations_are_right_or_have_the_documented_shares_of_mistakes(name):
    def is_right(row, text):
        found = re.search("<answer>(.*)</answer>", text)
        expected = row.get("target", row["answer"])
        return found is not None and evaluate_expression(found[1])[0] == int(expected)

    rows = rows_of(name, "train")
    for row, text in zip(rows, demonstrations(name, False), strict=True):
        assert FORMAT.fullmatch(text) and is_right(row, text)
    noisy = demonstrations(name, True)
    share = 1 / len(noisy)
    in_format = share * sum(bool(FORMAT.fullmatch(text)) for text in noisy)
    assert in_format == pytest.approx(
        1 - sum(load_task(name).missing_tag_probabilities.values()), abs=0.03
    )
    assert 0.4 < share * sum(map(is_right, rows, noisy)) < 0.7


def test_only_the_tokens_of_the_model_have_labels():
    tokenizer = build_tokenizer()
    task = load_task("guess_number")
    ids_BS, labels_BS = tiny._demonstrations(
        task, random.Random(0), tokenizer, batch_size=8, noisy=True
    )
    start = r"<\|im_start\|>assistant\n"
    prompt = rf"<\|im_start\|>user\nGuess [0-9.]+<\|im_end\|>\n{start}"
    call = r"<guess>\d+</guess><\|im_end\|>"
    tool = rf"\n<\|im_start\|>tool\n(higher|lower|right)<\|im_end\|>\n{start}"
    for ids, labels in zip(ids_BS, labels_BS, strict=True):
        text = tokenizer.decode(ids)
        trained = tokenizer.decode(labels[labels != tiny.IGNORE_INDEX])
        assert re.fullmatch(rf"{prompt}({call}{tool})+done<\|im_end\|>(<\|pad\|>)*", text)
        assert re.fullmatch(rf"({call})+done<\|im_end\|>", trained)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for task in ("arithmetic", "countdown"):
        monkeypatch.setitem(tiny.RECIPES, task, QUICK)
    return tmp_path


def test_text_survives_the_tokenizer_as_saved_and_as_read_back(cache):
    text = "<think>a  b\n 7+5=12</think>\n<answer> 82 </answer>  users\té漢🙂\r\n\n "
    turns = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2="}]
    # A character outside ASCII is its bytes; none vanishes.
    lengths = {"<think></think><answer></answer>": 4, "47+35=": 6, "é": 2, turns: 21}
    for tokenizer in (
        build_tokenizer(),
        AutoTokenizer.from_pretrained(build_tiny_model("arithmetic")),
    ):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text
        assert {string: len(tokenizer.encode(string)) for string in lengths} == lengths
        assert tokenizer.decode(tokenizer.encode("82<|im_end|>"), skip_special_tokens=True) == "82"
        assert (
            tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token_id != tokenizer.eos_token_id
        )
        assert (
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            == turns
        )


def test_a_second_build_is_read_from_the_cache_and_one_that_fails_leaves_nothing(
    cache, monkeypatch
):
    first = build_tiny_model("arithmetic")
    assert first.parent == cache / "grpo"
    modified = (first / "model.safetensors").stat().st_mtime_ns
    assert build_tiny_model("arithmetic") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == modified
    other = build_tiny_model("countdown")
    monkeypatch.setitem(tiny.RECIPES, "arithmetic", replace(QUICK, num_heads=0))
    with pytest.raises(ZeroDivisionError):
        build_tiny_model("arithmetic")
    with pytest.raises(ValueError, match="unknown task"):
        build_tiny_model("sudoku")
    assert {*first.parent.iterdir()} == {first, other}, "nothing half-written is left"


def _build(cache) -> str:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    tiny.RECIPES["arithmetic"] = QUICK
    return str(build_tiny_model("arithmetic"))


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
