"""Anchors that cost no forward pass: the proximal policy interpolated between behaviour and current policy.

A-3PO (arXiv 2512.06547): log pi_prox = alpha log pi_behav + (1 - alpha) log pi_theta on the sampled token, alpha = 1/d, d its staleness.
Then r = theta/prox = (theta/behav)^alpha, rho = prox/behav = (theta/behav)^(1 - alpha).

Deviations from the text
* d = 0: version 3 of the paper sets alpha = 0 (`fresh="theta"`), its figures imply alpha = 1 (`fresh="behave"`, the default).
* The anchor carries no gradient. The paper's listing shows no detach; without one, clipped tokens would still push through rho.
* A token from the future (d < 0) is an error; the reference implementation treats it as fresh.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

PADDING_VERSION = -1


def staleness(current_version: int, versions: Tensor) -> Tensor:
    """Training steps d = current_version - versions between the sampling of each token and this update; 0 on padding (version -1).

    `versions` is an integer tensor of any shape. Raises ValueError where a token carries a version that does not exist yet, or one below -1.
    """
    if versions.numel() and (versions.max() > current_version or versions.min() < PADDING_VERSION):
        found = versions[(versions > current_version) | (versions < PADDING_VERSION)].unique().tolist()
        raise ValueError(
            f"token versions {found[:8]} do not lie in [{PADDING_VERSION}, {current_version}], the learner's version: "
            "tag each token with the version whose weights sampled it, and pass the learner's version from before the update"
        )
    return (current_version - versions).masked_fill_(versions == PADDING_VERSION, 0)


def alpha(d: Tensor, fresh: Literal["behave", "theta"] = "behave") -> Tensor:
    """Weight of log pi_behav in the anchor, per token: 1/d for d >= 1, and for d = 0 what `fresh` says (1 anchors on behav, 0 on theta)."""
    if fresh not in ("behave", "theta"):
        raise ValueError(f"fresh={fresh!r}: choose behave or theta")
    if d.numel() and d.min() < 0:
        raise ValueError(f"staleness is negative (lowest {d.min().item()}): compute it with staleness(current_version, versions)")
    a = d.clamp(min=1).reciprocal()  # which is 1 at d = 0
    return a if fresh == "behave" else a.masked_fill_(d == 0, 0.0)


@torch.no_grad()
def interpolate(logp_behav: Tensor, logp_theta: Tensor, alpha: Tensor | float, space: Literal["log", "prob"] = "log") -> Tensor:
    """Detached log-probs of the anchor between behav (alpha 1) and theta (alpha 0), exact at both ends.

    log: alpha log pi_behav + (1 - alpha) log pi_theta, A-3PO's "loglinear" · prob: log(alpha pi_behav + (1 - alpha) pi_theta), "linear".
    `alpha` broadcasts against the two log-probs, which share one shape. The log anchor is not normalised: its probabilities sum to at most 1.
    """
    dtype = torch.promote_types(logp_theta.dtype, torch.float32)
    logp_behav, logp_theta = logp_behav.to(dtype), logp_theta.to(dtype)
    alpha = torch.as_tensor(alpha, dtype=dtype, device=logp_theta.device)
    if space == "log":
        return torch.lerp(logp_theta, logp_behav, alpha)
    if space == "prob":
        return torch.logaddexp(alpha.log() + logp_behav, torch.log1p(-alpha) + logp_theta)
    raise ValueError(f"space={space!r}: choose 'log' or 'prob'")
