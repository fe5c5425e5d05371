from __future__ import annotations

import json

import pytest
import torch

from rllib_llm.envs import rlhf
from rllib_llm.envs.check_env import check_env
from rllib_llm.envs.judges.rewards import RewardError
from rllib_llm.envs.registry import default_settings
from rllib_llm.envs.rlhf import policy_tokenizer
from rllib_llm.modules.precision import multiplies_by_onednn
from rllib_llm.shared.errors import Problems
from tests.conversations.templates import family_tokenizer
from tests.tiny_models import byte_tokenizer, llama, llama_classifier, save

MODEL = "tests.tiny_models.build_llama"
JUDGE = "tests.tiny_models.build_classifier"


def shouting(completions, label):
    """Capital letters, plus a hundred times the prompt's label."""
    return [
        sum(c.isupper() for c in text) + 100 * at
        for text, at in zip(completions, label, strict=True)
    ]


SHOUTING = f"{__name__}:shouting"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Prompts as JSON Lines and Parquet, a policy folder and a reward model folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("files")
    rows = [{"prompt": f"Say {i}: ", "label": i} for i in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    (folder / "prompts.txt").write_text("".join(row["prompt"] + "\n" for row in rows))
    save(folder / "policy", llama(), byte_tokenizer())
    save(folder / "judge", llama_classifier(), byte_tokenizer())
    return folder


def _answer(env, *texts):
    rows = [env.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [env.pad_token_id] * (longest - len(row)) for row in rows])
    lengths = torch.tensor([[len(row)] for row in rows])
    return {"completion_ids": ids, "completion_mask": torch.arange(longest) < lengths}


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.parquet"])
def test_prompts_from_files_and_a_function_by_dotted_path(files, name):
    env = rlhf.create(
        {
            "model": str(files / "policy"),
            "prompts": str(files / name),
            "reward_functions": SHOUTING,
            "shuffle": False,
            "num_envs": 2,
        }
    )
    observation, _ = env.reset()
    assert env.vocab_size == 260  # the model's
    assert env.tokenizer.decode(observation["prompt_ids"][1]) == "<s>Say 1: "
    rewards = env.step(_answer(env, "HEy", "no"))[1]
    assert rewards.tolist() == [2 + 0, 0 + 100]


def test_reward_model_reference_and_functions_together(files):
    env = rlhf.create(
        {
            "model": str(files / "policy"),
            "prompts": str(files / "prompts.txt"),
            "reward_model": {"model": str(files / "judge"), "weight": 2.0, "normalize": False},
            "reward_functions": [{"function": "tests.envs.tiny_envs.num_words", "weight": 0.5}],
            "reference": {"dtype": "float32"},  # the policy's weights
            "kl_coeff": 0.1,
            "num_envs": 2,
        }
    )
    env.reset()
    actions = _answer(env, "one two", "three")
    logprobs = torch.where(actions["completion_mask"], -1.0, 0.0)
    _, rewards, _, _, infos = env.step({**actions, "sampler_logprobs": logprobs})
    judged, words = infos["components"]["reward_model"], infos["components"]["num_words"]
    assert words.tolist() == [2, 1] and judged.shape == (2,) and judged[0] != judged[1]
    assert torch.allclose(infos["scores"], 2.0 * judged + 0.5 * words)
    assert infos["ref_logprobs"].shape == actions["completion_ids"].shape
    assert torch.allclose(rewards, infos["scores"] - 0.1 * infos["kl"])


def test_it_keeps_the_contract(files):
    settings = {
        "model": MODEL,
        "prompts": str(files / "prompts.txt"),
        "reward_model": JUDGE,
        "reference": {},
    }
    assert check_env("rllib_llm/RLHF-v0", settings) == []


def test_held_out_prompts_are_the_same_for_every_seed(files):
    settings = {"model": MODEL, "prompts": str(files / "prompts.jsonl"), "eval_fraction": 0.4}
    settings |= {"reward_functions": SHOUTING, "num_envs": 4}

    def first(**changes):
        env = rlhf.create({**settings, **changes})
        return len(env.prompts), env.reset()[1]["prompt_index"].tolist()

    num_train, train = first(seed=1)
    num_eval, held_out = first(split="eval", seed=1)
    assert (num_train, num_eval) == (6, 4) and not set(train) & set(held_out)
    assert first(split="eval", seed=2) == (4, held_out)  # the order, too
    assert first(seed=2) != (6, train)


