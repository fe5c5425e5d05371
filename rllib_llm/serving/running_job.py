"""One request in the engine: what comes of its completions, and how it ends."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from rllib_llm.engines.protocol import Ended
from rllib_llm.serving.choices import Choice, Piece
from rllib_llm.serving.errors import ApiError
from rllib_llm.serving.job import Job
from rllib_llm.serving.metrics import JobWatch
from rllib_llm.serving.rows import RowEvents
from rllib_llm.serving.settings import ServeSettings
from rllib_llm.serving.texts import TextStream
from rllib_llm.serving.versions import LiveWeights, Weights

logger = logging.getLogger(__name__)

ENGINE_ENDED = "The server's engine has ended with an error, which its log shows."


class RunningJob:
    """A job in the engine. `async for i, piece in job` gives what comes of completion i, whose
    prompt is number i // n; the last piece of each has a finish_reason.

    Args:
        request_id: of the request, to be told.
        job: what is asked.
        rows: its completions in the engine.
        watch: its clock.
        weights: of the server.
        tokenizer: of the model.
        settings: of the server.
    """

    def __init__(
        self,
        request_id: str,
        job: Job,
        rows: RowEvents,
        watch: JobWatch,
        weights: LiveWeights,
        tokenizer: Any,
        settings: ServeSettings,
    ) -> None:
        self.request_id, self.job = request_id, job
        self._rows, self._watch, self._weights = rows, watch, weights
        self._tokenizer, self._settings = tokenizer, settings
        self.num_left = len(job.prompts) * job.n
        self.choices = [self._choice(job.prompts[i // job.n]) for i in range(self.num_left)]
        self.on_piece: Callable[[Piece], None] | None = None
        self._serials: dict[int, None] = {}  # of the weights that have sampled, in their order
        self._texts: dict[int, str] = {}  # for the log, if it is to have them
        self._timer = asyncio.get_running_loop().call_later(settings.deadline_s, self._expire)

    def _choice(self, prompt: list[int]) -> Choice:
        job = self.job
        before = prompt[-8:] if job.continues_text else ()
        text = TextStream(self._tokenizer, before, job.stops, job.keeps_stop)
        return Choice(text, job.params.stop_token_ids, job.eos_token_ids)

    def _expire(self) -> None:
        self._rows.fail(
            ApiError(
                504,
                f"The request took longer than {self._settings.deadline_s:g} s, the server's "
                "limit.",
                code="deadline_exceeded",
            )
        )

    def __aiter__(self) -> RunningJob:
        return self

    async def __anext__(self) -> tuple[int, Piece]:
        while True:
            try:
                i, event = await self._rows.__anext__()
            except ValueError as error:  # the engine refuses the row
                raise self._refusal(error) from error
            except RuntimeError as error:
                raise ApiError(503, ENGINE_ENDED, code="engine_ended") from error
            choice = self.choices[i]
            if choice.is_done:
                continue
            piece = choice.end(event) if isinstance(event, Ended) else choice.tokens(event)
            self._watch.tokens(i, len(piece.token_ids))
            for serial in piece.versions:
                self._serials.setdefault(serial)
            if self.on_piece is not None:
                self.on_piece(piece)
            if self._settings.log_prompts:
                self._texts[i] = self._texts.get(i, "") + piece.text
            if choice.is_done:
                self._leave(i, piece)
            return i, piece

    def _leave(self, i: int, piece: Piece) -> None:
        self._rows.leave(i)
        self.num_left -= 1
        self._watch.finished(i, piece.finish_reason or "")

    def _refusal(self, error: ValueError) -> ApiError:
        if "row.version" in str(error):  # it went between the request and the step
            return self._weights.gone("the version that was asked for")
        return ApiError(400, str(error))

    async def collect(self) -> list[Piece]:
        """All of each completion."""
        whole = [Piece() for _ in self.choices]
        async for i, piece in self:
            whole[i].add(piece)
        return whole

    @property
    def weights(self) -> list[Weights]:
        """Those that have sampled, in their order; the newest where nothing was sampled yet."""
        return [self._weights.of(serial) for serial in self._serials] or [self._weights.newest]

    @property
    def num_weights(self) -> int:
        """How many versions of them have sampled."""
        return len(self._serials)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that were sampled and belong to the answer."""
        return sum(choice.num_tokens for choice in self.choices)

    def abort(self) -> None:
        """Ends it with what there is."""
        self._rows.abort()

    def close(self) -> None:
        """Frees what it holds in the engine."""
        self._timer.cancel()
        self._rows.close()
        if self._settings.log_prompts:
            decode = self._tokenizer.decode
            told = {"prompts": [decode(ids) for ids in self.job.prompts], "texts": self._texts}
            logger.info(json.dumps({"request_id": self.request_id, **told}))
        self._watch.close()
        self.num_left = 0
