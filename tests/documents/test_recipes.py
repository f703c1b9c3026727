"""The published runs of ``configs/``: the prompt they build, the rewards they give, and two steps
of each file."""

import hashlib
import json
import math
import re
import sqlite3
from datetime import date

import pytest
from conftest import ROOT, run_trainer

from examples import calculations, dates, sql_questions
from grpo.config import Config, load_config
from grpo.data import load_rows, make_problems
from grpo.model import load_tokenizer
from grpo.rewards import load_reward

QUESTION = "Ann has 3 bags of 4 pears and eats 2. How many are left?"
GSM8K_ROW = {
    "question": QUESTION,
    "answer": "She has 3*4=<<3*4=12>>12.\nShe keeps 12-2=<<12-2=10>>10.\n#### 1,010",
}
MATH_ROWS = [
    {
        "problem": f"What is $\\frac{{{n}}}{{2}} + \\frac{{1}}{{3}}$?",
        "solution": f"First \\boxed{{0}} is wrong.\nWe get $\\boxed{{\\frac{{{3 * n + 2}}}{{6}}}}$.",
    }
    for n in range(1, 30)
]
GSM8K_RUNS = [
    "gsm8k_llama3.2_1b_ddp",
    "gsm8k_smollm2_1.7b",
    "gsm8k_gemma3_1b",
    "first_principles",
    "gsm8k_qwen2.5_0.5b",
]


def config_of(name: str, *overrides: str) -> Config:
    return load_config(["--config", str(ROOT / "configs" / f"{name}.yaml"), *overrides])


def rewards_of(config: Config, texts: list[str], **columns) -> list[float]:
    """The weighted sum of the config's rewards, by function, then summed."""
    totals = [0.0] * len(texts)
    for function in config.reward.functions:
        values = load_reward(function.name)(
            prompts=["q"] * len(texts),
            completions=texts,
            **function.args,
            **{k: [v] * len(texts) for k, v in columns.items()},
        )
        totals = [
            total + function.weight * value for total, value in zip(totals, values, strict=True)
        ]
    return [round(total, 6) for total in totals]


