"""Before a training begins: does the sampler find the log-probs that the learner finds? Every method here divides one by the other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np

from nowait.batch import Rollouts
from nowait.tasks.prompts import Prompts

# Mean |difference| in nats, by model.dtype. Rounding makes 2e-7 and 2e-3 with the shipped policies; temperature 0.7 in place of 1 makes 0.03 with
# them, since they are seldom in doubt, and more with others.
LIMITS = {"float32": 1e-3, "bfloat16": 0.03}
PROMPTS, SAMPLES, TOKENS = 4, 2, 16
CAUSES = (
    "Training would take the difference for a change of the policy. Likely causes: the sampler has other weights or another temperature than the"
    " learner, or calculates less precisely (quantization, kv_cache_dtype, an attention backend). Set sampler.engine_options={} to see whether they"
    " are the cause, else sampler.engine=transformers"
)


async def check_sampler(sampler: Callable[..., Awaitable], learner: Callable[..., Awaitable], prompts: Prompts, dtype: str) -> float:
    """Mean |difference| of the log-probs of a few sampled responses, with both workers at version 0; raises ValueError above the limit.

    Leaves nothing behind: its requests have negative numbers, whose random numbers no training draws.
    """
    position = prompts.get_state()
    requests = [replace(r, id=-1 - r.id, n=SAMPLES, max_new_tokens=min(TOKENS, r.max_new_tokens)) for r in prompts.next(PROMPTS)]
    prompts.set_state(position)
    rollouts, left = Rollouts(SAMPLES), len(requests)
    rollouts.admit(requests)
    await sampler("admit", requests)
    while left:
        left -= len(rollouts.add(await sampler("decode", TOKENS)))
    batch = rollouts.take([r.id for r in requests], 0)
    differences = np.abs(await learner("logp", batch) - batch.logp_behav)[batch.mask]
    mean, largest, limit = float(differences.mean()), float(differences.max()), LIMITS[dtype]
    if not mean <= limit:
        numbers = f"{mean:.2g} nats on average and {largest:.2g} at most, where {limit:g} on average is allowed for {dtype}"
        raise ValueError(f"sampler and learner differ in the log-probs of {len(differences)} sampled tokens by {numbers}. {CAUSES}")
    return mean
