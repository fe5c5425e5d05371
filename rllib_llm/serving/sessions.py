"""Conversations of agents that know nothing of training, recorded token by token.

    agent ── whole list of messages, each time ──▶ Session ── what is new of it ──▶ Conversation

What the policy said is never encoded again: the tokens of a turn are those that were sampled. A
list of messages that does not begin like a path that is known begins a path of its own.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.serving.chat import read_arguments, refused_by_template
from rllib_llm.serving.jobs import Piece
from rllib_llm.serving.schemas import ApiError, ChatRequest, refuse

MAX_SESSIONS = 10_000
MAX_OF_AN_OWNER = 1_000
MAX_ID_CHARS = 256
MAX_TURNS = 1_000  # of a session without rules
# Of what sessions without rules hold in memory, see `Session.measure`; about 60 bytes each.
MAX_TOKENS = 10_000_000
MAX_TOKENS_OF_AN_OWNER = 2_000_000
_CHARS_PER_TOKEN = 4
# Settings that change what tokens are drawn from; an agent's own are not the run's.
_OFF = dict.fromkeys(
    ("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
)
# Of the training rows that are shown.
_OF_ROWS = (
    "prompt_ids", "completion_ids", "loss_mask", "logprobs", "versions", "rewards", "finished",
)  # fmt: skip


@dataclass(frozen=True)
class SessionRules:
    """Fixed sampling settings of a session, which override the agent's: training must know the
    distribution that was sampled from. max_new_tokens: of a turn; max_tokens: of it and its prompt;
    template_settings: variables of the chat template that the agent does not name."""

    sampling: Mapping[str, Any]
    max_new_tokens: int
    max_turns: int
    max_tokens: int
    template_settings: Mapping[str, Any]


class Session:
    """The messages of one agent's session.

    `lock`: of its requests, which are answered one after the other. `limit`: the one of its rules
    that it ran into, "turns" or "tokens". `size`: of all that it holds when it was measured last;
    `counted`: the size that `Sessions` counts for it. `owner`: the key that began it, b"" without
    keys. `rules`: None: its turns are sampled as the agent asks.
    """

    def __init__(self, owner: bytes = b"", rules: SessionRules | None = None) -> None:
        self.owner = owner
        self._told: dict[tuple[Conversation, int], tuple[str, str, str]] = {}
        self._own_ids: dict[str, str] = {}
        self.lock = asyncio.Lock()
        self.rules, self.limit = rules, ""
        self.conversations: list[Conversation] = []
        self.created = time.time()
        self.reward: float | None = None
        self.size = self.counted = 0

    def measure(self) -> None:
        """Sets `size` to the tokens of all paths; four characters of a message, which templates
        may drop, count as one more."""
        nodes = [node for conversation in self.conversations for node in conversation.nodes]
        num_chars = sum(len(str(message)) for node in nodes for message in node.messages)
        self.size = sum(len(node.token_ids) for node in nodes) + num_chars // _CHARS_PER_TOKEN

    @property
    def num_turns(self) -> int:
        """Turns that were sampled."""
        return sum(conversation.num_turns for conversation in self.conversations)

    def governed(self, body: ChatRequest, prompt_len: int) -> ChatRequest:
        """The request as the session's rules have it; 400 where a limit is reached, or where the
        answer is not to be sampled freely."""
        rules = self.rules
        if rules is None:
            _check_limit(self.num_turns >= MAX_TURNS, "turns", MAX_TURNS)
            return body
        room = min(rules.max_new_tokens, rules.max_tokens - prompt_len)
        for broken, limit, most in (
            (room < 1, "tokens", rules.max_tokens),
            (self.num_turns >= rules.max_turns, "turns", rules.max_turns),
        ):
            self.limit = limit if broken else self.limit
            _check_limit(broken, limit, most)
        format_, tools = body.response_format, body.tool_choice
        for broken, param, rule in (
            (format_ is not None and format_.type != "text", "response_format", "text"),
            (tools not in (None, "none", "auto"), "tool_choice", "auto or none"),
        ):
            refuse(broken, f"{param} must be {rule}: the policy learns from what it samples "
                   "freely.", param, "unsupported_value")  # fmt: skip
        asked = body.max_completion_tokens or body.max_tokens or room
        turn = {"noise_turn": self.num_turns, "max_completion_tokens": min(asked, room)}
        return body.model_copy(update={**_OFF, **rules.sampling, **turn})

    def begin_turn(
        self, chat_format: ChatFormat, messages: Sequence[Mapping[str, Any]]
    ) -> Conversation:
        """The conversation that these messages continue or begin; its `token_ids` are the prompt.
        400 where the template refuses the messages, or the assistant is to answer itself."""
        with refused_by_template():
            known = [each for each in self.conversations if each.chat_format is chat_format]
            for conversation in reversed(known):
                node = self._last_common_turn(conversation, messages)
                if node is not None:
                    conversation.branch(node)
                    said = sum(len(each.messages) for each in conversation.path(node))
                    own = self._own_ids  # that calls have here, by those that the client was told
                    conversation.append_messages([
                        {**each, "tool_call_id": own[told]}
                        if (told := str(each.get("tool_call_id"))) in own else each
                        for each in messages[said:]
                    ])  # fmt: skip
                    self.conversations.remove(conversation)
                    self.conversations.append(conversation)
                    return conversation
            conversation = Conversation(chat_format)
            conversation.append_messages(messages)
            self.conversations.append(conversation)
            return conversation

    def _last_common_turn(
        self, conversation: Conversation, messages: Sequence[Mapping[str, Any]]
    ) -> int | None:
        """The latest sampled node up to which a conversation and these messages agree, if further
        messages follow. A turn is compared as its client saw it, without text after a stop
        sequence."""
        given = [_essence(message) for message in messages]
        places = {id(node): i for i, node in enumerate(conversation.nodes)}
        found, longest = None, 0
        for i, node in enumerate(conversation.nodes):
            if not node.sampled:
                continue
            until: list[tuple[str, str, str]] = []
            for each in conversation.path(i):
                told = self._told.get((conversation, places[id(each)]))
                until += [told] if told else map(_essence, each.messages)
            if longest < len(until) < len(given) and given[: len(until)] == until:
                found, longest = i, len(until)
        return found

    def end_turn(
        self, conversation: Conversation, piece: Piece | None, versions: Sequence[int],
        told: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Stores a whole completion, the publisher's versions of each token, and the message that
        the client was sent; None removes the turn, since it is incomplete."""
        if piece is not None and piece.token_ids:
            ends = conversation.chat_format.stop_token_ids
            finish = "stop" if piece.token_ids[-1] in ends else "length"
            reply = conversation.append_sampled(
                piece.token_ids, piece.logprobs, versions, finish=finish
            )
            self._told[conversation, len(conversation.nodes) - 1] = _essence(told)
            readable = [call for call in reply.tool_calls if call.arguments is not None]
            for call, sent in zip(readable, told.get("tool_calls") or (), strict=False):
                self._own_ids[sent["id"]] = call.id
            return
        parent = conversation.nodes[-1].parent
        if parent is None and len(conversation.nodes) == 1:
            self.conversations.remove(conversation)
        elif parent is not None:
            conversation.branch(parent)

    def add_reward(self, reward: float) -> None:
        """Rewards the turn that was sampled last; 400 where there is none, or where the sum would
        be no number."""
        total = (self.reward or 0.0) + reward
        rewarded = [each for each in self.conversations if each.num_turns]
        refuse(not math.isfinite(total),
               f"reward={reward} must leave a finite sum of the session's rewards.", "reward")
        refuse(not rewarded, "reward must follow an answer: the session has none yet.", "reward")
        rewarded[-1].add_reward(reward)
        self.reward = total

    def as_dict(self) -> dict[str, Any]:
        """The session's training rows and messages."""
        rows = [row for conversation in self.conversations for row in conversation.rows()]
        return {
            "created": int(self.created),
            "reward": self.reward,
            "messages": [conversation.messages for conversation in self.conversations],
            "rows": [{name: getattr(row, name) for name in _OF_ROWS} for row in rows],
        }


