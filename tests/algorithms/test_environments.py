"""Several environments in one run: shares of a batch, the same for any number of samplers, resumed
runs, and what is said of each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rllib_llm.algorithms.env_weights import Difficulty
from rllib_llm.algorithms.grpo import GRPOConfig
from rllib_llm.data.rollouts import open_rollouts
from rllib_llm.modules.images import image_rows, with_images
from rllib_llm.overseer.phases import STARTING, Phases
from rllib_llm.rollouts import source
from rllib_llm.rollouts.errors import Faults
from rllib_llm.rollouts.groups import Lease
from rllib_llm.rollouts.in_flight import SingleRows
from rllib_llm.rollouts.judged_batch import concatenate, judged_groups, opened, requests_of
from rllib_llm.rollouts.mixture import Mixture
from rllib_llm.rollouts.recorder import RolloutRecorder
from rllib_llm.rollouts.sampler_pool import SamplerPool
from rllib_llm.rollouts.schedule import ServingSettings
from rllib_llm.runs.verify import verify
from rllib_llm.shared import columns
from rllib_llm.shared.errors import errors_of
from tests.algorithms import tiny_runs as tiny
from tests.data.test_image_prompts import image, saved
from tests.learners.tiny_learners import build
from tests.rollouts.tiny_samplers import (
    ScriptedActors,
    assert_same_batch,
    build_sampler,
    judged,
    publication,
)

DIGITS = f"{tiny.HERE}.num_digits"
ROOT = Path(__file__).parents[2]
CHATTY = "tests.conversations.family_models"


def sums(**entry):
    prompts = {"data": tiny.PROMPTS, "max_prompt_len": 8}
    return {"prompts": prompts, "rewards": {"functions": DIGITS}, **entry}


def letters(**entry):
    prompts = {"data": tiny.EVAL_PROMPTS, "max_prompt_len": 8}
    return {"prompts": prompts, "rewards": {"functions": DIGITS}, **entry}


def mixed(num_samplers=0, rows=18, **settings):
    """Sums and letters, two to one."""
    config = GRPOConfig().language_model(model=tiny.MODEL).env_runners(num_env_runners=num_samplers)
    own = letters(max_new_tokens=3, temperature=0.5, num_completions=2)
    config.environments(sums=sums(weight=2), letters=own)
    config.sampling(max_new_tokens=5, log_samples_every=0, num_completions=3)
    config.training(train_batch_size_per_learner=rows, minibatch_size=6, lr=1e-3)
    return config.update_from_dict(settings)


def test_a_temperature_that_all_environments_have_is_not_the_run_s():
    own = {name: {**entry, "temperature": 0.5} for name, entry in mixed().envs.items()}
    learner = build(mixed(envs=own))
    assert learner._temperatures.tolist() == [0.5, 0.5]
    assert build(mixed(envs={"sums": mixed().envs["sums"]}))._temperatures is None


def test_the_rows_need_not_be_a_multiple_of_an_environment_s_completions():
    config = mixed(rows=16, num_completions=4, minibatch_size=None)
    config.envs["letters"]["num_completions"] = 3
    config.validate()


@pytest.mark.slow  # a training
def test_stored_rollouts_are_sampled_again(tmp_path):
    """Each by the settings of its environment, those of evaluations too."""
    config = mixed(temperature=1).evaluation(evaluation_interval=1, evaluation_duration=6)
    for name in ("sums", "letters"):
        config.envs[name]["prompts"] |= {"eval_data": tiny.EVAL_PROMPTS}
    with tiny.built(config) as algorithm:
        result = algorithm.train()
        held_out = result["eval"]
        # The learner's log-probs are of each row's temperature, as the sampler's.
        assert result["sampler"]["logprob_gap"] < 1e-5
        algorithm.save_to_path(f"{algorithm.logdir}/checkpoint_000000")
        algorithm.train()
        algorithm.recorder.state()  # all that was recorded is written
        shutil.copytree(algorithm.logdir, tmp_path / "trial")
    assert {"sums/scores", "letters/scores"} <= held_out.keys()
    (found,) = verify(tmp_path / "trial", num_samples=1000)
    assert len(found.completions) >= 2 * 16 and found.agrees
    assert all(each.has_same_tokens for each in found.completions)
    rows = open_rollouts([tmp_path / "trial" / "rollouts"]).to_table().to_pylist()
    assert {(row["env"], row["temperature"]) for row in rows} == {("sums", 1.0), ("letters", 0.5)}


def chatty(num_samplers=0):
    """A bandit beside conversations of several turns."""
    config = mixed(num_samplers, rows=8).language_model(model=f"{CHATTY}.build_chatml")
    config.environments(chat={"env": f"{CHATTY}.Chatty", "env_config": {"max_concurrent": 1}})
    config.envs["letters"]["weight"] = 0
    return config.sampling(num_completions=2, max_new_tokens=12,
                           stop_token_ids=list(range(300, 400)))  # fmt: skip


def learn(config, num_iterations=3):
    with tiny.built(config) as algorithm:
        return tiny.train(algorithm, num_iterations), tiny.weights(algorithm)


def same(one, other):
    timeless = [[{**r, "env": {k: v for k, v in r["env"].items() if not k.endswith("/eps")}}
                 for r in results] for results, _ in (one, other)]  # fmt: skip
    assert timeless[0] == timeless[1]
    tiny.assert_same_weights(one[1], other[1])


@pytest.fixture(scope="module")
def whole():
    return learn(mixed(), 4)


def test_a_batch_has_the_shares_of_the_weights(whole):
    for result in whole[0]:
        of = result["env"]
        assert (of["sums/share_of_batch"], of["letters/share_of_batch"]) == (2 / 3, 1 / 3)
        assert (of["sums/episodes"], of["letters/episodes"]) == (12.0, 4.0)
        assert of["letters/output_length"] <= 3 < of["sums/output_length"] <= 5
        assert of["sums/reward"] == pytest.approx(of["sums/num_digits_rewards"])
        both = (12 * of["sums/reward"] + 4 * of["letters/reward"]) / 16
        assert result["objective"]["scores"] == pytest.approx(both)


def test_episodes_are_the_completions_that_were_sampled(whole):
    """Of six groups four have three completions, and two have two."""
    assert [result["episode"] for result in whole[0]] == [16, 32, 48, 64]


class Clock:
    """The time by which a run is measured."""

    now = 100.0


def slow_digits(completions):
    """Half a second for each completion."""
    Clock.now += len(completions) / 2
    return tiny.num_digits(completions)


def test_throughput_of_each_environment_is_of_its_episodes():
    """16 completions take 8 seconds: 12/8 and 4/8 a second."""
    config = mixed()
    for name in config.envs:
        config.envs[name]["rewards"] = {"functions": f"{__name__}.slow_digits"}
    with tiny.built(config) as algorithm:
        algorithm.phase = Phases(STARTING, clock=lambda: Clock.now)
        result = algorithm.train()
    assert result["throughput"]["iteration_seconds"] == 8.0
    assert (result["env"]["sums/eps"], result["env"]["letters/eps"]) == (1.5, 0.5)
    assert result["eps"] == 2.0


def test_rllib_s_own_call_samples_the_first_environment_that_there_is():
    config = mixed()
    config.envs["sums"]["weight"] = 0
    runner = build_sampler(config, worker_index=1)
    ((batch,),) = (found.policy_batches.values() for found in runner.sample(num_episodes=3))
    assert batch[columns.ENVIRONMENT].tolist() == [1] * 4
    assert batch[columns.GROUP].tolist() == [0, 0, 1, 1]


def test_conversations_are_learnt_beside_single_completions():
    results, _ = learn(chatty(), 2)
    of = results[-1]["env"]
    assert of["sums/episodes"] + of["chat/episodes"] == 8
    assert of["chat/num_turns"] > 1
    assert "sums/num_turns" not in of


def ahead(num_samplers=0, **settings):
    """One update ahead, mixed by tokens, with weights that follow from results."""
    config = mixed(num_samplers, off_policy="bypass", max_staleness=1, groups_per_lease=1)
    return config.environments(**settings)


KILLED_AT = "RLLIB_LLM_TEST_KILLED_AT"  # environment variable: the update after which it dies
WEIGHED = {"env_weights": f"{__name__}.Alternating", "mix_by": "tokens"}


class Alternating:
    """Weights that depend on how often they were asked for, and on a result."""

    def __init__(self):
        self.num_asked = 0

    def __call__(self, metrics):
        self.num_asked += 1
        if self.num_asked == int(os.environ.get(KILLED_AT, 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        return {"letters": 1 + self.num_asked % 2 + abs(metrics["sums"]["reward"])}

    def get_state(self):
        return self.num_asked

    def set_state(self, state):
        self.num_asked = state


@pytest.fixture(scope="module")
def whole_ahead():
    return learn(ahead(**WEIGHED), 5)


@pytest.mark.slow  # samplers in processes of their own
@pytest.mark.parametrize("num_samplers", [1, 3])
def test_any_number_of_samplers_learns_the_same(whole_ahead, num_samplers):
    same(learn(ahead(num_samplers, **WEIGHED), 5), whole_ahead)


@pytest.mark.slow  # samplers in processes of their own
def test_samplers_that_open_some_environments_learn_the_same(whole_ahead):
    same(learn(own_samplers(**WEIGHED), 5), whole_ahead)


def own_samplers(**settings):
    """Three samplers: all open sums, the first letters as well."""
    config = ahead(3, **settings)
    config.envs["letters"]["num_env_runners"] = 1
    return config


def test_a_sampler_opens_the_environments_that_are_its_own():
    config = own_samplers()
    opened = [[*build_sampler(config, worker_index=i).envs] for i in range(4)]
    assert opened == [["sums", "letters"], ["sums", "letters"], ["sums"], ["sums"]]
    config.envs["sums"]["num_env_runners"] = 2  # in turns: after that of letters
    assert config.samplers_of_envs() == (("1", "2"), ("3",))
    assert config.stream_rules().are_open([1, 3]) and not config.stream_rules().are_open([1, 2])


def test_samplers_that_open_some_environments_sample_the_same_bits(tmp_path):
    """Six groups in three parts, by who opens the environment: two have sums, one letters."""
    batches = []
    for num_samplers, own in ((1, {}), (3, {"letters": 1, "sums": 2})):
        config = mixed(num_samplers, sampling_parts=3)
        for name, number in own.items():
            config.envs[name]["num_env_runners"] = number
        actors = ScriptedActors([build_sampler(config, i + 1) for i in range(num_samplers)])
        rollouts = source.open_rollouts(
            SamplerPool(actors, Faults(), num_parts=3), None, config.stream_rules(),
            config.serving_settings(), folder=tmp_path, recorder=RolloutRecorder(),
            publish_again=None,
        )  # fmt: skip
        for version in range(2):
            rollouts.publish(publication(version))
            batches.append(rollouts.next())
        assert {worker for worker, _ in actors.served} == {*actors.workers}
    assert_same_batch(batches[0], batches[2])
    assert_same_batch(batches[1], batches[3])
    of_sampler = zip(batches[3].columns[columns.ENVIRONMENT].tolist(),
                     batches[3].columns[columns.REPLICA].tolist(), strict=True)  # fmt: skip
    assert {(env, replica) for env, replica in of_sampler} == {(0, 1), (0, 2), (1, 3)}


@pytest.mark.parametrize(("num_samplers", "own", "name"), [
    (2, {"letters": 3}, "envs.letters.num_env_runners"),
    (2, {"letters": 0}, "envs.letters.num_env_runners"),
    (2, {"letters": True}, "envs.letters.num_env_runners"),
    (3, {"letters": 1, "sums": 1}, "num_env_runners"),
])  # fmt: skip
def test_wrong_numbers_of_samplers_are_named(num_samplers, own, name):
    config = mixed(num_samplers)
    for env, number in own.items():
        config.envs[env]["num_env_runners"] = number
    assert name in [problem.name for problem in errors_of(config.problems())]


def test_a_number_of_samplers_of_an_environment_that_is_not_sampled_is_named():
    config = mixed(2)
    config.envs["letters"] |= {"weight": 0, "num_env_runners": 1}
    found = [(problem.name, problem.severity) for problem in config.problems()]
    assert ("envs.letters.num_env_runners", "warning") in found


def shades(weight, shades, **entry):
    """An environment whose prompts each show their own colour."""
    rows = [{"image": image(shade), "prompt": "a?"} for shade in shades]
    return {"weight": weight, "prompts": {"data": rows, "max_prompt_len": 16},
            "rewards": {"functions": DIGITS}, **entry}  # fmt: skip


def test_each_group_is_shown_the_images_of_its_environment(tmp_path):
    """Of three groups two are of three reds, the third of two blues. Blues are open in the first
    sampler alone."""
    config = mixed(2, num_completions=2, rows=12)
    config.language_model(model=str(saved(tmp_path)))
    config.envs = {"blues": shades(1, (3, 9), num_env_runners=1), "text": letters(weight=0),
                   "reds": shades(2, (200, 240, 255))}  # fmt: skip
    runners = {i + 1: build_sampler(config, i + 1) for i in range(2)}
    mixture = Mixture((1.0, 0.0, 2.0), batch_size=6)
    lease = Lease(1, 6, 6, publication(), places=tuple(mixture.place(p) for p in range(6, 12)))
    requests = requests_of(lease, ServingSettings(2, env_completions=(2, 2, 2)))
    batch = concatenate([judged(runners[2 - (r.env == 0)], r, publication()) for r in requests])
    assert sorted(runners[2].envs) == ["reds"]
    calls = []

    def read(positions, number):
        calls.append((number, positions))
        return runners[2 - (number == 0)].images_at(positions, number)

    seen = image_rows(with_images(batch.columns, read))
    own = {i: [*env.prompts.rows(0, 9)] for i, env in (
        (0, runners[1].envs["blues"]), (2, runners[2].envs["reds"]))}  # fmt: skip
    assert calls == [(0, [2, 3]), (2, [4, 5, 6, 7])]
    for group, number, shown in zip(batch.columns[columns.GROUP].tolist(),
                                    batch.columns[columns.ENVIRONMENT].tolist(), seen,
                                    strict=True):  # fmt: skip
        place = lease.places[group - 6]
        assert place.env == number
        shade = own[number][place.position].images[0].getpixel((0, 0))[0]
        red = float(shown["pixel_values"][0, 0, 0, 0])  # -1..1, by Gemma's processor
        assert red == pytest.approx(shade / 127.5 - 1, abs=1e-4)


class Answering:
    """Actors of two samplers that answer by what they were asked."""

    workers = (1, 2)

    def healthy(self):
        return [1, 2]

    def call(self, *asked):
        return asked

    def ready(self, calls, timeout_s):
        return calls

    def answer(self, call):
        return call


def test_a_sampler_that_opens_the_environment_is_asked():
    pool = SamplerPool(Answering(), Faults())
    assert pool.ask("images_at", [3], 1, among=("2",)) == (2, "images_at", [3], 1)
    assert pool.ask("images_at", [3], 0) == (1, "images_at", [3], 0)


@pytest.mark.parametrize("config", [
    pytest.param(mixed, marks=pytest.mark.slow), lambda: ahead(**WEIGHED)
], ids=["mixed", "ahead"])  # fmt: skip
def test_a_resumed_run_is_the_uninterrupted_one(config, tmp_path, whole, whole_ahead):
    uninterrupted = whole if config is mixed else whole_ahead
    num = len(uninterrupted[0])
    with tiny.built(config()) as algorithm:
        before = tiny.train(algorithm, 2)
        algorithm.save_to_path(tmp_path / "checkpoint")
    with tiny.built(config()) as algorithm:
        algorithm.restore_from_path(tmp_path / "checkpoint")
        after = tiny.train(algorithm, num - 2)
        same((before + after, tiny.weights(algorithm)), uninterrupted)


SAVES_AND_DIES = """
import sys
from tests.algorithms.test_environments import WEIGHED, ahead, tiny
from tests.conftest import start_ray

