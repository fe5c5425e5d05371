from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants as hub_constants

from rllib_llm.algorithms.places import Reservation
from rllib_llm.runs.doctor import data_rules
from rllib_llm.runs.doctor.data_rules import source_problems
from rllib_llm.runs.experiments import Experiment, with_stand_ins
from rllib_llm.runs.plan import check_disk, check_experiments, check_resources
from rllib_llm.runs.search_space import search_space
from rllib_llm.runs.yaml_loader import load
from rllib_llm.shared.errors import Problems
from tests.runs.tiny_trainables import COUNTER
from tests.tiny_models import byte_tokenizer, llama, save


def counter(name: str = "a", **settings: object) -> Experiment:
    return Experiment(name, COUNTER, **settings)  # type: ignore[arg-type]


def test_every_trial_says_what_it_needs():
    experiments = [counter("a"), counter("b", config={"num_cpus": {"grid_search": [2, 5]}})]
    assert [one.totals["CPU"] for one in check_experiments(experiments)] == [1, 2, 5]


def test_every_point_of_the_grid_is_validated():
    with pytest.raises(Problems, match=r"b.config: lr=-0\.5 must be at least 0"):
        check_experiments([counter("a"), counter("b", config={"lr": {"grid_search": [1, -0.5]}})])


def test_the_model_of_an_algorithm_that_makes_none_is_refused_before_it_trains():
    own_network = {"model": {"fcnet_hiddens": [8]}}  # RLlib's own setting of that name
    data = {
        "walk": {"run": "PPO", "env": "CartPole-v1", "config": own_network},
        "sft": {"run": COUNTER, "config": {"model": "${walk.model}"}},
    }
    with pytest.raises(Problems, match=r"\$\{walk.model\} must be of an experiment that trains a"):
        with_stand_ins(load(data, "x.yaml"))
    data["sft"] = {"run": COUNTER, "restore": "${walk.checkpoint}"}
    with_stand_ins(load(data, "x.yaml"))


def test_a_later_stage_is_checked_with_the_model_that_the_earlier_one_starts_from():
    data = {
        "sft": {"run": COUNTER, "config": {"model": "org/base"}},
        "rm": {"run": COUNTER, "config": {"model": "${sft.model}"}},
        "ppo": {"run": COUNTER, "config": {"model": "${rm.model}", "x": "${sft.checkpoint}/t"}},
    }
    filled = with_stand_ins(load(data, "x.yaml"))
    assert [experiment.config["model"] for experiment in filled] == ["org/base"] * 3
    assert filled[2].config["x"] == "${sft.checkpoint}/t"


def test_a_stage_that_others_use_must_save_a_checkpoint():
    data = {
        "sft": {"run": COUNTER, "checkpoint_config": {"checkpoint_at_end": False}},
        "ppo": {"run": COUNTER, "config": {"model": "${sft.model}"}},
    }
    with pytest.raises(Problems, match=r"sft\.checkpoint_config\.checkpoint_at_end=False must"):
        check_experiments(load(data, "x.yaml"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"config": {"lrr": 1}}, r"a\.config.lrr must be a known key.*'lr'"),
        ({"config": {"uniform": [0, 1]}}, r"a\.config.uniform must be a known key"),
        (
            {"scheduler": "asha", "metric": "x", "scheduler_config": {"uniform": [0, 1]}},
            r"a\.scheduler_config.uniform must be a known key",
        ),
        ({"restore": "/nowhere"}, r"a\.restore='/nowhere' must be a checkpoint folder"),
        ({"scheduler": "ashha"}, r"a\.scheduler='ashha'.*Did you mean 'asha'"),
        ({"scheduler": "asha"}, r"a\.metric must be set"),
        ({"scheduler_config": {"max_t": 3}}, r"a\.scheduler_config must come with scheduler"),
        (
            {
                "scheduler": "pbt",
                "metric": "x",
                "scheduler_config": {"hyperparam_mutations": {"lrr": {"uniform": [0, 1]}}},
            },
            r"a\.config.lrr must be a known key.*'lr'",
        ),
        (
            {
                "scheduler": "pbt",
                "metric": "x",
                "scheduler_config": {"hyperparam_mutations": {"lr": {"uniform": [-2, -1]}}},
            },
            r"a.config: lr=-1\.\d+ must be at least 0",
        ),
        (
            {"scheduler": "pbt", "metric": "x"},
            r"scheduler_config=\{\} must be arguments .*mutations",
        ),
        (
            {"scheduler": "asha", "metric": "x", "scheduler_config": {"max_t": -1}},
            r"a\.scheduler_config=\{'max_t': -1\} must be arguments that Ray Tune takes: Max",
        ),
        (
            {"scheduler": "asha", "metric": "x", "scheduler_config": {"mode": "max"}},
            r"a\.scheduler_config\.mode='max' must be left out",
        ),
        (
            {
                "scheduler": "pbt",
                "metric": "x",
                "scheduler_config": {"hyperparam_mutations": {"lr": {"grid_search": [1, 2]}}},
            },
            r"hyperparam_mutations\.lr=.* must be a list or a range .*Write \[1, 2\]",
        ),
        (
            {"scheduler": "asha", "metric": "x", "scheduler_config": {"max_tt": 3}},
            r"a\.scheduler_config.max_tt must be a known key.*'max_t'",
        ),
        (
            {"scheduler": "asha", "metric": "x", "scheduler_config": {"grace": 2}},
            r"grace must be a known key\. Did you mean 'grace_period'",
        ),
    ],
)
def test_what_cannot_run_is_refused(settings: dict, message: str):
    with pytest.raises(Problems, match=message):
        check_experiments([counter(**settings)])