def test_eval_prompts_alone_are_enough_for_evaluation(files):
    settings = {"model": MODEL, "eval_prompts": str(files / "prompts.jsonl"), "split": "eval"}
    assert len(rlhf.create({**settings, "reward_functions": SHOUTING}).prompts) == 10


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"promts": []},
            Problems,
            "env_config.promts must be a known key. Did you mean 'prom",
        ),
        ({"max_turns": 2}, Problems, "`env` has no turns. Leave it out"),
        ({"prompts": None}, Problems, "prompts must have data: there is nothing"),
        ({"reward_functions": None}, Problems, "rewards must have a model or functions"),
        ({"model": None}, Problems, "must have 'model' \\(or 'tokenizer'\\)"),
        ({"model": "/no/such/folder"}, ValueError, "'/no/such/folder' must be a local folder"),
        ({"reward_model": 3}, Problems, "reward_model=3 must be a dictionary, text or None"),
        ({"reward_model": {"dtype": "float32"}}, Problems, "must have 'model'"),
        (
            {"reward_model": {"model": JUDGE, "quantisation": "int8"}},
            Problems,
            r"env_config\.reward_model\.quantisation must be a known key. Did you mean 'quant",
        ),
        (
            {"reward_model": {"model": JUDGE, "max_tokens": 1}},
            Problems,
            r"max_tokens must be a known key. Did you mean 'batch_tokens'",
        ),
        (
            {"reference": {"modle": MODEL}},
            Problems,
            r"env_config\.reference\.modle must be a known key. Did you mean 'model'",
        ),
        ({"reference": {"quantization": "int4"}}, ValueError, "quantization='int4' must be one of"),
        (
            {"reference": {"device": "gpu"}},
            ValueError,
            r"env_config\.reference\.device='gpu' must be a device",
        ),
        ({"reward_model": {"model": "m", "device": [0]}}, ValueError, r"=\[0\] must be a device"),
        ({"device": "cudaa"}, ValueError, r"env_config\.device='cudaa' must be a device"),
        ({"reference": 3}, Problems, "reference=3 must be a dictionary, text or None"),
        ({"split": "eval"}, Problems, "split='eval' must have prompts of its own"),
        ({"prompts": ["text only"]}, RewardError, r"'shouting' must find its arguments \['label'"),
        (
            {"eval_fraction": 0.1, "eval_prompts": ["x"]},
            Problems,
            "eval_fraction=0.1 must be 0 where eval_prompts are given",
        ),
    ],
)
def test_wrong_settings(changes, error, message):
    settings = {
        "model": MODEL,
        "prompts": [{"prompt": "a", "label": 1}],
        "reward_functions": SHOUTING,
    }
    rlhf.create(settings)
    with pytest.raises(error, match=message):
        rlhf.create({**settings, **changes})


@pytest.mark.parametrize(
    ("env", "wrong", "message"),
    [
        ("RLHF", {"num_envs": 0}, "num_envs=0 must be a whole number of at least 1"),
        ("RLHF", {"seed": "x"}, "seed='x' must be a whole number of at least 0"),
        ("RLHF", {"reference": ["x"]}, "reference=.* must be a dictionary, text or None"),
        ("RLHF", {"chat_template": ["x"]}, "chat_template=.* must be text, Path or None"),
        ("Calculator", {"digits": ["3", 4]}, "digits=.* must be a pair of numbers"),
        ("Lookup", {"num_facts": 1.5}, "num_facts=1.5 must be a whole number of at least 1"),
        ("TwentyQuestions", {"highest": "x"}, "highest='x' must be a whole number of at least 2"),
        ("Arithmetic", {"max_prompt_len": 0}, "Write 16, its default"),
        ("Arithmetic", {"format_weight": None}, "format_weight=None must be a number: it is the"),
        ("ReasoningGym", {"as_chat": "yes"}, "as_chat='yes' must be True or False"),
        ("Conversation", {"split": "test"}, r"split='test' must be one of \('train', 'eval'\)"),
        ("Agent", {"max_turns": 0.5}, "Write 32, its default"),
        ("Chat", {"player_settings": 1}, "player_settings=1 must be a dictionary or None"),
        ("TRL", {"max_tool_calling_iterations": "1"}, "iterations='1' must be a whole number"),
        ("Verifiers", {"num_tasks": 0}, "num_tasks=0 must be a whole number of at least 1 or No"),
    ],
)
def test_settings_of_every_environment_are_checked_by_their_rows(env, wrong, message):
    defaults = default_settings(f"rllib_llm/{env}-v0")
    settings = rlhf.with_defaults({}, defaults)
    rlhf.with_defaults(settings, defaults)  # the defaults are right
    with pytest.raises(Problems, match=message):
        rlhf.with_defaults(wrong, defaults)


