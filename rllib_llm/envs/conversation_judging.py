"""Scores of finished conversations: of their turns, of the whole, and by reward functions."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from rllib_llm.conversations.chat_format import Messages
from rllib_llm.conversations.conversation import Conversation, Rollout, training_columns
from rllib_llm.envs.actions import Judgement
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.conversation_rollouts import Attempt
from rllib_llm.envs.judges.reward_functions import RewardBatch, shown_message, transcripts
from rllib_llm.envs.judges.rewards import Rewards, UnjudgedError
from rllib_llm.envs.rlhf import EnvConfigError
from rllib_llm.shared import columns

TURNS = "turns"  # component: what was earned at turns
SCORE = "score"  # component: what `ConversationEnv.score` says
ROLLOUT = "rollout"
ByRollout = Callable[[Sequence[Attempt], Sequence[float]], torch.Tensor]
_SHOWN = 300  # characters of a reason


def unjudged_columns(attempts: Sequence[Attempt], pad_token_id: int) -> dict[str, torch.Tensor]:
    """The columns of rollouts that are over and could not be judged: no row is valid."""
    rollouts = [
        Rollout(a.conversation, 0.0, False, a.invalid, a.group, a.row_id, a.row.index)
        for a in attempts
    ]
    return training_columns(rollouts, pad_token_id)


def judge(env: ConversationEnv, attempts: Sequence[Attempt], pad_token_id: int) -> Judgement:
    """The columns of rollouts that are over, with their scores.

    Raises:
        UnjudgedError: all rollouts failed.
        EnvConfigError: nothing says what they are worth.
    """
    # Where the policy was never asked there is nothing that could be judged.
    sound = [a for a in attempts if not a.invalid and a.conversation.num_turns]
    _report(env, attempts, sound)
    components, judged = _components(env, sound)
    valid = dict.fromkeys(map(id, sound), True)
    scores: dict[int, float] = {}
    for i, attempt in enumerate(sound):
        scores[id(attempt)] = attempt.conversation.total_reward + (attempt.earned or 0.0)
        if judged is not None:
            scores[id(attempt)] += float(judged.scores[i])
            valid[id(attempt)] = bool(judged.valid[i])
    rollouts = [
        Rollout(
            attempt.conversation, scores.get(id(attempt), 0.0), valid.get(id(attempt), False),
            attempt.invalid, attempt.group, attempt.row_id, attempt.row.index,
        )
        for attempt in attempts
    ]  # fmt: skip
    batch = training_columns(rollouts, pad_token_id)
    if env.reference is not None:
        names = (columns.PROMPT_IDS, columns.PROMPT_MASK, columns.COMPLETION_IDS,
                 columns.COMPLETION_MASK)  # fmt: skip
        batch[columns.REF_LOGPROBS] = env.reference.logprobs(
            *(batch[name].to(env.device) for name in names), env.settings["temperature"]
        ).cpu()
    row_ids = batch[columns.ROW_ID].tolist()
    firsts = {row_id: place for place, row_id in reversed([*enumerate(row_ids)])}
    by_rollout = functools.partial(_by_rollout, firsts, len(row_ids))
    earned = {name: by_rollout(sound, column) for name, column in components.items()}

    def on_device(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: column.to(env.device) for name, column in held.items()}

    return Judgement(
        batch[columns.SCORES].to(env.device),
        on_device(batch),
        on_device(earned),
        on_device(_metrics(by_rollout, attempts, sound, judged)),
        _texts(attempts),
    )


def _by_rollout(
    firsts: Mapping[int, int],
    num_rows: int,
    attempts: Sequence[Attempt],
    numbers: Sequence[float],
) -> torch.Tensor:
    """[rows] float32, the numbers at the first rows of their rollouts, NaN elsewhere. `firsts`: the
    place of each rollout's first row."""
    column = torch.full((num_rows,), torch.nan)
    for attempt, number in zip(attempts, numbers, strict=True):
        column[firsts[attempt.row_id]] = number
    return column


def _components(
    env: ConversationEnv, sound: Sequence[Attempt]
) -> tuple[dict[str, list[float]], Rewards | None]:
    """The score components of each valid rollout by name, with the reward functions' metrics."""
    judged = env.rewards(_reward_batch(env, sound)) if env.rewards is not None and sound else None
    components: dict[str, list[float]] = {}
    if judged is not None:
        components = {name: column.tolist() for name, column in judged.components.items()}
    if any(attempt.has_turn_rewards for attempt in sound):
        components[TURNS] = [attempt.conversation.total_reward for attempt in sound]
    if any(attempt.earned is not None for attempt in sound):
        nothing = float("nan")
        components[SCORE] = [
            nothing if attempt.earned is None else attempt.earned for attempt in sound
        ]
    if not components and sound and all(attempt.truncated for attempt in sound):
        components[TURNS] = [0.0] * len(sound)  # the policy never came to a turn's end
    if not components and sound:
        raise EnvConfigError(
            "env_config must have 'reward_functions' or 'reward_model', or respond() and score() "
            "must give rewards: nothing said what any of these conversations is worth. Return a "
            "reward from one of them."
        )
    return components, judged


