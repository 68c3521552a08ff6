"""PPO for RLHF: the policy's learner with a critic, token rewards and generalised advantage estimation.

Schulman et al. 2017 (arXiv 1707.06347) with the KL penalty of Ziegler et al. 2019 (arXiv 1909.08593). A training step on the whole batch: values,
token rewards (-beta KL per token, the score on the last one), GAE, whitened advantages; then per minibatch the policy loss of the chosen anchor
plus value_coef times the value loss, both divided by the minibatch's token count.

Deviations from the usual implementations
* The score stands on the last token of the response, wherever padding or another EOS may be, and a response cut off at its longest length is
  bootstrapped with V(whole response) instead of counting as finished.
* The value head starts at 0, also on a reward model's backbone: the first values are 0 whatever the scale of the scores.

Shape legend: S sequences of a batch, T longest response, W longest prompt and response, H hidden.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModel, PreTrainedModel

from nowait.algorithms.advantages import gae
from nowait.algorithms.losses import value_loss
from nowait.batch import LENGTH, Batch
from nowait.config import AlgorithmConfig, CriticConfig, LearnerConfig
from nowait.workers.learner import HFLearner
from nowait.workers.models import checkpoint_layers, load_model, on


class PPOLearner(HFLearner):
    """PPO with a critic: a model of its own, or with `critic.shared` a value head on the policy's last hidden states.

    One AdamW and one gradient clip for both: the norm of a shared backbone's gradient cannot be divided between the two losses, and value_coef
    is to mean the same with and without sharing. `critic.lr` is the rate of the critic's own weights: all of a separate one, or the head.
    `options` are those of HFLearner.
    """

    def __init__(
        self,
        path: str,
        learner: LearnerConfig,
        algorithm: AlgorithmConfig,
        *,
        critic: CriticConfig,
        gradient_checkpointing: bool = False,
        **options,
    ) -> None:
        super().__init__(path, learner, algorithm, gradient_checkpointing=gradient_checkpointing, **options)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        self._backbone = self.model if critic.shared else load_backbone(critic.path or path, vocabulary).to(self.model.device)
        if gradient_checkpointing and not critic.shared:
            checkpoint_layers(self._backbone)
        self._value_head = torch.nn.Linear(self._backbone.config.hidden_size, 1, device=self.model.device)
        for parameter in self._value_head.parameters():
            torch.nn.init.zeros_(parameter)
        backbone = {} if critic.shared else {"critic": self._backbone}
        rate = learner.lr if critic.lr is None else critic.lr
        self._known: tuple[Batch, tuple[np.ndarray, ...]] | None = None  # values of a batch under the current weights
        self._train(self._trained | backbone | {"value_head": self._value_head}, {"critic": rate, "value_head": rate})

    def logp(self, batch: Batch) -> np.ndarray:
        """As HFLearner's. With a shared backbone this forward pass gives the values as well, which are kept for `values` of the same batch."""
        if self._backbone is not self.model:
            return super().logp(batch)

        def both(part: Batch) -> tuple[torch.Tensor, ...]:
            states = self._states(self.model, part)
            return *self._logp(part, states, with_entropy=False)[:1], *self._values(part, states)

        logp, *values = self._read(batch, both)
        self._known = batch, tuple(values)
        return logp

    def values(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """V(prefix before token t) [S, T], 0 on padding, and V(whole response) [S], float32, under the current weights."""
        if self._known and all(np.array_equal(getattr(batch, name), getattr(self._known[0], name)) for name in ("prompt", "token", "length")):
            return self._known[1]
        return tuple(self._read(batch, lambda part: self._values(part, self._states(self._backbone, part))))

    def _optimise(self, stats: dict) -> None:
        self._known = None
        super()._optimise(stats)

    def set_state(self, state: dict) -> None:
        self._known = None
        super().set_state(state)

    def finish(self) -> dict[str, float]:
        columns, mask = self._step.columns, self._step.batch.mask
        means = {f"{name}_mean": float(columns[column][mask].double().mean()) for name, column in (("value", "values"), ("return", "returns"))}
        return super().finish() | means

    def save(self, folder: str) -> None:
        """Write the policy as a Hugging Face checkpoint, and below it critic/: the backbone likewise unless shared, and value_head.safetensors."""
        super().save(folder)
        critic = Path(folder) / "critic"
        critic.mkdir(exist_ok=True)
        if self._backbone is not self.model:
            self._backbone.save_pretrained(critic, state_dict=self._tensors(self._backbone))
        save_file(self._tensors(self._value_head), critic / "value_head.safetensors")

    def _targets(self, batch: Batch, rewards: torch.Tensor) -> dict[str, torch.Tensor]:
        """Advantages, returns and the values before the update, [S, T] each."""
        values, last = (torch.from_numpy(x) for x in self.values(batch))
        bootstrap = last.where(torch.from_numpy(batch.finish == LENGTH), 0.0)
        a, mask = self.algorithm, torch.from_numpy(batch.mask)
        advantages, returns = gae(rewards, values, mask, gamma=a.gamma, lam=a.lam, bootstrap=bootstrap)
        return {"advantages": advantages, "returns": returns, "values": values}

    def _loss(self, part: Batch, columns: dict[str, torch.Tensor], denominator: int) -> tuple[torch.Tensor, dict]:
        states, a = self._states(self.model, part), self.algorithm
        loss, stats = self._policy_loss(part, columns, states, denominator)
        values, _ = self._values(part, states if self._backbone is self.model else self._states(self._backbone, part))
        mask = on(values.device, part.mask)
        error, more = value_loss(values, columns["values"], columns["returns"], mask, clip=a.value_clip, denominator=denominator)
        return loss + a.value_coef * error, stats | more

    def _values(self, batch: Batch, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """values [S, T], 0 on padding, and last [S], read from hidden states [S, W, H] at the places where log-probs are read."""
        everywhere = self._value_head(states.float())[..., 0]  # [S, W]
        place = batch.prompt_length[:, None] - 1 + np.arange(batch.token.shape[1] + 1)  # of the state before token t; one more for the whole response
        found = everywhere.gather(1, on(states.device, np.minimum(place, everywhere.shape[1] - 1).astype(np.int64)))
        length = on(states.device, batch.length.astype(np.int64))[:, None]
        inside = torch.arange(batch.token.shape[1], device=states.device) < length
        return found[:, :-1].where(inside, 0.0), found.gather(1, length)[:, 0]


def load_backbone(path: str, vocabulary: int) -> PreTrainedModel:
    """The backbone of a causal LM, of a reward model (sequence classification) or of a saved critic, in float32, dropout off.

    Raises ValueError when it cannot be loaded whole, or embeds fewer than `vocabulary` token ids.
    """
    model = load_model(AutoModel, "critic.path", path, "float32")
    if (size := model.get_input_embeddings().num_embeddings) < vocabulary:
        raise ValueError(f"critic.path: {path!r} embeds {size} token ids, the policy {vocabulary}: take a critic with the policy's tokenizer")
    return model
