"""What a user gets wrong: one line that names the thing and what would work, exit code 2, no output
folder.

Mistakes in the configuration alone: test_config.py; in the rows of data: tests/data; in
checkpoints: tests/faults."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import DEFAULTS, ROOT, environment_of_runs, run_forked, run_trainer, small_run

from train_grpo import main


def refused(capsys, tmp_path, *arguments: str) -> str:
    """The one line that the trainer says; checks all that holds for every refusal."""
    output = tmp_path / "output"
    quick = [
        "runtime.threads_per_rank=1",
        "rollout.max_completion_length=16",
        "rollout.prompts_per_step=1",
    ]
    code = main([DEFAULTS, f"output_dir={output}", *quick, *arguments])
    error = capsys.readouterr().err
    (line,) = [line for line in error.splitlines() if line.strip()]
    assert code == 2 and line.startswith("error: ") and not output.exists()
    return line


# Before the model is looked at, which would fail, and say something else. {rows}: a file of rows
# that are right.
BEFORE_THE_MODEL = """
    rollout.num_generation=4 -> rollout.num_generations
    runtime.parallel=fsdp runtime.offload=all -> offload=all needs at least 2 processes
    runtime.device=cuda -> runtime.device=cpu
    reward.functions=[acuracy] -> accuracy
    reward.functions=[accuracy,{"name":"format","args":{"value_":2}}] -> value_
    reward.functions=['{tmp}/broken.py:f'] -> broken.py
    eval.correctness=nothing -> eval.correctness
    data.dataset=./nowhere.jsonl -> ./nowhere.jsonl
    data.dataset={tmp}/rows.jsonl data.eval_dataset=./d.jsnl -> data.eval_dataset=./d.jsnl
    data.dataset={tmp}/rows.jsonl data.answer_column=gold -> answer_column=gold
    data.dataset={tmp}/rows.jsonl reward.functions=[countdown] -> numbers
    data.dataset={tmp}/rows.jsonl data.eval_dataset={tmp}/other.jsonl reward.functions=['{tmp}/level.py:f'] -> reward 'f' needs the column(s) level; the rows of data.eval_dataset=
    checkpoint.resume={tmp}/nowhere -> checkpoint.resume=
    output_dir={tmp}/broken.py/run -> /broken.py/run
