"""Settings of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rllib_llm.config.sections import wrong
from rllib_llm.shared.errors import Problem
from rllib_llm.shared.setting import Section, Settings, setting


class Balance(Settings):
    """The routers of a mixture of experts."""

    router_aux_coeff: float = setting(
        0.0, "the weight of the routers' auxiliary loss, which spreads tokens over experts",
        note="Switch Transformers' loss, as in transformers, over the real tokens of each forward "
        "pass, weighted by its share of the mini-batch's sampled tokens: it changes a little with "
        "micro_batch_tokens. Models are trained with 0.001 to 0.01. 0: off.", least=0,
        trl="router_aux_loss_coef", also="moe_aux_loss_coeff aux_loss_coef",
        reason="it weighs a part of the loss", remedy="Use 0 to switch it off",
    )  # fmt: skip


class Replay(Settings):
    """Their choices, from sampler to learner."""

    routing_replay: bool = setting(
        False, "whether learners send each token to the experts that the sampler chose (R3)",
        note="The choices, of prompts too, travel with the batch: two bytes for each token, layer "
        "and chosen expert, for a ratio of 1 on policy. Not stored with the rollouts; a reference "
        "and a teacher choose their own.",
        also="rollout_routing_replay use_rollout_routing_replay enable_rollout_routing_replay "
        "router_replay",
    )  # fmt: skip


BALANCE = Section.of("experts", Balance)
ROUTING_REPLAY = Section.of("experts", Replay)


def expert_rules(config: Any) -> Iterator[Problem]:
    """Routers are seen in the learner, and the sampler can say which experts it chose."""
    for name in ("router_aux_coeff", "routing_replay"):
        if getattr(config, name, 0) and config.torch_compile_learner:
            yield wrong(config, name, "off with torch_compile_learner",
                        "routers are watched between operations, which a compiled layer hides",
                        "Leave out torch_compile_learner")  # fmt: skip
    if not getattr(config, "routing_replay", False) or config.in_evaluation:
        return
    if config.engine != "torch":
        yield wrong(config, "routing_replay", f"False with engine={config.engine!r}",
                    "only our own decode loop says which experts it chose",
                    "Use engine='torch'")  # fmt: skip
    if config.generate_function is not None:
        yield wrong(config, "routing_replay", "False with generate_function",
                    "what it returns does not say which experts were chosen")  # fmt: skip
