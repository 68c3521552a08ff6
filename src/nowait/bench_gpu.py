"""What one GPU does with models of real shapes: random weights, so that nothing is downloaded. On a CPU the same code runs with tiny shapes.

Times are medians of calls after a first one, each waited for. Needs 24 GB of GPU memory and 8 GB of disk for temporary checkpoints.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from nowait.batch import LENGTH, Batch, Request, Rollouts, Segments
from nowait.bench import interpolation_seconds, median_seconds, say, seconds, short_training

METHODS = ("sync", "recompute", "loglinear")
DTYPE = "bfloat16"
REPEATS = 5


@dataclass(frozen=True)
class Sizes:
    """Shapes of the models, and how much they are given to do."""

    small: dict
    large: dict
    vocabulary: int = 151_936
    prompt: int = 128
    response: int = 512
    sequences: int = 256  # decoded together, and trained per step
    forward: int = 64  # sequences of one log-prob forward pass
    chunk: int = 64  # tokens per decode round
    memory: tuple[int, int] = (16, 1024)  # sequences and tokens of the log-probs whose memory is measured
    trained_prompt: int = 512
    trained_response: int = 96
    steps: int = 3  # counted per method


def _shape(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads}
    return sizes | {"num_key_value_heads": kv_heads, "tie_word_embeddings": True, "max_position_embeddings": 2048}


REAL = Sizes(small=_shape(896, 4864, 24, 14, 2), large=_shape(1536, 8960, 28, 12, 2))  # Qwen2.5 0.5B and 1.5B
TINY = Sizes(
    small=_shape(32, 64, 2, 4, 2), large=_shape(64, 128, 3, 4, 2), vocabulary=512, prompt=8, response=16, sequences=8, forward=4,
    chunk=4, memory=(2, 16), trained_prompt=16, trained_response=8, steps=2,
)  # fmt: skip


@dataclass(frozen=True)
class FixedPrompts:
    """A task of equally long prompts; rewards are random, so that there is a gradient."""

    tokens: int

    def size(self, split: str) -> int:
        return 10_000

    def prompt(self, split: str, row: int) -> str:
        return f"{row:0{self.tokens}d}"

    def reward(self, split: str, row: int, response: str) -> float:
        return random.random()


def gpu(device: str = "cuda", tiny: bool = False, clock: str = "wall") -> dict:
    """Measure four things on one device.

    recompute: per model size the forward pass that recomputes the proximal policy of a batch, against interpolating it.
    overlap: a decode round of the small model beside a reward model of the large size that reads the round before, two threads on CUDA streams of
    their own, against one after the other; ideal is the longer one of the two.
    memory: bytes that log-probs of 16 x 1,024 tokens and their gradient take beyond what they start from; null on a CPU.
    steps: seconds per training step of each method, sampler and learner being processes that share the device; all responses equally long.
    Raises ValueError without a GPU, with a remedy, and where its memory is not enough.
    """
    import torch

    if device not in ("cuda", "cpu"):
        raise ValueError(f"bench gpu has no device {device!r}; choose cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("bench gpu finds no GPU (`nowait doctor` shows what there is); --device cpu runs the same code with tiny shapes")
    sizes, start = TINY if tiny or device == "cpu" else REAL, time.perf_counter()
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    found: dict = {"device": name, "torch": torch.__version__, "tiny": sizes is TINY}
    with tempfile.TemporaryDirectory(prefix="nowait-") as folder:
        try:
            say("writing models of random weights")
            paths = _models(sizes, Path(folder), device)
            for part, measure in (("recompute", _recompute), ("overlap", _overlap), ("memory", _memory), ("steps", partial(_steps, clock))):
                found[part] = measure(sizes, paths, device)
                say(f"{part}: {found[part]}")
                gc.collect()
                torch.cuda.empty_cache()
        except torch.OutOfMemoryError as error:
            raise ValueError(f"bench gpu needs 24 GB of free GPU memory: end what else uses {name}, or add --tiny. {error}") from error
    found["seconds"] = time.perf_counter() - start
    say(pd.json_normalize(found, sep=" ").T.to_string(header=False, float_format="{:.4g}".format))
    return found


def _models(sizes: Sizes, folder: Path, device: str) -> dict[str, str]:
    """Folders with a policy of each size and a reward model of the large one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

    from nowait.assets import character_tokenizer

    tokenizer = character_tokenizer()
    ids = {"vocab_size": sizes.vocabulary, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    policies = {"small": (AutoModelForCausalLM, sizes.small), "large": (AutoModelForCausalLM, sizes.large)}
    models = policies | {"reward": (AutoModelForSequenceClassification, sizes.large | {"num_labels": 1})}
    for name, (kind, shape) in models.items():
        with torch.device(device):
            model = kind.from_config(Qwen2Config(**shape, **ids), dtype=torch.bfloat16)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: str(folder / name) for name in models}


def _learner(path: str, sizes: Sizes, device: str):
    from nowait.config import AlgorithmConfig, LearnerConfig
    from nowait.workers.learner import HFLearner

    options = {"dtype": DTYPE, "gradient_checkpointing": True, "device": device}
    return HFLearner(path, LearnerConfig(), AlgorithmConfig(anchor="recompute"), temperature=1.0, seed=0, **options)


