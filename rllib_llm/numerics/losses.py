"""The losses, per token, and their reduction to one number that no split of the batch changes.

Those on preference pairs need no reward model. A pair's log-ratios are those of its two
completions, sums over their tokens: h_w = log π(y_w|x) − log π_ref(y_w|x) of the chosen one, h_l of
the rejected one; without a reference they are the policy's log-probs alone. β h is the reward that
the policy implies, and β what the coefficient of the KL is in RLHF (TRL: `beta`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

POLICY_LOSSES = ("ppo", "gspo", "rloo", "cispo")
RATIO_LEVELS = {"ppo": "token", "gspo": "sequence", "rloo": "product", "cispo": "token"}
REDUCTIONS = {
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "sequence_mean": "sequence_mean",
    "token_mean": "token_mean",
    "dr_grpo": "dr_grpo",
    "sequence_sum": "sequence_sum",
}

# A completion's likelihood ratio beyond e^20 = 5e8 is far outside every clip range, and exp() of
# sums above 88 is infinite in float32 (verl's core_algos holds log-ratios to the same bound).
_LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss before its reduction.

    `per_token` [batch, completion_len] is 0 at masked-out tokens. `stats`, detached and of the same
    shape: `ratio` (new policy/old policy, 1 where masked out) and `clipped` (bool).
    """

    per_token: Tensor
    stats: dict[str, Tensor]


def importance_ratio(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: str = "token"
) -> Tensor:
    """New policy's probability over the old one's, [batch, completion_len], 1 where masked out.

    "token": exp(logp_t - old_logp_t). "sequence": s = exp(mean_t (logp_t - old_logp_t)), the same
    for each token of a row, its gradient flowing through that token's own log-prob:
    sg[s] exp(logp_t - sg[logp_t]) (GSPO-token, Zheng et al. 2025, eq. 14), which for an advantage
    that is the same for the whole row is the gradient of s itself (GSPO, eq. 7). "product": the
    same with s = exp(sum_t (logp_t - old_logp_t)), the ratio of the whole completions' likelihoods,
    at most e^20; the row's mean over tokens has the value and the gradient of s.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs))
    if level == "token":
        return log_ratio.exp()
    assert level in ("sequence", "product"), level
    num_tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)
    total = log_ratio.detach().sum(dim=1, keepdim=True)
    if level == "sequence":
        row_ratio, power = (total / num_tokens).exp(), torch.ones_like(num_tokens)
    else:
        row_ratio, power = total.clamp(max=_LARGEST_LOG_RATIO).exp(), num_tokens
    through_token = ((log_ratio - log_ratio.detach()) * power).exp()
    return torch.where(mask, row_ratio * through_token, torch.ones_like(logprobs))


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    kind: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Clipped policy-gradient loss of each token. All of shape [batch, completion_len];
    `advantages` may be [batch], `weights` (detached importance weights) may be [batch, 1].

    "ppo":   max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r the token's importance ratio
             (Schulman et al. 2017, eq. 7; clip_high > clip_low is DAPO's clip-higher).
    "gspo":  the same with the sequence's ratio (Zheng et al. 2025, eq. 5).
    "rloo":  the same with the ratio of the whole completions' likelihoods, one action each
             (Ahmadian et al. 2024, section 3.1; TRL's RLOOTrainer), to be reduced by sequence_mean.
    "cispo": -sg[clip(r, 1 - clip_low, 1 + clip_high)] A logp: every token keeps its gradient
             (MiniMax-M1, 2025, eq. 4 and 5; there clip_low is so large, say 1, that nothing is
             clipped from below).
    `dual_clip` c > 1 bounds the loss of a token with A < 0 by -c A (Ye et al. 2020, eq. 5).
    """
    if kind not in POLICY_LOSSES:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(POLICY_LOSSES)}")
    assert clip_low >= 0 and clip_high >= 0, (clip_low, clip_high)
    assert dual_clip is None or (dual_clip > 1 and kind != "cispo"), (dual_clip, kind)
    if advantages.ndim == 1:
        advantages = advantages.unsqueeze(1)
    advantages = torch.where(mask, advantages, torch.zeros_like(advantages))
    ratio = importance_ratio(logprobs, old_logprobs, mask, RATIO_LEVELS[kind])
    clipped_ratio = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    if kind == "cispo":
        per_token = -clipped_ratio.detach() * advantages * logprobs
        clipped = clipped_ratio != ratio
    else:
        unclipped_loss = -advantages * ratio
        clipped_loss = -advantages * clipped_ratio
        per_token = torch.maximum(unclipped_loss, clipped_loss)
        clipped = clipped_loss > unclipped_loss
    if dual_clip is not None:
        bound = -dual_clip * advantages
        beyond = (advantages < 0) & (per_token > bound)
        per_token = torch.where(beyond, bound, per_token)
        clipped = clipped | beyond
    if weights is not None:
        per_token = per_token * weights
    per_token = torch.where(mask, per_token, torch.zeros_like(per_token))
    return PolicyLoss(per_token, {"ratio": ratio.detach(), "clipped": clipped & mask})


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = 0.2
) -> tuple[Tensor, Tensor]:
    """Critic's loss of each token (0 where masked out), and where clipping decided (bool).

    max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2, both [batch, completion_len]; `clip=None`
    leaves V free. (Ziegler et al. 2019's code; vwxyzjn, "The N implementation details of RLHF".)
    """
    squared_error = (values - returns).square()
    clipped = torch.zeros_like(mask)
    if clip is not None:
        near_old = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
        clipped_error = (near_old - returns).square()
        clipped = (clipped_error > squared_error) & mask
        squared_error = torch.maximum(squared_error, clipped_error)
    per_token = torch.where(mask, 0.5 * squared_error, torch.zeros_like(squared_error))
    return per_token, clipped


