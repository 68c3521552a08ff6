"""What report.md says about OPPO: measured numbers by published entry, and its shape targets.

Each shape returns its conditions, every one a slack and its standard error, and the numbers behind them; it raises LookupError without data.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from nowait.analysis.statistics import standard_error
from nowait.analysis.tables import rows_of

SPED_UP = ("intra", "inter", "both")


def values(frames: dict[str, pd.DataFrame]) -> dict[str, tuple[float, int, float]]:
    """{id of a published entry: measured value, n, standard error over seeds}."""
    found = {}
    for row in frames["oppo_speedups"].query("method == 'both'").itertuples() if "oppo_speedups" in frames else ():
        found[f"tables.minutes_to_target.{row.setup}.speedup"] = row.target_speedup, row.seeds, row.target_speedup_se
        found[f"tables.gpu_utilisation_pct.{row.setup}.gain"] = row.utilisation_gain, row.seeds, row.utilisation_gain_se
    return {key: value for key, value in found.items() if np.isfinite(value[0])}


def _shape_time_to_target(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    rows = rows_of(frames, "oppo_speedups", setup).set_index("method")
    gains, errors = rows["target_speedup"], rows["target_speedup_se"]
    if missing := [method for method in SPED_UP if method not in gains]:
        raise LookupError(f"no runs of {', '.join(missing)} in {setup}")
    if late := [method for method in SPED_UP if not np.isfinite(gains[method])]:
        return [(-1.0, 0.0)], f"not reached in every seed by {', '.join(late)}, within as many steps as sequential had"
    order = [("sequential", "intra"), ("intra", "inter"), ("inter", "both")]
    conditions = [(gains[fast] - gains[slow], np.hypot(errors[fast], errors[slow])) for slow, fast in order]
    return conditions, "speed-up to the target: " + ", ".join(f"{name} {gains[name]:.2f}" for name in SPED_UP)


def _shape_reward_per_step(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    rows = rows_of(frames, "oppo_reward_steps", setup)
    tables = {m: rows[rows["method"] == m].pivot(index="step", columns="seed", values="rollout/reward_mean") for m in ("sequential", "both")}
    if any(table.empty for table in tables.values()):
        raise LookupError(f"no curves of sequential and both of {setup}")
    tail = len(tables["sequential"]) // 4
    rise = (tables["sequential"].tail(tail).mean() - tables["sequential"].head(tail).mean()).mean()
    gap = (tables["both"] - tables["sequential"]).dropna(axis=1, how="all")  # of the seeds that both have
    if gap.empty:
        raise LookupError(f"no seed has both curves of {setup}")
    quarters = gap.groupby(np.arange(len(gap)) * 4 // len(gap)).mean()  # [4, seeds]
    asked = rule["share_of_rise"] * abs(rise)
    text = f"both minus sequential {', '.join(f'{x:+.3g}' for x in quarters.mean(axis=1))}, means of a quarter of the steps each"
    conditions = [(asked - abs(row.mean()), standard_error(row)) for _, row in quarters.iterrows()]
    return conditions, f"{text}; the sequential reward rises by {rise:.3g} (asked: within {rule['share_of_rise']:.0%} of it)"


def _shape_utilisation(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    row, (low, high) = rows_of(frames, "oppo_speedups", setup).set_index("method").loc["both"], rule["range"]
    gain, se = row["utilisation_gain"], row["utilisation_gain_se"]
    return [(min(gain - low, high - gain), se)], f"devices {gain:.2f} times as busy (asked: {low} to {high}), slots {row['occupancy_gain']:.2f} times"


def _shape_chunk_size(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    """The middle one of the sizes against both ends: the best one of the data at hand would win by luck alone."""
    table = rows_of(frames, "oppo_chunk_size", setup).pivot(index="chunk", columns="seed", values="seconds_per_step").sort_index()
    if len(table) < 3:
        raise LookupError(f"fewer than three chunk sizes of {setup}")
    first, middle, last = table.iloc[0], table.iloc[len(table) // 2], table.iloc[-1]
    sizes = table.index[0], table.index[len(table) // 2], table.index[-1]
    numbers = f"s per step at {', '.join(map(str, sizes))} tokens: {', '.join(f'{row.mean():.3g}' for row in (first, middle, last))}"
    return [(end.mean() / middle.mean() - 1, standard_error(end / middle)) for end in (first, last)], numbers


def _shape_deferrals(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    rows = rows_of(frames, "oppo_deferrals", setup)
    rows = rows[rows["method"] == rows["method"].iloc[0]].set_index("deferrals")
    share, n = rows["share"], rows["requests"].iloc[0]
    none, once = share.get(0, 0.0), share.get(1, 0.0)
    if none == 1:
        raise LookupError(f"nothing was ever deferred in {setup}")
    of_rest = once / (1 - none)
    errors = np.sqrt(none * (1 - none) / n), np.sqrt(of_rest * (1 - of_rest) / (n * (1 - none)))
    text = f"never {none:.1%}, once {once:.1%}, which is {of_rest:.0%} of the others (asked: {rule['never']:.0%}, {rule['once']:.0%})"
    return [(none - rule["never"], errors[0]), (of_rest - rule["once"], errors[1])], f"{text}, at Δ/B = {rows['delta_over_b'].iloc[0]:.2f}"


SHAPES = {
    "time_to_target": _shape_time_to_target,
    "reward_per_step": _shape_reward_per_step,
    "utilisation": _shape_utilisation,
    "chunk_size": _shape_chunk_size,
    "deferrals": _shape_deferrals,
}
