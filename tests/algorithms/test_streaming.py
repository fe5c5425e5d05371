"""Samplers ahead of the learner: the same for any number of them, whoever dies, and resumable."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
import ray
import torch

from rllib_llm.shared import columns
from tests.algorithms import tiny_runs as tiny

pytestmark = pytest.mark.usefixtures("ray_session")


def streaming(num_samplers: int = 0, *, max_staleness: int = 1, **settings):
    config = tiny.grpo(off_policy="bypass").env_runners(num_env_runners=num_samplers)
    return config.streaming(max_staleness=max_staleness, **settings)


def samplers(algorithm):
    """Handles of the remote samplers, by worker id."""
    return algorithm.env_runner_group._worker_manager.actors()


def sampler_pid(algorithm, worker=1):
    return ray.get(samplers(algorithm)[worker].apply.remote(lambda runner: os.getpid()))


def assert_accounted(results):
    """Every token that arrived was learnt from, rejected, or is still there."""
    for result in results:
        told = result["rollouts"]
        assert told["tokens_generated"] == (
            told["tokens_trained"] + told["tokens_rejected"] + told["tokens_carried"]
        )


def learn(config, num_iterations=4, disturb=None):
    """What was learnt, the weights and the ledger's words of each iteration. `disturb`: called
    with the algorithm and the iteration before each."""
    learnt, told = [], []
    with tiny.built(config) as algorithm:
        for i in range(num_iterations):
            if disturb is not None:
                disturb(algorithm, i)
            result = algorithm.train()
            learnt.append(tiny.learnt(result))
            told.append(result["rollouts"])
        weights = tiny.weights(algorithm)
    assert_accounted([{"rollouts": each} for each in told])
    return learnt, weights, told


@pytest.fixture(scope="module")
def undisturbed():
    """Four iterations in one process, one update behind."""
    return learn(streaming())


def test_the_first_batch_is_fresh_and_all_others_one_update_old(undisturbed):
    metrics, _, told = undisturbed
    assert [m["train"]["staleness"] for m in metrics] == [0.0, 1.0, 1.0, 1.0]
    assert [t["age_max"] for t in told] == [0.0, 1.0, 1.0, 1.0]
    assert [t["groups_trained"] for t in told] == [4, 8, 12, 16]


@pytest.mark.slow  # samplers in processes of their own
@pytest.mark.parametrize("num_samplers", [1, 3])
def test_any_number_of_samplers_learns_the_same_bit_for_bit(undisturbed, num_samplers):
    metrics, weights, _ = learn(streaming(num_samplers))
    assert metrics == undisturbed[0]
    tiny.assert_same_weights(weights, undisturbed[1])


class SlowJudge:
    """Takes a while over every other batch of completions, another one in each process."""

    def __init__(self):
        self.num_calls = os.getpid() % 2

    def __call__(self, completions):
        self.num_calls += 1
        if self.num_calls % 2:
            time.sleep(0.3)
        return tiny.num_digits(completions)


@pytest.mark.slow
def test_delays_and_deaths_change_nothing_in_lockstep(undisturbed):
    """Samplers of unequal speed; one is killed, then the ledger."""
    config = streaming(2)
    config.env_config["reward_functions"] = {
        "function": f"{__name__}.SlowJudge", "kwargs": {}, "name": "num_digits",
    }  # fmt: skip

    def disturb(algorithm, i):
        if i == 1:
            os.kill(sampler_pid(algorithm), signal.SIGKILL)
        if i == 2:
            ray.kill(algorithm.rollouts._ledger.actor, no_restart=False)

    metrics, weights, _ = learn(config, disturb=disturb)
    tiny.assert_same_weights(weights, undisturbed[1])
    assert [m["objective"] for m in metrics] == [m["objective"] for m in undisturbed[0]]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["sampler", "ledger"])
def test_one_that_is_stopped_is_killed_and_nothing_is_learnt_otherwise(undisturbed, victim):
    config = streaming(2).fault_tolerance(sampler_timeout_s=5.0)

    def disturb(algorithm, i):
        if i == 1:
            ledger = algorithm.rollouts.look()["pid"]
            os.kill(ledger if victim == "ledger" else sampler_pid(algorithm), signal.SIGSTOP)

    _, weights, _ = learn(config, disturb=disturb)
    tiny.assert_same_weights(weights, undisturbed[1])


@pytest.mark.parametrize("num_samplers, others", [
    (0, 0), pytest.param(0, 2, marks=pytest.mark.slow), pytest.param(2, 0, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_restored_run_goes_on_as_if_nothing_had_happened(
    undisturbed, tmp_path, num_samplers, others
):
    with tiny.built(streaming(num_samplers)) as algorithm:
        metrics = tiny.train(algorithm, 2)
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        tiny.train(algorithm, 1)
        algorithm.restore_from_path(path)
        assert metrics + tiny.train(algorithm, 2) == undisturbed[0]
        tiny.assert_same_weights(tiny.weights(algorithm), undisturbed[1])
    with tiny.built(streaming(others)) as other:
        other.restore_from_path(path)
        assert metrics + tiny.train(other, 2) == undisturbed[0]
        tiny.assert_same_weights(tiny.weights(other), undisturbed[1])


def test_evaluation_does_not_stop_a_stream_nor_change_it(undisturbed):
    """Complaint: no evaluation in asynchronous training, or one that stalls it (slime; prime-rl
    #1802)."""
    config = streaming().evaluation(evaluation_interval=2, evaluation_duration=4)
    with tiny.built(config) as algorithm:
        results = [algorithm.train() for _ in range(4)]
        tiny.assert_same_weights(tiny.weights(algorithm), undisturbed[1])
    assert [tiny.learnt(result) for result in results] == undisturbed[0]
    assert all("eval" in result for result in results)  # the first is before training


def test_filters_and_a_surplus_change_what_is_admitted_and_nothing_else():
    """They made a stream of a synchronous run, with a ledger in an actor and other batches."""
    for config in (
        streaming(2, max_staleness=0, filters=["distinct"]),
        streaming(2, max_staleness=0, oversample=1.5),
        tiny.grpo().environments(sums={"env": "Arithmetic", "filters": ["distinct"]}),
    ):
        assert not config.streams
    for config in (streaming(2), streaming(2, max_staleness=0, schedule="free")):
        assert config.streams and config.stream_rules().num_parts is None
    rules = streaming(2, max_staleness=0, filters=["distinct"], oversample=1.5).stream_rules()
    assert (rules.num_parts, rules.num_extra) == (2, 2)


def test_without_staleness_the_ledger_is_no_actor():
    with tiny.built(tiny.grpo()) as algorithm:
        told = algorithm.train()["rollouts"]
        assert type(algorithm.rollouts._ledger).__name__ == "Ledger"
    assert_accounted([{"rollouts": told}])
    assert told["groups_trained"] == 4 and told["age_max"] == 0.0


def test_a_filter_that_lets_everything_pass_changes_nothing():
    with tiny.built(tiny.grpo()) as algorithm:
        expected = tiny.train(algorithm, 3), tiny.weights(algorithm)
    metrics, weights, _ = learn(streaming(max_staleness=0, filters=[f"{__name__}.all_pass"]), 3)
    assert metrics == expected[0]
    tiny.assert_same_weights(weights, expected[1])


def all_pass(group):
    return True, ""


@pytest.mark.parametrize("num_samplers", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_free_run_trains_every_prompt_once_and_not_older_than_allowed(num_samplers):
    """Complaint: a hang at the end of an epoch (NeMo #2899). There are six prompts; the twenty
    groups go through them three times and on."""
    results, batches = [], []
    with tiny.built(streaming(num_samplers, schedule="free", max_staleness=2)) as algorithm:
        source = algorithm.rollouts
        taken = source.next
        source.next = lambda: batches.append(taken()) or batches[-1]
        for _ in range(5):
            results.append(algorithm.train())
    assert_accounted(results)
    assert max(r["rollouts"]["age_max"] for r in results) <= 2
    groups = torch.cat([batch.columns[columns.GROUP] for batch in batches])
    assert groups[::3].tolist() == list(range(20))  # strict order: the window is one group


@pytest.mark.slow  # three runs
def test_a_free_run_that_is_restored_loses_nothing_and_trains_nothing_twice(tmp_path):
    """And its sampler holds what was published, whenever it is asked."""
    with tiny.built(streaming(1, schedule="free", max_staleness=1)) as algorithm:
        results = [algorithm.train() for _ in range(2)]
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        results.append(algorithm.train())
        assert algorithm.verify_weights() == {}
        algorithm.restore_from_path(path)
        for first in (8, 12):
            batch = algorithm.rollouts.next()
            assert batch.columns[columns.GROUP][::3].tolist() == list(range(first, first + 4))
            assert algorithm.position == first + 4
            algorithm.submit(batch).result()
    assert_accounted(results)
    assert max(result["rollouts"]["age_max"] for result in results) <= 1


@pytest.mark.parametrize("oversample, window, expected", [(1.0, 1, 1), (1.0, 3, 3), (1.25, 1, 5),
                                                          (1.5, 9, 9)])  # fmt: skip
def test_of_the_groups_begun_for_a_batch_the_first_that_are_finished_make_it(
    oversample, window, expected
):
    """Four of a batch, and the surplus: any of them may overtake the others. In lockstep time
    decides nothing."""
    rules = streaming(schedule="free", oversample=oversample, window=window).stream_rules()
    assert rules.window == expected
    assert streaming(oversample=oversample).stream_rules().window == 1


def has_even_best(group):
    """Refuses about half the groups, by what was sampled alone."""
    return int(group.scores.max()) % 2 == 0, "odd"


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"max_staleness": 0},
                                      {"max_staleness": 0, "oversample": 1.5}])  # fmt: skip
