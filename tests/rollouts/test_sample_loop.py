"""A sampler's turns: judges beside decoding, and failures that cost no neighbour anything."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future

import pytest
from ray.exceptions import RayTaskError

from rllib_llm.rollouts.errors import SampleFailure
from rllib_llm.rollouts.groups import PartialCompletion
from rllib_llm.rollouts.judged_batch import SampleRequest
from rllib_llm.rollouts.ledger import Ledger
from rllib_llm.rollouts.sample_loop import (
    SampleLoop,
    SamplerLedger,
    SamplerThread,
    be_streaming,
)  # fmt: skip
from rllib_llm.rollouts.schedule import ServingSettings, StreamRules
from rllib_llm.shared import columns
from rllib_llm.shared.messages import Listener
from rllib_llm.weights.published import PublishedWeights
from tests.algorithms import tiny_runs as tiny
from tests.rollouts.tiny_samplers import build_sampler, judged, publication
from tests.rollouts.world import N, ScriptedSampler


class Calls(SamplerLedger):
    """`SamplerLedger` of a ledger in this process."""

    sampler = "1"

    def __init__(self, ledger):
        self.ledger = ledger

    def call(self, name, *args):
        done = Future()
        done.set_result(self.ledger.call(name, *args))
        return done

    def lease(self, num_groups, holding, wait_s):
        return self.call("lease", "1", num_groups, list(holding))


class World:
    """Judges of a scripted sampler: `judge` is called with the position of each group."""

    def __init__(self, judge=lambda position: None):
        self.judge = judge

    def fate(self, position):
        return "trained"


def answer(work, name, make_answer):
    """Has one of the calls of `work` to its ledger answered by a function."""
    before = work._ledger.call

    def call(called, *args):
        return make_answer(*args) if called == name else before(called, *args)

    work._ledger.call = call


def work_of(world, *, schedule, in_flight="keep", max_groups=8, **rules):
    ledger = Ledger(StreamRules(**{"num_groups": 8, "schedule": schedule, **rules}))
    ledger.call("publish", PublishedWeights(0))
    settings = ServingSettings(
        N, max_groups=max_groups, in_flight=in_flight, by_row=schedule == "free",
        judges_beside=True,
    )  # fmt: skip
    return ledger, SampleLoop(Calls(ledger), ScriptedSampler(world), settings)


def batch(ledger, work, nth=0, most_seconds=30.0):
    end = time.monotonic() + most_seconds
    while (answer := ledger.take(0, 0, nth)).groups is None:
        assert time.monotonic() < end, ledger.look()["waits_for"]
        work.turn()
    return answer.groups


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_all_finished_groups_are_judged_at_the_same_time(schedule):
    """Eight judges that wait for one another: in turns, none would ever come to an end."""
    together = threading.Barrier(8, timeout=60.0)
    ledger, work = work_of(World(lambda position: together.wait()), schedule=schedule,
                           max_staleness=0)  # fmt: skip
    assert [group.position for group in batch(ledger, work)] == list(range(8))
    work.close()


def test_rows_are_sampled_while_judges_work():
    """The judge of group 0 goes on until group 7 is judged."""
    last = threading.Event()

    def judge(position):
        if position == 7:
            last.set()
        assert position or last.wait(20.0)

    # One after the other.
    ledger, work = work_of(World(judge), schedule="free", max_staleness=0, max_groups=1)
    assert len(batch(ledger, work)) == 8
    work.close()


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_a_group_that_fails_fails_alone(schedule):
    """Complaint: three passing errors of one prompt closed six groups as failed. What else is in
    the engine goes on, and nothing of it is sampled twice."""
    num_calls = []

    def judge(position):
        num_calls.append(position)
        if position == 2 and num_calls.count(2) <= 2:
            raise OSError("no network")

    ledger, work = work_of(World(judge), schedule=schedule, max_staleness=0)
    assert [group.position for group in batch(ledger, work)] == list(range(8))
    assert sorted(num_calls) == [0, 1, 2, 2, 2, 3, 4, 5, 6, 7]
    assert ledger.look()["metrics"]["groups_failed"] == 0
    work.close()


def test_a_group_that_fails_leaves_the_others_of_its_lease_in_the_engine():
    """Its lease ended whole, its groups were leased anew and came into the engine a second time,
    which raised and ended the run."""
    num_calls = []

    def judge(position):
        num_calls.append(position)
        if num_calls == [position]:  # the first that is finished, while the others are decoded
            raise OSError("no network")

    ledger, work = work_of(World(judge), schedule="free", max_staleness=0, groups_per_lease=8)
    begun = []
    add = work.in_flight._engine.add
    work.in_flight._engine.add = lambda rows: (begun.extend(row.id[0] for row in rows), add(rows))
    failures = []
    while (answer := ledger.take(0)).groups is None:
        failures += answer.failures
        work.turn()
    failures += answer.failures
    failed = num_calls[0]
    assert sorted(num_calls) == sorted([*range(8), failed])
    assert sorted(begun) == sorted([*range(8), failed] * N)
    assert [number for _, (_, number) in failures] == [1]
    work.close()


def test_a_prompt_that_cannot_be_begun_leaves_the_others_of_its_lease_in_the_engine():
    ledger, work = work_of(World(), schedule="free", max_staleness=0, groups_per_lease=8)
    environment, asked = work._sampler.environment, []
    prompts = environment.prompts

    def without_disk(request):
        asked.append(request.position)
        if request.position == 2 and asked.count(2) == 1:
            raise OSError("no disk")
        return prompts(request)

    environment.prompts = without_disk
    assert [group.position for group in batch(ledger, work)] == list(range(8))
    assert sorted(asked) == sorted([*range(8), 2])
    work.close()


def test_weights_that_cannot_be_loaded_begin_none_of_the_leases_that_end_with_theirs():
    """Leases that came with it were sampled to their end, and refused."""
    ledger, work = work_of(World(), schedule="free", max_staleness=0)
    environment, asked = work._sampler.environment, []
    prompts, receive = environment.prompts, work._sampler.weights.receive
    environment.prompts = lambda request: (asked.append(request.position), prompts(request))[1]

    def lost_once(published, load):
        work._sampler.weights.receive = receive
        raise OSError("no network")

    work._sampler.weights.receive = lost_once
    assert [group.position for group in batch(ledger, work)] == list(range(8))
    assert sorted(asked) == list(range(8))
    assert ledger.look()["metrics"]["tokens_rejected"] == 0
    work.close()


def test_a_group_that_is_leased_again_is_begun_anew():
    """Its lease before has ended, and no renewal has said so yet."""
    ledger, work = work_of(World(), schedule="free", max_staleness=0)
    (lease,) = ledger.call("lease", "1", 1, [])
    work._begin(lease)
    work.in_flight.step()
    ledger.call("give_back", "1")
    (again,) = ledger.call("lease", "1", 1, [])
    work._begin(again)
    assert (again.position, work.in_flight.leases) == (lease.position, {again.id})
    assert not ledger.take(0).failures
    assert [group.position for group in batch(ledger, work)] == list(range(8))
    work.close()


def test_what_other_settings_left_of_a_group_is_begun_anew_and_counted():
    """One more completion than there are now."""
    ledger, work = work_of(World(), schedule="free", max_staleness=0)
    (lease,) = ledger.call("lease", "1", 1, [])
    begun = tuple(PartialCompletion((7, 7), (0.0, 0.0), (0, 0)) for _ in range(N + 1))
    ledger.call("keep_partial", lease.id, {lease.position: begun})
    assert [group.position for group in batch(ledger, work)] == list(range(8))
    told = ledger.look()["metrics"]
    assert told["tokens_rejected"] == 2 * (N + 1)
    assert told["tokens_generated"] == told["tokens_carried"] + told["tokens_rejected"]
    work.close()


def test_what_hangs_in_a_judge_ends_its_lease_and_nothing_else_does():
    """Leases are renewed while groups are judged, as long as any comes to its end."""
    ledger, work = work_of(World(), schedule="free", max_staleness=0)
    work._was_judged = False
    work._judge(ledger.call("lease", "1", 1, [])[0], ScriptedSampler(World()).generate(
        SampleRequest(0, 1, N), PublishedWeights(0)))  # fmt: skip
    renewed = []
    answer(work, "renew", lambda _, holding: renewed.append(set(holding)) or Future())
    work._renewal()
    assert renewed == [set()]  # nothing was judged since the last one
    work._renewing, work._renewed, work._was_judged = None, 0.0, True
    work._renewal()
    assert renewed[1:] == [work._judged_leases] != [set()]
    work.close()


def test_what_the_ledger_says_of_a_call_is_read():
    """A push that raised was forgotten, and its group sampled again when its lease had ended."""
    ledger, work = work_of(World(), schedule="lockstep", max_staleness=0)
    lost = Future()
    lost.set_exception(RuntimeError("the ledger has no disk"))
    answer(work, "push", lambda lease, groups: lost)
    with pytest.raises(RuntimeError, match="no disk"):
        batch(ledger, work)
    work.close()


def ledger_error():
    lost = Future()
    lost.set_exception(RayTaskError("call", "a bug of the ledger", KeyError()))
    return lost


def test_an_error_of_the_ledger_is_no_fault_of_the_engine():
    ledger, work = work_of(World(), schedule="free", max_staleness=0)
    answer(work, "renew", lambda _, holding: ledger_error())
    answer(work, "give_back", None)  # what is in the engine is sound
    with pytest.raises(RayTaskError, match="a bug of the ledger"):
        batch(ledger, work)
    work.close()


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_code_that_exits_ends_no_thread_mute(schedule):
    """A function that calls `sys.exit` was begun anew every second, for ever."""
    _, work = work_of(World(), schedule=schedule, max_staleness=0)
    work.in_flight.step = lambda: sys.exit("no model")
    thread = SamplerThread(work, Listener("a sampler"), "stream")
    thread._thread.join(30.0)
    assert not thread.is_at_work
    assert thread.failure.error == "SystemExit: no model" and not thread.failure.may_pass


class Runner:
    """An actor whose sampler cannot even begin its turns."""

    streamer, listener = None, Listener("a sampler")

    class sampler:
        takes_rows, name = False, "a sampler"


class BrokenActor:
    """A ledger's actor whose calls raise at once."""

    @property
    def lease(self):
        raise KeyError("a bug")


