"""Measurements on this machine. Each returns one JSON-able dict; quote ratios of one call, since absolute times drift.

Progress goes to stderr. Blocks of the methods are interleaved, each block beginning with another method, and what is reported is the median
over blocks of ratios inside a block. `seeds` are those of the blocks.
"""

import itertools
import statistics
import sys
import timeit
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from nowait import config as configs
from nowait import runs, simulate
from nowait.batch import Batch, Request
from nowait.config import Experiment
from nowait.runtime.timeline import Timeline

COUNTED_STEPS = 20  # of each block, after the first eta + 2, or `SKIPPED`
SKIPPED = 4  # steps of a block of the overlapped schedule before it counts: until requests of several steps are in flight
COMPARED = simulate.METHODS["a3po"]  # what the bench's ratios are made of
METHODS = (*COMPARED, "behave", "linear", "reuse")
VARIANTS = {  # of OPPO: method, and the share of B in requests that is overcommitted
    "sequential": ("sequential", 0.0),
    "intra": ("intra", 0.0),
    "inter": ("inter", 0.31),
    "both": ("both", 0.31),
    "inter_paper": ("inter", 0.07),
    "both_paper": ("both", 0.07),  # of the paper's fixed degrees, 4 and 8 of 112, the larger
}
COPIED = 64_000_000  # bytes of the copy that memory traffic is compared with
CLOCKS = ("measured", "wall")
STAGES = {"step": "step", "generate": "generate", "reward": "reward", "reference": "ref", "forward": "prox_forward", "train": "train"}


def asynchronous(config: str = "a3po/setup1", scale: str = "cpu", clock: str = "measured", blocks: int = 3) -> dict:
    """`step_times` of a config's methods."""
    return step_times({m: configs.load(config, scale, method=m) for m in METHODS}, clock, blocks)


def overlap(config: str = "oppo/stackexchange_7b", scale: str = "cpu", clock: str = "measured", blocks: int = 3) -> dict:
    """`step_times` of a config's variants with a fixed Δ each."""
    return step_times(variants(lambda method, more: configs.load(config, scale, more, method)), clock, blocks)


def variants(load: Callable[[str, list[str]], Experiment]) -> dict[str, Experiment]:
    """The experiments of `VARIANTS`; load(method, overrides) makes one."""
    batch, made = load("sequential", []).schedule.batch_size, {}
    for name, (method, share) in VARIANTS.items():
        degree = max(1, round(share * batch)) if share else 0
        fixed = [f"overlap.{key}={degree}" for key in ("delta", "delta_min", "delta_max")]
        made[name] = load(method, ["overlap.rule=fixed", "overlap.chunk_candidates=[]", *fixed, f"sampler.slots={batch + degree}"])
    return made


def step_times(experiments: dict[str, Experiment], clock: str = "measured", blocks: int = 3, steps: int = COUNTED_STEPS) -> dict:
    """Seconds per training step, without evaluation, of A-3PO's methods or of OPPO's variants: medians over blocks, of ratios inside a block.

    measured: each call costs its processor time, devices never contend. wall: a process per device, real seconds.
    overlap_efficiency = ideal over elapsed time of the paper's own method; ideal is the work of its busiest device (A-3PO: decoding or updating)
    by itself, in processor time with the other device at rest, so that on the wall clock contention counts as loss, like waiting and the transfer
    of weights. rows: per method seconds per step (median, and of each block) and its own stages.

    A-3PO: sampler_s, update_s, forward_s are those of the asynchronous runs per step; synchronous_sampler_s waits for the longest response. rows
    have busiest_s (work of the busier device, at most the step) and the tokens trained with staleness 0, 1, 2, ... with their mean.
    OPPO: utilisation is the busy share of the devices, mean; one decoding row counts as busy, so occupancy (live sequences over those that were let
    in, mean over decode steps) stands beside it. overcommit_share: Δ / B, at the top that of `both`.
    Raises ValueError for another clock, and unless the paper's methods are there.
    """
    overlapped = next(iter(experiments.values())).schedule.kind == "overlapped"
    compared = simulate.METHODS["oppo" if overlapped else "a3po"]
    if missing := [m for m in compared if m not in experiments]:
        raise ValueError(f"the bench compares {', '.join(compared)}; add {', '.join(missing)}")
    if clock not in CLOCKS:
        raise ValueError(f"a bench has no clock {clock!r}; choose {' or '.join(CLOCKS)}")
    results, ideals, names, ours = {name: [] for name in experiments}, [], list(experiments), compared[-1]
    for number in range(blocks):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            results[name].append(_block(experiments[name], clock, steps, number))
            say(f"block {number + 1} of {blocks}, {name}: {results[name][-1]['step']:.3f} s per step")
        alone = results[ours][-1] if clock == "measured" else _block(experiments[ours], "measured", steps, number)
        ideals.append(alone["busiest"])
    facts = {"config": experiments[ours].name, "scale": experiments[ours].scale, "clock": clock, "blocks": blocks}
    facts |= {"seeds": list(range(blocks)), "counted_steps": steps}
    facts["overlap_efficiency"] = statistics.median(ideal / block["step"] for ideal, block in zip(ideals, results[ours], strict=True))
    return facts | (_oppo(experiments, results) if overlapped else _a3po(results))


