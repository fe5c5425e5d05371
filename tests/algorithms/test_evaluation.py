"""Held-out prompts: before training and in between, greedy or sampled, without a trace in it."""

from __future__ import annotations

import json

import pytest
import torch

from rllib_llm.algorithms.evaluation import held_out_metrics
from rllib_llm.rollouts.judged_batch import JudgedBatch
from rllib_llm.shared import columns
from rllib_llm.shared.remote import ServerError
from rllib_llm.weights.loading import can_map_read_only
from tests.algorithms import tiny_runs as tiny
from tests.rollouts.tiny_samplers import Counted, how_it_got_weights
from tests.scripted_server import serving

pytestmark = pytest.mark.usefixtures("ray_session")


def evaluated(config, **settings):
    defaults = {"evaluation_interval": 1, "evaluation_duration": 6,
                "evaluation_config": {"explore": False}}  # fmt: skip
    return config.evaluation(**{**defaults, **settings})


def samples(algorithm, split="eval"):
    path = algorithm.samples.path
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["split"] == split]


@pytest.mark.parametrize("config", [
    pytest.param(tiny.ppo, marks=pytest.mark.slow), tiny.grpo
])  # fmt: skip
def test_evaluation_leaves_training_untouched(config):
    with tiny.built(config()) as algorithm:
        metrics, weights = tiny.train(algorithm, 3), tiny.weights(algorithm)
    with tiny.built(evaluated(config())) as algorithm:
        assert tiny.train(algorithm, 3) == metrics
        tiny.assert_same_weights(tiny.weights(algorithm), weights)


def test_before_training_and_after_every_second_iteration():
    with tiny.built(evaluated(tiny.ppo(), evaluation_interval=2)) as algorithm:
        found = [algorithm.train()["eval"]["iteration"] for _ in range(4)]
        rows = samples(algorithm)
    # The latest results stay in sight until the next.
    assert found == [0, 2, 2, 4]
    assert [row["iteration"] for row in rows] == [0] * 6 + [2] * 6 + [4] * 6


def test_the_same_prompts_and_the_same_noise_every_time():
    config = evaluated(tiny.ppo(lr=0.0), evaluation_config={"explore": True})
    with tiny.built(config) as algorithm:
        results = [algorithm.train()["eval"] for _ in range(2)]
        rows = samples(algorithm)
    assert {**results[0], "iteration": 0} == {**results[1], "iteration": 0}
    first, second, third = rows[:6], rows[6:12], rows[12:]
    for one, two, three in zip(first, second, third, strict=True):
        assert {**one, "iteration": 0} == {**two, "iteration": 0} == {**three, "iteration": 0}
    assert {row["prompt"] for row in rows} == {row["prompt"] for row in tiny.EVAL_PROMPTS}


def test_a_server_that_is_down_costs_evaluations_and_the_third_ends_the_run():
    with serving(lambda path, body: (200, {}, {})) as server:
        settings = {"base_url": server.base_url, "served_model": "m", "max_attempts": 1}
    config = evaluated(
        tiny.grpo(),
        evaluation_interval=2,
        evaluation_config={"engine": "openai", "engine_settings": settings},
    )
    with tiny.built(config) as algorithm:
        results = [algorithm.train() for _ in range(3)]
        # Before training and after iteration 2; the next is due after iteration 4.
        assert [result["faults"]["evaluations_skipped"] for result in results] == [1, 2, 2]
        assert not any("eval" in result for result in results)
        with pytest.raises(ServerError, match=f"{server.base_url}/completions must answer"):
            algorithm.train()


@pytest.mark.parametrize("explore", [pytest.param(False, marks=pytest.mark.slow), True])
def test_greedy_or_sampled(explore):
    config = evaluated(tiny.grpo(), evaluation_duration=9, evaluation_config={"explore": explore})
    config.sampling(num_logged_samples=9)
    with tiny.built(config) as algorithm:
        algorithm.train()
        rows = samples(algorithm)[:9]
    by_prompt = {}
    for row in rows:
        by_prompt.setdefault(row["prompt"], set()).add(row["completion"])
    assert len(by_prompt) == 3
    # Three completions of a prompt are all alike only if none is drawn at random.
    assert all((len(texts) == 1) != explore for texts in by_prompt.values())


