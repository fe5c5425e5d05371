"""A GPU whose memory does not suffice, emulated: smaller micro-batches, and the same update."""

from __future__ import annotations

import pytest
import torch

from tests.algorithms.tiny_runs import TEXTS, assert_same_weights, grpo, ppo
from tests.crossed import crossed
from tests.learners import tiny_learners as tiny


class LittleMemory:
    """Passes over more than `rows` rows fail: when gradients of some layers are added already
    (`late`), or before."""

    def __init__(self, learner, rows: int, *, late: bool) -> None:
        self.rows, self.late, self.num_failed = rows, late, 0
        self.inner, learner.forward = learner.forward, self.forward
        self.embedding = next(tiny.module_of(learner).parameters())  # its gradient comes last

    def fail(self) -> None:
        self.num_failed += 1
        raise torch.OutOfMemoryError("CUDA out of memory (emulated).")

    def forward(self, batch, **options):
        if len(next(iter(batch.values()))) > self.rows:
            if not (self.late and torch.is_grad_enabled()):
                self.fail()

            def fail(gradient):
                hook.remove()
                self.fail()

            hook = self.embedding.register_hook(fail)
        return self.inner(batch, **options)


def config_of(name: str):
    if name == "grpo":
        return grpo(minibatch_size=None, num_epochs=1)
    texts = {"ptx_data": TEXTS, "ptx_coeff": 0.5, "ptx_batch_size": 2}
    return ppo(minibatch_size=None, num_epochs=1, **texts)


@crossed(late=[False, True], name=["grpo", "ppo"])
def test_the_update_is_made_anew_with_fewer_rows_at_once(name, late):
    enough, little = (tiny.build(config_of(name)) for _ in range(2))
    batch = tiny.judged(enough)
    memory = LittleMemory(little, 2, late=late)
    expected = tiny.update(enough, batch)
    with pytest.warns(UserWarning, match="6 rows at once do not fit.*cut into 2 from now on"):
        found = tiny.update(little, batch)
    assert memory.num_failed == 2  # of 6 rows and of 3
    assert_same_weights(
        tiny.first_gradients(enough), tiny.first_gradients(little), rtol=1e-4, atol=1e-6
    )
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)


def test_a_row_that_is_too_much_is_told():
    learner = tiny.build(config_of("grpo"))
    batch = tiny.judged(learner)
    LittleMemory(learner, 0, late=False)
    with (
        pytest.warns(UserWarning, match="2 rows at once do not fit"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        tiny.update(learner, batch)
