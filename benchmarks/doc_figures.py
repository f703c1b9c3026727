"""The drawings of the documents: a step with its tensor shapes, padded and packed rows, the clipped loss.

    python benchmarks/doc_figures.py

Writes ``docs/figures/{step,packed,clip}_light.svg`` and ``..._dark.svg``; the documents show the one that fits the reader's colour scheme.
The losses are computed by ``grpo.algorithm.loss``. Needs matplotlib (``pip install -e ".[plots]"``).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import torch

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from grpo.algorithm.loss import surrogate_loss

ROOT = Path(__file__).resolve().parent.parent
SCHEMES = {
    "light": {"text": "#1f2328", "faint": "#d1d9e0", "box": "#f6f8fa"},
    "dark": {"text": "#f0f6fc", "faint": "#3d444d", "box": "#212830"},
}
BLUE, ORANGE, GRAY = "#2f81f7", "#db6d28", "#8b949e"
BLUES, ORANGES = (BLUE, "#79b8ff"), (ORANGE, "#f0a875")  # neighbouring prompts, neighbouring completions

STEP = (
    ("problems", "P prompts", "data.Schedule"),
    ("sample", "P x G completions", "rollout"),
    ("rewards", "[P, G, F], then [P, G]", "rewards"),
    ("advantages", "[P, G]", "advantages"),
    ("collate", "B = P x G rows,\n[B, T] tokens, mask", "batch"),
    ("log-probs", "[B, T] old, reference", "logprobs"),
    ("update", "[B, T] new, loss,\nbackward, AdamW", "loss"),
)


def draw_step(axes: Axes, colors: dict[str, str]) -> None:
    """Boxes from left to right, and the way back from the update to sampling."""
    width, gap = 1.0, 0.22
    for number, (name, shape, module) in enumerate(STEP):
        x = number * (width + gap)
        color = ORANGE if name in ("sample", "update") else BLUE
        style = dict(boxstyle="round,pad=0.02,rounding_size=0.06", facecolor=colors["box"], edgecolor=color)
        axes.add_patch(FancyBboxPatch((x, 0), width, 0.9, linewidth=1.5, **style))
        axes.text(x + width / 2, 0.70, name, ha="center", va="center", weight="bold", fontsize=11)
        axes.text(x + width / 2, 0.40, shape, ha="center", va="center", fontsize=8)
        axes.text(x + width / 2, 0.10, module, ha="center", va="center", fontsize=8, color=GRAY, family="monospace")
        if number:
            arrow = dict(arrowstyle="-|>", color=GRAY, linewidth=1.2, shrinkA=0, shrinkB=0)
            axes.annotate("", (x - 0.03, 0.45), (x - gap + 0.03, 0.45), arrowprops=arrow)
    start, end = len(STEP) * (width + gap) - gap - width / 2, width + gap + width / 2
    axes.plot([start, start, end], [-0.04, -0.28, -0.28], color=GRAY, linewidth=1.2)
    arrow = dict(arrowstyle="-|>", color=GRAY, linewidth=1.2, shrinkA=0, shrinkB=0)
    axes.annotate("", (end, -0.03), (end, -0.29), arrowprops=arrow)
    axes.text((start + end) / 2, -0.37, "the new weights sample the next step", ha="center", va="top", fontsize=9)
    axes.set(xlim=(-0.1, start + width / 2 + 0.1), ylim=(-0.6, 1.0))
    axes.axis("off")


PROMPTS, COMPLETIONS = (6, 4), ((5, 9, 3, 7), (8, 4, 10, 6))
"""Tokens of two prompts and of the four completions of each."""


def draw_packed(axes: Axes, colors: dict[str, str]) -> None:
    """Above, one padded row per completion; below, one row without padding: each prompt once, then all completions."""
    widest = max(PROMPTS) + max(max(group) for group in COMPLETIONS)
    y, size = 0.0, 1.0
    padded = 0
    for prompt, group, blue in zip(PROMPTS, COMPLETIONS, BLUES, strict=True):
        for number, completion in enumerate(group):
            left = max(PROMPTS) - prompt
            for x in range(widest):
                is_prompt, is_completion = left <= x < max(PROMPTS), max(PROMPTS) <= x < max(PROMPTS) + completion
                color = blue if is_prompt else ORANGES[number % 2] if is_completion else "none"
                _cell(axes, x, y, size, color, colors)
                padded += 1
            y -= size * 1.15
    axes.text(-0.6, -3.5 * 1.15 + 0.5, f"padded:\n8 rows,\n{padded} places", ha="right", va="center", fontsize=10)
    y -= 1.0
    row = [color for prompt, color in zip(PROMPTS, BLUES, strict=True) for _ in range(prompt)]
    completions = [length for group in COMPLETIONS for length in group]
    row += [ORANGES[number % 2] for number, length in enumerate(completions) for _ in range(length)]
    half = (len(row) + 1) // 2
    for number, color in enumerate(row):
        _cell(axes, number % half, y - (number // half) * 1.15, size, color, colors)
    text = f"packed:\n1 row (broken here),\n{len(row)} places"
    axes.text(-0.6, y - 0.05, text, ha="right", va="center", fontsize=10)
    x = widest + 1.5
    for number, (color, label) in enumerate(((BLUE, "prompt"), (ORANGE, "completion"), ("none", "padding"))):
        _cell(axes, x, -1.0 - 1.5 * number, size, color, colors)
        axes.text(x + 1.5, -0.5 - 1.5 * number, label, va="center", fontsize=10)
    axes.set(xlim=(-7.5, half + 0.3), ylim=(y - 1.4, 1.2))
    axes.set_aspect("equal")
    axes.axis("off")


def _cell(axes: Axes, x: float, y: float, size: float, color: str, colors: dict[str, str]) -> None:
    axes.add_patch(Rectangle((x, y), size * 0.9, size * 0.9, facecolor=color, edgecolor=colors["faint"], linewidth=0.6))


def draw_clip(left: Axes, right: Axes, colors: dict[str, str]) -> None:
    """Loss of one token by its importance ratio, for a positive and for a negative advantage."""
    ratio = torch.linspace(0.4, 1.8, 281).unsqueeze(1)
    for axes, advantage in ((left, 1.0), (right, -1.0)):
        loss = surrogate_loss("clip", ratio.log(), ratio, torch.full_like(ratio, advantage), (0.8, 1.2))
        axes.plot(ratio, loss, color=BLUE if advantage > 0 else ORANGE, linewidth=2)
        axes.axvline(1.0, color=GRAY, linewidth=1, linestyle=":")
        axes.axvline(1.2 if advantage > 0 else 0.8, color=GRAY, linewidth=1)
        axes.set_title(f"advantage {advantage:+.0f}", loc="left")
        axes.set(xlabel="importance ratio", ylabel="loss of the token", xlim=(0.4, 1.8))
    left.text(1.23, -0.6, "clipped:\nno gradient", va="top", fontsize=9)
    right.text(0.77, 1.4, "clipped:\nno gradient", va="top", ha="right", fontsize=9)


def draw(name: str, scheme: str, path: Path) -> None:
    colors = SCHEMES[scheme]
    text, faint = colors["text"], colors["faint"]
    style = {
        "text.color": text, "axes.labelcolor": text, "xtick.color": text, "ytick.color": text, "axes.edgecolor": faint,
        "axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "axes.titlesize": 11,
        "figure.facecolor": "none", "axes.facecolor": "none", "svg.hashsalt": "grpo",
    }  # fmt: skip
    with pyplot.rc_context(style):
        if name == "step":
            figure, axes = pyplot.subplots(figsize=(11.5, 2.2))
            draw_step(axes, colors)
        elif name == "packed":
            figure, axes = pyplot.subplots(figsize=(8.5, 3.6))
            draw_packed(axes, colors)
        else:
            figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.5, 2.8))
            draw_clip(left, right, colors)
        figure.tight_layout()
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "figures", help="where the drawings go")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in ("step", "packed", "clip"):
        for scheme in SCHEMES:
            path = options.folder / f"{name}_{scheme}.svg"
            draw(name, scheme, path)
            print(path)


if __name__ == "__main__":
    main()