def test_evaluation_is_greedy_unless_it_is_told_to_sample():
    """One completion of each prompt then: the others would be copies."""
    assert not evaluated(tiny.grpo(), evaluation_config=None).get_evaluation_config_object().explore
    config = evaluated(tiny.grpo(), evaluation_config={"temperature": 0.5}, evaluation_duration=3)
    config.sampling(num_logged_samples=9)
    with tiny.built(config) as algorithm:
        results = [algorithm.train()["eval"] for _ in range(2)]
        rows = samples(algorithm)
    assert len(rows) == 3 * 3  # before training and after both iterations
    assert {row["prompt"] for row in rows[:3]} == {row["prompt"] for row in tiny.EVAL_PROMPTS}
    assert [result["iteration"] for result in results] == [1, 2]
    sampled = evaluated(tiny.grpo(), evaluation_config={"explore": True})
    assert sampled.get_evaluation_config_object().explore


def test_further_environments_are_reported_by_name():
    """One with other prompts, one that is another environment, with settings of its own."""
    envs = {
        "easy": {"env_config": {"eval_prompts": [{"prompt": "1+1="}]}, "evaluation_duration": 1},
        "sums": {
            "env": "rllib_llm/Arithmetic-v0", "env_config": {"num_problems": 40},
            "explore": True, "num_completions": 4, "evaluation_duration": 8,
            "pass_at": [1, 4], "pass_on": "correct",
        },
    }  # fmt: skip
    config = evaluated(tiny.grpo()).sampling(eval_envs=envs, num_logged_samples=9)
    with tiny.built(config) as algorithm:
        result = algorithm.train()["eval"]
        rows = [samples(algorithm, f"eval/{name}")[:9] for name in ("easy", "sums")]
    with tiny.built(evaluated(tiny.grpo())) as algorithm:
        alone = algorithm.train()["eval"]
    assert {name: value for name, value in result.items() if "/" not in name} == alone
    assert {"easy/scores", "easy/output_length", "sums/correct_rewards", "sums/pass@4",
            "sums/pass^4", "sums/pass@1_low"} <= set(result)  # fmt: skip
    assert not any(name.startswith("easy/pass") for name in result)
    assert [row["prompt"] for row in rows[0][:2]] == ["1+1="] * 2  # before training, and after
    assert len({row["prompt"] for row in rows[1][:8]}) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluation_interval": None}, "left out without evaluation_interval"),
        ({"eval_envs": {"a/b": {}}}, "results are reported as eval/<name>/<metric>"),
        ({"eval_envs": {"a": {"env_confg": {}}}}, "env_confg"),
    ],
)
def test_further_environments_that_cannot_be_are_refused(settings, message):
    config = evaluated(tiny.grpo(), evaluation_interval=settings.pop("evaluation_interval", 1))
    config.sampling(eval_envs={"a": {}, **settings.get("eval_envs", {})})
    with pytest.raises(ValueError, match=message):
        config.validate()


@pytest.mark.slow  # a sampler in a process of its own
def test_an_evaluation_sends_no_weights_but_the_published_ones():
    config = evaluated(tiny.grpo(), evaluation_num_env_runners=1)
    config.env_runner_cls = Counted
    with tiny.built(config) as algorithm:
        algorithm.train()
        algorithm.evaluate()
        group = algorithm.eval_env_runner_group
        (found,) = group.foreach_env_runner(how_it_got_weights, local_env_runner=False)
    assert found == (0, can_map_read_only(), 1)


def test_an_algorithm_without_evaluation_samplers_says_so():
    with (
        tiny.built(tiny.grpo()) as algorithm,
        pytest.raises(ValueError, match="evaluation_interval=None must be at least 1"),
    ):
        algorithm.evaluate()


def test_callbacks_of_an_evaluation():
    heard = []
    config = evaluated(tiny.ppo()).callbacks(
        on_evaluate_start=lambda **_: heard.append("start"),
        on_evaluate_end=lambda evaluation_metrics, **_: heard.append(sorted(evaluation_metrics)),
    )
    with tiny.built(config) as algorithm:
        result = algorithm.evaluate()
    assert heard == ["start", ["env_runners"]]
    assert result["env_runners"]["num_episodes"] == 6


