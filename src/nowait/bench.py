"""Measurements on this machine. Each returns one JSON-able dict; quote ratios of one call, since absolute times drift.

Progress goes to stderr. Blocks of the methods are interleaved, each block beginning with another method, and what is reported is the median
over blocks of ratios inside a block. `seeds` are those of the blocks.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from nowait import config as configs
from nowait.batch import Batch, Request
from nowait.config import Experiment
from nowait.runtime.device import event_loop
from nowait.runtime.timeline import Timeline

COUNTED_STEPS = 20  # of each block, after the first eta + 2
COMPARED = ("sync", "sync_colocated", "recompute", "loglinear")  # what the bench's ratios are made of
METHODS = (*COMPARED, "behave", "linear", "reuse")
COPIED = 64_000_000  # bytes of the copy that memory traffic is compared with
CLOCKS = ("measured", "wall")
STAGES = ("step", "generate", "prox_forward", "train", "sync", "reward")


def asynchronous(
    config: str = "a3po/setup1",
    scale: str = "cpu",
    clock: str = "measured",
    blocks: int = 3,
    overrides: list[str] | None = None,
    methods: tuple[str, ...] = METHODS,
    steps: int = COUNTED_STEPS,
) -> dict:
    """`training_times` of a config's methods, all with the same overrides."""
    return training_times({m: configs.load(config, scale=scale, method=m, overrides=overrides) for m in methods}, clock, blocks, steps)


def training_times(experiments: dict[str, Experiment], clock: str = "measured", blocks: int = 3, steps: int = COUNTED_STEPS) -> dict:
    """Seconds per training step of A-3PO against synchronous training, recomputation and whatever else is in `experiments`, without evaluation.

    measured: each call costs its processor time, devices never contend. wall: two worker processes, real seconds.
    sampler_s, update_s, forward_s are those of the asynchronous runs per step; synchronous_sampler_s waits for the longest response.
    overlap_efficiency = ideal over elapsed time of A-3PO's step; ideal is the busier device's decoding or updating by itself, in processor
    time with the other device at rest, so that on the wall clock contention counts as loss, like waiting and the transfer of weights.
    rows: per method seconds per step (median, and of each block), its own stages, busiest_s (work of its busier device, at most the step),
    and the tokens trained with staleness 0, 1, 2, ... with their mean. Raises ValueError for another clock, and unless the methods of
    `COMPARED` are there.
    """
    if missing := [m for m in COMPARED if m not in experiments]:
        raise ValueError(f"the bench compares {', '.join(COMPARED)}; add {', '.join(missing)}")
    facts, results, alone = interleaved(experiments, "loglinear", _block, clock, blocks, steps)
    return facts | _summary(results, [block["busiest"] for block in alone])


def interleaved(
    experiments: dict[str, Experiment], chosen: str, block: Callable[..., dict], clock: str, blocks: int, steps: int
) -> tuple[dict, dict[str, list[dict]], list[dict]]:
    """`block(experiment, clock, steps, seed)` of every experiment in turn: what was run, the results by name, and those of `chosen` in processor
    time. Raises ValueError for another clock.
    """
    if clock not in CLOCKS:
        raise ValueError(f"a bench has no clock {clock!r}; choose {' or '.join(CLOCKS)}")
    results, alone, names = {name: [] for name in experiments}, [], list(experiments)
    for number in range(blocks):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            results[name].append(block(experiments[name], clock, steps, number))
            say(f"block {number + 1} of {blocks}, {name}: {results[name][-1]['step']:.3f} s per step")
        alone.append(results[chosen][-1] if clock == "measured" else block(experiments[chosen], "measured", steps, number))
    ours = experiments[chosen]
    facts = {"config": ours.name, "scale": ours.scale, "clock": clock, "blocks": blocks, "seeds": list(range(blocks)), "counted_steps": steps}
    return facts, results, alone


