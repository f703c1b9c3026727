"""``train_grpo.py`` with a fault: the same program, in which one rank does one thing at one place,
for real.

GRPO_FAULT="rank=1 step=2 place=rollout do=kill once=/some/file" python faulty.py ARGUMENTS OF
train_grpo.py

| place | is reached |
|---|---|
| rollout, score, eval | before the completions of a step are sampled / are scored / an evaluation
samples |
| forward, backward | in the update: after the first forward / when the gradient reaches the
embedding |
| write | before anything of a checkpoint is on disk |
| states | before a rank writes the optimizer's tensors of a checkpoint (under FSDP each rank its
share) |
| save | when the files of a checkpoint are written and their folder has not its name yet |
| line | before a step's line goes to metrics.jsonl |

``do``: kill (SIGKILL), hang, sleep:SECONDS, oom (asks for a pebibyte), nan, full (as on a full
disk, the next write to the file in question is refused: RLIMIT_FSIZE). With ``once`` it is done by
the first that finds no such file. GRPO_TRACE=FOLDER: every rank writes the token ids of every step
there."""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import grpo.checkpoint.format
import grpo.run.rollouts
import grpo.system
import grpo.telemetry.reporter
import train_grpo
from grpo.rollout import BuiltinEngine

FAULT = dict(item.split("=", 1) for item in os.environ.get("GRPO_FAULT", "").split())
TRACE = os.environ.get("GRPO_TRACE")
RANK = int(os.environ.get("RANK", "0"))
now = {"step": 0}
"""The step under way (0-based)."""


def due(place: str) -> bool:
    if FAULT.get("place") != place or int(FAULT.get("rank", RANK)) != RANK:
        return False
    if now["step"] < int(FAULT.get("step", 0)):
        return False
    if "once" in FAULT:
        try:
            os.close(os.open(FAULT["once"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
    return True


def do() -> None:
    what, _, seconds = FAULT["do"].partition(":")
    print(f"FAULT {FAULT['do']} at {FAULT['place']} of step {now['step']}", flush=True)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what in ("hang", "sleep"):
        until = time.monotonic() + float(seconds or 1e6)
        while time.monotonic() < until:
            time.sleep(0.05)
    elif what == "oom":
        torch.empty(1 << 50, dtype=torch.uint8)
    elif what == "full":
        size = 60_000  # of a file of the checkpoint
        if FAULT["place"] == "line":
            output = next(
                word.removeprefix("output_dir=")
                for word in sys.argv
                if word.startswith("output_dir=")
            )
            size = Path(output, "metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def before(module, name: str, place: str):
    original = getattr(module, name)

    def wrapped(*args, **kwargs):
        if due(place):
            do()
        return original(*args, **kwargs)

    setattr(module, name, wrapped)


original_generate = BuiltinEngine.generate


def generate(self, *args, seed_key, **kwargs):
    _, purpose, step = seed_key
    if purpose == "rollout":
        now["step"] = step
    if due("rollout" if purpose == "rollout" else "eval"):
        do()
    return original_generate(self, *args, seed_key=seed_key, **kwargs)


BuiltinEngine.generate = generate
before(grpo.run.rollouts, "score_groups", "score")

before(grpo.checkpoint.format, "save_weights", "write")
before(grpo.checkpoint.format, "save_tensors", "states")
original_sync = grpo.system.sync


def sync(path):
    if (
        path.name in ("model.safetensors", "adapter_model.safetensors")
        and ".partial" in str(path)
        and due("save")
    ):
        do()
    original_sync(path)


original_step = grpo.telemetry.reporter.Reporter.step


def step(self, metrics, **options):
    if self.is_main and metrics["step"] == now["step"] + 1 and due("line"):
        do()
        try:
            original_step(self, metrics, **options)
        finally:
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
    else:
        original_step(self, metrics, **options)


grpo.telemetry.reporter.Reporter.step = step


grpo.system.sync = sync
original_train = train_grpo.train


def train(run):
    def hook(gradient):
        if due("backward"):
            if FAULT["do"] == "nan":
                return gradient * float("nan")
            do()
        return gradient

    if FAULT.get("place") == "backward":
        run.learner.policy.model.get_input_embeddings().weight.register_hook(hook)
    return original_train(run)


train_grpo.train = train
original_loss = train_grpo.policy_loss


def policy_loss(*args, **kwargs):
    if due("forward"):
        do()
    return original_loss(*args, **kwargs)


train_grpo.policy_loss = policy_loss
original_sample = train_grpo.sample_and_score


def sample_and_score(run, step, problems):
    rollout = original_sample(run, step, problems)
    if TRACE:
        Path(TRACE).mkdir(exist_ok=True)
        ids = {group.problem.index: [c.ids for c in group.completions] for group in rollout.groups}
        text = json.dumps(sorted(ids.items()))
        Path(TRACE, f"step-{step.number}-rank-{RANK}.json").write_text(text)
    return rollout


train_grpo.sample_and_score = sample_and_score


if __name__ == "__main__":
    sys.exit(train_grpo.main(sys.argv[1:]))
