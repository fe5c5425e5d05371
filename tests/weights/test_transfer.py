"""Failed transfers: tried again later, counted by kind, reported when the bytes are gone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    OwnerDiedError,
    RaySystemError,
    RayTaskError,
)

from rllib_llm.shared.remote import backoff_seconds
from rllib_llm.weights.flat_buffer import FlatBuffer, TicketError, pack
from rllib_llm.weights.published import PublishedWeights, WeightsLostError
from rllib_llm.weights.receiver import WeightsReceiver

PUBLISHED = PublishedWeights(3, ref=("ref",))
FLAT = pack({"x": torch.arange(3.0)}, checksum=True)


class Store:
    """Gives what it was told to give, one after the other; exceptions are raised."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.timeouts = []

    def get(self, ref, timeout):
        assert ref == "ref"
        self.timeouts.append(timeout)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Refused:
    """A ticket that its own transport, of this module, does not open."""

    transport, ticket = f"{__name__}:Refusing", None


class Refusing:
    def open(self, ticket):
        raise TicketError("another device")


def lost(kind=ObjectLostError):
    return kind("ff" * 28, None, "here")


def transfer(store, **settings):
    slept = []
    settings = {"sleep": slept.append, "uniform": lambda low, high: (low + high) / 2, **settings}
    return WeightsReceiver(get=store.get, **settings), slept


def fetch(receiver, latest=lambda: PUBLISHED, *report):
    with receiver.open(latest, *report) as fetched:
        return fetched


def test_three_failures_then_the_weights():
    store = Store(lost(), GetTimeoutError("slow"), RaySystemError("store"), FLAT)
    fetching, slept = transfer(store, timeout_seconds=7)
    published, flat = fetch(fetching)
    assert published is PUBLISHED and flat is FLAT
    assert slept == [0.05, 0.1, 0.2]  # 0.35 s in all
    assert fetching.failures == {"ObjectLostError": 1, "GetTimeoutError": 1, "RaySystemError": 1}
    assert store.timeouts == [7] * 4  # never without


def test_backoff_doubles_from_a_twentieth_of_a_second_to_five_and_is_spread():
    assert [backoff_seconds(k, max) for k in (0, 1, 6, 7, 50)] == [
        pytest.approx(1.5 * seconds) for seconds in (0.05, 0.1, 3.2, 5, 5)
    ]
    assert backoff_seconds(1, min) == 0.05


def test_each_attempt_asks_again_which_weights_are_the_latest():
    newer = PublishedWeights(4, ref=("ref",))
    told = iter([PUBLISHED, newer])
    fetching, _ = transfer(Store(lost(), FLAT))
    assert fetch(fetching, lambda: next(told))[0] is newer


def test_bytes_that_are_gone_are_reported_but_a_slow_answer_is_not():
    reported = []
    fetching, _ = transfer(
        Store(lost(OwnerDiedError), GetTimeoutError("slow"), ActorUnavailableError("x", None), FLAT)
    )
    fetch(fetching, lambda: PUBLISHED, reported.append)
    assert reported == [PUBLISHED]
    assert fetching.failures["OwnerDiedError"] == 1


def test_damaged_bytes_are_fetched_again():
    damaged = np.array(FLAT.data)
    damaged[5] ^= 1
    reported = []
    fetching, _ = transfer(Store(FlatBuffer(damaged, FLAT.slots, FLAT.checksum), FLAT))
    assert fetch(fetching, lambda: PUBLISHED, reported.append)[1] is FLAT
    assert fetching.failures == {"ChecksumError": 1}
    assert reported == [PUBLISHED]


def test_after_the_last_attempt_the_weights_are_lost():
    fetching, slept = transfer(Store(lost(), lost(OwnerDiedError)), max_attempts=2)
    with pytest.raises(WeightsLostError, match="weights 3 .* OwnerDiedError"):
        fetch(fetching)
    assert slept == [0.05]  # not after the last


def test_a_ticket_that_cannot_be_opened_here_is_lost_at_once():
    fetching, slept = transfer(Store(Refused()))
    with pytest.raises(WeightsLostError, match="weights 3 cannot be read .* another"):
        fetch(fetching)
    assert slept == [] and fetching.failures == {"TicketError": 1}


def test_an_error_of_the_learner_is_not_tried_again():
    fetching, slept = transfer(Store(RayTaskError("export", "traceback", ValueError("no"))))
    with pytest.raises(RayTaskError):
        fetch(fetching)
    assert slept == []