start_ray()
with tiny.built(ahead(**WEIGHED)) as algorithm:
    while True:
        algorithm.train()
        algorithm.save_to_path(sys.argv[1] + "/" + str(algorithm.iteration))
"""


@pytest.mark.slow  # a process of its own, with its own Ray
def test_a_run_after_kill_9_is_the_uninterrupted_one(tmp_path, whole_ahead):
    """Killed with all its Ray in the third iteration: learners have new weights, which nobody was
    given, and groups are on their way."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, KILLED_AT: "3", "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-c", SAVES_AND_DIES, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=600)
    assert done.returncode == -signal.SIGKILL
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["1", "2"]
    with tiny.built(ahead(**WEIGHED)) as algorithm:
        algorithm.restore_from_path(tmp_path / "2")
        same((tiny.train(algorithm, 3), tiny.weights(algorithm)),
             (whole_ahead[0][2:], whole_ahead[1]))  # fmt: skip


def test_weights_follow_from_results(whole_ahead):
    """Sampled ahead: what is asked for after the first update holds from the third batch on."""
    shares = [result["env"]["letters/share_of_batch"] for result in whole_ahead[0]]
    assert shares[:2] == pytest.approx([1 / 3, 1 / 3])
    assert len({*shares}) > 2


def all_pass(group):
    return True, ""


