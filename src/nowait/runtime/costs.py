"""Cost functions of the model clock: seconds(worker, method, args, result)."""

from __future__ import annotations

FREE = {"publish", "apply", "finish", "save", "get_state", "set_state"}  # any other method without a cost is an error


class LinearCosts:
    """Seconds linear in tokens and decode steps, for real trainings in virtual time. `rates` has the fields of config.CostConfig.

    Evaluation, publishing and rule scorers cost nothing.
    """

    def __init__(self, rates) -> None:
        self.rates = rates
        self._reading = {"reward": rates.reward_token, "reference": rates.reference_token}  # per token of prompt or response, which prefill returns
        self._tokens = self._minibatches = 0  # of the data-parallel update in progress: its later calls carry numbers only

    def __call__(self, worker: str, method: str, args: tuple, result: object) -> float:
        if worker in self._reading:
            return self._reading[worker] * result if method == "prefill" else 0.0
        if worker not in ("sampler", "learner") or method in FREE:
            return 0.0
        return getattr(self, method)(args, result)

    def admit(self, args, result) -> float:
        return self.rates.prefill_token * sum(len(r.prompt) * r.n for r in args[0])

    def load(self, args, result) -> float:
        return self.rates.prefill_token * result

    def decode(self, args, result) -> float:
        lengths = result.offset[1:] - result.offset[:-1]
        return float(self.rates.decode_step * lengths.max(initial=0) + self.rates.decode_token * lengths.sum())

    def logp(self, args, result) -> float:
        return self.rates.forward_token * _tokens(args[0]) if self.rates.charge_forward else 0.0

    def update(self, args, result) -> float:
        return self.rates.update_token * _tokens(args[0])

    def prepare(self, args, result) -> float:
        self._tokens, self._minibatches = _tokens(args[0]), result
        return 0.0

    def gradient(self, args, result) -> float:
        return self.rates.update_token * self._tokens / self._minibatches / args[2]


def _tokens(batch) -> int:
    return int(batch.prompt_length.sum() + batch.length.sum())
