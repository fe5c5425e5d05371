"""A block that is ended from outside ends alone: its task goes on, and others' ends are others'."""

from __future__ import annotations

import asyncio

import pytest

from rllib_llm.serving.cutoff import Cutoff


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


def test_a_block_that_is_cut_ends_and_its_task_goes_on():
    async def test() -> None:
        with Cutoff() as cutoff:
            asyncio.get_running_loop().call_soon(cutoff.cut)
            await asyncio.Event().wait()
            raise AssertionError("it went on")
        assert cutoff.was_cut
        await asyncio.wait_for(asyncio.sleep(0), 1)  # nothing of the end is left in the task

    run(test)


def test_a_block_that_is_over_is_not_cut():
    async def test() -> None:
        with Cutoff() as cutoff:
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(cutoff.cut)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not cutoff.was_cut

    run(test)


def test_the_end_of_the_whole_task_and_errors_pass_through():
    async def waits() -> None:
        with Cutoff():
            await asyncio.Event().wait()

    async def test() -> None:
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(KeyError), Cutoff():
            raise KeyError

    run(test)
