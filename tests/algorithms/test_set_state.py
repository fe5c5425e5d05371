"""Weights that were set are those that samplers have, whoever set them and whenever."""

from __future__ import annotations

import pytest
import torch
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm.modules.rl_modules import CausalLMModule
from rllib_llm.shared import columns
from tests.algorithms import tiny_runs as tiny

SAMPLERS = [0, pytest.param(1, marks=pytest.mark.slow)]


def exact_grpo(num_env_runners: int = 0):
    config = tiny.grpo(off_policy="decoupled", off_policy_weights=None)
    return config.env_runners(num_env_runners=num_env_runners)


def assert_samples_with_the_learners_weights(algorithm):
    """The next batch's log-probs are the learner's, up to round-off; those of two models differ
    by 0.1 and more."""
    batch = algorithm.next_batch().result()
    (old,) = algorithm.learner_group.foreach_learner(
        lambda learner, rows: learner.module[DEFAULT_MODULE_ID].unwrapped().forward_train(
            rows
        )[columns.LOGPROBS].detach(), rows=batch.columns,
    )  # fmt: skip
    mask, sampled = columns.sampled_mask(batch.columns), batch.columns[columns.SAMPLER_LOGPROBS]
    torch.testing.assert_close(sampled[mask], old.get()[mask], rtol=1e-4, atol=1e-4)


def other_weights(algorithm):
    """Weights far from the algorithm's."""
    state = algorithm.learner_group.get_weights()
    generator = torch.Generator().manual_seed(0)
    return {
        module: {
            name: tensor + torch.randn(tensor.shape, generator=generator)
            if tensor.is_floating_point() else tensor
            for name, tensor in each.items()
        }
        for module, each in state.items()
    }  # fmt: skip


@pytest.mark.parametrize("num_env_runners", SAMPLERS)
@pytest.mark.parametrize("setter", ["set_state", "set_weights", "restore_from_path"])
def test_the_next_batch_comes_from_weights_that_were_set(num_env_runners, setter, tmp_path):
    with tiny.built(exact_grpo(num_env_runners)) as algorithm:
        algorithm.train()
        group, weights = algorithm.learner_group, other_weights(algorithm)
        if setter == "set_state":
            group.set_state({"learner": {"rl_module": weights}})
        elif setter == "set_weights":
            group.set_weights(weights)
        else:
            saved = group.save_to_path(tmp_path / "saved")
            group.set_weights(weights)
            group.restore_from_path(saved)
        assert_samples_with_the_learners_weights(algorithm)


@pytest.mark.parametrize("num_env_runners", SAMPLERS)
def test_a_state_in_memory_goes_on_as_it_was(num_env_runners):
    with tiny.built(exact_grpo(num_env_runners)) as algorithm:
        algorithm.train()
        state = algorithm.get_state()
        expected = tiny.train(algorithm, 2)
        algorithm.set_state(state)
        assert tiny.train(algorithm, 2) == expected


@pytest.mark.parametrize("kind", ["sft", "reward_model", "dpo"])
def test_stages_without_samplers_take_a_state_and_give_their_module(kind):
    with tiny.built(getattr(tiny, kind)()) as algorithm:
        algorithm.train()
        state = algorithm.get_state()
        expected = tiny.train(algorithm, 2)
        algorithm.set_state(state)
        assert tiny.train(algorithm, 2) == expected
        own = algorithm.learner_group.get_weights()[DEFAULT_MODULE_ID]
        tiny.assert_same_weights(algorithm.get_module().get_state(), own)


@pytest.mark.slow
def test_the_module_of_a_learner_elsewhere_is_a_copy():
    with tiny.built(tiny.sft().learners(num_learners=1)) as algorithm:
        assert isinstance(module := algorithm.get_module(), CausalLMModule)
        own = algorithm.learner_group.get_weights()[DEFAULT_MODULE_ID]
        tiny.assert_same_weights(module.get_state(), own)


class UsesAll(RLlibCallback):
    """A callback that uses the algorithm as soon as it is given it."""

    saved: str
    restored: str

    def on_algorithm_init(self, *, algorithm, **kwargs):
        algorithm.evaluate()
        algorithm.set_state(algorithm.get_state())
        type(self).saved = algorithm.save_to_path()
        algorithm.restore_from_path(self.restored)


@pytest.mark.parametrize(
    "make", [exact_grpo, lambda: tiny.sft(eval_data=tiny.TEXTS)], ids=["grpo", "sft"]
)
def test_on_algorithm_init_can_restore_evaluate_and_save(make, tmp_path):
    with tiny.built(make()) as algorithm:
        algorithm.train()
        UsesAll.restored = algorithm.save_to_path(tmp_path / "one")
        expected = tiny.train(algorithm, 1)
    config = make().evaluation(evaluation_interval=9, evaluation_duration=6).callbacks(UsesAll)
    with tiny.built(config) as algorithm:
        assert tiny.train(algorithm, 1) == expected
        assert algorithm.iteration == 2