def prompt_of(config: Config, tmp_path, assets, row: dict) -> tuple[str, dict]:
    """The prompt as the model sees it, and the columns that the rewards see."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    data = config.data.model_copy(
        update={
            "dataset": f"{tmp_path}/rows.jsonl",
            "train_split": "train",
            "max_prompt_length": 512,
        }
    )
    tokenizer = load_tokenizer(str(assets / "models/gsm8k-7m"))
    (problem,) = make_problems(load_rows(data, train=True, seed=0), data, tokenizer).problems
    return tokenizer.decode(problem.prompt_ids), problem.columns


def chat(*turns: tuple[str, str]) -> str:
    """The template of gsm8k-7m, written out."""
    return (
        "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
        + "<|im_start|>assistant\n"
    )


# --- prompts and rewards


def test_prompts_of_gsm8k(tmp_path, assets):
    """System prompt, worked example, question, in the template of the model."""
    example = "<reasoning>Two and two more make four: 2 + 2 = 4.</reasoning>\n<answer>4</answer>"
    turns = {name: [("user", QUESTION)] for name in GSM8K_RUNS}
    turns["gsm8k_llama3.2_1b_ddp"][:0] = [("user", "What is 2+2?"), ("assistant", example)]
    turns["gsm8k_smollm2_1.7b"] = [("user", f"Question: {QUESTION}")]
    for name, expected in turns.items():
        config = config_of(name)
        text, _ = prompt_of(config, tmp_path, assets, GSM8K_ROW)
        assert text == chat(("system", config.data.system_prompt), *expected), name
    digest = "2140670d2d5bcd9bafb8d6fd1a54e9ad1728c10a10c22867f1cd52abe301259b"  # of the text in the source's code
    assert (
        hashlib.sha256(config_of("gsm8k_smollm2_1.7b").data.system_prompt.encode()).hexdigest()
        == digest
    )


LLAMA = "<reasoning>a</reasoning>\n<answer>1,010</answer>"
SMOLLM = "<think>3*4-2</think> <answer>10</answer>"
GEMMA = "<start_working_out>\n3*4-2\n<end_working_out>\n<SOLUTION>10</SOLUTION>"
THINK = "<think>3*4-2</think>\n<answer>1010</answer>"
REWARDS = [  # configuration, reference answer, completions with their rewards
    (
        "gsm8k_llama3.2_1b_ddp",
        "1,010",
        {
            LLAMA: 3.0,
            LLAMA.replace("1,010", "7"): 1.0,
            LLAMA.replace(">a<", ">\na\n<"): 2.0,
            f"Well: {LLAMA}": 2.0,
            "so <answer> 1,010": 2.0,
            "<answer>1010</answer>": 0.0,
        },
    ),
    (
        "gsm8k_smollm2_1.7b",
        "10",
        {
            SMOLLM: 1.5,
            SMOLLM.replace("10", "11"): 0.5,
            SMOLLM.replace("<answer>10", "<answer> It is 10 pears "): 1.5,
            SMOLLM.replace("10", "ten"): 0.0,
            f"Sure. {SMOLLM}": 0.0,
            "<answer>10</answer>": 0.0,
        },
    ),
    (
        "gsm8k_gemma3_1b",
        "10",
        {
            GEMMA: 6.0,
            GEMMA.replace("10", " 10\n"): 4.5,
            GEMMA.replace("10", "11"): 3.0,
            "<SOLUTION>10</SOLUTION>": 0.0,
            f"{GEMMA} indeed": 0.0,
        },
    ),
    (
        "first_principles",
        "1,010",
        {THINK: 2.0, THINK.replace("1010", "7"): 1.0, "<answer>1010</answer>": 1.0, "1010": 0.0},
    ),
    (
        "gsm8k_qwen2.5_0.5b",
        "1,010",
        {THINK: 2.0, THINK.replace("1010", "7"): 1.0, "<answer>1010</answer>": 1.0, "1010": 0.0},
    ),
    (
        "math_r1_zero",
        "\\frac{5}{6}",
        {
            "so </think> <answer>5/6</answer>": 1.0,
            "so </think> <answer>$\\frac{10}{12}$</answer>": 1.0,
            "so </think> <answer>5/7</answer>": 0.0,
            "5/6": 0.0,
        },
    ),
    ("didactic_one_token", "5", {"5": 1.0, "9": 0.0}),
    (
        "smollm2_135m",
        "2014-03-05",
        {
            "2014-03-05": 1.0,
            "2014-05-03": 0.0,
            "2014-03-06": 0.0,
            "2014-3-5": 0.0,
            "2014-03-05.": 0.0,
            "The date is 2014-03-05": 0.0,
        },
    ),
]


@pytest.mark.parametrize(
    ("name", "answer", "expected"), REWARDS, ids=[name for name, *_ in REWARDS]
)
def test_rewards(name, answer, expected):
    assert rewards_of(config_of(name), list(expected), answer=answer) == list(expected.values())


def test_r1_zero_prompt(tmp_path, assets):
    config = config_of("math_r1_zero")
    text, columns = prompt_of(config, tmp_path, assets, MATH_ROWS[0])
    assert text.startswith(
        "A conversation between User and Assistant. The User asks a question, and the Assistant"
    )
    assert text.endswith(f"\nUser: {MATH_ROWS[0]['problem']}\nAssistant: <think>")
    assert columns["answer"] == "\\frac{5}{6}", "the last box, with the braces inside it"
    assert config.rollout.stop == ["</answer>"]


def test_one_token_prompt(tmp_path, assets):
    config = config_of("didactic_one_token")
    row = json.loads((ROOT / config.data.dataset).read_text().splitlines()[0])
    text, columns = prompt_of(config, tmp_path, assets, row)
    assert text == "Solve y = 2x + 1 for x = 2, y = ", (
        "with its last blank, without a chat template"
    )
    assert columns["answer"] == "5"


def test_code_prompt_and_reward(tmp_path, assets):
    c = config_of("code_mbpp")
    rows = [
        json.loads(line)
        for line in (ROOT / "configs/code_mbpp_rows.jsonl").read_text().splitlines()
    ]
    text, columns = prompt_of(c, tmp_path, assets, rows[0])
    question = f"{rows[0]['text']}\nYour code must pass these tests:\n" + "\n".join(
        rows[0]["test_list"]
    )
    assert text == chat(("system", c.data.system_prompt), ("user", question))
    assert set(columns) == {
        "task_id",
        "code",
        "test_list",
        "test_setup_code",
        "challenge_test_list",
    }, "as MBPP's"
    code = rows[0]["code"]
    wrong = code.replace("a > b", "a < b")
    found = rewards_of(
        c, [f"```python\n{code}\n```", f"```python\n{wrong}\n```", "I cannot."], **rows[0]
    )
    assert found == [1.0, 0.0, 0.0]
    for row in rows:
        assert rewards_of(c, [row["code"]], **row) == [1.0], row["text"]


def stored_rows(name: str, written) -> list[dict]:
    """The rows of a file of ``configs/``, which are those that its example has written."""
    text = (ROOT / "configs" / name).read_text()
    assert text == (written / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_rows_of_dates(tmp_path, monkeypatch):
    """As the example writes them; the evaluation has other sentences and other dates."""
    monkeypatch.setattr(dates, "CONFIGS", tmp_path)
    dates.main()
    days = {}
    for split in ("train", "eval"):
        rows = stored_rows(f"smollm2_135m_{split}.jsonl", tmp_path)
        days[split] = [date.fromisoformat(row["answer"]) for row in rows]
        for row, day in zip(rows, days[split], strict=True):
            written = [text for text in dates.notations(day) if text in row["sentence"]]
            sentences = [row["sentence"].replace(text, "{}") for text in written]
            assert set(sentences) & set(getattr(dates, f"{split.upper()}_SENTENCES"))
    assert len({*days["train"], *days["eval"]}) == 1_200 + 256
    assert not set(dates.TRAIN_SENTENCES) & set(dates.EVAL_SENTENCES)
    # The example in the prompt gives no answer away.
    (example,) = config_of("smollm2_135m").data.few_shot
    assert date.fromisoformat(example["completion"]) not in days["eval"]


def test_rows_of_calculations(tmp_path, monkeypatch):
    """As the example writes them; no pair of numbers of the evaluation is in the training."""
    monkeypatch.setattr(calculations, "CONFIGS", tmp_path)
    calculations.main()
    pairs = {}
    for split in ("train", "eval"):
        pairs[split] = set()
        for row in stored_rows(f"smollm2_135m_calculator_{split}.jsonl", tmp_path):
            left, right = map(int, re.findall(r"\d+", row["question"]))
            assert int(row["answer"]) in (left + right, left * right)
            pairs[split].add((min(left, right), max(left, right)))
    assert not pairs["train"] & pairs["eval"]


def test_rows_of_sql_questions(tmp_path, monkeypatch):
    """As the example writes them, on the same table; the evaluation has other words and values."""
    monkeypatch.setattr(sql_questions, "CONFIGS", tmp_path)
    sql_questions.main()
    tables = []
    for folder in (ROOT / "configs", tmp_path):
        # The file itself holds the version of SQLite that wrote it.
        with sqlite3.connect(folder / sql_questions.DATABASE) as database:
            tables.append(list(database.iterdump()))
    assert tables[0] == tables[1]
    known = f"{sql_questions.NAMES} {sql_questions.CITIES}".split()
    values = {}
    for split in ("train", "eval"):
        rows = stored_rows(f"smollm2_135m_sql_{split}.jsonl", tmp_path)
        words = re.findall(r"\w+", " ".join(row["question"] for row in rows))
        values[split] = {word for word in words if word in known or word.isdigit()}
        # No answer is frequent, so a model that asks nothing is seldom right.
        answers = [row["answer"] for row in rows]
        assert max(map(answers.count, answers)) <= 0.04 * len(rows)
    assert not values["train"] & values["eval"]
    for train, evaluation in sql_questions.QUESTIONS.values():
        assert not {*train} & {*evaluation}
    # The examples in the prompt show what the database says, and give no answer away.
    for example in config_of("smollm2_135m_sql").data.few_shot:
        call, result, answer = (message["content"] for message in example["completion"])
        query = call.removeprefix("<query>").removesuffix("</query>")
        ((number,),) = database.execute(query)
        assert (result, answer) == (f"({number},)", str(number))
        assert not {*re.findall(r"\w+", example["prompt"])} & values["eval"]


# --- two steps of every file


def two_steps(name: str, tmp_path, assets, *changes: str) -> list[dict]:
    """Two steps of a config with only the model, data paths and sizes changed."""
    done = run_trainer(
        "--config",
        f"configs/{name}.yaml",
        f"output_dir={tmp_path}/run",
        f"model.name_or_path={assets}/models/gsm8k-7m",
        "rollout.prompts_per_step=2",
        "rollout.max_completion_length=16",
        "data.max_prompt_length=512",
        "optim.max_steps=2",
        "eval.max_samples=3",
        *changes,
    )
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert "before" in done.stdout and "after" in done.stdout
    assert [line["step"] for line in lines] == [0, 1, 2]
    steps = lines[-2:]
    assert all(
        math.isfinite(line.get(name, 0))
        for line in steps
        for name in ("loss", "grad_norm", "reward", "kl")
    )
    adapter = "adapter_" * config_of(name).uses_lora
    assert (tmp_path / "run" / "checkpoint-2" / f"{adapter}model.safetensors").exists()
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("name", GSM8K_RUNS)
def test_two_steps_on_gsm8k(tmp_path, assets, name, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = assets / "data/gsm8k"
    lines = two_steps(
        name,
        tmp_path,
        assets,
        f"data.dataset={folder}/train.jsonl",
        f"data.eval_dataset={folder}/test.jsonl",
        "data.eval_split=train",
        "data.max_train_samples=20",
        "data.max_eval_samples=3",
    )
    config = config_of(name)
    assert (config.logging.wandb == "online") == bool(
        list(tmp_path.glob("run/wandb/offline-run-*"))
    )
    for function in config.reward.functions:
        assert f"rewards/{function.name}/mean" in lines[1]
    assert lines[1]["completions/max_length"] <= 16
    if config.algorithm.beta:
        assert lines[1]["kl"] == pytest.approx(0, abs=1e-4) or config.algorithm.num_iterations > 1
    if config.eval.num_samples > 1:
        assert {f"eval/pass@{k}" for k in range(1, 9)} <= lines[0].keys()
        assert {"eval/rewards/pattern_answer", "eval/rewards/tag_groups"} <= lines[0].keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", [[], ["algorithm.name=grpo", "algorithm.beta=0", "algorithm.num_iterations=2"]]
)
def test_two_steps_of_r1_zero(tmp_path, assets, variant):
    (tmp_path / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in MATH_ROWS))
    paths = [
        f"data.dataset={tmp_path}/math.jsonl",
        "data.train_split=train[:20]",
        "data.eval_split=train[20:]",
    ]
    lines = two_steps(
        "math_r1_zero", tmp_path, assets, *paths, *variant, "rollout.num_generations=4"
    )
    assert {"rewards/r1_zero/mean", "rewards/format/mean"} <= lines[1].keys()
