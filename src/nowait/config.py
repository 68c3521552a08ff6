"""Typed experiment settings. One YAML file per paper setup holds the paper's scale and a `scales:` block that overrides it.

Every field states its unit; sources of the values stand as comments in the YAML files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import reduce
from operator import attrgetter, getitem
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nowait.config_files import ConfigError, Layers, Problem, find, parse_overrides, read_whole
from nowait.config_rules import CUSTOM, METHODS, conflicts

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
AboveZero = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Own = Annotated[str, Field(pattern=r"^\w[\w.]*:\w+$")]  # module:function of the user's own code


class Model(BaseModel):
    """Base of all sections: unknown keys, infinities and NaN are errors, numbers are never read from strings."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class TaskConfig(Model):
    name: str = "arithmetic"  # embedded task, or module:function
    options: dict[str, float | int | str | bool] = {}  # parameters of the task, checked by the task itself


class ModelConfig(Model):
    path: str = "asset:policy_small"  # hub name, folder, asset:<name> of this package, gguf:<file>, gguf:<package>/<file>
    dtype: Literal["float32", "bfloat16"] = "float32"  # of forward and backward passes; the learner keeps its weights in float32
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: slower, less memory
    lora_rank: Annotated[int, Field(ge=0)] = 0  # of low-rank adapters in all linear layers but the head, trained instead of the weights; 0: off
    lora_alpha: Positive = 32  # adapters are scaled by lora_alpha / lora_rank


class SamplerConfig(Model):
    slots: Positive = 128  # sequences decoded together
    chunk: Positive = 8  # tokens per decode round and sequence
    temperature: AboveZero = 1.0  # the same temperature scales logp_theta
    top_p: float = 1.0  # training refuses anything but 1.0
    top_k: int = 0  # training refuses anything but 0 (off)
    max_prompt_tokens: Positive = 128  # rows with longer prompts are left out of training, and an error in evaluation
    max_new_tokens: Positive = 96  # longest response, in tokens
    engine: Literal["transformers", "vllm"] = "transformers"  # what decodes; vllm is an extra
    engine_options: dict[str, float | int | str | bool] = {}  # arguments of vLLM's LLM, as gpu_memory_utilization or tensor_parallel_size
    ranks: Positive = 1  # processes that share the requests and the slots, with an engine each


class RewardConfig(Model):
    path: str | None = None  # hub name, folder or asset:<name> of a causal model with one label, or module:function; None: the task's rule


class CriticConfig(Model):
    shared: bool = False  # a value head on the policy's own hidden states instead of a model of its own
    path: str | None = None  # where a separate critic starts; None: at the policy's weights
    lr: NonNegative | None = None  # Adam step size of the critic's own weights (the head, where it is shared); None: learner.lr


class LearnerConfig(Model):
    lr: NonNegative = 1e-4  # Adam step size, constant after warm-up
    warmup_steps: Annotated[int, Field(ge=0)] = 0  # training steps of linear warm-up from 0
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.999)  # of Adam's two running means, per optimiser step
    eps: AboveZero = 1e-8  # of Adam, in its denominator
    weight_decay: NonNegative = 0.0  # decoupled (AdamW), per unit of lr
    grad_clip: AboveZero = 1.0  # maximum global gradient norm
    epochs: Positive = 1  # passes over the batch per training step
    minibatches: Positive = 2  # optimiser steps per epoch
    micro_batch_tokens: Positive = 8192  # padded tokens per forward and backward pass: memory only
    logp_chunk_tokens: Positive = 512  # response tokens whose vocabulary logits exist at once, in four copies of float32 at most: memory only
    ranks: Positive = 1  # processes that share every batch, weights and optimiser state sharded over them