def test_filters_are_deterministic_in_lockstep(settings):
    """Whoever samples which part, and where groups are carried over to the next update."""
    filters = [f"{__name__}.has_even_best"]
    learnt = [
        learn(streaming(n, filters=filters, **settings).sampling(sampling_parts=2), 3)
        for n in (0, 2)
    ]
    assert learnt[0][0] == learnt[1][0]
    tiny.assert_same_weights(learnt[0][1], learnt[1][1])


@pytest.mark.slow
def test_other_prompts_take_the_place_of_those_that_filters_refuse():
    told = learn(streaming(filters=[f"{__name__}.has_even_best"]), 3)[2][-1]
    assert told["groups_trained"] == 12 and told["rejected/odd"] >= 1
    assert told["groups_rejected"] == told["rejected/odd"]


def no_answer_to_five(prompts, completions):
    if any(prompt.startswith("5") for prompt in prompts):
        raise KeyError("no answer")
    return tiny.num_digits(completions)


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_one_prompt_that_cannot_be_judged_ends_no_run(schedule):
    config = streaming(schedule=schedule)
    config.env_config["reward_functions"] = f"{__name__}.no_answer_to_five"
    told = learn(config, 3)[2][-1]
    assert told["groups_trained"] == 12 and told["rejected/unjudged"] >= 2


