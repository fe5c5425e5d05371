"""The loop: the same learning however many samplers and learners there are, and whoever dies."""

from __future__ import annotations

import pytest
import ray
import torch

from rllib_llm.rollouts.errors import BrokenSamplerError
from rllib_llm.shared import columns
from rllib_llm.weights.published import PublishedWeights
from tests.algorithms import tiny_runs as tiny
from tests.engines.test_decode_probe import STATEFUL, spread_out
from tests.engines.tiny_generations import seeded

pytestmark = pytest.mark.usefixtures("ray_session")
ITERATIONS = 3
WEIGHTS_METRICS = [
    "age_seconds", "bytes", "failures/ChecksumError", "failures/GetTimeoutError",
    "failures/ObjectLostError", "failures/RayActorError", "failures/RaySystemError", "gb_per_s",
    "load_seconds", "oldest_version", "publish_seconds", "republished", "skips",
    "transfer_seconds", "version", "versions_behind",
]  # fmt: skip


def run(config, num_iterations=ITERATIONS):
    with tiny.built(config) as algorithm:
        return tiny.train(algorithm, num_iterations), tiny.weights(algorithm)


@pytest.fixture(scope="module")
def undisturbed():
    """Metrics and weights of PPO with the one sampler of the driver's process."""
    return run(exact_ppo())


def exact_ppo():
    """The learner computes the old values: those of a sampler that has the learner's own module, as
    the driver's has, differ in their last bit."""
    return tiny.ppo(off_policy="decoupled", off_policy_weights=None)


def build_mamba():
    """A model whose state our decode loop does not keep."""
    _, tokenizer = tiny.build_model()
    model = seeded("mamba", vocab_size=len(tokenizer), **STATEFUL["mamba"])
    return spread_out(model), tokenizer