def test_a_thread_that_a_bug_ends_says_so_when_it_is_asked_again():
    runner, told = Runner(), ("stream", BrokenActor(), "1", ServingSettings(N))
    assert be_streaming(runner, *told) is None
    runner.streamer._thread.join(10.0)
    failure = be_streaming(runner, *told)
    assert isinstance(failure, SampleFailure) and failure.error == "KeyError: 'a bug'"
    runner.streamer.stop()


class Answering:
    """A method of an actor whose calls all raise in the actor."""

    @staticmethod
    def remote(*args):
        return Answering

    future = staticmethod(ledger_error)


class LedgerWithABug:
    """A ledger's actor."""

    lease = call = Answering


def test_an_error_of_the_ledger_is_told_to_the_driver():
    """The thread ended without a word, and another was started, each second."""
    runner, told = Runner(), ("stream", LedgerWithABug(), "1", ServingSettings(N))
    assert be_streaming(runner, *told) is None
    runner.streamer._thread.join(10.0)
    failure = be_streaming(runner, *told)
    assert isinstance(failure, SampleFailure) and "a bug of the ledger" in failure.error
    runner.streamer.stop()


def fails_for_one(prompts, completions):
    if any(prompt.startswith("5=") for prompt in prompts):
        raise KeyError("no answer")
    return tiny.num_digits(completions)


def test_a_sampler_judges_other_completions_than_its_last_in_threads():
    """The prompts that the environment handed out last are another batch's meanwhile."""
    runner = build_sampler(tiny.grpo(), worker_index=1)
    expected = [judged(runner, SampleRequest(p, 2, 3), publication()) for p in (0, 4)]
    generated = [runner.sampler.generate(SampleRequest(p, 2, 3), publication()) for p in (0, 4)]
    found = {}

    def judge(i):
        found[i] = runner.sampler.judge(generated[i], beside=True)

    threads = [threading.Thread(target=judge, args=(i,)) for i in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in (0, 1):
        for name in (columns.SCORES, columns.PROMPT_IDS, columns.COMPLETION_IDS, columns.GROUP):
            assert found[i].columns[name].equal(expected[i].columns[name]), name
        assert found[i].texts == expected[i].texts
