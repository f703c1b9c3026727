"""Whatever a user gets wrong: one line that names the thing and what would work, exit code 2, no output folder."""

import json
import shutil
import subprocess
import sys
import time

import pytest
from conftest import ROOT, run_trainer, save_random_model

from train_grpo import main


def write(path, text) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def refused(capsys, tmp_path, *arguments: str) -> str:
    """The one line that the trainer says; checks all that holds for every refusal."""
    output = tmp_path / "output"
    code = main([f"output_dir={output}", "runtime.threads_per_rank=1", *arguments])
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.strip()]
    assert code == 2
    assert len(lines) == 1, error
    assert lines[0].startswith("error: ")
    assert not output.exists()
    return lines[0]


# arguments -> what the line must name: the thing, and what would work
CONFIG = {
    "unknown key": (["rollout.num_generation=4"], ["rollout.num_generation", "rollout.num_generations"]),
    "unknown section": (["rolout.temperature=1"], ["rolout", "rollout"]),
    "not key=value": (["temperature"], ["temperature", "section.key=value"]),
    "wrong type": (["rollout.num_generations=many"], ["rollout.num_generations", "many", "integer"]),
    "out of range": (["rollout.num_generations=0"], ["rollout.num_generations=0", "1"]),
    "negative": (["optim.max_steps=-3"], ["optim.max_steps=-3", "1"]),
    "nan": (["optim.learning_rate=.nan"], ["optim.learning_rate", "finite"]),
    "infinite": (["optim.learning_rate=.inf"], ["optim.learning_rate", "finite"]),
    "zero temperature": (["rollout.temperature=0"], ["rollout.temperature", "greater than 0"]),
    "top_p above 1": (["rollout.top_p=1.5"], ["rollout.top_p", "1"]),
    "unknown preset": (["algorithm.name=gpro"], ["gpro", "grpo", "dapo"]),
    "unknown choice": (["algorithm.scale=std"], ["algorithm.scale", "group", "batch", "none"]),
    "broken yaml value": (["data.few_shot=[{"], ["data.few_shot", "YAML"]),
    "no config file": (["--config", "nowhere.yaml"], ["nowhere.yaml", "does not exist"]),
    "one completion": (["rollout.num_generations=1"], ["num_generations=1", "baseline"]),
    "reinforce twice": (["algorithm.name=rloo", "algorithm.num_iterations=2"], ["reinforce", "one update"]),
    "delta too low": (["algorithm.delta=1.1"], ["algorithm.delta", "1.2"]),
    "minibatches": (["algorithm.num_minibatches=3"], ["prompts_per_step=8", "6 or 9"]),
    "samples at temperature 0": (["eval.num_samples=4"], ["eval.num_samples=4", "eval.temperature"]),
    "min_lr of a constant": (["optim.min_lr=1e-7"], ["optim.min_lr", "cosine"]),
    "few shot keys": (["data.few_shot=[{question: 1}]"], ["few_shot"]),
    "betas": (["optim.betas=[0.9, 1.0]"], ["optim.betas", "[0, 1)"]),
    "no CUDA": (["runtime.device=cuda"], ["runtime.device=cuda", "auto"]),
    "device": (["runtime.device=tpu"], ["runtime.device"]),
    "unknown reward": (["reward.functions=[acuracy]"], ["acuracy", "accuracy", "format"]),
    "reward arguments": (["reward.functions=[{name: accuracy, args: {value_: 2}}]"], ["accuracy", "value_"]),
    "no reward file": (["reward.functions=['nowhere.py:f']"], ["nowhere.py"]),
    "reward without function": (["reward.functions=['tests/rewards_for_tests.py:nothing']"], ["nothing", "constant"]),
    "reward module": (["reward.functions=['no_such_package:f']"], ["no_such_package"]),
    "no reward": (["reward.functions=[]"], ["reward.functions"]),
    "correctness": (["eval.correctness=nothing"], ["eval.correctness", "accuracy"]),
    "unknown task": (["data.dataset=builtin:chess"], ["chess", "arithmetic"]),
    "unknown builtin model": (["model.name_or_path=builtin:big"], ["builtin:big", "builtin:tiny"]),
    "no dataset file": (["data.dataset=./nowhere.jsonl"], ["./nowhere.jsonl", "does not exist"]),
    "no model folder": (["model.name_or_path=./nowhere"], ["./nowhere", "does not exist"]),
    "resume from nothing": (["checkpoint.resume=./nowhere"], ["./nowhere", "auto"]),
}


