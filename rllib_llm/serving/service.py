"""The policy behind a server: its engine in a thread, its weights, and what asks of them.

requests ─▶ RunningJob ─▶ EngineHost ─▶ tokens ─▶ Choice ─▶ pieces
weights  ─▶ load ─▶ EngineHost ─▶ LiveWeights
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch

from rllib_llm.engines.engine_loop import Wanted
from rllib_llm.engines.protocol import Noise
from rllib_llm.engines.scoring import Scores
from rllib_llm.serving.clients import Client
from rllib_llm.serving.engine_host import EngineHost
from rllib_llm.serving.errors import ApiError
from rllib_llm.serving.job import Job, Limits
from rllib_llm.serving.metrics import Metrics
from rllib_llm.serving.rows import Mailbox, RowEvents
from rllib_llm.serving.running_job import ENGINE_ENDED, RunningJob
from rllib_llm.serving.sessions import Sessions
from rllib_llm.serving.settings import ServeSettings
from rllib_llm.serving.texts import TokenTexts
from rllib_llm.serving.versions import LiveWeights, Weights, fingerprint

logger = logging.getLogger(__name__)

SHUTTING_DOWN = "The server is about to stop and takes no more requests."


class Service:
    """Samples for requests. Made in any thread; `start` and all that follows are for the event
    loop's, but `load`.

    Args:
        host: the engine; closed with this.
        tokenizer: of the model.
        settings: of the server.
        source: where the first weights come from, to be told.
        serial: of the first weights, as the engine stamps them on tokens.
    """

    def __init__(
        self,
        host: EngineHost,
        tokenizer: Any,
        settings: ServeSettings,
        *,
        source: str,
        serial: int = 0,
    ) -> None:
        self.host, self.tokenizer, self.settings = host, tokenizer, settings
        self.texts = TokenTexts(tokenizer)
        self.metrics = Metrics()
        facts = host.facts
        self.limits = Limits(
            max_model_len=min(facts.max_positions, settings.max_model_len or facts.max_positions),
            vocab_size=facts.vocab_size,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_ids=facts.eos_token_ids,
            default_max_tokens=settings.default_max_tokens,
        )
        self.weights = LiveWeights(settings.served_name)
        self._known = {serial: Weights(serial, 0, serial, facts.fingerprint, source)}
        self._load_lock = threading.Lock()
        self.jobs: dict[object, RunningJob] = {}
        self.sessions = Sessions()
        self.is_ready, self.is_draining = False, False
        self._mailbox: Mailbox | None = None

    async def start(self) -> None:
        """Makes it ready, in the event loop that requests come to."""
        if self._mailbox is not None:
            return
        self._mailbox = Mailbox(asyncio.get_running_loop())
        self.host.listen()
        self.weights.set_live(list(self._known.values()))
        self.is_ready = True

    async def drain(self, seconds: float) -> bool:
        """Takes no more requests and waits until those under way have ended, so long at most;
        whether they have."""
        self.is_draining = True
        deadline = time.monotonic() + seconds
        while self.jobs and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self.jobs

    def close(self) -> None:
        """Ends the engine, and requests that are under way with it."""
        self.is_ready = False
        self.host.close()

    # --- weights -----------------------------------------------------------------------------

    def load(
        self, weights: Mapping[str, torch.Tensor], *, epoch: int, version: int, source: str
    ) -> Weights:
        """Has new requests sampled by these weights. For any thread but the event loop's; waits
        until the rows of the version before the newest have ended.

        Args:
            weights: under the names of the policy's state, or of the model's.
            epoch, version: the publisher's. A lower version of a later epoch is welcome.
            source: where they come from, to be told.

        Raises:
            ValueError: they are those of another model.
        """
        with self._load_lock:
            start = time.perf_counter()
            tensors = dict(weights)
            serial = max(self._known) + 1
            # Told before a token can be sampled by them.
            loaded = Weights(serial, epoch, version, fingerprint(tensors), source)
            self.weights.remember(loaded)
            serials = self.host.load(tensors, serial)
            loaded = replace(loaded, load_seconds=time.perf_counter() - start)
            self._known[serial] = loaded
            live = [self._known[each] for each in serials]
            self._known = {each.serial: each for each in live}
        self.metrics.swapped(loaded)
        assert self._mailbox is not None, "start was called"
        self._mailbox.post(self.weights.set_live, live)
        logger.info(
            "weights %s of %s in use after %.3f s", loaded.label, source, loaded.load_seconds
        )
        return loaded

    # --- requests ----------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises ApiError where no request can be taken now."""
        if not self.is_ready or self.is_draining:
            message = SHUTTING_DOWN if self.is_draining else "The server is starting."
            raise ApiError(503, message, code="unavailable", headers={"Retry-After": "1"})
        try:
            self.host.check_open()
        except RuntimeError as error:
            raise ApiError(503, ENGINE_ENDED, code="engine_ended") from error

    @asynccontextmanager
    async def run(
        self, request_id: str, job: Job, client: Client | None = None
    ) -> AsyncIterator[RunningJob]:
        """Starts a job; what of it has not ended at the end of the block leaves the engine. Its
        tokens are counted as the client's.

        Raises:
            ApiError: 429, too many wait; 503, the server is about to stop.
        """
        self.check_open()
        num_rows = len(job.prompts) * job.n
        most = self.settings.max_rows + self.settings.max_waiting
        if self.num_rows + num_rows > most:
            self.metrics.refused("queue")
            raise ApiError(
                429,
                f"The server is full: {self.num_rows} completions are under way or wait, and "
                f"{num_rows} more would be above {most}. Try again later.",
                code="server_overloaded",
                headers={"Retry-After": "1"},
            )
        watch = self.metrics.watch(sum(map(len, job.prompts)))
        running = RunningJob(
            request_id, job, self._rows_of(job), watch, self.weights, self.tokenizer, self.settings
        )
        key = object()  # clients choose ids, and may do so twice
        self.jobs[key] = running
        try:
            yield running
        finally:
            running.close()
            del self.jobs[key]
            if client is not None:
                used = sum(map(len, job.prompts)) + running.num_completion_tokens
                client.tokens.use(used)

    @property
    def num_rows(self) -> int:
        """Completions that are under way or wait."""
        return sum(job.num_left for job in self.jobs.values())

    def _rows_of(self, job: Job) -> RowEvents:
        """The rows of a job in the engine."""
        assert self._mailbox is not None, "start was called"
        wanted = []
        for i, prompt in enumerate(job.prompts):
            params = replace(job.params, max_new_tokens=job.max_tokens[i])
            group = object() if job.n > 1 else None
            for k in range(job.n):
                guide = job.make_guide() if job.make_guide else None
                noise = Noise(job.seed, job.noise_row + i * job.n + k, job.noise_turn)
                wanted.append(
                    Wanted(prompt, params, noise, 0, group, job.version, guide, job.conversation)
                )
        return RowEvents(self.host, self._mailbox, wanted)

    async def score(self, token_ids: list[int], top: int, version: int | None) -> Scores:
        """Log-probs of a prompt's tokens, at temperature 1."""
        return await asyncio.wrap_future(self.host.score(token_ids, top, version))