def cross_entropy_tokens(logprobs: Tensor, mask: Tensor) -> Tensor:
    """-logp of each target token, nats, 0 where masked out, [batch, length]."""
    return torch.where(mask, -logprobs, torch.zeros_like(logprobs))


def preference_loss(chosen_scores: Tensor, rejected_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Bradley-Terry loss of each pair [pairs], and whether the chosen one scored higher (bool).

    -log sigmoid(chosen - rejected) (Ouyang et al. 2022, eq. 1).
    """
    per_pair = -F.logsigmoid(chosen_scores - rejected_scores)
    return per_pair, chosen_scores.detach() > rejected_scores.detach()


@dataclass(frozen=True)
class LossDenominators:
    """The denominators of a loss: counts over the whole global mini-batch.

    They are taken before it is cut into micro-batches or shared among learners, so that the shares'
    losses, and gradients, add up to those of the whole. Numbers or scalar tensors.
    """

    num_tokens: float | Tensor
    num_sequences: float | Tensor
    max_completion_len: int = 1

    @classmethod
    def count(
        cls,
        mask: Tensor,
        max_completion_len: int | None = None,
        row_weights: Tensor | None = None,
    ) -> LossDenominators:
        """The counts of `mask` [batch, completion_len]; rows without a token are no sequences.

        `max_completion_len` is the configured generation limit (for dr_grpo), by default T.
        `row_weights` [batch]: what share of a sequence each row is; None: all of it.
        """
        sequences = mask.any(dim=1)
        return cls(
            num_tokens=mask.sum(),
            num_sequences=(sequences if row_weights is None else sequences * row_weights).sum(),
            max_completion_len=max_completion_len or mask.shape[1],
        )


def reduce_loss(
    per_token: Tensor,
    mask: Tensor,
    reduction: str,
    denominators: LossDenominators,
    row_weights: Tensor | None = None,
) -> Tensor:
    """This share's part of the loss, a scalar; the parts of all shares sum to the loss.

    `row_weights` [batch]: each row's share of its sequence's tokens, where sequences lie in several
    rows; each weighs then as if it lay in one.

    "token_mean" (dapo): sum / tokens. "sequence_mean" (grpo): each row's mean, sum / sequences.
    "dr_grpo": sum / (sequences * max_completion_len), so that long wrong answers are not favoured
    (Liu et al. 2025). "sequence_sum": sum / sequences, the likelihood of whole completions (RLOO).
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} must be one of {', '.join(REDUCTIONS)}")
    name = REDUCTIONS[reduction]
    per_token = torch.where(mask, per_token, torch.zeros_like(per_token))
    if name == "token_mean":
        return per_token.sum() / _at_least_one(denominators.num_tokens)
    num_sequences = _at_least_one(denominators.num_sequences)
    if name == "dr_grpo":
        return per_token.sum() / (num_sequences * denominators.max_completion_len)
    if name == "sequence_sum":
        return per_token.sum() / num_sequences
    row_means = per_token.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    if row_weights is not None:
        row_means = row_means * row_weights
    return row_means.sum() / num_sequences


def _at_least_one(count: float | Tensor) -> float | Tensor:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


# Names as TRL's DPOTrainer has them; "kto" is its KTOTrainer's.
PREFERENCE_LOSSES = ("sigmoid", "ipo", "kto", "sigmoid_norm")


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    kl_coeff: float,
    *,
    label_smoothing: float = 0.0,
    target_margin: float = 0.0,
) -> Tensor:
    """Loss of each pair [pairs] from its log-ratios: −log σ(β (h_w − h_l) − γ).

    Rafailov et al. 2023, eq. 7. `label_smoothing` ε is the share of pairs taken to be the wrong way
    round: (1 − ε) of the loss and ε of that of the swapped pair (Mitchell 2023, "A note on DPO with
    noisy preferences", cDPO). `target_margin` γ is SimPO's (Meng et al. 2024, eq. 6).
    """
    logits = kl_coeff * (chosen - rejected) - target_margin
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def ipo_loss(chosen: Tensor, rejected: Tensor, kl_coeff: float) -> Tensor:
    """(h_w − h_l − 1/(2τ))² of each pair [pairs], τ = `kl_coeff`; `chosen` and `rejected` are
    log-ratios per token.

    Azar et al. 2023, eq. 17. That they are means over tokens is what its authors use (TRL).
    """
    return (chosen - rejected - 1 / (2 * kl_coeff)).square()