class AlgorithmConfig(Model):
    # what stands for log pi_prox: recompute, ppo and diagnostic by a forward pass, the others from behav and theta (loglinear: A-3PO)
    anchor: Literal["recompute", "loglinear", "linear", "behave", "reuse", "ppo", "diagnostic"] | Own = "loglinear"
    fresh: Literal["behave", "theta"] = "behave"  # anchor of tokens with staleness 0: alpha 1 (figures) or 0 (v3 text)
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2  # epsilon: r is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: AboveZero = 0.2  # the same, upper end
    behav_weight_cap: AboveZero | None = 5.0  # C on rho = prox/behav; None: no cap
    cap_mode: Literal["mask", "clamp"] = "mask"  # mask: tokens above C leave the loss; clamp: rho = min(rho, C)
    dual_clip: Annotated[float, Field(gt=1)] | None = None  # c > 1: lower bound -c*A for negative advantages
    advantage: Literal["group", "gae"] = "group"  # group: rewards relative to the other samples (GRPO); gae: by a critic (PPO)
    advantage_std: bool = True  # divide group-relative rewards by the group's standard deviation
    advantage_whiten: bool = True  # then normalise over the batch's tokens
    gamma: Fraction = 1.0  # discount per token
    lam: Fraction = 0.95  # of generalised advantage estimation: 0 trusts the critic, 1 the rewards
    value_clip: AboveZero | None = 0.2  # new values stay this close to those before the update; None: no clipping
    value_coef: NonNegative = 0.1  # weight of the value loss
    kl_coef: NonNegative = 0.0  # beta: reward minus beta times the KL to the initial policy, per token; 0: no reference model
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"  # of that KL per token: -x, x²/2, exp(x) - 1 - x with x = logp_ref - logp
    kl_target: AboveZero | None = None  # nats per response that an adaptive beta aims at; None: beta is fixed
    kl_horizon: Positive = 10_000  # responses over which the adaptive beta reacts


class OverlapConfig(Model):
    """Schedule kind overlapped (OPPO) only."""

    intra: bool = True  # frozen models read a response while it is written
    unit: Literal["chunk", "response"] = "chunk"  # what they are given meanwhile: every chunk, or responses that are complete
    inter: bool = True  # B + Δ requests in flight, the first B complete ones are trained, the others carried over
    rule: Literal["fixed", "slope", "algorithm1", "trend"] | Own = "slope"  # how Δ follows the reward
    delta: Annotated[int, Field(ge=0)] = 0  # Δ of the first step, in requests
    delta_min: Annotated[int, Field(ge=0)] = 0  # least Δ
    delta_max: Annotated[int, Field(ge=0)] = 0  # largest Δ; the slots must hold B + delta_max requests
    window: Annotated[int, Field(ge=2)] = 10  # training steps whose rewards decide
    chunk_candidates: list[Positive] = []  # tokens per decode round to be tried; empty: sampler.chunk always
    chunk_period: Positive = 50  # training steps between two trials


class ScheduleConfig(Model):
    # synchronous; colocated: every device samples, then trains; asynchronous: A-3PO's; overlapped: OPPO's
    kind: Literal["synchronous", "colocated", "asynchronous", "overlapped"] = "asynchronous"
    steps: Positive = 100  # training steps
    batch_size: Positive = 16  # requests (prompts) per training step
    group_size: Positive = 8  # samples per request
    max_staleness: Annotated[int, Field(ge=0)] = 4  # eta, in training steps; 0 is synchronous
    max_concurrent: Positive | None = None  # requests in flight at the sampler; None: twice what its slots hold
    order: Literal["strict", "completion"] = "strict"  # strict: every token has d <= eta; completion: first come, first trained, d unbounded
    eval_every: Annotated[int, Field(ge=0)] = 0  # training steps between evaluations; 0: never
    checkpoint_every: Annotated[int, Field(ge=0)] = 0  # training steps between checkpoints; 0: never


class EvaluationConfig(Model):
    prompts: Positive = 512  # fixed held-out prompts
    samples: Positive = 4  # responses per prompt at every evaluation
    slots: Positive = 128  # sequences decoded together
    temperature: AboveZero = 1.0  # of these responses
    max_new_tokens: Positive = 96  # longest of them, in tokens
    benchmarks: dict[str, TaskConfig] = {}  # further held-out sets (`prompts` rows at most), evaluated before the first and after the last step
    benchmark_samples: Positive = 1  # responses per prompt of these


