"""Models from pretrained weights. `model` is a folder, a hub id, or a dotted path to a function."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.utils import logging as hf_logging

from rllib_llm.modules.lora import is_adapter_folder, load_merged, read_base
from rllib_llm.modules.model_source import (
    DOTTED,
    FOLDER,
    build_from_dotted,
    load_with_retries,
    model_config,
    no_model,
    source_kind,
    text_config,
)
from rllib_llm.modules.precision import keep_unpacked, leave_out_cudnn_attention
from rllib_llm.modules.tokenizer import eos_token_ids, load_tokenizer
from rllib_llm.modules.trunk import take_apart
from rllib_llm.shared.errors import Problems

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CLASSIFIER = "ForSequenceClassification"
_DECODER = "Name a model whose decoder reads text alone, in one order"
_NO_GENERATOR = (_CLASSIFIER, "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM")


def load_causal_lm(
    model: str | os.PathLike, *, dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu", quantization_config: Any = None,
) -> PreTrainedModel:  # fmt: skip
    """Returns the causal language model of `model`, in eval mode, every dropout at 0; of a
    multimodal checkpoint the whole model.

    A folder of adapters (`lora.py`) is merged with the base that it names.

    dtype: "float32", "bfloat16", "float16" or a torch dtype, of the weights.
    quantization_config: handed to `from_pretrained`; see `modules/quantization.py`.

    Raises:
        Problems: nothing can be loaded, weights are missing, or it is no causal LM.
    """
    kind, value = source_kind(model)
    dtype = resolve_dtype(dtype)
    if kind == DOTTED:
        network = build_from_dotted(value)[0]
        architectures = [type(network).__name__]
    else:
        if kind == FOLDER and is_adapter_folder(value):
            if quantization_config is not None:
                raise _not_merged(model, "weights are to be quantised while they are read")
            return load_with_retries(
                lambda: load_merged(value, load_causal_lm, dtype=dtype, device=device), value, kind
            )
        config = model_config(value)
        architectures = config.architectures or []
        if _sees(config) and config.is_encoder_decoder:
            raise no_model(model, f"it holds a {config.model_type}, an encoder-decoder", _DECODER)
    if any(name.endswith(_NO_GENERATOR) for name in architectures):
        reason = f"it holds a {architectures[0]}, and a causal language model is wanted here"
        raise no_model(model, reason, "A classifier can be a reward_model")
    if kind != DOTTED:
        placement = _placement(config, device, quantization_config)
        network = _from_pretrained(generator_class(config), value, kind, dtype=dtype, **placement)
    network = _finish(network, dtype, device)
    if _sees(network.config) and (reason := _why_no_policy(network)):
        raise no_model(model, reason, _DECODER)
    return network


def _sees(config: Any) -> bool:
    return type(config) in AutoModelForImageTextToText._model_mapping


def _why_no_policy(network: PreTrainedModel) -> str:
    """Why a multimodal model cannot continue text alone, tried on it; "" if it can."""
    kind = type(network).__name__
    if getattr(text_config(network), "use_bidirectional_attention", None) is True:
        return f"it holds a {kind}, whose tokens see later ones"
    try:
        if take_apart(network) is None:
            network(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=network.device))
    except (TypeError, ValueError) as error:
        return f"it holds a {kind}, which does not run without an image ({error})"
    return ""


def _not_merged(model: Any, why: str) -> Problems:
    remedy = "Merge them first: load_causal_lm(model).save_pretrained(folder) and the tokenizer's"
    return no_model(model, f"it holds adapters, and {why}", remedy)


def generator_class(config: Any) -> Any:
    """transformers' auto class that loads all of a checkpoint which writes text: some multimodal
    types have a class for their text alone as well."""
    return AutoModelForImageTextToText if _sees(config) else AutoModelForCausalLM


def without_weights(model: str | os.PathLike, *, classifier: bool = False) -> nn.Module:
    """Returns `model` with the names and shapes of its weights alone; of a dotted path the whole
    model."""
    kind, value = source_kind(model)
    if kind == DOTTED:
        return build_from_dotted(value)[0]
    config = model_config(value)
    auto_class = AutoModelForSequenceClassification if classifier else generator_class(config)
    with torch.device("meta"):
        return auto_class.from_config(config)


def merge_folder(source: str | Path, target: str | Path) -> Path:
    """Writes the plain model and tokenizer of the adapter folder `source` to `target`."""
    with quiet_transformers():
        load_causal_lm(source, dtype=read_base(source).dtype).save_pretrained(target)
    load_tokenizer(source).save_pretrained(target)
    return Path(target)


def load_sequence_classifier(
    model: str | os.PathLike, *, dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu", new_head: bool = False, seed: int = 0,
    quantization_config: Any = None,
) -> PreTrainedModel:  # fmt: skip
    """Returns the sequence classifier (reward model) of `model`, in eval mode, dropout at 0.

    new_head: where `model` is no classifier (a reward model about to be trained), put a head with
        one output on its trunk: weights N(0, 1/(hidden + 1)) drawn with `seed`, bias 0 (Stiennon
        et al. 2020, app. C; vwxyzjn, "The N implementation details of RLHF with PPO"). A
        classifier keeps the head it has.

    Raises:
        Problems: nothing can be loaded, weights are missing, or `model` is no classifier
            and `new_head` is False.
    """
    kind, value = source_kind(model)
    dtype = resolve_dtype(dtype)
    if kind == DOTTED:
        network = build_from_dotted(value)[0]
        architectures, config = [type(network).__name__], network.config
    else:
        if kind == FOLDER and is_adapter_folder(value):
            raise _not_merged(model, "a sequence classifier is wanted here")
        config = model_config(value)
        architectures = config.architectures or []
    needs_head = bool(architectures) and not any(n.endswith(_CLASSIFIER) for n in architectures)
    if needs_head and not new_head:
        reason = f"it holds a {architectures[0]}, and a sequence classifier is wanted here"
        raise no_model(model, reason, "Name a reward model, such as the RewardModel stage writes")
    if needs_head:
        config.num_labels = 1
    if kind != DOTTED:
        placement = _placement(config, device, quantization_config)
        if needs_head:
            placement["config"] = config
        network = _from_pretrained(
            AutoModelForSequenceClassification, value, kind, dtype=dtype, **placement
        )
    elif needs_head:
        trunk = network.base_model  # whose weights the classifier shares
        with torch.random.fork_rng(devices=[]):
            network = AutoModelForSequenceClassification.from_config(config)
        network.base_model.load_state_dict(trunk.state_dict(), strict=False)
    if needs_head:
        head, generator = score_head(network), torch.Generator().manual_seed(seed)
        drawn = torch.randn(head.weight.shape, generator=generator)
        with torch.no_grad():
            head.weight.copy_(drawn / math.sqrt(head.in_features + 1))
            if head.bias is not None:
                head.bias.zero_()
    return _finish(network, dtype, device)


def score_head(classifier: nn.Module) -> nn.Linear:
    """Returns the last linear layer of a sequence classifier, the one that gives the scores."""
    for name in ("score", "classifier", "classification_head"):
        head = getattr(classifier, name, None)
        if isinstance(head, nn.Module):
            return [layer for layer in head.modules() if isinstance(layer, nn.Linear)][-1]
    rule = "have a linear layer called score or classifier"
    raise Problems("model", rule, "", "Wrap it as a reward function", type(classifier).__name__)


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout probability in `model` to 0, also in train mode; the config is kept."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Returns the torch dtype of that name; raises ValueError for one that cannot hold weights."""
    found = dtype if isinstance(dtype, torch.dtype) else DTYPES.get(str(dtype))
    if found is None or found not in DTYPES.values():
        rule, remedy = f"be one of {', '.join(DTYPES)}", "For fewer bits set quantization"
        raise Problems("dtype", rule, "", remedy, dtype)
    return found