@pytest.mark.parametrize(
    ("run", "env", "config", "message"),
    [
        ("PPO", "CartPole-v9", {}, "Did you mean 'CartPole-v1'"),
        ("PPOPtx", "rllib_llm/Revews-v0", {"model": "m"}, "rllib_llm/Reviews-v0"),
        ("PPOPtxx", None, {}, "PPOPtx"),
        ("PPO", None, {}, "env must be a gymnasium id"),
        (
            "PPOPtx",
            "rllib_llm/Arithmetic-v0",
            {"model": "m", "env_config": {"digit": 2}},
            "Did you mean 'digits'",
        ),
    ],
)
def test_names_are_checked_with_the_nearest(run: str, env: str, config: dict, message: str):
    with pytest.raises(Problems, match=message):
        check_experiments([Experiment("a", run, env, config)])


def test_texts_are_generated_without_an_environment(tmp_path):
    settings = {"model": save(tmp_path / "m", llama(), byte_tokenizer()), "max_new_tokens": 4}
    (reserved,) = check_experiments([Experiment("a", "Generate", None, settings)])
    assert reserved.totals["CPU"] >= 1


def test_a_trial_that_can_never_start_is_refused():
    def reserved(*bundles: dict[str, float]) -> Reservation:
        return Reservation(bundles, ("a sampler",) * len(bundles))

    check_resources(reserved({"CPU": 1, "GPU": 0}, {"CPU": 1}), [{"CPU": 2}])
    with pytest.raises(Problems, match="one trial reserves 3 CPUs and must fit into Ray's 2"):
        check_resources(reserved({"CPU": 2}, {"CPU": 1}), [{"CPU": 1}, {"CPU": 1}])
    with pytest.raises(Problems, match="--ray-num-gpus"):
        check_resources(reserved({"GPU": 1}), [{"CPU": 2}])
    with pytest.raises(Problems, match="a sampler, 2 CPU, must fit into one node.* has 1 CPU"):
        check_resources(reserved({"CPU": 2}), [{"CPU": 1}, {"CPU": 1}])


