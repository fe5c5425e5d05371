"""The ledger, its samplers' turns and its driver against what may never be otherwise.

Whatever dies, hangs, comes late or is restored: every group is trained once, or closed with a
reason; tokens generated = trained + rejected + carried (asserted at every event); no token, by its
stamp, is older than the rules allow; a batch comes within so many events; what lockstep trains is a
function of the rules alone.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rllib_llm.rollouts import sample_loop, source, workers
from rllib_llm.rollouts.schedule import StreamRules
from tests.rollouts.world import LIMIT, SECONDS_OF_AN_EVENT, World, WorldTime


@st.composite
def any_rules(draw, schedules=("lockstep", "free")):
    schedule = draw(st.sampled_from(schedules))
    is_free = schedule == "free"
    num_groups = draw(st.sampled_from([1, 2, 4, 6]))
    # The world's samplers are 1 and 2.
    envs = draw(st.sampled_from([{}, {}, {"env_weights": (2.0, 1.0)}, {
        "env_weights": (2.0, 1.0, 1.0), "env_samplers": ((), ("1",), ("2",)),
    }, {"env_weights": (1.0, 3.0), "env_samplers": (("2",), ("1",))}]))  # fmt: skip
    if not is_free and draw(st.integers(0, 3)) == 0:
        num_parts = draw(st.integers(1, 3))
        return StreamRules(
            num_groups, max_staleness=0, num_parts=num_parts, timeout_s=LIMIT, **envs
        )
    return StreamRules(
        num_groups=num_groups,
        max_staleness=draw(st.integers(0, 3)),
        schedule=schedule,
        window=draw(st.sampled_from([1, 1, 4])) if is_free else 1,
        num_extra=draw(st.sampled_from([0, 0, 2])),
        groups_per_lease=draw(st.integers(1, 3)),
        timeout_s=LIMIT,
        **envs,
    )


# A seed: a schedule has more events than Hypothesis would draw one by one.
RANDOM = st.randoms(use_true_random=True)
IN_FLIGHT = st.sampled_from(["finish", "finish", "keep", "recompute"])


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Nobody waits for time that passes outside of the world."""
    monkeypatch.setattr(sample_loop, "wait", lambda calls, seconds, when: None)
    monkeypatch.setattr(sample_loop, "SECONDS_BETWEEN_RENEWALS", 5 * SECONDS_OF_AN_EVENT)
    for module in (sample_loop, source, workers):
        monkeypatch.setattr(module, "time", WorldTime)


def holds(random, rules, in_flight, others):
    random = Random(random.getrandbits(64))  # without Hypothesis at each call
    world = World(random, rules, in_flight=in_flight, troubles=6).begin()
    for other in (None, rules, *others):
        if other is not None:
            for _ in range(random.choice([0, 0, 1, 3])):
                world.source.next()  # handed out for an update that is never made
            world = world.restored(other)
        # A bound of S updates is broken by what began 2·S before.
        for _ in range(random.choice([3, 3, 8])):
            world.update(random.choice([1, 1, 1, 2]))
    world.check()


BATCHES = st.lists(st.integers(1, 2), min_size=5, max_size=5)  # of each update
OPTIONS = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=15, derandomize=True, **OPTIONS)
@given(RANDOM, any_rules(), IN_FLIGHT, st.lists(any_rules(), max_size=1))
def test_nothing_is_lost_doubled_too_old_or_stuck(random, rules, in_flight, others):
    holds(random, rules, in_flight, others)


@settings(max_examples=500, derandomize=True, **OPTIONS)
@given(RANDOM, any_rules(), IN_FLIGHT, st.lists(any_rules(), max_size=2))
def many_schedules(random, rules, in_flight, others):
    holds(random, rules, in_flight, others)


@pytest.mark.slow  # two thousand schedules
@pytest.mark.parametrize("part", range(4))
def test_nothing_is_lost_doubled_too_old_or_stuck_in_many_schedules(part):
    hypothesis.seed(part)(many_schedules)()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("staleness", [2, 3])
def test_saving_while_a_batch_is_handed_out_changes_nothing(seed, staleness):
    """It asked for another batch of the update, whose groups older weights sampled then."""
    rules = StreamRules(num_groups=2, max_staleness=staleness, timeout_s=LIMIT)
    trained = []
    for is_saved in (False, True):
        world = World(Random(seed), rules).begin()
        for _ in range(6):
            world.update(before_publication=world.source.state if is_saved else None)
        world.check()
        trained.append(world.fates.batches)
    assert trained[0] == trained[1]


@pytest.mark.parametrize("num_batches", [2, 3])
@pytest.mark.parametrize("changes", [
    {"max_staleness": 0, "num_parts": 2}, {"schedule": "lockstep"}, {"schedule": "free"},
])  # fmt: skip
def test_a_checkpoint_of_a_loop_that_holds_several_batches_is_resumed(changes, num_batches):
    """A batch for each update from then on: the last were older than may be, and the run died."""
    rules = StreamRules(num_groups=2, timeout_s=LIMIT, **changes)
    world = World(Random(0), rules).begin()
    world.update()
    for _ in range(num_batches):
        world.source.next()
    resumed = world.restored(rules)
    for _ in range(5):
        resumed.update()
    resumed.check()


@settings(max_examples=15, derandomize=True, **OPTIONS)
@given(RANDOM, RANDOM, any_rules(["lockstep"]), BATCHES)
def test_what_lockstep_trains_follows_from_the_rules_alone(one, other, rules, batches):
    """Whatever happened on the way, with any number of samplers, of which one opens all
    environments or each some of them, and restored midway."""
    trained = []
    for random, num_samplers in ((one, 1), (other, 3)):
        if num_samplers == 1:
            world = World(random, replace(rules, env_samplers=()), num_samplers=1).begin()
        else:
            world = World(random, rules, num_samplers=num_samplers).begin()
        for i, number in enumerate(batches):
            if num_samplers == 3 and i == 2:
                world = world.restored(rules)
            world.update(number)
        trained.append(world.fates.batches)
    assert trained[0] == trained[1]


@pytest.mark.parametrize("seed", range(3))
def test_groups_of_other_rules_are_sampled_after_a_second_restore(seed):
    """The turns that the first restore gave them are still to come."""
    rules = StreamRules(num_groups=1, max_staleness=0, timeout_s=LIMIT)
    world = World(Random(seed), StreamRules(num_groups=4, max_staleness=1, timeout_s=LIMIT)).begin()
    for _ in range(3):
        world = world.restored(rules)
        world.update()
    for _ in range(6):
        world.update()
    world.check()


@settings(max_examples=8, derandomize=True, **OPTIONS)
@given(RANDOM, RANDOM, any_rules(["lockstep"]))
def test_what_is_sampled_together_follows_from_the_rules_alone(one, other, rules):
    """The groups of a unit and an environment, whichever sampler opens it: else rounding would
    differ."""
    found = []
    for random, own in ((one, replace(rules, env_samplers=())), (other, rules)):
        world = World(random, own, troubles=3).begin()
        for _ in range(5):
            world.update()
        found.append({p: world.fates.together[p] for p in world.fates.trained})
        assert {len(each) for each in found[-1].values()} == {1}
    assert found[0] == found[1]
