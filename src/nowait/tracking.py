"""Metrics of a run: metrics.jsonl, from which every figure is drawn, and a mirror of it in Weights & Biases.

metrics.jsonl is strict JSON, one object per line: {"step": training steps finished, metric: value, ...}. A mean over nothing (NaN) is
null; any other NaN and every infinity is an error. A process killed while it writes leaves a last line without its end, which is cut
when the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd

from nowait.checkpoint import cannot_write

# name: (meaning with unit and denominator, then what TRL, verl and AReaL call it). In wandb TRL's names begin with train/, AReaL's of the
# loss with ppo_actor/update/.
METRICS: dict[str, tuple[str, str, str, str]] = {
    "train/global_step": ("training steps finished", "train/global_step", "training/global_step", "-"),
    "train/policy_loss": ("policy loss, mean over tokens", "loss/policy_avg", "actor/pg_loss", "actor_loss/avg"),
    "train/value_loss": ("value loss, mean over tokens", "loss/value_avg", "critic/vf_loss", "-"),
    "train/approx_kl": ("KL(prox, theta) by k3, nats, mean over tokens", "policy/approxkl_avg", "actor/ppo_kl", "approx_kl/avg"),
    "train/clip_frac": ("clipped tokens over tokens", "policy/clipfrac_avg", "actor/pg_clipfrac", "clip_ratio/avg"),
    "train/ratio_mean": ("r = theta/prox, mean over tokens", "val/ratio", "-", "importance_weight/avg"),
    "train/ratio_min": ("least r of a token", "-", "-", "importance_weight/min"),
    "train/ratio_max": ("largest r of a token", "-", "-", "importance_weight/max"),
    **{
        f"train/behave_weight_{x}": (meaning, f"sampling/importance_sampling_ratio/{x}", f"rollout_corr/rollout_is_{x}", f"behave_imp_weight/{areal}")
        for x, areal, meaning in (
            ("mean", "avg", "rho = prox/behav before any cap, mean over tokens"),
            ("min", "min", "least rho of a token"),
            ("max", "max", "largest rho of a token"),
        )
    },
    "train/behave_kl": ("KL(behav, prox) by k3, nats, mean over tokens", "-", "rollout_corr/k3_kl", "behave_approx_kl/avg"),
    "train/capped_frac": ("tokens with rho above the cap over tokens", "-", "rollout_corr/rollout_rs_masked_fraction", "rs_filtered_fraction"),
    "train/ess": ("(sum rho)² / (tokens · sum rho²), at most 1", "-", "rollout_corr/rollout_is_eff_sample_size", "-"),
    "train/tokens": ("tokens in the loss, all epochs, sum", "-", "-", "n_valid_tokens"),
    "train/clipped_tokens": ("tokens on the clipped branch, sum", "-", "-", "clipped_tokens"),
    "train/dual_clipped_tokens": ("tokens that the dual clip bounds, sum", "-", "actor/pg_clipfrac_lower (a share)", "dual_clip_ratio/avg (a share)"),
    "train/clamped_ratios": ("r and rho above exp(42), sum over tokens", "-", "-", "-"),
    "train/value_clip_frac": ("tokens with clipped value over tokens", "val/clipfrac_avg", "critic/vf_clipfrac", "-"),
    "train/explained_variance": ("1 - Var(returns - values) / Var(returns), over tokens", "-", "critic/vf_explained_var", "-"),
    "train/value_mean": ("values before the update, mean over tokens", "-", "critic/values/mean", "-"),
    "train/return_mean": ("returns, mean over tokens", "-", "critic/returns/mean", "-"),
    "train/kl": ("KL(policy, reference) of responses, nats, mean over responses", "objective/kl", "actor/reward_kl_penalty (per token)", "-"),
    "train/kl_coef": ("beta, the weight of that KL in the reward", "objective/kl_coef (TRL up to 0.11)", "actor/reward_kl_penalty_coeff", "-"),
    "train/kl_clamped": ("log-ratios of that KL beyond ±20, sum over tokens", "-", "-", "-"),
    "train/entropy": ("entropy of the policy, nats, mean over tokens", "policy/entropy_avg", "actor/entropy", "entropy/avg"),
    "train/prox_abs_error/loglinear": ("|loglinear - recomputed log-prob|, nats, mean over tokens", "-", "-", "compute_logp/loglinear/abs_error/avg"),
    "train/prox_abs_error/linear": ("|linear - recomputed log-prob|, nats, mean over tokens", "-", "-", "compute_logp/linear/abs_error/avg"),
    "train/prox_abs_error/behave": ("|behav - recomputed log-prob|, nats, mean over tokens", "-", "-", "compute_logp/rollout/abs_error/avg"),
    "train/prox_abs_error/reuse": ("|theta - recomputed log-prob|, nats, mean over tokens", "-", "-", "-"),
    "train/sampler_gap": (
        "|sampler's - learner's log-prob| of tokens with d = 0 before the update, nats, mean; missing where there are none",
        "sampling/sampling_logp_difference/mean",
        "training/rollout_probs_diff_mean (of probabilities)",
        "-",
    ),
    "train/grad_norm": ("gradient norm before clipping, mean over optimiser steps", "grad_norm", "actor/grad_norm", "-"),
    "train/lr": ("learning rate", "lr", "actor/lr", "-"),
    "stale/d_mean": ("training steps between sampling and update, mean over tokens", "-", "-", "version_stats/sample_staleness_theta_avg"),
    "stale/d_max": ("the same, largest of a token", "-", "-", "version_stats/sample_staleness_theta_max"),
    "stale/mixed_frac": ("sequences sampled under several versions over sequences", "-", "fully_async/partial/partial_ratio", "-"),
    "stale/hist": ("tokens with d = 0, 1, 2, ..., counts", "-", "-", "-"),
    "rollout/reward_mean": ("reward, mean over graded sequences", "reward", "critic/score/mean", "task_reward/avg"),
    "rollout/reward_std": ("reward, standard deviation over graded sequences", "reward_std", "-", "-"),
    "rollout/len_mean": ("response tokens, mean over sequences", "completions/mean_length", "response_length/mean", "seq_len/avg (with the prompt)"),
    "rollout/len_max": ("response tokens, most of a sequence", "completions/max_length", "response_length/max", "-"),
    "rollout/truncated_frac": ("truncated sequences over sequences", "completions/clipped_ratio", "response_length/clip_ratio", "no_eos_ratios/avg"),
    "rollout/grader_failed_frac": ("sequences left out because a grader failed over sequences", "-", "-", "-"),
    "rollout/reprefill_tokens": ("tokens in flight prefilled again under new weights, sum", "-", "-", "-"),
    "rollout/buffered_tokens": ("tokens generated and not yet trained, sum", "-", "-", "-"),
    "rollout/requests": ("ids of the requests trained (metrics.jsonl only)", "-", "-", "-"),
    "rollout/lengths": ("response tokens of every sequence trained (metrics.jsonl only)", "-", "-", "-"),
    "time/step": ("seconds of the step on the run's clock", "step_time", "timing_s/step", "-"),
    "time/elapsed": ("seconds since the start, evaluations excluded", "-", "-", "-"),
    "time/generate": ("seconds of decoding, mean over sampler devices", "-", "timing_s/gen", "timeperf/rollout (waiting only)"),
    "time/prox_forward": ("seconds of the proximal forward", "forward_time_s", "timing_s/old_log_prob", "timeperf/recompute_logp"),
    "time/train": ("seconds of the update, mean over learner devices", "-", "timing_s/update_actor", "timeperf/train_step"),
    "time/sync": ("seconds of publishing and loading weights, mean over devices", "weight_sync_time_s", "-", "timeperf/update_weights"),
    "time/reward": ("seconds of scoring, by rule or reward model", "-", "timing_s/reward", "-"),
    "time/ref": ("seconds of the reference model, where there is one", "-", "timing_s/ref", "-"),
    "time/idle_gen": ("seconds without work, mean over sampler devices", "-", "rollouter/idle_ratio (a share)", "-"),
    "time/idle_train": ("seconds without work, mean over learner devices", "-", "trainer/idle_ratio (a share)", "-"),
    "perf/occupancy": ("generated tokens over decode steps times slots (schedule overlapped: times (B + Δ) n, what was let in)", "-", "-", "-"),
    "perf/gpu_utilisation": ("time with a kernel running over time, by NVML, mean over GPUs; only with a GPU and nvidia-ml-py", "-", "-", "-"),
    "perf/busy_frac": ("busy time over step time, mean over devices", "-", "-", "-"),
    "overlap/delta": ("Δ of the step: requests in flight beyond the batch size B (schedule overlapped only, as all overlap/*)", "-", "-", "-"),
    "overlap/delta_over_b": ("the same over B", "-", "-", "-"),
    "overlap/chunk": ("tokens per decode round and sequence", "-", "-", "-"),
    "overlap/carried": ("requests held after the step, unfinished or not yet trained", "-", "-", "-"),
    "overlap/deferrals": ("trained requests that were carried over 0, 1, 2, ... updates, counts", "-", "-", "-"),
    "overlap/tail_frac": ("generation time with fewer than half of the (B + Δ) n slots live over generation time", "-", "-", "-"),
    "eval/reward": ("held-out reward, mean over prompts of the mean over samples; other sets: eval/SET/reward", "eval_reward", "val-core/*", "-"),
    "eval/se": ("its standard error over prompts", "-", "-", "-"),
    "eval/len_mean": ("held-out response tokens, mean over sequences", "-", "-", "-"),
}


def cut_unfinished_line(file: BinaryIO) -> None:
    """Drop what a killed process left of the last line of a file of JSON lines; a whole record that only lacks its newline gets it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    complete, newline, rest = file.read(size).rpartition(b"\n")
    if rest and _is_json(rest):
        file.write(b"\n")
    elif rest:
        file.truncate(len(complete + newline))


