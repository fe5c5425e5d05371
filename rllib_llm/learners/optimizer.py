"""The optimiser: which one, its parameter groups, its state in host memory, and as checkpoints hold
it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rllib_llm.modules.shards import gather, shard_like

# --- which weights decay ------------------------------------------------------------------------

# transformers' `Trainer.get_decay_parameter_names`: these names, and torch's LayerNorm.
_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decay_groups(module: nn.Module, params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameter groups of `params`, which are some of `module`'s: what decays, then what does not,
    each where there is any."""
    kept = {
        id(parameter)
        for name, part in module.named_modules()
        for own, parameter in part.named_parameters(recurse=False)
        if isinstance(part, nn.LayerNorm) or _NOT_DECAYED.search(f"{name}.{own}".lower())
    }
    decayed = [parameter for parameter in params if id(parameter) not in kept]
    rest = [parameter for parameter in params if id(parameter) in kept]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


# --- which one ----------------------------------------------------------------------------------

MUON = "muon"  # the name of the part that has the matrices


def make_optimizers(
    config: Any, module: nn.Module, params: list[nn.Parameter]
) -> Iterator[tuple[str, torch.optim.Optimizer, list[nn.Parameter]]]:
    """(name, optimiser, its parameters) of each optimiser that `config.optimizer` asks for; the
    first is called "" and is AdamW's kind, which has all that Muon has not."""
    adam: dict[str, Any] = {
        "lr": float(config.lr), "betas": tuple(config.adam_betas), "eps": config.adam_epsilon,
        "weight_decay": config.weight_decay,
    }  # fmt: skip
    matrices: list[nn.Parameter] = []
    if config.optimizer == MUON:
        chosen = {id(weight) for weight in _hidden_matrices(module)}
        matrices = [param for param in params if id(param) in chosen]
        params = [param for param in params if id(param) not in chosen]
    if params:
        groups = decay_groups(module, params)
        if config.optimizer.endswith("adamw_8bit"):
            from bitsandbytes.optim import AdamW8bit

            is_paged = config.optimizer.startswith("paged")
            yield "", AdamW8bit(groups, is_paged=is_paged, **adam), params
        else:
            yield "", torch.optim.AdamW(groups, fused=True, **adam), params
    if matrices:  # steps of the size of AdamW's, so that `lr` means the same
        muon = torch.optim.Muon(
            matrices, lr=float(config.lr), weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        yield MUON, muon, matrices


def _hidden_matrices(module: nn.Module) -> Iterator[nn.Parameter]:
    """The weights of linear layers in the trunks, whose inputs and outputs are hidden states."""
    for model in module.modules():
        if isinstance(model, PreTrainedModel):
            heads = {id(model.get_output_embeddings()), id(getattr(model, "score", None))}
            for part in model.modules():
                if isinstance(part, nn.Linear) and id(part) not in heads and part.weight.ndim == 2:
                    yield part.weight


# --- its state in host memory -------------------------------------------------------------------

_BUCKET_BYTES = 256 * 1024**2


def offloaded_step(
    optimizer: torch.optim.Optimizer, bucket_bytes: int = _BUCKET_BYTES
) -> None:
    """Takes a step whose state is on the device only while it is used, a bucket of parameters at a
    time; between steps it is in pinned host memory. The numbers are those of `optimizer.step()`.

    Copies are queued behind the steps that they wait for: the device is not waited for.
    """
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    try:
        for group, params in zip(groups, whole, strict=True):
            for bucket in buckets(params, bucket_bytes):
                for other in groups:
                    other["params"] = []
                group["params"] = bucket
                hosts = [_to_device(optimizer.state[p], p.device) for p in bucket]
                optimizer.step()
                for param, host in zip(bucket, hosts, strict=True):
                    _to_host(optimizer.state[param], host)
    finally:
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params


def _to_device(state: dict[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    """Puts a parameter's moments on its device; where they were."""
    hosts = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() > 1 and value.device.type == "cpu":
            hosts[name] = value
            state[name] = value.to(device, non_blocking=True)
    return hosts


def _to_host(state: dict[str, Any], hosts: dict[str, torch.Tensor]) -> None:
    """Puts a parameter's moments into host memory, where they were before in the same place."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            if name not in hosts:
                pin = value.device.type == "cuda"
                hosts[name] = torch.empty_like(value, device="cpu", pin_memory=pin)
            if hosts[name] is not value:
                hosts[name].copy_(value, non_blocking=True)
            state[name] = hosts[name]


def buckets(params: list[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one dtype and at least `bucket_bytes` but for the last."""
    bucket: list[nn.Parameter] = []
    size = 0
    for param in params:
        if bucket and (size >= bucket_bytes or param.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(param)
        size += param.nbytes
    if bucket:
        yield bucket


# --- its state: whole tensors on the CPU, however weights are cut -------------------------------


def whole_state(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> dict[str, Any]:
    """`state_dict()` with whole moments on the CPU, numbered as `params`, the model's order: it is
    the same however they are grouped. Where weights are shards, all learners must call it, and all
    but the first get no moments."""
    entries = {
        (i, key): value
        for i, param in enumerate(params)
        for key, value in optimizer.state.get(param, {}).items()
    }
    tensors = gather({at: v for at, v in entries.items() if isinstance(v, torch.Tensor)})
    if any(tensor.is_pinned() for tensor in tensors.values() if torch.cuda.is_available()):
        torch.cuda.synchronize()  # `offloaded_step` has queued copies to it
    whole: dict[int, dict[str, Any]] = {}
    for (i, key), value in entries.items():  # bitsandbytes counts steps in a number
        if not isinstance(value, torch.Tensor):
            whole.setdefault(i, {})[key] = value
        elif (i, key) in tensors:
            whole.setdefault(i, {})[key] = tensors[i, key].cpu()
    number = {id(param): i for i, param in enumerate(params)}
    groups = [
        {**group, "params": [number[id(param)] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": whole, "param_groups": groups}


def load_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], params: Sequence[nn.Parameter]
) -> None:
    """Takes moments from `state`, numbered as `params`, and keeps the optimiser's own settings.

    The config that the optimiser was made with may differ from the checkpoint's: population-based
    search restores one trial's state under another trial's settings.
    """
    grouped = [param for group in optimizer.param_groups for param in group["params"]]
    place = {id(param): i for i, param in enumerate(grouped)}

    def cut(value: Any, param: nn.Parameter) -> Any:
        """A copy, cut as the parameter is where it has its shape."""
        if isinstance(value, int):
            return value
        value = torch.as_tensor(value)
        return shard_like(value, param) if value.shape == param.shape else value.clone()

    moments = {
        place[id(params[i])]: {name: cut(value, params[i]) for name, value in entry.items()}
        for i, entry in state["state"].items()
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
