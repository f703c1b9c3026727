r"""Resident memory of the trainer by step, in bf16 and fp32, with one rank and with two: does it
grow?

    python benchmarks/memory.py --model DIR --data train.jsonl
    python benchmarks/memory.py --model DIR --data train.jsonl --settings "bf16:1" --steps 30 \
        optim.max_grad_norm=0.5

A run of configs/gsm8k_cpu.yaml with 4 problems of about 242 prompt tokens x 8 completions and beta
0.04; ``key=value`` changes it. RSS is read at the end of every update, on the rank that has most.
Two threads in all.
"""

import json
import os
import resource
import sys
import tempfile
from pathlib import Path

from common import ROOT, about, markdown, parser, train, write
from step_side import SYSTEM

FILES = "GRPO_MEMORY_FOLDER"
"""Environment variable of a process that trains: the folder where each rank writes its RSS."""


def worker() -> None:
    """One rank of the trainer, which writes its RSS in MiB after every update to a file of its
    rank."""
    import train_grpo

    path = Path(os.environ[FILES]) / os.environ.get("RANK", "0")
    apply_update = train_grpo.apply_update

    def measured(run, metrics) -> None:
        apply_update(run, metrics)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        with open(path, "a") as file:
            file.write(f"{pages * resource.getpagesize() / 2**20:.1f} {peak:.1f}\n")

    train_grpo.apply_update = measured
    sys.exit(train_grpo.main(sys.argv[1:]))


def measure(a, precision: str, ranks: int) -> dict:
    """RSS in MiB by step, and the peak of the whole run."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FILES] = folder
        train(
            Path(folder, "run"),
            f"--config={ROOT}/configs/gsm8k_cpu.yaml",
            f"model.name_or_path={a.model}",
            f"data.dataset={a.data}",
            "data.train_split=train",
            "data.eval_split=null",
            f"data.system_prompt={json.dumps(SYSTEM)}",
            "rollout.prompts_per_step=4",
            "algorithm.beta=0.04",
            f"optim.max_steps={a.steps}",
            "optim.tokens_per_microbatch=4096",
            "eval.before_training=false",
            f"runtime.precision={precision}",
            f"runtime.threads_per_rank={max(a.threads // ranks, 1)}",
            *a.changes,
            ranks=ranks,
            script=Path(__file__),
        )
        del os.environ[FILES]
        of_ranks = []
        for rank in range(ranks):
            lines = Path(folder, str(rank)).read_text().splitlines()
            of_ranks.append([float(word) for line in lines for word in line.split()])
    most = [max(values) for values in zip(*of_ranks, strict=True)]
    return {
        "precision": precision,
        "ranks": ranks,
        "rss_mib": most[::2],
        "peak_mib": most[-1],
    }


def table(results: list[dict]) -> str:
    """RSS of step 5 (of the last one in a shorter run) and of the last one."""
    columns = [
        "precision",
        "ranks",
        "steps",
        "RSS at step 1, MiB",
        "step 5",
        "last",
        "last / step 5",
        "peak",
    ]
    rows = []
    for one in results:
        rss = one["rss_mib"]
        early = rss[:5][-1]
        figures = [f"{x:.0f}" for x in (rss[0], early, rss[-1])]
        growth = f"{rss[-1] / early:.3f}"
        rows.append(
            [one["precision"], one["ranks"], len(rss), *figures, growth, f"{one['peak_mib']:.0f}"]
        )
    return markdown(columns, rows)


def main() -> None:
    p = parser(
        __doc__,
        model=None,
        data=None,
        settings="bf16:1 bf16:2 fp32:1 fp32:2",
        steps=100,
        threads=2,
        output=None,
    )
    p.add_argument("changes", nargs="*")
    a = p.parse_args()
    results = []
    for setting in a.settings.split():
        precision, ranks = setting.split(":")
        results.append(measure(a, precision, int(ranks)))
        print(setting, "RSS by step, MiB:", results[-1]["rss_mib"], flush=True)
    print(table(results))
    write(a.output, about(a, results=results), table(results))


if __name__ == "__main__":
    if FILES in os.environ:
        worker()
    else:
        main()
