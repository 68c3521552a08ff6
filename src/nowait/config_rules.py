"""What cannot be run although each setting is valid, and what the methods of the papers' comparisons change. `x` is a config.Experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nowait.config_files import Problem

if TYPE_CHECKING:
    from nowait.config import Experiment

ASYNCHRONOUS = {"schedule.kind": "asynchronous"}
OVERLAPPED = {"schedule.kind": "overlapped"}
# What each method of the comparisons changes (A-3PO's, then OPPO's); everything else is equal by construction.
METHODS: dict[str, dict[str, object]] = {
    "sync": {"schedule.kind": "synchronous", "schedule.max_staleness": 0, "algorithm.anchor": "behave"},
    "sync_colocated": {
        "schedule.kind": "colocated",
        "schedule.max_staleness": 0,
        "algorithm.anchor": "behave",
        "runtime.placement": {"a": ["sampler", "learner"], "b": ["sampler", "learner"]},
        "sampler.ranks": 1,  # on two devices as it is
        "learner.ranks": 1,
    },
    "recompute": {**ASYNCHRONOUS, "algorithm.anchor": "recompute"},
    "loglinear": {**ASYNCHRONOUS, "algorithm.anchor": "loglinear"},
    "loglinear_theta": {**ASYNCHRONOUS, "algorithm.anchor": "loglinear", "algorithm.fresh": "theta"},
    "linear": {**ASYNCHRONOUS, "algorithm.anchor": "linear"},
    "behave": {**ASYNCHRONOUS, "algorithm.anchor": "behave"},
    "reuse": {**ASYNCHRONOUS, "algorithm.anchor": "reuse", "learner.minibatches": 1},
    "diagnostic": {**ASYNCHRONOUS, "algorithm.anchor": "diagnostic"},
    "sequential": {**OVERLAPPED, "overlap.intra": False, "overlap.inter": False},
    "intra": {**OVERLAPPED, "overlap.intra": True, "overlap.inter": False},
    "inter": {**OVERLAPPED, "overlap.intra": False, "overlap.inter": True},
    "both": {**OVERLAPPED, "overlap.intra": True, "overlap.inter": True},
}
SETTLED = {"model", "dtype", "seed", "logprobs_mode", "skip_tokenizer_init", "max_num_seqs", "max_model_len"}  # arguments of vLLM that we give
CUSTOM = "custom"  # label of settings that are none of these


def conflicts(x: Experiment) -> list[Problem]:
    """Settings that are each valid and cannot be run together."""
    slots, sequences = x.sampler.slots // x.sampler.ranks, x.schedule.batch_size * x.schedule.group_size
    updates = x.learner.minibatches * x.learner.epochs
    group, minibatches, reuse = x.schedule.group_size, x.learner.minibatches, x.algorithm.anchor == "reuse"
    unused, settled = bool(x.sampler.engine_options) and x.sampler.engine != "vllm", sorted(x.sampler.engine_options.keys() & SETTLED)
    full = "the learner scores tokens under the full softmax, so training samples from it"
    folders = "write words joined by /, as in my/setup1"
    alone, beta = group < 2 and x.algorithm.advantage == "group", x.algorithm.kl_coef
    gpus_of, devices = x.runtime.gpus, " or ".join(x.runtime.placement)
    strangers = [name for name in gpus_of if name not in x.runtime.placement]
    listed = all(gpus and len(set(gpus)) == len(gpus) for gpus in gpus_of.values())
    several = "learner.minibatches" if minibatches > 1 else "learner.epochs"
    one_step = "set learner.minibatches=1 and learner.epochs=1, or take another algorithm.anchor"
    rules = [
        (not _names_folders(x.name), "name", f"{x.name!r} cannot name a folder under runs/", folders),
        (not _names_folders(x.scale), "scale", f"{x.scale!r} cannot name a folder under runs/", folders),
        (x.method not in (*METHODS, CUSTOM), "method", f"unknown method {x.method!r}", f"choose one of {', '.join(METHODS)}"),
        (x.sampler.top_p != 1, "sampler.top_p", f"got {x.sampler.top_p:g}, but {full}", "set 1.0"),
        (x.sampler.top_k != 0, "sampler.top_k", f"got {x.sampler.top_k}, but {full}", "set 0"),
        (unused, "sampler.engine_options", f"engine {x.sampler.engine} has none", "set {}, or sampler.engine=vllm"),
        (bool(settled), "sampler.engine_options", f"{', '.join(settled)} follow from other settings", "drop them"),
        (alone, "schedule.group_size", "the group-relative reward of a single sample is always 0", "choose at least 2"),
        (group > slots, "schedule.group_size", f"{group} samples of a request exceed a sampler's {slots} slots", "lower it or raise sampler.slots"),
        (minibatches > sequences, "learner.minibatches", f"{minibatches} cannot be cut from {sequences} sequences", "lower it, or raise batch_size"),
        (reuse and updates > 1, several, f"anchor reuse allows one optimiser step per batch, not {updates}", one_step),
        (not beta and x.algorithm.kl_target is not None, "algorithm.kl_target", "an adaptive beta of 0 stays 0", "set kl_coef, or null"),
        ("driver" in x.runtime.placement, "runtime.placement", "driver is where rules are graded", "name the device otherwise"),
        (bool(strangers), "runtime.gpus", f"{', '.join(strangers)} is not among the devices of runtime.placement", f"name {devices}"),
        (not listed, "runtime.gpus", f"got {gpus_of}", "write [0] or [0, 1], each once"),
        ("eval" in x.evaluation.benchmarks, "evaluation.benchmarks", "eval is the name of the regular set", "choose another name"),
        *_rank_rules(x),
        *_schedule_rules(x),
    ]
    return [Problem(*rest) for broken, *rest in rules if broken]


def _names_folders(text: str) -> bool:
    """Whether a text is a path that stays below the folder it is appended to."""
    return all(part.strip(". ") and part.isprintable() and len(part) <= 100 for part in text.split("/"))


def _rank_rules(x: Experiment) -> list[tuple[bool, str, str, str]]:
    """(broken, key, what, remedy) of a sampler or a learner of several ranks."""
    ranks, executor = {"sampler": x.sampler.ranks, "learner": x.learner.ranks}, x.runtime.executor
    slots = f"{ranks['sampler']} ranks cannot share {x.sampler.slots} slots evenly"
    rules = [(x.sampler.slots % ranks["sampler"] > 0, "sampler.slots", slots, f"choose a multiple of {ranks['sampler']}")]
    for role, count in ranks.items():
        key = f"{role}.ranks"
        gpus = [len(x.runtime.gpus[device]) for device in x.hosts(role) if device in x.runtime.gpus]
        colocated = f"colocated training has a {role} on each of its two devices"
        rules += [
            (count > 1 and executor == "inline", key, f"{count} ranks need a process each", "set runtime.executor=process or ray, or 1 rank"),
            (count > 1 and x.schedule.kind == "colocated", key, colocated, "set 1"),
            *((have % count > 0, key, f"{count} ranks cannot share {have} GPUs evenly", "choose a divisor") for have in gpus),
        ]
    together = any({"sampler", "learner"} <= set(hosted) for hosted in x.runtime.placement.values())
    differ = f"the learner on the same device has {ranks['learner']} ranks"
    lonely = x.runtime.ray_address is not None and executor != "ray"
    return [
        *rules,
        (together and len(set(ranks.values())) > 1, "sampler.ranks", f"got {ranks['sampler']}, but {differ}", "make them equal"),
        (lonely, "runtime.ray_address", f"executor {executor} uses no Ray", "set runtime.executor=ray, or null"),
    ]


def _schedule_rules(x: Experiment) -> list[tuple[bool, str, str, str]]:
    """(broken, key, what, remedy) of what each kind of schedule needs."""
    kind, eta, anchor = x.schedule.kind, x.schedule.max_staleness, x.algorithm.anchor
    if kind == "overlapped":
        return _overlap_rules(x)
    frozen = [
        (x.reward.path is not None, "reward.path"),
        (x.algorithm.kl_coef > 0, "algorithm.kl_coef"),
        (x.algorithm.advantage == "gae", "algorithm.advantage"),
    ]
    overlapped = f"set schedule.kind=overlapped, as the methods {', '.join(m for m in METHODS if METHODS[m]['schedule.kind'] == 'overlapped')} do"
    misplaced = [(used, key, f"{kind} training has no reward model, reference or critic", overlapped) for used, key in frozen]
    devices, both = [sorted(workers) for workers in x.runtime.placement.values()], ["learner", "sampler"]
    if kind == "colocated":
        placed, wanted = devices == [both, both], "{a: [sampler, learner], b: [sampler, learner]}"
    else:
        placed, wanted = sorted(sum(devices, [])) == both, "{a: [sampler], b: [learner]}"
    placement = (not placed, "runtime.placement", f"{kind} training cannot run on {x.runtime.placement}", f"set {wanted}")
    if kind == "asynchronous":
        blocking = x.runtime.clock == "wall" and x.runtime.executor == "inline"
        overlaps = "inline calls block each other, so nothing would overlap on the wall clock"
        return [*misplaced, placement, (blocking, "runtime.executor", overlaps, "set process, or another runtime.clock")]
    forward = kind == "colocated" and anchor in ("recompute", "ppo", "diagnostic")
    interpolated = f"{anchor} interpolates by staleness, which is 0 in {kind} training"
    return [
        *misplaced,
        (eta > 0, "schedule.max_staleness", f"{kind} training has no stale tokens, so it cannot be {eta}", "set 0, or schedule.kind=asynchronous"),
        (anchor in ("loglinear", "linear"), "algorithm.anchor", interpolated, "take behave (as method sync does), recompute, reuse or ppo"),
        (forward, "algorithm.anchor", f"colocated training does not shard the forward pass that {anchor} needs", "take behave or reuse"),
        placement,
    ]


def most_overlapped(x: Experiment) -> int:
    """Requests that overlapped training holds at most."""
    return x.schedule.batch_size + (x.overlap.delta_max if x.overlap.inter else 0)


def check_rows(x: Experiment, rows: int) -> None:
    """Raise ValueError where a task has fewer training rows than a batch, or than overlapped training holds at once."""
    most, key = x.schedule.batch_size, "schedule.batch_size"
    if x.schedule.kind == "overlapped" and x.overlap.inter:
        most, key = most_overlapped(x), "schedule.batch_size + overlap.delta_max"
    if most > rows:
        raise ValueError(f"{key} is {most}, but the task has {rows} training rows, so that one would come twice at once: lower it, or take more rows")


def _overlap_rules(x: Experiment) -> list[tuple[bool, str, str, str]]:
    overlap, plan = x.overlap, x.schedule
    wanted = ["sampler", "learner", *(["reward"] if x.reward.path else []), *(["reference"] if x.algorithm.kl_coef else [])]
    placed = [role for hosted in x.runtime.placement.values() for role in hosted]
    wrong = ", ".join(role for role in wanted if placed.count(role) != 1)
    most = most_overlapped(x)
    order = overlap.delta_min <= overlap.delta <= overlap.delta_max
    blocking = x.runtime.clock == "wall" and x.runtime.executor == "inline" and overlap.intra
    ranks, slots = x.sampler.ranks, x.sampler.slots
    needed = -(-most // ranks) * plan.group_size * ranks  # a request stays whole on its rank
    evenly = f" of {ranks} ranks" if ranks > 1 else ""
    together = f"{most} requests in flight x {plan.group_size} samples need {needed} slots{evenly}, sampler.slots is {slots}"
    sizes = overlap.chunk_candidates
    trials = f"trying {len(sizes)} candidates twice takes longer than a period of {overlap.chunk_period} steps"
    return [
        (plan.max_staleness > 0, "schedule.max_staleness", "overlapped training bounds staleness by its deferrals", "set 0"),
        (bool(wrong), "runtime.placement", f"{wrong} must be on exactly one device", "set {a: [sampler, learner], b: [reward, reference]}"),
        (not order, "overlap.delta", f"{overlap.delta} is not within delta_min {overlap.delta_min} and delta_max {overlap.delta_max}", "change one"),
        (needed > slots, "sampler.slots", together, "raise sampler.slots, or lower overlap.delta_max"),
        (overlap.rule == "trend" and overlap.window < 3, "overlap.window", "a trend needs at least 3 rewards", "set 20 or more"),
        (len(sizes) == 1, "overlap.chunk_candidates", "one candidate leaves nothing to try", "write it to sampler.chunk, or name several"),
        (len(set(sizes)) < len(sizes), "overlap.chunk_candidates", f"{sizes} names a size twice", "name each once"),
        (2 * len(sizes) > overlap.chunk_period, "overlap.chunk_period", trials, "raise it, or name fewer"),
        (blocking, "runtime.executor", "inline calls block each other, so nothing would overlap on the wall clock", "set process, or another clock"),
    ]
