"""Kill runs at random until they are done, and compare what they leave with a run that nothing happened to.

    python tests/faults/soak.py --minutes 2
    python tests/faults/soak.py --kills 100

A run is hurt again and again, each time at a random moment (one in five while it starts or resumes), then started by
the same command, until it is done:

- ``kill -9`` of one rank, of all ranks, or of torchrun alone;
- SIGTERM to one rank or to torchrun;
- after a kill, sometimes, the newest checkpoint is torn: cut short, one bit flipped, its manifest deleted, half of it.

Then every metric of every step, the completions, and the SHA-256 of weights and optimizer must be those of the
uninterrupted run on as many ranks. The runs save every step, so a kill may cost the step that was under way: more is
counted as lost. Exit code 1 if anything differs or is lost.
"""

import argparse
import collections
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cuda"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conftest import save_random_model
from harness import Started, assert_same_run, processes_of, run, tiny

STEPS = 60
HOW = {  # what is done -> how often in 15
    "kill one rank": 5, "kill all ranks": 3, "kill torchrun": 3, "SIGTERM to one rank": 2, "SIGTERM to torchrun": 2,
}  # fmt: skip


def arguments(model: Path, output: Path) -> list[str]:
    options = ["checkpoint.save_steps=1", "checkpoint.keep=4", "eval.every=20", "algorithm.ref_sync_steps=7"]
    return tiny(model, output, *options, steps=STEPS)


def steps_done(output: Path) -> int:
    """By ``metrics.jsonl``, whose last line may be cut."""
    try:
        text = (output / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return 0
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return max((json.loads(line)["step"] for line in whole), default=0)


def tear(folder: Path, rng: random.Random) -> str:
    """Damage a checkpoint in a way in which disks and people do."""
    how = rng.choice(["cut", "bit", "manifest", "half"])
    weights, states, manifest = folder / "model.safetensors", folder / "trainer" / "states", folder / "manifest.json"
    share = rng.choice(sorted(states.glob("*.distcp")))
    if how == "cut":
        path = rng.choice([weights, share, states / ".metadata", manifest])
        os.truncate(path, rng.randrange(path.stat().st_size))
    elif how == "bit":
        path = rng.choice([weights, share])
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif how == "manifest":
        manifest.unlink()
    else:
        share.unlink()
    return how


def hurt(started: Started, how: str, rng: random.Random) -> bool:
    """False if the run was over before."""
    ranks = started.ranks()
    if started.process.poll() is not None or not ranks:
        return False
    number = signal.SIGTERM if how.startswith("SIGTERM") else signal.SIGKILL
    one = [rng.choice(sorted(ranks.values()))]
    victims = {"one rank": one, "all ranks": list(ranks.values()), "torchrun": [started.process.pid]}
    for pid in victims[how.removeprefix("kill ").removeprefix("SIGTERM to ")]:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
    return True


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


def soak(folder: Path, rng: random.Random, *, seconds: float, kills: int, ranks: list[int]) -> dict[str, int]:
    """Until so much time has passed and so many kills are done; what was counted."""
    model = save_random_model(folder / "model")
    straight: dict[int, Path] = {}
    count: collections.Counter[str] = collections.Counter(kills=0, restarts=0, runs=0, torn=0, lost=0, differences=0)
    began = time.monotonic()
    while time.monotonic() - began < seconds or count["kills"] < kills:
        n = ranks[count["runs"] % len(ranks)]
        if n not in straight:
            straight[n] = folder / f"straight-{n}"
            run(straight[n], arguments(model, straight[n]), ranks=n, timeout=900, torchrun=[])
        output = folder / f"run-{count['runs']}"
        least, torn, code = 0, 0, None  # torn: checkpoints that no start has looked at since
        for attempt in range(200):
            started = Started(output, arguments(model, output), ranks=n, torchrun=[])
            enough = time.monotonic() - began >= seconds and count["kills"] >= kills
            possible = [how for how in HOW if n > 1 or how.endswith("one rank")]
            (how,) = rng.choices(possible, [HOW[how] for how in possible])
            happened = False
            if not enough:
                wait_for_the_moment(started, rng)
                happened = hurt(started, how, rng)
            code = started.end(timeout=900, patience=300)
            while processes_of(output):  # torchrun was killed, its ranks are leaving
                time.sleep(0.05)
            printed = started.text()
            if "resuming " in printed:
                at = int(printed.split(" at step ")[1].split()[0].rstrip(","))
                if at < least:
                    count["lost"] += 1
                    print(f"LOST: resumed at {at}, expected {least} or later ({output})", flush=True)
            if attempt:
                count["restarts"] += 1
            if code == 0 and not (happened and "stopped" in printed):
                break
            if not happened:
                print(f"FAILED by itself with code {code} ({output}):\n{printed[-3000:]}", flush=True)
                count["differences"] += 1
                break
            count["kills"] += 1
            count[how] += 1
            if "resuming " in printed:
                torn = 0
            damage = ""
            checkpoints = sorted(output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
            if len(checkpoints) > 1 and how.startswith("kill") and rng.random() < 0.25:
                damage = " torn: " + tear(checkpoints[-1], rng)
                torn += 1
                count["torn"] += 1
            # The line of a step is written just before its checkpoint: the step under way may be lost, and what we
            # tore.
            done = steps_done(output)
            least = max(done - 1 - torn, 0)
            print(f"run {count['runs']} ({n} ranks) {how:20} at step {done:2}{damage}", flush=True)
        count["runs"] += 1
        if code == 0:
            try:
                assert_same_run(straight[n], output, STEPS)
            except AssertionError as difference:
                count["differences"] += 1
                print(f"DIFFERENT: {output}: {str(difference)[:500]}", flush=True)
    count["seconds"] = round(time.monotonic() - began)
    return dict(count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 1, 3, 2], help="of one run after the other")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="kept; a temporary one otherwise")
    options = parser.parse_args()
    if not options.minutes and not options.kills:
        parser.error("say --minutes or --kills")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        count = soak(
            folder, random.Random(options.seed), seconds=60 * options.minutes, kills=options.kills, ranks=options.ranks
        )
    for how in HOW:
        print(f"{how:22}{count.pop(how, 0)}")
    print("  ".join(f"{name} {value}" for name, value in count.items()))
    return int(count["differences"] > 0 or count["lost"] > 0)


if __name__ == "__main__":
    sys.exit(main())
