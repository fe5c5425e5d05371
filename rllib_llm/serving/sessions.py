"""Conversations of agents that know nothing of training, recorded token by token.

    agent ── whole list of messages, each time ──▶ Session ── what is new of it ──▶ Conversation

What the policy said is never encoded again: the tokens of a turn are those that were sampled. A
list of messages that does not begin like a path that is known begins a path of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.serving.chat import refused_by_template
from rllib_llm.serving.choices import Piece
from rllib_llm.serving.errors import ApiError
from rllib_llm.serving.schemas import ChatRequest

MAX_SESSIONS = 10_000


@dataclass(frozen=True)
class Rules:
    """How the turns of a session are sampled, whatever its agent asks for: whoever learns from them
    must know what they were drawn from.

    sampling: fields of a request that take the place of the agent's. max_new_tokens: of a turn.
    max_turns: of the session. max_tokens: of prompt and turn. template_settings: variables of the
    chat template that the agent does not name.
    """

    sampling: Mapping[str, Any]
    max_new_tokens: int
    max_turns: int
    max_tokens: int
    template_settings: Mapping[str, Any]


class Session:
    """What one agent said and was told.

    `lock`: of its requests, which are answered one after the other. `limit`: the one of its rules
    that it ran into, "turns" or "tokens".

    Args:
        rules: of its turns; None: they are sampled as the agent asks.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.lock = asyncio.Lock()
        self.rules, self.limit = rules, ""
        self.conversations: list[Conversation] = []
        self.created = time.time()
        self.reward: float | None = None

    @property
    def num_turns(self) -> int:
        """Turns that were sampled."""
        return sum(conversation.num_turns for conversation in self.conversations)

    def template_settings(self, asked: Mapping[str, Any] | None) -> dict[str, Any]:
        """Variables of the chat template."""
        return {**(self.rules.template_settings if self.rules else {}), **(asked or {})}

    def governed(self, body: ChatRequest, prompt_len: int) -> ChatRequest:
        """The request as the session's rules have it.

        Raises:
            ApiError: 400, a limit is reached, or the answer is to keep to a schema.
        """
        rules = self.rules
        if rules is None:
            return body
        if body.response_format is not None and body.response_format.type != "text":
            raise ApiError(
                400, "response_format must be text: the policy learns from what it samples freely.",
                param="response_format", code="unsupported_value",
            )  # fmt: skip
        room = min(rules.max_new_tokens, rules.max_tokens - prompt_len)
        if self.num_turns >= rules.max_turns or room < 1:
            self.limit = "tokens" if room < 1 else "turns"
            reached = rules.max_tokens if room < 1 else rules.max_turns
            raise ApiError(
                400, f"The session has reached max_{self.limit}={reached} and is over.",
                param="messages", code="session_limit",
            )  # fmt: skip
        asked = body.max_completion_tokens or body.max_tokens or room
        turn = {"noise_turn": self.num_turns, "max_completion_tokens": min(asked, room)}
        return body.model_copy(update={**rules.sampling, **turn})

    def begin_turn(
        self, chat_format: ChatFormat, messages: Sequence[Mapping[str, Any]]
    ) -> Conversation:
        """The conversation that these messages go on with, or begin; its `token_ids` are the
        prompt.

        Raises:
            ApiError: 400, the template refuses the messages, or the assistant is to answer itself.
        """
        known = [each for each in self.conversations if each.chat_format is chat_format]
        for conversation in reversed(known):
            node = _last_common_turn(conversation, messages)
            if node is not None:
                conversation.branch(node)
                said = len(_messages_until(conversation, node))
                self._append(conversation, messages[said:])
                self.conversations.remove(conversation)
                self.conversations.append(conversation)
                return conversation
        conversation = Conversation(chat_format)
        self._append(conversation, messages)
        self.conversations.append(conversation)
        return conversation

    def _append(self, conversation: Conversation, new: Sequence[Mapping[str, Any]]) -> None:
        with refused_by_template():
            conversation.append_messages(new)

    def end_turn(
        self, conversation: Conversation, piece: Piece | None, versions: Sequence[int]
    ) -> None:
        """Keeps what was sampled; None: nothing whole was, and the turn is taken back.

        Args:
            conversation: that the turn belongs to.
            piece: all of the completion.
            versions: of the weights that sampled each token, the publisher's.
        """
        if piece is not None and piece.token_ids:
            ends = conversation.chat_format.stop_token_ids
            finish = "stop" if piece.token_ids[-1] in ends else "length"
            conversation.append_sampled(piece.token_ids, piece.logprobs, versions, finish=finish)
            return
        parent = conversation.nodes[-1].parent
        if parent is None and len(conversation.nodes) == 1:
            self.conversations.remove(conversation)
        elif parent is not None:
            conversation.branch(parent)

    def add_reward(self, reward: float) -> None:
        """Rewards the turn that was sampled last.

        Raises:
            ApiError: 400, there is none.
        """
        for conversation in reversed(self.conversations):
            if conversation.num_turns:
                conversation.add_reward(reward)
                self.reward = (self.reward or 0.0) + reward
                return
        raise ApiError(
            400, "reward must follow an answer: the session has none yet.", param="reward",
            code="invalid_value",
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Its rows of training, and what was said."""
        rows = [row for conversation in self.conversations for row in conversation.rows()]
        return {
            "created": int(self.created),
            "reward": self.reward,
            "messages": [conversation.messages for conversation in self.conversations],
            "rows": [
                {
                    "prompt_ids": row.prompt_ids,
                    "completion_ids": row.completion_ids,
                    "loss_mask": row.loss_mask,
                    "logprobs": row.logprobs,
                    "versions": row.versions,
                    "rewards": row.rewards,
                    "finished": row.finished,
                }
                for row in rows
            ],
        }


class Sessions:
    """The sessions of a server by id; the oldest are forgotten when there are many.

    `begin_by_themselves`: whether a request of an unknown session begins it. Not where they have
    rules: an agent that goes on after its end would sample without them.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[str, Session] = OrderedDict()
        self.begin_by_themselves = True

    def begin(self, session_id: str, rules: Rules | None = None) -> Session:
        """The session of this id, made if there is none."""
        session = self._held.setdefault(session_id, Session(rules))
        self._held.move_to_end(session_id)
        while len(self._held) > MAX_SESSIONS:
            self._held.popitem(last=False)
        return session

    def asked(self, session_id: str) -> Session:
        """The session that a request belongs to.

        Raises:
            ApiError: 404, it is over.
        """
        return self.begin(session_id) if self.begin_by_themselves else self.get(session_id)

    def get(self, session_id: str) -> Session:
        """The session of this id.

        Raises:
            ApiError: 404, there is none.
        """
        if session_id not in self._held:
            raise ApiError(
                404, f"session {session_id[:80]!r} is not here: it begins with its first request, "
                "and ends when it is deleted.", param="session_id", code="session_not_found",
            )  # fmt: skip
        return self._held[session_id]

    def end(self, session_id: str) -> Session:
        """Forgets a session, and returns it."""
        session = self.get(session_id)
        del self._held[session_id]
        return session


def _last_common_turn(
    conversation: Conversation, messages: Sequence[Mapping[str, Any]]
) -> int | None:
    """The latest sampled node up to which a conversation and these messages are the same, with
    further messages behind it."""
    given = [_essence(message) for message in messages]
    found, longest = None, 0
    for i, node in enumerate(conversation.nodes):
        if not node.sampled:
            continue
        until = [_essence(message) for message in _messages_until(conversation, i)]
        if longest < len(until) < len(given) and given[: len(until)] == until:
            found, longest = i, len(until)
    return found


def _messages_until(conversation: Conversation, node: int) -> list[Mapping[str, Any]]:
    return [message for each in conversation.path(node) for message in each.messages]


def _essence(message: Mapping[str, Any]) -> tuple[str, str, str]:
    """What of a message is compared: clients drop thoughts, and write calls in their own way."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        calls.append([function.get("name"), arguments])
    content = message.get("content") or ""
    return str(message.get("role")), str(content).strip(), json.dumps(calls, sort_keys=True)