def test_two_batches_before_publishing_are_two_batches():
    with tiny.built(streaming()) as algorithm:
        one, two = algorithm.next_batch().result(), algorithm.next_batch().result()
        groups = [batch.columns[columns.GROUP][::3].tolist() for batch in (one, two)]
        assert groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
        algorithm.forward_backward(one).result()
        algorithm.forward_backward(two).result()
        algorithm.optimizer_step().result()
        algorithm.publish_weights().result()
        assert algorithm.rollouts.metrics()["rollouts"]["groups_trained"] == 8


def test_where_no_group_has_spread_the_run_ends_and_says_so():
    config = streaming(max_staleness=0, filters=["reward_spread"], max_resampling=2)
    config.env_config["reward_functions"] = f"{__name__}.always_one"
    with tiny.built(config) as algorithm, pytest.raises(
        # Eight are allowed; with the ninth the run ends, whatever else is finished by then.
        RuntimeError, match=r"9 groups in a row were rejected, and at most 8 may .*9 no_spread"
    ):  # fmt: skip
        algorithm.train()


def always_one(completions):
    return [1.0] * len(completions)


class FailLater:
    """Judges one batch and no other."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, completions):
        self.num_calls += 1
        if self.num_calls > 4:
            raise KeyError("no judge any more")
        return tiny.num_digits(completions)


@pytest.mark.slow
def test_a_failure_ahead_is_raised_where_its_batch_is_wanted():
    config = streaming(1)
    config.env_config["reward_functions"] = {"function": f"{__name__}.FailLater", "kwargs": {},
                                             "name": "later"}  # fmt: skip
    with tiny.built(config) as algorithm, pytest.raises(RuntimeError, match="no judge any more"):
        for _ in range(4):
            algorithm.train()


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="pipeline_depth must .* called 'max_staleness' here"):
        tiny.grpo().sampling(pipeline_depth=1)
    for name, value in (("window", 4), ("on_stale", "drop")):
        with pytest.warns(UserWarning, match=f"{name}={value!r} has no effect with schedule='lock"):
            config = streaming(**{name: value})
            config.validate()
        rules = config.stream_rules()
        assert (rules.window, rules.on_stale) == (1, "train")
    with pytest.raises(ValueError, match=r"filters='spread' must be among \['distinct'"):
        streaming(filters=["spread"]).validate()
    with pytest.raises(ValueError, match="off_policy=None must be set with max_staleness=1"):
        tiny.grpo().streaming(max_staleness=1).validate()
    with pytest.raises(ValueError, match="off_policy=None must be set with oversample=1.25"):
        tiny.grpo().streaming(oversample=1.25).validate()
    with pytest.raises(ValueError, match="off_policy=None must be set with weights_publish_every"):
        tiny.grpo().weights(publish_every=2).validate()
    # Nothing is carried over, so all is fresh.
    assert not tiny.grpo().streaming(oversample=1.25, oversample_keep="best_score").problems()
    with pytest.warns(UserWarning, match="groups_per_lease=2 has no effect with max_staleness=0"):
        streaming(max_staleness=0, groups_per_lease=2).validate()
    with contextlib.suppress(UserWarning):
        streaming(schedule="free", window=4, on_stale="drop").validate()
