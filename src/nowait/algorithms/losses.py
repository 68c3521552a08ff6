"""Policy and value losses: pure functions of response-aligned tensors [B, T] that return (loss, stats).

Decoupled PPO: Hilton, Cobbe, Schulman 2022 (arXiv 2110.00641), as in AReaL (2505.24298) and A-3PO (2512.06547):

    loss = sum over tokens of rho * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) / N,    r = theta/prox,  rho = prox/behav

Only logp_theta carries gradient; unclipped and uncapped it is -A (theta/behav) grad logp_theta / N, whatever the anchor.
N is one token count for the whole batch (`denominator`), so losses and gradients of micro-batches and shards add up to the batch's.

Deviations from the reference implementation
* rho is always applied, also without a cap.
* Log-ratios above 42 are clamped (r up to 9.5e17 = exp(41.4) has been published), so that r * rho is finite in float32. A clamped r
  passes no gradient; `clamped_ratios` counts these r and rho.

`stats` maps names to detached float64 scalars, undivided, so that parts merge: *_sum by addition, *_min and *_max (neutral ±inf) likewise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from nowait.algorithms.kl import k3

LOG_RATIO_MAX = 42.0
MERGE = {"_sum": torch.add, "_min": torch.minimum, "_max": torch.maximum}
MEANS = {  # metric: (total, denominator)
    "policy_loss": ("loss_sum", "tokens_sum"),
    "approx_kl": ("approx_kl_sum", "tokens_sum"),
    "clip_frac": ("clipped_tokens_sum", "tokens_sum"),
    "ratio_mean": ("ratio_sum", "tokens_sum"),
    "behave_weight_mean": ("behave_weight_sum", "tokens_sum"),
    "behave_kl": ("behave_kl_sum", "tokens_sum"),
    "capped_frac": ("capped_tokens_sum", "tokens_sum"),
    "value_loss": ("value_loss_sum", "value_tokens_sum"),
    "value_clip_frac": ("value_clipped_tokens_sum", "value_tokens_sum"),
}


def visible(mask: Tensor, **quantities: Tensor) -> list[Tensor]:
    """The quantities in at least float32 with 0 where `mask` is false, so that nothing that stands there enters a value or a gradient.

    Raises ValueError on a shape other than the mask's, and FloatingPointError on NaN or Inf where `mask` is true.
    """
    out = []
    for name, x in quantities.items():
        if x.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, its mask {tuple(mask.shape)}: they must be equal")
        x = torch.where(mask, x, 0).to(torch.promote_types(x.dtype, torch.float32))
        broken = ~x.isfinite()
        if broken.any():
            where = tuple(broken.nonzero()[0].tolist())
            raise FloatingPointError(
                f"{name} is {x[where].item()} at {where}, NaN or Inf at {int(broken.sum())} of {int(mask.sum())} unmasked places: "
                "mask what is padding, or look at what computed it (learning rate, precision)"
            )
        out.append(x)
    return out


def decoupled_ppo_loss(
    logp_theta: Tensor,
    logp_prox: Tensor,
    logp_behav: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    behav_weight_cap: float | None = None,
    cap_mode: Literal["mask", "clamp"] = "mask",
    dual_clip: float | None = None,
    denominator: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate around prox, each token weighted by rho = prox/behav. All tensors [B, T]; returns a scalar and its stats.

    Tokens with rho > `behav_weight_cap` leave the loss ("mask") or get rho = cap ("clamp"); N counts them either way.
    `dual_clip` c > 1 bounds a token's loss before the weight by c |A|, which matters for A < 0 and large r (arXiv 1912.09729).
    `denominator` is N, by default the number of unmasked tokens. With every token masked the loss is 0 and has a graph.
    Raises FloatingPointError on NaN or Inf at an unmasked token.
    """
    if cap_mode not in ("mask", "clamp"):
        raise ValueError(f"cap_mode={cap_mode!r}: choose 'mask' or 'clamp'")
    mask = mask.bool()
    # behav before prox, which may be made of it: the error names the cause
    theta, behav, prox, advantages = visible(mask, logp_theta=logp_theta, logp_behav=logp_behav, logp_prox=logp_prox, advantages=advantages)
    prox = prox.detach()
    log_rho = prox - behav.detach()
    raw = log_rho.clamp(max=LOG_RATIO_MAX).exp()
    cap = math.inf if behav_weight_cap is None else behav_weight_cap
    capped = raw > cap
    rho = torch.where(capped, 0.0 if cap_mode == "mask" else cap, raw)
    loss, stats = _clipped_surrogate(theta - prox, rho, advantages.detach(), mask, clip_low, clip_high, dual_clip, denominator)
    stats["clamped_ratios_sum"] += _sum(log_rho > LOG_RATIO_MAX, mask)
    stats |= _spread("behave_weight", raw, mask) | {
        "behave_weight_sq_sum": _sum(raw.double().square(), mask),
        "capped_tokens_sum": _sum(capped, mask),
        "behave_kl_sum": _sum(k3(log_rho.double().clamp(max=LOG_RATIO_MAX)), mask),
    }
    return loss, stats


