"""Curves of one's own trainings, and of recorded ones to hold them against: three seeds of A-3PO's setup 1 at scale cpu.

`python -m nowait.teach.training` writes these to training.csv, from the figures of a checkout.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nowait.analysis.drawing import curve, finish, measured_curves, styled
from nowait.analysis.tables import tidy
from nowait.reproduce import figures_dir

FILE = Path(__file__).with_suffix(".csv")
METHODS = ("sync", "recompute", "behave", "loglinear")
RECORDED = {  # metric: where it comes from, a CSV file under figures/ and its column
    "reward, share right": ("a3po_train_reward_steps", "rollout/reward_mean"),
    "entropy, nats": ("a3po_entropy", "train/entropy"),
    "clipped share": ("a3po_clipped_tokens", "train/clip_frac"),
    "largest ratio": ("a3po_importance_weight_max", "train/ratio_max"),
}


@styled
def panels(results: dict[str, list], columns: dict[str, str]) -> Figure:
    """A panel per metric {column: label} of trainings {name: runs}, over training steps."""
    figure, frame = Figure(figsize=(7.6, 2.2 * len(columns) + 0.7), layout="constrained"), tidy(results, list(columns))
    for ax, (column, label) in zip(figure.subplots(len(columns), 1, sharex=True), columns.items(), strict=True):
        measured_curves(ax, frame, "step", column)
        ax.set_title(f"{label}, n = {frame['seed'].nunique()}", loc="left")
        ax.label_outer()
    return finish(figure)


@functools.cache
def recorded(metric: str) -> pd.DataFrame:
    """The metric by step (rows), method and seed (columns)."""
    return pd.read_csv(FILE).pivot(index="step", columns=["method", "seed"], values=metric)


def record() -> None:
    """Write FILE again from the CSV files of the figures."""
    keys = ["method", "seed", "step"]
    frames = [pd.read_csv(figures_dir() / f"{file}.csv").query("setup == 'setup1' and method in @METHODS").set_index(keys)[column].rename(metric)
              for metric, (file, column) in RECORDED.items()]  # fmt: skip
    pd.concat(frames, axis=1).reset_index().to_csv(FILE, index=False)


@styled
def curves(metric: str = "reward, share right", smooth: int = 10) -> Figure:
    """A panel per method: running means over `smooth` steps, their mean over seeds and single seeds as thin lines; grey: means of the others."""
    figure, table = Figure(figsize=(7.2, 4.6)), recorded(metric).rolling(smooth).mean()
    figure.subplots_adjust(0.1, 0.12, 0.99, 0.88, hspace=0.25, wspace=0.06)
    means = {method: table[method].to_numpy().mean(axis=1) for method in METHODS}
    for ax, method in zip(figure.subplots(2, 2, sharex=True, sharey=True).flat, METHODS, strict=True):
        ax.plot(table.index, np.stack([means[other] for other in METHODS if other != method], 1), color="#BBBBBB", linewidth=1)
        line = curve(ax, table.index, means[method], method, markevery=10, linewidth=2.2)
        ax.plot(table.index, table[method], color=line.get_color(), linewidth=0.9, alpha=0.6)
        ax.set_title(line.get_label(), loc="left", color=line.get_color(), weight="bold", y=0.98)
        ax.set_xticks((0, 50, 100))
        ax.locator_params(axis="y", nbins=4)
        ax.label_outer()
    figure.suptitle(f"{metric}: A-3PO's setup 1 at scale cpu, n = {table[method].shape[1]} seeds (thin)", x=0.1, ha="left", fontsize=12)
    figure.supxlabel(f"training step (mean of the last {smooth})", fontsize=11, y=0)
    return figure


PICTURES = {"training_curves": curves}
EXERCISES = {
    "sequences": [
        ((16, 8, 4), 32, "a training step has B requests of G samples each, cut into equal minibatches: one optimiser step each"),
        ((256, 4, 1), 1024, "with one minibatch the optimiser sees all B * G sequences at once"),
    ],
    "bound": [
        ((0.8, 1.0, 0.25), 1.25, "asynchronous: a step takes as long as the slower of sampler and learner; recompute's learner has u + f to do"),
        ((2.0, 1.0, 0.25), 1.0, "where sampling takes longer than u + f, the forward pass is hidden anyway"),
        ((1.1, 1.0, 0.25), 1.25 / 1.1, "A-3PO's step takes max(s, u), recompute's max(s, u + f)"),
    ],
    "difference": [
        (
            ([0.7, 0.6, 0.8], [0.6, 0.6, 0.6]),
            (0.1, 0.0577350),
            "differences seed by seed, their mean, and their standard deviation (n - 1) over the root of n",
        ),
        (([0.5, 0.9], [0.4, 0.8]), (0.1, 0.0), "seeds differ by 0.4, the paired differences do not differ at all: that is what pairing is for"),
    ],
}


if __name__ == "__main__":
    record()
