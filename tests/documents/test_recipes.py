"""The published runs of ``configs/``: the settings, the prompt they build, the rewards they give, and two steps of each file."""

import json
import math

import pytest
from conftest import ROOT, run_trainer

from grpo.config import Config, load_config
from grpo.data import load_rows, make_problems
from grpo.model import load_tokenizer
from grpo.rewards import load_reward

QUESTION = "Ann has 3 bags of 4 pears and eats 2. How many are left?"
GSM8K_ROW = {"question": QUESTION, "answer": "She has 3*4=<<3*4=12>>12.\nShe keeps 12-2=<<12-2=10>>10.\n#### 1,010"}
MATH_ROWS = [
    {
        "problem": f"What is $\\frac{{{n}}}{{2}} + \\frac{{1}}{{3}}$?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": f"First \\boxed{{0}} is wrong.\nWe get $\\boxed{{\\frac{{{3 * n + 2}}}{{6}}}}$.",
    }
    for n in range(1, 30)
]
GSM8K_RUNS = [
    "gsm8k_llama3.2_1b_ddp", "gsm8k_smollm2_1.7b", "gsm8k_gemma3_1b", "first_principles", "gsm8k_qwen2.5_0.5b",
]  # fmt: skip


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
        totals = [total + function.weight * value for total, value in zip(totals, values, strict=True)]
    return [round(total, 6) for total in totals]


def prompt_of(config: Config, tmp_path, assets, row: dict) -> tuple[str, dict]:
    """The prompt as the model sees it, and the columns that the rewards see."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    data = config.data.model_copy(
        update={"dataset": f"{tmp_path}/rows.jsonl", "train_split": "train", "max_prompt_length": 512}
    )
    tokenizer = load_tokenizer(str(assets / "models/gsm8k-7m"))
    (problem,) = make_problems(load_rows(data, train=True, seed=0), data, tokenizer).problems
    return tokenizer.decode(problem.prompt_ids), problem.columns


def chat(*turns: tuple[str, str]) -> str:
    """The template of gsm8k-7m, written out."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


# --- settings


def test_llama_ddp_is_as_published():
    c = config_of("gsm8k_llama3.2_1b_ddp")
    assert (c.rollout.prompts_per_step, c.rollout.num_generations) == (8 * 4, 4)
    assert (c.rollout.max_completion_length, c.rollout.temperature, c.rollout.top_p) == (256, 1.0, 0.9)
    assert (c.algorithm.num_iterations, c.algorithm.epsilon, c.algorithm.beta) == (4, 0.2, 0.005)
    o = c.optim
    assert (o.learning_rate, o.lr_scheduler_type, o.min_lr, o.warmup_steps) == (1e-5, "cosine", 1e-6, 0.1)
    assert (o.weight_decay, o.max_grad_norm, o.num_epochs, o.max_steps) == (0.1, 0.1, 1, None)


def test_smollm2_is_as_published():
    c = config_of("gsm8k_smollm2_1.7b")
    assert (c.rollout.prompts_per_step, c.rollout.num_generations, c.algorithm.updates_per_step) == (4, 8, 1)
    r = c.rollout
    assert (r.max_completion_length, r.temperature, r.top_p, r.top_k) == (300, 0.9, 0.9, 50)
    assert (c.algorithm.epsilon, c.algorithm.beta) == (0.2, 0.04)
    o = c.optim
    assert (o.learning_rate, o.lr_scheduler_type, o.warmup_steps, o.max_grad_norm, o.max_steps) == (
        5e-5, "linear", 0, 1.0, 200,
    )  # fmt: skip
    assert (c.eval.num_samples, c.eval.temperature, c.eval.before_training) == (8, 0.7, True)
    assert (c.data.eval_split, c.data.max_eval_samples, c.eval.max_samples) == ("test", None, None)


def test_gemma_is_as_published():
    c = config_of("gsm8k_gemma3_1b")
    assert (c.rollout.num_generations, c.optim.max_steps, c.optim.learning_rate) == (4, 50, 5e-6)
    assert (c.data.max_prompt_length, c.rollout.max_completion_length) == (256, 768)


def test_first_principles_is_as_published():
    c = config_of("first_principles")
    assert (c.rollout.prompts_per_step, c.rollout.num_generations, c.rollout.max_completion_length) == (4, 4, 128)
    assert (c.optim.max_steps, c.optim.learning_rate, c.optim.max_grad_norm, c.optim.weight_decay) == (
        500, 5e-6, 0.1, 0.0,
    )  # fmt: skip
    assert (c.algorithm.beta, c.algorithm.ref_sync_steps, c.algorithm.ref_sync_alpha) == (0.1, 1, 1.0)


