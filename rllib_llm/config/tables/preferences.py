"""Direct preference optimisation: its loss, and what it measures the policy against."""

from __future__ import annotations

from rllib_llm.config.setting import Section, Settings, setting
from rllib_llm.numerics.losses import PREFERENCE_LOSSES


class Preferences(Settings):
    """The loss of preference pairs."""

    loss_type: str = setting(
        "sigmoid",
        "which loss is taken of a pair",
        note='"sigmoid": DPO. "ipo": the margin is led to 1/(2β) instead of ever upwards (Azar '
        'et al. 2023). "kto": each completion is judged for itself, against the policy\'s KL '
        "from the reference, for which two more forward passes are made (Ethayarajh et al. "
        '2024). "sigmoid_norm": DPO on log-probs per token, so that long completions weigh no '
        "more; with `reference_free` it is SimPO (Meng et al. 2024).",
        choices=PREFERENCE_LOSSES,
        remedy="Use 'sigmoid' for DPO",
    )
    ref_kl_coeff: float = setting(
        0.1,
        "β, how much a log-ratio to the reference counts",
        note="Lower lets the policy move farther away; τ of IPO. 0.1 to 0.5 for sums over "
        "tokens; per token about 2 to 10.",
        above=0,
        trl=("beta",),
        reason="log-ratios are multiplied by it",
        remedy="DPO's 0.1 is a start",
    )
    label_smoothing: float = setting(
        0.0,
        "the share of the pairs that are taken to be the wrong way round",
        note="Below 0.5 (conservative DPO); 0: none. For the sigmoid losses.",
        least=0,
        remedy="Use 0 for none",
    )
    target_margin: float = setting(
        0.0,
        "γ, what the rewards of a pair are to be apart",
        note="SimPO: about β/2; 0: none. For the sigmoid losses.",
        least=0,
        trl=("simpo_gamma",),
        reason="chosen completions are to be the better ones",
        remedy="Use 0 for none",
    )
    reference_free: bool = setting(
        False, "whether log-probs stand for log-ratios, without a reference"
    )


PREFERENCES = Section.of("training", Preferences)