def _block(experiment: Experiment, clock: str, steps: int, seed: int) -> dict:
    """Means per counted step of one short training."""
    overlapped = experiment.schedule.kind == "overlapped"
    skipped = SKIPPED if overlapped else experiment.schedule.max_staleness + 2
    rows, timeline = short_training(experiment, clock, skipped + steps, seed)
    counted = rows[skipped:]
    out = {name: statistics.fmean(row.get(f"time/{key}", 0.0) for row in counted) for name, key in STAGES.items()}
    if not overlapped:
        stages = out["generate"], out["train"] + out["forward"]
        shared = any({"sampler", "learner"} <= set(hosted) for hosted in experiment.runtime.placement.values())
        return out | {"busiest": sum(stages) if shared else max(stages), "hist": added(row["stale/hist"] for row in counted)}
    work: dict[str, float] = defaultdict(float)
    for span in timeline.spans:
        if span.step >= skipped and span.device != "driver":
            work[span.device] += (span.end - span.start) / steps
    occupancy = statistics.fmean(row["perf/occupancy"] for row in counted)
    return out | {"busiest": max(work.values()), "utilisation": sum(work.values()) / len(work) / out["step"], "occupancy": occupancy}


def short_training(experiment: Experiment, clock_name: str, steps: int, seed: int) -> tuple[list[dict], Timeline]:
    """Metrics of every step and all calls of a training without evaluation; on the wall clock with a process for each device."""
    schedule = experiment.schedule.model_copy(update={"steps": steps, "eval_every": 0, "checkpoint_every": 0})
    runtime = experiment.runtime.model_copy(update={"clock": clock_name, "executor": "process" if clock_name == "wall" else "inline"})
    timeline = Timeline()
    training = runs.steps(experiment.model_copy(update={"schedule": schedule, "runtime": runtime}), seed, timeline=timeline)
    return [record.metrics for record in training], timeline


def added(counts: Iterable[list[int]]) -> list[int]:
    """Counts of staleness 0, 1, 2, ... of several steps as those of one."""
    return [sum(column) for column in itertools.zip_longest(*counts, fillvalue=0)]


def _a3po(results: dict[str, list[dict]]) -> dict:
    names, rows = {"generate": "sampler_s", "train": "update_s", "forward": "forward_s", "busiest": "busiest_s"}, {}
    for method, several in results.items():
        staleness = added(block["hist"] for block in several)
        mean = sum(d * count for d, count in enumerate(staleness)) / sum(staleness)
        rows[method] = {"method": method, **_row(several, names), "mean_staleness": mean, "staleness": staleness}
    forward_over_update = _ratio(results, "recompute", "forward", "recompute", "train")
    return {
        **{f"speedup_over_{name}": _ratio(results, name, "step", "loglinear", "step") for name in COMPARED[:-1]},
        "forward_over_update": forward_over_update,
        "bound_over_recompute": 1 + forward_over_update,
        "sampler_s": rows["loglinear"]["sampler_s"],
        "update_s": rows["loglinear"]["update_s"],
        "forward_s": rows["recompute"]["forward_s"],
        "synchronous_sampler_s": rows["sync"]["sampler_s"],
        "sampler_over_update": _ratio(results, "loglinear", "generate", "loglinear", "train"),
        "mean_staleness": rows["loglinear"]["mean_staleness"],
        "rows": list(rows.values()),
    }