def test_the_protocol_on_one_gpu_is_as_published():
    c = config_of("gsm8k_qwen2.5_0.5b")
    assert (c.rollout.prompts_per_step, c.rollout.num_generations) == (20, 8)
    assert (c.optim.max_steps, c.optim.learning_rate) == (100, 1e-6)
    assert (c.algorithm.epsilon, c.algorithm.epsilon_high) == (0.2, 0.28)
    assert (c.data.eval_split, c.eval.num_samples, c.eval.before_training) == ("test", 1, True)
    assert (c.data.max_eval_samples, c.eval.max_samples) == (None, None), "all 1,319"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ("reinforce", "mean", "group", "token_mean")),
        (["algorithm.name=reinforce"], ("reinforce", "none", "none", "token_mean")),
        (["algorithm.name=reinforce_baseline"], ("reinforce", "mean", "group", "token_mean")),
        (["algorithm.name=grpo", "algorithm.beta=0"], ("clip", "mean", "group", "token_mean")),
        (["algorithm.scale=none"], ("reinforce", "mean", "none", "token_mean")),
        (["algorithm.aggregation=constant"], ("reinforce", "mean", "group", "constant")),
        (
            ["algorithm.name=grpo", "algorithm.beta=0", "algorithm.scale=none", "algorithm.aggregation=constant"],
            ("clip", "mean", "none", "constant"),
        ),
    ],
)
def test_the_variants_of_r1_zero_are_overrides(overrides, expected):
    a = config_of("math_r1_zero", *overrides).algorithm
    assert (a.objective, a.baseline, a.scale, a.aggregation) == expected
    assert a.beta == 0


# --- prompts and rewards


def test_llama_ddp_prompt_and_rewards(tmp_path, assets):
    c = config_of("gsm8k_llama3.2_1b_ddp")
    text, columns = prompt_of(c, tmp_path, assets, GSM8K_ROW)
    example = "<reasoning>\nTwo and two more make four: 2 + 2 = 4.\n</reasoning>\n<answer>\n4\n</answer>"
    assert text == chat(
        ("system", c.data.system_prompt), ("user", "What is 2+2?"), ("assistant", example), ("user", QUESTION)
    )
    assert columns["answer"] == "1,010"
    assert "<reasoning>\nyour work\n</reasoning>\n<answer>\nthe number\n</answer>" in c.data.system_prompt
    assert rewards_of(c, [example], answer="4") == [3.0], "the worked example earns everything"
    right = "<reasoning>\na\n</reasoning>\n<answer>\n1,010\n</answer>"
    assert rewards_of(
        c,
        [right, right.replace("1,010", "7"), "so <answer>1,010</answer>", f"Well: {right}", "1,010"],
        answer="1,010",
    ) == [3.0, 1.0, 2.0, 2.0, 0.0]  # fmt: skip


def test_smollm2_rewards(tmp_path, assets):
    c = config_of("gsm8k_smollm2_1.7b")
    text, columns = prompt_of(c, tmp_path, assets, GSM8K_ROW)
    assert text == chat(("system", c.data.system_prompt), ("user", QUESTION))
    assert columns["answer"] == "1,010"
    whole = "<think>3*4-2</think> <answer>10</answer>"
    assert rewards_of(
        c,
        [
            whole,
            whole.replace("10", "11"),
            whole.replace("<answer>10", "<answer> It is 10 pears "),
            whole.replace("10", "ten"),
            whole.replace("</think>", ""),
            f"Sure. {whole}",
            "10",
        ],
        answer="10",
    ) == [1.5, 0.5, 0.5, 0.0, 1.0, 1.0, 0.0]  # fmt: skip
    assert c.eval.format == "tag_groups"


def test_gemma_rewards(tmp_path, assets):
    c = config_of("gsm8k_gemma3_1b")
    text, _ = prompt_of(c, tmp_path, assets, GSM8K_ROW)
    assert text == chat(("system", c.data.system_prompt), ("user", QUESTION))
    for tag in ("<start_working_out>", "<end_working_out>", "<SOLUTION></SOLUTION>"):
        assert tag in c.data.system_prompt
    whole = "<start_working_out>\n3*4-2\n<end_working_out>\n<SOLUTION>10</SOLUTION>"
    assert rewards_of(
        c,
        [
            whole,
            whole + "\n",
            whole.replace("10", " 10\n"),
            whole.replace("10", "11"),
            "<SOLUTION>10</SOLUTION>",
            whole + " indeed",
            whole.replace("SOLUTION", "answer"),
        ],
        answer="10",
    ) == [6.0, 6.0, 4.5, 3.0, 3.0, 3.0, 0.0]  # fmt: skip


