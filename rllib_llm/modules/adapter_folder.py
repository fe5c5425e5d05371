"""Adapters on disk, in peft's own format, and the plain model that they and their base make.

    adapter_config.json, adapter_model.safetensors   as peft writes and reads them
    base_model.json                                  what the base is loaded from, and its bits
    config.json                                      the base's config

`PeftModel.from_pretrained(base, folder)` and `AutoPeftModelForCausalLM.from_pretrained(folder)`
read it too; the latter not where the base is a dotted path, which only this package resolves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from rllib_llm.modules.lora import ADAPTER, merge_into, own_state, peft_state
from rllib_llm.modules.quantize import quantize

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base_model.json"
LoadModel = Callable[..., PreTrainedModel]


@dataclass(frozen=True)
class AdapterBase:
    """The frozen trunk under adapters: folder, hub id or dotted path; its bits and its dtype."""

    model: str
    quantization: str = "none"
    dtype: str = "float32"


def save_adapters(
    model: nn.Module, tensors: dict[str, torch.Tensor], folder: str | Path, base: AdapterBase
) -> None:
    """Writes an adapter folder. `tensors`: the adapters by their names in `model`."""
    folder = Path(folder)
    config = model.peft_config[ADAPTER]
    config.base_model_name_or_path = base.model
    config.inference_mode = True  # how peft marks adapters that are loaded to be used
    config.save_pretrained(str(folder))
    config.inference_mode = False
    model.config.save_pretrained(folder)
    (folder / BASE).write_text(json.dumps(asdict(base), indent=1), encoding="utf-8")
    weights = peft_state(model, tensors)
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in weights.items()}
    save_file(weights, str(folder / WEIGHTS), metadata={"format": "pt"})


def read_adapters(folder: str | Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of an adapter folder, by their names in `model`, which has such adapters.

    Raises:
        FileNotFoundError: it has no adapter_model.safetensors.
    """
    file = Path(folder) / WEIGHTS
    if not file.is_file():
        raise FileNotFoundError(
            f"checkpoint={str(folder)!r} must hold {WEIGHTS}: none was found. "
            "Pick a complete checkpoint of a run with lora; an interrupted one can be deleted."
        )
    return own_state(model, load_file(str(file)))


def is_adapter_folder(folder: str | os.PathLike) -> bool:
    """Whether adapters lie there, and no merged model."""
    return Path(folder, CONFIG).is_file() and not list(Path(folder).glob("model*.safetensors"))


def read_base(folder: str | Path) -> AdapterBase:
    """What the adapters in `folder`, this package's or peft's, lie on."""
    file = Path(folder) / BASE
    if file.is_file():
        return AdapterBase(**json.loads(file.read_text(encoding="utf-8")))
    config = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))
    return AdapterBase(config["base_model_name_or_path"])


def load_merged(
    folder: str | Path, load: LoadModel, *, dtype: Any = "float32", device: Any = "cpu"
) -> PreTrainedModel:
    """The plain causal language model that base and adapters of `folder` make together.

    load: `load_causal_lm`. A base that was quantised during training is quantised and dequantised
    again, so that the result is the policy that was trained, not one near it.
    """
    folder = Path(folder)
    base = read_base(folder)
    plain = load(base.model, dtype=dtype, device=device)
    adapted = _skeleton(plain, folder, base, load, device)
    merge_into(plain, adapted, read_adapters(folder, adapted))
    return plain


def _skeleton(
    plain: PreTrainedModel, folder: Path, base: AdapterBase, load: LoadModel, device: Any
) -> nn.Module:
    """A model with the adapters' layers; it has weights only where they are quantised."""
    from peft import PeftConfig, inject_adapter_in_model

    config = PeftConfig.from_pretrained(str(folder))
    if base.quantization == "none":
        with torch.device("meta"):
            return inject_adapter_in_model(config, type(plain)(plain.config), adapter_name=ADAPTER)
    network = load(base.model, dtype=base.dtype, device=device)
    network = quantize(network, base.quantization, device=device).requires_grad_(False)
    return inject_adapter_in_model(config, network, adapter_name=ADAPTER)