@pytest.mark.parametrize("case", CONFIG)
def test_configuration(capsys, tmp_path, case):
    arguments, named = CONFIG[case]
    if not any("model." in argument for argument in arguments):
        # Would fail later, and differently: these must be found before any model is looked at.
        arguments = [*arguments, f"model.name_or_path={tmp_path}"]
    if case in ("minibatches",):
        arguments = [*arguments, "rollout.prompts_per_step=8"]
    line = refused(capsys, tmp_path, *arguments)
    for word in named:
        assert word in line
    assert "model.name_or_path" not in line or "model." in arguments[0]


DATA = {
    "empty file": ("d.jsonl", "", [], ["d.jsonl", "empty"]),
    "blank lines": ("d.jsonl", "\n\n", [], ["d.jsonl"]),
    "broken line": ("d.jsonl", '{"prompt": "a"}\n{"prompt": \n', [], ["d.jsonl:2", "JSON"]),
    "not an object": ("d.jsonl", '{"prompt": "a"}\n[1, 2]\n', [], ["d.jsonl:2", "object"]),
    "invalid UTF-8": ("d.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff\xfe"}\n', [], ["d.jsonl"]),
    "NUL bytes": ("d.jsonl", b'{"prompt": "a"}\n\x00\x00\n', [], ["d.jsonl:2"]),
    "missing column": ("d.jsonl", '{"question": "a"}\n', [], ["prompt_column=prompt", "question"]),
    "missing answer": ("d.jsonl", '{"prompt": "a"}\n', ["data.answer_column=gold"], ["answer_column=gold", "prompt"]),
    "pattern": (
        "d.jsonl",
        '{"prompt": "a", "answer": "7"}\n',
        ["data.answer_column=answer", "data.answer_pattern='#### (.+)'"],
        ["#### (.+)", "matches nothing", "'7'"],
    ),
    "no pattern": ("d.jsonl", '{"prompt": "a"}\n', ["data.answer_pattern='('"], ["answer_pattern", "regular expression"]),
    "numbers": ("d.jsonl", '{"prompt": 3}\n', [], ["row 1", "prompt", "text"]),
    "null": ("d.jsonl", '{"prompt": "a"}\n{"prompt": null}\n', [], ["row 2", "prompt"]),
    "messages": ("d.jsonl", '{"prompt": [{"role": "user"}]}\n', [], ["row 1", "content"]),
    "split": ("d.jsonl", '{"prompt": "a"}\n', ["data.train_split=test"], ["d.jsonl", "test"]),
    "suffix": ("d.txt", "hello", [], ["d.txt", ".jsonl"]),
    "too few": ("d.jsonl", '{"prompt": "a", "answer": "1"}\n', ["rollout.prompts_per_step=4"], ["1 training", "=4"]),
    "too long": (
        "d.jsonl",
        json.dumps({"prompt": "long " * 30, "answer": "1"}) + "\n",
        ["data.max_prompt_length=20"],
        ["max_prompt_length=20", "longer"],
    ),
    "column of a reward": ("d.jsonl", '{"prompt": "a"}\n', ["reward.functions=[accuracy]"], ["accuracy", "answer"]),
}


@pytest.mark.parametrize("case", DATA)
def test_data(capsys, tmp_path, random_model, case):
    name, text, arguments, named = DATA[case]
    if "reward.functions=[accuracy]" not in arguments:
        arguments = [*arguments, "reward.functions=[format]"]
    path = write(tmp_path / name, text)
    line = refused(capsys, tmp_path, f"data.dataset={path}", f"model.name_or_path={random_model}", *arguments)
    for word in named:
        assert word in line


def test_a_line_of_a_megabyte_and_emoji_are_fine(tmp_path, random_model):
    rows = [{"prompt": "🙂 2+2=", "answer": "4"}, {"prompt": "x" * 1_000_000, "answer": "5"}]
    path = write(tmp_path / "d.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    done = run_trainer(
        f"output_dir={tmp_path}/run", f"data.dataset={path}", f"model.name_or_path={random_model}",
        "rollout.prompts_per_step=1", "rollout.num_generations=2", "rollout.max_completion_length=4",
        "optim.max_steps=1", "runtime.precision=fp32", "data.answer_column=answer",
    )  # fmt: skip
    assert "1 problems to train on, 1 left out as longer than 512 tokens" in done.stdout


