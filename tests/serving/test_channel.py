"""Messages arrive whole and in order, whatever their sizes and however slowly they are read."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import time
from multiprocessing.connection import Connection

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rllib_llm.serving.engine_process import AsyncChannel, pickled

uvloop = pytest.importorskip("uvloop")
# Of a message in bytes, and how long the other end sleeps before it reads on: from nothing to
# several times what a socket holds.
SIZES = st.lists(
    st.tuples(st.sampled_from([0, 1, 1000, 70_000, 300_000, 2_000_000]),
              st.sampled_from([0.0, 0.0, 0.01, 0.05])),
    min_size=1, max_size=6,
)  # fmt: skip


def echo(theirs: socket.socket, stalls: list[float]) -> None:
    """The other end: reads slowly, and sends back what it reads."""
    waits = iter(stalls)
    with Connection(theirs.detach()) as connection, contextlib.suppress(EOFError, OSError):
        while True:
            time.sleep(next(waits, 0.0))
            connection.send_bytes(connection.recv_bytes())


async def exchange(sizes: list[tuple[int, float]]) -> None:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=echo, args=(theirs, [stall for _, stall in sizes]))
    thread.start()
    found: list[bytes] = []
    ended = asyncio.Event()
    channel = AsyncChannel(ours, found.append, ended.set)
    await channel.open()
    sent = [bytes([i]) * size for i, (size, _) in enumerate(sizes)]
    for each in sent:
        await channel.ready()
        channel.send(each)  # none of these holds the loop up
    await asyncio.to_thread(channel.send, b"from a thread")
    with anyio.fail_after(60):
        while len(found) <= len(sent):
            await asyncio.sleep(0.001)
    assert found == [*sent, b"from a thread"]
    channel.close()
    await asyncio.wait_for(ended.wait(), 60)
    await asyncio.to_thread(thread.join)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@settings(max_examples=25, deadline=None, derandomize=True,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(sizes=SIZES)
def test_any_sizes_and_stalls_arrive_in_both_directions(run, sizes):
    run(exchange(sizes))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_who_asks_for_more_than_is_read_waits_and_the_loop_goes_on(run):
    async def ask() -> None:
        ours, theirs = socket.socketpair()
        channel = AsyncChannel(ours, lambda message: None, lambda: None)
        await channel.open()
        channel.send(b"x" * 3_000_000)  # nobody reads
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(channel.ready(), 0.05)
        thread = threading.Thread(target=echo, args=(theirs, []))
        thread.start()
        await asyncio.wait_for(channel.ready(), 60)
        channel.close()
        await asyncio.to_thread(thread.join)

    run(ask())


def test_a_channel_that_is_opened_twice_stays_open():
    """A host's listener and its service both open it."""
    ours, theirs = socket.socketpair()
    found: list[object] = []

    async def talk() -> None:
        channel = AsyncChannel(ours, found.append, lambda: found.append("ended"))
        await channel.open()
        await channel.open()
        gc.collect()  # a transport that nobody holds closes its socket
        with Connection(theirs.detach()) as connection:
            await asyncio.to_thread(connection.send_bytes, pickled("here"))
        while not found:
            await asyncio.sleep(0.001)
        channel.close()

    asyncio.run(asyncio.wait_for(talk(), 10))
    assert found[0] == "here"
