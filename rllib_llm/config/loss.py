"""Advantages, the loss, and the KL to the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from rllib_llm.config.sections import wrong
from rllib_llm.config.tabled_config import OWN_ENVS
from rllib_llm.numerics.losses import POLICY_LOSSES, REDUCTIONS
from rllib_llm.shared.errors import Problem
from rllib_llm.shared.setting import IN_ENV, Condition, Section, Settings, is_set, setting, when

CRITIC = when("critic", "is not 'none'", lambda critic: critic != "none")
SEPARATE = when("critic", "is 'separate'", lambda c: c == "separate", "Use critic='separate'")
PENALISED = when(
    "ref_kl_coeff", "is above 0", bool, "Start from a coefficient above 0", ": there is no KL"
)
ADAPTIVE = when("ref_kl_target", "is set", is_set, "Set a target", ": the coefficient is fixed")
# The mean of grad log pi over pi's own tokens is 0, and k1's gradient is no more than that.
MOVES = Condition(
    "it is not k1 in the loss, which also needs ref_kl_unbiased",
    lambda c: c.ref_kl_in == "reward" or c.ref_kl_estimator != "k1" or c.ref_kl_unbiased
    or not c.ref_kl_coeff,
    "as k1 in the loss without ref_kl_unbiased: the mean of its gradient is 0",
    "Choose 'k2' or 'k3', or set ref_kl_unbiased=True",
)  # fmt: skip
IN_LOSS = when("ref_kl_in", "is 'loss'", lambda place: place == "loss", why=": it is for the loss")
SAMPLED_KL = when(
    "ref_kl_estimator", "is not 'full'", lambda k: k != "full", why=": nothing is sampled"
)
STEERED = when("entropy_target", "is set", is_set, "Set a target", ": the coefficient is fixed")
FOLLOWS = when("reference_update_every", "is set", is_set, "Set it", ": the reference is frozen")
BY_TURNS = when("turn_advantages", "is set", is_set, "Choose 'turn' or 'state'")
DISCOUNTS = Condition(
    "advantages are of tokens, or turn_advantages is set",
    lambda c: "turn_advantages" in c.ignored_settings or is_set(c.turn_advantages),
    "with turn_advantages=None: there is one reward, at the end",
    "Set turn_advantages, or remove it",
)  # fmt: skip


class Loss(Settings):
    """Advantages and the loss."""

    critic: Literal["shared", "separate", "none"] = setting(
        "none", "the source of values", note='"shared": a value head on the policy\'s trunk; '
        '"separate": a model of its own.', rllib="vf_share_layers use_critic",
    )  # fmt: skip
    critic_model: str | None = setting(
        None, "the initial model of a separate critic, usually the reward model", acts=(SEPARATE,),
        also="value_model critic_path",
    )  # fmt: skip
    policy_loss: str = setting(
        "ppo", "the probability ratio in the loss", note='"ppo": per token; "gspo": a '
        'completion\'s geometric mean; "rloo": a completion\'s whole ratio; "cispo": per token, '
        'detached.', choices=tuple(POLICY_LOSSES), trl="importance_sampling_level",
        also="loss_type policy_loss_fn adv_estimator",
    )  # fmt: skip
    loss_reduction: str = setting(
        "token_mean", "the reduction of token losses to one number",
        note='"token_mean" (DAPO): all tokens of the mini-batch have equal weight; "sequence_mean" '
        '(GRPO): all completions do; "dr_grpo": sums over max_new_tokens.',
        choices=tuple(REDUCTIONS), trl="loss_type", also="loss_agg_mode loss_aggregation reduction",
    )  # fmt: skip
    clip_param: float = setting(
        0.2, "the ε of [1 - ε, 1 + ε], to which ratios are clipped",
        note="`clip_param_high` sets another upper bound.", least=0, trl="epsilon",
        also="cliprange clip_range eps_clip clip_ratio clip_epsilon",
    )  # fmt: skip
    clip_param_high: float | None = setting(
        None, "the ε of ratios above 1 (DAPO's clip-higher)", note="None: `clip_param`.", least=0,
        trl="epsilon_high", also="clip_ratio_high eps_clip_high",
        remedy="Write 0.28 as DAPO does, or None for clip_param",
    )  # fmt: skip
    dual_clip: float | None = setting(
        None, "the bound on the loss of negative advantages (dual clip); None: off", above=1,
        trl="delta", also="clip_ratio_c", remedy="Ye et al. use 3",
    )  # fmt: skip
    vf_clip_param: float | None = setting(
        0.2, "the largest change of values from the old ones; None: unlimited", above=0,
        acts=(CRITIC,), trl="cliprange_value", also="value_clip cliprange_vf",
    )  # fmt: skip
    vf_loss_coeff: float = setting(
        0.1, "the weight of the critic's loss", least=0, acts=(CRITIC,), trl="vf_coef",
        also="value_loss_coef critic_loss_coef",
    )  # fmt: skip
    entropy_coeff: float = setting(
        0.0, "the weight of the entropy bonus", also="entropy_coef ent_coef",
        reason="it is one number for the whole run: schedules of it are not built in",
        remedy="Use 0.0 for none, or change it between runs with population-based training",
    )  # fmt: skip
    entropy_target: float | None = setting(
        None, "the entropy below which an adaptive entropy bonus acts; None: no adaptation",
        note="The coefficient begins at entropy_coeff, goes up by entropy_coeff_delta after a "
        "batch whose entropy is at most this, and down after others, where it is not applied "
        "(Skywork-OR1). Set it near the `policy/entropy_avg` of the first iterations.",
        unit="nats per token", above=0,
    )  # fmt: skip
    entropy_coeff_delta: float = setting(
        0.005, "the step of the adaptive entropy coefficient, which stays in [0, 1]",
        unit="per iteration", above=0, most=1, acts=(STEERED,), trl="entropy_coef_delta",
    )  # fmt: skip
    top_entropy_share: float = setting(
        1.0, "the share of the tokens, those of highest entropy, in the policy loss",
        note="Of the batch's tokens under the policy before the update; others keep KL and entropy "
        "terms and count in denominators. Wang et al. 2025 use 0.2; below 1 it takes a forward "
        "pass more.", above=0, most=1, trl="top_entropy_quantile",
    )  # fmt: skip
    gamma: float = setting(
        1.0, "the discount factor", note="Of tokens; with turn_advantages of turns.", least=0,
        most=1, acts=(DISCOUNTS,), also="discount",
    )  # fmt: skip
    lambda_: float = setting(
        0.95, "λ of GAE", least=0, most=1, trl="lam", rllib="lambda", also="gae_lambda"
    )
    target_kl: float | None = setting(
        None, "the approximate KL to the old policy, 1.5 times which ends a batch's epochs; None: "
        "never", unit="nats per token", above=0,
    )  # fmt: skip
    whiten_advantages: bool = setting(
        True, "whether advantages are whitened over the batch of all learners",
        also="normalize_advantage normalize_advantages advantage_norm",
    )  # fmt: skip
    whiten_rewards: bool = setting(
        False, "whether token rewards are scaled to variance 1 over the batch of all learners"
    )
    scale_by_std: bool = setting(
        True, "whether group advantages are divided by the group's standard deviation",
        note="False: Dr. GRPO.", trl="scale_rewards", also="norm_adv_by_std_in_grpo",
    )  # fmt: skip
    reward_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = setting(
        "sum_then_normalize", "the order in which several rewards become an advantage",
        note='"normalize_then_sum": each is normalised in its group, their weighted sum over the '
        "batch (GDPO), so that one of small spread still counts.",
        trl="multi_objective_aggregation",
    )  # fmt: skip
    turn_advantages: Literal["turn", "state"] | None = setting(
        None, "the peers of a turn, to whose rewards from there on its own are compared",
        note='"turn": turns of that number in the group; "state": turns of the group after the '
        "same last words of the environment (GiGPO). Added to the completion's advantage. None: a "
        "conversation's turns share one advantage.",
    )  # fmt: skip
    turn_advantage_coeff: float = setting(
        1.0, "ω, the weight of turn advantages", above=0, acts=(BY_TURNS,)
    )
    mask_truncated: bool = setting(
        False, "whether completions that were cut off are left out of the loss",
        note="They count in their group's baseline and in metrics, not in denominators (DAPO's "
        "overlong filtering).", trl="mask_truncated_completions", also="overlong_filtering",
    )  # fmt: skip
    drop_zero_variance_groups: bool = setting(
        False, "whether groups with equal scores are left out of the loss",
        note="This makes the batch smaller. DAPO's dynamic sampling is filters=['reward_spread'], "
        "which samples other prompts instead, so that there are none to drop.",
    )  # fmt: skip


LOSS = Section.of("training", Loss, also=("reference", "rewards", "distillation"))


class Reference(Settings):
    """The policy that training is held near to."""

    reference: Any = setting(
        None, "the frozen reference, or {model, quantization, dtype, device}",
        note="Default: the policy's initial weights.", keys=("quantization", "dtype", "device"),
        short="model", trl="ref_model",
        also="reference_model ref_model_path sft_model_path ref_policy", place=IN_ENV,
    )  # fmt: skip
    ref_kl_coeff: float = setting(
        0.05, "β, the weight of the KL to the reference, in nats; 0: off", least=0,
        short="kl_coeff", trl="beta", rllib="kl_coeff",
        also="kl_coef init_kl_coef kl_loss_coef kl_beta kl_penalty_coef",
        reason="it weighs a part of the loss", remedy="Use 0 to switch it off",
    )  # fmt: skip
    ref_kl_in: Literal["reward", "loss"] = setting(
        "reward", "where the KL is subtracted",
        note='"reward": per token (Ziegler 2019); "loss" (Shao 2024).', acts=(PENALISED, MOVES),
        short="kl_in", rllib="use_kl_loss", also="use_kl_in_reward",
    )  # fmt: skip
    ref_kl_estimator: Literal["k1", "k2", "k3", "full"] = setting(
        "k1", "the estimator of the KL",
        note='k1 to k3: Schulman, "Approximating KL divergence"; "full": the exact KL over the '
        "vocabulary, not available from a reference in the environment.", acts=(PENALISED, MOVES),
        short="kl_estimator", trl="kl_estimator", also="kl_loss_type kl_penalty",
    )  # fmt: skip
    ref_kl_unbiased: bool = setting(
        True, "whether the KL in the loss is weighted by each token's π/π_old, so that its "
        "expected gradient is that of the exact KL", note="For k1 and k3 the ratio's gradient is "
        "included, which is not 0 on policy either (DeepSeek-V3.2, 3.1; the default, as in TRL "
        "since 1.10); for k2 the ratio is detached. The ratio is per token with every policy_loss: "
        "GSPO's geometric mean, which TRL uses with it, is no importance weight and would give the "
        "KL of another policy. False: as in Shao 2024, whose gradient for k3 is that of the "
        "reverse KL.", acts=(PENALISED, IN_LOSS, SAMPLED_KL), short="kl_unbiased",
        trl="use_bias_correction_kl",
    )  # fmt: skip
    ref_kl_target: float | None = setting(
        None, "the target of an adaptive β; None: β is fixed", unit="nats per completion", above=0,
        acts=(PENALISED,), short="kl_target", rllib="kl_target", also="adap_kl_ctrl target",
        reason="the coefficient is steered by kl/target - 1",
    )  # fmt: skip
    ref_kl_horizon: float = setting(
        10_000.0, "the number over which the adaptive β changes by at most a fifth", unit="samples",
        above=0, acts=(ADAPTIVE,), short="kl_horizon", also="horizon",
    )  # fmt: skip
    reference_in: Literal["environment", "policy", "learner"] | None = setting(
        None, "where the reference's log-probs are computed",
        note='"environment": by a frozen model in every sampler, optionally quantised; '
        '"policy": by the trunk without its adapters (default with lora); "learner": by a '
        "copy in every learner.", acts=(PENALISED,), short="place",
    )  # fmt: skip
    reference_update_every: int | None = setting(
        None, "the number of optimiser steps after which the reference follows the policy; None: "
        "never", note="With a copy of the reference in the learners. A batch under way keeps the "
        "log-probs that it was given.", unit="optimiser steps", least=1, acts=(PENALISED,),
        short="update_every", trl="ref_model_sync_steps",
    )  # fmt: skip
    reference_update_mix: float = setting(
        1.0, "the policy's share α in the new reference α·policy + (1 - α)·reference",
        note="1: it is reset to the policy; less: a moving average (TR-DPO, whose α is 0.6).",
        above=0, most=1, acts=(FOLLOWS,), short="update_mix", trl="ref_model_mixup_alpha",
    )  # fmt: skip


REFERENCE = Section.of("reference", Reference)


# --- what must hold between them --------------------------------------------------------------


def loss_rules(config: Any) -> Iterator[Problem]:
    """Scores and the loss go together."""
    if config.overlong_buffer > config.max_new_tokens:
        yield wrong(config, "overlong_buffer", f"in 0..max_new_tokens={config.max_new_tokens}",
                    "it is the last so many tokens", "0: no punishment")  # fmt: skip
    if config.dual_clip is not None and config.policy_loss == "cispo":
        yield wrong(config, "dual_clip", "left at None with policy_loss='cispo'",
                    "it bounds ratios of negative advantages, absent from its loss")  # fmt: skip
    is_mean = REDUCTIONS[config.loss_reduction] == "sequence_mean"
    if config.policy_loss == "rloo" and not is_mean:
        yield wrong(config, "loss_reduction", "'sequence_mean' with policy_loss='rloo'",
                    "a completion is one action, and a mean over tokens weighs it by its length",
                    "Use 'sequence_mean', or policy_loss='ppo'")  # fmt: skip


def advantage_rules(config: Any) -> Iterator[Problem]:
    """Entropy control and the advantages of groups suit the other settings."""
    if config.entropy_target is not None and not 0 <= config.entropy_coeff <= 1:
        yield wrong(config, "entropy_coeff", "in [0, 1] with entropy_target",
                    "the adaptive coefficient begins there", "Use 0.0")  # fmt: skip
    if config.reward_aggregation != "normalize_then_sum":
        return
    own = ("score_clip", "scale_scores", "missing_eos_penalty", "length_penalty", "overlong_buffer",
           "turn_advantages", "drop_zero_variance_groups")  # fmt: skip
    for name in own:
        if getattr(config, name):
            yield wrong(config, name, "off with reward_aggregation='normalize_then_sum'",
                        "it acts on the sum of the rewards, which is not made there")  # fmt: skip
    if config.ref_kl_in == "reward" and config.ref_kl_coeff:
        yield wrong(config, "ref_kl_in", "'loss' with reward_aggregation='normalize_then_sum'",
                    "the KL would be subtracted from the sum of the rewards, which is not made "
                    "there", "Set ref_kl_in='loss' with ref_kl_estimator='k3'")  # fmt: skip


def reference_rules(config: Any) -> Iterator[Problem]:
    """The reference can be at the place that was chosen."""
    is_ours = isinstance(config.env_config, Mapping) and str(config.env).startswith(OWN_ENVS)
    named = config.env_config.get("reference") if is_ours else None
    place = config.reference_place
    if named is not None and place != "environment" and config.ref_kl_coeff:
        yield Problem("env_config.reference", f"be None with the reference in the {place}",
                      "the KL would be to the model that training starts from",
                      "Set reference_in='environment', or leave it out", named)  # fmt: skip
    if config.reference_in == "policy" and config.lora is None:
        yield wrong(config, "reference_in", "'environment' or 'learner' without lora",
                    "only a policy under adapters contains the model it started from",
                    "Set lora={}")  # fmt: skip
    if config.reference_update_every and config.ref_kl_coeff and place != "learner":
        yield wrong(config, "reference_update_every", f"None with the reference in the {place}",
                    "only a copy in the learners can follow their weights",
                    "Set reference_in='learner'")  # fmt: skip
    if config.ref_kl_estimator == "full" and place == "environment" and config.ref_kl_coeff:
        yield wrong(config, "ref_kl_estimator",
                    f"'k1', 'k2' or 'k3' with the reference in the {place}",
                    "the exact KL needs the reference's logits beside the policy's",
                    "Set reference_in='learner'")  # fmt: skip
