"""A server's weights, by the names that clients use."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio
import torch

from rllib_llm.serving.schemas import MAX_TOLD, ApiError, refuse

MODEL_GONE = "model_not_found"
_MAX_REMEMBERED = 10_000


@dataclass(frozen=True)
class ServedWeights:
    """Weights that were loaded.

    `serial` counts loads, and is what the engine stamps on tokens; `epoch` and `version` are the
    publisher's: after a restore a lower version of a later epoch is another one. `num_bytes` came
    from the run in `transfer_seconds`; 0 of a folder.
    """

    serial: int
    epoch: int
    version: int
    fingerprint: str
    source: str
    num_bytes: int = 0
    transfer_seconds: float = 0.0
    load_seconds: float = 0.0
    loaded_at: float = field(default_factory=time.time)

    @property
    def label(self) -> str:
        """EPOCH.VERSION"""
        return f"{self.epoch}.{self.version}"


class LiveWeights:
    """The versions that can be asked for, in `live`: the newest, and the one before it as long as
    requests may ask for it. Of the event loop alone, but for `remember` and `of`.

    Args:
        first: that it is served with until others come.
    """

    def __init__(self, name: str, first: ServedWeights) -> None:
        self.name = name
        self._known, self.live = {first.serial: first}, [first]
        self._changed = asyncio.Event()

    @property
    def newest(self) -> ServedWeights:
        """The version used by requests that name none."""
        return self.live[0]

    def remember(self, weights: ServedWeights) -> None:
        """Registers weights that may sample from now on. Thread-safe."""
        self._known[weights.serial] = weights
        while len(self._known) > _MAX_REMEMBERED:
            del self._known[next(iter(self._known))]

    def set_live(self, live: list[ServedWeights]) -> None:
        """Sets the versions that the engine holds now."""
        self.live = live
        self._changed.set()
        self._changed = asyncio.Event()

    def of(self, serial: int) -> ServedWeights:
        """The weights that have sampled a token."""
        return self._known[serial]

    def id_of(self, weights: ServedWeights) -> str:
        """NAME@EPOCH.VERSION"""
        return f"{self.name}@{weights.label}"

    def named(self, model: str | None) -> ServedWeights | None:
        """The weights that a request's `model` asks for, None: the newest; 404 where they are not
        live."""
        if model is None or model == self.name:
            return None
        for weights in self.live:
            if model == self.id_of(weights):
                return weights
        raise self.gone(model)

    def gone(self, model: str) -> ApiError:
        """The answer where a model's weights are not here."""
        live = [self.name, *(self.id_of(weights) for weights in self.live)]
        message = f"model={model[:MAX_TOLD]!r} must be one of {live}; the first is the newest."
        return ApiError(404, message, "model", MODEL_GONE)

    async def wait_for(self, wanted: str | None, seconds: float) -> None:
        """Waits until the newest version is at least that of the header X-Min-Weight-Version,
        VERSION or EPOCH.VERSION; 400 for another value, 409 where it does not come in time."""
        if wanted is None:
            return
        header, parts = "X-Min-Weight-Version", wanted.split(".")
        is_number = all(part.isdecimal() and len(part) < 20 for part in parts)
        refuse(len(parts) > 2 or not is_number,
               f"{header}={wanted[:40]!r} must be VERSION or EPOCH.VERSION, whole numbers.", header)
        least = [*map(int, parts)]
        try:
            with anyio.fail_after(seconds):
                while [self.newest.epoch, self.newest.version][-len(least) :] < least:
                    await self._changed.wait()
        except TimeoutError:
            message = f"{header}={wanted!r} must be at most {self.newest.label}, the newest."
            raise ApiError(409, message, header, "weight_version_not_available") from None


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """CRC-32 of the weights' bytes in the order of their names, eight hexadecimal digits."""
    crc = 0
    for name in sorted(weights, key=lambda name: name.removeprefix("model.")):
        tensor = weights[name].detach().cpu().contiguous()
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy(), crc)
    return f"{crc:08x}"