def test_filters_are_those_of_the_entry():
    config = mixed()
    config.envs["letters"]["filters"] = [{"name": "length", "most": 0}]
    config.envs["sums"]["filters"] = [f"{__name__}.all_pass"]
    with tiny.built(config.streaming(max_resampling=99)) as algorithm:
        result = algorithm.train()
    assert result["env"]["sums/share_of_batch"] == 1
    assert result["rollouts"]["rejected/too_long"] > 0


def test_entries_with_held_out_prompts_are_evaluated_by_name():
    config = mixed().evaluation(evaluation_interval=1, evaluation_duration=6)
    config.envs["sums"]["prompts"] |= {"eval_data": tiny.EVAL_PROMPTS}
    with tiny.built(config) as algorithm:
        held_out = algorithm.train()["eval"]
    assert held_out["sums/scores"] == held_out["scores"]
    assert not [name for name in held_out if name.startswith("letters/")]


def test_frozen_models_that_entries_share_are_loaded_once():
    config = mixed(ref_kl_coeff=0.1)
    for name in config.envs:
        config.envs[name]["rewards"] = {"model": f"{tiny.HERE}.build_classifier"}
    with tiny.built(config) as algorithm:
        envs = algorithm.env_runner.envs
        assert envs["sums"].reference.model is envs["letters"].reference.model
        judges = [env.rewards.terms[0].function.model for env in envs.values()]
        assert judges[0] is judges[1]
        assert algorithm.train()["env"]["letters/reward_model_rewards"] != 0


