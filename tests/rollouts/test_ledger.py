"""The table of groups: who may be how far ahead, what is learnt from, where every token went."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest

from rllib_llm.rollouts.errors import SampleFailure
from rllib_llm.rollouts.groups import Ending, GroupTable
from rllib_llm.rollouts.schedule import texts_are_due
from rllib_llm.weights.published import PublishedWeights
from tests.rollouts.simulated import Clock, Run, judged, ledger, partial, serve

SEEDS = range(8)
NO_JUDGE = SampleFailure("KeyError: no judge", "traceback")


# --- lockstep --------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_in_lockstep_a_group_is_sampled_with_the_weights_of_its_place(staleness):
    """max(0, ⌊g/P⌋ - S), whoever samples it and when; batches are consecutive prompts."""
    for seed in SEEDS:
        run = Run(ledger(max_staleness=staleness), seed).until(6)
        for step, (positions, versions) in enumerate(run.batches):
            assert positions == list(range(4 * step, 4 * step + 4))
            assert versions == [max(0, step - staleness)] * 4


@pytest.mark.parametrize("staleness", [0, 2])
def test_weights_are_published_every_third_update(staleness):
    """What ⌊t/3⌋·3 published samples the groups of turn t = max(0, step - S); a restored run, whose
    learner has weights 5, goes on with weights 3."""
    rules = {"max_staleness": staleness, "publish_every": 3}
    wanted = [(list(range(4 * step, 4 * step + 4)), [max(0, step - staleness) // 3 * 3] * 4)
              for step in range(10)]  # fmt: skip
    for seed in SEEDS:
        before = Run(ledger(**rules), seed).until(5)
        going_on = Run(ledger(**rules), seed + 1)
        going_on.made.set_state(before.made.state())
        going_on.version = 5
        going_on.made.publish(PublishedWeights(3), step=5)
        going_on.made.offer(PublishedWeights(0))  # the driver waited for what these have to sample
        batches = before.batches + going_on.until(5).batches
        assert batches == wanted
        assert going_on.largest_age <= going_on.made.rules.largest_age == staleness + 2


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_of_six_groups_the_best_four_are_learnt_from(schedule, staleness):
    """Merits 0 2 4 1 3 | 0 2 4 ...; of equal ones the first. Resumed with a batch full."""
    rules = {"schedule": schedule, "max_staleness": staleness, "num_extra": 2,
             "oversample_keep": "best_spread", "window": 1 if schedule == "lockstep" else 6}
    sixes = [range(6 * step, 6 * step + 6) for step in range(6)]
    wanted = [sorted(sorted(six, key=lambda p: (-(p * 7 % 5), p))[:4]) for six in sixes]
    for seed in SEEDS:
        before = Run(ledger(**rules), seed).until(3)
        before.learn = 0
        while staleness and before.made.take(3).groups is None:
            before._turn()  # handed out, and not learnt from yet
        going_on = Run(ledger(**rules), seed + 1, num_samplers=1 + seed % 3)
        going_on.made.set_state(before.made.state())
        going_on.version = 3
        going_on.made.publish(PublishedWeights(3))
        for version in range(3):
            going_on.made.offer(PublishedWeights(version))
        batches = before.batches[:3] + going_on.until(3).batches
        if schedule == "lockstep":
            assert batches == [
                (wanted[step], [max(0, step - staleness)] * 4) for step in range(6)
            ]  # fmt: skip
        assert going_on.largest_age <= going_on.made.rules.largest_age
        account = going_on.made.account
        assert account.rejected_groups["not_best"] >= 12 and {*account.rejected} == {"not_best"}


def test_groups_that_lost_make_no_room_before_their_batch_is_learnt_from():
    """What takes their place sooner has the weights before it, and is older than allowed."""
    for seed in SEEDS:
        made = ledger(schedule="free", max_staleness=1, num_extra=4, window=8,
                      oversample_keep="best_score")  # fmt: skip
        run = Run(made, seed, straggler=19).until(8)
        assert run.largest_age <= made.rules.largest_age == 2


def test_a_run_goes_on_with_another_number_of_environments():
    for weights in ((1, 1), (3, 2, 1)):
        before = Run(ledger(max_staleness=1, env_weights=(1, 2)), 0).until(3)
        going_on = Run(ledger(max_staleness=1, env_weights=weights), 1)
        going_on.made.set_state(before.made.state())
        going_on.version = 3
        going_on.made.publish(PublishedWeights(3))
        going_on.made.offer(PublishedWeights(2))
        assert len(going_on.until(3).batches) == 3


def test_a_free_run_drops_nothing_that_the_newest_weights_have_sampled():
    for seed in SEEDS:
        made = ledger(schedule="free", max_staleness=1, publish_every=4, on_stale="drop")
        run = Run(made, seed).until(12)
        assert run.largest_age <= made.rules.largest_age == 4
        assert not made.account.rejected


def test_with_filters_time_still_decides_nothing():
    """Which groups are refused decides alone; here two of five, and all of batch 1's first."""
    batches, sampled_with = [], []
    for seed in range(20):
        made = ledger(max_staleness=2, groups_per_lease=3, num_extra=1)
        run = Run(made, seed, 1 + seed % 4,
                  reason=lambda p: "no_spread" if p % 5 < 2 or 4 <= p < 9 else "")  # fmt: skip
        run.until(7)
        batches.append(run.batches)
        trained = {p for positions, _ in run.batches for p in positions}
        sampled_with.append({p: run.sampled_with[p] for p in trained})
        assert run.largest_age <= made.rules.largest_age
    assert all(other == batches[0] for other in batches)
    assert all(other == sampled_with[0] for other in sampled_with)
    # In order, none skipped that passes.
    flat = [p for positions, _ in batches[0] for p in positions]
    passing = [p for p in range(100) if p % 5 >= 2 and not 4 <= p < 9]
    assert flat == passing[: len(flat)]


