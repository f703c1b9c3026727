"""Kill runs at random until they are done, and compare what they leave with a run that nothing
happened to.

    python tests/faults/soak.py --kills 100

A run is hurt again and again, each time at a random moment (one in five while it starts or
resumes), then started by the same command, until it is done: ``kill -9`` of one rank, of all ranks,
or of torchrun alone; SIGTERM to one rank or to torchrun.

Then every metric of every step, the completions, and the SHA-256 of weights and optimizer must be
those of the uninterrupted run on as many ranks. The runs save every step, so a kill may cost the
step that was under way: more is counted as lost. Exit code 1 if anything differs or is lost."""

import argparse
import collections
import contextlib
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cuda"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conftest import save_random_model
from harness import Started, assert_same_run, run, tiny

STEPS = 60
HOW = {  # what is done -> how often in 15
    "kill one rank": 5,
    "kill all ranks": 3,
    "kill torchrun": 3,
    "SIGTERM to one rank": 2,
    "SIGTERM to torchrun": 2,
}


def arguments(model: Path, output: Path) -> list[str]:
    return tiny(
        model,
        output,
        "checkpoint.save_steps=1",
        "checkpoint.keep=4",
        "eval.every=20",
        "algorithm.ref_sync_steps=7",
        steps=STEPS,
    )


def steps_done(output: Path) -> int:
    """The last step with a complete line in ``metrics.jsonl``, whose last line may be cut."""
    path = output / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    steps = re.findall(r'"step": (\d+).*\n', text)
    return int(steps[-1]) if steps else 0


def wait_for_the_moment(started: Started, rng: random.Random) -> None:
    """While it starts, or after its first step and up to two seconds more."""
    if rng.random() < 0.2:
        while not started.ranks() and started.process.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 6))
        return
    deadline = time.monotonic() + 900
    while " reward " not in started.text() and started.process.poll() is None:
        assert time.monotonic() < deadline, started.text()[-2000:]
        time.sleep(0.05)
    time.sleep(rng.uniform(0, 2))


def hurt(started: Started, how: str, rng: random.Random) -> bool:
    """False if the run was over before."""
    ranks = list(started.ranks().values())
    if started.process.poll() is not None or not ranks:
        return False
    victims = ranks
    if how.endswith("one rank"):
        victims = [rng.choice(ranks)]
    elif how.endswith("torchrun"):
        victims = [started.process.pid]
    number = signal.SIGTERM if how.startswith("SIGTERM") else signal.SIGKILL
    is_hurt = False
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            is_hurt = True
    return is_hurt


def soak_one(
    output: Path,
    command: list[str],
    ranks: int,
    rng: random.Random,
    count: collections.Counter,
    most_kills: int,
) -> None:
    """Hurt one run until it is done, and count what happened."""
    least = 0
    while True:
        started = Started(output, command, ranks=ranks, torchrun=[])
        how = None
        if count["kills"] < most_kills:
            possible = [how for how in HOW if ranks > 1 or how.endswith("one rank")]
            (how,) = rng.choices(possible, [HOW[how] for how in possible])
            wait_for_the_moment(started, rng)
            if not hurt(started, how, rng):
                how = None
        code = started.end(timeout=900, patience=300)
        printed = started.text()
        resumed = re.search(r"^resuming .* at step (\d+)", printed, re.MULTILINE)
        if resumed and int(resumed[1]) < least:
            count["lost"] += 1
            print(
                f"LOST: resumed at {resumed[1]}, expected {least} or later ({output})",
                flush=True,
            )
        if code == 0 and not (how and "stopped" in printed):
            return
        if how is None:
            raise AssertionError(f"failed by itself with code {code}:\n{printed[-3000:]}")
        count["kills"] += 1
        count[how] += 1
        # The line of a step is written just before its checkpoint, so the step under way may be
        # lost.
        done = steps_done(output)
        least = max(done - 1, 0)
        print(f"{output.name} ({ranks} ranks) {how:20} at step {done:2}", flush=True)


def soak(folder: Path, rng: random.Random, *, kills: int, ranks: list[int]) -> collections.Counter:
    """Runs until so many kills are done or one run differs; what was counted."""
    model = save_random_model(folder / "model")
    count = collections.Counter()
    while count["kills"] < kills and not count["differences"]:
        n = ranks[count["runs"] % len(ranks)]
        straight = folder / f"straight-{n}"
        if not straight.exists():
            run(straight, arguments(model, straight), ranks=n, timeout=900, torchrun=[])
        output = folder / f"run-{count['runs']}"
        count["runs"] += 1
        try:
            soak_one(output, arguments(model, output), n, rng, count, kills)
            assert_same_run(straight, output, STEPS)
        except AssertionError as difference:
            count["differences"] += 1
            print(f"DIFFERENT: {output}: {str(difference)[:3000]}", flush=True)
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[2, 1, 3, 2],
        help="of one run after the other",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        count = soak(
            Path(folder),
            random.Random(options.seed),
            kills=options.kills,
            ranks=options.ranks,
        )
    for how in HOW:
        print(f"{how:22}{count[how]}")
    for name in ("kills", "runs", "lost", "differences"):
        print(f"{name:22}{count[name]}")
    print(f"seconds               {time.monotonic() - began:.0f}")
    return int(count["differences"] > 0 or count["lost"] > 0)


if __name__ == "__main__":
    sys.exit(main())