def _oppo(experiments: dict[str, Experiment], results: dict[str, list[dict]]) -> dict:
    names, rows = {name: name for name in (*list(STAGES)[1:], "utilisation", "occupancy")}, {}
    for name, several in results.items():
        experiment = experiments[name]
        share = experiment.overlap.delta / experiment.schedule.batch_size if experiment.overlap.inter else 0.0
        rows[name] = {"variant": name, "speedup": _ratio(results, "sequential", "step", name, "step"), "overcommit_share": share}
        rows[name] |= _row(several, names)
    return {
        **{f"speedup_{name}": rows[name]["speedup"] for name in ("both", "intra", "inter")},
        **{f"{name}_gain": _ratio(results, "both", name, "sequential", name) for name in ("utilisation", "occupancy")},
        "overcommit_share": rows["both"]["overcommit_share"],
        "rows": list(rows.values()),
    }


def _row(several: list[dict], names: dict[str, str]) -> dict[str, Any]:
    """Medians over blocks under the names that they are shown by, and the seconds per step of each block."""
    medians = {shown: statistics.median(block[name] for block in several) for name, shown in {"step": "seconds_per_step", **names}.items()}
    return medians | {"blocks": [block["step"] for block in several]}


def _ratio(results: dict[str, list[dict]], one: str, quantity: str, other: str, over: str) -> float:
    """Median over blocks of a quantity of one method over one of another."""
    return statistics.median(a[quantity] / b[over] for a, b in zip(results[one], results[other], strict=True))


def sampler(blocks: int = 3) -> dict:
    """Useful tokens per second of the built-in sampler over those of `model.generate`, which pads each batch to its longest response.

    512 requests of one sample through 128 slots, response lengths log-normal with median 15, cut at 200 (end-of-sequence switched off on
    both sides); four batches of 128 for generate, which does not have to return log-probs. Also a single batch, and equal lengths.
    """
    rng = np.random.default_rng(0)
    tailed = np.clip(np.round(rng.lognormal(np.log(15), 1.0, 512)), 1, 200).astype(int)
    cases = {"ratio": tailed, "ratio_single_batch": tailed[:128], "ratio_equal_lengths": np.full(512, 32)}
    ours, theirs = _samplers()
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    ours(cases["ratio_single_batch"]), theirs(cases["ratio_single_batch"])  # warm-up
    for block in range(blocks):
        for name, lengths in cases.items():
            rates[name].append(tuple(lengths.sum() / seconds(partial(sample, lengths)) for sample in (ours, theirs)))
            say(f"block {block + 1} of {blocks}, {name}: {rates[name][-1][0]:.0f} against {rates[name][-1][1]:.0f} tokens/s")
    ratios = {name: statistics.median(a / b for a, b in pairs) for name, pairs in rates.items()}
    useful, generate = (statistics.median(pair[i] for pair in rates["ratio"]) for i in (0, 1))
    return {"useful_tokens_per_s": useful, "generate_tokens_per_s": generate, **ratios, "blocks": blocks, "tokens": int(tailed.sum())}


def _samplers():
    """Two functions that sample responses of given lengths: the built-in sampler, and generate in batches of 128."""
    import torch
    from transformers import GenerationConfig

    from nowait.workers.models import load_policy
    from nowait.workers.sampler import HFSampler, generate

    worker, model = HFSampler("asset:policy_small", slots=128, capacity=256), load_policy("asset:policy_small")
    worker.eos, model.generation_config.eos_token_id = np.array([], int), None
    prompts = np.random.default_rng(1).integers(0, 10, (512, 12)).astype(np.int32)

    def ours(lengths: np.ndarray) -> None:
        generate(worker, [Request(i, prompts[i], 1, int(length)) for i, length in enumerate(lengths)])

    def theirs(lengths: np.ndarray) -> None:
        for i in range(0, len(lengths), 128):
            batch = lengths[i : i + 128]
            plan = GenerationConfig(max_new_tokens=int(batch.max()), do_sample=True, top_k=0, top_p=1.0, pad_token_id=0)
            ids = torch.from_numpy(prompts[i : i + len(batch)]).long()
            with torch.inference_mode():
                model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=plan)

    return ours, theirs