def append_line(file: BinaryIO, record: dict[str, Any]) -> None:
    """Append a record to an unbuffered file of JSON lines: the whole line or, where the disk refuses, nothing."""
    line, end = json.dumps(record, allow_nan=False).encode() + b"\n", file.seek(0, os.SEEK_END)
    try:
        while line:
            line = line[file.write(line) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise


class Tracker:
    """Writes the metrics of the run in `folder`; constructed again in the same folder, it goes on with the same file and wandb run.

    wandb is what WANDB_MODE says, else online if an API key is configured, else offline: `wandb sync` uploads that later, and a resumed
    run is a second one of the same name there. Whatever fails in wandb is warned of once and ends the mirror, never the training. The
    project is WANDB_PROJECT, else "nowait".
    Raises RuntimeError naming run, step, cause and remedy where metrics.jsonl cannot be written.
    """

    def __init__(self, folder: Path, *, config: dict[str, Any], name: str, group: str, tags: list[str], use_wandb: bool) -> None:
        self.folder, self.path, self.step = folder, folder / "metrics.jsonl", 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b", buffering=0)
            cut_unfinished_line(self._file)
        except OSError as error:
            raise cannot_write(self.path.name, folder, error) from error
        self._wandb = self._run = None
        if use_wandb:
            self._mirror(lambda: self._start_wandb(config=config, name=name, group=group, tags=tags))

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Append the metrics of `step`: numbers, strings, lists. Raises FloatingPointError on NaN or infinity, see `may_be_nan`."""
        self.step = step
        record = {"step": step} | {key: self._checked(key, value, metrics) for key, value in metrics.items()}
        try:
            append_line(self._file, record)
        except OSError as error:
            raise cannot_write(f"the metrics of step {step} to {self.path.name}", self.folder, error) from error
        if self._run:
            self._mirror(lambda: self._run.log(self._payload(record)))

    def log_figure(self, name: str, png: Path) -> None:
        """Mirror a picture to wandb."""
        if self._run:
            self._mirror(lambda: self._run.log({"train/global_step": self.step, name: self._wandb.Image(str(png))}))

    def log_table(self, name: str, frame: pd.DataFrame) -> None:
        """Mirror a data frame to wandb, as a new table each time: one that was logged before cannot change."""
        if self._run:
            self._mirror(lambda: self._run.log({"train/global_step": self.step, name: self._wandb.Table(dataframe=frame)}))

    def close(self, failed: bool = False) -> None:
        self._file.close()
        if self._run:
            self._mirror(lambda: self._run.finish(exit_code=int(failed)))
            self._run = None

    def _checked(self, key: str, value: Any, metrics: dict[str, Any]) -> Any:
        """The value in Python's own types, None for a legitimate NaN."""
        if isinstance(value, (np.generic, np.ndarray)):
            value = value.tolist()
        bad = [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, float) and not math.isfinite(x)]
        if not bad:
            return value
        if isinstance(value, float) and math.isnan(value) and may_be_nan(key, metrics):
            return None
        remedy = "look at train/grad_norm and train/ratio_max of the steps before, which are kept, and try a lower learner.lr"
        raise FloatingPointError(f"run {self.folder}, step {self.step}: {key} is {bad[0]}; {remedy}")

    def _start_wandb(self, **description: Any) -> None:
        import wandb

        settings = wandb.Settings(silent=True, console="off")
        wandb.setup(settings)
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
        place: dict[str, Any] = {"project": os.environ.get("WANDB_PROJECT", "nowait"), "dir": str(self.folder), "reinit": "create_new"}
        if mode == "online":  # offline runs of one id would overwrite each other when they are uploaded (wandb issue 4624)
            place |= {"id": self._wandb_id(), "resume": "allow"}
        run = wandb.init(mode=mode, settings=settings, **place, **description)
        for namespace in sorted({key.split("/")[0] for key in METRICS}):
            run.define_metric(f"{namespace}/*", step_metric="train/global_step")
        self._wandb, self._run = wandb, run

    def _wandb_id(self) -> str:
        path = self.folder / "wandb" / "run_id"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(secrets.token_hex(4))
        return path.read_text()

    def _payload(self, record: dict[str, Any]) -> dict[str, Any]:
        """What wandb plots: numbers, and histograms of lists of counts, value i in bin i."""
        payload: dict[str, Any] = {"train/global_step": record["step"]}
        for key, value in record.items():
            if isinstance(value, (int, float)) and key != "step":
                payload[key] = value
            elif key.endswith(("/hist", "/deferrals")) and value:  # wandb has no histogram of nothing
                payload[key] = self._wandb.Histogram(np_histogram=(value, [i - 0.5 for i in range(len(value) + 1)]))
        return payload

    def _mirror(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._run = None
            warnings.warn(f"wandb failed ({type(error).__name__}: {error}); the run goes on with {self.path} alone", stacklevel=3)


def may_be_nan(key: str, metrics: dict[str, Any]) -> bool:
    """Whether NaN at `key` says that there was nothing to average: a step without tokens, graders that failed, returns without variance."""
    if key.startswith("train/"):
        return metrics.get("train/tokens") == 0 or key == "train/explained_variance"
    return key.startswith(("rollout/reward_", "eval/"))


def read_metrics(path: Path) -> pd.DataFrame:
    """One row per step, sorted; of a step written twice (a resumed run repeats some) the last record. null becomes NaN.

    An unfinished last line is left out; any other line that is not a record raises ValueError with its number.
    """
    records = {r["step"]: {key: math.nan if value is None else value for key, value in r.items()} for r in read_lines(path)}
    return pd.DataFrame([records[step] for step in sorted(records)], columns=None if records else ["step"])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, each of which has a `step`.

    An unfinished last line is left out; any other line that is not such a record raises ValueError with its number.
    """
    records, lines = [], Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not _is_json(line):
            break
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int):
                raise TypeError("a step is a whole number")
            records.append(record)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number} is not a record of a run: {line[:60]!r}. Delete the line, or restore the file") from error
    return records


def metrics_table() -> str:
    """METRICS as a Markdown table, for docs/metrics.md."""
    rows = [("metric", "meaning", "TRL", "verl", "AReaL"), ("---",) * 5]
    rows += [(f"`{name}`", meaning.replace("|", r"\|"), *map(_code, peers)) for name, (meaning, *peers) in METRICS.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _code(name: str) -> str:
    name, space, note = name.partition(" (")
    return name if name == "-" else f"`{name}`{space}{note}"


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
