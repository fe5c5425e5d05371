"""Routers of a mixture of experts: which experts they choose, how evenly, and passes in which they
take the experts of another pass.

A router scores all experts for each token and sends it to the k best. The last bits of its input
decide between experts that it likes alike, so that sampler and learner, whose products are cut
differently, may choose differently, and their log-probs differ by far more than round-off. Rollout
routing replay (R3, Ma et al. 2025, arXiv 2510.11370) hands the sampler's choices to the learner:

    sampler   logits -> top k -> experts ───────────────┐ a column of the batch
    learner   logits -> softmax -> probabilities at the experts -> weights, with gradient
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from rllib_llm.modules.multimodal import text_decoder
from rllib_llm.modules.packing import WantedTokens
from rllib_llm.numerics.losses import load_balancing_loss
from rllib_llm.shared.columns import UNKNOWN_EXPERT
from rllib_llm.shared.errors import Problems, require

# Between a router's weights and ours. Half precision rounds them; a wrong rule is off by a tenth.
_TOLERANCE = 0.02


@dataclass
class Routing:
    """The routing of one pass.

    experts: chosen before, [batch, length, layers * k], `UNKNOWN_EXPERT` where the router decides;
    None: everywhere. aux_loss: `load_balancing_loss` of the pass, once it is over, in which a token
    counts as often as rows read it.
    """

    experts: Tensor | None = None
    aux_loss: Tensor | None = None

    @contextlib.contextmanager
    def around(self, model: nn.Module, wanted: WantedTokens) -> Iterator[None]:
        """The pass of `model` over `wanted`, whose tokens were traced."""
        assert wanted.sources is not None and wanted.num_readers is not None, "of traced rows"
        given = None
        if self.experts is not None:
            given = self.experts.flatten(0, 1).index_select(0, wanted.sources)
        with routed(model, given) as chosen:
            yield
        self.aux_loss = load_balancing_loss(chosen.logits, chosen.experts, wanted.num_readers)


@dataclass
class Choices:
    """Outputs of the routers in a pass, by layer: logits [tokens, experts], experts [tokens, k]."""

    logits: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)

    def by_token(self) -> Tensor:
        """The experts as a batch holds them, [tokens, layers * k] int16."""
        return torch.stack(self.experts, dim=1).flatten(1).to(torch.int16)


@dataclass
class Routers:
    """The routers of a model, in the order of its layers.

    normalizes: whether the weights of a token's experts are scaled to sum 1. given: the experts of
    the pass under way, which layers that compute their activations again need, too.
    """

    modules: list[nn.Module]
    normalizes: bool
    given: Tensor | None = None

    def weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        """The weights [tokens, k] float32 of experts [tokens, k]."""
        weights = logits.float().softmax(dim=-1).gather(1, experts)
        return weights / weights.sum(dim=-1, keepdim=True) if self.normalizes else weights

    @contextlib.contextmanager
    def hooked(self, hook: Callable[[int, Any], Any]) -> Iterator[None]:
        """Calls `hook(layer, output)` for each router's output in this thread; what it returns
        takes the output's place."""
        thread = threading.get_ident()

        def at(layer: int) -> Any:
            here = threading.get_ident
            return lambda _, __, output: hook(layer, output) if here() == thread else None

        handles = [m.register_forward_hook(at(i)) for i, m in enumerate(self.modules)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def taking(self, given: Tensor) -> Callable[[int, Any], Any]:
        """A hook that gives each token the experts `given` [tokens, layers * k]."""
        told = given.unflatten(1, (len(self.modules), -1)).long()

        def hook(layer: int, output: Any) -> Any:
            logits, weights, own = output
            experts = told[:, layer].where(told[:, layer] != UNKNOWN_EXPERT, own)
            return logits, self.weights(logits, experts).to(weights.dtype), experts

        return hook


# Of each model, found once.
_known: WeakKeyDictionary[nn.Module, Routers] = WeakKeyDictionary()


def routers_of(model: Any) -> Routers:
    """The routers of a causal language model of transformers.

    Raises:
        Problems: it has none, or they weigh experts in a way that is not known here; tried on a
            few tokens of the model itself.
    """
    if model not in _known:
        found = _declared(text_decoder(model))
        name, rule = type(model).__name__, "be a mixture of experts"
        remedy = "Leave out router_aux_coeff and routing_replay"
        require(found, "model", name, rule, "it is dense: there are no routers", remedy)
        routers = Routers(found, bool(getattr(found[0], "norm_topk_prob", True)))
        reason = "experts' weights are not their probabilities, as in Qwen3-MoE and Mixtral"
        require(_weighs_as_expected(model, routers), "model", name,
                f"{rule} that are chosen by softmax", reason, remedy)  # fmt: skip
        _known[model] = routers
    return _known[model]


def _declared(model: nn.Module) -> list[nn.Module]:
    """The modules whose first output transformers records as router logits."""
    found: dict[nn.Module, None] = {}
    for part in model.modules():
        recorded = getattr(part, "_can_record_outputs", None) or {}
        kind = recorded.get("router_logits") if isinstance(part, PreTrainedModel) else None
        if isinstance(kind, OutputRecorder) and kind.index == 0:
            found |= dict.fromkeys(m for m in part.modules() if isinstance(m, kind.target_class))
    return list(found)


@torch.no_grad()
def _weighs_as_expected(model: Any, routers: Routers) -> bool:
    found: list[bool] = []

    def compare(_: int, output: Any) -> None:
        is_known = isinstance(output, tuple) and len(output) == 3
        if is_known and (is_known := output[1].shape == output[2].shape):
            gap = routers.weights(output[0], output[2]) - output[1].float()
            is_known = bool(gap.abs().max() <= _TOLERANCE)
        found.append(is_known)

    device = next(model.parameters()).device
    with routers.hooked(compare):
        model(input_ids=torch.arange(8, device=device).unsqueeze(0), use_cache=False)
    return found == [True] * len(routers.modules)


@contextlib.contextmanager
def routed(model: Any, given: Tensor | None = None) -> Iterator[Choices]:
    """Passes of `model` whose routers take the experts `given` [tokens, layers * k], in the order
    in which the pass reads tokens; what they chose is there once it is over.

    Weights and gradients are those of a router that had chosen these experts itself.
    """
    routers, made = routers_of(model), {}
    take = (lambda _, output: output) if given is None else routers.taking(given)

    def note(layer: int, output: Any) -> Any:
        made[layer] = take(layer, output)
        return made[layer]

    before, routers.given, chosen = routers.given, given, Choices()
    try:
        with routers.hooked(note):
            yield chosen
    finally:
        routers.given = before
    chosen.logits, chosen.experts = ([made[i][place] for i in sorted(made)] for place in (0, 2))


def routed_again(model: Any) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts of a layer's pass and of the one that computes it again in the backward pass, for
    `torch.utils.checkpoint`: both take the same experts."""
    routers = _known.get(model)
    if routers is None or routers.given is None:
        return contextlib.nullcontext(), contextlib.nullcontext()
    return contextlib.nullcontext(), routers.hooked(routers.taking(routers.given))


@contextlib.contextmanager
def fixed_experts(model: Any) -> Iterator[None]:
    """Passes that send every token to the first experts, where roundings would choose: to compare
    two forms of a pass. No effect on a model without routers that are known here."""
    try:
        routers = routers_of(model)
    except Problems:
        routers = Routers([], False)

    def first(_: int, output: Any) -> Any:
        logits, weights, own = output
        experts = torch.arange(own.shape[1], device=own.device).expand_as(own)
        return logits, routers.weights(logits, experts).to(weights.dtype), experts

    with routers.hooked(first):
        yield
