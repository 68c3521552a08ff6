"""Figures and tables from runs made up here: what is drawn, what is saved, what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest

from nowait.analysis import figures, tables

METHODS = ("sync", "recompute", "loglinear")
COLUMNS = {
    "a3po_train_reward_steps": ["rollout/reward_mean"],
    "a3po_train_reward_time": ["rollout/reward_mean"],
    "a3po_eval_reward_steps": ["eval/reward"],
    "a3po_eval_reward_time": ["eval/reward"],
    "a3po_importance_weight_max": ["train/ratio_max", "train/behave_weight_max"],
    "a3po_importance_weight_min": ["train/ratio_min", "train/behave_weight_min"],
    "a3po_clipped_tokens": ["train/clipped_tokens", "train/clip_frac"],
    "a3po_entropy": ["train/entropy"],
}
PROXIMAL_BENCH = {"cpu_model": {"recompute_s": 0.1, "interpolate_s": 2e-4, "ratio": 500.0}, "paper_tensors": {"interpolate_s": 0.004, "bytes": 8_000_000}}


@dataclass
class Run:
    metrics: pd.DataFrame
    manifest: dict
    evaluations: pd.DataFrame


def made_up_run(setup: str, method: str, seed: int, steps: int = 100, prompts: int = 32) -> Run:
    rng = np.random.default_rng([METHODS.index(method) if method in METHODS else 7, seed, setup == "setup2"])
    step = np.arange(1, steps + 1)
    drift, noise = step / steps, lambda scale: rng.normal(0, scale, steps)
    clipped = {"sync": 40 + 260 * drift, "recompute": 60 + 280 * drift, "loglinear": np.where(step < 6, 300.0, 8.0)}.get(method, 50 + 0 * drift)
    spikes = np.where(rng.random(steps) < 0.06, 40.0, 0.0) if method == "recompute" else 0.0
    metrics = pd.DataFrame(
        {
            "step": step,
            "time/elapsed": step * {"sync": 0.5, "recompute": 0.4}.get(method, 0.3),
            "rollout/reward_mean": 0.5 + 0.2 * drift + noise(0.03),
            "train/clipped_tokens": clipped + noise(2).clip(-3, 3),
            "train/clip_frac": clipped / 4000,
            "train/ratio_max": 1.5 + np.abs(noise(0.5)) + spikes,
            "train/ratio_min": 0.5 - 0.3 * drift * (method != "loglinear") + noise(0.02).clip(-0.05, 0.05),
            "train/behave_weight_max": 1.5 + np.abs(noise(0.5)),
            "train/behave_weight_min": 0.5 + noise(0.02),
            "train/entropy": 0.3 * np.exp(-(2 if method == "loglinear" else 3) * drift) + noise(0.003),
        }
    )
    at = np.linspace(0, steps, 11, dtype=int)
    evaluation = pd.DataFrame({"step": at, "eval/reward": 0.5 + 0.15 * at / steps + rng.normal(0, 0.005, 11)})
    row, name = np.arange(prompts), f"a3po/{setup}"
    last = [
        pd.DataFrame({"step": when, "set": which, "row": row, "reward": (0.4 + 0.001 * row + 0.2 * when / steps + rng.normal(0, 0.005, prompts)).clip(0, 1)})
        for when in (0, steps)
        for which in ("eval", "longer")
    ]
    manifest = {
        "seed": seed,
        "config": {"name": name, "scale": "cpu", "method": method, "runtime": {"clock": "model"}},
        "config_digest": f"{setup}-{method}",
        "code_digest": "c0de",
    }
    return Run(metrics.merge(evaluation, on="step", how="outer"), manifest, pd.concat(last, ignore_index=True))


def made_up_results(setup: str, seeds=(1, 2, 3), methods=METHODS, **options) -> dict[str, list[Run]]:
    return {method: [made_up_run(setup, method, seed, **options) for seed in seeds] for method in methods}


def made_up_bench() -> dict:
    seconds = {"sync": 0.5, "recompute": 0.4, "loglinear": 0.3, "sync_colocated": 0.35}
    rows = [{"method": m, "seconds_per_step": s, "blocks": [s * 0.9, s, s * 1.2]} for m, s in seconds.items()]
    return {"rows": rows, "sampler_s": 0.2, "update_s": 0.3, "forward_s": 0.09, "mean_staleness": 3.1}


def save_everything(folder, seeds=(1, 2, 3), setups=("setup1", "setup2"), methods=METHODS) -> None:
    results = [made_up_results(setup, seeds, methods) for setup in setups]
    record = tables.provenance(results)
    times = pd.concat([tables.training_time(setup, made_up_bench()) for setup in setups])
    frames = {
        "a3po_training_time": times,
        "a3po_proximal_seconds": tables.proximal_seconds(PROXIMAL_BENCH),
        "a3po_final_eval_reward": pd.concat([tables.final_eval_reward(result) for result in results]),
        "a3po_benchmarks": pd.concat([tables.benchmarks(result, ["longer"]) for result in results]),
    }
    for name, columns in COLUMNS.items():
        frame = pd.concat([tables.tidy(result, columns) for result in results])
        frames[name] = tables.on_bench_time(frame, times) if name.endswith("_time") else frame
    for name, frame in frames.items():
        figures.save({**figures.PLOTS, **tables.TABLES}[name](frame), name, frame, record, folder)
