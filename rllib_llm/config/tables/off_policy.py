"""What is done about tokens that older weights, or another engine, sampled."""

from __future__ import annotations

from rllib_llm.config.setting import Condition, Section, Setting
from rllib_llm.numerics.kl import KL_ESTIMATORS
from rllib_llm.numerics.off_policy import WEIGHT_LEVELS, WEIGHT_MODES

OFF_POLICIES = ("bypass", "decoupled", "decoupled_loglinear")

CHOSEN = Condition(
    "off_policy is set",
    lambda c: c.off_policy is not None,
    "with off_policy=None",
    "Set off_policy='decoupled'",
)
DECOUPLED = Condition(
    "off_policy is 'decoupled' or 'decoupled_loglinear'",
    lambda c: c.off_policy in ("decoupled", "decoupled_loglinear"),
    "with off_policy={config.off_policy!r}: the ratio is to the sampler's own log-probs",
    "Set off_policy='decoupled'",
)
WEIGHED = Condition(
    "off_policy_weights is set",
    lambda c: c.off_policy_weights is not None,
    "with off_policy_weights=None",
    "Choose 'truncate'",
)
REJECTS = Condition(
    "rejection is set",
    lambda c: c.rejection is not None,
    "with rejection=None",
    "Set rejection='k3'",
)

OFF_POLICY = Section(
    "training",
    "Corrections for data that older weights sampled.",
    (
        Setting(
            name="off_policy",
            type=str | None,
            default=None,
            choices=OFF_POLICIES,
            meaning="how data of older weights is corrected; None: it is fresh",
            note='"decoupled": the learner computes the log-probs of the policy before the update, '
            "at which the clipped ratio begins, and weighs each token by its probability there "
            'over the sampler\'s (AReaL, Fu et al. 2025); "decoupled_loglinear": without that '
            "forward pass, between the sampler's log-probs and the present ones by the token's "
            'age (A-3PO); "bypass": the clipped ratio is to the sampler\'s log-probs, whatever '
            "their age. With None old log-probs are the sampler's too, but in half precision with "
            "a critic they are computed again.",
            remedy="Use 'decoupled'",
            also=("recompute_old_logprobs", "use_decoupled_loss", "rollout_correction",
                  "prox_logp_method", "bypass_mode"),
        ),
        Setting(
            name="off_policy_weights",
            type=str | None,
            default="truncate",
            choices=WEIGHT_MODES,
            meaning="what becomes of importance weights outside the bounds; None: all weigh 1",
            note='"truncate": they are cut to the bounds; "mask": the token (or completion) is '
            "left out, while denominators still count it.",
            remedy="Use 'truncate'",
            acts=(DECOUPLED,),
            trl=("vllm_importance_sampling_correction",),
            also=("importance_sampling", "behav_imp_weight_mode", "rollout_is"),
        ),
        Setting(
            name="off_policy_level",
            type=str,
            default="token",
            choices=WEIGHT_LEVELS,
            meaning="what one importance weight is of",
            note='"sequence": a whole completion; unbiased, but far from 1 for long ones.',
            acts=(DECOUPLED, WEIGHED),
            trl=("vllm_importance_sampling_mode",),
        ),
        Setting(
            name="off_policy_lower",
            type=float,
            default=0.0,
            least=0,
            meaning="the smallest importance weight",
            note="IcePop masks below 0.5.",
            remedy="Use 0 for no bound",
            acts=(DECOUPLED, WEIGHED),
        ),
        Setting(
            name="off_policy_upper",
            type=float,
            default=2.0,
            above=0,
            meaning="the largest importance weight (Yao et al. 2025: 2)",
            reason="it is the largest weight",
            remedy="Use 2",
            acts=(DECOUPLED, WEIGHED),
            trl=("vllm_importance_sampling_cap",),
            also=("importance_sampling_cap", "tis_imp_ratio_cap", "behav_imp_weight_cap",
                  "rollout_is_threshold"),
        ),
        Setting(
            name="rejection",
            type=str | None,
            default=None,
            choices=KL_ESTIMATORS,
            meaning="which estimate of the KL from the sampler's policy keeps tokens out of the "
            "loss; None: none",
            note="Denominators still count what is rejected (`off_policy/rejected_share`). k1 is "
            "minus the log-ratio, k3 is never negative.",
            remedy="Use 'k3'",
            acts=(CHOSEN,),
            also=("rollout_rs",),
        ),
        Setting(
            name="rejection_level",
            type=str,
            default="sequence",
            choices=("sequence", "token"),
            meaning="what is rejected",
            note='"sequence": completions, by the mean over their tokens; "token": single ones.',
            acts=(CHOSEN, REJECTS),
        ),
        Setting(
            name="rejection_lower",
            type=float | None,
            default=None,
            unit="nats",
            meaning="what is rejected below; None: nothing",
            acts=(CHOSEN, REJECTS),
        ),
        Setting(
            name="rejection_upper",
            type=float | None,
            default=None,
            unit="nats",
            meaning="what is rejected above; None: nothing",
            note="0.05 suits the mean k3 of completions.",
            acts=(CHOSEN, REJECTS),
            also=("rollout_rs_threshold",),
        ),
    ),
)  # fmt: skip
