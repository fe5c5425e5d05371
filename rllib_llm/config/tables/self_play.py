"""The second player."""

from __future__ import annotations

from rllib_llm.config.setting import Condition, Section, Setting

FROZEN = Condition(
    "opponent is 'frozen'",
    lambda c: c.opponent == "frozen",
    "with opponent='trained': it learns itself",
    "Set opponent to 'frozen'",
)

SELF_PLAY = Section(
    "self_play",
    "The second player.",
    (
        Setting(
            name="opponent",
            type=str,
            default="trained",
            choices=("trained", "frozen"),
            meaning="whether the second player learns, too, or stays what it was",
        ),
        Setting(
            name="opponent_model",
            type=str | None,
            default=None,
            meaning="what the second player starts from; None: what the policy starts from",
            note="It has the policy's tokenizer and chat template.",
        ),
        Setting(
            name="opponent_every",
            type=int,
            default=0,
            least=0,
            unit="iterations",
            meaning="how often a frozen opponent is given the policy's weights",
            note="0: never.",
            remedy="Use 0 for never",
            acts=(FROZEN,),
        ),
    ),
)