class CostConfig(Model):
    """Seconds of the model clock for a real training, linear in tokens. Virtual: they order events, nothing more."""

    decode_step: NonNegative = 0.003  # seconds per decode step, whatever the number of rows
    decode_token: NonNegative = 2.5e-5  # seconds per generated token
    prefill_token: NonNegative = 1.0e-5  # seconds per token prefilled, on admission or after new weights
    forward_token: NonNegative = 2.0e-5  # seconds per prompt or response token of a log-prob forward
    update_token: NonNegative = 8.0e-5  # seconds per prompt or response token of an update, all epochs
    reward_token: NonNegative = 5.0e-5  # seconds per token that the reward model reads
    reference_token: NonNegative = 2.0e-5  # seconds per token that the reference model reads
    charge_forward: bool = False  # False: every anchor sees one timing, so that only the anchor differs


class RuntimeConfig(Model):
    executor: Literal["inline", "process", "ray"] = "inline"  # process, ray: each device is a process, or an actor, of its own
    ray_address: str | None = None  # of a running cluster, "auto" on one of its machines; None: a Ray of this machine
    clock: Literal["wall", "model", "measured"] = "model"  # model: virtual, repeats exactly; measured: virtual, each call's own processor time
    threads: Positive = 1  # torch threads per worker
    # device: the workers on it
    placement: dict[str, list[Literal["sampler", "learner", "reward", "reference"]]] = {"a": ["sampler"], "b": ["learner"]}
    gpus: dict[str, list[Annotated[int, Field(ge=0)]]] = {}  # indices of each device's GPUs; a device that is not named computes on the CPU
    costs: CostConfig = CostConfig()


class Experiment(Model):
    """A resolved experiment: what `runs.run` needs beside a seed."""

    name: str  # of the folder for its runs, e.g. a3po/setup1
    title: str = ""  # for figures, e.g. "0.15 M Qwen2 on chains of additions"
    scale: str = "own"  # label: which block of the file's `scales:` holds; chosen by load(..., scale=)
    method: str = "loglinear"  # label, a key of METHODS or "custom": what the settings are; chosen by load(..., method=)
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    sampler: SamplerConfig = SamplerConfig()
    reward: RewardConfig = RewardConfig()
    learner: LearnerConfig = LearnerConfig()
    critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    overlap: OverlapConfig = OverlapConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    def hosts(self, role: str) -> list[str]:
        """The devices that have a worker of this role."""
        return [device for device, hosted in self.runtime.placement.items() if role in hosted]

    def ranks(self, device: str) -> int:
        """Processes of a device."""
        return max([1, *(getattr(self, role).ranks for role in ("sampler", "learner") if role in self.runtime.placement[device])])

    @model_validator(mode="after")
    def _possible(self) -> Experiment:
        if problems := conflicts(self):
            raise ConfigError(problems)
        return self


def _fields(model: type[Model], prefix: str = "") -> Iterator[tuple[str, tuple[type[Model], str]]]:
    """Dotted names of all fields that are not sections, and where each is defined."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Model):
            yield from _fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, (model, name)


FIELDS = dict(_fields(Experiment))
KEYS = tuple(FIELDS)
LEAVES = {name for _, name in FIELDS.values()}


def _choose(group: str, blocks: Any, name: str, file: Path) -> dict[str, Any]:
    """Block `name` of the file's `scales` or `variants`."""
    blocks = blocks if isinstance(blocks, dict) else {}
    if isinstance(block := blocks.get(name), dict):
        return block
    known = [*(["paper"] if group == "scales" else []), *blocks]
    raise ConfigError([Problem(group, f"{name!r} is not one of this file's {group}", f"choose from: {', '.join(known) or 'none'}")], file)