def _block(experiment: Experiment, clock_name: str, steps: int, seed: int) -> dict:
    """Means per counted step of one short training."""
    skipped = experiment.schedule.max_staleness + 2
    rows, _ = short_training(experiment, clock_name, skipped + steps, seed)
    out = {name: statistics.fmean(row[f"time/{name}"] for row in rows[skipped:]) for name in STAGES}
    stages = out["generate"], out["train"] + out["prox_forward"]
    shared = any({"sampler", "learner"} <= set(hosted) for hosted in experiment.runtime.placement.values())
    return out | {"busiest": sum(stages) if shared else max(stages), "hist": added(row["stale/hist"] for row in rows[skipped:])}


def short_training(experiment: Experiment, clock_name: str, steps: int, seed: int) -> tuple[list[dict], Timeline]:
    """Metrics of every step and all calls of a training without evaluation; on the wall clock with a process for each device."""
    from nowait.training import make_clock, stream

    schedule = experiment.schedule.model_copy(update={"steps": steps, "eval_every": 0, "checkpoint_every": 0})
    runtime = experiment.runtime.model_copy(update={"clock": clock_name, "executor": "process" if clock_name == "wall" else "inline"})
    experiment, rows, timeline = experiment.model_copy(update={"schedule": schedule, "runtime": runtime}), [], Timeline()
    clock = make_clock(experiment)

    async def drive() -> None:
        with tempfile.TemporaryDirectory(prefix="nowait-") as snapshots:
            async for record in stream(experiment, seed, clock, timeline, snapshots=Path(snapshots)):
                rows.append(record.metrics)

    with asyncio.Runner(loop_factory=lambda: event_loop(clock)) as runner:
        runner.run(drive())
    return rows, timeline


def added(counts: Iterable[list[int]]) -> list[int]:
    """Counts of staleness 0, 1, 2, ... of several steps as those of one."""
    return [sum(column) for column in itertools.zip_longest(*counts, fillvalue=0)]


def _summary(results: dict[str, list[dict]], ideals: list[float]) -> dict:
    def median(ratio) -> float:
        return statistics.median(ratio({m: blocks[i] for m, blocks in results.items()}) for i in range(len(ideals)))

    rows = [_row(method, blocks) for method, blocks in results.items()]
    forward_over_update = median(lambda b: b["recompute"]["prox_forward"] / b["recompute"]["train"])
    return {
        "speedup_over_sync": median(lambda b: b["sync"]["step"] / b["loglinear"]["step"]),
        "speedup_over_sync_colocated": median(lambda b: b["sync_colocated"]["step"] / b["loglinear"]["step"]),
        "speedup_over_recompute": median(lambda b: b["recompute"]["step"] / b["loglinear"]["step"]),
        "forward_over_update": forward_over_update,
        "bound_over_recompute": 1 + forward_over_update,
        "overlap_efficiency": statistics.median(ideal / b["step"] for ideal, b in zip(ideals, results["loglinear"], strict=True)),
        "sampler_s": median(lambda b: b["loglinear"]["generate"]),
        "update_s": median(lambda b: b["loglinear"]["train"]),
        "forward_s": median(lambda b: b["recompute"]["prox_forward"]),
        "synchronous_sampler_s": median(lambda b: b["sync"]["generate"]),
        "sampler_over_update": median(lambda b: b["loglinear"]["generate"] / b["loglinear"]["train"]),
        "mean_staleness": next(row["mean_staleness"] for row in rows if row["method"] == "loglinear"),
        "rows": rows,
    }


