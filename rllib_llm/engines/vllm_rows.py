"""vLLM's rows one step at a time, behind the protocol of engines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rllib_llm.engines.completions import Tokens
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Ended, Finish, InFlight, Row, check_version, continued
from rllib_llm.engines.vllm_params import NO_WEIGHTS, check_params, sampling_params


@dataclass
class _Held:
    """A row, and what was sampled of it `before` it was taken out to be computed anew."""

    row: Row
    before: Ended | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def ended(self, finish: Finish) -> Ended:
        """All that was sampled since the row was added."""
        now = Ended(self.row.id, self.token_ids, self.logprobs, self.versions, finish)
        if self.before is None:
            return now
        return Ended(
            self.row.id,
            self.before.token_ids + now.token_ids,
            self.before.logprobs + now.logprobs,
            self.before.versions + now.versions,
            finish,
        )


class VLLMRows:
    """See `protocol.Engine`. vLLM draws its own numbers, one stream per request: a row that is gone
    on with draws others than it would have drawn.

    Args:
        vllm: the package.
        llm: a `vllm.LLM` that nobody else uses meanwhile.
        load_weights: puts published weights into it and forgets its prefix cache.
        temperature: of the rows; vLLM is told when it starts which log-probs to give.
    """

    def __init__(
        self,
        vllm: Any,
        llm: Any,
        load_weights: Callable[[dict[str, torch.Tensor]], None],
        temperature: float = 1.0,
    ) -> None:
        self._temperature = temperature
        self._vllm, self._llm, self._engine = vllm, llm, llm.llm_engine
        self._load_weights = load_weights
        self._version: int | None = None
        self._pending: tuple[dict[str, torch.Tensor], int] | None = None
        self._names = itertools.count()  # of requests: a row that comes again is another one
        self._running: dict[str, _Held] = {}
        self._held_back: list[_Held] = []  # rows that wait for weights, or for a clean cache

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._held_back)

    @property
    def version(self) -> int | None:
        return self._version if self._pending is None else self._pending[1]

    def add(self, rows: Sequence[Row]) -> None:
        if self.version is None:
            raise RuntimeError(NO_WEIGHTS)
        names = {each.row.id for each in self._all()}
        for row in rows:
            if row.id in names:
                raise ValueError(
                    f"row.id={row.id!r} must be one that is not in the engine: it names the row. "
                    "Wait until that row has ended, or choose another id."
                )
            names.add(row.id)
            check_version(row, self.version)
            self._check(row.params)
            if row.guide is not None or row.params.top_logprobs:
                raise ValueError(
                    f"row.guide={row.guide!r} must be None, and top_logprobs="
                    f"{row.params.top_logprobs!r} 0, with engine='vllm': they are those of our own "
                    "decode loop. Use engine='torch'."
                )
        self._held_back += [_Held(row) for row in rows]

    def _check(self, params: SamplingParams) -> None:
        if not params.greedy and params.temperature != self._temperature:
            raise ValueError(
                f"temperature={params.temperature!r} must be {self._temperature!r} with "
                "engine='vllm': it was started to give log-probs at that one. Start another engine."
            )
        check_params(params.temperature, params.top_k, params.top_p, params.min_new_tokens)

    def _all(self) -> list[_Held]:
        return [*self._running.values(), *self._held_back]

    def _let_in(self) -> None:
        """Hands rows that wait to vLLM, which queues them itself."""
        waiting, self._held_back = self._held_back, []
        for each in waiting:
            name, row = str(next(self._names)), each.row
            params = _rest_of(row)
            # Another stream than the one that drew what was sampled before.
            seed = (row.noise.one_seed + row.num_sampled) % 2**63
            prompt = {"prompt_token_ids": list(row.token_ids)}
            self._engine.add_request(name, prompt, sampling_params(self._vllm, params, seed))
            self._running[name] = each

    def step(self) -> list[Ended]:
        if self._pending is not None and not self._running:
            self._put(*self._pending)
        if self._pending is None and self._held_back:
            self._let_in()
        ended = []
        for output in self._engine.step():
            each = self._running.get(output.request_id)
            if each is None:  # taken out meanwhile
                continue
            answer = output.outputs[0]
            each.token_ids = list(answer.token_ids)
            each.logprobs = list(answer.logprobs.logprobs)
            num_new = len(each.token_ids) - len(each.versions)
            each.versions += [self._version or 0] * num_new
            if output.finished:
                del self._running[output.request_id]
                stopped = each.token_ids[-1] in each.row.params.stop_token_ids
                ended.append(each.ended("stop" if stopped else "length"))
        return ended

    def sampled(self, ids: Sequence[Hashable], starts: Sequence[int]) -> list[Tokens]:
        held = {each.row.id: each.ended("aborted") for each in self._all()}
        return [
            Tokens(row.token_ids[at:], row.logprobs[at:], row.versions[at:])
            for row, at in ((held[i], at) for i, at in zip(ids, starts, strict=True))
        ]

    def abort(self, ids: Sequence[Hashable]) -> list[Ended]:
        wanted = set(ids)
        out = self._take_out(wanted)
        out += [each for each in self._held_back if each.row.id in wanted]
        self._held_back = [each for each in self._held_back if each.row.id not in wanted]
        return [each.ended("aborted") for each in out]

    def _take_out(self, ids: set[Hashable]) -> list[_Held]:
        """Rows that vLLM has, which then has them no more."""
        names = [name for name, each in self._running.items() if each.row.id in ids]
        if names:
            self._engine.abort_request(names)
        return [self._running.pop(name) for name in names]

    def load(
        self, weights: dict[str, torch.Tensor], version: int, in_flight: InFlight = "finish"
    ) -> None:
        if in_flight == "keep" and self._running:
            raise ValueError(
                "in_flight='keep' must not be used with engine='vllm' while rows are in it: its "
                "prefix cache would hand keys and values of the old weights to new rows. Use "
                "'finish' or 'recompute'."
            )
        if in_flight == "finish" and self._running:
            self._pending = (weights, version)
            return
        # To be computed anew, a row is taken out and comes again with what was sampled of it.
        anew = []
        for each in self._take_out({each.row.id for each in self._running.values()}):
            now = _Held(each.row, None, each.token_ids, each.logprobs, each.versions)
            anew.append(_Held(continued(each.row, now.ended("aborted")), each.ended("aborted")))
        self._held_back = anew + self._held_back
        self._put(weights, version)

    def _put(self, weights: dict[str, torch.Tensor], version: int) -> None:
        self._load_weights(weights)
        self._pending, self._version = None, version

    def close(self) -> None:
        self._take_out({each.row.id for each in self._running.values()})
        self._held_back = []


def _rest_of(row: Row) -> SamplingParams:
    """The row's settings, counted from where it goes on."""
    num, params = row.num_sampled, row.params
    return replace(
        params,
        max_new_tokens=params.max_new_tokens - num,
        min_new_tokens=max(0, params.min_new_tokens - num),
    )