def _resolve(document: dict[str, Any], file: Path, scale: str | None, overrides: Iterable[str], method: str | None, variant: str | None) -> Layers:
    base = {key: value for key, value in document.items() if key not in ("scales", "variants")}
    scales, variants = document.get("scales", {}), document.get("variants", {})
    if "scale" in base and scale not in (None, base["scale"]):
        raise ConfigError([Problem("scale", f"this file is already resolved at {base['scale']!r}", f"drop scale={scale!r} or load its source")], file)
    if scale is None:
        scale = base.get("scale", "cpu" if scales else "own")
    layers = Layers(LEAVES)
    layers.merge(base, "")
    if variant is not None:
        layers.merge(_choose("variants", variants, variant, file), f"variants.{variant}")
    if "scale" not in base and scale != "paper" and (scales or scale != "own"):
        layers.merge(_choose("scales", scales, scale, file), f"scales.{scale}")
    layers.data["scale"] = scale
    if method is not None:
        if method not in METHODS:
            near = "".join(f"did you mean {name}? " for name in get_close_matches(method, METHODS, 1))
            raise ConfigError([Problem("method", f"unknown method {method!r}", f"{near}choose one of {', '.join(METHODS)}")], file)
        for key, value in {**METHODS[method], "method": method}.items():
            layers.set(key, value, f"method {method}")
    for key, value in parse_overrides(overrides, file):
        if key in ("scale", "method"):
            raise ConfigError([Problem(key, "selects settings and cannot be overridden", f"ask load, or the command line, for {key} {value}")], file)
        layers.set(key, value, "override")
    return layers


def load(
    path: str | Path, scale: str | None = None, overrides: Iterable[str] | None = None, method: str | None = None, variant: str | None = None
) -> Experiment:
    """The experiment of a YAML file or shipped config (`a3po/setup1`), resolved: base <- variant <- scale <- METHODS[method] <- overrides.

    scale: a key of the file's `scales`, by default `cpu`; `paper` is the file's own setting, and `own` the label of a file without scales.
    overrides: `["learner.lr=1e-4", ...]`.
    Raises ConfigError, with file, key and remedy, for anything that cannot be run.
    """
    file = find(path)
    layers = _resolve(read_whole(file, LEAVES), file, scale, overrides or (), method, variant)
    try:
        experiment = Experiment.model_validate(layers.data)
    except ValidationError as error:
        raise ConfigError(map(layers.located, _explain(error, layers.data)), file) from None
    if problems := [*_task_problems(experiment), *_method_problems(experiment, method)]:
        raise ConfigError(map(layers.located, problems), file)
    return experiment.model_copy(update={"method": _fitting_method(experiment)})


def _method_problems(x: Experiment, method: str | None) -> Iterator[Problem]:
    """Settings that contradict the method that was asked for."""
    for key, meant in METHODS.get(method or "", {}).items():
        if (value := attrgetter(key)(x)) != meant:
            yield Problem(key, f"got {value!r}, but method {method} means {meant!r}", "drop it, or ask for another method")


def _fitting_method(x: Experiment) -> str:
    """The label in the settings where they are what it says, else the first method that they are, else custom."""
    return next((name for name in (x.method, *METHODS) if name in METHODS and not any(_method_problems(x, name))), CUSTOM)


REMEDIES = {  # by pydantic's error type, where its own message is not one
    "missing": "add what is missing",
    "float_type": "write a number, without quotes",
    "int_type": "write a whole number, without quotes",
    "string_type": "write text, in quotes if it looks like a number",
    "string_pattern_mismatch": "write module:function for your own",
    "tuple_type": "write a list",
    "dict_type": "write `key: value` lines",
    "model_type": "write `key: value` lines",
}