def test_too_little_disk_is_told_before_the_run(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(2**42)  # 4 TiB of holes
    large = counter(config={"model": str(model)}, stop={"training_iteration": 9})
    check_disk([counter()], tmp_path / "run")
    with pytest.raises(Problems, match=r"must have about 16384\.\d+ GiB free"):
        check_disk([large], tmp_path / "run")
    # Two trials at each of two points of the grid.
    space = {"lr": {"grid_search": [0.1, 0.2]}, **large.config}
    with pytest.raises(Problems, match=r"must have about 65536\.\d+ GiB free"):
        check_disk([large.replace(config=space, num_samples=2)], tmp_path / "run")
    # Four checkpoints in four iterations of 16 episodes, and one at the end.
    often = {"checkpoint_frequency": 1}
    config = {"model": str(model), "train_batch_size_per_learner": 16}
    grpo = Experiment("a", "GRPO", config=config, stop={"episode": 64}, checkpoint_config=often)
    with pytest.raises(Problems, match=r"must have about 81920\.\d+ GiB free"):
        check_disk([grpo], tmp_path / "run")


EARLIER = [counter("texts"), counter("rm")]


def reviews(**changes: object) -> Experiment:
    model = "rllib_llm.examples.reviews_model.build_model"
    return Experiment("ppo", "PPOPtx", "rllib_llm/RLHF-v0", **{
        "config": {
            "model": model,
            "env_config": {
                "prompts": "${texts.checkpoint}/train.jsonl",
                "reward_functions": ["tests.envs.tiny_envs.num_words"],
                **changes,
            },
        },
    })  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prompts": "./nothing.jsonl"},
            r"ppo\.config\.env_config\.prompts='./nothing.jsonl' must",
        ),
        ({"prompts": {"pth": "x"}}, "prompts.pth must be a known key. Did you mean 'path'"),
        ({"reward_model": "./no/judge"}, r"reward_model='./no/judge' must be a local folder"),
        (
            {"reward_model": {"model": "./no/judge"}},
            r"env_config\.reward_model\.model='./no/judge'",
        ),
        ({"reference": {"model": "a.b"}}, r"reference\.model='a\.b' must name a module"),
        ({"reward_functions": "tests.envs.tiny_envs.num_word"}, "Did you mean 'num_words'"),
        ({"reward_functions": [{"function": "no.such"}]}, r"reward_functions\[0\]='no.such' must"),
        ({"reward_model": {"model": "a/b", "quantisation": "int8"}}, "Did you mean 'quantization'"),
    ],
)
def test_what_is_not_there_is_told_before_anything_runs(changes: dict, message: str):
    with pytest.raises(Problems, match=message):
        check_experiments([*EARLIER, reviews(**changes)])


def test_what_earlier_stages_will_make_and_what_the_hub_has_is_taken():
    later = [reviews(), reviews(reward_model="${rm.model}", prompts="org/on-the-hub")]
    check_experiments([*EARLIER, *later])


@pytest.mark.parametrize(
    ("run", "given", "remedy"),
    [
        ("GRPO", {"stop": {"training_iteration": 2}}, "stop stands beside config:, not in it."),
        ("GRPO", {"pass_criteria": {}}, "pass_criteria stands beside config:, not in it."),
        ("GRPO", {"num_samples": 2}, "num_samples stands beside config:, not in it. Or did you "
         "mean 'num_completions'?"),
        ("SFT", {"num_samples": 2}, "num_samples stands beside config:, not in it."),
        ("PPO", {"scheduler": "asha"}, "scheduler stands beside config:, not in it."),
    ],
)  # fmt: skip
def test_what_belongs_beside_config_is_answered_with_its_place(run, given, remedy):
    with pytest.raises(Problems) as error:
        check_experiments([Experiment("a", run, config=given)])
    (name,) = given
    assert f"a.config.{name} must be a known key. {remedy}" in str(error.value).splitlines()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that has gpt2, shows org/gated to those who were given access, and has nothing else."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            known = {
                "gpt2": (200, ""),
                "org/gated": (401, "GatedRepo"),
                "org/texts": (404, "EntryNotFound"),
            }
            name = self.path.removeprefix("/datasets").removeprefix("/").split("/resolve/")[0]
            status, code = known.get(name, (404, "RepoNotFound"))
            self.send_response(status)
            for header in (("X-Error-Code", code), ("ETag", "1"), ("X-Repo-Commit", "a" * 40)):
                self.send_header(*header)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    asked: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
        data_rules._hub_refuses.cache_clear()
        yield asked
        data_rules._hub_refuses.cache_clear()
        server.shutdown()


