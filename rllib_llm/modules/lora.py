"""Low-rank adapters on a frozen trunk (Hu et al. 2022), QLoRA where the trunk is quantised.

peft puts them into the model's own layers, so that a policy with adapters is still an ordinary
causal language model: sampling and scoring need to know nothing. Only adapters are trained,
published and kept in checkpoints; every process loads the trunk itself. The trunk with its adapters
off is the model that training started from, which makes a second copy for the KL superfluous.

On disk they are in peft's own format, beside what the base and they make as a plain model:

    adapter_config.json, adapter_model.safetensors   as peft writes and reads them
    base_model.json                                  what the base is loaded from, and its bits
    config.json                                      the base's config

`PeftModel.from_pretrained(base, folder)` and `AutoPeftModelForCausalLM.from_pretrained(folder)`
read it too; the latter not where the base is a dotted path, which only this package resolves.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field, StrictBool, TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rllib_llm.modules.llama_trunk import is_called_plainly, is_plain_tensor
from rllib_llm.modules.model_source import text_config
from rllib_llm.modules.multimodal import other_parts
from rllib_llm.shared.errors import Problem, Problems, closest, report, require, unknown_key
from rllib_llm.shared.setting import only, plain

ADAPTER = "default"  # peft's own name for the only adapter of a model
DEFAULTS = {"r": 16, "alpha": 32, "dropout": 0.0, "target_modules": "all-linear"}
# Further fields of peft's LoraConfig that change which layers get what, and leave W + s B A.
PASSED_ON = (
    "alpha_pattern", "exclude_modules", "layers_pattern", "layers_to_transform", "rank_pattern",
    "use_rslora",
)  # fmt: skip
_PEFT_PREFIX = "base_model.model."  # what a PeftModel has in front of the names
# What peft and others call them.
OTHER_NAMES = {"rank": "r", "lora_r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout"}


def check_lora(lora: Any) -> None:
    """Raises ValueError for settings of adapters that are none; see `add_adapters`."""
    require(isinstance(lora, dict), "lora", lora, f"be a dict such as {DEFAULTS}, or None")
    report(list(_wrong_settings(lora)))


def _wrong_settings(lora: dict[str, Any]) -> Iterator[Problem]:
    allowed = [*DEFAULTS, *PASSED_ON]
    called = {**{name: name for name in allowed}, **OTHER_NAMES}
    yield from (
        unknown_key("lora", key, allowed, closest(str(key), called))
        for key in lora if key not in allowed
    )  # fmt: skip
    settings = {**dict.fromkeys(PASSED_ON), **DEFAULTS, **lora}
    for key, (kind, rule) in _RULES.items():
        value = settings[key]
        try:
            TypeAdapter(kind | None if key in PASSED_ON else kind).validate_python(plain(value))
        except ValidationError:
            yield Problem(f"lora.{key}", f"be {rule}", value=value)
    picks_layers = settings["layers_to_transform"] is not None
    targets, pattern = settings["target_modules"], settings["layers_pattern"]
    if picks_layers and isinstance(targets, str):
        rule = "be a list of names with lora.layers_to_transform"
        yield Problem("lora.target_modules", rule, value=targets)
    if pattern is not None and not picks_layers:
        yield Problem("lora.layers_pattern", "come with lora.layers_to_transform", value=pattern)


_SEVERAL = only(list, tuple, set)  # peft writes no range into a checkpoint
_Layer = Annotated[int, Field(strict=True, ge=0)]
_Rank = Annotated[int, Field(strict=True, ge=1, lt=2**16)]
_Alpha = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
# A text that peft can match names with.
_Name = Annotated[str, Field(strict=True, pattern=r"\S"),
                  AfterValidator(TypeAdapter(re.Pattern).validate_python)]  # fmt: skip
_Names = _Name | Annotated[list[_Name], Field(min_length=1), _SEVERAL]
_NAMES = "a name, a regular expression or a list of names"
# Of each setting: what is right, as a type and in words.
_RULES: Mapping[str, tuple[Any, str]] = MappingProxyType({
    "r": (_Rank, "a whole number from 1 to 65535"),
    "alpha": (_Alpha, "a finite number above 0"),
    "dropout": (Annotated[float, Field(strict=True, ge=0, lt=1)], "in [0, 1)"),
    "target_modules": (_Names, f"'all-linear', {_NAMES}"),
    "alpha_pattern": (dict[_Name, _Alpha], "a mapping of names to finite numbers above 0"),
    "exclude_modules": (_Names, _NAMES),
    "layers_pattern": (_Names, _NAMES),
    "layers_to_transform": (_Layer | Annotated[list[_Layer], Field(min_length=1), _SEVERAL],
                            "the number of a layer, or a list of them"),
    "rank_pattern": (dict[_Name, _Rank], "a mapping of names to whole numbers from 1 to 65535"),
    "use_rslora": (StrictBool, "True or False"),
})  # fmt: skip


def add_adapters(model: Any, lora: dict[str, Any], *, seed: int = 0) -> None:
    """Freezes `model`, a causal language model, and puts trainable adapters into its layers.

    lora: `r` (rank), `alpha` (the adapters' share is scaled by alpha/r), `dropout` of their input
        (0 in reinforcement learning: with dropout the policy being trained is not the one that
        sampled), `target_modules` ("all-linear": every linear layer but the head; or names), and
        what `PASSED_ON` lists. B starts at 0: the model is unchanged at first. Towers and
        projectors of a multimodal model get adapters only where `target_modules` names them.
    seed: of A; every process must draw the same.

    Adapters are float32 whatever the model's dtype.

    Raises:
        ValueError: a setting that is none, or target_modules that the model does not have.
    """
    from peft import inject_adapter_in_model

    settings = peft_config(lora)
    targets = settings.target_modules  # peft matches them with names of layers
    named = [targets] if isinstance(targets, str) else targets
    frozen = [part for part in other_parts(model)
              if not any(part.rpartition(".")[2] in target for target in named)]  # fmt: skip
    if frozen:  # beside peft's own, a regular expression or names
        excluded = settings.exclude_modules
        patterns = [excluded] if isinstance(excluded, str) else [
            rf"(.*\.)?{re.escape(name)}" for name in sorted(excluded or ())
        ]  # fmt: skip
        patterns += [rf"{re.escape(part)}(\..*)?" for part in frozen]
        settings.exclude_modules = "|".join(f"(?:{each})" for each in patterns)
    layers = {name.rpartition(".")[2] for name, module in model.named_modules()
              if isinstance(module, (nn.Linear, Conv1D))}  # fmt: skip
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
        except ValueError as error:
            targets, numbers = settings.target_modules, settings.layers_to_transform
            if numbers is not None and targets <= layers:
                last = text_config(model).num_hidden_layers - 1
                rule = f"number layers of the model, 0 to {last}"
                raise Problems("lora.layers_to_transform", rule, value=numbers) from error
            raise _no_such_layers({**DEFAULTS, **lora}["target_modules"], layers) from error
    targets = model.peft_config[ADAPTER].target_modules
    if not isinstance(targets, str):
        names = [f".{name}" for name, _ in model.named_modules()]
        wrong = [t for t in targets or () if not any(name.endswith(f".{t}") for name in names)]
        if wrong:
            raise _no_such_layers(sorted(wrong), layers)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.eval()


def _no_such_layers(targets: Any, layers: set[str]) -> Problems:
    rule = f"name linear layers of the model: {', '.join(sorted(layers))}"
    return Problems("lora.target_modules", rule, value=targets)


def peft_config(lora: dict[str, Any]) -> Any:
    """peft's LoraConfig for our settings."""
    from peft import LoraConfig

    check_lora(lora)
    settings = {**DEFAULTS, **lora}
    targets = settings["target_modules"]
    return LoraConfig(
        r=settings["r"],
        lora_alpha=settings["alpha"],
        lora_dropout=settings["dropout"],
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
        **{name: settings[name] for name in PASSED_ON if name in settings},
    )


def has_adapters(model: nn.Module) -> bool:
    """Whether `add_adapters` was called on it, or an adapter loaded into it."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is part of an adapter."""
    return ".lora_" in name


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model computes what its trunk alone does while the context is open.

    peft's own switch also changes `requires_grad`, of which a graph that is being built, or shards,
    would take notice; here nothing but the forward changes.
    """
    layers = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, off in zip(layers, before, strict=True):
            layer._disable_adapters = off


def is_low_rank(module: nn.Module) -> bool:
    """Whether a layer computes W x + s B A x and nothing else, with a W that is not quantised: one
    adapter of peft's plain kind, without dropout, not merged into W."""
    if not hasattr(module, "base_layer"):
        return False
    from peft.tuners.lora import Linear

    if type(module) is not Linear or not is_called_plainly(module):
        return False
    if list(module.lora_A) != module.active_adapters or len(module.lora_A) != 1:
        return False
    (name,) = module.active_adapters
    is_bare = module.lora_B[name].bias is None and not module.lora_variant
    has_dropout = not isinstance(module.lora_dropout[name], nn.Identity)
    return is_bare and not (has_dropout or module.merged_adapters or module.fan_in_fan_out)


@torch.no_grad()
def low_rank_factors(layers: Sequence[nn.Module]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(down [in, sum of r_i], up [sum of r_i, sum of out_i]) so that inputs @ down @ up is what the
    adapters of these layers, side by side, add to their outputs; None where they add nothing.

    Args:
        layers: linear layers with the same input, some of them `is_low_rank`.
    """
    adapted = [hasattr(layer, "lora_A") and not layer.disable_adapters for layer in layers]
    if not any(adapted):
        return None
    downs, ups = [], []
    for layer, has_adapter in zip(layers, adapted, strict=True):
        if not has_adapter:
            ups.append(torch.zeros(layer.out_features, 0))
            continue
        (name,) = layer.active_adapters
        downs.append(layer.lora_A[name].weight)
        ups.append(layer.lora_B[name].weight * layer.scaling[name])
    first = downs[0]
    ups = [up.to(first.device, first.dtype) for up in ups]
    return torch.cat(downs).t().contiguous(), torch.block_diag(*ups).t().contiguous()


def peft_state(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adapters by the names that peft's files give them. `tensors`: by their names in `model`."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(
        model, state_dict=dict(tensors), adapter_name=ADAPTER, save_embedding_layers=False
    )
    return {_PEFT_PREFIX + name: tensor for name, tensor in state.items()}


def own_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adapters by their names in `model`. `state`: by peft's names; tensors that are no adapters of
    `model` keep their names."""
    own = {name: p for name, p in model.named_parameters() if is_adapter(name)}
    by_parameter = {id(parameter): name for name, parameter in own.items()}
    names = {name: by_parameter[id(p)] for name, p in peft_state(model, own).items()}
    return {names.get(name, name): tensor for name, tensor in state.items()}


@torch.no_grad()
def merge_into(plain: nn.Module, adapted: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Makes `plain` compute what `adapted` does: each adapted weight becomes W + s B A, in place. A
    weight that several parts share, and only one has adapted, is shared no longer.

    plain: the same architecture without adapters, its weights those of the unquantised trunk.
    adapted: gives the adapters' settings and, where its trunk is quantised, the weights W,
        dequantised.
    tensors: the adapters by their names in `adapted`.
    """
    from peft import LoraModel

    _take_quantized_weights(plain, adapted)
    shell = LoraModel(plain, {ADAPTER: copy.deepcopy(adapted.peft_config[ADAPTER])}, ADAPTER)
    own = {name: p for name, p in plain.named_parameters() if is_adapter(name)}
    for name, tensor in own_state(plain, peft_state(adapted, tensors)).items():
        own[name].data = tensor.detach().to(own[name].device, torch.float32)
    _merge(shell)


def _merge(shell: Any) -> PreTrainedModel:
    """The model in peft's `shell`, its adapters merged in float32. A weight that several parts
    share, and only one has adapted, is shared no longer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = shell.model
    for layer in [part for part in model.modules() if isinstance(part, BaseTunerLayer)]:
        base = layer.get_base_layer()
        for name, weight in list(base.named_parameters(recurse=False)):
            if _is_shared(model, weight):
                setattr(base, name, nn.Parameter(weight.detach().clone(), requires_grad=False))
                _declare_untied(model)
        own = [(w, w.dtype) for w in base.parameters(recurse=False) if w.is_floating_point()]
        for weight, _ in own:
            weight.data = weight.data.float()
        layer.merge()
        for weight, dtype in own:
            weight.data = weight.data.to(dtype)
    merged = shell.unload()
    pair = merged.get_input_embeddings(), merged.get_output_embeddings()
    if None not in pair and pair[0].weight is not pair[1].weight:
        _declare_untied(merged)  # `modules_to_save` may hold one of them
    return merged


def adapts_tied_weights(model: nn.Module) -> bool:
    """Whether a weight of a model with adapters is adapted in one of the parts that share it."""
    from peft.tuners.lora import LoraLayer

    layers = [part for part in model.modules() if isinstance(part, LoraLayer)]
    weights = [getattr(layer.get_base_layer(), "weight", None) for layer in layers]
    return any(_is_shared(model, weight) for weight in weights if weight is not None)


def _is_shared(model: nn.Module, weight: nn.Parameter) -> bool:
    """Whether more than one part of `model` has it; an adapter's shell is none."""
    parts = [part for part in model.modules() for own in part._parameters.values() if own is weight]
    return len(parts) > 1


def _declare_untied(model: Any) -> None:
    """Declares input and output embeddings untied, so that both are saved and loaded."""
    for config in (model.config, text_config(model)):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def _take_quantized_weights(plain: nn.Module, adapted: nn.Module) -> None:
    targets = dict(plain.named_modules())
    for name, layer in adapted.named_modules():
        target = targets.get(name.removesuffix(".base_layer"))
        held = getattr(layer, "weight", None)
        # Sharded weights are plain ones in pieces.
        if target is None or held is None or isinstance(held, DTensor):
            continue
        if type(held).__module__.startswith("bitsandbytes"):
            from peft.utils.integrations import dequantize_bnb_weight

            weight = dequantize_bnb_weight(held, state=getattr(layer, "state", None))
        elif is_plain_tensor(held.data):
            continue
        else:
            weight = held.dequantize()
        target.weight.copy_(weight.T if isinstance(target, Conv1D) else weight)


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
    _write_tensors(peft_state(model, tensors), folder)


def write_adapters(
    tensors: Mapping[str, torch.Tensor], lora: dict[str, Any], folder: str | Path
) -> None:
    """Writes adapters for others who have the trunk, as peft's files alone.

    Args:
        tensors: by their names in the model that has them.
        lora: the settings that `add_adapters` was given.
        folder: is made, with the folders above it.
    """
    peft_config(lora).save_pretrained(str(folder))
    named = {}
    for name, tensor in tensors.items():
        before, _, after = name.rpartition(f".{ADAPTER}")
        named[_PEFT_PREFIX + before + after] = tensor
    _write_tensors(named, folder)


def _write_tensors(named: Mapping[str, torch.Tensor], folder: str | Path) -> None:
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in named.items()}
    save_file(weights, str(Path(folder) / WEIGHTS), metadata={"format": "pt"})


def read_adapters(folder: str | Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of an adapter folder, by their names in `model`, which has such adapters.

    Raises:
        FileNotFoundError: it has no adapter_model.safetensors.
    """
    file = Path(folder) / WEIGHTS
    if not file.is_file():
        raise FileNotFoundError(f"checkpoint={str(folder)!r} must hold {WEIGHTS}: it is incomplete")
    return own_state(model, load_file(str(file)))


def is_adapter_folder(folder: str | os.PathLike) -> bool:
    """Whether adapters lie there, and no merged model."""
    return Path(folder, CONFIG).is_file() and not list(Path(folder).glob("model*.safetensors"))


def read_base(folder: str | Path) -> AdapterBase:
    """The base model of the adapters in `folder`, this package's or peft's."""
    file = Path(folder) / BASE
    if file.is_file():
        return AdapterBase(**json.loads(file.read_text(encoding="utf-8")))
    config = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))
    return AdapterBase(config["base_model_name_or_path"])


@torch.no_grad()
def load_merged(
    folder: str | Path, load: LoadModel, *, dtype: Any = "float32", device: Any = "cpu"
) -> PreTrainedModel:
    """The plain causal language model that base and adapters of `folder` make together.

    load: `load_causal_lm`. A base that was quantised during training is quantised and dequantised
    again, so that the result is the policy that was trained, not one near it.
    """
    from peft import PeftConfig, PeftModel

    base, settings = read_base(folder), PeftConfig.from_pretrained(str(folder))
    if settings.is_prompt_learning or settings.task_type not in (None, "CAUSAL_LM"):
        kind = settings.peft_type.value, settings.task_type
        raise ValueError(f"adapters {kind} cannot be merged into a causal language model")
    plain = load(base.model, dtype=dtype, device=device)
    if base.quantization != "none":
        from rllib_llm.modules.quantization import quantize  # few adapters stand on such a model

        network = load(base.model, dtype=base.dtype, device=device)
        _take_quantized_weights(plain, quantize(network, base.quantization, device=device))
    wrapped = PeftModel(plain, settings)
    report = wrapped.load_adapter(str(folder), ADAPTER, torch_device=str(device))
    if wrong := [*report.missing_keys, *report.unexpected_keys]:
        raise ValueError(f"{WEIGHTS} and {CONFIG} do not belong together, first {wrong[0]!r}")
    return _merge(wrapped.base_model).requires_grad_(True)
