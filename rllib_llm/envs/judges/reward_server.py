"""Reward functions served over HTTP, for runs here and for those of others.

    POST /v1/rewards  {"prompts", "completions", "columns"} -> {"scores", "reasons", "components"}
    POST /get_reward  OpenRLHF's shape: {"query", "prompts", "labels"} -> {"rewards", "scores"}
    POST /reward      slime's shape: {"prompt", "response", "label"} -> {"score": number}
    GET  /health      without a token

A row that could not be judged has `null` and a reason, never 0; alone (`/reward`) it is answered
with status 502. All but /health want the token: `Authorization: Bearer ...`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

from rllib_llm.envs.judges.rewards import RewardBatch, RewardError, Rewards, RewardSum
from rllib_llm.shared.errors import Problems, require

Asked = TypeVar("Asked", bound=BaseModel)
LABEL_COLUMN = "answer"
MAX_BODY_BYTES = 32 * 2**20
_SPECIAL_TOKENS = re.compile(r"(?:\s|<[^<>\s]{1,40}>|\[[A-Z_]{2,20}\])*")


class ScoringRequest(BaseModel):
    """A scoring request in this package's format."""

    prompts: list[str]
    completions: list[str]
    columns: dict[str, list[Any]] = Field(default_factory=dict)


class OpenRLHFRequest(BaseModel):
    """A scoring request in OpenRLHF's format; `query` is prompt and completion together."""

    query: list[str]
    prompts: list[str]
    labels: list[Any] | None = None


class SlimeRequest(BaseModel):
    """A scoring request in slime's format: one completion."""

    prompt: str
    response: str
    label: Any = None


class RewardService:
    """Judges texts, one batch at a time.

    Args:
        rewards: what judges; it must read texts.
        label_column: under which reward functions get the label of the other shapes.
    """

    def __init__(self, rewards: RewardSum, *, label_column: str = LABEL_COLUMN) -> None:
        wanting = [term.name for term in rewards.terms if term.wants_tokens]
        require(
            not wanting, f"reward functions {wanting!r}", ..., "read texts",
            "a service has no ids", kind=RewardError,
        )  # fmt: skip
        self._rewards, self._label_column = rewards, label_column
        self._turn = asyncio.Lock()

    async def judge(
        self, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence]
    ) -> tuple[list[float | None], list[str], dict[str, list[float | None]]]:
        """Scores (None: not judged), the reasons why not, and components by name, of each row."""
        sizes = {len(prompts), len(completions), *map(len, columns.values())}
        if len(sizes) > 1 or not completions:
            raise HTTPException(422, f"prompts, completions and columns have lengths {sizes}")
        try:
            self._rewards.check_columns(columns)
        except Problems as error:
            raise HTTPException(422, str(error)) from error
        batch = RewardBatch.of_texts(prompts, completions, dict(columns))

        def judge() -> Rewards:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the response names the reasons
                return self._rewards(batch)

        try:
            async with self._turn:
                judged = await asyncio.to_thread(judge)
        except RewardError as error:  # no row could be judged
            return [None] * len(completions), [str(error)] * len(completions), {}
        scores = [
            score if valid else None
            for score, valid in zip(judged.scores.tolist(), judged.valid.tolist(), strict=True)
        ]
        components = {
            name: [None if value != value else value for value in column.tolist()]
            for name, column in judged.components.items()
        }
        return scores, list(judged.reasons), components

    async def judge_labelled(
        self, prompts: Sequence[str], completions: Sequence[str], labels: Sequence[Any] | None
    ) -> tuple[list[float | None], list[str]]:
        """As `judge`, of rows with a label and no other column."""
        columns = {} if labels is None else {self._label_column: labels}
        scores, reasons, _ = await self.judge(prompts, completions, columns)
        return scores, reasons


def _behind_prompt(query: str, prompt: str) -> str:
    """The part of a query after its prompt, which special tokens (BOS, padding) may precede; all of
    it would be judged without the prompt."""
    place = query.find(prompt)
    if place >= 0 and _SPECIAL_TOKENS.fullmatch(query, 0, place):
        return query[place + len(prompt) :]
    raise HTTPException(422, f"query {query[:80]!r} must begin with its prompt {prompt[:80]!r}")


def make_app(service: RewardService, token: str) -> FastAPI:
    """The HTTP application; raises ValueError for an empty token."""
    if not token:
        raise ValueError("token='' must not be empty: anybody who reaches the port could use it")
    wanted = f"Bearer {token}".encode()
    app = FastAPI(title="Rewards", docs_url=None, redoc_url=None)

    async def read(request: Request, kind: type[Asked]) -> Asked:
        """The body as `kind`; raises HTTPException where it is none, too large, or not allowed."""
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, wanted):
            raise HTTPException(401, "The token is missing or wrong.")
        length = request.headers.get("content-length", "")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            raise HTTPException(413, f"The request must say its length, up to {MAX_BODY_BYTES}.")
        try:
            return kind.model_validate(json.loads(await request.body()))
        except (ValueError, RecursionError) as error:  # pydantic's is a ValueError
            raise HTTPException(422, str(error)) from error

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/rewards")
    async def rewards(request: Request) -> dict[str, Any]:
        asked = await read(request, ScoringRequest)
        scores, reasons, components = await service.judge(
            asked.prompts, asked.completions, asked.columns
        )
        return {"scores": scores, "reasons": reasons, "components": components}

    @app.post("/get_reward")
    async def get_reward(request: Request) -> dict[str, Any]:
        asked = await read(request, OpenRLHFRequest)
        if len(asked.query) != len(asked.prompts):
            raise HTTPException(422, f"{len(asked.query)} queries, {len(asked.prompts)} prompts")
        pairs = zip(asked.query, asked.prompts, strict=True)
        completions = [_behind_prompt(query, prompt) for query, prompt in pairs]
        scores, reasons = await service.judge_labelled(asked.prompts, completions, asked.labels)
        return {"rewards": scores, "scores": scores, "reasons": reasons}

    @app.post("/reward")
    async def reward(request: Request) -> dict[str, Any]:
        asked = await read(request, SlimeRequest)
        (score,), (reason,) = await service.judge_labelled(
            [asked.prompt], [asked.response], [asked.label]
        )
        if score is None:
            raise HTTPException(502, reason)
        return {"score": score}

    return app
