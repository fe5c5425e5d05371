"""Rollouts of conversations: the loop of one, many at the same time, what one that fails costs, and
the scores of those that are over.

A limit that the policy reaches (turns, tokens) ends its conversation, which is judged as it stands.
What is not the policy's fault (an error of the environment, too many seconds) makes the rollout
invalid: it counts in no statistic, and never as a score of 0.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import torch

from rllib_llm.conversations.chat_format import Message
from rllib_llm.conversations.conversation import Conversation, Rollout, training_columns
from rllib_llm.conversations.tool_calls import ToolCall
from rllib_llm.engines.protocol import Ended
from rllib_llm.envs.actions import Judgement
from rllib_llm.envs.conversation import ConversationEnv, Response, no_room
from rllib_llm.envs.judges.reward_functions import (
    RewardBatch,
    as_number,
    copied,
    question,
    shown_message,
    transcripts,
)
from rllib_llm.envs.judges.rewards import Rewards, RewardSum, UnjudgedError
from rllib_llm.envs.prompts import PromptRow
from rllib_llm.envs.tools import ToolResult
from rllib_llm.modules.images import files_text, image_columns
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problem, require
from rllib_llm.shared.messages import told
from rllib_llm.shared.remote import call, within

logger = logging.getLogger(__name__)
Complete = Callable[..., Awaitable[Ended]]
"""(token ids, most new tokens, row, turn) -> what was sampled; where there are images also
`images` and `num_shown`, see `protocol.Row`."""


class EngineFailed(RuntimeError):
    """The engine gave no tokens; it is the run's trouble, not one rollout's."""


_LARGEST = float(torch.finfo(torch.float32).max)
_TOOL_FAILED = ("error", "timeout")  # of the tool; other failures are the policy's mistakes
_OF_TOOLS = ("num_tool_calls", "tool_failures", "tool_timeouts", "tool_seconds")


def run_rollouts(
    env: ConversationEnv, rows: Sequence[PromptRow], *, positions: Sequence[int],
    num_completions: int, complete: Complete, max_new_tokens: int, stride: int = 0,
) -> list[Rollout]:  # fmt: skip
    """Conversations about all tasks, `num_completions` of each, in the order of the tasks.

    Raises:
        EngineFailed: the engine did not sample.
    """
    attempts = new_attempts(env, rows, positions, num_completions, stride)

    env.events.run(run_side_by_side(
        env, attempts, lambda attempt: _Player(env, attempt, complete, max_new_tokens).converse()
    ))  # fmt: skip
    return attempts


def new_attempts(
    env: ConversationEnv, rows: Sequence[PromptRow], positions: Sequence[int], num_completions: int,
    stride: int = 0,
) -> list[Rollout]:  # fmt: skip
    """Rollouts that have not begun, `num_completions` of each task, whose group has the position
    beside it. `stride`: see `SampleRequest`."""
    attempts = []
    for group, row in zip(positions, rows, strict=True):
        for copy in range(num_completions):
            conversation = env.new_conversation(row, copied(row.task()))
            row_id = group * (stride or num_completions) + copy
            attempts.append(Rollout(conversation, group, row_id, row.index))
    return attempts


async def run_side_by_side(
    env: ConversationEnv, attempts: Sequence[Rollout], converse: Callable[[Rollout], Awaitable]
) -> None:
    """Runs and ends rollouts, `max_concurrent` at a time; a failure is recorded in its own attempt.

    Raises:
        EngineFailed: of any of them.
    """
    places = asyncio.Semaphore(int(env.settings["max_concurrent"]))
    max_seconds = float(env.settings["max_seconds"])
    endings = []

    async def end(attempt: Rollout) -> None:
        try:
            await within(env.end_seconds, call(env.end, attempt.conversation))
        except Exception as error:  # noqa: BLE001  (it must not replace what the rollout gave)
            logger.warning("end() of rollout %d failed: %s", attempt.row_id, told(error))

    async def one(attempt: Rollout) -> None:
        async with places:
            start = time.perf_counter()
            try:
                late = f"the rollout took longer than max_seconds={max_seconds:g}"
                await within(max_seconds, converse(attempt), late)
            except EngineFailed:
                raise
            except Exception as error:  # noqa: BLE001  (of a user's environment: it costs the rollout)
                attempt.invalid, attempt.error = told(error), error
            finally:  # a cancellation does not cut it short
                attempt.count("seconds", time.perf_counter() - start)
                endings.append(asyncio.ensure_future(end(attempt)))
                await asyncio.shield(endings[-1])

    tasks = [asyncio.ensure_future(one(attempt)) for attempt in attempts]
    try:
        await asyncio.gather(*tasks)
    finally:  # where one found the engine broken, the others are cancelled
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*endings)


class _Player:
    """One conversation from its first message to its last."""

    def __init__(
        self, env: ConversationEnv, attempt: Rollout, complete: Complete, max_new_tokens: int
    ) -> None:
        self.env, self.attempt, self.complete = env, attempt, complete
        self.conversation, self.toolbox = attempt.conversation, env.toolbox
        self.max_new_tokens = max_new_tokens
        self.deadline = time.monotonic() + float(env.settings["max_seconds"])

    async def converse(self) -> None:
        """Plays the conversation."""
        env, conversation = self.env, self.conversation
        self.attempt.counts["sample_seconds"] = 0.0
        conversation.append_messages(as_messages(await call(env.start, conversation)))
        self.toolbox = env.toolbox_of(conversation)
        if self.toolbox.tools:
            self.attempt.counts.update(dict.fromkeys(_OF_TOOLS, 0.0))
        while await self._sample():
            is_last = conversation.num_turns >= env.settings["max_turns"]
            response = await self._answer(is_last)
            if response.reward is not None:
                self.attempt.has_turn_rewards = True
                conversation.add_reward(finite("respond()", response.reward))
            for name, number in response.metrics.items():
                conversation.metrics[str(name)] = _number("respond()", f"metric {name!r}", number)
            messages = as_messages(response.messages)
            if response.invalid:
                self.attempt.invalid = response.invalid
                return
            if response.done or is_last:
                conversation.append_last_messages(messages)
                self.attempt.truncated = "" if response.done else "turns"
                break
            conversation.append_messages(messages)
        earned = await call(env.score, conversation)
        if earned is not None:
            self.attempt.earned = finite("score()", earned)
        taught = await call(env.teacher_messages, conversation)
        conversation.teacher_opening = None if taught is None else as_messages(taught)

    async def _sample(self) -> bool:
        """Samples the assistant's turn; False where it was cut off, and the conversation ends."""
        conversation, token_ids = self.conversation, self.conversation.token_ids
        room, most = self.max_new_tokens, self.env.max_tokens
        if most is not None:
            room = min(room, most - len(token_ids))
        if room < 1 and not conversation.num_turns:
            error = no_room(len(token_ids), max_tokens=most, positions=self.env.num_positions)
            assert error is not None, "no room was left"
            raise error
        if room >= 1:
            start = time.perf_counter()
            sampled = await self.complete(
                token_ids, room, self.attempt.row_id, conversation.num_turns, **conversation.shown
            )
            self.attempt.count("sample_seconds", time.perf_counter() - start)
            conversation.append_sampled(
                sampled.token_ids, sampled.logprobs, sampled.versions, finish=sampled.finish,
                experts=sampled.experts,
            )  # fmt: skip
            if sampled.finish == "stop":
                return True
        self.attempt.truncated = "tokens"
        return False

    async def _answer(self, is_last: bool) -> Response:
        """The results of the called tools, or else the environment's response. The tools of the
        last allowed turn are not run: nobody would read what they say."""
        reply = self.conversation.reply
        assert reply is not None, "a turn was sampled"
        if not reply.tool_calls or not self.toolbox.tools:
            response = await call(self.env.respond, self.conversation)
            if not isinstance(response, Response):
                raise TypeError(f"respond() must return a Response, not {type(response)}")
            return response
        if is_last and not self.env.runs_last_calls:
            return Response()
        results = []
        for asked in reply.tool_calls:  # in their order: one may need what another has done
            left = max(0.01, self.deadline - time.monotonic())
            result = await self.toolbox.run(asked, timeout_s=left)
            self.attempt.count("num_tool_calls")
            self.attempt.count("tool_failures", float(bool(result.failure)))
            self.attempt.count("tool_timeouts", float(result.failure == "timeout"))
            self.attempt.count("tool_seconds", result.seconds)
            has_failed = result.failure in _TOOL_FAILED
            is_down = result.failure == "unavailable"
            if is_down or (has_failed and self.env.settings["tool_errors"] == "invalid"):
                return Response(invalid=f"tool {asked.name!r}: {result.text}")
            results.append(result)
        said = _results(reply.tool_calls, results)
        return Response(said, done=await self.env.stops(self.conversation, said))


