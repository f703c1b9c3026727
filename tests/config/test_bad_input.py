"""What a user gets wrong: one line that names the thing and what would work, exit code 2, no output folder.

Mistakes in the configuration alone: test_config.py; in the rows of data: tests/data; in checkpoints: tests/faults.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import DEFAULTS, ROOT, environment_of_runs, run_forked, run_trainer, save_random_model, small_run

from train_grpo import main


def refused(capsys, tmp_path, *arguments: str) -> str:
    """The one line that the trainer says; checks all that holds for every refusal."""
    output = tmp_path / "output"
    quick = ["runtime.threads_per_rank=1", "rollout.max_completion_length=16", "rollout.prompts_per_step=1"]
    code = main([DEFAULTS, f"output_dir={output}", *quick, *arguments])
    error = capsys.readouterr().err
    (line,) = [line for line in error.splitlines() if line.strip()]
    assert code == 2 and line.startswith("error: ") and not output.exists()
    return line


# Before the model is looked at, which would fail, and say something else. {rows}: a file of rows that are right.
BEFORE_THE_MODEL = {
    "a key": (["rollout.num_generation=4"], ["rollout.num_generations"]),
    "ranks": (["runtime.parallel=fsdp", "runtime.offload=optimizer"], ["offload=optimizer", "2 processes"]),
    "no CUDA": (["runtime.device=cuda"], ["GPU", "runtime.device=cpu"]),
    "no adapter": (["model.adapter=./nowhere"], ["./nowhere", "adapter_config.json"]),
    "reward": (["reward.functions=[acuracy]"], ["acuracy", "accuracy", "format"]),
    "reward arguments": (["reward.functions=[{name: accuracy, args: {value_: 2}}]"], ["accuracy", "value_"]),
    "broken reward file": (["reward.functions=['{tmp}/broken.py:f']"], ["broken.py", "2"]),
    "correctness": (["eval.correctness=nothing"], ["eval.correctness", "accuracy"]),
    "builtin model": (["model.name_or_path=builtin:big"], ["builtin:big"]),
    "dataset file": (["data.dataset=./nowhere.jsonl"], ["./nowhere.jsonl"]),
    "evaluation file": (["data.dataset={rows}", "data.eval_dataset=./d.jsnl"], ["data.eval_dataset=./d.jsnl"]),
    "column": (["data.dataset={rows}", "data.answer_column=gold"], ["answer_column=gold", "answer"]),
    "column of a reward": (["data.dataset={rows}", "reward.functions=[countdown]"], ["countdown", "numbers"]),
    "column of a reward in the evaluation": (
        ["data.dataset={rows}", "data.eval_dataset={other}", "reward.functions=['{tmp}/level.py:f']"],
        ["reward 'f' needs the column(s) level; the rows of data.eval_dataset=", "have answer"],
    ),
    "model folder": (["model.name_or_path=./nowhere"], ["./nowhere"]),
    "resume from nothing": (["checkpoint.resume={tmp}/nowhere"], ["checkpoint.resume=", "nowhere"]),
    "folder in a file": (["output_dir={tmp}/broken.py/run"], ["output_dir=", "/broken.py/run"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BEFORE_THE_MODEL)
def test_what_is_refused_before_the_model_is_loaded(capsys, tmp_path, case):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "1", "level": 2}\n' * 9)
    (tmp_path / "other.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "level.py").write_text("def f(completions, level): return [1.0] * len(completions)\n")
    arguments, words = BEFORE_THE_MODEL[case]
    filled = []
    for word in arguments:
        for name, path in (("tmp", tmp_path), ("rows", tmp_path / "rows.jsonl"), ("other", tmp_path / "other.jsonl")):
            word = word.replace(f"{{{name}}}", str(path))
        filled.append(word)
    line = refused(capsys, tmp_path, f"model.name_or_path={tmp_path}/no-model", *filled)
    assert all(word in line for word in words), line
    assert "no-model" not in line


def change_config(folder, **values) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | values))


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
    """A model whose tokenizer has only these special tokens (Qwen2's class would put its own in their place)."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from grpo.data.tiny import build_tokenizer

    shutil.rmtree(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=build_tokenizer().backend_tokenizer, **special_tokens)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=None, bos_token_id=None, pad_token_id=None, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def shrink_embedding(folder) -> None:
    from grpo.data.tiny import build_tokenizer

    save_random_model(folder, vocab_size=100)
    build_tokenizer().save_pretrained(folder)


MODELS = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), []),
    "truncated weights": (lambda folder: os.truncate(folder / "model.safetensors", 5000), []),
    "weights missing": (lambda f: change_weights(f, lambda w: w.pop("model.norm.weight")), ["model.norm.weight"]),
    "not finite": (lambda f: change_weights(f, lambda w: w["model.norm.weight"].fill_(float("nan"))), ["model.norm"]),
    "weights of another shape": (lambda f: change_config(f, intermediate_size=48), []),
    "no language model": (lambda f: change_config(f, model_type="t5"), ["T5Config"]),
    "no tokenizer": (remove_tokenizer, ["tokenizer"]),
    "no EOS": (save_without_eos, ["EOS"]),
    "vocabulary": (shrink_embedding, ["tokens", "embedding"]),
    "chat template": (lambda f: (f / "chat_template.jinja").write_text("{% for x in %}"), ["chat template"]),
    "context": (lambda f: change_config(f, max_position_embeddings=20), []),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_model_folder(capsys, tmp_path, random_model, case):
    folder = tmp_path / "model"
    shutil.copytree(random_model, folder)
    spoil, named = MODELS[case]
    spoil(folder)
    line = refused(capsys, tmp_path, f"model.name_or_path={folder}", "data.max_train_samples=16")
    assert all(word in line for word in named), line
    assert str(folder) in line or case in ("chat template", "context")