def _reward_batch(env: ConversationEnv, sound: Sequence[Attempt]) -> RewardBatch:
    """The conversations as reward functions take them; see `RewardBatch`. Their texts depend
    neither on the template nor on where it begins a row."""
    batch = training_columns(
        [Rollout(a.conversation, 0.0, True, "", 0, i, 0) for i, a in enumerate(sound)],
        int(env.tokenizer.pad_token_id),
    )
    ends = batch[columns.ROW_ID].bincount().cumsum(0) - 1
    starts = [attempt.conversation.opening for attempt in sound]
    chats = [attempt.conversation.messages for attempt in sound]
    said = [chat[len(start) :] for chat, start in zip(chats, starts, strict=True)]
    contexts = [_before_last_turn(chat) for chat in chats]
    tasks = [attempt.conversation.task for attempt in sound]
    names = dict.fromkeys(name for task in tasks for name in task if name != "prompt")
    return RewardBatch(
        prompt_ids=batch[columns.PROMPT_IDS][ends],
        prompt_mask=batch[columns.PROMPT_MASK][ends],
        completion_ids=batch[columns.COMPLETION_IDS][ends],
        completion_mask=batch[columns.COMPLETION_MASK][ends],
        prompts=transcripts(contexts),
        completions=[_last_words(attempt) for attempt in sound],
        completion_messages=said,
        context_messages=contexts,
        columns={
            **{name: [task.get(name) for task in tasks] for name in names},
            "messages": starts,
            "conversations": [attempt.conversation for attempt in sound],
            "environments": [attempt.conversation.state.get("environment") for attempt in sound],
        },
        global_step=env.global_step,
        max_steps=env.max_steps,
    )


def _before_last_turn(chat: Messages) -> Messages:
    """The messages before the assistant's last turn; all of them if there is none."""
    places = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    return chat[: places[-1]] if places else chat


def _last_words(attempt: Attempt) -> str:
    reply = attempt.conversation.reply
    return "" if reply is None else reply.content


def _metrics(
    by_rollout: ByRollout,
    attempts: Sequence[Attempt],
    sound: Sequence[Attempt],
    judged: Rewards | None,
) -> dict[str, torch.Tensor]:
    metrics: dict[str, torch.Tensor] = {}
    failed = [float(bool(attempt.invalid)) for attempt in attempts]
    metrics[f"{ROLLOUT}{columns.FAILED}"] = by_rollout(attempts, failed).nan_to_num()
    counted: dict[str, list[float]] = {
        "num_turns": [a.conversation.num_turns for a in sound],
        "num_forks": [a.conversation.suffixes["fork"] for a in sound],
        "truncated": [float(bool(a.truncated)) for a in sound],
    }
    for name in sorted({name for attempt in sound for name in attempt.counts}):
        counted[name] = [attempt.counts.get(name, float("nan")) for attempt in sound]
    for name in sorted({name for attempt in sound for name in attempt.conversation.metrics}):
        counted[name] = [a.conversation.metrics.get(name, float("nan")) for a in sound]
    metrics.update({name: by_rollout(sound, numbers) for name, numbers in counted.items()})
    if judged is not None:
        for name, column in judged.metrics.items():
            metrics[name] = by_rollout(sound, column.tolist())
        for name, column in judged.failed.items():
            shown = by_rollout(sound, column.float().tolist())
            metrics[f"{name}{columns.FAILED}"] = shown.nan_to_num()
    return metrics


def _texts(attempts: Sequence[Attempt]) -> dict[str, list[str]]:
    """For each row: the prompt, the text after it on the row's path, and both as JSON."""
    shown: dict[str, list[str]] = {"prompt": [], "completion": [], "messages": []}
    for attempt in attempts:
        for messages, start in _paths(attempt.conversation):
            for name, part in (("prompt", messages[:start]), ("completion", messages[start:])):
                shown[name].append("\n".join(shown_message(message) for message in part))
            shown["messages"].append(json.dumps(messages, ensure_ascii=False, default=str))
    return shown


def _paths(conversation: Conversation) -> list[tuple[Messages, int]]:
    """(messages, how many of them are the prompt's) of each row."""
    rows = [([*map(dict, row.messages)], row.num_prompt_messages) for row in conversation.rows()]
    return rows or [(conversation.messages, len(conversation.opening))]


def _report(env: ConversationEnv, attempts: Sequence[Attempt], sound: Sequence[Attempt]) -> None:
    failed = [attempt for attempt in attempts if attempt.invalid]
    if not failed:
        return
    first, count = failed[0], len(failed)
    if not sound:
        raise UnjudgedError(
            f"at least one of {count} conversations must come to an end: all failed, the first "
            f"with {first.invalid[:_SHOWN]}. Correct the environment, or what it depends on."
        ) from first.error
    if not env.has_warned:
        env.has_warned = True
        warnings.warn(
            f"{count} of {len(attempts)} conversations failed and are left out, the first with "
            f"{first.invalid[:_SHOWN]}. Later failures are only counted "
            f"(env/{ROLLOUT}{columns.FAILED}).",
            stacklevel=2,
        )