@pytest.mark.parametrize("num_env_runners", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_model_that_cannot_be_decoded_is_refused_before_anything_is_sampled(num_env_runners):
    config = tiny.grpo().language_model(model=f"{__name__}.build_mamba")
    config.env_runners(num_env_runners=num_env_runners)
    with pytest.raises(Exception, match="must give the same logits with a cache") as raised:
        config.build_algo()
    assert isinstance(raised.value, (ValueError, BrokenSamplerError))


@pytest.mark.slow  # samplers in processes of their own
def test_two_samplers_learn_the_same_when_one_is_killed():
    """Between two iterations; parts stay as they are cut."""
    undisturbed = run(exact_ppo().env_runners(num_env_runners=2))
    with tiny.built(exact_ppo().env_runners(num_env_runners=2)) as algorithm:
        metrics = tiny.train(algorithm, 1)
        (owned,) = algorithm.env_runner_group.foreach_env_runner(
            lambda runner: (ray.put("gone with its owner"),),
            local_env_runner=False, remote_worker_ids=[1],
        )  # fmt: skip
        ray.kill(algorithm.env_runner_group._worker_manager.actors()[1], no_restart=False)
        metrics += tiny.train(algorithm, 2)
        assert metrics == undisturbed[0]
        tiny.assert_same_weights(tiny.weights(algorithm), undisturbed[1])
        assert_sampled_with_the_newest_weights(algorithm, version=3)
        assert algorithm.verify_weights() == {}
        # The bytes are gone: published again, and nobody samples with others.
        algorithm.rollouts.publish(PublishedWeights(3, ref=owned))
        weights = algorithm.train()["weights"]
        assert weights["failures/OwnerDiedError"] == 5  # attempts of one sampler
        assert (weights["version"], weights["oldest_version"], weights["republished"]) == (4, 3, 1)
        assert [name for name in WEIGHTS_METRICS if name not in weights] == []


class DieOnce:
    """A reward function that ends its process the first time that any process calls it."""

    def __init__(self, marker: str):
        self.marker = marker

    def __call__(self, completions):
        import os

        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return tiny.num_digits(completions)
        os._exit(1)


@pytest.mark.slow  # a sampler that dies
def test_one_sampler_learns_what_none_learns(undisturbed, tmp_path):
    """Also when it dies in the midst of an iteration, and nobody else is there."""
    marker = tmp_path / "died"
    config = exact_ppo().env_runners(num_env_runners=1)
    config.env_config["reward_functions"] = {
        "function": f"{__name__}.DieOnce", "kwargs": {"marker": str(marker)}, "name": "num_digits",
    }  # fmt: skip
    metrics, weights = run(config)
    assert marker.exists()
    assert metrics == undisturbed[0]
    tiny.assert_same_weights(weights, undisturbed[1])


def assert_sampled_with_the_newest_weights(algorithm, version):
    """The next batch names `version`, and its log-probs are those of the learner's weights."""
    batch = sampled(algorithm)
    assert batch.num_rows == 12 and set(batch.versions.tolist()) == {version}
    module = algorithm.learner_group._learner.module["default_policy"].unwrapped()
    with torch.no_grad():
        own = module.forward_train(batch.columns)[columns.LOGPROBS]
    torch.testing.assert_close(batch.columns[columns.SAMPLER_LOGPROBS], own, rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # learners in processes of their own
def test_two_learners_learn_what_one_learns():
    one = tiny.ppo(train_batch_size_per_learner=12, minibatch_size=6, ptx_data=tiny.TEXTS,
                   ptx_coeff=0.1, ptx_batch_size=4)  # fmt: skip
    two = tiny.ppo(train_batch_size_per_learner=6, minibatch_size=3, ptx_data=tiny.TEXTS,
                   ptx_coeff=0.1, ptx_batch_size=2).learners(num_learners=2)  # fmt: skip
    metrics, weights = run(one)
    metrics_of_two, weights_of_two = run(two)
    for by_one, by_two in zip(metrics, metrics_of_two, strict=True):
        assert by_one.keys() == by_two.keys()
        for group, values in by_one.items():
            assert by_two[group] == pytest.approx(values, rel=1e-3, abs=1e-5), group
    # Adam divides small gradients by themselves: round-off may reach a thousandth of a step.
    tiny.assert_same_weights(weights, weights_of_two, rtol=0, atol=3e-5)


def sampled(algorithm):
    """The batch that the next iteration would learn from."""
    state = algorithm.rollouts.state()
    batch = algorithm.rollouts.next()
    algorithm.rollouts.set_state(state | {"weights_version": algorithm.weights_version})
    algorithm.rollouts.publish(algorithm.weights.published)
    return batch


def test_weights_grow_a_version_with_every_iteration():
    with tiny.built(tiny.ppo()) as algorithm:
        for iteration in range(3):
            assert_sampled_with_the_newest_weights(algorithm, iteration)
            result = algorithm.train()
            assert result["weights"]["version"] == iteration + 1
            assert result["weights"]["oldest_version"] == iteration


def test_prompts_are_handed_out_once_per_epoch():
    # 6 prompts, 4 a batch: three iterations are two epochs.
    config = tiny.grpo(train_batch_size_per_learner=12)
    with tiny.built(config) as algorithm:
        seen = []
        for _ in range(3):
            indices = sampled(algorithm).columns[columns.PROMPT_INDEX]
            assert indices.view(-1, 3).eq(indices[::3].unsqueeze(1)).all()  # groups are adjacent
            seen += indices[::3].tolist()
            algorithm.train()
    assert sorted(seen[:6]) == sorted(seen[6:]) == list(range(6))


def fail(completions, prompts):
    raise KeyError("no such judge")


def fail_on_some(completions, prompts):
    return [float("nan") if prompt == "5=" else 1.0 for prompt in prompts]


def wrong_shape(completions):
    return [1.0]


def with_rewards(function):
    config = tiny.ppo()
    config.env_config["reward_functions"] = f"{__name__}.{function.__name__}"
    return config


@pytest.mark.parametrize("function, said", [
    (fail, "no such judge"), (wrong_shape, r"must have shape \[12\]"),
])  # fmt: skip
def test_a_reward_function_that_fails_is_named_with_its_text(function, said):
    with (
        tiny.built(with_rewards(function)) as algorithm,
        pytest.raises((ValueError, BrokenSamplerError), match=said) as caught,
    ):
        algorithm.train()
    assert repr(function.__name__) in str(caught.value)
    assert "prompt '" in str(caught.value) and "completion '" in str(caught.value)


def test_prompts_that_were_not_judged_are_counted_and_others_take_their_place():
    with (
        tiny.built(with_rewards(fail_on_some)) as algorithm,
        pytest.warns(UserWarning, match="reward function 'fail_on_some' failed on completions"),
    ):
        result = algorithm.train()
    # 12 rows are two epochs of 6 prompts, one of which is "5=".
    told = result["rollouts"]
    assert told["groups_trained"] == 12 and told["rejected/unjudged"] >= 2
    assert result["train"]["num_invalid"] == 0
    assert result["objective"]["scores"] == result["train"]["rewards"] == 1.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_stay_on_the_gpu_that_learner_and_samplers_share():
    config = (
        tiny.ppo()
        .learners(num_learners=1, num_gpus_per_learner=0.4)
        .env_runners(num_env_runners=2, num_gpus_per_env_runner=0.2)
        .weights(weights_transport="cuda_ipc")
    )
    with tiny.built(config) as algorithm:
        tiny.train(algorithm, 2)
        weights = algorithm.train()["weights"]
        assert weights["republished"] == 0  # through the store, that would be
        assert (weights["version"], weights["oldest_version"]) == (3, 2)
        assert weights["bytes"] > 0
        assert algorithm.verify_weights() == {}
