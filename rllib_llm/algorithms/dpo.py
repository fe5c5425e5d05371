"""Direct preference optimisation (Rafailov et al. 2023) and its kin, on preference pairs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rllib_llm.algorithms.supervised import Supervised, SupervisedConfig
from rllib_llm.config.sections import wrong
from rllib_llm.data.mixture import MixedSource
from rllib_llm.data.preferences import PromptedPairSource
from rllib_llm.data.texts import BatchSource
from rllib_llm.numerics.losses import PREFERENCE_LOSSES
from rllib_llm.shared.errors import Problem, require
from rllib_llm.shared.setting import Section, Settings, setting, when

KTO = when("loss_type", "is 'kto'", lambda kind: kind == "kto", "Set loss_type: kto")


class Preferences(Settings):
    """The loss of preference pairs."""

    loss_type: str = setting(
        "sigmoid", "the loss of a pair",
        note='"sigmoid": DPO. "ipo": drives the margin to 1/(2β) instead of ever upwards (Azar '
        'et al. 2023). "kto": scores each completion by itself, against the policy\'s KL to '
        "the reference, which takes two more forward passes (Ethayarajh et al. 2024); its data may "
        "be {prompt, completion, label} rows as well. "
        '"sigmoid_norm": DPO on log-probs per token, so that long completions weigh no '
        "more; with `reference_free` it is SimPO (Meng et al. 2024).", choices=PREFERENCE_LOSSES,
    )  # fmt: skip
    ref_kl_coeff: float = setting(
        0.1, "β, the weight of log-ratios to the reference",
        note="Lower values let the policy move farther away; τ of IPO. 0.1 to 0.5 for sums over "
        "tokens; about 2 to 10 per token.", above=0, trl="beta", remedy="DPO's 0.1 is a start",
    )  # fmt: skip
    desirable_weight: float = setting(
        1.0, "λ_D, KTO's weight of chosen completions", note="Where one label is rarer, its weight "
        "times its count should be 1 to 4/3 of the other's (Ethayarajh et al. 2024, eq. 9).",
        least=0, acts=(KTO,),
    )  # fmt: skip
    undesirable_weight: float = setting(
        1.0, "λ_U, KTO's weight of rejected completions", least=0, acts=(KTO,)
    )
    label_smoothing: float = setting(
        0.0, "the assumed share of wrongly labelled pairs",
        note="Below 0.5 (conservative DPO); 0: none. For the sigmoid losses.", least=0,
    )  # fmt: skip
    target_margin: float = setting(
        0.0, "γ, the target margin between the rewards of a pair",
        note="SimPO: about β/2; 0: none. For the sigmoid losses.", least=0, trl="simpo_gamma",
    )  # fmt: skip
    reference_free: bool = setting(
        False, "whether log-probs replace log-ratios, without a reference"
    )


PREFERENCES = Section.of("training", Preferences)


class DPOConfig(SupervisedConfig):
    """The policy itself is trained on {"prompt", "chosen", "rejected"} rows, those of
    `RewardModel`, for KTO also on {"prompt", "completion", "label"}; the reference is the model
    that training starts from, usually the SFT model."""

    sections: tuple[Section, ...] = (*SupervisedConfig.sections, PREFERENCES)
    source_class = PromptedPairSource
    module_path = "rllib_llm.modules.rl_modules:PreferenceModule"
    learner_path = "rllib_llm.learners.supervised_learners:DPOLearner"

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or DPO)
        self.lr = 1e-6  # a policy that has learnt to write is only turned (TRL's default as well)

    def make_source(self, data: Any, **settings: Any) -> BatchSource | MixedSource:
        source = super().make_source(data, **settings)
        require(
            self.loss_type == "kto" or not source.is_unpaired, "loss_type",
            self.loss_type, "be 'kto' with rows of one completion and a label",
            "the others compare two completions", "Set loss_type='kto', or give pairs",
        )  # fmt: skip
        return source

    def preference_rules(self) -> Iterator[Problem]:
        """The loss has a use for the settings."""
        loss = self.loss_type
        if not 0 <= self.label_smoothing < 0.5:
            yield wrong(self, "label_smoothing", "in [0, 0.5)", "it is the share of pairs that are "
                        "the wrong way round", "Use 0 for none")  # fmt: skip
        for name in ("label_smoothing", "target_margin"):
            if getattr(self, name) and loss not in ("sigmoid", "sigmoid_norm"):
                yield wrong(self, name, f"0 with loss_type={loss!r}", "that loss has no use for it",
                            "Leave it out, or use a sigmoid loss")  # fmt: skip
        if loss == "kto" and self.reference_free:
            yield wrong(self, "reference_free", "False with loss_type='kto'",
                        "it judges by the KL from the reference",
                        "Use loss_type='sigmoid_norm' without a reference")  # fmt: skip
        if loss == "kto" and self.minibatch_size == 1:
            yield wrong(self, "minibatch_size", "at least 2 with loss_type='kto'", "the KL is "
                        "measured on completions of other pairs of the mini-batch",
                        "Set minibatch_size=2 or more")  # fmt: skip

    rules = (*SupervisedConfig.rules, preference_rules)


class DPO(Supervised):
    """RLlib Algorithm; see `DPOConfig`. Results: loss/dpo, train/accuracy, rewards/{chosen,
    rejected, margins} (β times the log-ratios), logps/{chosen, rejected} (nats per completion), and
    the same of held-out pairs: eval/loss, eval/accuracy, eval/rewards/margins ...

    The first update's loss is log 2 = 0.693 and its margins are 0, up to round-off: the policy is
    the reference. A falling logps/chosen means that the policy forgets what was chosen, too: lower
    `lr`, or raise `ref_kl_coeff`.
    """

    config: DPOConfig
    config_class = DPOConfig
