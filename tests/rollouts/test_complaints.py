"""What users of peers suffer from in asynchronous training, and does not happen here.

Those of engines, versions and masks are in `test_rows.py` and `tests/engines/`, those of order,
counts and drops in `test_ledger.py`: `grep -r Complaint tests`.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from rllib_llm.rollouts.groups import Answer
from rllib_llm.rollouts.ledger import Ledger
from rllib_llm.rollouts.ledger_actor import LedgerActor
from rllib_llm.rollouts.recorder import RolloutRecorder
from rllib_llm.rollouts.schedule import StreamRules
from rllib_llm.rollouts.source import RolloutSource
from rllib_llm.weights.published import PublishedWeights
from tests.rollouts.simulated import Clock, Run, judged, ledger, partial, serve

# --- staleness -------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_the_staleness_bound_is_not_lost_after_a_restore(schedule):
    """Complaint: after a restore accepted=0 while version=N, so that samplers run ahead without
    bound (AReaL #1345, #1388). The bound is counted from the table, which is what is restored."""
    before = Run(ledger(schedule=schedule, max_staleness=1), 0).until(5)
    restored = ledger(schedule=schedule, max_staleness=1)
    restored.set_state(before.made.state())
    restored.publish(PublishedWeights(before.version))
    for version in range(before.version):
        restored.offer(PublishedWeights(version))
    for lease in restored.lease("1", 100):
        serve(restored, lease)
    # In lockstep what later weights sample is admitted already, and waits for them.
    assert len(restored.table) - restored.table.counts()["waiting"] == restored.rules.capacity == 8
    assert restored.lease("1", 100) == []  # nothing more until something is learnt from


def test_time_in_the_queue_counts_as_age():
    """Complaint: off by one, and the time that a finished group waits is not counted (prime-rl
    #1902, #2674, #3009). Sampled with version 0, learnt from by update 2: two updates old."""
    made = ledger(max_staleness=2)
    for lease in made.lease("1", 12):
        serve(made, lease)
    ages = []
    for step in range(3):
        ages += [step - group.oldest_version for group in made.take(step).groups]
        made.publish(PublishedWeights(step + 1))
    assert ages == [0] * 4 + [1] * 4 + [2] * 4


# --- work that piles up, places that leak, hangs ---------------------------------------------


def test_work_that_is_given_back_does_not_pile_up():
    """Complaint: cancelled rollouts are scheduled again until there is nothing but work that
    never ends (prime-rl #1512, miles #2030). One that is given back is the same group, with its
    tokens."""
    clock = Clock()
    made = ledger(clock, schedule="free", max_staleness=1, timeout_s=10.0)
    for turn in range(20):
        for lease in made.lease("slow", 8):
            made.keep_partial(lease.id, {lease.position: partial(turn + 1)})
        clock.now += 10.0 * 2**turn + 1.0
        made.expire()
        assert len(made.table) == 8 and made.table.next == 8
    leases = made.lease("quick", 8)
    assert [len(lease.partial[lease.position][0].token_ids) for lease in leases] == [20] * 8
    for lease in leases:
        made.push(lease.id, [judged(lease.position, 0, num_tokens=25, continues=True)])
    assert made.account.generated == 8 * 25 and made.take(0).groups is not None


def test_samplers_that_die_leak_no_places():
    """Complaint: what a dead worker had reserved is never free again (NeMo #2651)."""
    made = ledger(max_staleness=1)
    for _ in range(50):
        assert len(made.lease("1", 100)) == 8  # it was started again, and holds nothing
    made.lease("2", 1)
    assert made.table.counts() == {"leased": 8}


def test_a_run_does_not_hang_that_resumes_with_a_full_buffer():
    """Complaint: all places are taken by finished groups, nobody samples, nobody learns (NeMo
    #2899, #3066). All capacity is ready when the state is taken."""
    full = ledger(schedule="free", max_staleness=1)
    for lease in full.lease("1", 100):
        serve(full, lease)
    restored = ledger(schedule="free", max_staleness=1)
    restored.set_state(full.state())
    restored.publish(PublishedWeights(0))
    assert not restored.has_work() and restored.has_answer(0)
    run = Run(restored, 0).until(6)
    assert sorted(run.trained) == list(range(24))


def actor(tmp_path, **rules) -> LedgerActor:
    """The ledger's actor without Ray, in the event loop of the test."""
    return LedgerActor(StreamRules(**{"num_groups": 4, **rules}), str(tmp_path), False)


def test_samplers_that_start_before_the_first_weights_get_their_work_with_them(tmp_path):
    """Complaint: a hang at the start of fully asynchronous training (verl #3895). Whoever asks
    first waits, in the order in which they came, and is served when there are weights."""

    async def start():
        made = actor(tmp_path)
        asking = [asyncio.ensure_future(made.lease(str(i), 3, [], 60.0)) for i in range(3)]
        taking = asyncio.ensure_future(made.call("take", 0, 0, 0))
        await asyncio.sleep(0)
        await made.call("publish", PublishedWeights(0))
        served = await asyncio.gather(*asking)
        for lease in [lease for leases in served for lease in leases]:
            await made.call("push", lease.id, [judged(lease.position, 0)])
        return [[lease.position for lease in leases] for leases in served], await taking

    served, answer = asyncio.run(start())
    assert served == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [group.position for group in answer.groups] == [0, 1, 2, 3]


def test_a_sampler_that_died_while_it_waited_gets_no_work(tmp_path):
    """Its second life asks under the same name; the first's question is answered with nothing."""

    async def die():
        made = actor(tmp_path)
        first = asyncio.ensure_future(made.lease("1", 9, [], 60.0))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(made.lease("1", 9, [], 60.0))
        await asyncio.sleep(0)
        await made.call("publish", PublishedWeights(0))
        closed = await made.lease("2", 1, [], 0.0)
        return await first, await second, closed

    first, second, other = asyncio.run(die())
    assert first == other == [] and len(second) == 8


def test_a_sampler_that_died_while_it_asked_for_more_is_not_given_what_it_held(tmp_path):
    """The driver has heard of its death, and the ledger still holds its question: its two groups
    waited until it was started again."""

    async def die():
        made = actor(tmp_path, num_groups=2, max_staleness=0, schedule="free")
        await made.call("publish", PublishedWeights(0))
        held = [lease.id for lease in await made.lease("1", 2, [], 0.0)]
        first = asyncio.ensure_future(made.lease("1", 1, held, 60.0))
        other = asyncio.ensure_future(made.lease("2", 2, [], 60.0))
        await asyncio.sleep(0)
        await made.call("give_back", "1")
        return await first, [lease.position for lease in await other]

    assert asyncio.run(die()) == ([], [0, 1])


def test_a_sampler_waits_for_its_environments_and_holds_up_nobody(tmp_path):
    """The first to ask opens only the second environment, none of whose groups waits: those behind
    it are served, and it once there are weights for more."""

    async def ask():
        made = actor(
            tmp_path, num_groups=2, max_staleness=0, schedule="free", env_weights=(1.0, 1.0),
            env_samplers=(("2",), ("1",)),
        )  # fmt: skip
        await made.call("publish", PublishedWeights(0))
        first = await made.lease("1", 9, [], 60.0)
        held = [lease.id for lease in first]
        again = asyncio.ensure_future(made.lease("1", 9, held, 60.0))
        other = await made.lease("2", 9, [], 60.0)
        await asyncio.sleep(0)
        assert not again.done()
        for lease in (*first, *other):
            await made.call("push", lease.id, [judged(lease.position, 0)])
        await made.call("take", 0, 0, 0)
        await made.call("publish", PublishedWeights(1))
        return first, other, await again, await made.lease("2", 9, [], 60.0)

    leases = [lease for answer in asyncio.run(ask()) for lease in answer]
    assert [[*lease.positions] for lease in leases] == [[1], [0], [3], [2]]
    assert [lease.places[0] for lease in leases] == [(1, 0), (0, 0), (1, 1), (0, 1)]


def test_those_who_wait_are_told_when_the_ledger_is_closed(tmp_path):
    async def close():
        made = actor(tmp_path)
        waiting = asyncio.ensure_future(made.lease("1", 1, [], 60.0))
        await asyncio.sleep(0)
        await made.close()
        return await waiting, await made.lease("2", 1, [], 60.0)

    assert asyncio.run(close()) == ([], [])


# --- what is reported ------------------------------------------------------------------------


class SlowLedger(Ledger):
    """Has a batch the third time it is asked, 20 ms each time."""

    num_asked = 0

    def take(self, step, num_seen, nth):
        self.num_asked += 1
        time.sleep(0.02)
        if self.num_asked % 3:
            return Answer()
        for lease in self.call("lease", "0", 9, []):
            self.call("push", lease.id, [judged(lease.position, step)])
        return super().take(step, num_seen, nth)


class NobodyToAsk:
    """Workers of a stream that is fed otherwise."""

    def work(self):
        pass

    note_progress = forget = stop = work


def test_the_wait_that_is_reported_is_that_for_this_batch(monkeypatch):
    """Complaint: an idle share that is wrong, by which users tune (verl #6693)."""
    monkeypatch.setattr("rllib_llm.rollouts.source.batch_of", lambda groups: groups)
    rules = StreamRules(num_groups=4, max_staleness=0)
    source = RolloutSource(
        SlowLedger(rules), NobodyToAsk(), rules, recorder=RolloutRecorder(), publish_again=None
    )
    for version in range(2):
        source.publish(PublishedWeights(version))
        start = time.monotonic()
        source.next()
        assert 0.06 <= source.metrics()["rollouts"]["wait_seconds"] <= time.monotonic() - start


class FillingLedger(Ledger):
    """Has a batch of four once they are all judged, one after the other."""

    def take(self, step, num_seen, nth):
        for lease in self.call("lease", "0", 1, []):
            self.call("push", lease.id, [judged(lease.position, step)])
        return super().take(step, num_seen, nth)


def test_who_waits_for_a_batch_is_told_how_much_of_it_is_there(monkeypatch):
    monkeypatch.setattr("rllib_llm.rollouts.source.batch_of", lambda groups: groups)
    rules, told = StreamRules(num_groups=4, max_staleness=0), []
    source = RolloutSource(
        FillingLedger(rules), NobodyToAsk(), rules, recorder=RolloutRecorder(), publish_again=None,
        tell=told.append,
    )  # fmt: skip
    source.publish(PublishedWeights(0))
    source.next()
    assert told == [1, 2, 3]
