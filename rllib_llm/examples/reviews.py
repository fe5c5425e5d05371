"""rllib_llm/Reviews-v0: product reviews with an exact judge, the default to try things with.

The prompt opens a review ("My aunt gave me this tent"), the completion finishes it. Prompts, texts
and preference pairs come from a grammar, so nothing is downloaded, and the grammar's own judge
tells how good completions really are, whatever a learned reward says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllib_llm.envs import rlhf
from rllib_llm.envs.bandit import BanditEnv
from rllib_llm.examples.reviews_grammar import judge, prompts
from rllib_llm.shared.dotted import as_list

MODEL = "rllib_llm.examples.reviews_model.build_model"
# Prompts are the grammar's, those held out as well: there is no share of them to choose.
_ITS_OWN = ("prompts", "prompt_column", "eval_prompts", "eval_fraction")
DEFAULTS: dict[str, Any] = {
    **{name: row for name, row in rlhf.DEFAULTS.items() if name not in _ITS_OWN},
    "model": MODEL,
    "max_prompt_len": 16,
    "max_completion_len": 48,
}


def create(env_config: Mapping[str, Any]) -> BanditEnv:
    """The environment; its keys and their defaults are `DEFAULTS`.

    The reward is that of `reward_model` and `reward_functions`; without either it is the grammar's
    own: the gold score, or -3 where the text is no review. Metrics in any case: gold_score [B],
    -3..+3, the sentiment of what is said, and grammatical [B], 0 or 1.
    """
    settings = rlhf.with_defaults(env_config, DEFAULTS)
    functions = as_list(settings["reward_functions"])
    is_judged_otherwise = bool(settings["reward_model"] or functions)
    grammar = {"function": judged, "name": "grammar", "weight": 0.0 if is_judged_otherwise else 1.0}
    return rlhf.create(
        {
            **settings,
            "prompts": prompts("train"),
            "eval_prompts": prompts("eval") if settings["split"] == "eval" else None,
            "reward_functions": [*functions, grammar],
        }
    )


def judged(
    prompts: Sequence[str], completions: Sequence[str]
) -> tuple[list[float], dict[str, list[float]]]:
    """The grammar judge's result for the texts [B], with gold_score [B] and grammatical [B]."""
    texts = (prompt + completion for prompt, completion in zip(prompts, completions, strict=True))
    grades = [judge(text) for text in texts]
    return [grade.score for grade in grades], {
        "gold_score": [float(grade.sentiment) for grade in grades],
        "grammatical": [float(grade.grammatical) for grade in grades],
    }
