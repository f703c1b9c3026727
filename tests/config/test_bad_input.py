"""Whatever a user gets wrong: one line that names the thing and what would work, exit code 2, no output folder."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import DEFAULTS, ROOT, environment_of_runs, run_forked, run_trainer, save_random_model, small_run

from train_grpo import main


def write(path, text) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def refused(capsys, tmp_path, *arguments: str) -> str:
    """The one line that the trainer says; checks all that holds for every refusal."""
    output = tmp_path / "output"
    quick = ["runtime.threads_per_rank=1", "rollout.max_completion_length=16"]
    code = main([DEFAULTS, f"output_dir={output}", *quick, *arguments])
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.strip()]
    assert code == 2
    assert len(lines) == 1, error
    assert lines[0].startswith("error: ")
    assert not output.exists()
    return lines[0]


# arguments -> what the line must name: the thing, and what would work (mistakes in the configuration alone: test_config.py)
CONFIG = {
    "unknown key": (["rollout.num_generation=4"], ["rollout.num_generation", "rollout.num_generations"]),
    "out of range": (["rollout.num_generations=0"], ["rollout.num_generations=0", "1"]),
    "sections that disagree": (["algorithm.num_minibatches=3"], ["prompts_per_step=8", "6 or 9"]),
    "shards without fsdp": (["runtime.shard_size=2"], ["runtime.shard_size=2", "runtime.parallel=fsdp"]),
    "offload without fsdp": (["runtime.offload=all"], ["runtime.offload=all", "runtime.parallel=fsdp"]),
    "reduction without fsdp": (["optim.reduce_each_microbatch=true"], ["reduce_each", "runtime.parallel=fsdp"]),
    "offload of one rank": (["runtime.parallel=fsdp", "runtime.offload=optimizer"], ["offload=optimizer", "2 ranks"]),
    "background save of shards": (
        ["runtime.parallel=fsdp", "checkpoint.background=true"],
        ["checkpoint.background=true", "background=false"],
    ),
    "no config file": (["--config", "nowhere.yaml"], ["nowhere.yaml", "does not exist"]),
    "pattern without column": (
        ["data.dataset={rows}", "data.answer_pattern='(.+)'"],
        ["answer_pattern", "answer_column"],
    ),
    "argument of the trainer": (["reward.functions=[{name: accuracy, args: {prompts: 1}}]"], ["accuracy", "prompts"]),
    "no CUDA": (["runtime.device=cuda"], ["runtime.device=cuda", "auto"]),
    "initialisation of adapters": (["lora.rank=8", "lora.init=pissa"], ["lora.init='pissa'", "true or gaussian"]),
    "dropout of adapters": (["lora.rank=8", "lora.dropout=0.1"], ["lora.dropout=0.1", "disable_dropout=false"]),
    "layers of adapters": (
        ["lora.rank=8", "lora.target_modules=[q_proj, 1]"],
        ["lora.target_modules=['q_proj', 1]", "[q_proj, v_proj]"],
    ),
    "MaxRL with a punishment": (
        [
            "algorithm.name=maxrl",
            "reward.functions=[accuracy, {name: soft_overlong, args: {max_length: 16, cache_length: 4}}]",
        ],
        ["algorithm.scale=mean", "soft_overlong", "algorithm.scale=group"],
    ),
    "two ranks of an adapter": (
        ["model.adapter=x", "lora.rank=8"],
        ["lora.rank and model.adapter=x contradict", "leave lora.rank out"],
    ),
    "merging without adapters": (["checkpoint.merge=true"], ["checkpoint.merge=true", "lora.rank"]),
    "average of adapters": (
        ["lora.rank=8", "algorithm.ref_sync_steps=2", "algorithm.ref_sync_alpha=0.5"],
        ["ref_sync_alpha=0.5", "ref_sync_alpha=1"],
    ),
    "reference without adapters that moves": (
        ["lora.rank=8", "algorithm.ref_sync_steps=2", "model.reference=x"],
        ["ref_sync_steps", "model.reference"],
    ),
    "no adapter": (["model.adapter=./nowhere"], ["model.adapter=./nowhere", "adapter_config.json"]),
    "unknown reward": (["reward.functions=[acuracy]"], ["acuracy", "accuracy", "format"]),
    "reward arguments": (["reward.functions=[{name: accuracy, args: {value_: 2}}]"], ["accuracy", "value_"]),
    "no reward file": (["reward.functions=['nowhere.py:f']"], ["nowhere.py"]),
    "reward without function": (["reward.functions=['tests/rewards_for_tests.py:nothing']"], ["nothing", "constant"]),
    "reward module": (["reward.functions=['no_such_package:f']"], ["no_such_package"]),
    "correctness": (["eval.correctness=nothing"], ["eval.correctness", "accuracy"]),
    "unknown task": (["data.dataset=builtin:chess"], ["chess", "arithmetic"]),
    "unknown builtin model": (["model.name_or_path=builtin:big"], ["builtin:big", "builtin:tiny"]),
    "no dataset file": (["data.dataset=./nowhere.jsonl"], ["./nowhere.jsonl", "does not exist"]),
    "no model folder": (["model.name_or_path=./nowhere"], ["./nowhere", "no such folder", "builtin:tiny"]),
    "resume from nothing": (
        ["checkpoint.resume=./nowhere"],
        ["checkpoint.resume=", "/nowhere: manifest.json cannot be read", "auto"],
    ),
}


@pytest.fixture
def no_model(tmp_path) -> str:
    """Looking at the model would fail, and say something else: what is refused under it is refused before."""
    return f"model.name_or_path={tmp_path}/no-model"


def test_lora_without_peft(capsys, tmp_path, no_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    line = refused(capsys, tmp_path, no_model, "lora.rank=8")
    assert "LoRA needs the package peft" in line and "pip install -e '.[lora]'" in line


@pytest.mark.parametrize("case", CONFIG)
def test_configuration(capsys, tmp_path, no_model, case):
    arguments, named = CONFIG[case]
    rows = write(tmp_path / "rows.jsonl", '{"prompt": "a", "answer": "1"}\n' * 9)
    arguments = [argument.replace("{rows}", rows) for argument in arguments]
    line = refused(capsys, tmp_path, no_model, *arguments)
    for word in named:
        assert word in line
    assert "no-model" not in line


DATA = {
    "invalid UTF-8 in CSV": ("d.csv", b"prompt,answer\na,1\n\xff\xfe,2\n", [], ["d.csv:3", "UTF-8"]),
    "header alone": ("d.csv", "prompt,answer\n", [], ["d.csv", "no rows"]),
    "duplicate columns": ("d.csv", "prompt,answer,answer\na,1,2\n", [], ["d.csv", "'answer'", "more than once"]),
    "longer than the header": ("d.csv", "prompt,answer\na,1\nb,2,3\n", [], ["d.csv:3", "3 fields", "header has 2"]),
    "key given twice": ("d.jsonl", '{"prompt": "a", "prompt": "b"}\n', [], ["d.jsonl", "prompt", "twice"]),
    "one document, broken": ("d.json", '[{"prompt": "a"},\n{"prompt": }]\n', [], ["d.json:2", "JSON"]),
    "numbers in a list": ("d.json", "[1, 2]", [], ["d.json", "prompt_column=prompt"]),
    "no parquet": ("d.parquet", "not parquet", [], ["d.parquet", "Parquet"]),
    "no message": ("d.jsonl", '{"prompt": []}\n', [], ["row 1", "{role, content}"]),
    "message without text": (
        "d.jsonl",
        '{"prompt": [{"role": "user", "content": null}]}\n',
        [],
        ["row 1", "{role, content}", "None"],
    ),
    "ends with an answer": (
        "d.jsonl",
        '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
        [],
        ["row 1", "'assistant'", "the user's"],
    ),
    "two kinds of prompt": ("d.jsonl", '{"prompt": "a"}\n{"prompt": [1]}\n', [], ["row 2", "prompt", "text"]),
    "empty answers": (
        "d.jsonl",
        '{"prompt": "a", "answer": null}\n',
        ["data.answer_column=answer"],
        ["answer_column=answer", "empty", "d.jsonl"],
    ),
    "no such slice": ("d.jsonl", '{"prompt": "a"}\n', ["data.train_split=train[:x]"], ["d.jsonl", "train[:x]"]),
    "empty slice": (
        "d.jsonl",
        '{"prompt": "a"}\n',
        ["data.train_split=train[:0]"],
        ["d.jsonl", "no rows", "train[:0]"],
    ),
    "no evaluation split": ("d.jsonl", '{"prompt": "a"}\n', ["data.eval_split=test"], ["d.jsonl", "test", "train"]),
    "no evaluation file": (
        "d.jsonl",
        '{"prompt": "a"}\n',
        ["data.eval_dataset=./d.jsnl.jsonl"],
        ["data.eval_dataset=./d.jsnl.jsonl", "does not exist"],
    ),
    "empty file": ("d.jsonl", "", [], ["d.jsonl", "empty"]),
    "blank lines": ("d.jsonl", "\n\n", [], ["d.jsonl", "no rows"]),
    "broken line": ("d.jsonl", '{"prompt": "a"}\n{"prompt": \n', [], ["d.jsonl:2", "JSON"]),
    "not an object": ("d.jsonl", '{"prompt": "a"}\n[1, 2]\n', [], ["d.jsonl:2", "object"]),
    "invalid UTF-8": ("d.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff\xfe"}\n', [], ["d.jsonl:2", "UTF-8"]),
    "nested deep": (
        "d.jsonl",
        '{"prompt": "a"}\n{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
        [],
        ["d.jsonl:2: nested too deep"],
    ),
    "nested deep in a document": ("d.json", "[" * 100_000 + "]" * 100_000, [], ["d.json: nested too deep"]),
    "half a character": ("d.jsonl", '{"prompt": "\\ud83d"}\n', [], ["d.jsonl:1", "surrogates not allowed"]),
    "NUL bytes": ("d.jsonl", b'{"prompt": "a"}\n\x00\x00\n', [], ["d.jsonl:2"]),
    "missing column": ("d.jsonl", '{"question": "a"}\n', [], ["prompt_column=prompt", "question"]),
    "missing answer": ("d.jsonl", '{"prompt": "a"}\n', ["data.answer_column=gold"], ["answer_column=gold", "prompt"]),
    "pattern": (
        "d.jsonl",
        '{"prompt": "a", "answer": "7"}\n',
        ["data.answer_column=answer", "data.answer_pattern='#### (.+)'"],
        ["#### (.+)", "matches nothing", "'7'"],
    ),
    "no pattern": (
        "d.jsonl",
        '{"prompt": "a"}\n',
        ["data.answer_pattern='('"],
        ["answer_pattern", "regular expression"],
    ),
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
    "tests of code": (
        "d.jsonl",
        '{"prompt": "a", "tests": ["assert f()"]}\n{"prompt": "b", "tests": "42"}\n',
        ["reward.functions=[{name: python_tests, args: {allow_unsandboxed: true}}]"],
        ["d.jsonl, row 2, column tests: '42' is no test that can be read; a row has a list of tests"],
    ),
    "column of a reward": ("d.jsonl", '{"prompt": "a"}\n', ["reward.functions=[accuracy]"], ["accuracy", "answer"]),
}


NEEDS_THE_TOKENIZER = ("too few", "too long")


@pytest.mark.parametrize("case", DATA)
def test_data(capsys, tmp_path, random_model, no_model, case):
    name, text, arguments, named = DATA[case]
    if "reward.functions=[accuracy]" not in arguments:
        arguments = ["reward.functions=[format]", *arguments]
    path = write(tmp_path / name, text)
    model = f"model.name_or_path={random_model}" if case in NEEDS_THE_TOKENIZER else no_model
    line = refused(capsys, tmp_path, f"data.dataset={path}", model, "rollout.prompts_per_step=1", *arguments)
    for word in named:
        assert word in line
    assert "no-model" not in line


def test_a_home_folder_that_cannot_be_written(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", os.devnull)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    line = refused(capsys, tmp_path, "model.name_or_path=builtin:tiny")
    assert "/dev/null/.cache/grpo" in line and "set XDG_CACHE_HOME to a writable folder" in line


def test_a_missing_file_names_what_is_there(capsys, tmp_path, no_model):
    write(tmp_path / "train.jsonl", "{}")
    assert "has train.jsonl" in refused(capsys, tmp_path, no_model, f"data.dataset={tmp_path}/trian.jsonl")
    line = refused(capsys, tmp_path, no_model, f"data.dataset={tmp_path}/*.jsonl")
    assert f"is a pattern, and a dataset is one file or folder; the pattern matches {tmp_path}/train.jsonl" in line
    assert f"no folder {tmp_path}/away" in refused(capsys, tmp_path, no_model, f"data.dataset={tmp_path}/away/a.jsonl")


def test_a_folder_that_is_no_dataset(capsys, tmp_path, random_model, no_model):
    line = refused(capsys, tmp_path, no_model, f"data.dataset={random_model}")
    assert str(random_model) in line
    assert "a folder saved by datasets" in line


def test_a_line_of_a_megabyte_and_emoji_are_fine(capsys, tmp_path, random_model):
    rows = [{"prompt": "🙂 2+2=", "answer": "4"}, {"prompt": "x" * 1_000_000, "answer": "5"}]
    path = write(tmp_path / "d.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert main([
        DEFAULTS, f"output_dir={tmp_path}/run", f"data.dataset={path}", f"model.name_or_path={random_model}",
        "rollout.prompts_per_step=1", "rollout.num_generations=2", "rollout.max_completion_length=4", "optim.max_steps=1",
        "runtime.precision=fp32", "runtime.threads_per_rank=1", "runtime.device=cpu", "data.answer_column=answer",
    ]) == 0  # fmt: skip
    assert "1 problems to train on, 1 left out as longer than 512 tokens" in capsys.readouterr().out


MODELS = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "broken config": (lambda folder: write(folder / "config.json", "{"), ["cannot be loaded"]),
    "unknown architecture": (lambda folder: write(folder / "config.json", '{"model_type": "nonesuch"}'), ["nonesuch"]),
    "config is a list": (lambda folder: write(folder / "config.json", "[]"), ["model_type"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["cannot be loaded"]),
    "truncated weights": (
        lambda folder: write(folder / "model.safetensors", (folder / "model.safetensors").read_bytes()[:5000]),
        ["cannot be loaded"],
    ),
    "garbage weights": (lambda folder: write(folder / "model.safetensors", "garbage"), ["cannot be loaded"]),
    "empty weights": (lambda folder: write(folder / "model.safetensors", ""), ["cannot be loaded"]),
    "weights missing": (lambda folder: lose_a_weight(folder), ["model.norm.weight is missing"]),
    "weights of another shape": (
        lambda folder: change_config(folder, intermediate_size=48),
        ["down_proj.weight is [32, 64], not [32, 48]"],
    ),
    "no language model": (lambda folder: change_config(folder, model_type="t5"), ["cannot be loaded", "T5Config"]),
    "no tokenizer": (lambda folder: remove_tokenizer(folder), ["no tokenizer", "tokenizer.json"]),
    "broken tokenizer": (lambda folder: write(folder / "tokenizer.json", "{"), ["no tokenizer that loads"]),
    "no EOS": (lambda folder: save_without(folder, eos_token=None), ["EOS", "no completion can end"]),
    "vocabulary": (lambda folder: shrink_embedding(folder), ["tokens", "embedding"]),
    "weights not finite": (
        lambda folder: change_a_weight(folder, float("nan")),
        ["NaN or infinity: model.norm.weight"],
    ),
    "missing shard": (lambda folder: lose_a_shard(folder), ["cannot be loaded"]),
}


def change_config(folder, **values) -> None:
    settings = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", json.dumps(settings | values))


def change_a_weight(folder, value) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def lose_a_weight(folder) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def remove_tokenizer(folder) -> None:
    for path in folder.iterdir():
        if "token" in path.name or "template" in path.name:
            path.unlink()


def save_without(folder, **special_tokens) -> None:
    """A model whose tokenizer has only the special tokens given here (Qwen2's class would put its own in their place)."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from grpo.data.tiny import build_tokenizer

    shutil.rmtree(folder, ignore_errors=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=build_tokenizer().backend_tokenizer, **special_tokens)
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=None, bos_token_id=None, pad_token_id=None, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def shrink_embedding(folder) -> None:
    save_random_model(folder, vocab_size=100)
    from grpo.data.tiny import build_tokenizer

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


def test_a_tokenizer_without_pad_is_fine(tmp_path, capsys):
    save_without(tmp_path / "model", eos_token="<|im_end|>")
    assert main([
        DEFAULTS, f"output_dir={tmp_path}/run", f"model.name_or_path={tmp_path}/model", "data.max_train_samples=2",
        "data.max_eval_samples=2", "rollout.prompts_per_step=2", "rollout.num_generations=2", "optim.max_steps=1",
        "rollout.max_completion_length=3", "runtime.precision=fp32", "runtime.threads_per_rank=1", "runtime.device=cpu",
    ]) == 0  # fmt: skip
    assert (tmp_path / "run" / "checkpoint-1" / "config.json").exists()


@pytest.mark.parametrize(
    ("template", "said"),
    [("{% for x in %}", "Expected an expression"), ("{{ raise_exception('users only') }}", "users only")],
)
def test_a_chat_template_that_does_not_work(capsys, tmp_path, random_model, template, said):
    folder = tmp_path / "model"
    shutil.copytree(random_model, folder)
    write(folder / "chat_template.jinja", template)
    line = refused(capsys, tmp_path, f"model.name_or_path={folder}", "data.max_train_samples=8")
    assert "chat template" in line
    assert "row 1" in line
    assert said in line


def test_a_file_or_an_empty_folder_is_no_model(capsys, tmp_path, random_model):
    file = write(tmp_path / "model.safetensors", "x")
    assert "folder" in refused(capsys, tmp_path, f"model.name_or_path={file}")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in refused(capsys, tmp_path, f"model.name_or_path={empty}")


def test_a_model_that_cannot_be_sampled(capsys, tmp_path, random_model):
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    folder = tmp_path / "model"
    shutil.copytree(random_model, folder)
    (folder / "config.json").unlink()
    sizes = dict(vocab_size=300, hidden_size=32, lru_width=32, intermediate_size=64, num_attention_heads=4, head_dim=8)
    config = RecurrentGemmaConfig(**sizes, num_hidden_layers=2, block_types=["recurrent", "attention"], eos_token_id=2)
    RecurrentGemmaForCausalLM(config).save_pretrained(folder)
    line = refused(capsys, tmp_path, f"model.name_or_path={folder}", "data.max_train_samples=16")
    assert "RecurrentGemmaForCausalLM cannot be sampled" in line and "take another architecture" in line


def test_a_stop_string_that_holds_a_special_token(capsys, tmp_path, random_model):
    line = refused(capsys, tmp_path, f"model.name_or_path={random_model}", "rollout.stop=['<|im_end|>x']")
    assert "rollout.stop" in line and "give '<|im_end|>' alone" in line


@pytest.mark.parametrize("section", ["rollout", "eval"])
def test_completions_beyond_the_context(capsys, tmp_path, random_model, section):
    lengths = ["rollout.max_completion_length=12", f"{section}.max_completion_length=250"]
    line = refused(capsys, tmp_path, f"model.name_or_path={random_model}", *lengths)
    assert f"{section}.max_completion_length=250" in line
    assert "context of 256" in line
    assert "at most" in line


def test_reward_file_with_a_syntax_error(capsys, tmp_path):
    path = write(tmp_path / "r.py", "x = 1\ndef f(:\n")
    line = refused(capsys, tmp_path, f"reward.functions=['{path}:f']")
    assert "r.py" in line
    assert "2" in line


def test_output_folder_that_is_something_else(capsys, tmp_path, random_model):
    for output, word in ((tmp_path / "file", "is no folder"), (tmp_path / "folder", "not a run")):
        if output.name == "file":
            output.write_text("mine")
        else:
            output.mkdir()
            (output / "thesis.tex").write_text("mine")
        code = main([DEFAULTS, f"output_dir={output}", f"model.name_or_path={random_model}"])
        assert code == 2
        assert word in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "thesis.tex").read_text() == "mine"