MODELS = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "broken config": (lambda folder: write(folder / "config.json", "{"), ["cannot be loaded"]),
    "unknown architecture": (lambda folder: write(folder / "config.json", '{"model_type": "nonesuch"}'), ["nonesuch"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["cannot be loaded"]),
    "truncated weights": (
        lambda folder: write(folder / "model.safetensors", (folder / "model.safetensors").read_bytes()[:5000]),
        ["cannot be loaded"],
    ),
    "vocabulary": (lambda folder: shrink_embedding(folder), ["tokens", "embedding"]),
    "missing shard": (lambda folder: lose_a_shard(folder), ["cannot be loaded"]),
}


def shrink_embedding(folder) -> None:
    save_random_model(folder, vocab_size=100)
    from grpo.tasks.tiny import build_tokenizer

    build_tokenizer().save_pretrained(folder)


def lose_a_shard(folder) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()


@pytest.mark.parametrize("case", MODELS)
def test_model_folder(capsys, tmp_path, random_model, case):
    folder = tmp_path / "model"
    shutil.copytree(random_model, folder)
    spoil, named = MODELS[case]
    spoil(folder)
    line = refused(capsys, tmp_path, f"model.name_or_path={folder}", "data.max_train_samples=16")
    assert str(folder) in line
    for word in named:
        assert word in line


def test_a_file_or_an_empty_folder_is_no_model(capsys, tmp_path, random_model):
    file = write(tmp_path / "model.safetensors", "x")
    assert "folder" in refused(capsys, tmp_path, f"model.name_or_path={file}")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in refused(capsys, tmp_path, f"model.name_or_path={empty}")


def test_completions_beyond_the_context(capsys, tmp_path, random_model):
    line = refused(capsys, tmp_path, f"model.name_or_path={random_model}", "rollout.max_completion_length=250")
    assert "max_completion_length=250" in line
    assert "context of 256" in line
    assert "at most" in line


def test_yaml_with_a_mistake_names_the_line(capsys, tmp_path):
    path = write(tmp_path / "c.yaml", "rollout:\n  top_k: 3\n bad: [\n")
    assert "c.yaml:3" in refused(capsys, tmp_path, "--config", path)
    path = write(tmp_path / "list.yaml", "- 1\n- 2\n")
    assert "mapping" in refused(capsys, tmp_path, "--config", path)


def test_reward_file_with_a_syntax_error(capsys, tmp_path):
    path = write(tmp_path / "r.py", "x = 1\ndef f(:\n")
    line = refused(capsys, tmp_path, f"reward.functions=['{path}:f']")
    assert "r.py" in line
    assert "2" in line


def test_output_folder_that_is_something_else(capsys, tmp_path, random_model):
    for output, word in ((tmp_path / "file", "is a file"), (tmp_path / "folder", "not a run")):
        if output.name == "file":
            output.write_text("mine")
        else:
            output.mkdir()
            (output / "thesis.tex").write_text("mine")
        code = main([f"output_dir={output}", f"model.name_or_path={random_model}"])
        assert code == 2
        assert word in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "thesis.tex").read_text() == "mine"


def test_a_hub_name_without_a_hub_is_quick_and_clear(tmp_path):
    start = time.monotonic()
    done = run_trainer(
        f"output_dir={tmp_path}/run", "data.dataset=nobody/nothing", check=False, env={"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "nobody/nothing" in errors[0]
    assert "Traceback" not in done.stderr
    assert time.monotonic() - start < 60


def test_two_ranks_speak_once(tmp_path, random_model):
    done = run_trainer(
        f"output_dir={tmp_path}/run", f"model.name_or_path={random_model}", "rollout.prompts_per_step=7", ranks=2, check=False
    )
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    assert "prompts_per_step=7" in done.stderr
    assert "6 or 8" in done.stderr
    assert not (tmp_path / "run").exists()


def test_config_mistakes_do_not_wait_for_torch():
    """A typo costs no import of transformers."""
    code = "import sys; from grpo.config import load_config; load_config(['rollout.top_k=3']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