def ppo_loss(
    logp_theta: Tensor,
    logp_prox: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    denominator: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Coupled PPO (Schulman et al. 2017, arXiv 1707.06347, equation 7): `decoupled_ppo_loss` with rho = 1 and without the stats of rho."""
    mask = mask.bool()
    theta, prox, advantages = visible(mask, logp_theta=logp_theta, logp_prox=logp_prox, advantages=advantages)
    rho = torch.ones_like(prox)
    return _clipped_surrogate(theta - prox.detach(), rho, advantages.detach(), mask, clip_low, clip_high, dual_clip, denominator)


def _clipped_surrogate(log_r, rho, advantages, mask, clip_low, clip_high, dual_clip, denominator) -> tuple[Tensor, dict[str, Tensor]]:
    """Inputs are 0 (rho: finite) where masked; a zero advantage keeps those tokens out of the loss."""
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip}: the bound c |A| needs c > 1, otherwise it cuts on-policy tokens")
    r = log_r.clamp(max=LOG_RATIO_MAX).exp()
    unclipped, bounded = -advantages * r, -advantages * r.clamp(1 - clip_low, 1 + clip_high)
    clipped = bounded > unclipped
    loss = torch.where(clipped, bounded, unclipped)
    limit = math.inf if dual_clip is None else dual_clip * advantages.abs()
    dual_clipped = loss > limit
    loss = rho * torch.where(dual_clipped, limit, loss)
    with torch.no_grad():
        stats = {
            "tokens_sum": _sum(mask, mask),
            "loss_sum": _sum(loss, mask),
            "clipped_tokens_sum": _sum(clipped, mask),
            "dual_clipped_tokens_sum": _sum(dual_clipped, mask),
            "clamped_ratios_sum": _sum(log_r > LOG_RATIO_MAX, mask),
            "approx_kl_sum": _sum(k3(log_r.double().clamp(max=LOG_RATIO_MAX)), mask),
            **_spread("ratio", r, mask),
        }
    return _mean(loss, mask, denominator), stats


def value_loss(
    values: Tensor, values_before: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None = None, denominator: Tensor | float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Token mean of 0.5 max((V - R)², (V_clipped - R)²), V_clipped within `clip` of `values_before`; with clip=None of 0.5 (V - R)².

    All tensors [B, T], gradient through `values` only; `denominator`, masks and errors as in `decoupled_ppo_loss`. The maximum is that
    of OpenAI's PPO code, as in TRL.
    """
    mask = mask.bool()
    values, before, returns = visible(mask, values=values, values_before=values_before, returns=returns)
    before, returns = before.detach(), returns.detach()
    squared, clipped = (values - returns).square(), torch.zeros_like(mask)
    if clip is not None:
        bounded = (values.clamp(before - clip, before + clip) - returns).square()
        clipped = bounded > squared
        squared = torch.where(clipped, bounded, squared)
    loss = 0.5 * squared
    with torch.no_grad():
        target, error = returns.double(), (returns - before).double()
        stats = {
            "value_tokens_sum": _sum(mask, mask),
            "value_loss_sum": _sum(loss, mask),
            "value_clipped_tokens_sum": _sum(clipped, mask),
            "return_sum": _sum(target, mask),
            "return_sq_sum": _sum(target.square(), mask),
            "value_error_sum": _sum(error, mask),
            "value_error_sq_sum": _sum(error.square(), mask),
        }
    return _mean(loss, mask, denominator), stats


def merge_stats(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stats of several micro-batches, minibatches or shards as those of one: sums added, minima and maxima taken."""
    merged: dict[str, Tensor] = {}
    for part in parts:
        for key, value in part.items():
            merged[key] = MERGE[key[-4:]](merged[key], value) if key in merged else value
    return merged


def finish_stats(merged: dict[str, Tensor]) -> dict[str, float]:
    """Metrics of the quantities in (merged) stats; where there was no token, counts are 0 and all else is NaN.

    Means are over all unmasked tokens, those that a cap dropped included; behave_weight_* show rho before the cap.
    approx_kl is k3 of r, an estimate of KL(prox || theta), behave_kl is k3 of rho, of KL(behav || prox); both on tokens from behav.
    ess = (sum rho)² / (tokens * sum rho²), at most 1 · explained_variance = 1 - Var(returns - values_before) / Var(returns).
    """
    s = {key: float(value) for key, value in merged.items()}
    out = {name: _ratio(s[total], s[count]) for name, (total, count) in MEANS.items() if total in s}
    out |= {name: s[f"{name}_sum"] for name in ("tokens", "clipped_tokens", "dual_clipped_tokens", "clamped_ratios") if f"{name}_sum" in s}
    extremes = [f"{name}_{end}" for name in ("ratio", "behave_weight") for end in ("min", "max")]
    out |= {name: s[name] if s["tokens_sum"] else math.nan for name in extremes if name in s}
    if "behave_weight_sum" in s:
        out["ess"] = _ratio(s["behave_weight_sum"] ** 2, s["tokens_sum"] * s["behave_weight_sq_sum"])
    if "value_tokens_sum" in s:
        error, spread = (s[f"{x}_sq_sum"] - _ratio(s[f"{x}_sum"] ** 2, s["value_tokens_sum"]) for x in ("value_error", "return"))
        equal = not spread > 1e-12 * s["return_sq_sum"]  # equal returns leave nothing but rounding error
        out["explained_variance"] = math.nan if equal else 1 - error / spread
    return out


def _mean(loss: Tensor, mask: Tensor, denominator: Tensor | float | None) -> Tensor:
    n = mask.sum() if denominator is None else torch.as_tensor(denominator)
    return (loss / n.clamp(min=1)).sum()  # divided first: a sum of extreme weights could overflow


def _sum(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x.detach().double(), 0).sum()


def _spread(name: str, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
    x = x.detach().double()
    lowest, highest = torch.where(mask, x, math.inf).min(), torch.where(mask, x, -math.inf).max()
    return {f"{name}_sum": _sum(x, mask), f"{name}_min": lowest, f"{name}_max": highest}


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan
