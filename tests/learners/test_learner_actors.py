"""No error and no silence of a learner leaves the driver waiting."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ray

from rllib_llm.learners.learner_group import LearnerActors, LearnerError

pytestmark = pytest.mark.usefixtures("ray_session")


@ray.remote(num_cpus=0)
class Learner:
    """As RLlib's learners seen from outside."""

    def __init__(self, index):
        self.index = index

    def apply(self, func, **kwargs):
        return func(self, **kwargs)

    def update(self, lr):
        return self.index + lr


def pid(learner):
    return os.getpid()


def learn(learner, raises=(), waits=()):
    if learner.index in raises:
        raise ValueError(f"learner {learner.index} has no loss")
    while learner.index in waits:  # for the others' gradients
        time.sleep(0.1)
    return learner.index


@pytest.fixture
def make():
    groups = []

    def make(num_learners, timeout_s="auto"):
        actors = [Learner.remote(index) for index in range(num_learners)]
        groups.append(LearnerActors(actors, timeout_s=timeout_s))
        return groups[-1]

    yield make
    for group in groups:
        group.clear()


def values(results):
    return [result.get() for result in results]


@pytest.mark.slow  # learners in processes of their own
def test_answers_come_in_the_learners_order(make):
    group = make(2)
    assert values(group.foreach_actor(learn)) == [0, 1]
    assert values(group.foreach_actor(learn, remote_actor_ids=[0])) == [0]
    assert values(group.foreach_actor("update", kwargs=[{"lr": 1.0}, {"lr": 2.0}])) == [1.0, 3.0]
    refs = values(group.foreach_actor(learn, return_obj_refs=True))
    assert ray.get(refs) == [0, 1]
    assert group.limits["learn()"].slowest > 0
    assert group.limits["update()"].slowest > 0
    assert group.limits["export()"].seconds() == 1800.0


@pytest.mark.slow  # learners in processes of their own
@pytest.mark.parametrize("return_obj_refs", [False, True])
def test_what_one_of_several_raises_ends_all(make, return_obj_refs):
    group = make(2)
    with pytest.raises(ValueError, match="learner 0 has no loss"):
        group.foreach_actor(
            learn, kwargs={"raises": [0], "waits": [1]}, return_obj_refs=return_obj_refs
        )
    with pytest.raises(LearnerError, match="ended by an earlier error.*FailureConfig"):
        group.foreach_actor(learn)


@pytest.mark.slow  # a learner in a process of its own
def test_what_the_only_learner_raises_leaves_it_alive(make):
    group = make(1)
    with pytest.raises(ValueError, match="learner 0 has no loss"):
        group.foreach_actor(learn, kwargs={"raises": [0]})
    assert values(group.foreach_actor(learn)) == [0]


@pytest.mark.slow  # learners in processes of their own
def test_a_killed_learner_is_named(make):
    group = make(2)
    os.kill(values(group.foreach_actor(pid))[1], signal.SIGKILL)
    with pytest.raises(LearnerError, match=r"(?s)Learner 1 died in learn\(\).*FailureConfig"):
        group.foreach_actor(learn, kwargs={"waits": [0]})


@pytest.mark.slow  # waits for its time to pass
def test_a_stopped_learner_is_killed_after_its_time(make):
    group = make(2, timeout_s=6.0)
    # Without a limit, so that both have been started.
    stopped, _ = ray.get([actor.apply.remote(pid) for actor in group.actors().values()])
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(LearnerError, match=r"2 learners, \[0\] gave no answer to learn\(\) in 6"):
        group.foreach_actor(learn)
    with pytest.raises(LearnerError, match="ended by an earlier error"):
        group.foreach_actor(learn)