def test_a_synchronous_run_resumes_from_samplers_that_were_ahead():
    """Group 4 was of the next batch; since group 1 is rejected, it is of this one. It waited for
    weights that nobody was to make, and the run hung."""
    ahead = ledger(max_staleness=1)
    serve(ahead, ahead.lease("1", 1)[0])
    made = ledger(max_staleness=0, num_parts=2)
    made.set_state(ahead.state())
    made.publish(PublishedWeights(0))
    for _ in range(2):
        for lease in made.lease("1", 8):
            serve(made, lease, lambda position: "unjudged" if position == 1 else "")
    assert [group.position for group in made.take(0).groups] == [0, 2, 3, 4]


# --- free: admission, order, age -------------------------------------------------------------


@pytest.mark.parametrize("staleness, window, extra", [(0, 1, 0), (1, 1, 0), (2, 5, 0), (0, 2, 1),
                                                      (1, 3, 2)])  # fmt: skip
def test_staleness_stays_within_its_bound_under_stragglers(staleness, window, extra):
    """S + ⌈(W-1)/P⌉ where nothing is over-sampled; no prompt is learnt from twice or passed over
    further than the window. Complaint: a bound that is none (SkyRL, prime-rl #1902)."""
    for seed in SEEDS:
        made = ledger(schedule="free", max_staleness=staleness, window=window, num_extra=extra)
        assert made.rules.capacity == (staleness + 1) * 4 + extra
        run = Run(made, seed, straggler=6 + seed).until(12)
        if not extra:
            assert made.rules.largest_age == staleness + -(-(window - 1) // 4)
        assert run.largest_age <= made.rules.largest_age
        assert set(run.trained.values()) == {1}
        trained = sorted(run.trained)
        assert len(range(trained[-1] + 1)) - len(trained) < window + extra + 4
        assert len(made.table) <= made.rules.capacity


def test_what_is_on_its_way_never_exceeds_the_capacity():
    """leased + ready + being learnt from, counted from the table at every turn."""
    made = ledger(schedule="free", max_staleness=1)
    run = Run(made, 3, num_samplers=5, reason=lambda p: "dull" if p % 3 == 0 else "")
    for n in range(1, 9):
        run.until(n)
        assert len(made.table) <= 8


def test_surplus_groups_are_carried_and_come_first_next_time():
    """Complaint: surplus groups that are complete are thrown away (slime's over-sampling). Six are
    begun for a batch of four: of the two that are left one is whole, and one goes on with what
    there is of it."""
    made = ledger(schedule="free", max_staleness=0, window=6, num_extra=2)
    leases = made.lease("1", 6)
    made.keep_partial(leases[1].id, {1: partial(4)})
    for lease in [*leases[:1], *leases[2:]]:
        serve(made, lease)
    assert [g.position for g in made.take(0).groups] == [0, 2, 3, 4]
    made.publish(PublishedWeights(1))
    assert made.table.num_tokens == 4 + 15  # carried: of group 1, and group 5
    assert [lease.position for lease in made.lease("2", 9)] == [6, 7, 8, 9]  # none of them again
    for position in (7, 6, 8):
        lease = made.table[position].lease
        made.push(lease, [judged(position, 1)])
    made.push(leases[1].id, [judged(1, 0, num_tokens=9, continues=True)])
    batch = made.take(1).groups
    assert [(g.position, g.oldest_version) for g in batch] == [(1, 0), (5, 0), (6, 1), (7, 1)]
    made.account.check(made.table.num_tokens)
    assert made.account.rejected.total() == 0


def test_slow_prompts_are_not_starved():
    """Complaint: slow prompts starved, the trained distribution biased to short ones
    (tinker-cookbook #822). The slowest groups are learnt from in their turn: after any number of
    batches the prompts learnt from are the first so many, each once."""
    made = ledger(schedule="free", max_staleness=2)
    for straggler in (0, 5, 9):
        run = Run(made, 1, straggler=straggler)
        first = made.table.position
        run.until(10)
        assert sorted(run.trained) == list(range(first, first + 40))


def test_the_table_is_searched_for_batches_not_after_every_group(monkeypatch):
    """Who asks after every group whether a batch is there pays a constant for each group, however
    many are in flight. (At 64,000 in flight it was 190 looks at a group for each.)"""
    num_seen, iterate = 0, GroupTable.__iter__

    def counted(table):
        nonlocal num_seen
        for entry in iterate(table):
            num_seen += 1
            yield entry

    monkeypatch.setattr(GroupTable, "__iter__", counted)
    made, order, version, leases = (
        ledger(schedule="free", num_groups=256, window=256),
        Random(0),
        0,
        [],
    )
    while version < 8:
        leases += made.lease("s", 512, [lease.id for lease in leases])
        serve(made, leases.pop(order.randrange(len(leases))))
        if made.has_answer(0):
            assert len(made.take(version).groups) == 256
            version += 1
            made.publish(PublishedWeights(version))
    assert num_seen <= 4 * 8 * 256


def test_a_stale_group_is_dropped_only_where_that_is_asked_for_and_counted():
    """Complaint: a fifth of all groups dropped in silence (marin #8955)."""
    for on_stale, num_dropped in (("train", 0), ("drop", 1)):
        made = ledger(schedule="free", max_staleness=0, window=5, num_extra=1, on_stale=on_stale,
                      keeps_rejected=True)  # fmt: skip
        slow, rest = made.lease("slow", 1)[0], made.lease("quick", 10)
        for lease in rest:
            serve(made, lease)
        assert [g.position for g in made.take(0).groups] == [1, 2, 3, 4]
        made.publish(PublishedWeights(1))
        serve(made, slow)  # sampled with version 0
        for lease in made.lease("quick", 10):
            serve(made, lease)
        answer = made.take(1)
        assert (answer.groups[0].position == 0) is (on_stale == "train")
        assert [(c.position, c.reason) for c in answer.closed] == [(0, "stale")][:num_dropped]
        assert made.metrics().get("rejected/stale", 0) == num_dropped
        assert made.account.rejected["stale"] == 10 * num_dropped


# --- leases ----------------------------------------------------------------------------------


def test_a_worker_that_never_returns_does_not_hang_the_run():
    """Complaint: one of 128 never returns, and everybody waits for 29 hours (SkyRL #1173, NeMo
    #3238), or it counts as running for good (verl #7155). Its lease ends, another samples the
    groups, and its late answer is refused and counted."""
    clock = Clock()
    made = ledger(clock, timeout_s=10.0)
    (lost,) = made.lease("1", 1)
    for lease in made.lease("2", 3):
        serve(made, lease)
    clock.now = 5.0
    assert made.take(0).groups is None
    assert "groups 0-0 with sampler 1 for 5 s" in made.look()["waits_for"]
    clock.now = 11.0
    answer = made.take(0)
    ((sampler, why),) = answer.expired
    assert sampler == "1" and "no answer in 11 s (sampler_timeout_s=10.0" in why
    (again,) = made.lease("2", 1)
    assert again.position == 0 and again.id != lost.id
    assert serve(made, lost) == 0 and made.account.rejected["late"] == 10
    assert serve(made, again) == 1
    assert [g.position for g in made.take(0).groups] == [0, 1, 2, 3]
    made.account.check(made.table.num_tokens)
    # It may be the group that is slow: it has twice the time.
    (third,) = made.lease("3", 1)
    clock.now = 22.0
    assert len(made.take(0).expired) == 1
    (fourth,) = [lease for lease in made.lease("3", 1) if lease.position == third.position]
    clock.now = 41.0
    assert not made.take(0).expired and serve(made, fourth) == 1


def test_a_sampler_that_hangs_is_started_again_once_however_much_it_holds():
    """Row by row it holds a lease for every group, some of them since a moment ago: those would
    end while it starts, and have it started again and again."""
    clock = Clock()
    made = ledger(clock, schedule="free", max_staleness=1, timeout_s=10.0)
    early = made.lease("1", 5)
    clock.now = 9.0
    assert len(early) == 5 and len(made.lease("1", 2, [lease.id for lease in early])) == 2
    made.lease("2", 1)
    clock.now = 10.5
    answer = made.take(0)
    assert [sampler for sampler, _ in answer.expired] == ["1"]
    assert made.table.counts() == {"waiting": 7, "leased": 1}
    clock.now = 19.5  # sampler 2's time is up
    assert [sampler for sampler, _ in made.take(0).expired] == ["2"]


def test_a_group_that_is_handed_in_twice_counts_once():
    """Ray makes a call again where it does not know that it was made. Complaint: counted twice
    (prime-rl #1764)."""
    made = ledger()
    leases = made.lease("1", 4)
    for _ in range(2):
        for lease in leases:
            serve(made, lease)
    assert made.account.generated == made.table.num_tokens == 10 + 11 + 12 + 13
    made.take(0)
    made.publish(PublishedWeights(1))
    assert serve(made, leases[0]) == 0
    assert made.account.generated == made.account.trained == 46


def test_what_a_sampler_held_that_was_started_again_waits_at_once():
    made = ledger()
    before = made.lease("1", 4)
    assert [lease.position for lease in before] == [0, 1, 2, 3]
    assert not made.leases.holds_more("1", [lease.id for lease in before])
    assert made.leases.holds_more("1", [])
    assert [lease.position for lease in made.lease("1", 1)] == [0]
    assert serve(made, before[0]) == 0


def test_a_lease_whose_sampler_makes_progress_goes_on():
    clock = Clock()
    made = ledger(clock, timeout_s=10.0)
    (lease,) = made.lease("1", 1)
    clock.now = 9.0
    held, newest, _ = made.renew("1", [lease.id])
    assert held == [lease.id] and newest.version == 0
    clock.now = 18.0
    assert not made.take(0).expired and serve(made, lease) == 1


def test_a_sampler_without_a_core_is_not_hung():
    """Time in which other processes left it none counts for no deadline, nor for what is known of
    the time that groups take."""
    clock = Clock()
    made = ledger(clock, timeout_s=10.0)
    (lease,) = made.lease("1", 1)
    clock.now = 9.0
    made.put_off("1", 8.0)
    made.put_off("2", 100.0)  # it holds nothing
    clock.now = 17.5
    assert not made.take(0).expired
    clock.now = 18.5
    ((sampler, why),) = made.take(0).expired
    assert sampler == "1" and "no answer in 10 s" in why
    assert serve(made, lease) == 0


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_who_waits_is_told_how_much_of_a_batch_is_there(schedule):
    made = ledger(schedule=schedule, max_staleness=1)
    leases = {lease.position: lease for lease in made.lease("1", 8)}
    told = []
    for position in (2, 5, 0, 3, 1):  # 5 is of the batch behind
        serve(made, leases[position])
        told.append(made.take(0).num_judged)
    assert told == [1, 1, 2, 3, 4]


def test_an_exception_puts_the_groups_back_and_is_told():
    made = ledger()
    for num_failures in (1, 2):
        (lease,) = made.lease("1", 1)
        made.fail(lease.id, NO_JUDGE)
        assert made.take(0).failures == (("1", (NO_JUDGE, num_failures)),)
    assert made.lease("2", 1)[0].position == 0
    assert made.take(0).failures == ()


def fail_always(made, num_leases, failure):
    for _ in range(num_leases):
        for lease in made.lease("1", 1):
            made.fail(lease.id, failure)


def test_a_failed_rollout_is_nobodys_row():
    """Complaint: a failed rollout becomes a pad row of one token that is learnt from (agentcore
    #122). In `free` a group that three samplers could not make has failed, and another is sampled
    in its place; in lockstep the run ends, since that place would depend on the fault."""
    no_network = SampleFailure("ConnectionError: no judge", "traceback", may_pass=True)
    made = ledger(schedule="free", max_staleness=0, keeps_rejected=True)
    (lease,) = made.lease("1", 1)
    made.keep_partial(lease.id, {0: partial(3, 0)})
    made.fail(lease.id, no_network)
    fail_always(made, 2, no_network)
    answer = made.take(0)
    assert answer.failures[-1] == ("1", (no_network, 3))
    (closed,) = answer.closed
    assert (closed.position, closed.status, closed.reason) == (0, "failed", "ConnectionError")
    assert closed.group is None
    for lease in made.lease("2", 9):
        serve(made, lease)
    assert [g.position for g in made.take(0).groups] == [1, 2, 3, 4]
    told = made.metrics()
    assert (told["groups_failed"], told["groups_rejected"], told["tokens_rejected"]) == (1, 0, 3)
    lockstep = ledger(max_staleness=0)
    fail_always(lockstep, 3, no_network)
    assert lockstep.take(0).failures[-1][1] == (no_network, 3)
    assert lockstep.table.position == 0


def test_where_everything_fails_there_is_an_end():
    no_network = SampleFailure("ConnectionError: no judge", "traceback", may_pass=True)
    made = ledger(schedule="free", max_staleness=0)
    fail_always(made, 3 * 4, no_network)
    assert made.take(0).ending is None
    fail_always(made, 3, no_network)
    assert made.take(0).ending == Ending("failed", {"ConnectionError": 5}, 4)


def test_groups_admitted_together_are_sampled_together():
    made = ledger(num_groups=6, groups_per_lease=4, max_staleness=0)
    assert [(x.position, x.num_groups) for x in made.lease("1", 1)] == [(0, 4)]
    assert [(x.position, x.num_groups) for x in made.lease("2", 9)] == [(4, 2)]
    free = ledger(num_groups=6, groups_per_lease=4, max_staleness=0, schedule="free")
    assert [(x.position, x.num_groups) for x in free.lease("1", 5)] == [(0, 4), (4, 1)]


# --- rejection -------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_what_is_rejected_is_replaced_and_comes_to_the_recorder_once(schedule):
    made = ledger(schedule=schedule, max_staleness=0, keeps_rejected=True)
    for lease in made.lease("1", 9):
        serve(made, lease, lambda p: "no_spread" if p in (1, 2) else "")
    answer = made.take(0)
    assert answer.groups is None
    assert [(c.position, c.reason) for c in answer.closed] == [
        (1, "no_spread"), (2, "no_spread"),
    ]  # fmt: skip
    for lease in made.lease("1", 9):
        serve(made, lease)
    answer = made.take(0, answer.num_closed)
    assert [g.position for g in answer.groups] == [0, 3, 4, 5] and answer.closed == ()
    assert made.metrics()["groups_rejected"] == made.metrics()["rejected/no_spread"] == 2
    made.account.check(made.table.num_tokens)


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_where_nothing_passes_there_is_an_end(schedule):
    made = ledger(schedule=schedule, max_rejected=10)
    for _ in range(20):
        for lease in made.lease("1", 3):
            serve(made, lease, lambda p: "easy" if p % 2 else "hard")
    assert made.take(0).ending.counts.keys() == {"easy", "hard"}


def test_tokens_of_rows_without_a_score_are_not_called_trained():
    made = ledger(num_groups=1, max_staleness=0)
    (lease,) = made.lease("1", 1)
    made.push(lease.id, [judged(0, 0, num_tokens=12, num_lost=5)])
    made.take(0)
    made.publish(PublishedWeights(1))
    assert (made.account.trained, made.account.rejected["lost_rows"]) == (7, 5)
    assert made.metrics()["groups_rejected"] == 0


# --- partial completions, checkpoints --------------------------------------------------------


def test_the_prompts_learnt_from_are_the_prompts_where_hard_ones_take_long():
    """Short-completion bias (Magistral's invariant). Every fourth prompt is hard and takes ten
    times as long; eight groups are sampled at once. In strict order exactly a quarter of what is
    learnt from is hard, after any number of batches; with whoever comes first it would not be."""
    shares = {}
    for window in (1, 1000):
        clock = Clock()
        made = ledger(clock, schedule="free", max_staleness=1, window=window, timeout_s=None)
        running, hard, version = [], [], 0
        while version < 10:
            for lease in made.lease("1", 8 - len(running), [lease.id for _, lease in running]):
                running.append((clock.now + (10.0 if lease.position % 4 == 3 else 1.0), lease))
            running.sort(key=lambda each: each[0])
            clock.now, lease = running.pop(0)
            serve(made, lease)
            if (answer := made.take(version)).groups is not None:
                hard += [group.position % 4 == 3 for group in answer.groups]
                version += 1
                made.publish(PublishedWeights(version))
        shares[window] = sum(hard) / len(hard)
    assert shares[1] == 0.25 and shares[1000] < 0.2


def test_what_others_have_overtaken_is_carried_over_a_restore():
    """Slow groups get as old as the window allows; by the same rules none of them is begun anew."""
    made = ledger(schedule="free", max_staleness=1, window=16)
    for lease in made.lease("slow", 2):
        made.keep_partial(lease.id, {lease.position: partial(3)})
    slow = list(made.leases._held)
    for version in range(3):
        for lease in made.lease("quick", 8):
            serve(made, lease)
        assert made.take(version).groups is not None
        made.publish(PublishedWeights(version + 1))
    assert slow[0] in made.leases._held
    other = ledger(schedule="free", max_staleness=1, window=16)
    other.set_state(made.state())
    assert other.account.rejected["stale"] == 0
    assert [e.num_tokens for e in other.table][:2] == [3, 3]


def test_tokens_of_unfinished_groups_are_carried_to_who_samples_them_next():
    made = ledger(schedule="free")
    (lease,) = made.lease("1", 1)
    made.keep_partial(lease.id, {0: partial(3, 0)})
    made.keep_partial(lease.id, {0: partial(5, 2)})
    assert made.account.generated == made.table.num_tokens == 7
    (again,) = made.lease("1", 1)  # started again
    assert again.position == 0 and again.partial == {0: partial(5, 2)}
    made.keep_partial(lease.id, {0: partial(9, 9)})  # of the old one: refused
    made.push(again.id, [judged(0, 0, num_tokens=10, continues=True)])
    assert made.account.generated == made.table.num_tokens == 10
    # One that cannot go on begins anew: what there was is told as rejected.
    (other,) = made.lease("1", 1)
    made.keep_partial(other.id, {1: partial(4)})
    serve(made, other)
    assert made.account.rejected["begun_anew"] == 4
    assert made.account.generated == 10 + 4 + 11 and made.table.num_tokens == 21
    # Or says so when it is given the output of other settings.
    (third,) = made.lease("1", 1)
    made.keep_partial(third.id, {2: partial(5)})
    made.keep_partial(third.id, {2: ()})
    made.push(third.id, [judged(2, 0, num_tokens=8, continues=True)])
    assert made.account.rejected["begun_anew"] == 4 + 5
    assert made.account.generated == 25 + 5 + 8 and made.table.num_tokens == 29


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_a_restored_ledger_loses_nothing_and_trains_nothing_twice(schedule):
    """Complaints: the bound lost after a restore (AReaL #1345), a hang at resume with a full buffer
    (NeMo #2899), prompts in flight lost (SkyRL, AReaL)."""
    for seed in SEEDS:
        rules = {"schedule": schedule, "max_staleness": 2}
        before = Run(ledger(**rules), seed).until(5)
        state = before.made.state()
        late = [lease for held in before.held.values() for lease in held]
        going_on = Run(ledger(**rules), seed + 1)
        going_on.made.set_state(state)
        going_on.version = before.version
        going_on.made.publish(PublishedWeights(before.version))
        if schedule == "lockstep":  # the driver waited for what older weights have to sample
            for v in range(before.version):
                going_on.made.offer(PublishedWeights(v))
        going_on.until(6)
        assert all(serve(going_on.made, lease) == 0 for lease in late)
        trained = before.trained + going_on.trained
        assert set(trained.values()) == {1} and sorted(trained) == list(range(44))
        assert going_on.largest_age <= 2


def test_a_state_is_a_copy():
    made = ledger()
    state = made.state()
    for lease in made.lease("1", 9):
        serve(made, lease)
    groups = [group for _, _, _, group, _ in state["table"]]
    assert state["account"].generated == 0 and not any(groups)


def test_weights_that_leases_wait_for_and_nobody_has_are_asked_for():
    made = ledger()
    made.forget_weights()
    assert made.lease("1", 1) == [] and made.take(0).missing == (0,)
    made.offer(PublishedWeights(0))
    assert made.lease("1", 1) and made.take(0).missing == ()


def test_a_slow_group_keeps_its_doubled_time_when_it_is_renewed():
    """Else a judge that takes longer than the limit has its sampler killed at every attempt."""
    clock = Clock()
    made = ledger(clock, timeout_s=10.0)
    made.lease("1", 1)
    clock.now = 11.0
    assert made.take(0).expired
    (again,) = made.lease("1", 1)
    clock.now = 12.0
    assert made.renew("1", [again.id])[0] == [again.id]
    clock.now = 27.0  # 15 s later
    assert not made.take(0).expired and serve(made, again) == 1


def test_rejected_groups_that_nobody_has_seen_are_kept_in_a_checkpoint():
    made = ledger(schedule="free", max_staleness=0, keeps_rejected=True)
    for lease in made.lease("1", 3):
        serve(made, lease, lambda p: "dull")
    assert [c.position for c in made.take(0).closed] == [0, 1, 2]
    restored = ledger(schedule="free", max_staleness=0, keeps_rejected=True)
    restored.set_state(made.state())
    assert [(c.position, c.reason) for c in restored.take(0).closed] == [
        (0, "dull"), (1, "dull"), (2, "dull"),
    ]  # fmt: skip


def test_one_failing_group_of_a_lease_is_found_and_fails_alone():
    """Nobody knows which of a lease's groups failed: they are sampled one by one then."""
    no_network = SampleFailure("ConnectionError: no judge", "traceback", may_pass=True)
    made = ledger(schedule="free", groups_per_lease=4, max_staleness=0, keeps_rejected=True)
    for _ in range(4):
        for lease in made.lease("1", 4):
            if 1 in range(lease.position, lease.position + lease.num_groups):
                made.fail(lease.id, no_network)
            else:
                serve(made, lease)
    answer = made.take(0)
    assert [(c.position, c.status) for c in answer.closed] == [(1, "failed")]
    assert made.metrics()["groups_failed"] == 1 and answer.ending is None


def test_a_failed_group_leaves_its_lease_and_the_others_stay():
    no_network = SampleFailure("TimeoutError: judge", "traceback", may_pass=True)
    made = ledger(schedule="free", groups_per_lease=4, max_staleness=0)
    (lease,) = made.lease("1", 4)
    made.fail(lease.id, no_network, [2])
    assert made.take(0).failures == (("1", (no_network, 1)),)
    (again,) = made.lease("1", 4, {lease.id})
    assert (again.position, again.num_groups) == (2, 1)
    made.fail(lease.id, no_network, [2])  # Ray makes a call twice
    assert made.take(0).failures == ()
    assert made.push(lease.id, [judged(p, 0) for p in (0, 1, 3)]) == 3
    assert serve(made, again) == 1 and len(made.take(0).groups) == 4


@pytest.mark.parametrize("env_samplers", [(), (("1",), ())])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_groups_of_an_environment_are_sampled_together_again(env_samplers, is_resumed):
    """Groups 0, 1, 2 are of the environments 0, 1, 0. What is sampled apart is rounded otherwise,
    and counts failures of its own: a run ended that had asked for no group three times."""
    no_network = SampleFailure("TimeoutError: judge", "traceback", may_pass=True)
    rules = {"num_groups": 3, "groups_per_lease": 3, "max_staleness": 0, "env_weights": (2.0, 1.0),
             "env_samplers": env_samplers}  # fmt: skip
    made = ledger(**rules)
    (lease,) = made.lease("1", 3)
    assert [(*place,) for place in lease.places] == [(0, 0), (1, 0), (0, 1)]
    made.push(lease.id, [judged(1, 0)])
    if is_resumed:
        state, made = made.state(), ledger(**rules)
        made.set_state(state)
        made.publish(PublishedWeights(0))
    else:
        made.fail(lease.id, no_network, [0, 2])
    (again,) = made.lease("1", 3)
    assert [*again.positions] == [0, 2] and [(*p,) for p in again.places] == [(0, 0), (0, 1)]


def test_a_failed_lease_of_several_groups_is_not_told_as_its_samplers_fault():
    """Three of them ended the run: the driver counts by sampler what is no group's fault, 0."""
    no_network = SampleFailure("TimeoutError: judge", "traceback", may_pass=True)
    made = ledger(schedule="free", num_groups=16, groups_per_lease=2, max_staleness=0)
    for lease in made.lease("1", 6):
        made.fail(lease.id, no_network)
    assert made.take(0).failures == (("1", (no_network, 1)),) * 3


def test_what_a_sampler_gives_back_is_no_groups_fault():
    made = ledger(schedule="free")
    for _ in range(5):
        made.lease("1", 3)
        made.give_back("1", NO_JUDGE)
        assert made.take(0).failures == (("1", (NO_JUDGE, 0)),)
    assert made.metrics()["groups_failed"] == 0 and made.table.counts() == {"waiting": 8}


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_a_second_batch_of_an_update_is_the_next_one(schedule):
    """A loop of one's own takes two batches before it publishes: other groups, each once."""
    made = ledger(schedule=schedule, max_staleness=1)
    taken = []
    for version in range(1, 4):
        for nth in (0, 1):
            made.want(nth)
            while made.has_work():
                for lease in made.lease("1", 4):
                    serve(made, lease)
            groups = made.take(version - 1, 0, nth).groups
            assert made.take(version - 1, 0, nth).groups == groups  # however often it is asked
            taken += [group.position for group in groups]
        made.publish(PublishedWeights(version))
    assert taken == list(range(24)) and made.account.trained_groups == 24


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
@pytest.mark.parametrize("later", [{}, {"window": 4}])
def test_updates_made_without_the_table_age_nothing_after_a_restore(schedule, later):
    """A loop of one's own publishes after each of several minibatches: groups that were there grow
    no older by the rules, restored or not."""
    rules = {"schedule": schedule, "num_groups": 2, "max_staleness": 1}
    made = ledger(**rules)
    for lease in made.lease("1", 4):
        serve(made, lease)
    for version in (1, 2, 3):
        made.publish(PublishedWeights(version))
    restored = ledger(**(rules | later))
    restored.set_state(made.state())
    restored.publish(PublishedWeights(3))
    for each in (made, restored):
        assert [(g.position, g.oldest_version) for g in each.take(3).groups] == [(0, 0), (1, 0)]
    before = made.state()
    del before["num_updates_extra"]  # as of a checkpoint of before
    ledger(**rules).set_state(before)


CHANGES = [  # rules before a restore, and after
    ({"schedule": "lockstep", "max_staleness": 2}, {"schedule": "free", "max_staleness": 1}),
    ({"schedule": "free", "max_staleness": 2}, {"schedule": "lockstep", "max_staleness": 1}),
    ({"num_groups": 4}, {"num_groups": 16}),
    ({"num_groups": 6, "max_staleness": 3}, {"num_groups": 4, "max_staleness": 0}),
    ({"schedule": "free", "window": 5, "max_staleness": 2}, {"max_staleness": 0}),
]


@pytest.mark.parametrize("before, after", CHANGES)
def test_a_run_goes_on_under_other_settings(before, after):
    """Nothing is trained twice or lost, nothing older than the new settings allow."""
    for seed in SEEDS:
        first = Run(ledger(**before), seed).until(3)
        state = first.made.state()
        second = Run(ledger(**after), seed + 1)
        second.made.set_state(state)
        second.version = first.version
        second.made.publish(PublishedWeights(first.version))
        second.until(4)
        assert second.largest_age <= second.made.rules.largest_age
        trained = first.trained + second.trained
        assert set(trained.values()) == {1}
        assert set(range(second.made.table.position)) <= trained.keys()


def test_a_run_that_was_synchronous_goes_on_after_samplers_began():
    """The ledger had begun at the first prompt, and something of it had come in."""
    made = ledger(max_staleness=1)
    serve(made, made.lease("1", 1)[0])
    made.begin(12, 3)
    made.publish(PublishedWeights(3))
    assert made.metrics()["tokens_generated"] == 0
    assert made.lease("1", 1)[0].position == 12


def test_what_cannot_be_judged_for_long_ends_the_run_with_the_cause():
    made = ledger(max_staleness=0)
    for number in range(1, 9):
        (lease,) = made.lease("1", 1)
        group = judged(lease.position, 0, reason="unjudged")
        made.push(lease.id, [dataclasses.replace(group, cause="KeyError: no answer")])
        ended = Ending("unjudged", {"unjudged": 8}, 7, "KeyError: no answer")
        expected = None if number < 8 else ended
        assert made.take(0).ending == expected
    # One that is judged in between: it is prompts, not the judge.
    made = ledger(max_staleness=0)
    for _ in range(30):
        (lease,) = made.lease("1", 1)
        serve(made, lease, lambda p: "unjudged" if p % 6 else "dull")
        assert made.take(0).ending is None


def test_in_lockstep_the_order_of_arrival_ends_nothing():
    """Prompts in a row, not answers in a row: those without a score may come first."""
    tables = []
    for seed in (None, *SEEDS):
        made = ledger(max_staleness=3)
        leases = made.lease("1", 16)
        if seed == 0:  # all that no judge could score first
            leases.sort(key=lambda lease: lease.position % 5 == 0)
        elif seed is not None:
            Random(seed).shuffle(leases)
        for lease in leases:
            serve(made, lease, lambda p: "unjudged" if p % 5 else "")
            assert made.take(0).ending is None
        state = made.state()
        tables.append((state["table"], state["closed_in_row"]))
    assert all(table == tables[0] for table in tables[1:])


def test_in_lockstep_nothing_behind_the_end_is_decided():
    """Else it depends on time whether the driver hears of the end."""
    for first in (0, 15):
        made = ledger(max_staleness=3)
        leases = sorted(made.lease("1", 16), key=lambda lease: lease.position < first)
        for lease in leases:
            serve(made, lease, lambda p: "unjudged" if p < 8 else "")
        assert made.take(0).ending == Ending("unjudged", {"unjudged": 8}, 7)


# --- without staleness, dealt by the driver ----------------------------------------------------


def dealt(num_parts, **rules):
    return ledger(max_staleness=0, num_parts=num_parts, **{"num_groups": 7, **rules})


def spans(made):
    return [(lease.position, lease.num_groups) for lease in made.lease("1", 100)]


def test_an_update_is_cut_into_one_lease_for_each_sampler():
    assert spans(dealt(3)) == [(0, 2), (2, 2), (4, 3)]
    assert spans(dealt(9)) == [(position, 1) for position in range(7)]


def test_what_takes_the_place_of_rejected_groups_is_sampled_at_once():
    """Not one after the other: each would be a batch of its own."""
    made = dealt(2)
    for lease in made.lease("1", 100):
        assert not made.has_work()
        serve(made, lease, lambda p: "dull" if p in (0, 2, 6) else "")
    assert spans(made) == [(7, 1), (8, 2)]
    made.give_back("1")
    for lease in made.lease("1", 100):
        serve(made, lease)
    assert [group.position for group in made.take(0).groups] == [1, 3, 4, 5, 7, 8, 9]


def test_what_nobody_has_begun_is_cut_anew_in_a_restored_run():
    made = dealt(2)
    for lease in made.lease("1", 100):
        serve(made, lease)
    made.take(0)
    made.publish(PublishedWeights(1))
    other = dealt(3)
    other.set_state(made.state())
    other.publish(PublishedWeights(1))
    assert spans(other) == [(7, 2), (9, 2), (11, 3)]
    assert other.account.trained_groups == 7


def test_texts_come_with_every_second_batch_and_the_second():
    made, due = dealt(1, texts_every=2), []
    for step in range(4):
        (lease,) = made.lease("1", 100)
        due.append(lease.return_texts)
        serve(made, lease)
        made.take(step)
        made.publish(PublishedWeights(step + 1))
    assert due == [True, True, True, False]
    assert [v for v in range(31) if texts_are_due(v, 10)] == [0, 1, 2, 4, 8, 10, 20, 30]
    assert not any(texts_are_due(version, 0) for version in range(31))


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_groups_without_log_probs_that_the_environment_adds_now_begin_anew(schedule):
    """A run that goes on with reference_in='environment': nothing computes those of groups that
    were judged before. The other way learners compute all."""
    made = ledger(schedule=schedule, max_staleness=1)
    for lease in made.lease("1", 3):
        serve(made, lease)
    state, num_tokens = made.state(), made.table.num_tokens
    assert num_tokens > 0
    restored = ledger(schedule=schedule, max_staleness=1, judged_with=("reference",))
    restored.set_state(state)
    assert restored.table.num_tokens == 0
    assert restored.metrics()["tokens_rejected"] == num_tokens
    restored.publish(PublishedWeights(0))
    for lease in restored.lease("1", 4):
        serve(restored, lease)
    assert [group.position for group in restored.take(0).groups] == [0, 1, 2, 3]
    for later in ((), ("reference",)):
        back = ledger(schedule=schedule, max_staleness=1, judged_with=later)
        back.set_state(restored.state())
        assert back.table.num_tokens == restored.table.num_tokens
