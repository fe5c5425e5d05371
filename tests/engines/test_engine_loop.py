"""A thread that owns an engine: many ask at once, nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, wait
from dataclasses import replace

import pytest

from rllib_llm.engines.engine_loop import EngineLoop
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Ended, Noise, Row, Tokens
from rllib_llm.engines.torch_engine import TorchEngine
from tests.engines.test_torch_engine import alone, prompts, published
from tests.engines.tiny_generations import PAD, STOPS
from tests.modules.tiny_models import tiny_model

PARAMS = SamplingParams(PAD, STOPS, max_new_tokens=12)
DEADLINE_S = 60


class ScriptedEngine:
    """Gives a row the numbers from 1 on, one a step, until it has max_new_tokens. Steps wait for
    `may_step`; the one number `fails_at` raises."""

    version = 0

    def __init__(self, fails_at: int | None = None) -> None:
        self.rows: dict[int, Row] = {}
        self.tokens: dict[int, list[int]] = {}
        self.may_step, self.fails_at = threading.Event(), fails_at
        self.num_steps, self.is_closed = 0, False
        self.batches: list[int] = []
        self.may_step.set()

    @property
    def num_running(self) -> int:
        return len(self.rows)

    def add(self, rows) -> None:
        for row in rows:
            if len(row.token_ids) > 5:
                raise ValueError("too long")
            self.rows[row.id], self.tokens[row.id] = row, []

    def step(self) -> list[Ended]:
        assert self.may_step.wait(DEADLINE_S)
        self.num_steps += 1
        self.batches.append(len(self.rows))
        if self.num_steps == self.fails_at:
            raise FloatingPointError("as scripted")
        for tokens in self.tokens.values():
            tokens.append(len(tokens) + 1)
        full = [
            i for i, row in self.rows.items() if len(self.tokens[i]) >= row.params.max_new_tokens
        ]
        return self._out(full, "length")

    def sampled(self, ids, starts):
        new = [self.tokens[i][at:] for i, at in zip(ids, starts, strict=True)]
        return [Tokens(t, [-1.0] * len(t), [0] * len(t)) for t in new]

    def abort(self, ids):
        return self._out([i for i in ids if i in self.rows], "aborted")

    def _out(self, ids, finish):
        for i in ids:
            del self.rows[i]
        return [
            Ended(i, t := self.tokens.pop(i), [-1.0] * len(t), [0] * len(t), finish) for i in ids
        ]

    def load(self, weights, version, in_flight="finish") -> None:
        if not weights:
            raise ValueError("no weights")
        self.version = version

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def scripted():
    engine = ScriptedEngine()
    loop = EngineLoop(engine)
    yield engine, loop
    engine.may_step.set()
    loop.close()


def test_completions_asked_from_many_threads_are_those_of_the_engine():
    model = tiny_model("llama").double()
    loop = EngineLoop(TorchEngine(tiny_model("llama").double(), version=0))
    asked, found = prompts(), {}

    def ask(i: int) -> None:
        found[i] = loop.complete(asked[i % 5], PARAMS, seed=1, row=i)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    loop.close()
    for i in range(20):
        row = Row(i, asked[i % 5], PARAMS, noise=Noise(1, i))
        tokens, logprobs = alone(model, row)
        assert found[i].token_ids == tokens
        assert found[i].logprobs == pytest.approx(logprobs, abs=1e-5)


def test_a_group_is_added_together(scripted):
    engine, loop = scripted
    engine.may_step.clear()
    futures = loop.submit_all([Row(None, [1, 2], PARAMS, noise=Noise(0, i)) for i in range(4)])
    engine.may_step.set()
    assert not wait(futures, DEADLINE_S).not_done
    assert engine.batches[0] == 4


class InvitingEngine(ScriptedEngine):
    """Has a second completion asked for while it is given the first."""

    invite = None

    def add(self, rows) -> None:
        super().add(rows)
        invite, self.invite = self.invite, None
        if invite is not None:
            invite()


@pytest.mark.parametrize("is_turn", [True, False])
def test_conversations_that_come_to_an_idle_engine_begin_together(is_turn):
    """Each step is shared then, and so is the prefill of what their tools said; what is no turn of
    a conversation does not wait for others."""
    engine, later = InvitingEngine(), []
    loop = EngineLoop(engine)
    names = ("a", "b") if is_turn else (None, None)
    engine.invite = lambda: later.append(loop.submit([2], PARAMS, conversation=names[1]))
    first = loop.submit([1], PARAMS, conversation=names[0])
    assert first.result(DEADLINE_S).num_tokens == later[0].result(DEADLINE_S).num_tokens == 12
    loop.close()
    assert engine.batches[0] == (2 if is_turn else 1)


def test_as_many_as_have_just_left_are_waited_for_once():
    """Clients that have their completions come again at about the same time."""
    engine, later = InvitingEngine(), []
    loop = EngineLoop(engine)

    def first_batch(num_rows: int, invites: bool) -> int:
        """Rows in the first step of rows that come to an idle engine, all of one length."""
        engine.batches.clear()
        if invites:
            engine.invite = lambda: later.append(loop.submit([2], PARAMS))
        for future in [*loop.submit_all([Row(None, [1], PARAMS)] * num_rows), *later]:
            future.result(DEADLINE_S)
        while later:
            later.pop().result(DEADLINE_S)
        return engine.batches[0]

    assert first_batch(2, invites=False) == 2
    assert first_batch(1, invites=True) == 2  # two have left, so a second one is waited for
    assert first_batch(1, invites=False) == 1  # it does not come
    assert first_batch(1, invites=True) == 1  # one has left and one has come: nobody is missed
    loop.close()


def test_tokens_stream_in_order_and_before_the_end(scripted):
    _, loop = scripted
    seen = []
    ended = loop.complete([1], PARAMS, on_tokens=lambda new: seen.extend(new.token_ids))
    assert seen == ended.token_ids == list(range(1, 13))


def test_an_event_loop_waits_without_blocking(scripted):
    _, loop = scripted

    async def ask() -> None:
        main, seen = threading.get_ident(), []

        def on_tokens(new) -> None:
            seen.extend((token, threading.get_ident()) for token in new.token_ids)

        first, second = await asyncio.gather(
            loop.complete_async([1], PARAMS, on_tokens=on_tokens),
            loop.complete_async([2], replace(PARAMS, max_new_tokens=3)),
        )
        assert [token for token, _ in seen] == first.token_ids == list(range(1, 13))
        assert {thread for _, thread in seen} == {main}
        assert second.num_tokens == 3

    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))


def test_an_aborted_completion_has_what_there_is_of_it(scripted):
    engine, loop = scripted
    begun = threading.Event()
    long = replace(PARAMS, max_new_tokens=1_000_000)
    future = loop.submit([1], long, on_tokens=lambda new: begun.set())
    assert begun.wait(DEADLINE_S)
    loop.abort(future)
    ended = future.result(DEADLINE_S)
    assert ended.finish == "aborted" and ended.num_tokens >= 1


def test_a_cancelled_completion_leaves_the_engine(scripted):
    engine, loop = scripted
    begun = threading.Event()
    long = replace(PARAMS, max_new_tokens=1_000_000)
    future = loop.submit([1], long, on_tokens=lambda new: begun.set())
    assert begun.wait(DEADLINE_S)
    assert future.cancel()
    assert loop.complete([1], PARAMS).num_tokens == 12  # behind which the other one is gone
    assert engine.num_running == 0
    with pytest.raises(CancelledError):
        future.result()


def test_an_error_of_a_callback_ends_its_completion_alone(scripted):
    engine, loop = scripted

    def refuse(new) -> None:
        raise KeyError("of the caller")

    with pytest.raises(KeyError, match="of the caller"):
        loop.submit([1], PARAMS, on_tokens=refuse).result(DEADLINE_S)
    assert loop.complete([1], PARAMS).num_tokens == 12
    assert engine.num_running == 0


def test_a_refused_request_ends_alone(scripted):
    _, loop = scripted
    good, bad = loop.submit([1], PARAMS), loop.submit([1] * 6, PARAMS)
    with pytest.raises(ValueError, match="too long"):
        bad.result(DEADLINE_S)
    assert good.result(DEADLINE_S).num_tokens == 12


def test_weights_are_taken_between_steps_and_wrong_ones_are_said(scripted):
    engine, loop = scripted
    loop.load({"a": None}, 5)
    assert engine.version == 5
    with pytest.raises(ValueError, match="no weights"):
        loop.load({}, 6)
    assert loop.complete([1], PARAMS).num_tokens == 12


def test_new_weights_of_a_real_engine_are_in_use():
    loop = EngineLoop(TorchEngine(tiny_model("llama").double(), version=0))
    new = tiny_model("llama", seed=1).double()
    loop.load(published(new), 1)
    ended = loop.complete(prompts()[0], PARAMS, seed=1)
    loop.close()
    assert ended.token_ids == alone(new, Row(0, prompts()[0], PARAMS, noise=Noise(1, 0)))[0]
    assert set(ended.versions) == {1}


def test_a_failing_step_ends_all_who_wait_and_all_who_come():
    engine = ScriptedEngine(fails_at=3)
    engine.may_step.clear()
    loop = EngineLoop(engine)
    futures = [loop.submit([1], PARAMS) for _ in range(3)]
    engine.may_step.set()
    for future in futures:
        with pytest.raises(FloatingPointError, match="as scripted"):
            future.result(DEADLINE_S)
    loop.close()
    assert engine.is_closed
    with pytest.raises(RuntimeError, match="must be open") as refused:
        loop.complete([1], PARAMS)
    assert isinstance(refused.value.__cause__, FloatingPointError)
    with pytest.raises(RuntimeError, match="must be open"):
        loop.load({"a": None}, 5)


def test_closing_ends_what_is_under_way():
    engine = ScriptedEngine()
    begun = threading.Event()
    loop = EngineLoop(engine)
    long = replace(PARAMS, max_new_tokens=1_000_000)
    future = loop.submit([1], long, on_tokens=lambda new: begun.set())
    assert begun.wait(DEADLINE_S)
    loop.close()
    with pytest.raises(RuntimeError, match="was closed before"):
        future.result(DEADLINE_S)
    assert engine.is_closed