def test_settings_of_an_environment_of_one_s_own_are_its_own():
    defaults = {**rlhf.COMMON_DEFAULTS, "highest": 9, "split": "easy", "max_prompt_len": 8}
    given = {"highest": None, "split": 3, "vocab_size": 5}
    found = rlhf.with_defaults(given, defaults)
    assert (found["highest"], found["split"], found["max_prompt_len"]) == (None, 3, 8)
    with pytest.raises(Problems, match="max_prompt_len='8' must be a whole number"):
        rlhf.with_defaults({"max_prompt_len": "8"}, defaults)


def test_a_tokenizer_without_a_model():
    settings = {"prompts": ["a"], "reward_functions": "tests.envs.tiny_envs.num_words"}
    tokenizer = byte_tokenizer()
    env = rlhf.create({**settings, "tokenizer": tokenizer})
    assert env.tokenizer is tokenizer and env.vocab_size == len(tokenizer)
    with pytest.raises(Problems, match="must name a model"):
        rlhf.create({**settings, "tokenizer": tokenizer, "reference": {"dtype": "float32"}})


@pytest.mark.parametrize("own, dtype", [({}, "bfloat16"), ({"quantization": "none"}, "float32")])
def test_frozen_models_that_name_no_quantization_follow_the_policy(files, own, dtype):
    """In mixed precision samplers ask for bf16; what a model says of itself holds."""
    settings = {
        "model": str(files / "policy"),
        "prompts": str(files / "prompts.txt"),
        "max_completion_len": 4,
        "reward_model": {"model": str(files / "judge"), **own},
        "reference": own,
        "frozen_quantization": "bf16",
        "frozen_products": "onednn",
    }
    env = rlhf.create(settings)
    (judge,) = [term.function for term in env.rewards.terms]
    for model in (env.reference.model, judge.model):
        assert model.dtype == getattr(torch, dtype)
        assert multiplies_by_onednn(model)  # where it is float32; bfloat16 has it anyway


def test_a_reference_of_another_vocabulary_is_refused_at_build(files):
    settings = {"model": MODEL, "prompts": str(files / "prompts.txt"), "reward_functions": SHOUTING}
    with pytest.raises(ValueError, match="must have the vocabulary of the policy"):
        rlhf.create({**settings, "reference": "rllib_llm.examples.arithmetic.build_model"})


@pytest.mark.parametrize("reference", [None, {}])
def test_a_tokenizer_of_another_model_is_itself_blamed(files, reference):
    settings = {"model": MODEL, "prompts": str(files / "prompts.txt"), "reward_functions": SHOUTING}
    other = "rllib_llm.examples.arithmetic.build_model"
    with pytest.raises(Problems, match="^env_config.tokenizer=.* the model's token 0 is "):
        rlhf.create({**settings, "reference": reference, "tokenizer": other})


def test_a_template_replaces_that_of_a_given_tokenizer():
    given = family_tokenizer("chatml")
    own = policy_tokenizer({"tokenizer": given, "model": None, "chat_template": "{{ messages }}",
                            "template_settings": None})
    assert own.chat_template == "{{ messages }}"
    assert given.chat_template != own.chat_template  # it may be somebody else's, too
