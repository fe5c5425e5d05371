"""RLlib's switch for torch.compile: the trunk's layers are compiled, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from rllib_llm.shared.errors import Problems
from tests.algorithms.tiny_runs import grpo
from tests.learners import tiny_learners as tiny


def updated(config):
    """The learner after one update, and that update's metrics."""
    learner = tiny.build(config)
    return learner, tiny.update(learner, tiny.judged(learner, (1, 2, 1, 2, 1, 3)))


@pytest.mark.slow  # compiles
def test_a_compiled_learner_learns_the_same():
    compiled = grpo(minibatch_size=None, num_epochs=1).framework(
        torch_compile_learner=True, torch_compile_learner_dynamo_backend="eager"
    )  # traced as for inductor, which would need a C++ compiler
    learner, metrics = updated(compiled)
    plain, expected = updated(grpo(minibatch_size=None, num_epochs=1))
    layers = [m for m in tiny.module_of(learner).modules()
              if isinstance(m, GradientCheckpointingLayer)]  # fmt: skip
    assert layers and all(layer._compiled_call_impl is not None for layer in layers)
    assert metrics["loss/policy_avg"] == pytest.approx(expected["loss/policy_avg"], abs=1e-6)
    for name, value in tiny.parameters(plain).items():
        torch.testing.assert_close(tiny.parameters(learner)[name], value)


def test_settings_that_compile_nothing_are_refused():
    for setting in ({"torch_compile_worker": True},
                    {"torch_compile_learner_what_to_compile": "complete_update"}):  # fmt: skip
        with pytest.raises(Problems) as caught:
            grpo().update_from_dict(setting).validate()
        assert next(iter(setting)) in str(caught.value)
