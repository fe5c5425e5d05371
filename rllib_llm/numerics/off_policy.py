"""Corrections for tokens that older or other weights sampled, and figures that say how far off they
are.

Three policies take part: the behaviour policy β, whose log-probs the sampler stored; the proximal
policy p, the one before the update, at which the loss's ratio begins; and the one being trained, θ.
Decoupled PPO (Hilton et al. 2022, eq. 12; AReaL, Fu et al. 2025, eq. 5) weighs each token's clipped
loss, of the ratio π_θ/π_p, by w = π_p/π_β. All tensors are [batch, completion_len] unless it says
otherwise; a log-ratio that is not finite (the sampler did not know the log-prob) counts as 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rllib_llm.numerics.kl import kl_estimate

WEIGHT_MODES = ("truncate", "mask")
WEIGHT_LEVELS = ("token", "sequence")
# exp() of sums above 88 is infinite in float32; verl holds log-ratios to the same bound.
LARGEST_LOG_RATIO = 20.0


def log_ratio(proximal: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    """log π_p − log π_β of each token, detached; 0 where masked out or not finite."""
    difference = (proximal - behaviour).detach()
    return torch.where(mask & difference.isfinite(), difference, torch.zeros_like(difference))


def ages(versions: Tensor, current: int) -> Tensor:
    """Updates between the weights that sampled a token, `versions` int32, and version `current`,
    the one before the update that learns from it."""
    return (current - versions).clamp(min=0)


def loglinear_proximal(logprobs: Tensor, behaviour: Tensor, age: Tensor) -> Tensor:
    """log π_p without a forward pass, detached: log π_β + α (log π_θ − log π_β).

    α = (v_p − v_β)/(v_θ − v_β) with v_θ = v_p + 1, which is age/(age + 1): 0 for fresh tokens,
    whose proximal policy is the one that sampled them (A-3PO; AReaL's `prox_approx`, "loglinear").
    """
    alpha = age / (age + 1.0)
    moved = (logprobs - behaviour).detach()
    return behaviour + alpha * torch.where(moved.isfinite(), moved, torch.zeros_like(moved))


@dataclass(frozen=True)
class ImportanceWeights:
    """Importance weights w: `weights`, detached, 1 where masked out, and the tokens of which the
    bounds changed them, `bounded` bool."""

    weights: Tensor
    bounded: Tensor


def importance_weights(
    log_ratios: Tensor,
    mask: Tensor,
    *,
    mode: str = "truncate",
    level: str = "token",
    lower: float = 0.0,
    upper: float = 2.0,
) -> ImportanceWeights:
    """w = π_p/π_β of each token, within bounds.

    "truncate": clip(w, lower, upper) (Yao et al. 2025, truncated importance sampling, upper 2).
    "mask": w, or 0 outside the bounds (IcePop, Zhao et al. 2025: 0.5 and 5). At level "sequence"
    all tokens of a row have w = exp(Σ_t log w_t), unbiased for the whole completion, at most e^20.

    """
    assert mode in WEIGHT_MODES and level in WEIGHT_LEVELS, (mode, level)
    assert 0 <= lower < upper, (lower, upper)
    if level == "sequence":
        log_ratios = log_ratios.sum(dim=1, keepdim=True).expand_as(log_ratios)
    raw = log_ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    bounded = mask & ((raw < lower) | (raw > upper))
    weights = raw.clamp(lower, upper) if mode == "truncate" else raw.masked_fill(bounded, 0.0)
    return ImportanceWeights(torch.where(mask, weights, torch.ones_like(weights)), bounded)


def mismatch(log_ratios: Tensor, estimator: str) -> Tensor:
    """KL(π_β ‖ π_p) at each token that β sampled, nats, with r = π_p/π_β.

    k1 = −log r; k2 = (log r)²/2; k3 = r − 1 − log r (Schulman, "Approximating KL divergence").
    """
    if estimator == "k3":
        log_ratios = log_ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return kl_estimate(torch.zeros_like(log_ratios), log_ratios, estimator)


def kept_tokens(
    log_ratios: Tensor,
    mask: Tensor,
    *,
    estimator: str,
    level: str = "sequence",
    lower: float | None = None,
    upper: float | None = None,
) -> Tensor:
    """Tokens whose mismatch lies within the bounds, bool, a subset of `mask`.

    At level "sequence" the mean over a row's tokens is compared, and the whole row kept or
    rejected: with "k1" that is −log of the geometric mean of its ratios (verl's geometric
    rejection), with "k3" its `seq_mean_k3`.
    """
    value = mismatch(log_ratios, estimator)
    if level == "sequence":
        total = torch.where(mask, value, torch.zeros_like(value)).sum(dim=1, keepdim=True)
        value = (total / mask.sum(dim=1, keepdim=True).clamp(min=1)).expand_as(value)
    kept = mask.clone()
    if lower is not None:
        kept &= value >= lower
    if upper is not None:
        kept &= value <= upper
    return kept


def age_metrics(
    versions: Tensor, mask: Tensor, current: int, num_bins: int = 5
) -> dict[str, float]:
    """Ages of the weights that sampled a batch, in updates, over the tokens of `mask`.

    `age_mean`, `age_max`, `age_<k>` the share of tokens of age k (the last bin those of
    `num_bins - 1` and more), and `versions`, the mean number of versions in one completion.
    """
    age = ages(versions, current)[mask]
    if not len(age):
        return {}
    bins = torch.bincount(age.clamp(max=num_bins - 1), minlength=num_bins).double() / len(age)
    ordered = versions.where(mask, -1).sort(dim=1).values
    changes = (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1)
    distinct = (changes + mask.all(dim=1))[mask.any(dim=1)]
    return {
        "age_mean": float(age.double().mean()),
        "age_max": float(age.max()),
        **{f"age_{k}": float(share) for k, share in enumerate(bins)},
        "versions": float(distinct.double().mean()),
    }
