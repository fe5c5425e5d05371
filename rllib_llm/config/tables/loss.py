"""Advantages, the loss, and the KL to the reference."""

from __future__ import annotations

from typing import Any

from rllib_llm.config.setting import IN_ENV, Condition, Section, Setting
from rllib_llm.numerics.losses import POLICY_LOSSES, REDUCTIONS

CRITIC = Condition(
    "critic is not 'none'", lambda c: c.critic != "none", "with critic={config.critic!r}"
)
SEPARATE = Condition(
    "critic is 'separate'",
    lambda c: c.critic == "separate",
    "with critic={config.critic!r}",
    "Use critic='separate'",
)
PENALISED = Condition(
    "ref_kl_coeff is above 0",
    lambda c: bool(c.ref_kl_coeff),
    "with ref_kl_coeff=0: there is no KL",
    "Start from a coefficient above 0",
)
ADAPTIVE = Condition(
    "ref_kl_target is set",
    lambda c: c.ref_kl_target is not None,
    "without ref_kl_target: the coefficient is fixed",
    "Set a target",
)
# The mean of grad log pi over pi's own tokens is 0, and k1's gradient is no more than that.
MOVES = Condition(
    "it is not k1 in the loss, whose gradient has mean 0 without ref_kl_unbiased",
    lambda c: c.ref_kl_in == "reward" or c.ref_kl_estimator != "k1" or c.ref_kl_unbiased
    or not c.ref_kl_coeff,
    "as k1 in the loss without ref_kl_unbiased: the mean of its gradient is 0",
    "Choose 'k2' or 'k3', or set ref_kl_unbiased=True",
)  # fmt: skip
IN_LOSS = Condition(
    "ref_kl_in is 'loss'",
    lambda c: c.ref_kl_in == "loss",
    "with ref_kl_in='reward': it is for the loss",
)
SAMPLED_KL = Condition(
    "ref_kl_estimator is not 'full'",
    lambda c: c.ref_kl_estimator != "full",
    "with ref_kl_estimator='full': nothing is sampled",
)


LOSS = Section(
    "training",
    "Advantages and the loss.",
    (
        Setting(
            name="critic",
            type=str,
            default="none",
            choices=("shared", "separate", "none"),
            meaning="where values come from",
            note='"shared": a value head on the policy\'s trunk; "separate": a model of its own.',
            rllib=("vf_share_layers", "use_critic"),
        ),
        Setting(
            name="critic_model",
            type=str | None,
            default=None,
            meaning="what a separate critic starts from, usually the reward model",
            acts=(SEPARATE,),
            also=("value_model", "critic_path"),
        ),
        Setting(
            name="policy_loss",
            type=str,
            default="ppo",
            choices=tuple(POLICY_LOSSES),
            meaning="which ratio of new to old probabilities the loss holds",
            note='"ppo": of each token; "gspo": a completion\'s geometric mean; "rloo": a '
            'completion\'s whole ratio; "cispo": of each token, detached.',
            trl=("importance_sampling_level",),
            also=("loss_type", "policy_loss_fn", "adv_estimator"),
        ),
        Setting(
            name="loss_reduction",
            type=str,
            default="token_mean",
            choices=tuple(REDUCTIONS),
            meaning="how the losses of tokens become one number",
            note='"token_mean" (DAPO): every token of the mini-batch weighs the same; '
            '"sequence_mean" (GRPO): every completion does; "dr_grpo": sums over max_new_tokens.',
            trl=("loss_type",),
            also=("loss_agg_mode", "loss_aggregation", "reduction"),
        ),
        Setting(
            name="clip_param",
            type=float,
            default=0.2,
            least=0,
            meaning="ε: ratios are held to 1 - ε, and to 1 + ε unless `clip_param_high` is set",
            reason="ratios are held to 1 - it and 1 + it",
            remedy="PPO uses 0.2",
            trl=("epsilon",),
            also=("cliprange", "clip_range", "eps_clip", "clip_ratio", "clip_epsilon"),
        ),
        Setting(
            name="clip_param_high",
            type=float | None,
            default=None,
            least=0,
            meaning="the ε of ratios above 1 (DAPO's clip-higher); None: `clip_param`",
            reason="ratios are held to 1 + it",
            remedy="DAPO uses 0.28",
            trl=("epsilon_high",),
            also=("clip_ratio_high", "eps_clip_high"),
        ),
        Setting(
            name="dual_clip",
            type=float | None,
            default=None,
            above=1,
            meaning="the bound on the loss of negative advantages; None: off",
            reason="it bounds ratios of negative advantages",
            remedy="Ye et al. use 3",
            trl=("delta",),
            also=("clip_ratio_c",),
        ),
        Setting(
            name="vf_clip_param",
            type=float | None,
            default=0.2,
            above=0,
            meaning="how far values may go from the old ones; None: as far as they like",
            reason="values are held to the old ones +- it",
            remedy="None: no clipping",
            acts=(CRITIC,),
            trl=("cliprange_value",),
            also=("value_clip", "cliprange_vf"),
        ),
        Setting(
            name="vf_loss_coeff",
            type=float,
            default=0.1,
            least=0,
            meaning="the weight of the critic's loss",
            reason="it weighs a part of the loss",
            remedy="Use 0 to switch it off",
            acts=(CRITIC,),
            trl=("vf_coef",),
            also=("value_loss_coef", "critic_loss_coef"),
        ),
        Setting(
            name="entropy_coeff",
            type=float,
            default=0.0,
            meaning="the weight of the policy's entropy, a bonus",
            reason="it is one number for the whole run: schedules of it are not built in",
            remedy="Use 0.0 for none, or change it between runs with population-based training",
            also=("entropy_coef", "ent_coef"),
        ),
        Setting(
            name="gamma",
            type=float,
            default=1.0,
            least=0,
            most=1,
            meaning="the discount of later rewards",
            reason="later rewards are discounted by it",
            remedy="Use 1 for completions",
            also=("discount",),
        ),
        Setting(
            name="lambda_",
            type=float,
            default=0.95,
            least=0,
            most=1,
            meaning="λ of GAE",
            reason="later TD errors are discounted by it",
            remedy="Use 0.95",
            trl=("lam",),
            rllib=("lambda",),
            also=("gae_lambda",),
        ),
        Setting(
            name="target_kl",
            type=float | None,
            default=None,
            above=0,
            unit="nats per token",
            meaning="the approximate KL to the old policy, beyond 1.5 times which a batch's epochs "
            "stop; None: never",
            reason="epochs stop when the policy is farther away",
            remedy="None: never",
            rllib=("kl_target",),
        ),
        Setting(
            name="whiten_advantages",
            type=bool,
            default=True,
            meaning="whether advantages get mean 0 and variance 1 over the batch of all learners",
            also=("normalize_advantage", "normalize_advantages", "advantage_norm"),
        ),
        Setting(
            name="whiten_rewards",
            type=bool,
            default=False,
            meaning="whether token rewards get variance 1 over the batch of all learners",
        ),
        Setting(
            name="scale_by_std",
            type=bool,
            default=True,
            meaning="whether group advantages are divided by the group's standard deviation",
            note="False: Dr. GRPO.",
            trl=("scale_rewards",),
            also=("norm_adv_by_std_in_grpo",),
        ),
        Setting(
            name="drop_zero_variance_groups",
            type=bool,
            default=False,
            meaning="whether groups with equal scores stay out of the loss",
            note="The batch is smaller then. DAPO's dynamic sampling is filters=['reward_spread'], "
            "which has other prompts sampled in their place; with it there are none to drop.",
        ),
    ),
    also=("reference", "rewards"),
)

