"""Cost functions of the model clock: seconds(worker, method, args, result)."""

from __future__ import annotations


class LinearCosts:
    """Seconds linear in tokens and decode steps, for real trainings in virtual time. `rates` has the fields of config.CostConfig.

    Evaluation, publishing and rule scorers cost nothing.
    """

    def __init__(self, rates) -> None:
        self.rates = rates
        self._tokens = self._minibatches = 0  # of the data-parallel update in progress

    def __call__(self, worker: str, method: str, args: tuple, result: object) -> float:
        cost = getattr(self, f"_{worker}_{method}", None)
        return cost(args, result) if cost else 0.0

    def _sampler_admit(self, args, result) -> float:
        return self.rates.prefill_token * sum(len(r.prompt) * r.n for r in args[0])

    def _sampler_load(self, args, result) -> float:
        return self.rates.prefill_token * result

    def _sampler_decode(self, args, result) -> float:
        lengths = result.offset[1:] - result.offset[:-1]
        return float(self.rates.decode_step * lengths.max(initial=0) + self.rates.decode_token * lengths.sum())

    def _learner_logp(self, args, result) -> float:
        return self.rates.forward_token * _tokens(args[0]) if self.rates.charge_forward else 0.0

    def _learner_update(self, args, result) -> float:
        return self.rates.update_token * _tokens(args[0])

    def _learner_prepare(self, args, result) -> float:
        self._tokens, self._minibatches = _tokens(args[0]), result
        return 0.0

    def _learner_gradient(self, args, result) -> float:
        return self.rates.update_token * self._tokens / self._minibatches / args[2]


def _tokens(batch) -> int:
    return int(batch.prompt_length.sum() + batch.length.sum())
