"""Every prompt answered once, in order, whoever dies or hangs; failures come with their reason."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest

from rllib_llm.rollouts import workers as module
from rllib_llm.rollouts.errors import (
    BrokenSamplerError,
    Faults,
    NoSamplersError,
    SampleFailure,
)
from rllib_llm.rollouts.groups import Lease
from rllib_llm.rollouts.judged_batch import SampleRequest, concatenate
from rllib_llm.rollouts.ledger import Ledger
from rllib_llm.rollouts.recorder import RolloutRecorder
from rllib_llm.rollouts.sampler_pool import SamplerPool
from rllib_llm.rollouts.schedule import ServingSettings, StreamRules
from rllib_llm.rollouts.source import RolloutSource
from rllib_llm.rollouts.workers import DealtLeases
from rllib_llm.shared import columns
from rllib_llm.shared.openai_client import ServerError
from rllib_llm.weights.published import WeightsLostError
from tests.algorithms import tiny_runs as tiny
from tests.rollouts.simulated import Clock
from tests.rollouts.tiny_samplers import (
    ScriptedActors,
    assert_same_batch,
    build_sampler,
    judged,
    publication,
)

REQUEST = SampleRequest(position=5, num_prompts=7, num_completions=2)
LEASE = Lease(1, REQUEST.position, REQUEST.num_prompts, publication())
DIES, HANGS, SERVES = "dies", "hangs", "serves"


@pytest.fixture(autouse=True)
def no_delays(monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.0)


@pytest.fixture(scope="module")
def samplers():
    return [build_sampler(tiny.grpo(), worker_index=i + 1) for i in range(3)]


@pytest.fixture(scope="module")
def expected(samplers):
    """Of a number of samplers: what one of them makes of all their parts, one after the other. What
    is computed together decides the round-off, so that other cuts give other last bits."""

    @functools.cache
    def batch(num_parts):
        parts, position = [], REQUEST.position
        for size in StreamRules(7, num_parts=num_parts).sizes(7):
            parts.append(SampleRequest(position, size, 2))
            position += size
        return concatenate([judged(samplers[0], part, publication()) for part in parts])

    return batch


class Source(RolloutSource):
    """Samples a request, whatever was sampled before."""

    def __init__(self, group, num_prompts=REQUEST.num_prompts, *, num_parts=None, tell=None,
                 publish_again=None, starvation=module.StarvedProcesses, filters=(),
                 **rules):  # fmt: skip
        self.pool = SamplerPool(group, Faults(), num_parts=num_parts)
        rules = {"timeout_s": None} | rules
        rules = StreamRules(
            num_prompts, max_staleness=0, num_parts=self.pool.num_parts, **rules
        )  # fmt: skip
        ledger = Ledger(rules)
        settings = ServingSettings(2, env_filters=(filters,) * len(rules.env_weights))
        workers = DealtLeases(
            self.pool, ledger, settings, are_enough=rules.are_open, starvation=starvation
        )
        super().__init__(
            ledger, workers, rules, recorder=RolloutRecorder(), publish_again=publish_again,
            tell=tell or (lambda num_groups: None),
        )  # fmt: skip

    def sample(self, request=REQUEST):
        return self.next_from(request.position, publication())


def source(group, **settings):
    group.first = REQUEST.position
    return Source(group, **settings)


def sample(group, **settings):
    return source(group, **settings).sample()


@pytest.mark.parametrize("num_samplers, starts", [(1, [0]), (2, [0, 3]), (3, [0, 2, 4])])
def test_the_prompts_are_cut_into_one_part_per_sampler(samplers, expected, num_samplers, starts):
    group = ScriptedActors(samplers[:num_samplers])
    assert_same_batch(sample(group), expected(num_samplers))
    assert group.served == [(i + 1, start) for i, start in enumerate(starts)]


def test_more_samplers_than_prompts_leaves_some_idle(samplers):
    group = ScriptedActors(samplers)
    batch = source(group, num_prompts=2).sample(SampleRequest(0, 2, 2))
    assert batch.num_rows == 4
    assert group.served == [(1, -5), (2, -4)]  # as counted from the other request's position


def is_even(group):
    return group.position % 2 == 0, "odd"


def test_what_filters_reject_is_dealt_anew_in_parts_once_all_else_is_judged(samplers):
    """Of prompts 5 to 11 three pass; then four, two and one take the place of the rest."""
    group = ScriptedActors(samplers[:2])
    batch = sample(group, filters=(f"{__name__}.is_even",))
    assert batch.columns[columns.GROUP][::2].tolist() == [6, 8, 10, 12, 14, 16, 18]
    assert [start for _, start in group.served] == [0, 3, 7, 9, 11, 12, 13]


@pytest.mark.parametrize("does", [
    [DIES],  # the first of two: the other takes its part over
    [SERVES, DIES],
    [DIES, DIES],  # both: they come back
    [DIES, DIES, DIES, SERVES, DIES],
])  # fmt: skip
def test_a_death_changes_nothing_in_the_batch(samplers, expected, does):
    group = ScriptedActors(samplers[:2], does=does)
    used = source(group)
    assert_same_batch(used.sample(), expected(2))
    assert used.pool.faults.requests_retried == does.count(DIES)
    assert used.pool.faults.seconds_lost >= 0 and used.pool.faults.samplers_hung == 0
    # Who died last may not have been needed again.
    assert does.count(DIES) - 1 <= used.pool.faults.sampler_restarts <= does.count(DIES)


@pytest.mark.parametrize("does", [
    [HANGS], [HANGS, HANGS], [SERVES, HANGS, HANGS], [HANGS, DIES, SERVES, HANGS],
])  # fmt: skip
def test_a_silent_sampler_is_killed_and_its_part_goes_to_another(samplers, expected, does):
    group = ScriptedActors(samplers[:2], does=does)
    used = source(group, timeout_s=0.01)
    assert_same_batch(used.sample(), expected(2))
    assert len(group.killed) == used.pool.faults.samplers_hung == does.count(HANGS)
    assert used.pool.faults.seconds_lost >= 0.01 * does.count(HANGS)


class Starved:
    """Stands for `StarvedProcesses` that got no core at all."""

    def __init__(self, clock):
        self._clock, self._at = clock, clock()

    def take(self):
        passed, self._at = self._clock() - self._at, self._clock()
        return passed


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_without_a_limit_or_a_core_a_silent_sampler_is_waited_for(samplers, timeout_s, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    group = ScriptedActors(samplers[:1], does=[HANGS])
    used = source(group, timeout_s=timeout_s, starvation=lambda pids: Starved(clock))
    used._ledger = used._workers._ledger = Ledger(used._rules, clock=clock)
    ready, looks = group.ready, []

    def wakes_up(calls, timeout_s):
        looks.append(1)
        clock.now += 4.0
        if len(looks) == 50:
            for call in calls:
                group.ends[call] = samplers[0].serve(LEASE, ServingSettings(2))
            group.hung.clear()
        return ready(calls, timeout_s)

    group.ready = wakes_up
    assert used.sample().num_rows == 14
    assert not group.killed and len(looks) >= 50


def test_the_cut_does_not_depend_on_who_is_alive(samplers, expected):
    """What is computed together decides the round-off."""
    group = ScriptedActors(samplers[:2], revives_after=10**9)
    group.dead[1] = 0
    assert_same_batch(sample(group), expected(2))
    assert group.served == [(2, 0), (2, 3)]
    assert StreamRules(7, num_parts=3).sizes(7) == [2, 2, 3]


def test_samplers_have_time_to_come_back(samplers, expected):
    """A restart takes far longer than a few pings."""
    group = ScriptedActors(samplers[:1], does=[DIES], revives_after=50)
    assert_same_batch(sample(group), expected(1))


def test_samplers_that_die_whenever_they_are_asked_end_the_run(samplers):
    group = ScriptedActors(samplers[:2], does=[DIES] * 100, revives_after=3)
    said = r"(?s)died or hung, 6 times in a row.*\nSampler 1: .*no memory"
    with pytest.raises(RuntimeError, match=said):
        sample(group)


def test_samplers_that_never_come_back_end_the_run(samplers):
    group = ScriptedActors(samplers[:2], does=[DIES] * 2, revives_after=10**9)
    used = source(group)
    used.pool.start_limit = 0.05
    with pytest.raises(NoSamplersError, match="all samplers are gone"):
        used.sample()


def test_the_last_sampler_of_an_environment_that_never_comes_back_ends_the_run(samplers):
    group = ScriptedActors(samplers[:2], does=[DIES], revives_after=10**9)
    used = source(group, env_weights=(1.0, 1.0), env_samplers=(("1",), ("2",)))
    used.pool.start_limit = 0.05
    with pytest.raises(NoSamplersError, match="all samplers that open an environment are gone"):
        used.sample()
    assert {worker for worker, _ in group.served} == {2}


def test_a_sampler_that_hangs_while_it_starts_is_started_again(samplers, expected):
    group = ScriptedActors(samplers[:2], does=[DIES], revives_after=10**9)
    used = source(group)
    used.pool.start_limit = 0.0
    assert_same_batch(used.sample(), expected(2))
    while not group.killed:
        used.sample()
    assert set(group.killed) == {1}
    group.revives_after = 1
    used.pool.start_limit = 100.0
    used.pool.healthy()
    assert used.pool.healthy() == [1, 2]
    assert used.pool.pop_revived() == [1] and used.pool.pop_revived() == []
    assert used.pool.faults.sampler_restarts == 1


def no_judge(completions, prompts):
    raise KeyError("no such judge")


def test_an_exception_in_a_sampler_is_raised_with_its_place_when_it_is_no_single_prompts():
    config = tiny.grpo()
    config.env_config["reward_functions"] = no_judge
    group = ScriptedActors([build_sampler(config, worker_index=i) for i in (1, 2)])
    with pytest.raises(BrokenSamplerError) as caught:
        sample(group)
    message = str(caught.value)
    # The cause, which may be an environment, is what blames a reward function.
    assert "to train on. The last without a score: reward function 'no_judge'" in message
    # The error explains itself: the line of the user's own code, not the way there.
    assert "KeyError: 'no such judge', raised in test_synchronous_workers.py:" in message
    assert "prompt '" in message and "completion '" in message
    assert len(group.served) == 4  # two rounds: eight groups in a row are enough


def no_score(completions, prompts):
    return [None] * len(completions)


def test_a_run_whose_completions_are_all_left_without_a_score_says_that_nothing_was_raised():
    config = tiny.grpo()
    config.env_config["reward_functions"] = no_score
    group = ScriptedActors([build_sampler(config, worker_index=i) for i in (1, 2)])
    with pytest.raises(BrokenSamplerError, match="in a row got no score, .* returned None for all"):
        sample(group)


def test_an_exception_in_a_callback_is_raised_with_its_traceback():
    def note(**_):
        raise KeyError("no such note")

    config = tiny.grpo().callbacks(on_sample_end=note)
    group = ScriptedActors([build_sampler(config, worker_index=1)])
    with pytest.raises(RuntimeError, match="KeyError: 'no such note'") as caught:
        sample(group)
    assert "Traceback" in str(caught.value.__cause__)


class Unreachable:
    """A sampler behind a disk that is gone for the first `num_failures` requests."""

    def __init__(self, sampler, num_failures):
        self.sampler = sampler
        self.num_failures = num_failures

    def serve(self, lease, settings):
        self.num_failures -= 1
        if self.num_failures < 0:
            return self.sampler.serve(lease, settings)
        try:
            raise ConnectionError(f"no prompts, {self.num_failures} more")
        except ConnectionError as error:
            return SampleFailure.from_exception(error)


def test_what_may_pass_by_itself_is_asked_again(samplers, expected):
    used = source(ScriptedActors([Unreachable(samplers[0], num_failures=2)]))
    assert_same_batch(used.sample(), expected(1))
    assert used.pool.faults.requests_retried == 2


class Serverless:
    """A sampler whose server is gone."""

    def serve(self, lease, settings):
        return SampleFailure.from_exception(ServerError("http://h/v1 must answer"))


def test_a_server_that_gave_no_answer_was_asked_often_enough():
    group = ScriptedActors([Serverless()])
    with pytest.raises(ServerError, match="ServerError: http://h/v1 must answer"):
        sample(group)
    assert len(group.served) == 1


def test_but_not_more_than_three_times(samplers):
    group = ScriptedActors([Unreachable(samplers[0], num_failures=9)])
    with pytest.raises(RuntimeError, match="ConnectionError: no prompts, 6 more"):
        sample(group)
    assert len(group.served) == 3


class Broken:
    """A sampler whose reward function has a bug."""

    def serve(self, lease, settings):
        return SampleFailure.from_exception(KeyError("no such judge"))


def test_a_failed_request_leaves_nobody_in_the_way_of_the_next(samplers, expected):
    """The second sampler is still at work for the request that failed: the next one goes to the
    others, and what the second says is of no use."""
    group = ScriptedActors([Broken(), samplers[1]], does=[SERVES, HANGS])
    used = source(group)
    with pytest.raises(BrokenSamplerError):
        used.sample()
    assert group.hung == {2}
    group.samplers[1] = samplers[0]
    group.served.clear()
    assert_same_batch(used.sample(), expected(2))
    assert group.served == [(1, 0), (1, 3)] and not group.killed
    group.hung.clear()
    for call, end in group.ends.items():
        group.ends[call] = end or samplers[1].serve(LEASE, ServingSettings(2))
    assert_same_batch(used.sample(), expected(2))
    group.served.clear()
    assert_same_batch(used.sample(), expected(2))
    assert group.served == [(1, 0), (2, 3)]


class WithoutWeights:
    """A sampler that can get no weights for the first `num_failures` requests."""

    def __init__(self, sampler, num_failures):
        self.sampler, self.num_failures = sampler, num_failures

    def serve(self, lease, settings):
        self.num_failures -= 1
        if self.num_failures < 0:
            return self.sampler.serve(lease, settings)
        error = WeightsLostError("gone with its owner", lease.weights.key)
        return SampleFailure.from_exception(error)


def test_lost_weights_are_published_again_and_the_same_prompts_sampled(samplers, expected):
    lost = []

    def publish_again(error):
        lost.append(str(error))
        return publication(0, key="again")

    group = ScriptedActors([WithoutWeights(samplers[0], 1), samplers[1]])
    used = source(group, publish_again=publish_again)
    assert_same_batch(used.sample(), expected(2))
    assert len(lost) == 1 and "gone with its owner" in lost[0]
    group = ScriptedActors([WithoutWeights(samplers[0], 9)])
    with pytest.raises(RuntimeError, match="gone with its owner"):
        source(group, publish_again=publish_again).sample()
    assert len(group.served) == 3


def test_weights_that_two_samplers_lost_are_published_again_once(samplers, expected):
    """Complaint: each sampler's failure had all of them put into the store once more."""
    lost = []

    def publish_again(error):
        lost.append(error)
        return publication(0, key=f"again {len(lost)}")

    group = ScriptedActors([WithoutWeights(sampler, 1) for sampler in samplers[:2]])
    assert_same_batch(source(group, publish_again=publish_again).sample(), expected(2))
    assert len(lost) == 1
    group = ScriptedActors([WithoutWeights(samplers[0], 2)])  # the new ones are lost as well
    lost.clear()
    assert_same_batch(source(group, publish_again=publish_again).sample(), expected(1))
    assert len(lost) == 2


def test_samplers_that_died_while_the_learner_learnt_have_time_to_come_back(samplers, expected):
    """Complaint: nobody had looked at them for longer than a start may take, and the run ended."""
    group = ScriptedActors(samplers[:1], revives_after=3)
    used = source(group)
    used._workers._someone_seen = -1e9
    group.dead[1] = 0
    assert_same_batch(used.sample(), expected(1))


class Timed:
    """A sampler that says that each request took a second."""

    def __init__(self, sampler):
        self._sampler = sampler

    def serve(self, lease, settings):
        groups = self._sampler.serve(lease, settings)
        groups[0].payload.batch.timings = {"judge_seconds": 1.0}
        return groups


def test_what_a_sampler_spent_on_all_its_parts_was_waited_for(samplers):
    group, told = ScriptedActors([Timed(one) for one in samplers[:2]], first=REQUEST.position), []
    batch = Source(group, num_parts=5, tell=told.append).sample()
    # Parts of 1, 1, 2, 1 and 2 prompts go to two samplers in turns: one does three of them.
    assert [worker for worker, _ in group.served] == [1, 2, 1, 2, 1]
    assert batch.timings == {"judge_seconds": 3.0}
    assert told == [2, 5]  # at the end there is nothing to be told
