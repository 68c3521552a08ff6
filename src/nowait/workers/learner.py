"""Learner: log-probs and updates of a Hugging Face causal LM. All maths of a training step runs on the whole batch before it is split.

Shape legend: S sequences of a batch, T longest response, W longest prompt and response, N response tokens of a micro-batch, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint

from nowait.algorithms.advantages import group_relative, token_rewards, whiten
from nowait.algorithms.kl import adapted_kl_coef, kl_clamped, kl_estimate
from nowait.algorithms.losses import decoupled_ppo_loss, finish_stats, merge_stats, ppo_loss
from nowait.algorithms.proximal import alpha, interpolate, staleness
from nowait.batch import Batch, Weights, length_groups
from nowait.config import AlgorithmConfig, LearnerConfig
from nowait.runtime.device import resolve
from nowait.workers import lora
from nowait.workers.models import checkpoint_layers, hidden_states, load_policy, on

STREAM = 101  # of the random numbers that order minibatches
SNAPSHOTS_KEPT = 4  # files of published weights; a sampler reads at most the last two


class HFLearner:
    """GRPO with a choice of anchors. Weights of version k are those after k training steps."""

    def __init__(
        self,
        path: str,
        learner: LearnerConfig,
        algorithm: AlgorithmConfig,
        *,
        temperature: float,
        seed: int,
        dtype: str = "float32",
        threads: int = 1,
        device: str = "cpu",
        gradient_checkpointing: bool = False,
        lora_rank: int = 0,
        lora_alpha: int = 32,
        snapshots: str | None = None,
    ) -> None:
        # what is trained is float32 also for bfloat16, whose steps are too coarse for small updates
        self.model = load_policy(path, dtype if lora_rank else "float32", threads, device)
        self._mixed, self._published, self._adapted = dtype == "bfloat16", getattr(torch, dtype), lora_rank > 0
        if lora_rank:
            lora.add(self.model, lora_rank, lora_alpha, seed)
        if gradient_checkpointing:
            checkpoint_layers(self.model)
        self.config, self.algorithm, self.temperature, self.seed = learner, algorithm, temperature, seed
        self.version, self.kl_coef = 0, algorithm.kl_coef
        self._train({"model": self.model})
        self._snapshots = Path(tempfile.mkdtemp(dir=snapshots)) if snapshots else None
        self._step: _Step | None = None

    def _train(self, modules: dict[str, torch.nn.Module], rates: dict[str, float] | None = None) -> None:
        """Make these the modules that updates change and that states hold; `rates` are the learning rates that are not the policy's."""
        self._trained, c = modules, self.config
        own = {key: list(_trainable(module).values()) for key, module in modules.items()}
        self._parameters = [p for several in own.values() for p in several]
        groups = [{"params": several, "full_lr": (rates or {}).get(name, c.lr)} for name, several in own.items()]
        self._optimizer = torch.optim.AdamW(groups, c.lr, c.betas, c.eps, weight_decay=c.weight_decay)

    def logp(self, batch: Batch) -> np.ndarray:
        """Log-probs [S, T] of the response tokens under the current weights; 0 on padding."""
        (logp,) = self._read(batch, lambda part: self._logp(part, self._states(self.model, part), with_entropy=False)[:1])
        return logp

    @torch.no_grad()
    def _read(self, batch: Batch, read: Callable[[Batch], Sequence[torch.Tensor]]) -> list[np.ndarray]:
        """What `read` finds in every micro-batch, a value per token [rows, T] or per sequence [rows], for the whole batch; 0 on padding."""
        found: list[np.ndarray] = []
        for rows, counts in self._passes(batch, np.arange(len(batch))):
            columns = read(part := batch.rows(rows))
            found = found or [np.zeros(batch.token.shape[: column.ndim], np.float32) for column in columns]
            for whole, column in zip(found, columns, strict=True):
                if counts:
                    whole[(rows, slice(part.token.shape[1]))[: column.ndim]] = column.cpu().numpy()
        return found

    def update(self, batch: Batch, logp_prox: np.ndarray | None = None) -> dict[str, float]:
        """One training step: advantages, then epochs of minibatches, one optimiser step each. Raises FloatingPointError on NaN, naming the step.

        `logp_prox` [S, T] are the log-probs before this step, where the anchor recomputes them. Returns the statistics of the step.
        """
        for minibatch in range(self.prepare(batch, logp_prox)):
            self._optimise(self._backward(minibatch))
        return self.finish()

    def prepare(self, batch: Batch, logp_prox: np.ndarray | None = None) -> int:
        if batch.step != self.version:
            raise ValueError(f"the batch is for step {batch.step}, the learner has finished {self.version}")
        with self._naming_step():
            rewards, divergence = self._rewards(batch, logp_prox)
            columns, mask = self._targets(batch, rewards), torch.from_numpy(batch.mask)
            if self.algorithm.advantage_whiten:
                columns["advantages"] = whiten(columns["advantages"], mask)
        if logp_prox is not None:
            columns["logp_prox"] = torch.from_numpy(logp_prox)
        self._step = _Step(batch, columns, divergence, self._minibatches(batch))
        warmed = min(1.0, self.version / self.config.warmup_steps) if self.config.warmup_steps else 1.0
        for group in self._optimizer.param_groups:
            group["lr"] = group["full_lr"] * warmed
        return len(self._step.minibatches)

    def gradient(self, minibatch: int, rank: int = 0, ranks: int = 1) -> tuple[np.ndarray, dict]:
        """This rank's share of a minibatch's gradient (flat) and of its statistics; the shares of all ranks add up."""
        stats = self._backward(minibatch, rank, ranks)
        return torch.cat([p.grad.reshape(-1) for p in self._parameters]).cpu().numpy(), stats

    def apply(self, shares: list[tuple[np.ndarray, dict]]) -> None:
        """Add up the ranks' gradients, clip, and step the optimiser."""
        total = torch.from_numpy(np.sum([g for g, _ in shares], 0))
        for parameter, gradient in zip(self._parameters, total.split([p.numel() for p in self._parameters]), strict=True):
            parameter.grad = gradient.view_as(parameter).to(parameter)
        self._optimise(merge_stats([s for _, s in shares]))

    def _backward(self, minibatch: int, rank: int = 0, ranks: int = 1) -> dict:
        """Leave this rank's share of a minibatch's gradient in the parameters; returns its statistics, on the CPU."""
        step = self._step
        rows = step.minibatches[minibatch]
        denominator = int(step.batch.mask[rows].sum())
        self._optimizer.zero_grad(set_to_none=True)
        stats = []
        for share, counts in self._passes(step.batch, rows[rank::ranks]):
            part, columns = step.cut(share, self.model.device)
            with self._naming_step():
                loss, statistics = self._loss(replace(part, keep=part.keep & counts), columns, denominator)
            loss.backward()
            stats.append(statistics)
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return {name: value.cpu() for name, value in merge_stats(stats).items()}

    def _optimise(self, stats: dict) -> None:
        norm = float(self._whole(torch.nn.utils.clip_grad_norm_(self._parameters, self.config.grad_clip)))
        if not math.isfinite(norm):
            raise FloatingPointError(f"step {self.version}: the gradient norm is {norm}")
        self._optimizer.step()
        self._step.stats.append(stats)
        self._step.norms.append(norm)

    def finish(self) -> dict[str, float]:
        """End the step, adapt beta to its KL, and return statistics."""
        step, self._step = self._step, None
        self.version += 1
        responses, a = int(step.batch.keep.sum()), self.algorithm
        if a.kl_target is not None and responses and step.divergence:
            self.kl_coef = adapted_kl_coef(self.kl_coef, step.divergence["kl"], target=a.kl_target, horizon=a.kl_horizon, responses=responses)
        sums = merge_stats(step.stats)
        stats = finish_stats(sums)
        for name, total in sums.items():
            if name.startswith(("entropy", "prox_abs_error/")):
                stats[name.removesuffix("_sum")] = float(total) / stats["tokens"] if stats["tokens"] else float("nan")
        if sums.get("fresh_tokens_sum", 0):
            stats["sampler_gap"] = float(sums["sampler_gap_sum"] / sums["fresh_tokens_sum"])
        return stats | step.divergence | {"grad_norm": float(np.mean(step.norms)), "lr": self._optimizer.param_groups[0]["lr"]}

    def publish(self) -> Weights:
        """A snapshot of what training has changed: tensors, or a safetensors file where the sampler lives in another process."""
        changed = lora.merged(self.model) if self._adapted else dict(self.model.named_parameters())
        tensors = {name: self._whole(p.detach().to(self._published, copy=True)) for name, p in changed.items()}
        if self._snapshots is None:
            return Weights(self.version, tensors)
        path = self._snapshots / f"{self.version}.safetensors"
        save_file(tensors, path)
        (self._snapshots / f"{self.version - SNAPSHOTS_KEPT}.safetensors").unlink(missing_ok=True)
        return Weights(self.version, str(path))

    def get_state(self) -> dict:
        """A snapshot of trained weights, optimiser moments, beta and version, as arrays and numbers."""
        weights = {key: {name: self._array(p) for name, p in _trainable(module).items()} for key, module in self._trained.items()}
        moments = self._optimizer.state_dict()["state"]
        adam = {str(i): {k: self._array(v) for k, v in values.items()} for i, values in moments.items()}
        return {"version": self.version, "kl_coef": self.kl_coef, **weights, "adam": adam}

    @torch.no_grad()
    def set_state(self, state: dict) -> None:
        self.version, self.kl_coef = state["version"], state["kl_coef"]
        for key, module in self._trained.items():
            for name, parameter in _trainable(module).items():
                parameter.copy_(self._placed(state[key][name], parameter))
        adam = {int(i): {k: self._placed(np.array(v), self._parameters[int(i)]) for k, v in values.items()} for i, values in state["adam"].items()}
        self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": adam})

    def save(self, folder: str) -> None:
        """Write the policy as a Hugging Face checkpoint, adapters merged into their layers."""
        self.model.save_pretrained(folder, state_dict=self._tensors(self.model))

    def _tensors(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """All weights of a trained module, as a file is to have them."""
        return lora.whole(module) if self._adapted and module is self.model else module.state_dict()

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A weight, a moment or a number, of which several ranks may each hold a part."""
        return tensor

    def _array(self, tensor: torch.Tensor) -> np.ndarray:
        """A copy in float32, which later updates leave alone."""
        return self._whole(tensor.detach()).to("cpu", torch.float32, copy=True).numpy()

    def _placed(self, array: np.ndarray, parameter: torch.Tensor) -> torch.Tensor:
        """A weight or a moment from a state, for this parameter."""
        return torch.from_numpy(array)

    def _rewards(self, batch: Batch, logp_prox: np.ndarray | None) -> tuple[torch.Tensor, dict[str, float]]:
        """Token rewards [S, T], and statistics of the KL to the reference, of the policy before the update as far as it is known."""
        mask, reward = torch.from_numpy(batch.mask), torch.tensor(batch.reward)
        if batch.logp_ref is None:
            if self.kl_coef:
                raise ValueError(f"step {self.version}: algorithm.kl_coef is {self.kl_coef:g} and the batch has no logp_ref: add it, or set 0")
            return token_rewards(reward, torch.zeros(mask.shape), mask, kl_coef=0.0), {}
        logp, ref = torch.from_numpy(batch.logp_behav if logp_prox is None else logp_prox), torch.from_numpy(batch.logp_ref)
        kl, responses = kl_estimate(logp, ref, self.algorithm.kl_estimator), int(batch.keep.sum())
        rewards = token_rewards(reward, kl, mask, kl_coef=self.kl_coef)
        per_response = float(kl[mask].double().sum()) / responses if responses else float("nan")
        return rewards, {"kl": per_response, "kl_coef": self.kl_coef, "kl_clamped": int(kl_clamped(logp[mask], ref[mask]))}

    def _targets(self, batch: Batch, rewards: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the loss compares with, [S, T] each: here the group-relative rewards of whole sequences, on every response token."""
        rows, mask = np.flatnonzero(batch.keep), torch.from_numpy(batch.mask)
        per_sequence = torch.zeros(len(batch))
        per_sequence[rows] = group_relative(rewards.sum(1)[rows], torch.from_numpy(batch.group[rows]), std=self.algorithm.advantage_std)
        return {"advantages": per_sequence[:, None].expand(mask.shape).where(mask, 0.0)}

    def _minibatches(self, batch: Batch) -> list[np.ndarray]:
        """Sequence indices per optimiser step, shuffled anew in every epoch; a function of seed and step alone."""
        rng = np.random.default_rng((self.seed, STREAM, batch.step))
        return [part for _ in range(self.config.epochs) for part in np.array_split(rng.permutation(len(batch)), self.config.minibatches)]

    def _micro_batches(self, batch: Batch, rows: np.ndarray) -> list[np.ndarray]:
        """Rows in groups of similar length whose padded size stays within the token budget (one row at least)."""
        return [rows[g] for g in length_groups(batch.prompt_length[rows] + batch.length[rows], self.config.micro_batch_tokens)]

    def _passes(self, batch: Batch, rows: np.ndarray) -> list[tuple[np.ndarray, bool]]:
        """The forward passes over some rows: micro-batches, and whether each counts."""
        return [(part, True) for part in self._micro_batches(batch, rows)]

    def _loss(self, part: Batch, columns: dict[str, torch.Tensor], denominator: int) -> tuple[torch.Tensor, dict]:
        return self._policy_loss(part, columns, self._states(self.model, part), denominator)

    def _policy_loss(self, part: Batch, columns: dict, states: torch.Tensor, denominator: int) -> tuple[torch.Tensor, dict]:
        mask, behav, version = (on(states.device, x) for x in (part.mask, part.logp_behav, part.version))
        theta, entropy = self._logp(part, states)
        loss, stats = self._objective(theta, columns.get("logp_prox"), behav, columns["advantages"], mask, denominator, version)
        if not self._step.norms:  # before the first optimiser step, what the sampler says of fresh tokens must be what the learner finds
            fresh = mask & (version == self.version)
            stats |= {"sampler_gap_sum": (theta.detach() - behav).abs().where(fresh, 0).double().sum(), "fresh_tokens_sum": fresh.double().sum()}
        return loss, stats | {"entropy_sum": entropy.where(mask, 0).double().sum()}

    @contextmanager
    def _naming_step(self) -> Iterator[None]:
        try:
            yield
        except FloatingPointError as error:
            raise FloatingPointError(f"step {self.version}: {error}") from error

    def _objective(self, theta, prox, behav, advantages, mask, denominator, version) -> tuple[torch.Tensor, dict]:
        """Loss with the anchor of design's table; `prox` is the recomputed one where the anchor needs it."""
        a = self.algorithm
        clip = {"clip_low": a.clip_low, "clip_high": a.clip_high, "dual_clip": a.dual_clip, "denominator": denominator}
        if a.anchor == "ppo":
            return ppo_loss(theta, prox, advantages, mask, **clip)
        d = staleness(self.version, version)
        approximations = {
            "loglinear": lambda: interpolate(behav, theta, alpha(d, a.fresh)),
            "linear": lambda: interpolate(behav, theta, alpha(d, a.fresh), space="prob"),
            "behave": lambda: behav,
            "reuse": lambda: theta.detach(),
        }
        anchor = prox if prox is not None else approximations.get(a.anchor, lambda: resolve(a.anchor)(behav, theta.detach(), d))()
        loss, stats = decoupled_ppo_loss(theta, anchor, behav, advantages, mask, behav_weight_cap=a.behav_weight_cap, cap_mode=a.cap_mode, **clip)
        if a.anchor == "diagnostic":
            stats |= {f"prox_abs_error/{name}_sum": (make() - prox).abs().where(mask, 0).double().sum() for name, make in approximations.items()}
        return loss, stats

    def _states(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Last hidden states [S, W, H] of prompts and responses joined: what follows a token is predicted at its place."""
        width, total = batch.prompt.shape[1], batch.prompt_length + batch.length
        ids = np.zeros((len(batch), width + batch.token.shape[1]), np.int64)
        ids[:, :width] = np.where(np.arange(width) < batch.prompt_length[:, None], batch.prompt, 0)
        row, t = np.nonzero(np.arange(batch.token.shape[1]) < batch.length[:, None])
        ids[row, batch.prompt_length[row] + t] = batch.token[row, t]
        with torch.autocast(model.device.type, torch.bfloat16, enabled=self._mixed):
            # padding stands at the end, where causal attention does not look: no mask, hence the fast kernel
            return hidden_states(model, on(model.device, ids[:, : int(total.max())]))

    def _logp(self, batch: Batch, states: torch.Tensor, with_entropy: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies [S, T] of the responses, float32, from the policy's hidden states; entropies are 0 where they are not asked for.

        Vocabulary logits exist for a chunk of tokens at a time, also in the backward pass.
        """
        row, t = np.nonzero(np.arange(batch.token.shape[1]) < batch.length[:, None])
        columns = row, t, batch.prompt_length[row] + t - 1, batch.token[row, t].astype(np.int64)
        row, t, place, target = (on(states.device, x) for x in columns)  # [N]
        hidden = states[row, place]  # [N, H]
        chunks = zip(*(x.split(self.config.logp_chunk_tokens) for x in (hidden, target)), strict=True)
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self._mixed):
            parts = [checkpoint(self._head, h, y, with_entropy, use_reentrant=False) for h, y in chunks]
        blank = torch.zeros(batch.token.shape, device=states.device)
        logp, entropy = (blank.index_put((row, t), torch.cat(columns)) for columns in zip(*parts, strict=True))
        return logp, entropy.detach()

    def _head(self, hidden: torch.Tensor, target: torch.Tensor, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        # [chunk, V]; in place where that is possible, since at a large vocabulary each copy is most of the memory
        logp = torch.log_softmax(self.model.get_output_embeddings()(hidden).float().div_(self.temperature), -1)
        chosen = logp.gather(-1, target[:, None])[:, 0]
        entropy = -logp.detach().exp().mul_(logp.detach()).sum(-1) if with_entropy else torch.zeros_like(chosen)
        return chosen, entropy


def _trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


@dataclass
class _Step:
    """A training step in progress."""

    batch: Batch
    columns: dict[str, torch.Tensor]  # [S, T], on the CPU: advantages, and what else the loss compares with
    divergence: dict[str, float]  # statistics of the KL to the reference; empty without one
    minibatches: list[np.ndarray]
    stats: list[dict] = field(default_factory=list)  # one per optimiser step, like the norms
    norms: list[float] = field(default_factory=list)

    def cut(self, rows: np.ndarray, device: torch.device) -> tuple[Batch, dict[str, torch.Tensor]]:
        """Batch and columns of some sequences, trimmed to the longest of them; the columns on a device."""
        part = self.batch.rows(rows)
        return part, {name: column[rows, : part.token.shape[1]].to(device) for name, column in self.columns.items()}
