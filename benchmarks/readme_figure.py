"""The picture of the README: what the demo learns, and a step's time beside TRL's.

    ./launch.sh
    python benchmarks/readme_figure.py --run runs/tiny_arithmetic

Left: the reward and the accuracy of the sampled completions at each step, from ``metrics.jsonl`` of the run. Right:
seconds per 1,000 completion tokens, medians from ``benchmarks/results/compare_trl.json``. Writes
``docs/figures/demo_and_speed_light.svg`` and ``..._dark.svg``: the README shows the one that fits the reader's colour
scheme. Needs matplotlib (``pip install -e ".[plots]"``).
"""

import json
from pathlib import Path

import matplotlib
from common import RESULTS, ROOT, parser

matplotlib.use("Agg")
from matplotlib import pyplot

SMOOTHING = 5  # steps in the moving average

# GitHub's text colours in both schemes; the other colours have enough contrast on both backgrounds.
SCHEMES = {"light": {"text": "#1f2328", "faint": "#d1d9e0"}, "dark": {"text": "#f0f6fc", "faint": "#3d444d"}}
OURS = "#2f81f7"
TRL = "#8b949e"
REWARD = "#db6d28"
CURVES = (("reward", "reward: accuracy + 0.5 format", REWARD), ("rewards/accuracy/mean", "accuracy", OURS))


def read_run(folder: Path) -> tuple[list[dict], dict, dict]:
    """The lines of the training steps, and the evaluations before and after."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    if not steps or "eval/mean@8" not in lines[0] or "eval/mean@8" not in lines[-1]:
        raise SystemExit(f"{folder} is not a complete run of the demo: run ./launch.sh first")
    return steps, lines[0], lines[-1]


def moving_average(values: list[float]) -> list[float]:
    """Mean over a window of ``SMOOTHING`` values around each place, shorter at both ends."""
    windows = [values[max(i - SMOOTHING // 2, 0) : i + SMOOTHING // 2 + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def draw_learning(axes, steps: list[dict], before: dict, after: dict) -> None:
    x = [line["step"] for line in steps]
    for name, label, color in CURVES:
        values = [line[name] for line in steps]
        axes.plot(x, values, color=color, linewidth=0.7, alpha=0.35)
        axes.plot(x, moving_average(values), color=color, linewidth=2, label=label)
    axes.set(
        xlabel="step",
        xlim=(0, len(x)),
        ylim=(0, 1.6),
    )
    first = before["eval/mean@8"]
    last = after["eval/mean@8"]
    axes.set_title(f"./launch.sh: held-out accuracy {first:.1%} to {last:.1%}", loc="left")
    axes.legend(loc="lower right", frameon=False)


def draw_speed(axes, results: list[dict], text: str) -> None:
    """Two bars per precision at the paper's beta, each sampling plus the rest of the step."""
    chosen = [entry for entry in results if entry["setting"]["beta"] == 0.04]
    chosen.sort(key=lambda entry: entry["setting"]["precision"], reverse=True)
    ticks = []
    labels = []
    for number, entry in enumerate(chosen):
        summary = entry["summary"]
        for offset, (side, color) in enumerate((("ours", OURS), ("trl", TRL))):
            y = number * 2.6 + offset
            step = summary["step"][side]
            sampling = summary["sampling"][side]
            if side == "trl":  # both of the setting that is fastest in the whole step
                sampling = summary["sampling"]["of_trl"][summary["step"]["best"]]
            axes.barh(y, sampling, color=color, height=0.8)
            axes.barh(
                y,
                step - sampling,
                left=sampling,
                color=color,
                height=0.8,
                alpha=0.55,
            )
            factor = f"  ({summary['step']['ratio']:.2f} times as fast)" if side == "ours" else ""
            axes.text(step + 0.08, y, f"{step:.2f} s{factor}", va="center", color=text)
            ticks.append(y)
            labels.append(f"{'this trainer' if side == 'ours' else 'TRL 1.16.0'}, {entry['setting']['precision']}")
    axes.set_yticks(ticks, labels)
    axes.invert_yaxis()
    axes.set(xlabel="seconds per 1,000 completion tokens (solid: sampling, pale: the rest)", xlim=(0, 7.5))
    axes.set_title("A step beside TRL, two CPU cores, model of 7M parameters", loc="left")


def draw(run: Path, scheme: str, path: Path) -> None:
    text = SCHEMES[scheme]["text"]
    faint = SCHEMES[scheme]["faint"]
    style = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), text),
        "axes.edgecolor": faint,
        "grid.color": faint,
        "axes.grid": True,
        "axes.grid.axis": "x",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 10,
        "axes.titlesize": 11,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "svg.hashsalt": "grpo",
    }
    with pyplot.rc_context(style):
        figure, (left, right) = pyplot.subplots(
            1,
            2,
            figsize=(11.5, 3.4),
            width_ratios=(1, 1.15),
        )
        draw_learning(left, *read_run(run))
        draw_speed(right, json.loads((RESULTS / "compare_trl.json").read_text())["results"], text)
        figure.tight_layout(w_pad=3)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def main() -> None:
    options = parser(
        __doc__,
        run=ROOT / "runs/tiny_arithmetic",
        folder=ROOT / "docs/figures",
    ).parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for scheme in SCHEMES:
        draw(options.run, scheme, options.folder / f"demo_and_speed_{scheme}.svg")


if __name__ == "__main__":
    main()