def kto_loss(
    chosen: Tensor,
    rejected: Tensor,
    kl: Tensor,
    kl_coeff: float,
    *,
    weights: tuple[float, float] = (1.0, 1.0),
    present: tuple[Tensor | float, Tensor | float] = (1.0, 1.0),
) -> Tensor:
    """½ [λ_D (1 − σ(β (h_w − z))) + λ_U (1 − σ(β (z − h_l)))] of each pair [pairs]: each completion
    is judged for itself, better or worse than the reference point z.

    Ethayarajh et al. 2024, eq. 8. `weights`: λ_D and λ_U; 1 where there are as many chosen as
    rejected ones. `present`: 0 where a row has no such completion. `kl`: z, a scalar without
    gradient, see `kto_reference_point`.
    """
    desirable = (1 - torch.sigmoid(kl_coeff * (chosen - kl))) * weights[0] * present[0]
    undesirable = (1 - torch.sigmoid(kl_coeff * (kl - rejected))) * weights[1] * present[1]
    return 0.5 * (desirable + undesirable)


def kto_reference_point(total: Tensor, num_rows: int | Tensor) -> Tensor:
    """z, a scalar: the mean log-ratio of completions after prompts that are not theirs, at least 0.

    An estimate of the KL of the policy from the reference (Ethayarajh et al. 2024, section 4.1).
    `total`: sum of the log-ratios of `num_rows` such rows.
    """
    return (total / _at_least_one(num_rows)).clamp(min=0.0).detach()


def preference_losses(
    loss_type: str,
    chosen: Tensor,
    rejected: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    kl_coeff: float,
    label_smoothing: float = 0.0,
    target_margin: float = 0.0,
    kl: Tensor | None = None,
    kto_weights: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Loss of each pair [pairs] by the name of the loss, from its log-ratios [pairs].

    "sigmoid" is DPO, "sigmoid_norm" DPO on log-ratios per token (SimPO without a reference), "ipo"
    and "kto" are as above. Lengths [pairs] in tokens, 0 where there is no such completion, which
    KTO allows; `kl` is its reference point.

    Raises ValueError for an unknown name.
    """
    if loss_type in ("sigmoid_norm", "ipo"):
        chosen = chosen / chosen_lengths.clamp(min=1)
        rejected = rejected / rejected_lengths.clamp(min=1)
    if loss_type in ("sigmoid", "sigmoid_norm"):
        return dpo_loss(
            chosen,
            rejected,
            kl_coeff,
            label_smoothing=label_smoothing,
            target_margin=target_margin,
        )
    if loss_type == "ipo":
        return ipo_loss(chosen, rejected, kl_coeff)
    if loss_type == "kto":
        assert kl is not None, "KTO is measured from a reference point"
        present = chosen_lengths > 0, rejected_lengths > 0
        return kto_loss(chosen, rejected, kl, kl_coeff, weights=kto_weights, present=present)
    raise ValueError(f"loss_type={loss_type!r} must be one of {', '.join(PREFERENCE_LOSSES)}")


def load_balancing_loss(logits: list[Tensor], experts: list[Tensor], weights: Tensor) -> Tensor:
    """E Σ_e f_e p_e, a scalar: f_e tokens sent to expert e and p_e its mean probability, both means
    over tokens and layers; k where E experts, k of them for each token, are used alike.

    Fedus et al. 2021 ("Switch Transformers"), eqs. 4 to 6, as transformers'
    `load_balancing_loss_func`. The gradient flows through the probabilities.

    Args:
        logits: of each layer's router, [tokens, E].
        experts: that it chose, [tokens, k].
        weights: how often each token counts, [tokens]; 0 of padding.
    """
    num_experts, total = logits[0].shape[1], len(logits) * weights.sum()
    weights = weights.float().unsqueeze(1)
    sent = torch.zeros(num_experts, device=weights.device)
    liked = torch.zeros_like(sent)
    for scores, chosen in zip(logits, experts, strict=True):
        sent = sent.scatter_add(0, chosen.flatten(), weights.expand(chosen.shape).flatten())
        liked = liked + (scores.float().softmax(dim=-1) * weights).sum(dim=0)
    return num_experts * (sent / total * (liked / total)).sum()