def test_a_tokenizer_without_pad_and_a_line_of_a_megabyte_are_fine(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    save_without_eos(tmp_path / "model", eos_token="<|im_end|>")
    rows = [{"prompt": "🙂 2+2=", "answer": "4"}, {"prompt": "x" * 1_000_000, "answer": "5"}]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert main([
        DEFAULTS, f"output_dir={tmp_path}/run", f"model.name_or_path={tmp_path}/model", "optim.max_steps=1",
        "rollout.prompts_per_step=1", "rollout.num_generations=2", "rollout.max_completion_length=3",
        f"data.dataset={tmp_path}/d.jsonl", "runtime.precision=fp32",
        "runtime.threads_per_rank=1", "runtime.device=cpu", "data.answer_column=answer",
    ]) == 0  # fmt: skip
    shown = capsys.readouterr().out
    assert "1 problems to train on" in shown and "left out, as empty or longer than 512 tokens: 1 and 0" in shown


@pytest.mark.parametrize("name", ["", "checkpoint-5", "metrics.jsonl", "completions", "run.json", "tensorboard"])
def test_files_of_others_that_a_run_would_replace_stay_as_they_are(capsys, tmp_path, random_model, name):
    mine = tmp_path / "folder" / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    assert main([DEFAULTS, f"output_dir={tmp_path}/folder", f"model.name_or_path={random_model}"]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/folder" in error and (name or "is no folder") in error
    assert mine.read_text() == "mine"


def test_a_run_starts_beside_its_log_and_an_evaluation(tmp_path, random_model):
    """``python -m grpo.evaluation --config X.yaml > runs/x/log.txt`` before training leaves these files."""
    output = tmp_path / "run"
    output.mkdir()
    beside = ("log.txt", "evaluation.json", "vllm.log", "notes.md")
    for name in (*beside, "config.yaml"):
        (output / name).write_text(name)
    for resume in ("auto", "never"):  # the second run moves the first aside
        run = [*small_run(random_model, output), "optim.max_steps=1", f"checkpoint.resume={resume}"]
        assert main(run) == 0
        assert [(output / name).read_text() for name in beside] == list(beside)
    assert (output / "previous-1" / "config.yaml").read_text() == "config.yaml", "the user may have written it"
    kept = {path.name for path in (output / "previous-2").iterdir()}
    assert kept == {"checkpoint-1", "metrics.jsonl", "intervals.jsonl", "completions", "run.json", "config.yaml"}


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_one_line(tmp_path):
    """Nothing listens on port 9 of this machine; the client of the Hub tries for a while, and says so."""
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "cache"), "no_proxy": "*", "NO_PROXY": "*"}
    for key in ("data.dataset", "model.name_or_path"):
        command = [sys.executable, "train_grpo.py", DEFAULTS, f"output_dir={tmp_path}/run", f"{key}=nobody/nothing"]
        done = subprocess.run(command, env=os.environ | env, cwd=ROOT, capture_output=True, text=True, timeout=120)
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert done.returncode == 2 and len(errors) == 1 and "nobody/nothing" in errors[0]


@pytest.mark.slow
def test_two_ranks_speak_once_also_when_one_alone_has_looked(tmp_path):
    """The main rank looks at the output folder for all: the others learn of its refusal, and keep quiet."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("mine")
    done = run_trainer(f"output_dir={tmp_path}/run", ranks=2, check=False, fresh=True)
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    assert "run.json" in done.stderr
    assert "[rank" not in done.stderr  # no traceback of a rank; torchrun's own has no such prefix
    assert "exitcode  : 2" in done.stderr
    assert "exitcode  : -6" not in done.stderr  # nor an abort on the way out
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    "where",
    [
        "train_grpo.load_config",
        pytest.param("grpo.run.prepare.resolve_model", marks=pytest.mark.slow),
        "grpo.run.models.load_policy",
    ],
)
def test_what_is_wrong_on_the_second_rank_alone_is_said(tmp_path, random_model, where):
    """A file that one machine lacks: before the ranks are connected, while one goes first, while all work."""
    module, name = where.rsplit(".", 1)
    program = tmp_path / "program.py"
    program.write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nimport {module}\nimport train_grpo\n"
        "def wrong(*args, **kwargs):\n    raise ValueError('no such file on this machine')\n"
        f"if os.environ['RANK'] == '1':\n    {module}.{name} = wrong\n"
        "sys.exit(train_grpo.main(sys.argv[1:]))\n"
    )
    arguments = small_run(random_model, tmp_path / "run")
    done = run_forked(program, arguments, ranks=2, timeout=120, env=environment_of_runs())
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.endswith("no such file on this machine")
    assert "[rank" not in done.stderr
