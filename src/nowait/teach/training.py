"""Curves of one's own trainings, and of recorded ones to hold them against: three seeds of A-3PO's setup 1 at scale cpu.

`python -m nowait.teach.training` writes these to training.csv, from the figures of a checkout.
"""

from __future__ import annotations

import functools
from pathlib import Path

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
    """Running means over `smooth` steps: on the left their means over seeds, on the right the single seeds."""
    figure, table = Figure(figsize=(7.6, 3.6)), recorded(metric).rolling(smooth).mean()
    figure.subplots_adjust(0.09, 0.24, 0.99, 0.9, wspace=0.05)
    left, right = figure.subplots(1, 2, sharey=True)
    for method in METHODS:
        line = curve(left, table.index, table[method].to_numpy().mean(axis=1), method, markevery=10)
        right.plot(table.index, table[method], color=line.get_color(), linestyle=line.get_linestyle(), linewidth=1)
    for ax, title in ((left, f"{metric}, mean of n = {table[method].shape[1]} seeds"), (right, "single seeds; setup 1, scale cpu")):
        ax.set(xlabel=f"training step (mean of the last {smooth})", xticks=(0, 25, 50, 75, 100))
        ax.set_title(title, loc="left")
    right.tick_params(labelleft=False)
    figure.legend(handles=left.lines, loc="lower center", ncols=4)
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
        (([0.7, 0.6, 0.8], [0.6, 0.6, 0.6]), (0.1, 0.0577350), "of the differences seed by seed: mean, and standard deviation (n - 1) over root n"),
        (([0.5, 0.9], [0.4, 0.8]), (0.1, 0.0), "seeds differ by 0.4, the paired differences do not differ at all: that is what pairing is for"),
    ],
}


if __name__ == "__main__":
    record()