def test_a_hub_id_that_the_hub_does_not_give_is_refused_before_anything_runs(
    hub, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert not [*source_problems({"model": "gpt2", "data": "org/texts"})]
    for model, why in (
        ("tiny2", r"404 \(not found\)\. Did you mean '\./tiny'\? Check the spelling"),
        ("org/gated", r"401 \(access must be asked for\)\. Ask for it on its page"),
    ):
        (found,) = source_problems({"model": model})
        assert re.match(rf"model='{model}' must .*answers {why}", str(found))
    (found,) = source_problems({"data": "org/none"})
    assert (found.name, found.rule) == ("data", "be a folder, or a dataset that the hub gives")
    (tmp_path / "cache" / "models--org--mine" / "snapshots").mkdir(parents=True)
    asked = len(hub)
    assert not [*source_problems({"model": "org/mine", "critic_model": "gpt2"})]
    assert len(hub) == asked == 5  # what is in the cache, or answered, is not asked for again


def test_a_hub_that_does_not_answer_is_told_of_before_a_run(hub, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    nobody = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", nobody)
    told = r"model='tiny2' must be here .* not answer .*mean '\./tiny'\?"
    (found,) = source_problems({"model": "tiny2"})
    assert found.severity == "warning" and re.match(told, str(found))
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    (found,) = source_problems({"model": "tiny2"})
    assert re.match(r"model='tiny2' must .*mean '\./tiny'\?", str(found))


def test_tokenizers_of_folders_are_checked_before_anything_runs(tmp_path):
    folder = save(tmp_path / "small", llama(vocab_size=250), byte_tokenizer())
    with pytest.raises(Problems, match=r"reward_model\.model=259 must be below 250"):
        check_experiments([counter("texts"), reviews(reward_model={"model": folder})])
    with pytest.raises(Problems, match="reference.model=.* must have the vocabulary of the pol"):
        check_experiments([counter("texts"), reviews(reference={"model": folder})])


def test_settings_of_strangers_are_their_own():
    model = "rllib_llm.examples.reviews_model.build_model"
    config = {"model": model, "env_config": {"prompts": "./x"}}
    check_experiments([Experiment("a", "PPOPtx", "tests.envs.tiny_envs:make_word_env", config)])
    check_experiments([counter(config={"model": "./no/such/folder"})])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop": {"traning_iteration": 1}}, "Did you mean 'training_iteration'"),
        ({"stop": {"episodes": 1}}, "Did you mean 'episode'"),
        ({"stop": {"timesteps_total": 9}}, "no trial reports it. Such are 'training_iteration'"),
        ({"checkpoint_config": {"num_to_keep": 0}}, "num_to_keep"),
    ],
)
def test_ends_and_checkpoints_that_cannot_be_are_refused(settings: dict, message: str):
    config = {"model": "rllib_llm.examples.reviews_model.build_model", "data": ["text"]}
    with pytest.raises(Problems, match=message):
        check_experiments([Experiment("sft", "SFT", config=config, **settings)])


OWN_CODE = {"callbacks_on_train_result": "tests.runs.test_plan.counter"}


def sums(run: str = "GRPO", config: dict | None = None, **settings) -> Experiment:
    """An experiment on sums, or of one of the supervised algorithms."""
    is_supervised = run in ("SFT", "DPO", "RewardModel")
    data = ["text"] if run == "SFT" else [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]
    given = {"model": "rllib_llm.examples.arithmetic.build_model"}
    given |= {"data": data, "eval_data": data} if is_supervised else {"max_new_tokens": 4}
    env = None if is_supervised else "rllib_llm/Arithmetic-v0"
    return Experiment("a", run, env, {**given, **(config or {})}, **settings)


def places(key: str) -> dict[str, dict]:
    """The settings that name a result, each with `key`."""
    return {
        "metric": {
            "metric": key, "mode": "max", "scheduler": "asha", "stop": {"training_iteration": 2}
        },
        "scheduler_config.metric": {
            "scheduler": "asha", "scheduler_config": {"metric": key, "mode": "max"}
        },
        "checkpoint_config.checkpoint_score_attribute": {
            "checkpoint_config": {"checkpoint_score_attribute": key}
        },
        "stop": {"stop": {key: 0.9}},
        "pass_criteria": {"pass_criteria": {key: 0.9}},
    }  # fmt: skip


def placed(*results: tuple[str, str]) -> list:
    """Each of the results in one place, the first in all of them; the other pairs are slow."""
    return [
        pytest.param(place, *result, marks=() if i == 0 or j == i % 5 else pytest.mark.slow)
        for i, result in enumerate(results)
        for j, place in enumerate(places(""))
    ]


@pytest.mark.parametrize(
    ("place", "run", "key"),
    placed(
        ("GRPO", "held_out_reward"),
        ("GRPO", "eval/scores"),
        ("GRPO", "eval/other_sums/scores"),
        ("DPO", "held_out_accuracy"),
    ),
)
def test_held_out_results_need_an_evaluation(place: str, run: str, key: str):
    experiment = sums(run, **places(key)[place])
    rule = rf"^a\.{place}='{key}' must come with an evaluation_interval: .*Set evaluation_interval"
    with pytest.raises(Problems, match=rule):
        check_experiments([experiment])
    for interval in (1, {"grid_search": [1, None]}, {"choice": [1, 2]}):
        evaluated = experiment.config | {"evaluation_interval": interval}
        check_experiments([experiment.replace(config=evaluated)])
    in_section = experiment.config | {"evaluation": {"evaluation_interval": 1}}
    check_experiments([experiment.replace(config=in_section)])


