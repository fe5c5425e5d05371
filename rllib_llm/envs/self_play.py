"""Games of two policies, each with a conversation of its own.

    first says ─▶ relay ─▶ what the second is told ─▶ second says ─▶ relay ─▶ what the first is told

An environment is a subclass of `SelfPlayEnv` with `relay`. Each player's turns are rows of its own,
in a group of its own: what one policy earned says nothing of the other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rllib_llm.conversations.chat_format import Message
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.envs.conversation import ConversationEnv, Response
from rllib_llm.envs.conversation_rollouts import (
    Attempt,
    Complete,
    as_messages,
    new_attempts,
    run_side_by_side,
    sample_turn,
)
from rllib_llm.envs.event_loop import call
from rllib_llm.envs.prompts import PromptRow

NUM_PLAYERS = 2


@dataclass
class Game:
    """A game under way: both players' conversations, the task, and what the environment keeps."""

    attempts: tuple[Attempt, Attempt]
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> Mapping[str, Any]:
        """The data set's row."""
        return self.attempts[0].conversation.task

    def conversation(self, player: int) -> Conversation:
        """What a player was told and said."""
        return self.attempts[player].conversation


class SelfPlayEnv(ConversationEnv):
    """Tasks out, games of two policies in. The first player begins; `max_turns` is of each.

    `players`: their names, under which metrics stand.
    """

    players: ClassVar[tuple[str, str]] = ("first", "second")

    def opening(self, player: int, game: Game) -> str | Sequence[Message]:
        """What a player is told before its first turn: the task's prompt, and the second nothing
        but what is relayed."""
        return self.first_messages(game.conversation(0)) if player == 0 else ()

    def relay(self, player: int, game: Game) -> Response | Awaitable[Response]:
        """What comes of the turn that `player` has just taken: `messages` are for the other one,
        `reward` is the player's own."""
        raise NotImplementedError(f"{type(self).__name__} must define relay.")

    def scores(self, game: Game) -> Sequence[float | None]:
        """What each player earned by the whole game, beside its turns."""
        return (None, None)


def run_games(
    env: SelfPlayEnv,
    rows: Sequence[PromptRow],
    *,
    first_position: int,
    num_completions: int,
    completes: tuple[Complete, Complete],
    max_new_tokens: int,
) -> list[Attempt]:
    """Both players' rollouts, `num_completions` games of each task: row ids and groups of the first
    player are even, those of the second odd.

    Raises:
        EngineFailed: an engine did not sample.
    """
    games: dict[int, Game] = {}
    pairs = zip(
        *(new_attempts(env, rows, first_position, num_completions) for _ in range(NUM_PLAYERS)),
        strict=True,
    )
    for first, second in pairs:
        for player, attempt in enumerate((first, second)):
            attempt.row_id = attempt.row_id * NUM_PLAYERS + player
            attempt.group = attempt.group * NUM_PLAYERS + player
        games[id(first)] = Game((first, second))

    async def play(attempt: Attempt) -> None:
        await _play(env, games[id(attempt)], completes, max_new_tokens)

    firsts = [game.attempts[0] for game in games.values()]
    env.events.run(run_side_by_side(env, firsts, play))
    for game in games.values():
        first, second = game.attempts
        second.invalid, second.error = first.invalid, first.error
    return [attempt for game in games.values() for attempt in game.attempts]


async def _play(
    env: SelfPlayEnv, game: Game, completes: tuple[Complete, Complete], max_new_tokens: int
) -> None:
    """One game from its first turn to its last."""
    told = [as_messages(await call(env.opening, player, game)) for player in range(NUM_PLAYERS)]
    player = 0
    while True:
        attempt = game.attempts[player]
        conversation = attempt.conversation
        if conversation.num_turns >= env.settings["max_turns"]:
            attempt.truncated = "turns"
            break
        conversation.append_messages(_joined(told[player]))
        told[player] = []
        if not await sample_turn(env, attempt, completes[player], max_new_tokens):
            break
        response = await call(env.relay, player, game)
        if response.reward is not None:
            attempt.has_turn_rewards = True
            conversation.add_reward(response.reward)
        game.conversation(0).metrics.update(response.metrics)
        if response.invalid:
            game.attempts[0].invalid = response.invalid
            return
        player = 1 - player
        told[player] += as_messages(response.messages)
        if response.done:
            game.conversation(player).append_last_messages(told[player])
            break
    _score(env, game, await call(env.scores, game))


def _score(env: SelfPlayEnv, game: Game, earned: Sequence[float | None]) -> None:
    for attempt, name, score in zip(game.attempts, env.players, earned, strict=True):
        attempt.earned = None if score is None else float(score)
        total = attempt.conversation.total_reward + (attempt.earned or 0.0)
        attempt.conversation.metrics[f"{name}_score"] = total


def _joined(messages: Sequence[Message]) -> list[Message]:
    """The messages, those of a user in a row as one: many templates take no two."""
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"] == "user":
            both = f"{joined[-1]['content']}\n{message['content']}"
            joined[-1] = {**joined[-1], "content": both}
        else:
            joined.append(message)
    return joined