def _check_limit(is_reached: bool, limit: str, most: int) -> None:
    refuse(is_reached, f"The session has reached max_{limit}={most} and is over.", "messages",
           "session_limit")  # fmt: skip


class Sessions:
    """A server's sessions by id. A key with too many, or too many tokens, loses its oldest; if
    there are too many in total, the key with the most does. Sessions with rules, or with a turn in
    progress, are never evicted.

    `begin_by_themselves`: whether a request of an unknown session begins it. Not where they have
    rules: an agent that goes on after its end would sample without them.
    """

    def __init__(self) -> None:
        self._held: dict[str, Session] = {}
        # Of those without rules, by key: their ids, and the sum of what is counted for them.
        self._of: defaultdict[bytes, OrderedDict[Session, str]] = defaultdict(OrderedDict)
        self._tokens: Counter[bytes] = Counter()
        self.begin_by_themselves = True

    def begin(
        self, session_id: str, owner: bytes = b"", rules: SessionRules | None = None
    ) -> Session:
        """The session of this id, made if there is none; 404 where it is another key's, 400 for a
        long id, 429 where there is no room."""
        if session_id in self._held:
            return self.get(session_id, owner)
        refuse(len(session_id) > MAX_ID_CHARS,
               f"session_id must have at most {MAX_ID_CHARS} characters.", "session_id")
        made = self._held[session_id] = Session(owner, rules)
        if rules is None:
            self._of[owner][made] = session_id
            try:
                self._make_room(owner, made)
            except ApiError:
                self._remove(session_id)
                raise
        return made

    def hold(self, session: Session) -> None:
        """Makes room for a session that has been measured; 400 where it alone is too large, 429
        where all others have turns in progress."""
        if session.rules is None:
            largest = MAX_TOKENS_OF_AN_OWNER if session.owner else MAX_TOKENS
            _check_limit(session.size > largest, "tokens", largest)
            if session in self._of.get(session.owner, ()):  # it may have ended meanwhile
                self._tokens[session.owner] += session.size - session.counted
                session.counted = session.size
            self._make_room(session.owner, session)

    def _make_room(self, owner: bytes, new: Session) -> None:
        """Evicts the oldest sessions, but not `new`, while a limit is passed."""
        while (whose := self._crowded(owner)) is not None:
            idle = (each for each in self._of[whose] if each is not new and not each.lock.locked())
            session = next(idle, None)
            if session is None:
                message = "There is no room for another session: all are under way. End one."
                raise ApiError(429, message, None, "too_many_sessions")
            self._remove(self._of[whose][session])

    def _crowded(self, owner: bytes) -> bytes | None:
        """The key that has to lose a session: the owner, or of all the one with the most."""
        if owner and (
            len(self._of.get(owner, ())) > MAX_OF_AN_OWNER
            or self._tokens[owner] > MAX_TOKENS_OF_AN_OWNER
        ):
            return owner
        if sum(map(len, self._of.values())) > MAX_SESSIONS:
            return max(self._of, key=lambda key: len(self._of[key]))
        if self._tokens.total() > MAX_TOKENS:
            return max(self._tokens, key=self._tokens.__getitem__)
        return None

    def _remove(self, session_id: str) -> None:
        session = self._held.pop(session_id)
        if session.rules is None:
            del self._of[session.owner][session]
            self._tokens[session.owner] -= session.counted
            if not self._of[session.owner]:
                del self._of[session.owner], self._tokens[session.owner]

    def get(self, session_id: str, owner: bytes) -> Session:
        """The session of this id; 404 where there is none, or it is another key's."""
        found = self._held.get(session_id)
        if found is None or found.owner != owner:
            message = f"session {session_id[:80]!r} is not here: another key's, over, or not begun."
            raise ApiError(404, message, "session_id", "session_not_found")
        if found.rules is None:
            self._of[owner].move_to_end(found)
        return found

    def end(self, session_id: str, owner: bytes = b"") -> Session:
        """Forgets a session, and returns it."""
        session = self.get(session_id, owner)
        self._remove(session_id)
        return session


def _essence(message: Mapping[str, Any]) -> tuple[str, str, str]:
    """The compared part of a message: clients drop thoughts and format calls differently."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        calls.append([function["name"], read_arguments(function.get("arguments"))])
    content = message.get("content") or ""
    return str(message.get("role")), str(content).strip(), json.dumps(calls, sort_keys=True)
