"""Adapters that a run publishes, merged into the model that is served."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from rllib_llm.engines.loading import TRUNK
from rllib_llm.modules.lora import add_adapters, merge_into
from rllib_llm.modules.pretrained import load_causal_lm
from rllib_llm.modules.quantize import quantize
from rllib_llm.serving.settings import ServeSettings


class AdapterMerger:
    """Makes whole weights of a run's adapters. It holds a copy of the frozen trunk.

    Args:
        source: of the trunk, as `load_causal_lm` takes it.
        settings: of the server; `lora` and `quantization` are the run's.
    """

    def __init__(self, source: str, settings: ServeSettings) -> None:
        assert settings.lora is not None, "there are no adapters"
        self._trunk = load_causal_lm(source, dtype=settings.dtype)
        self._adapted: nn.Module
        if settings.quantization == "none":
            with torch.device("meta"):  # its shapes are read, and its adapters' scales
                self._adapted = type(self._trunk)(self._trunk.config)
        else:  # what was learnt lies on these weights
            network = load_causal_lm(source, dtype=settings.dtype)
            self._adapted = quantize(network, settings.quantization, device="cpu")
        add_adapters(self._adapted, settings.lora)

    def merged(self, adapters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The trunk's weights with these adapters in them.

        Args:
            adapters: under the names of the policy's state, or of the model's.

        Raises:
            ValueError: they are other adapters than the settings say.
        """
        own = self._adapted.state_dict()
        named = {}
        for name, tensor in adapters.items():
            short = name.removeprefix(TRUNK)
            named[short if short in own else name] = tensor
        for name, tensor in named.items():
            if name not in own or own[name].shape != tensor.shape:
                raise ValueError(
                    f"lora must be the run's own: it publishes {name} of shape "
                    f"{tuple(tensor.shape)}, which these adapters do not have. Give the server the "
                    "run's `lora` and `model`."
                )
        whole = copy.deepcopy(self._trunk)
        merge_into(whole, self._adapted, named)
        return whole.state_dict()