@pytest.mark.parametrize(
    "place", ["metric", "scheduler_config.metric", "checkpoint_config.checkpoint_score_attribute"]
)
def test_trials_are_not_compared_by_a_result_that_nobody_reports(place: str):
    with pytest.raises(
        Problems, match=rf"a\.{place}='foo' must be a result of GRPO: .*'objective"
    ):
        check_experiments([sums(**places("foo")[place])])
    check_experiments([sums(config=OWN_CODE, **places("foo")[place])])


@pytest.mark.parametrize(
    ("place", "run", "key"),
    placed(
        ("GRPO", "env_runners/episode_return_mean"),
        ("GRPO", "learners/default_policy/loss/policy_avg"),
        ("GRPO", "env/whatever"),
        ("GRPO", "train/correct_rewards"),
        ("GRPO", "eval/correct_rewards"),
        ("GRPO", "eval/other_sums/scores"),
        ("GRPO", "eval/accuracy"),  # an environment may have such a metric
        ("GRPO", "reward"),
        ("SFT", "held_out_loss"),
        ("SFT", "learners/__all_modules__/num_trainable_parameters"),
        ("RewardModel", "eval/accuracy"),
        ("DPO", "rewards/margins"),
        ("DPO", "train/kto_kl"),
    ),
)
def test_results_that_may_be_reported_are_taken(place: str, run: str, key: str):
    check_experiments([sums(run, {"evaluation_interval": 1}, **places(key)[place])])


CONFIG = {"model": "rllib_llm.examples.reviews_model.build_model", "data": ["text"]}


@pytest.mark.parametrize("metric", ["time_this_iter_s", "perf/ram_util_percent", "timers/a"])
def test_metrics_of_tune_are_taken(metric):
    check_experiments([Experiment("sft", "SFT", config=CONFIG, metric=metric, mode="max")])


def test_metrics_of_one_s_own_callbacks_are_taken():
    near = Experiment("sft", "SFT", config=CONFIG, metric="trainin_iteration", mode="max")
    with pytest.raises(Problems, match=r"must be a result.*Did you mean 'training_iteration'"):
        check_experiments([near])
    check_experiments([near.replace(config=CONFIG | OWN_CODE)])
    check_experiments([near.replace(config=CONFIG | OWN_CODE, metric="my/own")])


def needs_an_answer(completions, answer):
    return [0.0 for _ in completions]


@pytest.mark.parametrize("overlay", ["evaluation_config", "eval_envs"])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"prompts": "no.jsonl"}, r"env_config\.prompts='no\.jsonl' must"),
        ({"reward_functions": ["no.such"]}, r"env_config\.reward_functions\[0\]='no\.such' must"),
        (
            {"prompts": [{"question": "1+1=", "answer": "2"}]},
            "prompts.column must be set",
        ),
        ({"prompts": [{"prompt": "1+1="}]}, r"'needs_an_answer' must find its arguments"),
    ],
)
def test_what_evaluations_read_is_looked_at_before_a_run(overlay: str, changes: dict, told: str):
    prompts = [{"prompt": "1+1=", "answer": "2"}]
    judge = "tests.runs.test_plan.needs_an_answer"
    config = {
        "model": "rllib_llm.examples.arithmetic.build_model", "max_new_tokens": 4,
        "evaluation_interval": 1, "env_config": {"prompts": prompts, "reward_functions": [judge]},
    }  # fmt: skip

    def experiment(changes: dict) -> Experiment:
        held_out = {"env_config": {"prompts": prompts, **changes}}
        held_out = held_out if overlay == "evaluation_config" else {"hard": held_out}
        return Experiment("a", "GRPO", "rllib_llm/RLHF-v0", {**config, overlay: held_out})

    check_experiments([experiment({})])
    with pytest.raises(Problems, match=told) as error:
        check_experiments([experiment(changes)])
    place = "evaluation_config" if overlay == "evaluation_config" else "eval_envs.hard"
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"a.config.{place}")