@pytest.mark.parametrize("name", ["first_principles", "gsm8k_qwen2.5_0.5b"])
def test_think_and_answer_runs(tmp_path, assets, name):
    c = config_of(name)
    text, columns = prompt_of(c, tmp_path, assets, GSM8K_ROW)
    assert text == chat(("system", c.data.system_prompt), ("user", QUESTION))
    whole = "<think>3*4-2</think>\n<answer>1010</answer>"
    texts = [whole, whole.replace("1010", "7"), "<answer>1010</answer>", "1010"]
    assert rewards_of(c, texts, **columns) == [2.0, 1.0, 1.0, 0.0]


def test_r1_zero_prompt_and_rewards(tmp_path, assets):
    c = config_of("math_r1_zero")
    text, columns = prompt_of(c, tmp_path, assets, MATH_ROWS[0])
    assert text.startswith("A conversation between User and Assistant. The User asks a question, and the Assistant")
    assert text.endswith(f"\nUser: {MATH_ROWS[0]['problem']}\nAssistant: <think>")
    assert "<|im_start|>" not in text
    assert columns["answer"] == "\\frac{5}{6}", "the last box, with the braces inside it"
    assert c.rollout.stop == ["</answer>"]
    assert rewards_of(
        c,
        [
            "so </think> <answer>5/6</answer>",
            "so </think> <answer>$\\frac{10}{12}$</answer>",
            "so </think> <answer>5/7</answer>",
            "so </think>\n<answer>5/6</answer>",
            "5/6",
        ],
        **columns,
    ) == [1.0, 1.0, 0.0, 0.0, 0.0]  # fmt: skip


# --- two steps of every file


def two_steps(name: str, tmp_path, assets, *changes: str) -> list[dict]:
    """Two steps of a config with only the model, data paths and sizes changed."""
    done = run_trainer(
        "--config", f"configs/{name}.yaml", f"output_dir={tmp_path}/run", f"model.name_or_path={assets}/models/gsm8k-7m",
        "rollout.prompts_per_step=2", "rollout.max_completion_length=16", "data.max_prompt_length=512",
        "optim.max_steps=2", "eval.max_samples=3", *changes,
    )  # fmt: skip
    assert "before" in done.stdout and "after" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(math.isfinite(line.get(name, 0)) for line in lines[1:] for name in ("loss", "grad_norm", "reward", "kl"))
    assert (tmp_path / "run" / "checkpoint-2" / "model.safetensors").exists()
    return lines


def gsm8k_paths(assets) -> list[str]:
    folder = assets / "data/gsm8k"
    return [
        f"data.dataset={folder}/train.jsonl",
        f"data.eval_dataset={folder}/test.jsonl",
        "data.eval_split=train",
        "data.max_train_samples=20",
        "data.max_eval_samples=3",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", GSM8K_RUNS)
def test_two_steps_on_gsm8k(tmp_path, assets, name):
    lines = two_steps(name, tmp_path, assets, *gsm8k_paths(assets))
    config = config_of(name)
    for function in config.reward.functions:
        assert f"rewards/{function.name}/mean" in lines[1]
    assert lines[1]["completions/max_length"] <= 16
    if config.algorithm.beta:
        assert lines[1]["kl"] == pytest.approx(0, abs=1e-4) or config.algorithm.num_iterations > 1
    if config.eval.num_samples > 1:
        assert {f"eval/pass@{k}" for k in range(1, 9)} <= lines[0].keys()
        assert {"eval/rewards/accuracy", "eval/rewards/tag_groups"} <= lines[0].keys()


@pytest.mark.slow
@pytest.mark.parametrize("variant", [[], ["algorithm.name=grpo", "algorithm.beta=0", "algorithm.num_iterations=2"]])
def test_two_steps_of_r1_zero(tmp_path, assets, variant):
    (tmp_path / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in MATH_ROWS))
    paths = [f"data.dataset={tmp_path}/math.jsonl", "data.train_split=train[:20]", "data.eval_split=train[20:]"]
    lines = two_steps("math_r1_zero", tmp_path, assets, *paths, *variant, "rollout.num_generations=4")
    assert {"rewards/r1_zero/mean", "rewards/format/mean"} <= lines[1].keys()