def _results(calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
    """Tool results as messages. Templates want a result for each call that they write and none for
    others: what is wrong with a call that could not be read follows the last result, or is a
    user's words without one."""
    answered = list(zip(calls, results, strict=True))
    unread = [result.text for asked, result in answered if asked.arguments is None]
    said: list[dict[str, Any]] = [
        {"role": "tool", "name": asked.name, "tool_call_id": asked.id, "content": result.text}
        for asked, result in answered if asked.arguments is not None
    ]  # fmt: skip
    if unread and not said:
        return [{"role": "user", "content": "\n".join(unread)}]
    if unread:
        said[-1]["content"] = "\n".join([said[-1]["content"], *unread])
    return [*said]


def finite(source: str, value: Any, what: str = "reward") -> float:
    """A reward, or another number, that `source` gave.

    Raises:
        ValueError: it is none, or no finite one of float32.
    """
    number = _number(source, what, value)
    if not abs(number) <= _LARGEST:
        raise ValueError(
            f"{source} gave the {what} {number}, which must be a finite number of float32. Return "
            f"None where there is no {what}."
        )
    return number


def _number(source: str, what: str, value: Any) -> float:
    try:
        return as_number(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{source} gave the {what} {str(value)[:80]!r}, which must be a number: {error}"
        ) from error


def as_messages(given: Any) -> list[Message]:
    """An environment's answer as messages; text becomes a user message.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages = [] if given is None else given
    if isinstance(messages, (list, tuple)) and all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str)
        for message in messages
    ):
        return list(messages)
    what = "a text or messages {role, content}"
    raise TypeError(f"an environment must return {what}, not {str(given)[:80]!r}")


TURNS = "turns"  # component: what was earned at turns
SCORE = "score"  # component: what `ConversationEnv.score` says
ROLLOUT = "rollout"
ByRollout = Callable[[Sequence[Rollout], Sequence[float]], torch.Tensor]
_SHOWN = 300  # characters of a reason
_TOKENS = (
    columns.PROMPT_IDS, columns.PROMPT_MASK, columns.COMPLETION_IDS, columns.COMPLETION_MASK,
)  # fmt: skip


def judge(env: ConversationEnv, attempts: Sequence[Rollout], pad_token_id: int) -> Judgement:
    """The columns of rollouts that are over, with their scores.

    Raises:
        UnjudgedError: all rollouts failed.
        Problems: nothing says what they are worth.
    """
    # Where the policy was never asked there is nothing that could be judged.
    sound = [a for a in attempts if not a.invalid and a.conversation.num_turns]
    _report(env, attempts, sound)
    components, judged = _components(env, sound)
    for i, attempt in enumerate(sound):
        attempt.score = attempt.conversation.total_reward + (attempt.earned or 0.0)
        attempt.valid = judged is None or bool(judged.valid[i])
        if judged is not None:
            attempt.score += float(judged.scores[i])
            if attempt.has_turn_rewards or attempt.earned is not None:  # functions may say nothing
                attempt.valid |= all(bool(c[i].isnan()) for c in judged.components.values())
        if not abs(attempt.score) <= _LARGEST:  # the sum of numbers that are finite each
            attempt.score, attempt.valid = 0.0, False
    batch = training_columns(attempts, pad_token_id)
    if env.teacher is not None:
        require(columns.IMAGE_ROW not in batch, "teacher_in", "environment",
                "be 'learner' where prompts show images")  # fmt: skip
        tasks = {attempt.row_id: attempt.conversation.task for attempt in attempts}
        has_own = columns.TEACHER_PROMPT_IDS in batch
        names = (*columns.TEACHER_PROMPTS, *_TOKENS[2:]) if has_own else _TOKENS
        told = env.teacher.judge(
            [tasks[row_id] for row_id in batch[columns.ROW_ID].tolist()],
            *(batch[name].to(env.device) for name in names),
        )  # fmt: skip
        batch |= {name: column.cpu() for name, column in told.items()}
    if env.reference is not None:
        given = (batch[name].to(env.device) for name in _TOKENS)
        shown = {each.row_id: each.conversation.shown.get("images", {}) for each in attempts}
        images = image_columns([shown[row_id] for row_id in batch[columns.ROW_ID].tolist()])
        seen = {"seen": images} if images else {}
        logprobs = env.reference.logprobs(*given, env.settings["temperature"], **seen)
        batch[columns.REF_LOGPROBS] = logprobs.cpu()
    row_ids = batch[columns.ROW_ID].tolist()
    firsts = {row_id: place for place, row_id in reversed([*enumerate(row_ids)])}

    def by_rollout(of: Sequence[Rollout], numbers: Sequence[float]) -> torch.Tensor:
        """[rows] float32, the numbers at the first rows of their rollouts, NaN elsewhere."""
        column = torch.full((len(row_ids),), torch.nan)
        for attempt, number in zip(of, numbers, strict=True):
            column[firsts[attempt.row_id]] = number
        return column

    def on_device(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: column.to(env.device) for name, column in held.items()}

    batch, scores = on_device(batch), batch[columns.SCORES].to(env.device)
    parts = on_device({name: by_rollout(sound, column) for name, column in components.items()})
    if env.keeps_parts:
        batch |= (env.rewards or RewardSum([])).parts(parts)
    metrics = on_device(_metrics(by_rollout, attempts, sound, judged))
    return Judgement(scores, batch, parts, metrics, _texts(attempts))


def _components(
    env: ConversationEnv, sound: Sequence[Rollout]
) -> tuple[dict[str, list[float]], Rewards | None]:
    """The score components of each valid rollout by name, with the reward functions' metrics."""
    judged = env.rewards(_reward_batch(env, sound)) if env.rewards is not None and sound else None
    components = {} if judged is None else {k: v.tolist() for k, v in judged.components.items()}
    if any(attempt.has_turn_rewards for attempt in sound):
        components[TURNS] = [attempt.conversation.total_reward for attempt in sound]
    if any(attempt.earned is not None for attempt in sound):
        components[SCORE] = [torch.nan if a.earned is None else a.earned for a in sound]
    if not components and sound:
        require(all(attempt.truncated for attempt in sound), "rewards", ...,
                "have functions or a model, or respond() or score() must return rewards",
                "nothing judged any of these conversations")  # fmt: skip
        components[TURNS] = [0.0] * len(sound)  # the policy never came to a turn's end
    return components, judged


def _reward_batch(env: ConversationEnv, sound: Sequence[Rollout]) -> RewardBatch:
    """The conversations as reward functions take them; see `RewardBatch`. Their texts depend
    neither on the template nor on where it begins a row."""
    batch = training_columns(sound, int(env.tokenizer.pad_token_id))
    lasts = {row_id: place for place, row_id in enumerate(batch[columns.ROW_ID].tolist())}
    ends = list(lasts.values())
    starts = [attempt.conversation.opening for attempt in sound]
    chats = [attempt.conversation.messages for attempt in sound]
    said = [chat[len(start) :] for chat, start in zip(chats, starts, strict=True)]
    contexts, shown = [], []  # the latter with the places of images
    for attempt, chat in zip(sound, chats, strict=True):
        places = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
        contexts.append(chat[: places[-1]] if places else chat)
        pictures = attempt.conversation.pictures
        shown.append(contexts[-1] if pictures is None else pictures.placed_in(contexts[-1]))
    tasks = [attempt.conversation.task for attempt in sound]
    names = dict.fromkeys(name for task in tasks for name in task if name != "prompt")
    return RewardBatch(
        batch[columns.PROMPT_IDS][ends], batch[columns.PROMPT_MASK][ends],
        batch[columns.COMPLETION_IDS][ends], batch[columns.COMPLETION_MASK][ends],
        prompts=transcripts(contexts),
        completions=["" if (r := a.conversation.reply) is None else r.content for a in sound],
        completion_messages=said, context_messages=shown,
        images=[_files(attempt.conversation) for attempt in sound],
        columns={
            **{name: [task.get(name) for task in tasks] for name in names},
            "messages": starts,
            "conversations": [attempt.conversation for attempt in sound],
            "environments": [attempt.conversation.state.get("environment") for attempt in sound],
        },
        global_step=env.global_step, max_steps=env.max_steps,
    )  # fmt: skip


def _metrics(
    by_rollout: ByRollout, attempts: Sequence[Rollout], sound: Sequence[Rollout],
    judged: Rewards | None,
) -> dict[str, torch.Tensor]:  # fmt: skip
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


def _texts(attempts: Sequence[Rollout]) -> dict[str, list[str]]:
    """For each row: the prompt, the text after it on the row's path, both as JSON, the words of the
    prompt's last user message, and, where there are any, the files that the prompt shows."""
    names = ("prompt", "completion", "messages", "question")
    shown: dict[str, list[str]] = {name: [] for name in names}
    files: list[str] = []
    for attempt in attempts:
        chat = attempt.conversation
        rows = [([*map(dict, row.messages)], row.num_prompt_messages) for row in chat.rows()]
        for messages, start in rows or [(chat.messages, len(chat.opening))]:
            for name, part in (("prompt", messages[:start]), ("completion", messages[start:])):
                shown[name].append("\n".join(shown_message(message) for message in part))
            shown["question"].append(question(messages[:start]))
            shown["messages"].append(json.dumps(messages, ensure_ascii=False, default=str))
            files.append(_files(chat))
    return {**shown, columns.IMAGES: files} if any(files) else shown


def _files(chat: Conversation) -> str:
    return files_text(chat.pictures.images) if chat.pictures else ""


def _report(env: ConversationEnv, attempts: Sequence[Rollout], sound: Sequence[Rollout]) -> None:
    failed = [attempt for attempt in attempts if attempt.invalid]
    if not failed:
        return
    first, count = failed[0], len(failed)
    if not sound:
        found = Problem(
            f"at least one of {count} conversations", "come to an end",
            f"all failed, the first with {first.invalid[:_SHOWN].rstrip('.')}",
        )  # fmt: skip
        raise UnjudgedError([found], judge=ROLLOUT) from first.error
    if not env.has_warned:
        env.has_warned = True
        warnings.warn(
            f"{count} of {len(attempts)} conversations failed and are left out, the first with "
            f"{first.invalid[:_SHOWN]}. Later ones are counted (env/{ROLLOUT}{columns.FAILED}).",
            stacklevel=2,
        )  # fmt: skip
