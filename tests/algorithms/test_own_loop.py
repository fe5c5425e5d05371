"""A loop of one's own: the same steps, awaited."""

from __future__ import annotations

import asyncio

import pytest

from tests.algorithms import tiny_runs as tiny

pytestmark = pytest.mark.usefixtures("ray_session")


def test_a_loop_of_ones_own_learns_what_train_learns():
    with tiny.built(tiny.grpo()) as algorithm:
        tiny.train(algorithm, 3)
        expected = tiny.weights(algorithm)

    async def loop(algorithm):
        for _ in range(3):
            batch = await algorithm.next_batch()
            metrics = await algorithm.submit(batch)
            assert "policy" in metrics

    with tiny.built(tiny.grpo()) as algorithm:
        asyncio.run(loop(algorithm))
        assert algorithm.weights_version == 3 and algorithm.position == 12
        tiny.assert_same_weights(tiny.weights(algorithm), expected)


def test_calls_are_made_in_order_and_raise_where_they_are_waited_for():
    with tiny.built(tiny.grpo()) as algorithm:
        first = algorithm.next_batch()
        broken = algorithm.submit(None)
        second = algorithm.next_batch()
        assert second.result().num_rows == first.result().num_rows == 12
        assert broken.is_done
        with pytest.raises(AttributeError):
            broken.result()