def test_rows_of_the_samples_file():
    config = evaluated(tiny.ppo()).sampling(log_samples_every=2, num_logged_samples=4)
    with tiny.built(config) as algorithm:
        results = [algorithm.train() for _ in range(3)]
        held_out, train = samples(algorithm), samples(algorithm, "train")
    assert [row["iteration"] for row in train] == [1] * 4 + [2] * 4 + [3] * 4
    assert [row["iteration"] for row in held_out] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    for row in held_out + train:
        assert row.keys() == {
            "iteration", "split", "prompt_index", "prompt", "completion", "score", "num_digits",
            "question",
        }  # fmt: skip
        assert row["score"] == row["num_digits"] == tiny.num_digits([row["completion"]])[0]
    for row in held_out:
        assert tiny.EVAL_PROMPTS[row["prompt_index"]]["prompt"] == row["prompt"]
    for row in train:
        assert tiny.PROMPTS[row["prompt_index"]]["prompt"] == row["prompt"]
    assert results[0]["eval"]["scores"] == results[0]["eval"]["num_digits_rewards"]


def test_rllib_s_own_place_has_the_results_too():
    with tiny.built(evaluated(tiny.ppo())) as algorithm:
        result = algorithm.train()
    runners = result["evaluation"]["env_runners"]
    assert runners["episode_return_mean"] == pytest.approx(result["eval"]["rewards"])
    assert runners["num_episodes"] == 6


@pytest.mark.slow  # a sampler in a process of its own
def test_a_remote_evaluation_sampler_sees_the_learner_s_weights():
    with tiny.built(evaluated(tiny.ppo(lr=0.05))) as algorithm:
        local = [algorithm.train()["eval"] for _ in range(2)]
    config = evaluated(tiny.ppo(lr=0.05), evaluation_num_env_runners=1)
    with tiny.built(config) as algorithm:
        remote = [algorithm.train()["eval"] for _ in range(2)]
    assert local[0] != local[1]
    assert remote == local


def test_held_out_metrics_by_hand():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    batch = JudgedBatch(
        columns={
            columns.COMPLETION_IDS: torch.tensor([[4, 1, 0], [1, 0, 0], [5, 6, 7]]),
            columns.COMPLETION_MASK: mask,
            columns.SCORES: torch.tensor([1.0, 2.0, 6.0]),
            columns.FINISHED: torch.tensor([True, True, False]),
            columns.VALID: torch.ones(3, dtype=torch.bool),
        },
        rewards=torch.tensor([1.0, 2.0, 6.0]),
        components={"correct": torch.tensor([0.0, 0.0, 1.0])},
        metrics={"gold_score": torch.tensor([3.0, 0.0, 0.0])},
    )
    metrics = held_out_metrics(batch)
    assert metrics == pytest.approx({
        "scores": 3.0,
        "scores_std": 7**0.5,  # (4 + 1 + 9) / 2
        "output_length": 2.0,
        "finished": 2 / 3,
        "rewards": 3.0,
        "correct_rewards": 1 / 3,
        "gold_score": 1.0,
        "distinct": 1.0,
    })  # fmt: skip
    # A row that no reward function could judge has no score.
    batch.columns[columns.VALID][2] = False
    metrics = held_out_metrics(batch)
    assert metrics["scores"] == 1.5
    assert metrics["scores_std"] == pytest.approx(0.5**0.5)
    assert metrics["output_length"] == 2.0


def test_a_rollout_of_several_rows_is_held_out_once():
    """The first rollout forked: rows of 2 and 1 sampled tokens; the second has one row of 3."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    scores = torch.tensor([1.0, 1.0, 4.0])
    batch = JudgedBatch(
        columns={
            columns.COMPLETION_IDS: torch.tensor([[4, 1, 0], [1, 0, 0], [5, 6, 7]]),
            columns.COMPLETION_MASK: mask,
            columns.SCORES: scores,
            columns.FINISHED: torch.tensor([False, True, False]),
            columns.VALID: torch.ones(3, dtype=torch.bool),
            columns.ROW_ID: torch.tensor([6, 6, 7]),
            columns.ROW_WEIGHT: torch.tensor([2 / 3, 1 / 3, 1.0]),
        },
        rewards=scores,
    )
    metrics = held_out_metrics(batch)
    assert metrics["output_length"] == 3.0  # 2 + 1, and 3
    assert metrics["scores"] == metrics["rewards"] == 2.5
    assert metrics["finished"] == 0.5  # by its last row
