"""What runs elsewhere: how long it is waited for, and what is said of it."""

from __future__ import annotations

import asyncio
import math
import random
import time

import pytest

from rllib_llm.shared import remote
from rllib_llm.shared.remote import (
    Away,
    EventLoop,
    ExitedError,
    Late,
    Outage,
    OutageError,
    backoff_seconds,
    harmless,
    within,
)


def test_an_outage_is_told_at_once_where_something_depends_on_it(caplog):
    outage = Outage("tools", meanwhile="Rollouts are not valid.")
    assert outage.waits("it died") and outage.waits("no connection")
    assert [record.getMessage() for record in caplog.records] == [
        "tools went away (it died). Rollouts are not valid."
    ]
    outage.end()
    outage.end()
    assert "tools is back after 0 s." in caplog.records[1].getMessage()
    assert len(caplog.records) == 2


def test_one_that_is_waited_for_is_told_once_a_minute_and_given_up_on(caplog, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(remote.time, "monotonic", lambda: now[0])
    outage, waited = Outage("http://judge", 150.0), []
    for now[0] in (0.0, 59.0, 60.0, 90.0, 121.0, 150.0):
        waited.append(outage.waits("status 503"))
    assert waited == [150.0, 91.0, 90.0, 60.0, 29.0, 0.0]
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(" (")[0] for text in said] == [
        "http://judge has been away for 60 s", "http://judge has been away for 121 s",
    ]  # fmt: skip
    assert said[0].endswith("(status 503). It is waited for up to 150 s.")
    with pytest.raises(OutageError, match="must come back within outage_s=150"):
        outage.give_up("status 503")
    assert issubclass(OutageError, Away)


def test_what_is_not_waited_for_is_not_told(caplog):
    outage = Outage("http://judge", 0.0)
    assert not outage.waits("status 503")
    outage.give_up("status 503")  # raises nothing
    assert not caplog.records


def test_pauses_double_and_stay_within_half_and_one_and_a_half():
    uniform = random.Random(0).uniform
    for attempt, delay in enumerate([1.0, 2.0, 4.0, 4.0]):
        pauses = [backoff_seconds(attempt, uniform, 1.0, 4.0) for _ in range(200)]
        assert 0.5 * delay <= min(pauses) < 0.75 * delay
        assert 1.25 * delay < max(pauses) <= 1.5 * delay
    assert backoff_seconds(10_000, max) == 7.5  # 1.5 * longest, and no overflow


def test_a_limit_holds_for_what_does_not_let_itself_be_cancelled():
    """`asyncio.wait_for` of Python 3.11 would wait for its end."""

    async def stays():
        for _ in range(100):
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue

    async def waits():
        start = time.monotonic()
        with pytest.raises(Late, match=r"^no answer within 0.05 s$"):
            await within(0.05, stays(), end_seconds=0.05)
        return time.monotonic() - start

    assert asyncio.run(waits_and_ends(waits)) < 5  # stays() would take 10


async def waits_and_ends(waits):
    """asyncio.run waits for all tasks: those that stay are left to a loop of their own."""
    loop = remote.EventLoop("stays")
    return await asyncio.wrap_future(loop.submit(waits()))


def test_a_limit_cancels_passes_on_and_is_told_apart():
    async def own():
        raise TimeoutError("mine")

    async def checks():
        for limit in (None, math.inf, 5.0):
            assert await within(limit, asyncio.sleep(0, "done")) == "done"
        with pytest.raises(TimeoutError, match="mine") as found:
            await within(5.0, own())
        assert not isinstance(found.value, Late)
        ends = asyncio.Event()

        async def hangs():
            try:
                await asyncio.sleep(60)
            finally:
                ends.set()

        with pytest.raises(Late, match="too slow"):
            await within(0.01, hangs(), "too slow")
        assert ends.is_set()  # it has ended when its caller goes on
        ends.clear()
        asking = asyncio.ensure_future(within(60.0, hangs()))
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait_for(ends.wait(), 5)

    asyncio.run(checks())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_task_that_exits_ends_neither_the_loop_nor_who_waits(error):
    """Of a task that a user's coroutine begins, asyncio raises it in the loop as well: the loop's
    thread ended, and whoever waited for it hung."""

    async def exits():
        raise error

    async def gathers():
        await asyncio.gather(exits(), asyncio.sleep(0))

    loop = EventLoop()
    with pytest.raises(ExitedError, match=type(error).__name__):
        loop.submit(harmless(gathers())).result(timeout=60)
    assert loop.submit(asyncio.sleep(0, "still there")).result(timeout=60) == "still there"
    loop.close()