def test_rows_of_all_environments_share_an_engine():
    """Row by row each group has the tokens that its environment's batch has."""
    sampler = build_sampler(mixed(), worker_index=1).sampler
    mixture = Mixture((2.0, 1.0))
    places = tuple(mixture.place(position) for position in range(4, 10))
    lease = Lease(1, 4, 6, publication(), places=places)
    settings = ServingSettings(3, in_flight="keep", max_groups=6, env_completions=(3, 2))
    rows = SingleRows(sampler, settings)
    rows.load(publication(), 0)
    rows.add(lease)
    found = {}
    while rows.leases:
        for _, generated in rows.step():
            batch = sampler.judge(generated, beside=True)
            found[int(batch.columns[columns.GROUP][0])] = batch.columns
    expected = {}
    for request in requests_of(lease, settings):
        batch = judged(sampler, request, publication())
        for group in judged_groups(batch):
            expected[group.position] = opened(group.payload).columns
    assert sorted(found) == sorted(expected) == [*range(4, 10)]
    names = (columns.COMPLETION_IDS, columns.PROMPT_INDEX, columns.ROW_ID, columns.ENVIRONMENT)
    for position, place in zip(lease.positions, places, strict=True):
        for name in names:
            assert torch.equal(found[position][name], expected[position][name]), name
        assert found[position][columns.ENVIRONMENT].tolist() == [place.env] * (3 - place.env)
        longest = 3 if place.env else 5
        assert found[position][columns.COMPLETION_IDS].shape[1] <= longest


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ({"weight": -1}, "envs.sums.weight"), ({"seed": 5}, "envs.sums.seed"),
        ({"num_completions": 4}, "envs.sums.num_completions"),
        ({"num_completions": 1}, "envs.sums.num_completions"),
        ({"max_new_tokens": 9}, "envs.sums.max_new_tokens"), ({"promts": {}}, "envs.sums.promts"),
        ({"prompts": {"dta": 1}}, "envs.sums.prompts.dta"),
        ({"env": "no/Env-v9"}, "envs.sums.env"),
        ({"max_new_tokens": "many"}, "envs.sums.max_new_tokens"),
    ],
)  # fmt: skip
def test_wrong_entries_are_named(entry, name):
    config = mixed()
    config.envs["sums"] = {**config.envs["sums"], **entry}
    assert name in [problem.name for problem in errors_of(config.problems())]


def test_difficulty_is_most_where_half_is_solved():
    weigh = Difficulty(floor=0.1, smoothing=0.5)
    assert weigh({"half": {"reward": 0.5}, "none": {"reward": -3.0}}) == {"half": 1.0, "none": 0.1}
    assert weigh({"half": {"reward": 1.0}})["half"] == 4 * 0.75 * 0.25
    again = Difficulty(floor=0.1, smoothing=0.5)
    again.set_state(weigh.get_state())
    assert again({"none": {"reward": 1.0}}) == weigh({"none": {"reward": 1.0}})