def proximal(config: str = "a3po/setup1", scale: str = "cpu", blocks: int = 5) -> dict:
    """`proximal_cost` of a config's training batch."""
    return proximal_cost(configs.load(config, scale=scale), blocks)


def proximal_cost(experiment: Experiment, blocks: int = 5) -> dict:
    """What the proximal policy costs: a forward pass over a training batch against the interpolation on the same batch.

    cpu_model: medians over blocks, `ratios` of each block and their median. paper_tensors: interpolation on 1,024 x 1,024 tokens; `bytes` is
    what it must move at least (three inputs, one output), copy_gb_per_s what a plain copy of 64 MB, more than caches hold, reaches here.
    """
    import torch

    from nowait.workers.learner import HFLearner

    torch.set_num_threads(1)
    batch = _one_batch(experiment)
    model, temperature = {"path": experiment.model.path, "dtype": experiment.model.dtype}, experiment.sampler.temperature
    learner = HFLearner(**model, learner=experiment.learner, algorithm=experiment.algorithm, temperature=temperature, seed=0)
    theta = learner.logp(batch)
    pairs = [(median_seconds(lambda: learner.logp(batch)), interpolation_seconds(batch.logp_behav, theta, batch.version)) for _ in range(blocks)]
    recompute, interpolate = (statistics.median(p[i] for p in pairs) for i in (0, 1))
    ratios = [a / b for a, b in pairs]
    rng, shape = np.random.default_rng(0), (1024, 1024)
    large = [-rng.exponential(1.0, shape).astype(np.float32) for _ in range(2)]
    version = rng.integers(0, 9, shape).astype(np.int32)
    between = statistics.median(interpolation_seconds(*large, version) for _ in range(blocks))
    source, target = torch.rand(COPIED // 4), torch.empty(COPIED // 4)
    copy = statistics.median(median_seconds(lambda: target.copy_(source)) for _ in range(blocks))
    moved = 16 * shape[0] * shape[1]
    small = {"recompute_s": recompute, "interpolate_s": interpolate, "ratio": statistics.median(ratios), "ratios": ratios}
    return {
        "config": experiment.name,
        "scale": experiment.scale,
        "cpu_model": small | {"tokens": int(batch.length.sum())},
        "paper_tensors": {"interpolate_s": between, "bytes": moved, "gb_per_s": moved / between / 1e9, "copy_gb_per_s": 2 * COPIED / copy / 1e9},
        "blocks": blocks,
        "seeds": [0] * blocks,  # every block times the same batch
    }


def _one_batch(experiment: Experiment) -> Batch:
    """The first training batch, as the sampler gives it."""
    from nowait import tasks
    from nowait.tasks.prompts import Prompts
    from nowait.training import load_tokenizer
    from nowait.workers.sampler import HFSampler, generate

    sampling, n = experiment.sampler, experiment.schedule.group_size
    encode = load_tokenizer(experiment.model.path)[0]
    lengths = {"max_prompt_tokens": sampling.max_prompt_tokens, "max_new_tokens": sampling.max_new_tokens}
    requests = Prompts(tasks.load(experiment.task), encode, seed=0, n=n, **lengths).next(experiment.schedule.batch_size)
    model = {"path": experiment.model.path, "dtype": experiment.model.dtype, "temperature": sampling.temperature}
    return generate(HFSampler(**model, slots=sampling.slots, capacity=sum(lengths.values())), requests, sampling.chunk)


def interpolation_seconds(behav: np.ndarray, theta: np.ndarray, version: np.ndarray, device: str = "cpu") -> float:
    """Seconds of the anchor as the loss computes it: staleness, alpha, interpolation."""
    from nowait.algorithms.proximal import alpha, interpolate, staleness
    from nowait.workers.models import on

    a, b, v = (on(device, x) for x in (behav, theta, version))
    newest = int(version.max())
    return median_seconds(lambda: interpolate(a, b, alpha(staleness(newest, v))), device)


def median_seconds(call: Callable[[], Any], device: str = "cpu") -> float:
    """Median seconds of five calls after a first one."""
    return statistics.median([seconds(call, device) for _ in range(6)][1:])


def seconds(call: Callable[[], Any], device: str = "cpu") -> float:
    """Seconds of one call, until the device has done its work."""
    import torch

    wait = torch.get_device_module(device).synchronize
    return timeit.timeit(lambda: (call(), wait()), wait, number=1)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