def _placement(config: Any, device: Any, quantization_config: Any) -> dict[str, Any]:
    """Arguments of `from_pretrained` for weights that are quantised while they are read, or were
    saved so: they must be put on their device then and there."""
    if quantization_config is not None:
        return {"quantization_config": quantization_config, "device_map": {"": device}}
    if getattr(config, "quantization_config", None) is not None:
        return {"device_map": {"": device}}
    return {}


def _from_pretrained(auto_class: Any, value: str, kind: str, **kwargs: Any) -> PreTrainedModel:
    """auto_class.from_pretrained, retried; weights that are missing or misshapen are errors.

    With a `config` (a head is about to be added) the weights outside the trunk may be missing.
    """

    def load() -> tuple[PreTrainedModel, dict]:
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            return auto_class.from_pretrained(
                value, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )

    start = time.monotonic()
    network, report = load_with_retries(load, value, kind)
    missing = set(report["missing_keys"])
    if "config" in kwargs:
        trunk = network.base_model_prefix + "."
        missing = {k for k in missing if k.startswith(trunk) and ".pooler." not in k}
    wrong = sorted(missing) + sorted(str(k) for k in report["mismatched_keys"])
    if wrong:
        which = f"{len(wrong)} weights of {type(network).__name__}"
        reason = f"{which} are missing from it or have another shape, the first is {wrong[0]}"
        raise no_model(value, reason, "Save config.json and weights again with save_pretrained")
    took = time.monotonic() - start
    logger.info("Loaded %s from %r in %.1f s.", type(network).__name__, value, took)
    return network


def _finish(network: Any, dtype: torch.dtype, device: Any) -> PreTrainedModel:
    leave_out_cudnn_attention()
    disable_dropout(network)
    keep_unpacked(network)
    embedding = network.get_input_embeddings()
    if getattr(embedding, "padding_idx", None) in eos_token_ids(network):
        embedding.padding_idx = None  # torch gives the pad token's row no gradient, and EOS has one
    if not getattr(network, "is_quantized", False):
        network = network.to(device)
        for parameter in network.parameters():  # buffers hold frequencies and masks
            parameter.data = parameter.data.to(dtype)
    return network.eval()


@contextlib.contextmanager
def quiet_transformers():
    """Silences transformers' progress bars (one per replica) and its report on missing weights,
    which are checked here. (The report asks whether stdout is a terminal, which fails in a Tune
    trial, whose stdout is a log file.)"""
    shown, verbosity = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            # peft reads an attribute that transformers renames.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if shown:
            hf_logging.enable_progress_bar()