def _explain(error: ValidationError, data: Any, prefix: str = "") -> list[Problem]:
    """The problems that pydantic found in `data`; the several complaints about a value of a union type become one."""
    remedies: dict[tuple[str, str], list[str]] = {}
    for entry in error.errors(include_url=False):
        if isinstance(conflict := entry.get("ctx", {}).get("error"), ConfigError):
            return list(conflict.problems)
        kind, parts, value = entry["type"], [], data
        for part in entry["loc"]:
            if not isinstance(value, dict) or (part not in value and kind != "missing"):
                break  # an index, or the member of a union
            parts.append(str(part))
            value = value.get(part)
        key = ".".join(parts)
        if kind == "extra_forbidden":
            what, remedy = "unknown key", _suggest(key)
        else:
            what = "no value" if kind == "missing" and value is None else f"got {value!r}"
            remedy = REMEDIES.get(kind, entry["msg"][0].lower() + entry["msg"][1:])
        remedies.setdefault((prefix + key, what), []).append(remedy)
    return [Problem(key, what, " or ".join(dict.fromkeys(several))) for (key, what), several in remedies.items()]


def _suggest(key: str) -> str:
    """The key that was probably meant: of the same section, else of the same name elsewhere."""
    section, _, name = key.rpartition(".")
    prefix = f"{section}." if section else ""
    known_here = [known.removeprefix(prefix).split(".")[0] for known in KEYS if known.startswith(prefix)]
    siblings = list(dict.fromkeys(known_here + ([] if section else ["scales", "variants"])))
    if close := get_close_matches(name, siblings, 1):
        return f"did you mean {prefix}{close[0]}?"
    if close := get_close_matches(name, LEAVES, 1, cutoff=0.8):
        return f"did you mean {' or '.join(known for known in KEYS if known.rpartition('.')[2] == close[0])}?"
    return f"known here: {', '.join(siblings)}" if siblings else "remove it"


def _task_problems(experiment: Experiment) -> Iterator[Problem]:
    """Names and options of the task and the benchmarks, judged by the tasks themselves."""
    from nowait import tasks  # which imports this module

    named = {"task": experiment.task, **{f"evaluation.benchmarks.{name}": task for name, task in experiment.evaluation.benchmarks.items()}}
    for key, task in named.items():
        if ":" in task.name and not task.name.startswith(tasks.GYM):
            continue  # the user's own, whose module is imported when it trains
        by_rule = key != "task" or not experiment.reward.path or experiment.schedule.eval_every > 0
        try:
            if getattr(tasks.load(task), "reward_function", None) == "" and by_rule:
                what = f"task {task.name} has no rule that could score or evaluate"
                yield Problem(f"{key}.options", what, "set reward_function; or a reward.path, with schedule.eval_every=0")
        except ValidationError as error:
            yield from _explain(error, task.options, f"{key}.options.")
        except ValueError as error:
            part = "options" if task.name in tasks.BUILT_IN or ":" in task.name else "name"
            yield Problem(f"{key}.{part}", str(error), "correct or remove it")


def to_yaml(experiment: Experiment) -> str:
    """The resolved settings as a YAML file that `load` reads back to an equal experiment."""
    return yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False)


def digest(experiment: Experiment) -> str:
    """First 12 hexadecimal digits of the SHA-256 of the resolved settings as canonical JSON."""
    text = json.dumps(experiment.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def flat(experiment: Experiment) -> dict[str, Any]:
    """The settings by dotted key, as JSON has them; tables whose keys are the user's are whole."""
    document = experiment.model_dump(mode="json")
    return {key: reduce(getitem, key.split("."), document) for key in KEYS}


def diff(a: Experiment, b: Experiment) -> list[tuple[str, Any, Any]]:
    """(dotted key, value in a, value in b) where two experiments differ, sorted by key; None where a side lacks the key."""
    flat_a, flat_b = _flatten(a.model_dump(mode="json")), _flatten(b.model_dump(mode="json"))
    return [(key, flat_a.get(key), flat_b.get(key)) for key in sorted({**flat_a, **flat_b}) if flat_a.get(key) != flat_b.get(key)]


def _flatten(block: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in block.items():
        found |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found
