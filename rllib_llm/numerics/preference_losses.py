"""Losses on preference pairs for a policy that is trained on them without a reward model.

A pair's log-ratios are those of its two completions, sums over their tokens:
h_w = log π(y_w|x) − log π_ref(y_w|x) of the chosen one, h_l of the rejected one; without a
reference they are the policy's log-probs alone. β h is the reward that the policy implies, and β
what the coefficient of the KL is in RLHF (TRL: `beta`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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


def kto_loss(chosen: Tensor, rejected: Tensor, kl: Tensor, kl_coeff: float) -> Tensor:
    """½ [1 − σ(β (h_w − z)) + 1 − σ(β (z − h_l))] of each pair [pairs]: each completion is judged
    for itself, better or worse than the reference point z.

    Ethayarajh et al. 2024, eq. 8, with λ_D = λ_U = 1, as there are as many chosen as rejected ones.
    `kl`: z, a scalar without gradient, see `kto_reference_point`.
    """
    desirable = 1 - torch.sigmoid(kl_coeff * (chosen - kl))
    undesirable = 1 - torch.sigmoid(kl_coeff * (kl - rejected))
    return 0.5 * (desirable + undesirable)


def kto_reference_point(total: Tensor, num_rows: int) -> Tensor:
    """z, a scalar: the mean log-ratio of completions after prompts that are not theirs, at least 0.

    An estimate of the KL of the policy from the reference (Ethayarajh et al. 2024, section 4.1).
    `total`: sum of the log-ratios of `num_rows` such rows.
    """
    return (total / max(num_rows, 1)).clamp(min=0.0).detach()


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
) -> Tensor:
    """Loss of each pair [pairs] by the name of the loss, from its log-ratios [pairs].

    "sigmoid" is DPO, "sigmoid_norm" DPO on log-ratios per token (SimPO without a reference), "ipo"
    and "kto" are as above. Lengths [pairs] in tokens; `kl` is KTO's reference point.

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
        return kto_loss(chosen, rejected, kl, kl_coeff)
    raise ValueError(
        f"loss_type={loss_type!r} must be one of {', '.join(PREFERENCE_LOSSES)}: no other is "
        "known. Use 'sigmoid' for DPO."
    )
