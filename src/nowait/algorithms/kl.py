"""KL(pi || pi_ref) from the log-probs of tokens that pi sampled (Schulman, "Approximating KL divergence", 2020), and the control of its weight."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8 keeps every kind finite in float32, also where the reference gives probability 0

KL_ERROR_LIMIT = 0.2  # of the adaptive coefficient, relative to the target


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x, never negative; by expm1, since exp(x) - 1 loses all digits of a small x."""
    return (torch.expm1(log_ratio) - log_ratio).clamp(min=0)  # an expm1 one unit in the last place low would go below 0


def kl_estimate(logp: Tensor, logp_ref: Tensor, kind: Literal["k1", "k2", "k3"] = "k1") -> Tensor:
    """Estimate of KL(pi || pi_ref) in nats per token, any shape; x = logp_ref - logp is clamped to ±20 (`kl_clamped` counts where).

    k1: -x, unbiased, either sign · k2: x²/2, biased, low variance · k3: exp(x) - 1 - x, unbiased, never negative.
    Finite unless an input is NaN (or both are the same infinity), which stays NaN: mask padding afterwards with torch.where.
    """
    x = _log_ratio(logp, logp_ref).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k1":
        return -x
    if kind == "k2":
        return 0.5 * x.square()
    if kind == "k3":
        return k3(x)
    raise ValueError(f"kind={kind!r}: choose 'k1', 'k2' or 'k3'")


def kl_clamped(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Number of tokens whose log-ratio `kl_estimate` clamps; pass only those that count, as logp[mask], logp_ref[mask]."""
    return (_log_ratio(logp, logp_ref).abs() > LOG_RATIO_LIMIT).sum()


def adapted_kl_coef(kl_coef: float, kl: float, *, target: float, horizon: int, responses: int) -> float:
    """beta for the next step: beta * (1 + e * responses / horizon) with e = kl / target - 1 within ±0.2.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2. `kl` and `target` are nats per response, `kl` the mean over
    the step's `responses`; `horizon` counts responses.
    """
    error = min(max(kl / target - 1, -KL_ERROR_LIMIT), KL_ERROR_LIMIT)
    return kl_coef * (1 + error * responses / horizon)


def _log_ratio(logp: Tensor, logp_ref: Tensor) -> Tensor:
    if logp.shape != logp_ref.shape:
        raise ValueError(f"logp has shape {tuple(logp.shape)}, logp_ref {tuple(logp_ref.shape)}: they must be equal")
    dtype = torch.promote_types(logp.dtype, torch.float32)
    return logp_ref.to(dtype) - logp.to(dtype)
