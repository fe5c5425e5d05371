"""A loop of one's own: the same steps, awaited."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from rllib_llm.learners.learner_group import LearnerError
from rllib_llm.rollouts.judged_batch import take_rows
from rllib_llm.shared import columns
from tests.algorithms import tiny_runs as tiny

pytestmark = pytest.mark.usefixtures("ray_session")


def one_step():
    """One optimiser step for a batch, so that a batch is the same as its mini-batches."""
    return tiny.grpo(minibatch_size=12, num_epochs=1)


@pytest.fixture(scope="module")
def trained(ray_session):
    """What `train()` learns in three updates of one step each, and the metrics of each."""
    with tiny.built(one_step()) as algorithm:
        return tiny.train(algorithm, 3), tiny.weights(algorithm)


def test_a_loop_of_ones_own_learns_what_train_learns(trained):
    told = []

    async def loop(algorithm):
        for _ in range(3):
            batch = await algorithm.next_batch()
            told.append(await algorithm.submit(batch))

    with tiny.built(one_step()) as algorithm:
        asyncio.run(loop(algorithm))
        assert algorithm.weights_version == 3 and algorithm.position == 12
        tiny.assert_same_weights(tiny.weights(algorithm), trained[1])
    for mine, theirs in zip(told, trained[0], strict=True):
        assert mine["policy"]["entropy_avg"] == theirs["policy"]["entropy_avg"]


def test_a_step_in_three_parts_is_a_step(trained):
    """Up to round-off: `train()` takes the rows in an order of its own."""
    told = []

    async def loop(algorithm):
        for _ in range(3):
            batch = await algorithm.next_batch()
            told.append(await algorithm.forward_backward(batch))
            stepped = await algorithm.optimizer_step()
            assert stepped[""].keys() >= {"lr", "grad_norm"}
            await algorithm.publish_weights()

    with tiny.built(one_step()) as algorithm:
        asyncio.run(loop(algorithm))
        assert algorithm.weights_version == 3 and algorithm.position == 12
        tiny.assert_same_weights(tiny.weights(algorithm), trained[1], rtol=1e-4, atol=1e-7)
    for mine, theirs in zip(told, trained[0], strict=True):
        expected = pytest.approx(theirs["policy"]["entropy_avg"], rel=1e-5)
        assert mine["policy"]["entropy_avg"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("num_learners", [1, 2])
def test_a_step_in_three_parts_is_a_step_of_learners_in_processes_of_their_own(
    trained, num_learners
):
    """Each has the whole batch, and takes its share of the rows."""
    size = 12 // num_learners
    config = one_step().learners(num_learners=num_learners)
    config.training(train_batch_size_per_learner=size, minibatch_size=size)
    with tiny.built(config) as algorithm:
        for _ in range(3):
            batch = algorithm.next_batch().result()
            algorithm.forward_backward(batch)
            with pytest.raises(RuntimeError, match=r"call optimizer_step\(\)"):
                algorithm.submit(batch).result()  # the learners live on
            stepped = algorithm.optimizer_step().result()
            algorithm.publish_weights().result()
        assert stepped[""].keys() >= {"lr", "grad_norm"} and algorithm.position == 12
        tiny.assert_same_weights(tiny.weights(algorithm), trained[1], rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_a_learner_that_hangs_in_a_part_of_a_step_is_not_waited_for():
    config = one_step().learners(num_learners=1).fault_tolerance(learner_timeout_s=20.0)
    with tiny.built(config) as algorithm:
        batch = algorithm.next_batch().result()
        algorithm.forward_backward(batch).result()
        (pid,) = algorithm.learner_group.foreach_learner(lambda learner: os.getpid())
        os.kill(pid.get(), signal.SIGSTOP)
        with pytest.raises(LearnerError, match=r"no answer to forward_backward\(\) in 20 s"):
            algorithm.forward_backward(batch).result()


def test_gradients_of_several_batches_add_up():
    """A batch twice has twice the gradient; the step without one says so."""
    found = []
    for num_times in (1, 2):
        with tiny.built(one_step().training(grad_clip=None)) as algorithm:
            batch = algorithm.next_batch().result()
            for _ in range(num_times):
                algorithm.forward_backward(batch)
            found.append(algorithm.optimizer_step().result()[""]["grad_norm"])
            with pytest.raises(RuntimeError, match=r"call forward_backward\(batch\)"):
                algorithm.optimizer_step().result()
    assert found[1] == pytest.approx(2 * found[0], rel=1e-5)


def test_a_batch_can_be_learnt_from_in_parts():
    """Whole groups: their advantages are their own."""
    with tiny.built(one_step()) as algorithm:
        batch = algorithm.next_batch().result()
        for part in batch.columns[columns.GROUP].unique():
            rows = (batch.columns[columns.GROUP] == part).nonzero().squeeze(1)
            algorithm.forward_backward(take_rows(batch, rows))
        assert algorithm.optimizer_step().result()[""]["grad_norm"] > 0
        algorithm.publish_weights().result()
        assert algorithm.weights_version == 1


def test_calls_are_made_in_order_and_raise_where_they_are_waited_for():
    with tiny.built(tiny.grpo()) as algorithm:
        first = algorithm.next_batch()
        broken = algorithm.submit(None)
        second = algorithm.next_batch()
        assert second.result().num_rows == first.result().num_rows == 12
        assert broken.is_done
        with pytest.raises(AttributeError):
            broken.result()
