"""The shape targets of report.md: what a paper claims of curves and orders, not of single numbers.

Each is what a rule of targets.yaml names as its `judge`. It takes the saved frames, a setup (or task) and the rule, and returns its conditions,
every one a slack and its standard error, and the numbers behind them; it raises LookupError without data.
"""

import numpy as np
import pandas as pd

from nowait.analysis.statistics import standard_error
from nowait.analysis.tables import rows_of

METHODS = ("sync", "recompute", "loglinear")
OTHERS = ["sync", "recompute"]
SPED_UP = ("intra", "inter", "both")
LAST = 10  # steps, of the start and the end of a run


def seconds_per_step(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    rows = rows_of(frames, "a3po_training_time", setup).set_index("method")
    sync, recompute, loglinear = (_at(rows["seconds_per_step"], method) for method in METHODS)
    forward, (low, high) = rows["forward_s"].iloc[0], rule["share_of_forward"]
    share = (recompute - loglinear) / forward
    conditions = [(min(share - low, high - share), rows["difference_se"]["loglinear"] / forward)]
    conditions += [(rows["speedup_over_sync"][method] - 1, rows["speedup_over_sync_se"][method]) for method in METHODS[1:]]
    numbers = f"s per step: loglinear {loglinear:.3g}, recompute {recompute:.3g}, sync {sync:.3g}"
    return conditions, f"{numbers}; loglinear under recompute by {share:.0%} of the forward pass (asked: {low:.0%} to {high:.0%})"


def clipped_tokens(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    frame = rows_of(frames, "a3po_clipped_tokens", setup)
    settled, settling = (_windows(frame, "train/clip_frac", rule[name]) for name in ("settled", "settling"))
    conditions = [_over_seeds(rule["under"] * settled[OTHERS].min(axis=1) - settled["loglinear"])]
    if setup in rule["settling_setups"]:
        conditions.append(_above_others(settling))
    return conditions, f"clipped fraction settled: {_listed(settled)} (asked: under {rule['under']} of either); settling: {_listed(settling)}"


def importance_weights(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    largest, low = rows_of(frames, "a3po_importance_weight_max", setup), rows_of(frames, "a3po_importance_weight_min", setup)
    peak, median = (_windows(largest, "train/ratio_max", rule["settled"], how) for how in ("max", "median"))
    late = _windows(low, "train/ratio_min", rule["late"])
    spiky, flat = peak["recompute"] / peak["loglinear"], peak["loglinear"] / median["loglinear"]
    asked = f"recompute over loglinear {spiky.mean():.3g} (asked: {rule['spiky']})"
    asked += f", loglinear over its median {flat.mean():.3g} (asked: {rule['flat']} at most)"
    conditions = [_over_seeds(spiky - rule["spiky"]), _over_seeds(rule["flat"] - flat), _above_others(late)]
    return conditions, f"largest r: {_listed(peak)}; {asked}; smallest r late: {_listed(late)}"


def entropy(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    late = _windows(rows_of(frames, "a3po_entropy", setup), "train/entropy", rule["late"])
    return [_above_others(late)], f"nats late: {_listed(late)}"


def final_eval_reward(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    rows = rows_of(frames, "a3po_final_eval_reward", setup).set_index("method")
    difference, se = _at(rows["difference"], "loglinear"), _at(rows["difference_se"], "loglinear")
    return [(rule["margin"] - abs(difference), se)], f"loglinear minus recompute {difference:+.4f} ± {se:.4f} (asked: {rule['margin']} at most)"


def time_to_target(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    rows = rows_of(frames, "oppo_speedups", setup).set_index("method")
    gains, errors = rows["target_speedup"], rows["target_speedup_se"]
    if missing := [method for method in SPED_UP if method not in gains]:
        raise LookupError(f"no runs of {', '.join(missing)} in {setup}")
    if late := [method for method in SPED_UP if not np.isfinite(gains[method])]:
        return [(-1.0, 0.0)], f"not reached in every seed by {', '.join(late)}, within as many steps as sequential had"
    order = [("sequential", "intra"), ("intra", "inter"), ("inter", "both")]
    conditions = [(gains[fast] - gains[slow], np.hypot(errors[fast], errors[slow])) for slow, fast in order]
    return conditions, "speed-up to the target: " + ", ".join(f"{name} {gains[name]:.2f}" for name in SPED_UP)


def reward_per_step(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    rows = rows_of(frames, "oppo_reward_steps", setup)
    tables = {m: rows[rows["method"] == m].pivot(index="step", columns="seed", values="rollout/reward_mean") for m in ("sequential", "both")}
    gap = (tables["both"] - tables["sequential"]).dropna(axis=1, how="all")  # of the seeds that both have
    if gap.empty:
        raise LookupError(f"no seed has curves of sequential and both of {setup}")
    tail = len(tables["sequential"]) // 4
    rise = (tables["sequential"].tail(tail).mean() - tables["sequential"].head(tail).mean()).mean()
    quarters = gap.groupby(np.arange(len(gap)) * 4 // len(gap)).mean()  # [4, seeds]
    asked = rule["share_of_rise"] * abs(rise)
    text = f"both minus sequential {', '.join(f'{x:+.3g}' for x in quarters.mean(axis=1))}, means of a quarter of the steps each"
    conditions = [(asked - abs(row.mean()), standard_error(row)) for _, row in quarters.iterrows()]
    return conditions, f"{text}; the sequential reward rises by {rise:.3g} (asked: within {rule['share_of_rise']:.0%} of it)"


def utilisation(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    row, (low, high) = rows_of(frames, "oppo_speedups", setup).set_index("method").loc["both"], rule["range"]
    gain, se = row["utilisation_gain"], row["utilisation_gain_se"]
    return [(min(gain - low, high - gain), se)], f"devices {gain:.2f} times as busy (asked: {low} to {high}), slots {row['occupancy_gain']:.2f} times"


def chunk_size(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    """The middle one of the sizes against both ends: the best one of the data at hand would win by luck alone."""
    table = rows_of(frames, "oppo_chunk_size", setup).pivot(index="chunk", columns="seed", values="seconds_per_step").sort_index()
    if len(table) < 3:
        raise LookupError(f"fewer than three chunk sizes of {setup}")
    chosen = table.iloc[[0, len(table) // 2, -1]]
    first, middle, last = (row for _, row in chosen.iterrows())
    numbers = f"s per step at {', '.join(map(str, chosen.index))} tokens: {', '.join(f'{mean:.3g}' for mean in chosen.mean(axis=1))}"
    return [(end.mean() / middle.mean() - 1, standard_error(end / middle)) for end in (first, last)], numbers


def deferrals(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
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


def rise(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    """As the table says, which knows the rule: it asks for standard errors itself."""
    rows = rows_of(frames, "a3po_final_eval_reward", setup)
    conditions = [(1.0 if learned == "yes" else -1.0, 0.0) for learned in rows["learned"]]
    return conditions, ", ".join(f"{row.method} {row.rise:+.3f} ± {row.rise_se:.2g}" for row in rows.itertuples())


def learning(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    rows = rows_of(frames, "oppo_reward_steps", setup)
    first, last = (_by_method(rows[part], "rollout/reward_mean") for part in (rows["step"] <= LAST, rows["step"] > rows["step"].max() - LAST))
    gain = last - first
    return [_over_seeds(gain[method]) for method in gain], f"last {LAST} steps minus the first {LAST}: {_with_errors(gain)}"


def critic(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    """By the median of the steps: where all answers of a batch earn the same, returns hardly vary, and the quotient is far below 0."""
    rows = rows_of(frames, "oppo_reward_steps", setup)
    explained = _by_method(rows[rows["step"] > rows["step"].max() - LAST], "train/explained_variance", "median")
    conditions = [_over_seeds(explained[method] - rule["above"]) for method in explained]
    text = f"explained variance in the last {LAST} steps: {_with_errors(explained)}"
    if "train/kl" in rows:
        finite = np.isfinite(rows["train/kl"]).all()
        conditions.append((1.0 if finite else -1.0, 0.0))
        text += f"; KL to the reference {'finite' if finite else 'not finite'}, {rows['train/kl'].max():.3g} nats at most"
    return conditions, text


def stage_shares(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    rows = rows_of(frames, "oppo_stages", setup)
    numbers = [f"{row.stage} {row.measured:.1%} ± {row.se:.1%} (asked: {row.asked})" for row in rows.itertuples()]
    return list(zip(rows["slack"], rows["se"], strict=True)), ", ".join(numbers)


def _by_method(rows: pd.DataFrame, column: str, how: str = "mean") -> pd.DataFrame:
    """Summary [seed, method] over the steps, methods in their order."""
    return rows.pivot_table(index="seed", columns="method", values=column, aggfunc=how, sort=False)


def _with_errors(table: pd.DataFrame) -> str:
    return ", ".join(f"{method} {values.mean():.3g} ± {standard_error(values.dropna()):.2g}" for method, values in table.items())


def _at(column: pd.Series, method: str) -> float:
    if not np.isfinite(column.get(method, np.nan)):
        raise LookupError(f"no {column.name} of {method}")
    return float(column[method])


def _windows(frame: pd.DataFrame, column: str, window: list[float], how: str = "mean") -> pd.DataFrame:
    """Summary [seed, method] over the steps in [from, to), fractions of the run; to = 1 includes the last step."""
    runs = frame[frame["method"].isin(METHODS)].dropna(subset=[column])
    last = runs.groupby("method")["step"].transform("max")
    inside = runs[(runs["step"] >= window[0] * last) & ((runs["step"] < window[1] * last) | (window[1] == 1))]
    table = inside.groupby(["seed", "method"])[column].agg(how).unstack().reindex(columns=list(METHODS)).dropna()
    if table.empty:
        raise LookupError(f"no seed has {column} of {', '.join(METHODS)} in {window} of the run")
    return table


def _over_seeds(slack: pd.Series) -> tuple[float, float]:
    return slack.mean(), standard_error(slack.dropna())


def _above_others(table: pd.DataFrame) -> tuple[float, float]:
    return _over_seeds(table["loglinear"] - table[OTHERS].max(axis=1))


def _listed(table: pd.DataFrame) -> str:
    return ", ".join(f"{method} {value:.3g}" for method, value in table.mean().items())
