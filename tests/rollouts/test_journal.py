"""A ledger that dies is there again, with all that it was told."""

from __future__ import annotations

import resource

import pytest

from rllib_llm.rollouts import ledger_actor as module
from rllib_llm.rollouts.errors import SampleFailure
from rllib_llm.rollouts.ledger import Ledger
from rllib_llm.rollouts.ledger_actor import JournaledLedger
from rllib_llm.rollouts.sample_loop import Workers
from rllib_llm.rollouts.schedule import StreamRules
from rllib_llm.rollouts.source import RolloutSource
from rllib_llm.weights.published import PublishedWeights, WeightsLostError
from tests.rollouts.simulated import Clock, judged

RULES = StreamRules(num_groups=2, max_staleness=1)


def begun(folder):
    made = JournaledLedger(RULES, folder)
    made.call("publish", PublishedWeights(0, ref=("a reference",)))
    leases = made.call("lease", "1", 3, [])
    made.call("push", leases[0].id, [judged(0, 0)])
    return made, leases


def known(made):
    ledger = made.ledger
    return ledger.state(), [(e.state, e.lease, e.sampler) for e in ledger.table]


@pytest.mark.parametrize("compact_bytes", [0, 10**9])
def test_it_comes_back_as_it_was_and_leases_still_hold(tmp_path, monkeypatch, compact_bytes):
    monkeypatch.setattr(module, "_COMPACT_BYTES", compact_bytes)
    made, leases = begun(tmp_path)
    again = JournaledLedger(RULES, tmp_path)
    assert again.was_restored and known(again) == known(made)
    assert again.call("push", leases[1].id, [judged(1, 0)]) == 1
    # Where the weights lie is not known to another process: the driver is asked.
    answer = again.call("take", 0)
    assert [g.position for g in answer.groups] == [0, 1] and answer.missing == (0,)
    third = JournaledLedger(RULES, tmp_path)
    assert known(third) == known(again)


def test_a_renewal_behind_another_call_comes_in_time(tmp_path):
    """The ledger had no core for 20 s, of leases of 10 s: the driver's call is the first that it
    hears. One that is renewed holds, another ends 2 s later."""
    clock = Clock()
    rules = StreamRules(num_groups=2, max_staleness=1, timeout_s=10.0)
    made = JournaledLedger(rules, tmp_path, clock=clock)
    made.call("publish", PublishedWeights(0))
    (sound,), _ = made.call("lease", "1", 1, []), made.call("lease", "2", 1, [])
    clock.now = 20.0
    assert made.call("take", 0).expired == ()
    clock.now = 20.1
    assert made.call("renew", "1", [sound.id])[0] == [sound.id]
    clock.now = 22.1
    again = JournaledLedger(rules, tmp_path, clock=clock)  # knows of it
    assert [sampler for sampler, _ in made.call("take", 0).expired] == ["2"]
    assert again.call("push", sound.id, [judged(0, 0)]) == 1


def test_time_without_a_ledger_counts_for_no_lease(tmp_path):
    """It takes 60 s to start again, of leases of 10 s: samplers that could not say that they are at
    work are not hung, and what they hand in is taken."""
    clock = Clock()
    rules = StreamRules(num_groups=2, max_staleness=1, timeout_s=10.0)
    made = JournaledLedger(rules, tmp_path, clock=clock)
    made.call("publish", PublishedWeights(0))
    leases = made.call("lease", "1", 2, [])
    clock.now = 4.0
    made.call("renew", "2", [])  # the last that it heard
    clock.now = 64.0
    again = JournaledLedger(rules, tmp_path, clock=clock)
    clock.now = 69.0
    assert again.call("take", 0).expired == ()
    # Another one after it knows of both.
    third = JournaledLedger(rules, tmp_path, clock=clock)
    assert third.call("push", leases[0].id, [judged(0, 0)]) == 1
    clock.now = 71.0  # 10 s at work, and not handed in
    assert [sampler for sampler, _ in third.call("take", 0).expired] == ["1"]


def test_a_call_that_was_cut_short_was_not_made(tmp_path):
    made, leases = begun(tmp_path)
    expected = known(made)
    made.call("push", leases[1].id, [judged(1, 0)])
    path = tmp_path / "ledger.journal"
    path.write_bytes(path.read_bytes()[:-3])
    assert known(JournaledLedger(RULES, tmp_path)) == expected


def test_a_call_for_which_the_disk_had_no_room_was_not_made_and_hides_none_behind_it(tmp_path):
    made, leases = begun(tmp_path)
    (file,) = tmp_path.iterdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, hard))
    try:
        with pytest.raises(OSError):
            made.call("push", leases[1].id, [judged(1, 0)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert made.call("push", leases[1].id, [judged(1, 0)]) == 1
    assert known(JournaledLedger(RULES, tmp_path)) == known(made)


def test_weights_of_groups_are_kept_however_often_others_are_published_without_a_batch():
    """A loop of one's own may: a ledger that died then waited for them for ever."""
    rules = StreamRules(num_groups=1, max_staleness=1)
    ledger = Ledger(rules)
    rollouts = RolloutSource(ledger, Workers(), rules, recorder=None, publish_again=None)
    for version in range(6):
        rollouts.publish(PublishedWeights(version))
    ledger.forget_weights()
    rollouts._attend(ledger.call("report", 0))
    (lease,) = ledger.call("lease", "1", 1, [])
    assert lease.weights.version == 0
    assert sorted(rollouts._kept) == [0, 5]  # and no others, whose memory that is


def lost(weights):
    return SampleFailure.from_exception(WeightsLostError("gone", weights.key))


def source_of_weights(schedule):
    """What publishes again, its ledger, and all that was published again."""
    rules, again = StreamRules(num_groups=1, max_staleness=1, schedule=schedule), []

    def publish_again(error):
        again.append(PublishedWeights(0))
        return again[-1]

    ledger = Ledger(rules)
    rollouts = RolloutSource(ledger, Workers(), rules, recorder=None, publish_again=publish_again)
    rollouts.publish(PublishedWeights(0))
    return rollouts, ledger, again


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_one_publication_that_is_lost_while_nobody_looks_costs_one(schedule):
    """A sampler asks for the same group again and again while the learner learns: the third
    failure ended the run, though the weights had been published again for the first."""
    rollouts, ledger, again = source_of_weights(schedule)
    for _ in range(5):
        (lease,) = ledger.call("lease", "1", 1, [])
        ledger.call("fail", lease.id, lost(lease.weights), [0])
    rollouts._attend(ledger.call("report", 0))
    assert len(again) == 1
    (lease,) = ledger.call("lease", "1", 1, [])
    assert lease.weights.key == again[0].key
    # Nor is it the group's: one error that passes does not make it fail.
    ledger.call("fail", lease.id, SampleFailure("OSError: no network", "", may_pass=True), [0])
    assert ledger.account.failed_groups == 0


@pytest.mark.parametrize("by_row", [False, True])
def test_weights_that_are_lost_whenever_they_are_published_end_the_run(by_row):
    """Where rows are sampled one by one it went on for ever, without a word."""
    rollouts, ledger, again = source_of_weights("free")

    def lose():
        (lease,) = ledger.call("lease", "1", 1, [])
        if by_row:
            ledger.call("give_back", "1", lost(lease.weights))
        else:
            ledger.call("fail", lease.id, lost(lease.weights), [0])
        rollouts._attend(ledger.call("report", 0))

    lose()
    lose()
    with pytest.raises(RuntimeError, match="gone"):
        lose()
    assert len(again) == 2
