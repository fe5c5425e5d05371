"""Processes that are killed or stopped: the same is learnt, or the run says what it lost."""

from __future__ import annotations

import contextlib
import logging
import os
import signal

import pytest
import ray
import torch

from rllib_llm.learners.learner_group import LearnerError
from rllib_llm.rollouts.errors import BrokenSamplerError, NoSamplersError
from tests.algorithms import tiny_runs as tiny

pytestmark = pytest.mark.usefixtures("ray_session")


def samplers(group):
    """Handles of the remote samplers, by worker id."""
    return group._worker_manager.actors()


def sampler_pid(group, worker=1):
    return ray.get(samplers(group)[worker].apply.remote(lambda runner: os.getpid()))


def learner_pid(algorithm):
    (result,) = algorithm.learner_group.foreach_learner(lambda learner: os.getpid())
    return result.get()


@contextlib.contextmanager
def errors_logged_by(name):
    """The messages of errors that a logger has in the meantime, as a list that grows."""
    messages = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger(name).removeHandler(handler)


@pytest.mark.slow  # waits for its time to pass
def test_a_stopped_sampler_is_killed_and_nothing_is_learnt_otherwise():
    config = tiny.grpo().env_runners(num_env_runners=2).fault_tolerance(sampler_timeout_s=5.0)
    with tiny.built(config.copy(copy_frozen=False)) as algorithm:
        undisturbed = tiny.train(algorithm, 3), tiny.weights(algorithm)
    with tiny.built(config) as algorithm:
        metrics = tiny.train(algorithm, 1)
        os.kill(sampler_pid(algorithm.env_runner_group), signal.SIGSTOP)
        metrics += tiny.train(algorithm, 2)
        faults = algorithm.faults.metrics()
        assert metrics == undisturbed[0]
        tiny.assert_same_weights(tiny.weights(algorithm), undisturbed[1])
    assert faults["samplers_hung"] >= 1 and faults["requests_retried"] >= 1
    assert faults["seconds_lost"] >= 5.0


@pytest.mark.slow  # a learner in a process of its own
def test_a_killed_learner_ends_train_and_the_run_goes_on_from_its_checkpoint(tmp_path):
    config = tiny.grpo().learners(num_learners=1)
    with tiny.built(config) as algorithm:
        uninterrupted = tiny.train(algorithm, 2)
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        uninterrupted += tiny.train(algorithm, 1)
        os.kill(learner_pid(algorithm), signal.SIGKILL)
        with pytest.raises(LearnerError, match=r"(?s)Learner 0 died in .*FailureConfig"):
            algorithm.train()
    with tiny.built(tiny.grpo()) as algorithm:
        algorithm.restore_from_path(path)
        assert tiny.train(algorithm, 1) == uninterrupted[2:]


def raise_or_wait(learner):
    if learner.rank == 0:
        raise ValueError("the first has no loss")
    learner.all_reduce(torch.zeros(1))  # which the first never comes to


@pytest.mark.slow  # learners in processes of their own
def test_an_exception_in_one_of_two_learners_ends_both():
    config = tiny.sft(train_batch_size_per_learner=3).learners(num_learners=2)
    with tiny.built(config) as algorithm:
        with pytest.raises(ValueError, match="the first has no loss"):
            algorithm.learner_group.foreach_learner(raise_or_wait)
        with pytest.raises(LearnerError, match="ended by an earlier error"):
            algorithm.train()


@pytest.mark.slow  # waits for a sampler that never comes
def test_an_evaluation_that_nobody_makes_has_no_results_and_the_third_ends_the_run():
    config = tiny.grpo().evaluation(
        evaluation_interval=1, evaluation_duration=3, evaluation_num_env_runners=1
    )
    with (
        tiny.built(config) as algorithm,
        errors_logged_by("ray.rllib.utils.actor_manager") as errors,
    ):
        assert algorithm.train()["eval"]["iteration"] == 1
        group = algorithm.eval_env_runner_group
        ray.kill(samplers(group)[1], no_restart=True)
        algorithm._pools[group].start_limit = 0.5
        for num_skipped in (1, 2):
            result = algorithm.train()
            assert result["faults"]["evaluations_skipped"] == num_skipped
            assert "eval" not in result
            assert "env_runners" not in result.get("evaluation", {})
        with pytest.raises(NoSamplersError, match="none came back in 0 s"):
            algorithm.train()
    # That it died and that its part failed, not each time that it is asked whether it lives.
    assert len(errors) <= 2, errors


class Judge:
    """A reward function whose file is missing."""

    def __init__(self):
        raise FileNotFoundError("no judge on this machine")


@pytest.mark.slow  # waits for a sampler that never comes
def test_a_sampler_that_cannot_be_built_says_why():
    config = tiny.grpo().env_runners(num_env_runners=1)
    judge = {"reward_functions": [{"function": f"{__name__}.Judge", "kwargs": {}}]}
    with pytest.raises(BrokenSamplerError, match="(?s)Sampler 1 cannot be built.*no judge on this"):
        config.environment(env_config={**config.env_config, **judge}).build_algo()


@pytest.mark.parametrize("name", ["sampler_timeout_s", "learner_timeout_s"])
def test_limits_are_checked(name):
    config = tiny.grpo().env_runners(num_env_runners=1).learners(num_learners=1)
    for value in (3, None, "auto"):
        config.fault_tolerance(**{name: value}).validate()
    for value in (0, "long", True):
        with pytest.raises(ValueError, match=f"{name}={value!r} must be a number of seconds"):
            config.fault_tolerance(**{name: value}).validate()