def _row(method: str, blocks: list[dict]) -> dict:
    names = {"step": "seconds_per_step", "generate": "sampler_s", "train": "update_s", "prox_forward": "forward_s", "busiest": "busiest_s"}
    medians = {shown: statistics.median(b[name] for b in blocks) for name, shown in names.items()}
    staleness = added(b["hist"] for b in blocks)
    mean = sum(d * count for d, count in enumerate(staleness)) / sum(staleness)
    return {"method": method, **medians, "mean_staleness": mean, "staleness": staleness, "blocks": [b["step"] for b in blocks]}


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
            rates[name].append((lengths.sum() / ours(lengths), lengths.sum() / theirs(lengths)))
            say(f"block {block + 1} of {blocks}, {name}: {rates[name][-1][0]:.0f} against {rates[name][-1][1]:.0f} tokens/s")
    ratios = {name: statistics.median(a / b for a, b in pairs) for name, pairs in rates.items()}
    useful, generate = (statistics.median(pair[i] for pair in rates["ratio"]) for i in (0, 1))
    return {"useful_tokens_per_s": useful, "generate_tokens_per_s": generate, **ratios, "blocks": blocks, "tokens": int(tailed.sum())}


def _samplers():
    """Two functions from response lengths to seconds: the built-in sampler, and generate in batches of 128."""
    import torch
    from transformers import GenerationConfig

    from nowait.workers.models import load_policy
    from nowait.workers.sampler import HFSampler

    worker, model = HFSampler("asset:policy_small", slots=128, capacity=256), load_policy("asset:policy_small")
    worker.eos, model.generation_config.eos_token_id = np.array([], int), None
    prompts = np.random.default_rng(1).integers(0, 10, (512, 12)).astype(np.int32)

    def ours(lengths: np.ndarray) -> float:
        start, left = time.perf_counter(), len(lengths)
        worker.admit([Request(i, prompts[i], 1, int(length)) for i, length in enumerate(lengths)])
        while left:
            left -= int((worker.decode(8).finish > 0).sum())
        return time.perf_counter() - start

    def theirs(lengths: np.ndarray) -> float:
        start = time.perf_counter()
        for i in range(0, len(lengths), 128):
            longest = int(lengths[i : i + 128].max())
            plan = GenerationConfig(max_new_tokens=longest, do_sample=True, top_k=0, top_p=1.0, pad_token_id=0)
            ids = torch.from_numpy(prompts[i : i + len(lengths[i : i + 128])]).long()
            with torch.inference_mode():
                model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=plan)
        return time.perf_counter() - start

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
    pairs = [(_seconds(lambda: learner.logp(batch)), _interpolation(batch.logp_behav, theta, batch.version + 5)) for _ in range(blocks)]
    recompute, interpolate = (statistics.median(p[i] for p in pairs) for i in (0, 1))
    ratios = [a / b for a, b in pairs]
    rng, shape = np.random.default_rng(0), (1024, 1024)
    large = [-rng.exponential(1.0, shape).astype(np.float32) for _ in range(2)]
    version = rng.integers(0, 9, shape).astype(np.int32)
    seconds = statistics.median(_interpolation(*large, version) for _ in range(blocks))
    source, target = torch.rand(COPIED // 4), torch.empty(COPIED // 4)
    copy = statistics.median(_seconds(lambda: target.copy_(source)) for _ in range(blocks))
    moved = 16 * shape[0] * shape[1]
    small = {"recompute_s": recompute, "interpolate_s": interpolate, "ratio": statistics.median(ratios), "ratios": ratios}
    return {
        "config": experiment.name,
        "scale": experiment.scale,
        "cpu_model": small | {"tokens": int(batch.length.sum())},
        "paper_tensors": {"interpolate_s": seconds, "bytes": moved, "gb_per_s": moved / seconds / 1e9, "copy_gb_per_s": 2 * COPIED / copy / 1e9},
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


def _interpolation(behav: np.ndarray, theta: np.ndarray, version: np.ndarray) -> float:
    """Seconds of the anchor as the loss computes it: staleness, alpha, interpolation."""
    import torch

    from nowait.algorithms.proximal import alpha, interpolate, staleness

    a, b, v = (torch.from_numpy(x) for x in (behav, theta, version))
    newest = int(version.max())
    return _seconds(lambda: interpolate(a, b, alpha(staleness(newest, v))))


def _seconds(call, repeats: int = 5) -> float:
    """Median seconds of a call after a first one."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
