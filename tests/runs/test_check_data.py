"""What is wrong with data under the settings is told without Ray."""

from __future__ import annotations

import json
import re

import pytest

from rllib_llm.algorithms.reward_model import RewardModelConfig
from rllib_llm.algorithms.sft import SFTConfig
from rllib_llm.runs.doctor.data_rules import row_problems
from rllib_llm.shared.errors import problems_in
from tests.algorithms import tiny_runs as tiny

CHATS = [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}]
JUDGES = "rllib_llm.envs.judges"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def needs_an_answer(completions, answer):
    return [float(text == one) for text, one in zip(completions, answer, strict=True)]


def takes_no_completions(prompts):
    return [0.0 for _ in prompts]


def constant(completions):
    return [0.0 for _ in completions]


def raises():
    raise OSError("gone")


def yields_and_raises():
    yield "1+1=2"
    raise OSError("gone")


def sft(data, **training):
    return SFTConfig().language_model(model=tiny.MODEL).training(data=data, **training)


def grpo(max_new_tokens=5, **env):
    config = tiny.grpo().sampling(max_new_tokens=max_new_tokens)
    config.env_config.update(env)
    return config


def test_what_is_right_passes():
    assert not problems_in(row_problems, sft(tiny.TEXTS, eval_data=f"{tiny.HERE}.build_texts"))
    assert not problems_in(row_problems, tiny.reward_model())
    assert not problems_in(row_problems, grpo())
    # Not there yet, or not at hand.
    assert not problems_in(row_problems, sft("${texts.data}"))
    assert not problems_in(row_problems, sft(tiny.TEXTS).language_model(model="${sft.model}"))


@pytest.mark.parametrize("config, message", [
    (sft([{"question": "?"}]), r"^data: row 0 of .* must have 'text'"),
    (sft(tiny.TEXTS, eval_data=[]), r"^eval_data must .* is empty"),
    (sft(CHATS), r"data: row 0 of .*the tokenizer has no chat template. Set chat_template"),
    (RewardModelConfig().language_model(model=tiny.MODEL).training(data=tiny.TEXTS),
     "must have the columns 'chosen' and 'rejected'"),
    (grpo(max_prompt_len=4000), "max_prompt_len=4000 must be at most 27 with max_new_tokens=5"),
    (grpo(max_new_tokens=1000), "max_new_tokens=1000 must be at most 24:"),
    (grpo(prompts=None), "prompts must have data: there is nothing to complete"),
    (grpo(reward_functions=None), "nothing judges the completions"),
    (grpo(reward_functions=needs_an_answer, prompts=["1+1="]),
     r"'needs_an_answer' must find its arguments \['answer'\] among the columns"),
    (grpo(reward_functions={"function": f"{JUDGES}.judge_model.JudgeModel",
                            "kwargs": {"base_url": "http://h/v1", "model": "m"}}),
     rf"rewards.functions='{JUDGES}.judge_model.JudgeModel' must score completions: .*JudgeServer"),
    (grpo(reward_functions=f"{JUDGES}.no_such.MathVerify"),
     rf"must name something in '{JUDGES}': it has no 'no_such'"),
    (grpo(reward_functions=takes_no_completions), "takes_no_completions.*completions"),
    (grpo(reward_functions=[constant, constant]), r"they are named \['constant', 'constant'\]"),
    (grpo(reward_functions={"fn": "a.b"}), r"rewards.functions.fn must be a known key"),
    (grpo(prompts=f"{__name__}.raises"), r"must give rows: OSError: gone, raised in .*py:\d+"),
    (sft(f"{__name__}.yields_and_raises"), r"rows: OSError: gone, .*\(yields_and_raises\)"),
    (grpo(eval_fraction=0.99, eval_prompts=None), "must leave prompts to train on"),
    (grpo(prompts=[{"prompt": CHATS[0]["messages"]}]), "the tokenizer has no chat template"),
    (grpo(max_prompt_len=3, prompt_overflow="error"), r"row \d: prompt must have at most"),
    (grpo(reference="tests.tiny_models.build_llama"), "must have the vocabulary of the policy"),
])  # fmt: skip
def test_what_is_wrong_is_told(config, message):
    assert re.search(message, "\n".join(map(str, problems_in(row_problems, config))))


def test_rows_that_cannot_be_read_are_told_once():
    told = problems_in(row_problems, grpo(prompts=[1, 2, 3]))
    assert len(told) == 1 and "row 0 is int" in str(told[0])


def test_only_prompts_that_there_are_need_room():
    config = grpo(max_new_tokens=26)  # of 32 positions; the longest prompt has 5 tokens
    del config.env_config["max_prompt_len"]
    assert not problems_in(row_problems, config)
    config = config.copy(copy_frozen=False).sampling(max_new_tokens=28)
    (found,) = problems_in(row_problems, config)
    assert found.reason.startswith("the longest prompt has 5 tokens")


def test_a_chat_template_makes_conversations_readable(tmp_path):
    config = sft(CHATS)
    assert not problems_in(row_problems, config.language_model(chat_template=TEMPLATE))
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    config.language_model(chat_template=str(file)).validate()
    assert config.chat_template == TEMPLATE  # workers and later runs need not find the file
    chats = [{"prompt": CHATS[0]["messages"]}]
    config = grpo(prompts=chats, chat_template=TEMPLATE, eval_prompts=None)
    assert not problems_in(row_problems, config)


def test_large_files_are_left_to_the_run(tmp_path, monkeypatch):
    from rllib_llm.data import sources

    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"question": "?"}))
    assert sources.is_quick_to_read(str(file))
    with file.open("a") as stream:
        stream.truncate(65 * 1024**2)
    assert not sources.is_quick_to_read(str(file))
    assert not sources.is_quick_to_read({"path": "org/dataset"})
    assert not problems_in(row_problems, sft(str(file)))


def test_prompts_are_loaded_once():
    loads = []

    def prompts():
        loads.append(1)
        return [{"prompt": "1+1=", "answer": "2"}]

    assert not problems_in(row_problems, grpo(prompts=prompts, reward_functions=needs_an_answer))
    assert len(loads) == 1
