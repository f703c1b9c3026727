"""Fixtures shared by the tests: small random models, runs of the trainer, assets beside the
checkout."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import emulated_cuda
import pytest
import torch
from processes import Forked

ROOT = Path(__file__).resolve().parent.parent
DEFAULTS = f"--config={os.devnull}"
"""Argument for a run with the defaults of the schema, where without ``--config`` it would be the
demo."""
torch.set_num_threads(1)
# A shell that starts the tests in the background, or nohup, lets them and their runs ignore these
# signals.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _process_as_it_was():
    """A run in this process may set the number of threads, wait for signals and start wandb's
    service, which the processes that later tests start would use; the next test must not notice."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    yield
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


@pytest.fixture(scope="session")
def random_model(tmp_path_factory) -> Path:
    """A Hugging Face folder with an untrained two-layer Qwen2 and the tiny tokenizer."""
    return save_random_model(tmp_path_factory.mktemp("model"))


def save_random_model(folder: Path, **changes) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from grpo.data.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    settings = dict(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        # Wide enough that the distribution is far from uniform: every token then depends on what
        # was read.
        initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Qwen2ForCausalLM(Qwen2Config(**settings | changes))
    with torch.no_grad():  # completions of many lengths: the EOS is now improbable, now likely
        model.lm_head.weight[tokenizer.eos_token_id] *= 2.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tags_special(folder: Path) -> None:
    """Make tags such as ``<think>`` special tokens, as they are in some published models."""
    file = folder / "tokenizer.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    for token in settings["added_tokens"]:
        if token["content"].startswith("<") and not token["content"].startswith("<|"):
            token["special"] = True
    file.write_text(json.dumps(settings), encoding="utf-8")


@pytest.fixture(params=["packed", "padded"])
def policy(random_model, request):
    """The random model, with each prompt once for its completions, and the general way."""
    return load(random_model, packed=request.param == "packed")


def load(folder: Path, packed: bool = False, **options):
    from grpo.algorithm.logprobs import CompletionScorer
    from grpo.model import load_policy, load_tokenizer
    from grpo.rollout import check_model

    options = {"precision": "fp32", "device": torch.device("cpu")} | options
    policy = load_policy(str(folder), load_tokenizer(str(folder)), **options)
    if packed:
        assert check_model(policy, CompletionScorer(policy.model)) is None
    return policy


@pytest.fixture(scope="session")
def assets() -> Path:
    """GSM8K and the 7M checkpoint: ``GRPO_TEST_ASSETS``, else ``../shared``; skipped where neither
    is there."""
    for place in (os.environ.get("GRPO_TEST_ASSETS"), ROOT.parent / "shared"):
        if place and (Path(place) / "models" / "gsm8k-7m" / "config.json").exists():
            return Path(place)
    pytest.skip(
        "needs GSM8K and gsm8k-7m: set GRPO_TEST_ASSETS to the folder that holds data/ and models/"
    )


@pytest.fixture(scope="session")
def gpu():
    """Runs scenarios on the emulated CUDA device (``tests/cuda/emulated_cuda``)."""
    if reason := emulated_cuda.why_impossible():
        pytest.skip(reason)
    return emulated_cuda


def environment_of_runs(env: dict | None = None) -> dict[str, str]:
    """One thread for each rank: two pytest workers, or two ranks, share two cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **(env or {})}


def run_trainer(
    *arguments: str,
    ranks: int = 1,
    timeout: float = 300,
    check: bool = True,
    env: dict | None = None,
    fresh: bool | None = None,
):
    """``train_grpo.py`` in a process of its own, or in ``ranks`` of them.

    With ``fresh`` a new interpreter (torchrun, if there are several ranks): for tests of the
    launch, and of what imports read or print. Otherwise forks (``processes.py``), which start 7 s
    earlier. None: fresh where there is ``env``, additional environment variables."""
    arguments = tuple(map(str, arguments))
    if (
        not any(argument.startswith("runtime.threads_per_rank") for argument in arguments)
        and "--help" not in arguments
    ):
        arguments = (*arguments, "runtime.threads_per_rank=1")
    if fresh if fresh is not None else env is not None:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [str(ROOT / "train_grpo.py"), *arguments]
        how = dict(
            capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=environment_of_runs(env)
        )
        done = subprocess.run(command, check=False, **how)
    else:
        done = run_forked(
            ROOT / "train_grpo.py",
            arguments,
            ranks=ranks,
            timeout=timeout,
            env=environment_of_runs(env),
        )
    if check and done.returncode:
        raise AssertionError(
            f"{' '.join(done.args)} exited {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return done


def run_forked(
    script: Path,
    arguments,
    *,
    ranks: int = 1,
    timeout: float,
    env: dict,
    stdin: str = "",
    folder: Path = ROOT,
) -> subprocess.CompletedProcess:
    """Like ``subprocess.run`` with captured output, in forks of a process that has imported the
    trainer."""
    with tempfile.TemporaryDirectory() as files:
        typed, out, err = (Path(files) / name for name in ("in", "out", "err"))
        typed.write_text(stdin)
        size = ranks if ranks > 1 else None
        started = Forked(
            script,
            arguments,
            ranks=size,
            env=env,
            stdin=typed,
            stdout=out,
            stderr=err,
            folder=folder,
        )
        try:
            code = started.wait(timeout)
        finally:
            started.kill()
        read = (path.read_text(errors="replace") for path in (out, err))
        return subprocess.CompletedProcess([str(script), *arguments], code, *read)


def small_run(model: Path, output: Path) -> list[str]:
    """Arguments of a run of seconds: an untrained model on built-in arithmetic; a length reward
    gives it a gradient."""
    return [
        DEFAULTS, f"output_dir={output}", f"model.name_or_path={model}", "data.dataset=builtin:arithmetic",
        "data.max_train_samples=64", "data.max_eval_samples=13",
        f"reward.functions=[{{name: '{ROOT}/tests/rewards_for_tests.py:share_of_digits'}}]",
        "rollout.prompts_per_step=6", "rollout.num_generations=4", "rollout.max_completion_length=12",
        "optim.learning_rate=1e-3", "optim.max_steps=5", "runtime.precision=fp32", "runtime.threads_per_rank=1",
    ]  # fmt: skip


@pytest.fixture
def new_memory_is_nan():
    """What ``torch.empty`` returns is NaN, so that reading it before it is written shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
