"""What a teacher reads of conversations in place of their first messages."""

from __future__ import annotations

import warnings

import pytest
import torch

from rllib_llm.conversations.conversation import Rollout, training_columns
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.frozen_models import FrozenTeacher
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.conversations.scripted import ADD_CALL, add, roll, settings
from tests.conversations.templates import FAMILIES, build_chat_llama
from tests.conversations.test_conversation import random_dialogue

SOLVED = "1 + 2? It is 3."


def prompts_of(batch, prefix=""):
    ids, mask = batch[f"{prefix}prompt_ids"], batch[f"{prefix}prompt_mask"]
    return [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_opening_is_the_same_prompt_in_every_row(family):
    """Also in rows that begin anew because the template writes an old turn otherwise."""
    rollouts, num_forks = [], 0
    for seed in range(10):
        conversation, _ = random_dialogue(family, seed)
        conversation.teacher_opening = conversation.opening
        rollouts.append(Rollout(conversation, 0, seed, 0, valid=True))
        num_forks += conversation.suffixes["fork"]
    batch = training_columns(rollouts, 0)
    assert prompts_of(batch, "teacher_") == prompts_of(batch)
    assert num_forks or family not in ("qwen3", "mistral")


def test_a_column_stands_in_place_of_the_first_prompt():
    tasks = [{"prompt": "1 + 2?", "solved": SOLVED}, {"prompt": "2 + 2?", "solved": "4, said he."}]
    env = ConversationEnv(
        settings(prompts=tasks, tools=[add], teacher_prompt="solved", system="Be kind.",
                 reward_functions=[lambda completions: [1.0] * len(completions)])
    )  # fmt: skip
    try:
        attempts, judged, _ = roll(env, ADD_CALL, "3")
    finally:
        env.close()
    system = {"role": "system", "content": "Be kind."}
    expected = [
        env.chat_format.prompt_ids([system, {"role": "user", "content": task["solved"]}])
        for task in tasks for _ in range(2)
    ]  # fmt: skip
    assert prompts_of(judged.columns, "teacher_") == expected
    assert all(attempt.conversation.num_turns == 2 for attempt in attempts)


class Told(ConversationEnv):
    """The teacher reads what the environment had to say of the answer."""

    def teacher_messages(self, conversation):
        said = conversation.reply.text
        if said == "3":
            return None
        return f"{conversation.task['prompt']} Not {said}."


def test_an_environment_tells_the_teacher_what_was_wrong():
    env = Told(settings(reward_functions=[lambda completions: [1.0] * len(completions)]))
    try:
        _, judged, _ = roll(env, lambda row: "34"[row % 2])
        _, plain, _ = roll(env, "3")
    finally:
        env.close()
    found, own = prompts_of(judged.columns, "teacher_"), prompts_of(judged.columns)
    expected = env.chat_format.prompt_ids([{"role": "user", "content": "2 + 2? Not 4."}])
    assert found[::2] == own[::2] and found[3] == expected
    assert columns.TEACHER_PROMPT_IDS not in plain.columns


def test_a_task_without_the_column_costs_its_rollouts_and_the_first_is_refused():
    tasks = [{"prompt": "1 + 2?", "solved": SOLVED}, {"prompt": "2 + 2?", "solved": ""}]
    given = settings(teacher_prompt="solved",
                     reward_functions=[lambda completions: [1.0] * len(completions)])  # fmt: skip
    env = ConversationEnv({**given, "prompts": tasks})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, judged, _ = roll(env, "3")
    finally:
        env.close()
    assert judged.columns[columns.VALID].tolist() == [True, True, False, False]
    with pytest.raises(Problems) as error:
        ConversationEnv({**given, "prompts": tasks[1:]})
    assert error.value.found[0].name == "the task's solved"


def test_a_teacher_in_the_environment_judges_what_it_reads():
    model = f"{build_chat_llama.__module__}.build_chat_llama"
    env = ConversationEnv(
        settings(tokenizer=None, model=model, prompts=[{"prompt": "1 + 2?", "solved": SOLVED}],
                 tools=[add], teacher_prompt="solved", teacher={"model": model}, teacher_top_k=3,
                 reward_functions=[lambda completions: [1.0] * len(completions)])
    )  # fmt: skip
    try:
        _, judged, _ = roll(env, ADD_CALL, "3", num_prompts=1)
    finally:
        env.close()
    names = (columns.TEACHER_PROMPT_IDS, columns.TEACHER_PROMPT_MASK, columns.COMPLETION_IDS,
             columns.COMPLETION_MASK)  # fmt: skip
    expected = FrozenTeacher(model).judge(*(judged.columns[n] for n in names), top_k=3)
    mask = judged.columns[columns.COMPLETION_MASK]
    for name, column in expected.items():
        torch.testing.assert_close(judged.columns[name][mask], column[mask])
