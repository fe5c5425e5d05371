"""A server's weights, by the names that clients use."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio
import torch

from rllib_llm.serving.schemas import MAX_TOLD, ApiError

MODEL_GONE = "model_not_found"
_MAX_REMEMBERED = 10_000


@dataclass(frozen=True)
class Weights:
    """Weights that were loaded.

    `serial` counts loads, and is what the engine stamps on tokens; `epoch` and `version` are the
    publisher's: after a restore a lower version of a later epoch is another one.
    """

    serial: int
    epoch: int
    version: int
    fingerprint: str
    source: str
    load_seconds: float = 0.0
    loaded_at: float = field(default_factory=time.time)

    @property
    def label(self) -> str:
        """EPOCH.VERSION"""
        return f"{self.epoch}.{self.version}"


class LiveWeights:
    """The versions that can be asked for, the newest first. Of the event loop alone, but for
    `remember` and `of`.

    Args:
        first: that it is served with until others come.
    """

    def __init__(self, name: str, first: Weights) -> None:
        self.name = name
        self._known, self._live = {first.serial: first}, [first]
        self._changed = asyncio.Event()

    @property
    def newest(self) -> Weights:
        """The version used by requests that name none."""
        return self._live[0]

    @property
    def live(self) -> list[Weights]:
        """The newest, and the one before it as long as requests may ask for it."""
        return list(self._live)

    def remember(self, weights: Weights) -> None:
        """Registers weights that may sample from now on. Thread-safe."""
        self._known[weights.serial] = weights
        while len(self._known) > _MAX_REMEMBERED:
            del self._known[next(iter(self._known))]

    def set_live(self, live: list[Weights]) -> None:
        """Sets the versions that the engine holds now."""
        self._live = live
        self._changed.set()
        self._changed = asyncio.Event()

    def of(self, serial: int) -> Weights:
        """The weights that have sampled a token."""
        return self._known[serial]

    def id_of(self, weights: Weights) -> str:
        """NAME@EPOCH.VERSION"""
        return f"{self.name}@{weights.label}"

    def named(self, model: str | None) -> Weights | None:
        """The weights that a request's `model` asks for; None: the newest.

        Raises:
            ApiError: 404, naming those that are live.
        """
        if model is None or model == self.name:
            return None
        for weights in self._live:
            if model == self.id_of(weights):
                return weights
        raise self.gone(model)

    def check_new(self, epoch: int, version: int) -> None:
        """Raises ApiError, 409, where a live version has these numbers: two would have one name."""
        for weights in self._live:
            if (weights.epoch, weights.version) == (epoch, version):
                raise ApiError(
                    409,
                    f"version={version} must be one that is not in use: {self.id_of(weights)} was "
                    f"loaded from {weights.source}. Leave it out for the next one.",
                    param="version",
                    code="weight_version_in_use",
                )

    def gone(self, model: str) -> ApiError:
        """The answer where a model's weights are not here."""
        live = [self.name, *(self.id_of(weights) for weights in self._live)]
        return ApiError(
            404,
            f"model={model[:MAX_TOLD]!r} must be one of {live}: this server has no other. "
            f"`{self.name}` is always the newest.",
            param="model",
            code=MODEL_GONE,
        )

    async def wait_for(self, wanted: str | None, seconds: float) -> None:
        """Waits until the newest version is at least that of the header X-Min-Weight-Version,
        VERSION or EPOCH.VERSION.

        Raises:
            ApiError: 400 for another value, 409 where it does not come in time.
        """
        if wanted is None:
            return
        least = _read_order(wanted)
        try:
            with anyio.fail_after(seconds):
                while self._order(len(least)) < least:
                    await self._changed.wait()
        except TimeoutError:
            raise ApiError(
                409,
                f"X-Min-Weight-Version={wanted!r} must be at most {self.newest.label}: nothing "
                f"newer came in {seconds:g} s. Is the run alive that publishes them?",
                param="X-Min-Weight-Version",
                code="weight_version_not_available",
            ) from None

    def _order(self, parts: int) -> tuple[int, ...]:
        return (self.newest.epoch, self.newest.version)[2 - parts :]


def _read_order(wanted: str) -> tuple[int, ...]:
    parts = wanted.split(".")
    if len(parts) > 2 or not all(part.isdecimal() and len(part) < 20 for part in parts):
        raise ApiError(
            400,
            f"X-Min-Weight-Version={wanted[:40]!r} must be VERSION or EPOCH.VERSION: whole "
            "numbers. Leave it out for whatever is newest.",
            param="X-Min-Weight-Version",
        )
    return tuple(int(part) for part in parts)


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """CRC-32 of the weights' bytes in the order of their names, eight hexadecimal digits."""
    crc = 0
    for name in sorted(weights, key=lambda name: name.removeprefix("model.")):
        tensor = weights[name].detach().cpu().contiguous()
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy(), crc)
    return f"{crc:08x}"
