"""The pictures of the README: what the demo learns, and a step's time beside TRL's; what a real
model learns by minute, beside TRL.

    ./launch.sh
    python benchmarks/readme_figure.py --run runs/tiny_arithmetic
    python benchmarks/readme_figure.py --learning runs/learning_vs_trl/smollm2_135m.json

Left: the reward and the accuracy of the sampled completions at each step, from ``metrics.jsonl`` of
the run. Right: seconds per 1,000 completion tokens of SmolLM2-135M-Instruct, medians from
``benchmarks/results/compare_trl_135m_64_kl.json`` and ``..._256_kl.json``. Writes
``docs/figures/demo_and_speed_light.svg`` and ``..._dark.svg``: the README shows the one that fits
the reader's colour scheme.

With ``--learning``, a file of ``learning_vs_trl.py``: held-out accuracy (``--metric``) by minutes
of training, a thin line per seed and a thick one through their means. Writes
``docs/figures/real_model_light.svg`` and ``..._dark.svg``. Needs matplotlib
(``pip install -e ".[plots]"``)."""

import json
from pathlib import Path

import matplotlib
import numpy
from common import RESULTS, ROOT, parser, read_runs

matplotlib.use("Agg")
from matplotlib import pyplot

SMOOTHING = 5  # steps in the moving average

# GitHub's text colours in both schemes; the other colours have enough contrast on both backgrounds.
SCHEMES = {"light": "#1f2328", "dark": "#f0f6fc"}
OURS = "#2f81f7"
TRL = "#8b949e"
REWARD = "#db6d28"


def draw_learning(axes, run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    for name, label, color in (
        ("reward", "reward: accuracy + 0.5 format", REWARD),
        ("rewards/accuracy/mean", "accuracy", OURS),
    ):
        values = [line[name] for line in steps]
        means = numpy.convolve(values, numpy.full(SMOOTHING, 1 / SMOOTHING), "valid")
        middle = numpy.arange(len(means)) + (1 + SMOOTHING) / 2
        axes.plot(
            range(1, len(values) + 1),
            values,
            color=color,
            linewidth=0.7,
            alpha=0.35,
        )
        axes.plot(middle, means, color=color, linewidth=2, label=label)
    axes.set(
        xlabel="step",
        xlim=(0, len(steps)),
        ylim=(0, 1.6),
    )
    first = lines[0]["eval/mean@8"]
    last = lines[-1]["eval/mean@8"]
    axes.set_title(f"./launch.sh: held-out accuracy {first:.1%} to {last:.1%}", loc="left")
    axes.legend(loc="lower right", frameon=False)


def draw_speed(axes, text: str) -> None:
    """Two bars per length at the paper's beta, each sampling plus the rest of the step."""
    labels = {}
    for number, length in enumerate((64, 256)):
        results = json.loads((RESULTS / f"compare_trl_135m_{length}_kl.json").read_text())
        (entry,) = results["results"]
        step = entry["summary"]["step"]
        sampling = entry["summary"]["sampling"]
        # TRL's bar is of the setting that is fastest in the whole step.
        bars = (
            (
                "this trainer",
                OURS,
                sampling["ours"],
                step["ours"],
                f"  ({step['ratio']:.2f} times as fast)",
            ),
            (
                "TRL 1.16.0",
                TRL,
                sampling["of_trl"][step["best"]],
                step["trl"],
                "",
            ),
        )
        for offset, (side, color, sampled, whole, note) in enumerate(bars):
            y = number * 2.6 + offset
            labels[y] = f"{side}, {length} tokens"
            axes.barh(y, whole, color=color, height=0.8, alpha=0.55)
            axes.barh(y, sampled, color=color, height=0.8)
            axes.text(whole + 0.5, y, f"{whole:.1f} s{note}", va="center", color=text)
    axes.set_yticks(list(labels), labels.values())
    axes.invert_yaxis()
    axes.set(
        xlabel="seconds per 1,000 completion tokens (solid: sampling, pale: the rest)",
        xlim=(0, 46),
    )
    axes.set_title("SmolLM2-135M: a step in fp32 beside TRL, two CPU cores", loc="left")


def draw_by_minute(axes, runs: list[dict], metric: str) -> None:
    """A line per side; the settings of a side of TRL are left out of its label."""
    colors = {"ours": OURS, "trl": TRL}
    sides = sorted({entry["side"] for entry in runs})
    for side in sides:
        trainer, _, settings = side.partition(" ")
        label = "TRL 1.16.0" if trainer == "trl" else f"this trainer {settings}".strip()
        # A second side of ours, such as LoRA, is dashed.
        style = {
            "color": colors[trainer],
            "linestyle": "--" if trainer == "ours" and settings else "-",
        }
        points_of_runs = [entry["points"] for entry in runs if entry["side"] == side]
        minutes = []
        values = []
        # The mean is over the seeds, so it stands at the steps that all seeds were evaluated after.
        common = set.intersection(*({p["step"] for p in points} for points in points_of_runs))
        for points in points_of_runs:
            points = [point for point in points if point["step"] in common]
            minutes.append([point["seconds"] / 60 for point in points])
            values.append([100 * point[metric] for point in points])
            axes.plot(minutes[-1], values[-1], linewidth=0.7, alpha=0.35, **style)
        axes.plot(
            numpy.mean(minutes, axis=0),
            numpy.mean(values, axis=0),
            linewidth=2,
            label=label,
            **style,
        )
    axes.set(
        xlabel="minutes of training",
        xlim=(0, None),
        ylabel="%",
        ylim=(0, 100),
    )
    axes.set_title(f"SmolLM2-135M-Instruct: held-out {metric.removeprefix('eval/')}", loc="left")
    axes.legend(loc="lower right", frameon=False)


def style_of(text: str) -> dict:
    """Settings of matplotlib, with the text colour of a scheme."""
    return {
        "text.color": text,
        "axes.labelcolor": text,
        "xtick.color": text,
        "ytick.color": text,
        "axes.edgecolor": TRL,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.facecolor": "none",
        "svg.hashsalt": "grpo",
    }


def save(figure, path: Path) -> None:
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)


def draw_demo_and_speed(run: Path, text: str, path: Path) -> None:
    figure, (left, right) = pyplot.subplots(
        1,
        2,
        figsize=(11.5, 3.4),
        width_ratios=(1, 1.15),
    )
    draw_learning(left, run)
    draw_speed(right, text)
    figure.tight_layout(w_pad=3)
    save(figure, path)


def draw_real_model(runs: list[dict], metric: str, path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7.5, 3.4))
    draw_by_minute(axes, runs, metric)
    figure.tight_layout()
    save(figure, path)


def main() -> None:
    options = parser(
        __doc__,
        run=ROOT / "runs/tiny_arithmetic",
        learning=None,
        metric="eval/mean@4",
        folder=ROOT / "docs/figures",
    ).parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for scheme, text in SCHEMES.items():
        with pyplot.rc_context(style_of(text)):
            if options.learning:
                runs = read_runs(Path(options.learning))
                if len({str(entry.get("settings")) for entry in runs}) > 1:
                    raise SystemExit(f"{options.learning}: runs of several settings")
                path = options.folder / f"real_model_{scheme}.svg"
                draw_real_model(runs, options.metric, path)
            else:
                path = options.folder / f"demo_and_speed_{scheme}.svg"
                draw_demo_and_speed(options.run, text, path)


if __name__ == "__main__":
    main()