def test_output_folder_that_cannot_be_made(capsys, tmp_path, no_model):
    write(tmp_path / "file", "mine")
    assert main([DEFAULTS, f"output_dir={tmp_path}/file/runs/one", no_model]) == 2
    line = capsys.readouterr().err
    assert line == f"error: output_dir={tmp_path}/file/runs/one: {tmp_path}/file is no folder, or cannot be written\n"
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "manifest", [None, "{", '{"step": 1}', '{"files": {"model.safetensors": {"bytes": 3, "sha256": "0"}}}']
)
def test_a_broken_checkpoint_named_explicitly(capsys, tmp_path, no_model, manifest):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    write(folder / "model.safetensors", "abcd")
    if manifest is not None:
        write(folder / "manifest.json", manifest)
    line = refused(capsys, tmp_path, no_model, f"checkpoint.resume={folder}")
    assert line.startswith(f"error: checkpoint.resume={folder}: ")
    assert "model.safetensors is not what was saved" in line or "manifest.json cannot be read" in line
    assert "use auto, never, or a whole checkpoint folder" in line


def refused_by_new_interpreter(tmp_path, cases: list[tuple[str, list[str]]], env: dict[str, str]) -> None:
    """Each argument is refused within 60 s, with exit code 2 and one line that has the words; nothing else is on stderr.

    For what libraries read from the environment when they are imported, and for what they log where pytest does not catch it. The
    cases run one after the other in one process, because the imports take seconds.
    """
    output = tmp_path / "run"
    program = (
        "import json, sys, time, train_grpo\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    start = time.monotonic()\n"
        "    code = train_grpo.main(argv)\n"
        "    print(code, time.monotonic() - start, file=sys.stderr, flush=True)\n"
    )
    common = [DEFAULTS, f"output_dir={output}", "runtime.threads_per_rank=1", "rollout.max_completion_length=16"]
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps([[*common, argument] for argument, _ in cases])],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    assert len(lines) == 2 * len(cases), done.stderr
    for (_, words), line, ending in zip(cases, lines[::2], lines[1::2], strict=True):
        assert line.startswith("error: ")
        for word in words:
            assert word in line
        code, seconds = ending.split()
        assert code == "2"
        assert float(seconds) < 60
    assert not output.exists()