REFERENCE = Section(
    "reference",
    "The policy that training is held near to.",
    (
        Setting(
            name="reference",
            short="model",
            place=IN_ENV,
            type=Any,
            default=None,
            meaning="the frozen model, or {model, quantization, dtype, device}",
            keys=("quantization", "dtype", "device"),
            note="Without a model it is the policy's own start.",
            trl=("ref_model",),
            also=("reference_model", "ref_model_path", "sft_model_path", "ref_policy"),
        ),
        Setting(
            name="ref_kl_coeff",
            short="kl_coeff",
            type=float,
            default=0.05,
            least=0,
            meaning="β, the weight of the KL to the reference in nats; 0: off",
            reason="it weighs a part of the loss",
            remedy="Use 0 to switch it off",
            trl=("beta",),
            rllib=("kl_coeff",),
            also=("kl_coef", "init_kl_coef", "kl_loss_coef", "kl_beta", "kl_penalty_coef"),
        ),
        Setting(
            name="ref_kl_in",
            short="kl_in",
            type=str,
            default="reward",
            choices=("reward", "loss"),
            meaning="where the KL is taken off",
            note='"reward": per token (Ziegler 2019); "loss" (Shao 2024).',
            acts=(PENALISED, MOVES),
            rllib=("use_kl_loss",),
            also=("use_kl_in_reward",),
        ),
        Setting(
            name="ref_kl_estimator",
            short="kl_estimator",
            type=str,
            default="k1",
            choices=("k1", "k2", "k3", "full"),
            meaning="how the KL is computed",
            note='k1 to k3: Schulman, "Approximating KL divergence"; "full": the exact KL over the '
            "vocabulary, which a reference in the environment cannot give.",
            acts=(PENALISED, MOVES),
            trl=("kl_estimator",),
            also=("kl_loss_type", "kl_penalty"),
        ),
        Setting(
            name="ref_kl_unbiased",
            short="kl_unbiased",
            type=bool,
            default=True,
            meaning="whether the loss's KL is weighed by each token's π/π_old, so that its mean "
            "gradient is that of the exact KL",
            note="k1 and k3 take the ratio's gradient too, which is not 0 on policy either "
            "(DeepSeek-V3.2, 3.1; default, as in TRL since 1.10); k2 takes the ratio alone. It is "
            "the token's with every policy_loss: GSPO's geometric mean over a completion, which "
            "TRL takes with it, is no importance weight, and the KL would be of another policy. "
            "False: Shao 2024's, whose gradient for k3 is that of the KL the other way round.",
            acts=(IN_LOSS, SAMPLED_KL),
            trl=("use_bias_correction_kl",),
        ),
        Setting(
            name="ref_kl_target",
            short="kl_target",
            type=float | None,
            default=None,
            above=0,
            unit="nats per completion",
            meaning="what an adaptive β aims at; None: β is fixed",
            reason="the coefficient is steered by kl/target - 1",
            remedy="None: fixed",
            acts=(PENALISED,),
            also=("adap_kl_ctrl", "target"),
        ),
        Setting(
            name="ref_kl_horizon",
            short="kl_horizon",
            type=float,
            default=10_000.0,
            above=0,
            unit="samples",
            meaning="over how much the adaptive β changes by at most a fifth",
            reason="it is divided by",
            remedy="Use 10000",
            acts=(ADAPTIVE,),
            also=("horizon",),
        ),
        Setting(
            name="reference_in",
            short="place",
            type=str | None,
            default=None,
            choices=("environment", "policy", "learner"),
            meaning="who computes the reference's log-probs",
            note='"environment": a frozen model in every sampler, quantised if so set; "policy": '
            'the trunk with its adapters off (with lora, where it is the default); "learner": a '
            "copy in every learner.",
            remedy="Use None to have it chosen",
            acts=(PENALISED,),
        ),
    ),
)
