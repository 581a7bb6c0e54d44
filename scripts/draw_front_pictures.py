"""Draws two pictures of the front page, from notebooks that measure them: `python scripts/draw_front_pictures.py`.

docs/by_hand.svg: parameters after five steps, by optimizers that run on each device's shard, and by jaxshard (notebook
4). docs/timeline.svg: what each device sends during a step of four microbatches (notebook 2).
"""

import os
import pathlib
import runpy
import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
NAVY, ORANGE, PURPLE = "#1b3a57", "#e4572e", "#8d6a9f"
KINDS = {"all-reduce": PURPLE, "reduce-scatter": ORANGE, "all-gather": NAVY}
STYLE = {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "1"}


def by_hand(measured):
    """A row for each optimizer: its distance from one device, by hand and by jaxshard."""
    shown = ("AdamW", "clipped SGD", "Adafactor", "LAMB", "Muon")
    figure, axes = plt.subplots(figsize=(10, 3.2), layout="constrained")
    for row, name in enumerate(shown):
        axes.axhline(row, color="#eeeae0", zorder=0)
        found = {
            "the update run on each device's shard": (measured["wrong"][name][-1], "o", ORANGE),
            "jaxshard.zero2": (measured["right"][name][0], "D", NAVY),
        }
        for label, (distance, marker, colour) in found.items():
            axes.plot(max(distance, 1e-17), row, marker, color=colour, markersize=10, label=None if row else label)
    axes.set_xscale("log")
    axes.axvline(1, color="#999999", linestyle=":", zorder=0)
    axes.set(xlim=(1e-17, 20), yticks=range(len(shown)), yticklabels=shown)
    axes.set_title("Parameters after 5 steps on 8 devices, in float64")
    axes.set_xlabel("difference from one device, relative to how far the parameters moved")
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 0.62))
    return figure


def timeline(measured):
    """A panel for each strategy: MB that a device sends at each place of the step, by kind."""
    per_pass, m = measured["PER_PASS"], measured["MICROBATCHES"]
    columns = measured["COLUMNS"]
    shown = ("ddp", "zero1", "zero2", "zero3")
    figure, panels = plt.subplots(len(shown), 1, figsize=(10, 5.6), layout="constrained", sharex=True)
    for axes, name in zip(panels, shown, strict=True):
        bottom = np.zeros(len(columns))
        for kind, heights in measured["bars"](measured["reports"][name, m]).items():
            (sent,) = np.nonzero(heights)
            axes.bar(sent, heights[sent], 0.85, bottom[sent], color=KINDS[kind])
            bottom += heights
        for i in range(m):
            middle = 0.5 + per_pass * (2 * i + 1)
            axes.axvspan(middle - per_pass, middle, color="#f4f1ea", zorder=0)
            axes.axvspan(middle, middle + per_pass, color="#e6e1d5", zorder=0)
        axes.text(0, 4.9, f"{name}: {bottom.sum():.1f} MB per step", weight="bold")
        axes.set(xlim=(-1, len(columns)), ylim=(0, 6.4), yticks=[0, 3], ylabel="MB")
        axes.tick_params(bottom=False, labelbottom=False)
    below = {"ha": "center", "va": "top", "transform": panels[-1].get_xaxis_transform(), "fontsize": 11}
    for i in range(m):
        panels[-1].text(0.5 + per_pass * (2 * i + 1), -0.1, f"microbatch {i + 1}\nforward | backward", **below)
    panels[-1].text(len(columns) - 2, -0.1, "update", **below)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in KINDS.values()]
    figure.legend(handles, KINDS, loc="outside upper center", ncols=3, frameon=False)
    return figure


PICTURES = {"by_hand": (by_hand, "04_any_optimizer.py"), "timeline": (timeline, "02_zero_1_2_3.py")}


def main():
    if not sys.argv[1:]:  # each notebook sets JAX up in its own way, so it has a process of its own
        for name in PICTURES:
            environment = {**os.environ, "MPLBACKEND": "svg"}
            subprocess.run([sys.executable, __file__, name], env=environment, check=True, stdout=subprocess.DEVNULL)
        return
    draw, notebook = PICTURES[sys.argv[1]]
    measured = runpy.run_path(str(ROOT / "notebooks" / notebook))
    plt.rcParams.update(STYLE)
    draw(measured).savefig(ROOT / "docs" / f"{sys.argv[1]}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
