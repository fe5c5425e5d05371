"""KL of the policy from the reference: estimators, exact, and the coefficient in front of it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k3", *, ratio: Tensor | None = None
) -> Tensor:
    """Per-token estimate of KL(policy || reference), nats [batch, completion_len].

    With d = logprobs - ref_logprobs on tokens sampled from the policy: k1 = d (unbiased, either
    sign), k2 = d^2/2 (biased, >= 0), k3 = exp(-d) - 1 + d (unbiased, >= 0). Schulman,
    "Approximating KL divergence" (2020). Zero wherever both log-probs are zero (padding).

    As a loss on the sampler's tokens, the expectation of the gradient is that of the exact KL only
    with `ratio` = policy/old policy *with its gradient*, [batch, completion_len]: the estimate is
    multiplied by it. k1 and k3 need that gradient on policy too, where the ratio is 1 but its
    gradient is not 0 (DeepSeek-V3.2, section 3.1, "Unbiased KL Estimate"). k2 is multiplied by the
    ratio detached: d times the gradient of log pi is all there is to the KL's gradient, and the
    ratio's own would add the estimate once more.
    """
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        kl = log_ratio
    elif estimator == "k2":
        kl = 0.5 * log_ratio.square()
    elif estimator == "k3":
        kl = torch.expm1(-log_ratio) + log_ratio
    else:
        raise ValueError(f"estimator={estimator!r} must be one of {KL_ESTIMATORS}")
    if ratio is None:
        return kl
    return (ratio.detach() if estimator == "k2" else ratio) * kl


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Exact KL(policy || reference) of next-token distributions, nats, float32 [...].

    sum_v p(v) (log p(v) - log p_ref(v)) over the last axis of `logits` [..., vocab]; both already
    divided by the sampling temperature. Tokens of zero probability under the policy add nothing.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    ref_logprobs = torch.log_softmax(ref_logits.float(), dim=-1)
    probs = logprobs.exp()
    terms = torch.where(probs > 0, probs * (logprobs - ref_logprobs), torch.zeros_like(probs))
    return terms.sum(dim=-1)


class KLCoefficient:
    """A KL coefficient, constant, or steered by proportional control to hold the KL at a target.

    value <- value * (1 + clip(kl/target - 1, -0.2, 0.2) * num_samples/horizon)
    (Ziegler et al. 2019, section 2.2; its code has a target of 6 nats, a horizon of 10 000.)

    `target` in nats per sequence, None: the coefficient is constant; `horizon` in samples: it
    changes by at most a fifth in that many, and in one update, however many samples that has.
    """

    def __init__(self, init: float, target: float | None = None, horizon: float = 10_000.0):
        assert 0 <= init < math.inf and horizon > 0, (init, horizon)
        assert target is None or target > 0, target
        self.value, self.target, self.horizon = float(init), target, float(horizon)

    def update(self, kl: float, num_samples: int) -> float:
        """The new coefficient after `num_samples` completions (all learners) of mean KL `kl`.

        `kl` is the batch mean of each sequence's sum, nats, and finite: the coefficient would not
        recover from another.
        """
        assert math.isfinite(kl), kl
        if self.target is not None:
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.value *= 1.0 + error * min(1.0, num_samples / self.horizon)
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint's coefficient; target and horizon stay the config's."""
        self.value = float(state["value"])
