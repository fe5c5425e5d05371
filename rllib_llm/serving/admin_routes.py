"""Administration: a key of its own, and off without one (`security.py`)."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from rllib_llm.serving.errors import ApiError
from rllib_llm.serving.schemas import AbortRequest, UpdateRequest
from rllib_llm.serving.service import Service
from rllib_llm.serving.sources import load_folder
from rllib_llm.serving.versions import Weights


def make_router(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.post("/pause")
    async def pause() -> dict[str, Any]:
        service.host.pause()
        return {"is_paused": True}

    @router.post("/resume")
    async def resume() -> dict[str, Any]:
        service.host.resume()
        return {"is_paused": False}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, Any]:
        return {"is_paused": service.host.is_paused}

    @router.post("/abort_requests")
    @router.post("/inference/v1/abort_requests")
    async def abort_requests(body: AbortRequest | None = None) -> dict[str, Any]:
        wanted = None if body is None else body.request_ids
        jobs = [job for job in service.jobs.values() if wanted is None or job.request_id in wanted]
        for job in jobs:
            job.abort()
        return {"aborted": [job.request_id for job in jobs]}

    @router.get("/weight_info")
    async def weight_info() -> dict[str, Any]:
        newest, *_ = service.weights.live
        return {
            "newest": _told(newest),
            "live": [_told(each) for each in service.weights.live],
            "in_flight": service.settings.in_flight,
        }

    @router.post("/update_weights")
    async def update_weights(body: UpdateRequest) -> dict[str, Any]:
        newest = service.weights.newest
        epoch = newest.epoch if body.epoch is None else body.epoch
        version = newest.version + 1 if body.version is None else body.version
        try:
            loaded = await asyncio.to_thread(load_folder, service, body.path, epoch, version)
        except (ValueError, OSError) as error:
            raise ApiError(400, str(error), param="path", code="invalid_value") from error
        return _told(loaded)

    @router.post("/drain")
    async def drain() -> dict[str, Any]:
        is_done = await service.drain(service.settings.drain_s)
        return {"drained": is_done, "under_way": len(service.jobs)}

    return router


def _told(weights: Weights) -> dict[str, Any]:
    return {
        "epoch": weights.epoch,
        "version": weights.version,
        "fingerprint": weights.fingerprint,
        "source": weights.source,
        "load_seconds": weights.load_seconds,
        "loaded_at": weights.loaded_at,
    }
