"""A call that was begun by an own loop, without an algorithm."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from rllib_llm.algorithms.custom_loop import PendingCall


def test_a_call_that_has_not_ended_in_time_can_be_asked_again():
    future: Future[int] = Future()
    call = PendingCall(future)
    with pytest.raises(TimeoutError, match="not ended in 0 s"):
        call.result(0)
    future.set_result(3)
    assert call.result() == 3


def test_the_call_s_own_error_is_raised():
    future: Future[int] = Future()
    future.set_exception(KeyError("x"))
    with pytest.raises(KeyError, match="x"):
        PendingCall(future).result(0)