"""
"""Arguments -> a part of the message."""


@pytest.mark.parametrize("case", BEFORE_THE_MODEL.strip().splitlines())
def test_what_is_refused_before_the_model_is_loaded(capsys, tmp_path, case):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "1", "level": 2}\n' * 9)
    (tmp_path / "other.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "level.py").write_text(
        "def f(completions, level): return [1.0] * len(completions)\n"
    )
    arguments, words = case.strip().split(" -> ")
    filled = arguments.replace("{tmp}", str(tmp_path)).split()
    line = refused(capsys, tmp_path, f"model.name_or_path={tmp_path}/no-model", *filled)
    assert words in line
    assert "no-model" not in line


def change_weights(folder, change) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def remove_tokenizer(folder) -> None:
    for path in folder.iterdir():
        if "token" in path.name or "template" in path.name:
            path.unlink()


def save_without_eos(folder, **special_tokens) -> None:
    """A model whose tokenizer has only these special tokens (Qwen2's class would put its own in
    their place)."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from grpo.data.tiny import build_tokenizer

    shutil.rmtree(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer().backend_tokenizer, **special_tokens
    )
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    config = LlamaConfig(
        vocab_size=len(tokenizer), eos_token_id=None, bos_token_id=None, pad_token_id=None, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


MODELS = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "weights missing": (lambda f: change_weights(f, lambda w: w.pop("model.norm.weight")), ["model.norm.weight"]),
    "not finite": (lambda f: change_weights(f, lambda w: w["model.norm.weight"].fill_(float("nan"))), ["model.norm"]),
    "no tokenizer": (remove_tokenizer, ["tokenizer"]),
    "no EOS": (save_without_eos, ["EOS"]),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_model_folder(capsys, tmp_path, random_model, case):
    folder = tmp_path / "model"
    shutil.copytree(random_model, folder)
    spoil, named = MODELS[case]
    spoil(folder)
    line = refused(capsys, tmp_path, f"model.name_or_path={folder}", "data.max_train_samples=16")
    assert all(word in line for word in named), line
    assert str(folder) in line


def test_a_tokenizer_without_pad_is_fine(tmp_path):
    (tmp_path / "model").mkdir()
    save_without_eos(tmp_path / "model", eos_token="<|im_end|>")
    assert main([*small_run(tmp_path / "model", tmp_path / "run"), "optim.max_steps=1"]) == 0


def test_a_run_starts_beside_its_log_and_an_evaluation(tmp_path, random_model):
    """``python -m grpo.evaluation --config X.yaml > runs/x/log.txt`` before training leaves these
    files."""
    output = tmp_path / "run"
    output.mkdir()
    beside = ("log.txt", "evaluation.json", "vllm.log", "notes.md")
    for name in (*beside, "config.yaml", "completions", "checkpoint-5"):
        (output / name).write_text(name)
    for resume in ("auto", "never"):  # the second run moves the first aside
        run = [*small_run(random_model, output), "optim.max_steps=1", f"checkpoint.resume={resume}"]
        assert main(run) == 0
        assert [(output / name).read_text() for name in beside] == list(beside)
    for name in ("config.yaml", "completions", "checkpoint-5"):
        assert (output / "previous-1" / name).read_text() == name, "the user may have written it"
    kept = {path.name for path in (output / "previous-2").iterdir()}
    assert kept == {
        "checkpoint-1",
        "metrics.jsonl",
        "intervals.jsonl",
        "completions",
        "starts.jsonl",
        "config.yaml",
    }


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_one_line(tmp_path):
    """Nothing listens on port 9 of this machine; the client of the Hub tries for a while, and says
    so."""
    env = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "cache"),
        "no_proxy": "*",
        "NO_PROXY": "*",
    }
    for key in ("data.dataset", "model.name_or_path"):
        command = [
            sys.executable,
            "train_grpo.py",
            DEFAULTS,
            f"output_dir={tmp_path}/run",
            f"{key}=nobody/nothing",
        ]
        done = subprocess.run(
            command, env=os.environ | env, cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert done.returncode == 2 and len(errors) == 1 and "nobody/nothing" in errors[0]


@pytest.mark.slow
def test_two_ranks_speak_once_also_when_one_alone_has_looked(tmp_path):
    """The main rank looks at the output folder for all: the others learn of its refusal, and keep
    quiet."""
    done = run_trainer(
        f"output_dir={tmp_path}/run",
        f"checkpoint.resume={tmp_path}/gone",
        ranks=2,
        check=False,
        fresh=True,
    )
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    assert f"checkpoint.resume={tmp_path}/gone" in done.stderr
    assert "[rank" not in done.stderr  # no traceback of a rank; torchrun's own has no such prefix
    assert "exitcode  : 2" in done.stderr
    assert "exitcode  : -6" not in done.stderr  # nor an abort on the way out
    assert not (tmp_path / "run").exists()


def test_what_is_wrong_on_the_second_rank_alone_is_said(tmp_path, random_model):
    """A file that one machine lacks, which it notices while all ranks work."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nimport grpo.run.models\nimport train_grpo\n"
        "def wrong(*args, **kwargs):\n    raise ValueError('no such file on this machine')\n"
        "if os.environ['RANK'] == '1':\n    grpo.run.models.load_policy = wrong\n"
        "sys.exit(train_grpo.main(sys.argv[1:]))\n"
    )
    arguments = small_run(random_model, tmp_path / "run")
    done = run_forked(program, arguments, ranks=2, timeout=120, env=environment_of_runs())
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.endswith("no such file on this machine")
    assert "[rank" not in done.stderr