def test_own_code_may_report_what_ends_a_trial():
    with pytest.raises(Problems, match="a.stop='my_own' must be a result"):
        check_experiments([sums(stop={"my_own": 1})])
    check_experiments([sums(config=OWN_CODE, stop={"my_own": 1})])


def test_sections_of_a_file_become_the_algorithm_s_settings():
    config = {
        "language_model": {"model": "rllib_llm.examples.reviews_model.build_model"},
        "prompts": {"data": [{"prompt": "A"}]},
        "rewards": {"functions": "tests.envs.tiny_envs.num_words"},
        "sampling": {"temperature": {"grid_search": [0.5, 1.0]}},
    }
    experiment = Experiment("a", "PPOPtx", config=config)
    check_experiments([experiment])
    space = search_space(experiment)
    assert space["env"] == "rllib_llm/RLHF-v0"
    assert space["temperature"] == {"grid_search": [0.5, 1.0]}
    assert space["env_config"]["reward_functions"] == "tests.envs.tiny_envs.num_words"
    with pytest.raises(Problems, match="a.config.sampling.tempera must be a known key"):
        check_experiments([experiment.replace(config=config | {"sampling": {"tempera": 1}})])


def test_types_of_settings_are_told_before_anything_runs():
    model = "rllib_llm.examples.reviews_model.build_model"
    for wrong in ({"max_new_tokens": None}, {"max_new_tokens": 4.5}, {"num_epochs": True}):
        ((name, value),) = wrong.items()
        with pytest.raises(Problems, match=f"ppo.config.{name}={value} must be a whole number"):
            check_experiments([Experiment("ppo", "PPOPtx", config={"model": model, **wrong})])
    with pytest.raises(Problems, match="rank must be a known key. Did you mean 'r'?"):
        check_experiments(
            [Experiment("a", "SFT", config={"model": model, "lora": {"rank": 4}, "data": ["x"]})]
        )


@pytest.mark.parametrize(
    ("stop", "config", "planned"),
    [
        ({"training_iteration": 7}, {}, 7),
        ({"episode": 100}, {"train_batch_size_per_learner": 16}, 7),  # 100 / 16, rounded up
        ({"episode": 100}, {"train_batch_size_per_learner": 16, "num_learners": 2}, 4),
        ({"episode": 100}, {"train_batch_size_per_learner": {"choice": [16, 32]}}, None),
        # 4 groups, of which three have 4 completions and one has 2: 100 / 14, rounded up
        ({"episode": 100}, {"train_batch_size_per_learner": 16, "num_completions": 4, "envs": {
            "a": {"weight": 3}, "b": {"sampling": {"num_completions": 2}}}}, 8),
        ({"episode": 100}, {"train_batch_size_per_learner": 16, "num_completions": 4, "envs": {
            "a": {"weight": {"uniform": [1, 2]}}, "b": {}}}, None),
        ({"training_iteration": 3, "episode": 10_000}, {}, 3),
        ({"objective/scores": 2.0}, {}, None),
        ({"training_iteration": 7}, {"planned_iterations": 9}, 9),
    ],
)
def test_reward_functions_are_told_how_long_a_run_is_to_be(stop, config, planned):
    experiment = Experiment("rl", "GRPO", stop=stop, config=config)
    assert search_space(experiment).get("planned_iterations") == planned
    assert "planned_iterations" not in search_space(Experiment("sft", "SFT", stop=stop))


MODEL = "rllib_llm.examples.arithmetic.build_model"


def test_each_value_of_a_choice_is_checked():
    """Of a choice one value is drawn for each trial; a wrong one would end only some of them."""
    space = {"choice": [1e-5, "abc", 1e-4]}
    config = {"model": MODEL, "lr": space}
    with pytest.raises(Problems, match=r"a\.config\.lr='abc' must be a number"):
        check_experiments([Experiment("a", "GRPO", "rllib_llm/Arithmetic-v0", config)])
    mutations = {"hyperparam_mutations": {"lr": space["choice"]}, "time_attr": "training_iteration"}
    bred = Experiment(
        "a", "GRPO", "rllib_llm/Arithmetic-v0", {"model": MODEL}, metric="objective/scores",
        mode="max", scheduler="pbt", scheduler_config=mutations,
    )  # fmt: skip
    with pytest.raises(Problems, match=r"a\.config\.lr='abc' must be a number"):
        check_experiments([bred])