def _batch(sequences: int, prompt: int, response: int, vocabulary: int) -> Batch:
    """Random tokens, all of one length and age."""
    rng, rollouts, count = np.random.default_rng(0), Rollouts(1), sequences * response
    rollouts.admit([Request(i, rng.integers(0, vocabulary, prompt).astype(np.int32), 1, response) for i in range(sequences)])
    token, logp = rng.integers(0, vocabulary, count).astype(np.int32), np.full(count, -np.log(vocabulary), np.float32)
    finish = np.full(sequences, LENGTH, np.uint8)
    rollouts.add(Segments(np.arange(sequences), np.arange(sequences + 1) * response, token, logp, finish, 0))
    return rollouts.take(list(range(sequences)), 0)


def _recompute(sizes: Sizes, paths: dict[str, str], device: str) -> dict:
    batch, found = _batch(sizes.forward, sizes.prompt, sizes.response, sizes.vocabulary), {}
    for name in ("small", "large"):
        learner = _learner(paths[name], sizes, device)
        recompute = median_seconds(partial(learner.logp, batch), device)
        between = interpolation_seconds(batch.logp_behav, learner.logp(batch), batch.version, device)
        found[name] = {"recompute_s": recompute, "interpolate_s": between, "ratio": recompute / between, "tokens": int(batch.length.sum())}
        del learner
    return found


def _overlap(sizes: Sizes, paths: dict[str, str], device: str) -> dict:
    import torch

    from nowait.workers.sampler import HFSampler
    from nowait.workers.streamed import StreamedReward, load_reward

    rounds = 2 * REPEATS + 2
    space = {"dtype": DTYPE, "device": device, "slots": sizes.sequences, "capacity": sizes.prompt + rounds * sizes.chunk}
    sampler, reward = HFSampler(paths["small"], **space), load_reward(paths["reward"], paths["small"], n=1, **space)
    if not isinstance(reward, StreamedReward):
        raise RuntimeError("the reward model is not streamed here, as the warning above says; please report it with this output")
    sampler.eos = np.array([-1])  # every sequence goes on to the end
    prompts = np.random.default_rng(1).integers(0, 10, (sizes.sequences, sizes.prompt)).astype(np.int32)
    requests = [Request(i, prompt, 1, rounds * sizes.chunk) for i, prompt in enumerate(prompts)]
    sampler.admit(requests), reward.admit(requests)

    made = [sampler.decode(sizes.chunk)]  # rounds that the reward model has not read
    module = torch.get_device_module(device)
    streams = [module.stream(module.Stream()) for _ in range(2)]

    def decode() -> None:
        made.append(sampler.decode(sizes.chunk))

    def beside(stream, call: Callable[[], object]) -> None:
        with stream:
            call()

    def both() -> None:
        list(threads.map(beside, streams, [decode, partial(reward.prefill, made.pop())]))

    alone, together = [], []
    with ThreadPoolExecutor(2) as threads:
        both()  # warm-up, also of the streams' memory
        for _ in range(REPEATS):
            alone.append((seconds(decode, device), seconds(lambda: reward.prefill(made.pop(0)), device)))
            together.append(seconds(both, device))
    gains, ideal = [sum(a) / t for a, t in zip(alone, together, strict=True)], [sum(a) / max(a) for a in alone]
    decoding, reading = (statistics.median(column) for column in zip(*alone, strict=True))
    times = {"decode_s": decoding, "prefill_s": reading, "both_s": statistics.median(together)}
    return times | {"gain": statistics.median(gains), "ideal": statistics.median(ideal), "tokens": sizes.sequences * sizes.chunk}


def _memory(sizes: Sizes, paths: dict[str, str], device: str) -> dict:
    import torch

    learner, (sequences, tokens) = _learner(paths["small"], sizes, device), sizes.memory
    learner.model.requires_grad_(False)  # the gradient of the weights is the optimiser's memory
    batch = _batch(sequences, 1, tokens, sizes.vocabulary)
    states = torch.randn(sequences, 1 + tokens, sizes.small["hidden_size"], device=device, dtype=torch.bfloat16, requires_grad=True)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    def run() -> None:
        logp, _ = learner._logp(batch, states)
        logp.sum().backward()

    elapsed = seconds(run, device)
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else None
    return {"logits_bytes": 4 * sequences * tokens * sizes.vocabulary, "peak_bytes": peak, "seconds": elapsed}


EXPERIMENT = """
name: bench/gpu
task: {{name: "nowait.bench_gpu:FixedPrompts", options: {{tokens: {x.trained_prompt}}}}}
model: {{path: "{path}", dtype: bfloat16, gradient_checkpointing: true}}
sampler: {{slots: {x.sequences}, chunk: 32, max_prompt_tokens: {x.trained_prompt}, max_new_tokens: {x.trained_response}}}
learner: {{lr: 1.0e-6, minibatches: 2}}
schedule: {{batch_size: {batch}, group_size: 4, max_staleness: 1}}
runtime: {{gpus: {gpus}}}
"""


def _steps(clock: str, sizes: Sizes, paths: dict[str, str], device: str) -> dict:
    from nowait.config import load

    file, gpus = Path(paths["small"]) / "bench.yaml", "{a: [0], b: [0]}" if device == "cuda" else "{}"
    file.write_text(EXPERIMENT.format(x=sizes, path=paths["small"], batch=sizes.sequences // 4, gpus=gpus))
    times, skipped = {}, 3  # the limit of staleness, and two
    for method in METHODS:
        rows, _ = short_training(load(file, method=method), clock, skipped + sizes.steps, 0)
        times[method] = statistics.median(row["time/step"] for row in rows[skipped:])
        say(f"{method}: {times[method]:.3f} s per step")
    gains = {f"speedup_over_{method}": times[method] / times["loglinear"] for method in METHODS[:-1]}
    return {"seconds": times, **gains, "clock": clock}