@pytest.mark.slow
def test_a_hub_that_does_not_answer_and_libraries_that_log(tmp_path, random_model):
    """Nothing listens on port 9 of this machine; the Hub's own client would try for 23 seconds."""
    folder = tmp_path / "model"
    shutil.copytree(random_model, folder)
    change_config(folder, intermediate_size=48)
    path = write(tmp_path / "d.jsonl", '{"prompt": "a"}\n{"prompt": \n')
    away = "the Hub cannot be reached, and its cache has no copy of that name"
    cases = [
        ("data.dataset=nobody/nothing", ["data.dataset=nobody/nothing is no ", away]),
        ("model.name_or_path=nobody/nothing", ["model.name_or_path=nobody/nothing cannot be loaded"]),
        (f"data.dataset={path}", ["d.jsonl:2: not valid JSON"]),
        (f"model.name_or_path={folder}", ["config.json asks for other weights"]),
    ]
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "cache"), "no_proxy": "*", "NO_PROXY": "*"}
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    env |= {name: "" for proxy in proxies for name in (proxy, proxy.upper())}
    refused_by_new_interpreter(tmp_path, cases, env)


@pytest.mark.slow
def test_a_hub_name_without_a_hub(tmp_path):
    refused_by_new_interpreter(tmp_path, [("data.dataset=nobody/nothing", ["nobody/nothing"])], {"HF_HUB_OFFLINE": "1"})


