"""A conversation as the engine saw it: append-only, tokens first.

    append_messages ─▶ prompt or suffix ─▶ token_ids ─▶ engine ─▶ append_sampled ─▶ reply
          ▲                                                                          │
          └────────────── what the environment answers ◀─────────────────────────────┘

What the policy sampled is never decoded and encoded again. What the environment says is rendered
to a suffix and appended; where the template would write an old turn in another way it begins a
path of its own (a fork), and each sampled token is learnt from in one path only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rllib_llm.conversations.chat_format import ChatFormat, Messages
from rllib_llm.conversations.tool_calls import ParsedReply
from rllib_llm.conversations.training_rows import Node, TrainingRow, path_to, rows_of
from rllib_llm.shared.columns import NO_VERSION


class ConversationError(ValueError):
    """Something appended that does not fit what is there."""


class Conversation:
    """One rollout.

    Args:
        chat_format: renders messages and reads replies.
        task: the data set's row; what the environment wants to know of it.

    `state` is the environment's own: whatever it keeps of this conversation.
    """

    def __init__(self, chat_format: ChatFormat, *, task: Mapping[str, Any] | None = None) -> None:
        self.chat_format = chat_format
        self.task = dict(task or {})
        self.state: dict[str, Any] = {}
        self.nodes: list[Node] = []
        self.reply: ParsedReply | None = None  # the assistant's latest turn
        self.metrics: dict[str, float] = {}
        self.suffixes: Counter[str] = Counter()  # how often each kind of `Suffix` came
        self._leaf: int | None = None
        self._num_calls = 0

    # --- what there is -----------------------------------------------------------------------

    def path(self, leaf: int | None = None) -> list[Node]:
        """The nodes from the first to `leaf`, by default the newest."""
        return path_to(self.nodes, self._leaf if leaf is None else leaf)

    @property
    def token_ids(self) -> list[int]:
        """What the engine is to read: the newest path's tokens."""
        return [token for node in self.path() for token in node.token_ids]

    @property
    def messages(self) -> Messages:
        """All that was said, in order."""
        return [dict(message) for node in self.path() for message in node.messages]

    @property
    def opening(self) -> Messages:
        """What the newest path began with, before anybody answered; a path that a fork began
        repeats it."""
        newest = self.path()
        if not newest:
            return []
        said = newest[0].messages
        begun = (node.messages for node in self.nodes if node.parent is None)
        first = next(messages for messages in begun if said[: len(messages)] == messages)
        return [dict(message) for message in first]

    @property
    def num_turns(self) -> int:
        """Turns that the policy took."""
        return sum(node.sampled for node in self.nodes)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy sampled, over all its turns."""
        return sum(len(node.token_ids) for node in self.nodes if node.sampled)

    @property
    def total_reward(self) -> float:
        """The sum of what its turns earned."""
        return sum(node.reward for node in self.nodes)

    @property
    def finished(self) -> bool:
        """Whether the newest turn was ended by a stop token."""
        turns = [node for node in self.nodes if node.sampled]
        return bool(turns) and turns[-1].finish == "stop"

    # --- what is appended --------------------------------------------------------------------

    def append_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Appends what the environment says, and the prompt of the assistant's next turn.

        Raises:
            ConversationError: there are none, or the assistant has not answered the last ones.
            ChatFormatError: the template cannot write them behind what is there.
        """
        if not messages:
            raise ConversationError(
                "messages=[] must hold at least one: the assistant would be asked to answer its "
                "own turn. Return what the environment says, or end the conversation."
            )
        before = self.path()
        cleaned = tuple(self.chat_format.cleaned(message) for message in messages)
        if not before:
            self._append(Node(None, cleaned, tuple(self.chat_format.prompt_ids(cleaned))))
            return
        if not before[-1].sampled:
            raise ConversationError(
                f"messages={list(cleaned)!r} must follow a sampled turn: the assistant has not "
                "answered the last ones yet. Append all of them at once."
            )
        assert self.reply is not None, "a sampled node was parsed"
        earlier = [message for node in before[:-1] for message in node.messages]
        last_id = before[-1].token_ids[-1]
        asked = [token for node in before[:-1] for token in node.token_ids]
        suffix = self.chat_format.bridge(asked, before[-1].token_ids, cleaned)
        if suffix is None:
            suffix = self.chat_format.suffix(earlier, self.reply, cleaned, last_id=last_id)
        self.suffixes[suffix.how] += 1
        if suffix.how != "fork":
            self._append(Node(self._leaf, cleaned, tuple(suffix.token_ids)))
            return
        # What was sampled is written again: what the policy merely spelled becomes no token.
        said = (self.chat_format.cleaned(message) for message in (*earlier, *before[-1].messages))
        history = (*said, *cleaned)
        self._append(Node(None, history, tuple(self.chat_format.prompt_ids(history))))

    def append_last_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Keeps what was said behind the assistant's last turn; nobody reads or learns it."""
        if messages:
            self._append(Node(self._leaf, tuple(dict(m) for m in messages), ()))

    def append_sampled(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int] | None = None,
        *,
        finish: str = "stop",
    ) -> ParsedReply:
        """Appends what the policy sampled, token for token, and returns it read.

        Args:
            token_ids: the stop token among them.
            logprobs: of each, the engine's own.
            versions: of the weights that sampled each; None: unknown.
            finish: see `engines.protocol.Finish`.

        Raises:
            ConversationError: lengths that differ, no tokens, or no messages before them.
        """
        path = self.path()
        versions = [NO_VERSION] * len(token_ids) if versions is None else versions
        if not len(token_ids) == len(logprobs) == len(versions) or not token_ids:
            raise ConversationError(
                f"token_ids, logprobs and versions of lengths {len(token_ids)}, {len(logprobs)} "
                f"and {len(versions)} must be equally long and not empty: each sampled token has "
                "its own. Pass what the engine returned, unchanged."
            )
        if not path or path[-1].sampled:
            raise ConversationError(
                "token_ids must follow messages: there is no prompt that they answer. Call "
                "append_messages first."
            )
        reply = self.chat_format.parse(
            token_ids, finish=finish, first_call=self._num_calls, prompt_ids=path[-1].token_ids
        )
        self._num_calls += len(reply.tool_calls)
        self.reply = reply
        self._append(
            Node(
                self._leaf, (reply.as_message(),), tuple(token_ids), True, tuple(logprobs),
                tuple(versions), finish,
            )
        )  # fmt: skip
        return reply

    def add_reward(self, reward: float) -> None:
        """Gives the assistant's latest turn a reward.

        Raises:
            ConversationError: it has taken none.
        """
        turns = [node for node in self.nodes if node.sampled]
        if not turns:
            raise ConversationError(
                f"reward={reward!r} must belong to a turn of the assistant: it has taken none yet. "
                "Give rewards from respond() on."
            )
        turns[-1].reward += float(reward)

    def restore(self, node: Node) -> None:
        """Appends a node as it was saved, with the parent that it had."""
        self._append(node)
        if node.sampled:
            self.reply = self._read(node)
            self._num_calls += len(self.reply.tool_calls)

    def adopt(self, other: Conversation) -> None:
        """Appends all that was said in another conversation of the same rollout, as paths of their
        own; its newest path is this one's, too."""
        shift = len(self.nodes)
        for node in other.nodes:
            parent = None if node.parent is None else node.parent + shift
            self.nodes.append(replace(node, parent=parent))
        self.suffixes.update(other.suffixes)
        if other._leaf is not None:
            self._leaf, self.reply = other._leaf + shift, other.reply

    def branch(self, node: int) -> None:
        """Goes on from an earlier node; what came behind it stays, as a path of its own."""
        self._leaf = range(len(self.nodes))[node]
        if self.nodes[self._leaf].sampled:
            self.reply = self._read(self.nodes[self._leaf])

    def _read(self, node: Node) -> ParsedReply:
        asked = () if node.parent is None else self.nodes[node.parent].token_ids
        return self.chat_format.parse(
            node.token_ids, finish=node.finish, first_call=self._num_calls, prompt_ids=asked
        )

    def _append(self, node: Node) -> None:
        self.nodes.append(node)
        self._leaf = len(self.nodes) - 1

    # --- what is learnt from -----------------------------------------------------------------

    def rows(self) -> list[TrainingRow]:
        """One row per path; each sampled token is learnt from in the first that holds it."""
        return rows_of(self.nodes)
