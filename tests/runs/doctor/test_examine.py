"""Broken set-ups, each with the finding that names it, and sound ones without any."""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rllib_llm.envs.prompts import PromptSource
from rllib_llm.modules.model_source import num_parameters
from rllib_llm.runs.doctor.examine import examine, run_rules, two_iterations
from rllib_llm.runs.doctor.machine_rules import GIB, Machine, memory_rules, server_rules
from rllib_llm.runs.doctor.reward_rules import answer_scores
from rllib_llm.runs.plan import check_experiments, examined
from rllib_llm.runs.yaml_loader import load, parse
from rllib_llm.shared.errors import Problem, Problems, errors_of, problems_of
from tests.runs.doctor import set_ups
from tests.runs.doctor.set_ups import HERE, MACHINE, SUMS, conversations, grpo, supervised
from tests.tiny_models import (
    byte_tokenizer,
    llama,
    llama_classifier,
    save,
    sentencepiece_tokenizer,
)

CHAT = [{"role": "user", "content": "1"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Model folders, most of them broken."""
    root = tmp_path_factory.mktemp("models")
    sound = save(root / "sound", llama(), byte_tokenizer())
    save(root / "judge", llama_classifier(), byte_tokenizer())
    for name in ("truncated", "no_weights", "no_shard", "other_end"):
        shutil.copytree(sound, root / name)
    weights = root / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (root / "no_weights" / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (root / "no_shard" / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "other_end" / "generation_config.json").write_text('{"eos_token_id": 77}')
    without_end = {"unk": "<unk>", "bos": "<s>"}
    network = llama(eos_token_id=None)
    network.generation_config.eos_token_id = None
    save(root / "no_end", network, byte_tokenizer(without_end))
    return {path.name: str(path) for path in root.iterdir()}


def found(experiment, machine: Machine = MACHINE) -> list:
    return [f for f in examine([experiment], machine)[0] if f.severity != "note"]


# (name of the setting, or the beginning of what was found; what its rule says; the set-up).
SETTINGS = [
    ("temprature", "be a known key", lambda: grpo(temprature=1.0)),
    ("temperature", "let the 4 completions", lambda: grpo(temperature=0.1)),
    ("top_p", "at most 1", lambda: grpo(top_p=1.5)),
    ("lr", "be a number", lambda: grpo(lr="fast")),
    ("train_batch_size_per_learner", "", lambda: grpo(train_batch_size_per_learner=18)),
    ("micro_batch_size", "", lambda: grpo(micro_batch_size=2, micro_batch_tokens=64)),
    ("overlong_buffer", "", lambda: grpo(overlong_buffer=9)),
    ("loss_reduction", "", lambda: grpo(policy_loss="rloo", loss_reduction="token_mean")),
    ("target_modules", "", lambda: grpo(lora={"target_modules": ["q_prj"]})),
    ("quantization", "", lambda: grpo(quantization="int8")),
    ("reference_in", "", lambda: grpo(reference_in="policy")),
    ("env_config.kl_coeff", "be left out beside",
     lambda: grpo(ref_kl_coeff=0.1, env={"kl_coeff": 0.1})),
    ("evaluation_interval", "have held-out prompts",
     lambda: grpo(evaluation_interval=5, env={"eval_prompts": None})),
    ("lr_num_updates", "be about the 20 opti",
     lambda: grpo(lr_schedule="linear", lr_num_updates=5)),
    ("lr_num_warmup_updates", "be below the 20", lambda: grpo(lr_num_warmup_updates=500)),
    ("minibatch_size", "divide train_batch", lambda: grpo(minibatch_size=6)),
    ("lr_num_updates", "", lambda: grpo(lr_num_updates=50)),
    ("stop", "be set", lambda: grpo(stop={})),
    ("stop", "have a counter", lambda: grpo(stop={"objective/scores": 1})),
    ("pass_criteria", "be a result of GRPO",
     lambda: grpo().replace(pass_criteria={"objectiv/scores": 1})),
    ("metric", "", lambda: grpo().replace(scheduler="asha")),
    ("env", "", lambda: grpo().replace(env="rllib_llm/Reviws-v0")),
]
DATA = [
    ("env_config.prompts", "", lambda: grpo(env={"prompts": "./nothing.jsonl"})),
    ("messages", "", lambda: grpo(env={"prompts": [{"prompt": CHAT}]})),
    ("prompts", "have distinct rows", lambda: grpo(env={"prompts": SUMS * 2})),
    ("eval_prompts", "share no row", lambda: grpo(env={"eval_prompts": SUMS[:2]})),
    ("prompts", "have at least the 4 rows", lambda: grpo(env={"prompts": SUMS[:2]})),
    ("max_prompt_len", "hold the prompts", lambda: grpo(env={"max_prompt_len": 3})),
    ("data.completion", "have no empty rows", lambda: supervised(
        "SFT", data=[*set_ups.TEXTS, {"prompt": "1", "completion": " "}]
    )),
    ("data", "have pairs of different answers", lambda: supervised(
        "DPO", data=[*set_ups.PAIRS, {"prompt": "1", "chosen": "2", "rejected": "2"}]
    )),
    ("['question']", "have 'text', or 'prompt'",
     lambda: supervised("SFT", data=[{"question": "?"}])),
    ("reward 'raises'", "judge any", lambda: grpo(env={"reward_functions": f"{HERE}.raises"})),
    ("reward 'infinite'", "be a finite",
     lambda: grpo(env={"reward_functions": f"{HERE}.infinite"})),
    ("reward 'constant'", "differ", lambda: grpo(env={"reward_functions": f"{HERE}.constant"})),
    ("reward_functions", "take less than 30 s", lambda: grpo(
        train_batch_size_per_learner=2048, env={"reward_functions": f"{HERE}.slow",
                                               "prompts": SUMS * 40},
    )),
    ("reward function 'right'", "",
     lambda: grpo(env={"prompts": [{"prompt": f"{a}="} for a in range(25)]})),
    ("max_prompt_len", "", lambda: grpo(env={"max_prompt_len": 4000})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rule", "make"), [*SETTINGS, *DATA], ids=[name for name, *_ in (*SETTINGS, *DATA)]
)
def test_a_broken_set_up_is_named(name: str, rule: str, make: Callable):
    told = [(called(problem), problem.rule) for problem in found(make())]
    assert any(is_of.endswith(name) and rule in broken for is_of, broken in told), told


def test_a_mixture_of_data_sets_is_sound():
    halves = [{"path": set_ups.TEXTS[:5], "weight": 1}, {"path": set_ups.TEXTS[5:], "weight": 2}]
    assert found(supervised("SFT", data=halves)) == []


def called(problem: Problem) -> str:
    """The name of a problem, without the experiment's."""
    return problem.name.removeprefix("run.").removeprefix("config").lstrip(".: ")


def test_a_misspelt_metric_is_told_with_the_other_errors():
    broken = grpo(temprature=1.0).replace(metric="objective/scors", mode="max")
    told = {problem.name: problem for problem in found(broken)}
    assert {"run.config.temprature", "run.metric"} == set(told)
    assert told["run.metric"].remedy.startswith("Did you mean 'objective/scores'")


def test_what_only_follows_from_a_misspelt_schedule_is_not_told():
    (told,) = found(grpo(lr_schedule="lineer", lr_num_updates=50))
    assert called(told) == "lr_schedule"


def test_what_is_wrong_within_evaluation_config_is_told_once_and_whatever_else_is_wrong():
    broken = grpo(lr=-1.0, evaluation_config={"explor": True, "lr": "fast"})
    assert [called(problem) for problem in found(broken)] == [
        "lr", "evaluation_config.explor", "evaluation_config.lr",
    ]  # fmt: skip


def test_all_that_a_file_has_wrong_is_found():
    text = "a: {runn: GRPO, num_samples: 0, checkpoint_config: {num_to_keep: -1}}"
    with pytest.raises(ValueError) as error:
        load(parse(text, "x.yaml"), "x.yaml")
    assert [(problem.name, problem.value) for problem in problems_of(error.value)] == [
        ("a.runn", ...), ("a.num_samples", 0),
        ("a.checkpoint_config.num_to_keep", -1),
    ]  # fmt: skip


@pytest.mark.parametrize("name, said", [
    ("nothing", "'None'"), ("one_number", "it has [1] for a batch"),
])  # fmt: skip
def test_an_answer_that_is_no_list_of_numbers_is_refused_as_in_training(name, said):
    experiment = grpo(env={"reward_functions": f"{HERE}.{name}"})
    (text,) = [str(problem) for problem in found(experiment) if "reward" in problem.name]
    assert f"reward function {name!r}" in text and said in text and "Return" in text


def test_held_out_prompts_that_repeat_one_to_train_on_are_counted():
    settings = {"prompts": SUMS * 2, "eval_prompts": None, "eval_fraction": 0.125}
    train, held_out = (
        [row.prompt for row in PromptSource(SUMS * 2, split=split, eval_fraction=0.125).all_rows()]
        for split in ("train", "eval")
    )
    twins = sum(prompt in train for prompt in held_out)
    (leak,) = [p for p in found(grpo(env=settings)) if p.rule == "share no row with training"]
    assert twins > 0 and called(leak) == "env_config.eval_fraction"
    assert leak.reason.startswith(f"{twins} of the 6 that it holds out are in prompts as well")


LEAKS = {
    "prompts": lambda: grpo(
        env={"prompts": with_ids(SUMS, 0), "eval_prompts": with_ids(SUMS[:2], 100)}
    ),
    "held out of prompts": lambda: grpo(
        env={"prompts": with_ids(SUMS * 2, 0), "eval_prompts": None, "eval_fraction": 0.125}
    ),
    "chats": lambda: grpo(
        env={
            "prompts": [{"messages": [*CHAT, said(text)]} for text in "ab"],
            "eval_prompts": [{"messages": [*CHAT, said("c")]}],
            "reward_functions": f"{HERE}.says_something",
            "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        }
    ),
    "texts": lambda: supervised(
        "SFT", data=with_ids(set_ups.TEXTS, 0), eval_data=with_ids(set_ups.TEXTS[:2], 100)
    ),
}


def with_ids(rows, first):
    return [{**row, "id": first + i} for i, row in enumerate(rows)]


def said(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", LEAKS)
def test_rows_that_the_model_reads_alike_are_the_same_whatever_else_they_hold(name: str):
    assert "share no row with training" in [problem.rule for problem in found(LEAKS[name]())]


def test_a_reward_that_fails_on_every_row_is_told_with_its_reason():
    experiment = grpo(env={"reward_functions": f"{HERE}.invalid"})
    (text,) = [str(problem) for problem in found(experiment) if "reward" in problem.name]
    assert "the grader's model is not loaded" in text and "None" not in text


def test_a_reward_function_that_exits_is_one_finding_among_others():
    experiment = grpo(env={"reward_functions": [f"{HERE}.leaves", f"{HERE}.constant"]})
    reasons = {called(problem): problem.reason for problem in found(experiment)}
    assert reasons["reward 'leaves'"].startswith("SystemExit: 3, raised in set_")
    assert "reward 'constant'" in reasons


def test_a_reward_function_that_raises_is_told_with_its_line():
    experiment = grpo(env={"reward_functions": f"{HERE}.raises"})
    (told,) = [p for p in found(experiment) if called(p) == "reward 'raises'"]
    assert ", raised in set_ups.py:" in told.reason


def test_rows_without_a_score_do_not_count_among_right_answers():
    """No row's sum is that of the next row."""
    experiment = grpo(
        env={
            "reward_functions": f"{HERE}.invalid_for_some",
            "prompts": [*SUMS, {"prompt": "9+9=", "answer": "18"}],
        }
    )
    assert answer_scores(examined(experiment).stage) == (1.0, 0.0)


@pytest.mark.parametrize(("folder", "rule"), [
    ("truncated", "have at least"),
    ("no_weights", "hold weights"),
    ("no_shard", "hold every file of its index"),
    ("other_end", "have one EOS"),
    ("no_end", "have an EOS token"),
    ("judge", "be a causal language model"),
])  # fmt: skip
def test_a_broken_model_folder_is_named_before_its_weights_are_loaded(folders, folder, rule):
    told = [(called(p).partition("=")[0], p.rule) for p in found(grpo(model=folders[folder]))]
    assert any(broken.startswith(rule) for _, broken in told), told


def test_a_stop_token_beyond_the_vocabulary_is_named():
    experiment = grpo(stop_token_ids=[99999])
    (told,) = found(experiment)
    size = len(examined(experiment).stage.config.load_tokenizer())
    assert (called(told), told.value) == ("stop_token_ids", [99999])
    assert told.rule == f"be among the {size} tokens of the vocabulary"


def test_a_policy_is_no_judge(folders):
    experiment = grpo(model=folders["sound"], env={"reward_model": folders["sound"]})
    told = [(called(problem), problem.rule) for problem in found(experiment)]
    assert ("env_config.reward_model", "be a reward model") in told


def test_a_missing_model_is_told_of_the_experiment_that_names_it():
    first = supervised("SFT", model="./nosuch").replace(name="first")
    found = examine([first, grpo(model="${first.model}")], MACHINE)[0]
    assert [p.name[:5] for p in found if p.severity == "error"] == ["first"]


def test_a_judge_that_is_made_before_is_no_policy(folders):
    judge = supervised("RewardModel", model=folders["sound"], data=set_ups.PAIRS)
    judge = judge.replace(name="judge")
    # Until it is made, the model that it starts from stands in for it.
    policy = grpo(model=folders["sound"], env={"reward_model": "${judge.model}"})
    assert [p for p in examine([judge, policy], MACHINE)[0] if p.severity == "error"] == []
    check_experiments([judge, policy], run_rules)


@pytest.mark.parametrize(("run", "changes", "said"), [
    ("SFT", {"env": {"reward_model": "${made.model}", "reward_functions": None}},
     "it is what SFT makes"),
    ("RewardModel", {"model": "${made.model}"}, "it is what RewardModel makes"),
])  # fmt: skip
def test_a_policy_that_is_made_before_is_no_judge_nor_the_other_way_round(run, changes, said):
    made = supervised(run).replace(name="made")
    (error,) = [p for p in examine([made, grpo(**changes)], MACHINE)[0] if p.severity == "error"]
    assert error.value == "${made.model}" and error.reason.startswith(said)
    with pytest.raises(Problems, match="it is what"):
        check_experiments([made, grpo(**changes)], run_rules)


@pytest.mark.parametrize(("config", "changes", "name"), [
    ({"mixed_precision": "bf16"}, {"features": frozenset()}, "mixed_precision"),
    ({"num_gpus_per_learner": 1}, {}, "num_gpus_per_learner"),
    ({"lora": {}, "quantization": "nf4"}, {}, "quantization"),
    ({"num_env_runners": 6}, {"cpus": 2.0}, "num_env_runners"),
    ({"num_env_runners": 1}, {"shm_bytes": 100_000}, "/dev/shm"),
    ({}, {"memory": GIB // 4}, "1 process with"),
])  # fmt: skip
def test_what_a_machine_lacks_is_named(folders, config, changes, name):
    machine = dataclasses.replace(MACHINE, **changes)
    experiment = grpo(model=folders["sound"], **config)
    assert any(called(p).startswith(name) for p in found(experiment, machine))


def test_processes_take_memory_whatever_their_model_does():
    """A model that a function makes has no size before it is made."""
    experiment = grpo(num_env_runners=100_000)
    found = examine([experiment], MACHINE)[0]
    assert any("sampler" in each.name for each in errors_of(found))
    found = examine([experiment], MACHINE, is_here=False)[0]  # on a cluster
    assert not errors_of(found)


def test_each_kept_version_of_the_weights_has_its_place_in_the_store(folders):
    machine = dataclasses.replace(MACHINE, shm_bytes=100_000)
    texts = {}
    for kept in (2, 5):
        experiment = grpo(model=folders["sound"], num_env_runners=1, weights_keep=kept)
        (problem,) = (p for p in found(experiment, machine) if called(p) == "/dev/shm")
        texts[kept] = problem.rule
    assert "3 versions of the weights" in texts[2] and "6 versions of the weights" in texts[5]


def test_a_full_disk_is_named(folders, tmp_path):
    machine = dataclasses.replace(MACHINE, disk_bytes=1000)
    told = examine([grpo(model=folders["sound"])], machine, folder=tmp_path)[0]
    assert "storage_path" in [problem.name for problem in told]


def test_a_server_that_does_not_answer_is_named():
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        judge = {
            "function": "rllib_llm.envs.judges.llm_judges.JudgeServer",
            "kwargs": {"base_url": url, "model": "judge"},
        }
        names = [called(problem) for problem in found(grpo(env={"reward_functions": judge}))]
        stage = examined(grpo()).stage
        stage.env = {"base_url": url}  # of Chat-v0's player
        (told,) = server_rules(stage)
    assert "env_config.reward_functions.kwargs.base_url" in names
    assert (told.name, told.value) == ("env_config.base_url", url)


def test_prompts_that_are_held_out_for_no_evaluation_are_told():
    idle = grpo(env={"eval_fraction": 0.1, "eval_prompts": None})
    assert "come with an evaluation_interval" in {problem.rule for problem in found(idle)}
    used = grpo(env={"eval_fraction": 0.1, "eval_prompts": None}, evaluation_interval=1)
    assert "come with an evaluation_interval" not in {problem.rule for problem in found(used)}


def test_epochs_end_what_counts_them():
    (told,) = found(grpo(stop={"epoch": 3}))
    assert (told.name, told.value, told.severity) == ("run.stop", {"epoch": 3}, "warning")
    assert told.rule == "have a counter"
    assert found(supervised("SFT").replace(stop={"epoch": 3})) == []


def test_a_template_that_writes_no_tools_is_told():
    (finding,) = found(
        conversations(
            "rllib_llm/Conversation-v0", prompts=SUMS, reward_functions=f"{HERE}.says_something",
            tools=[f"{HERE}.add"],
            chat_template="{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
        )
    )  # fmt: skip
    assert called(finding) == "chat_template"
    assert finding.rule == "write tools, their calls and results"


def test_a_judge_that_cannot_be_made_is_told():
    spec = {"function": f"{HERE}.Unmade", "name": "unmade"}
    (finding,) = found(grpo(env={"reward_functions": spec}))
    assert "OSError: no folder, raised in set_u" in finding.reason


def test_a_tool_that_cannot_be_made_here_is_told_by_the_doctor_and_stops_no_run():
    experiment = conversations(
        "rllib_llm/Conversation-v0", prompts=SUMS, reward_functions=f"{HERE}.says_something",
        tools=[f"{HERE}.NeedsAService"],
    )  # fmt: skip
    (finding,) = found(experiment)
    assert called(finding) == "env_config.tools"
    assert "KeyError: 'SERVICE', raised in" in finding.reason
    check_experiments([experiment], run_rules)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tools": [f"{HERE}.ad"]}, "has no .ad.. Did you mean .add."),
        ({"tools": f"{HERE}.ad"}, "has no .ad.. Did you mean .add."),
        ({"tools": [f"{HERE}.without_types"]}, "without_types"),
        ({"chat_template": "{{ messages[0].content }}"}, "Give a template"),
    ],
)
def test_tools_and_chat_templates_are_looked_at_before_a_run(changes, told):
    given = {"prompts": SUMS, "reward_functions": f"{HERE}.says_something", **changes}
    with pytest.raises(Problems, match=told):
        check_experiments([conversations("rllib_llm/Conversation-v0", **given)], run_rules)


# The example model reads 128 tokens; its template writes 3 beside those of a user's words, and 2
# beside those of a system message: one for each digit.
@pytest.mark.parametrize(
    ("changes", "found_", "remedy"),
    [
        ({"prompts": [{"prompt": "1" * 125}]},
         "the first prompt of 128 tokens must leave room for an answer within the 128 tokens",
         "or take a model with more positions."),
        ({"prompts": [{"prompt": "1" * 124}]}, None, None),
        ({"prompts": [{"prompt": "1+1="}], "system": "1" * 119},
         "the first prompt of 128 tokens", "or take a model with more positions."),
        ({"prompts": [{"prompt": "1+1="}], "system": "1" * 118}, None, None),
        ({"prompts": [{"prompt": "1" * 17}], "max_tokens": 20},
         "the first prompt of 20 tokens must leave room for an answer within max_tokens=20",
         "or raise max_tokens above 20."),
        ({"prompts": [{"prompt": "1" * 16}], "max_tokens": 20}, None, None),
        # More than the model reads is no remedy.
        ({"prompts": [{"prompt": "1" * 125}], "max_tokens": 20}, "within the 128 tokens",
         "or take a model with more positions."),
    ],
)  # fmt: skip
def test_conversations_that_can_never_begin_are_told_before_a_run(changes, found_, remedy):
    given = {"reward_functions": f"{HERE}.says_something", **changes}
    experiment = conversations("rllib_llm/Conversation-v0", **given)
    errors = [f for f in found(experiment) if f.severity == "error"]
    if found_ is None:
        assert errors == []
        check_experiments([experiment], run_rules)
        return
    (finding,) = errors
    assert found_ in finding.sentence and str(finding).endswith(remedy)
    with pytest.raises(Problems, match="leave room for an answer"):
        check_experiments([experiment], run_rules)


def test_conversations_with_the_model_of_an_earlier_stage_are_looked_at_with_its_template():
    # The model has none, and reads 32 tokens; this one adds "u:", EOS and "a:" to what is said.
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    sft = supervised("SFT", chat_template=template).replace(name="sft")
    for num_digits, is_refused in ((26, False), (27, True)):
        prompts = [{"prompt": "1" * num_digits}]
        given = {"prompts": prompts, "reward_functions": f"{HERE}.says_something"}
        talk = conversations("rllib_llm/Conversation-v0", **given)
        talk = talk.replace(config={**talk.config, "model": "${sft.model}"})
        errors = [f for f in examine([sft, talk], MACHINE)[0] if f.severity == "error"]
        assert ["leave room for an answer" in f.rule for f in errors] == [True] * is_refused


def test_a_few_conversations_that_cannot_begin_stop_no_run():
    prompts = [{"prompt": "1" * n} for n in (5, 130, 6, 125)]
    given = {"prompts": prompts, "reward_functions": f"{HERE}.says_something"}
    experiment = conversations("rllib_llm/Conversation-v0", **given)
    (finding,) = [f for f in found(experiment) if "leave room" in f.rule]
    assert finding.severity == "warning"
    assert called(finding) == (
        "2 of the first 4 prompts are too long: the first prompt of 133 tokens"
    )
    with pytest.warns(UserWarning, match="2 of the first 4 prompts"):
        check_experiments([experiment], run_rules)
    held_out = {**given, "prompts": SUMS, "eval_prompts": prompts}
    experiment = conversations("rllib_llm/Conversation-v0", **held_out)
    (finding,) = [f for f in found(experiment) if "leave room" in f.rule]
    assert finding.severity == "warning"
    assert called(finding).startswith("2 of the first 4 held-out prompts are too long: ")


def test_files_and_functions_that_are_not_there_are_told_together():
    experiment = grpo(env={"prompts": "nowhere.jsonl", "reward_functions": f"{HERE}.wrong"})
    assert {problem.name for problem in found(experiment)} == {
        "run.config.env_config.prompts", "run.config.env_config.reward_functions",
    }  # fmt: skip


def test_all_of_it_is_told_at_once():
    experiment = grpo(temprature=1.0, top_p=1.5, max_new_tokens=0, quantization="int8")
    assert {"temprature", "top_p", "max_new_tokens", "quantization"} <= {
        called(problem) for problem in found(experiment)
    }


SOUND = {
    "grpo": lambda folders: grpo(),
    "grpo with samplers": lambda folders: grpo(num_env_runners=2, model=folders["sound"]),
    "adapters": lambda folders: grpo(lora={"r": 4}, model=folders["sound"]),
    "bfloat16": lambda folders: grpo(mixed_precision="bf16"),
    "a schedule": lambda folders: grpo(lr_schedule="linear", lr_num_updates=20),
    "evaluation": lambda folders: grpo(evaluation_interval=5),
    "tools": lambda folders: conversations("rllib_llm/Calculator-v0", max_turns=3),
    "a conversation": lambda folders: conversations(
        "rllib_llm/Conversation-v0", prompts=SUMS, reward_functions=f"{HERE}.says_something"
    ),
    "sft": lambda folders: supervised("SFT"),
    "sft of a folder": lambda folders: supervised("SFT", model=folders["sound"]),
    "reward model": lambda folders: supervised("RewardModel"),
    "dpo": lambda folders: supervised("DPO"),
}


@pytest.mark.parametrize("name", SOUND)
def test_nothing_stands_against_a_sound_set_up(name: str, folders):
    findings = found(SOUND[name](folders))
    assert findings == []
    assert all(finding.severity == "note" for finding in findings)


def test_there_are_enough_of_both():
    assert len(SETTINGS) + len(DATA) + 6 + 1 + 6 + 2 >= 40
    assert len(SOUND) >= 10


def test_findings_of_errors_have_all_parts():
    (finding,) = found(grpo(top_p=1.5))
    assert (finding.name, finding.value, finding.severity) == ("run.config.top_p", 1.5, "error")
    assert finding.rule == "be a number above 0 and at most 1"
    assert finding.reason and finding.remedy
    assert finding.severity == "error"


def test_a_problem_begins_with_its_experiment_whatever_that_is_called():
    """"stop" begins with an s, and is not of the experiment s for that."""
    (told,) = found(grpo(stop={}).replace(name="s"))
    assert told.name == "s.stop"
    assert told.within("s") == told


def test_a_file_is_examined_in_seconds(tmp_path: Path):
    begin = time.process_time()
    found(grpo())
    assert time.process_time() - begin < 20


def test_a_keyword_that_four_texts_lack_is_no_constant():
    rows = [{"prompt": f"Write about {subject}."} for subject in ("rain", "tea", "bread", "snow")]
    given = {"prompts": rows * 16, "reward_functions": f"{HERE}.has_keyword"}
    assert "reward 'has_keyword'" not in {called(problem) for problem in found(grpo(env=given))}


def test_advice_on_cut_prompts_is_within_what_the_model_reads(folders):
    # The model reads 512 tokens; the prompts have 599.
    prompts = [{"prompt": "1" * 599, "answer": "1"} for _ in range(16)]
    env = {"prompts": prompts, "max_prompt_len": 8}
    told = found(grpo(model=folders["sound"], env=env))
    (cut,) = (problem for problem in told if problem.rule == "hold the prompts")
    assert "599" not in cut.remedy and "max_new_tokens" in cut.remedy


def test_a_space_at_the_end_of_prompts_that_joins_the_answer_is_told(tmp_path):
    """Of " cat" the tokenizer makes one token, so training never reads the space by itself."""
    tokenizer = sentencepiece_tokenizer()
    model = save(tmp_path, llama(vocab_size=len(tokenizer)), tokenizer)

    def told(prompt: str, answer: str) -> list[str]:
        rows = [{"prompt": f"{n} the cat at the {prompt}", "completion": answer} for n in range(4)]
        findings = found(supervised("SFT", model=model, data=rows))
        return [problem.reason for problem in findings if "white space" in problem.rule]

    (reason,) = told("the ", "cat")
    assert reason.startswith(
        "that of ' the cat at the the ' becomes part of the answer's first token before 'cat'"
    )
    assert not told("the", " cat") and not told("the ", "+")


def test_a_value_out_of_range_is_told_once():
    assert [called(problem) for problem in found(grpo(temperature=-1))] == ["temperature"]


@pytest.mark.slow
def test_the_two_iterations_learn_from_fresh_completions_whatever_the_run_does():
    """The gap of log-probs would hold what an update changed: with max_staleness=1 the second
    update learns from completions of version 0, which are one update old."""
    stage = examined(grpo(max_staleness=1, off_policy="decoupled", num_env_runners=1)).stage
    assert two_iterations(stage)[-1]["train"]["staleness"] == 0.0


def test_each_of_several_environments_is_looked_at():
    """Of its own rows, rewards and way of sampling; a quarter of the 4 groups needs one row."""
    rewards = {"functions": f"{HERE}.right"}
    few = {"weight": 1, "prompts": {"data": [SUMS[1]]}, "rewards": rewards}
    blank = [{**row, "prompt": " "} for row in SUMS[:2]]
    wrong = {"weight": 3, "prompts": {"data": [*SUMS, *blank]}, "top_k": 1,
             "rewards": {"functions": f"{HERE}.constant"}}  # fmt: skip
    experiment = grpo(envs={"few": few, "wrong": wrong})
    experiment.config.pop("env_config")
    assert {called(problem) for problem in found(experiment)} == {
        "envs.wrong.top_k", "envs.wrong.prompts", "envs.wrong: reward 'constant'",
    }  # fmt: skip


def test_the_prompts_of_an_iteration_are_the_run_s_however_many_completions_an_entry_has():
    """Of 4 groups, not of 16 completions alone, half are of two rows."""
    rewards = {"functions": f"{HERE}.right"}
    entry = {"prompts": {"data": SUMS[:2]}, "rewards": rewards}
    experiment = grpo(envs={"one": {**entry, "num_completions": 2}, "other": entry})
    experiment.config.pop("env_config")
    assert not found(experiment)
    experiment.config["envs"]["one"]["weight"] = 3
    assert [called(problem) for problem in found(experiment)] == ["envs.one.prompts"]


def test_memory_is_that_of_all_environments_of_a_run(folders):
    """To the byte: 16 rows of the longest prompt and completion, the judge that two share once."""
    judge = {"model": folders["judge"]}
    entry = {"prompts": {"data": SUMS, "max_prompt_len": 20}, "rewards": judge}
    envs = {"one": {**entry, "num_completions": 2}, "other": {**entry, "max_new_tokens": 3},
            "closed": {"weight": 0, "prompts": {"data": SUMS, "max_prompt_len": 99},
                       "rewards": {"model": folders["sound"]}}}  # fmt: skip
    experiment = grpo(model=folders["sound"], envs=envs, ref_kl_coeff=0.1)
    experiment.config.pop("env_config")
    policy, judge_size = (num_parameters(folders[name]) for name in ("sound", "judge"))
    shape = llama().config
    of_token = shape.num_hidden_layers * 2 * shape.num_key_value_heads * shape.head_dim * 4
    cache = 16 * (20 + experiment.config["max_new_tokens"]) * of_token
    needed = GIB // 2 + policy * (4 + 4 + 8) + cache + 4 * (policy + judge_size)
    for memory, severity in ((needed, "warning"), (needed - 1, "error")):
        stage = examined(experiment).stage
        (problem,) = memory_rules(stage, dataclasses.replace(MACHINE, memory=memory))
        assert problem.severity == severity


def test_memory_of_a_sampler_is_for_the_groups_of_its_environments(folders):
    """To the byte: of 4 groups of 4 rows the first sampler has both of `one` and one of `other`,
    the second one of `other`."""
    entry = {"rewards": {"functions": f"{HERE}.right"}}
    envs = {"one": {**entry, "prompts": {"data": SUMS, "max_prompt_len": 20}, "num_env_runners": 1},
            "other": {**entry, "prompts": {"data": SUMS, "max_prompt_len": 8}}}  # fmt: skip
    experiment = grpo(model=folders["sound"], envs=envs, num_env_runners=2, ref_kl_coeff=0)
    experiment.config.pop("env_config")
    policy, shape = num_parameters(folders["sound"]), llama().config
    of_token = shape.num_hidden_layers * 2 * shape.num_key_value_heads * shape.head_dim * 4
    most = experiment.config["max_new_tokens"]
    cache = (12 * (20 + most) + 4 * (8 + most)) * of_token
    needed = 3 * (GIB // 2) + policy * (4 + 4 + 8) + 2 * policy * 4 + cache
    for memory, severity in ((needed, "warning"), (needed - 1, "error")):
        stage = examined(experiment).stage
        found_here = [*memory_rules(stage, dataclasses.replace(MACHINE, memory=memory))]
        assert [problem.severity for problem in found_here] == [severity]


def test_a_broken_model_of_an_entry_is_named_as_the_entry_s(folders):
    entry = {"prompts": {"data": SUMS}, "rewards": {"model": folders["truncated"]}}
    experiment = grpo(model=folders["sound"], envs={"one": entry})
    experiment.config.pop("env_config")
    assert "envs.one" in {called(problem).rpartition(".")[0] for problem in found(experiment)}