@pytest.mark.slow  # the next one, without the launcher's exit code
def test_two_ranks_speak_once(tmp_path, random_model):
    done = run_trainer(
        f"output_dir={tmp_path}/run",
        f"model.name_or_path={random_model}",
        "rollout.prompts_per_step=7",
        ranks=2,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    assert "prompts_per_step=7" in done.stderr
    assert "6 or 8" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_ranks_speak_once_also_when_one_alone_has_looked(tmp_path):
    """The main rank looks at the output folder for all: the others learn of its refusal, and keep quiet."""
    (tmp_path / "run").mkdir()
    write(tmp_path / "run" / "thesis.tex", "mine")
    done = run_trainer(f"output_dir={tmp_path}/run", ranks=2, check=False, fresh=True)
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    assert "thesis.tex" in done.stderr
    assert "[rank" not in done.stderr  # no traceback of a rank; torchrun's own has no such prefix
    assert "exitcode  : 2" in done.stderr
    assert "exitcode  : -6" not in done.stderr  # nor an abort on the way out
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "where",
    [
        "train_grpo.load_config",
        pytest.param("grpo.run.prepare.resolve_model", marks=pytest.mark.slow),
        "grpo.run.models.load_policy",
    ],
)
def test_what_is_wrong_on_the_second_rank_alone_is_said(tmp_path, random_model, where):
    """A file that one machine lacks: before the ranks are connected, while one rank goes first, while all ranks work."""
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
