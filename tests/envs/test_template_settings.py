"""Variables of the chat template: one setting for all that render it."""

from __future__ import annotations

import pytest

from rllib_llm import DPOConfig, GRPOConfig, RewardModelConfig, SFTConfig
from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT, write_manifest
from rllib_llm.cli.generate import CheckpointCompleter, GenerateOptions
from rllib_llm.data.encoding import render_chat
from rllib_llm.envs import rlhf
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.modules.tokenizer import load_tokenizer
from rllib_llm.serving.engine_host import served_tokenizer
from rllib_llm.serving.settings import read_settings
from rllib_llm.shared.errors import Problems, SettingWarning
from tests.algorithms.tiny_runs import built
from tests.tiny_models import byte_tokenizer, llama, save

# Begins with a line break and a block, which environments that trim blocks read in their own way.
TEMPLATE = (
    "\n {% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if not enable_thinking | default(true) %}"
    "{{ mark }}{% endif %}{% endif %}"
)
SETTINGS = {"enable_thinking": False, "mark": '#"é%}'}
ASK = [{"role": "user", "content": "x"}]
PLAIN, SET = "\n[user]x</s>[assistant]", '\n[user]x</s>[assistant]#"é%}'


def right(completions):
    return [0.0] * len(completions)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoint_000000"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    save(folder / MODEL_IN_CHECKPOINT, llama(), tokenizer)
    write_manifest(folder, {})
    return str(folder / MODEL_IN_CHECKPOINT)


def asked(tokenizer, **row) -> str:
    return render_chat(tokenizer, ASK, generation_prompt=True, **row)


def test_they_are_saved_with_the_model_and_a_row_s_own_win(model, tmp_path):
    assert asked(load_tokenizer(model)) == PLAIN
    tokenizer = load_tokenizer(model, template_settings=SETTINGS)
    assert asked(tokenizer) == SET
    assert asked(tokenizer, enable_thinking=True) == PLAIN
    save(tmp_path, llama(), tokenizer)
    assert asked(load_tokenizer(tmp_path)) == SET
    assert asked(load_tokenizer(tmp_path, template_settings={"enable_thinking": True})) == PLAIN


@pytest.mark.parametrize("kind", [SFTConfig, DPOConfig, RewardModelConfig, GRPOConfig])
def test_of_every_stage(kind, model):
    config = kind().language_model(model=model, template_settings=SETTINGS)
    assert asked(config.load_tokenizer()) == SET


def test_of_single_turns_and_conversations(model):
    given = {
        "model": model, "prompts": [{"prompt": ASK}], "reward_functions": f"{__name__}:right",
        "template_settings": SETTINGS, "num_envs": 1,
    }  # fmt: skip
    env = rlhf.create(given)
    assert env.tokenizer.decode(env.reset()[0]["prompt_ids"][0]) == SET
    del given["num_envs"]
    assert ConversationEnv(given).chat_format.render(ASK, generation_prompt=True) == SET


@pytest.mark.parametrize("section", ["conversation", "language_model"])
def test_of_a_run_by_either_section(section, model, ray_session):
    config = GRPOConfig().update_from_dict({
        section: {"template_settings": SETTINGS}, "model": model,
        "env_config": {"prompts": [{"prompt": ASK}] * 2, "reward_functions": f"{__name__}:right"},
        "max_new_tokens": 2, "num_completions": 2, "train_batch_size_per_learner": 4,
    })  # fmt: skip
    assert config.template_settings == SETTINGS
    with built(config) as algorithm:
        env = algorithm.env_runner.env
        assert env.tokenizer.decode(env.reset()[0]["prompt_ids"][0]) == SET
        assert asked(algorithm.get_module().unwrapped().tokenizer) == SET


def test_of_generation_and_servers(model):
    options = GenerateOptions(template_settings='{enable_thinking: false, mark: "#"}')
    assert asked(CheckpointCompleter(model, options).tokenizer) == "\n[user]x</s>[assistant]#"
    with pytest.raises(Problems, match="mapping"):
        CheckpointCompleter(model, GenerateOptions(template_settings="[1]"))
    settings = read_settings({"model": model, "template_settings": SETTINGS}, environment={})
    assert asked(served_tokenizer(model, template_settings=settings.template_settings)) == SET


def test_those_that_act_on_nothing_are_told(model):
    with pytest.warns(SettingWarning, match="enable_thinkng"):
        load_tokenizer(model, template_settings={"enable_thinkng": False})
    with pytest.raises(Problems) as error:
        load_tokenizer(model, template_settings={"tools": []})
    assert [problem.name for problem in error.value.found] == ["template_settings"]
