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
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rllib_llm.conversations.chat_format import ChatFormat, Message, Messages
from rllib_llm.conversations.tool_calls import ParsedReply
from rllib_llm.data.encoding import broken_up
from rllib_llm.data.image_prompts import ImagePrompts, with_places
from rllib_llm.shared import columns
from rllib_llm.shared.columns import (
    NO_VERSION,
    expert_columns,
    pad_left,
    pad_right,
    teacher_prompt_columns,
)
from rllib_llm.shared.errors import require


@dataclass
class Pictures:
    """The images that the first messages of a conversation show.

    reader: of the policy's model. key: of the images, see `ImagePrompts.read`. first: those
    messages, whose contents are parts, images among them. seen: what the model sees.
    """

    images: Sequence[Any]
    reader: ImagePrompts
    key: Hashable
    first: Messages = field(default_factory=list)
    seen: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def words(self, messages: Sequence[Message], chat_format: ChatFormat) -> Messages:
        """The first messages without images; where these stand is kept."""
        placed = with_places(messages, len(self.images))
        for message in placed:
            parts = [part if isinstance(part, Mapping) else {"type": "text", "text": str(part)}
                     for part in message["content"]]  # fmt: skip
            message["content"] = [
                {"type": "image"} if part.get("type") == "image" else dict(part) for part in parts
            ]
        self.first = [chat_format.cleaned(message) for message in placed]
        return [{**message, "content": "".join(part.get("text", "") for part in message["content"])}
                for message in self.first]  # fmt: skip

    def placed_in(self, messages: Sequence[Message]) -> list[Message]:
        """The messages of a conversation, the first ones with the places of their images."""
        return [*self.first, *messages[len(self.first) :]]

    def prompt_ids(self, messages: Sequence[Message], chat_format: ChatFormat) -> list[int]:
        """Ids of a whole conversation that begins with the first messages."""
        turns = with_places(self.placed_in(messages), 0)
        text = chat_format.render(turns, generation_prompt=True, sees=True)
        ids, self.seen = self.reader.read(text, self.images, self.key, add_special_tokens=False)
        return ids


@dataclass
class Node:
    """The result of one append.

    parent: index of the node before it; None: it begins a path. messages: what it says, as chat
    templates take it; a node that begins a later path repeats what was said before. token_ids:
    those that it adds. Of a sampled one: the parsed `reply`, `logprobs` and weight `versions` of
    each token, `finish`, and the `reward` that it earned; `experts` of the path up to it, see
    `engines.protocol.Ended`.
    """

    parent: int | None
    messages: tuple[Mapping[str, Any], ...]
    token_ids: tuple[int, ...]
    reply: ParsedReply | None = None
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish: str = ""
    reward: float = 0.0
    experts: torch.Tensor | None = None

    @property
    def sampled(self) -> bool:
        """Whether the policy said it."""
        return self.reply is not None


@dataclass
class TrainingRow:
    """One path, cut after its last sampled token; all lists of tokens but the prompt are [T].

    messages: all that was said on the path. num_prompt_messages: of them those that the prompt's
    tokens hold. experts: of prompt and completion, as far as they are known.
    """

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    finished: bool = False
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    num_prompt_messages: int = 0
    experts: torch.Tensor | None = None

    @property
    def num_sampled(self) -> int:
        """Tokens that are learnt from."""
        return sum(self.loss_mask)

    def cut(self) -> TrainingRow:
        """The row up to its last token that is learnt from."""
        end = len(self.loss_mask) - self.loss_mask[::-1].index(True) if self.num_sampled else 0
        return replace(
            self, completion_ids=self.completion_ids[:end], loss_mask=self.loss_mask[:end],
            logprobs=self.logprobs[:end], versions=self.versions[:end], rewards=self.rewards[:end],
        )  # fmt: skip


def _row(path: Sequence[Node], learnt: set[int]) -> TrainingRow:
    """The row of a path. `learnt`: ids of nodes trained by other rows; this row's are added."""
    row = TrainingRow([])
    for node in path:
        row.messages.extend(node.messages)
        if not node.sampled and not row.completion_ids:
            row.prompt_ids.extend(node.token_ids)
            row.num_prompt_messages = len(row.messages)
            continue
        count = len(node.token_ids)
        is_new = node.sampled and id(node) not in learnt
        row.completion_ids.extend(node.token_ids)
        row.loss_mask.extend([is_new] * count)
        row.logprobs.extend(node.logprobs if is_new else [0.0] * count)
        row.versions.extend(node.versions if is_new else [NO_VERSION] * count)
        row.rewards.extend([0.0] * count)
        if node.experts is not None:  # what earlier turns read stays as they read it
            before = node.experts[:0] if row.experts is None else row.experts
            row.experts = torch.cat([before, node.experts[len(before) :]])
        if is_new:
            learnt.add(id(node))
            row.rewards[-1] = node.reward
            row.finished = node.finish == "stop"
    return row.cut()


@dataclass
class Rollout:
    """A conversation under way, or over, and its result.

    group: position of its prompt; row_id: its place among all rollouts; prompt_index: its row in
    the data set. score: all that it earned. valid: False where something failed that is not the
    policy's doing, and as long as it is not judged. invalid: why nothing may be learnt from it,
    or "". truncated: the limit that ended it, or "". earned: what `ConversationEnv.score` said.
    has_turn_rewards: whether a turn was given any.
    """

    conversation: Conversation
    group: int
    row_id: int
    prompt_index: int
    score: float = 0.0
    valid: bool = False
    invalid: str = ""
    error: BaseException | None = None
    truncated: str = ""
    earned: float | None = None
    has_turn_rewards: bool = False
    counts: dict[str, float] = field(default_factory=dict)

    def count(self, name: str, number: float = 1.0) -> None:
        """Adds to a number of this rollout's metrics."""
        self.counts[name] = self.counts.get(name, 0.0) + number


def training_columns(rollouts: Sequence[Rollout], pad_token_id: int) -> dict[str, torch.Tensor]:
    """The columns of all rows of these rollouts, concatenated.

    A rollout from which nothing can be learnt has one row all the same, which is not valid: its
    group has lost a member, and that is seen.
    """
    rows: list[TrainingRow] = []
    owners: list[Rollout] = []
    weights: list[float] = []
    for rollout in rollouts:
        own = rollout.conversation.rows()
        total = sum(row.num_sampled for row in own)
        prompt = rollout.conversation.token_ids or [pad_token_id]
        nothing = TrainingRow(prompt, [pad_token_id], [False], [0.0], [NO_VERSION], [0.0])
        for row in own or [nothing]:
            rows.append(row)
            owners.append(rollout)
            weights.append(row.num_sampled / total if total else 1.0)

    def right(name: str, filler: float, dtype: torch.dtype) -> torch.Tensor:
        return pad_right([getattr(row, name) for row in rows], filler, dtype)[0]

    prompt_ids, prompt_mask = pad_left([row.prompt_ids for row in rows], pad_token_id)
    completion_ids, completion_mask = pad_right([row.completion_ids for row in rows], pad_token_id)
    has_tokens = torch.tensor([row.num_sampled > 0 for row in rows])
    experts = expert_columns(
        [row.experts for row in rows], [len(row.prompt_ids) for row in rows],
        (prompt_ids.shape[1], completion_ids.shape[1]),
    )  # fmt: skip
    valid = torch.tensor([owner.valid for owner in owners]) & has_tokens
    of_teacher: dict[str, torch.Tensor] = {}
    if any(rollout.conversation.teacher_opening is not None for rollout in rollouts):
        of_teacher = teacher_prompt_columns(
            [owner.conversation.teacher_prompt_ids(row)
             for owner, row in zip(owners, rows, strict=True)], pad_token_id,
        )  # fmt: skip
    shows = torch.tensor([bool(owner.conversation.shown) for owner in owners])
    return {
        columns.PROMPT_IDS: prompt_ids, columns.PROMPT_MASK: prompt_mask,
        columns.COMPLETION_IDS: completion_ids, columns.COMPLETION_MASK: completion_mask,
        columns.LOSS_MASK: right("loss_mask", False, torch.bool),
        columns.SAMPLER_LOGPROBS: right("logprobs", 0.0, torch.float32),
        columns.WEIGHTS_VERSION: right("versions", NO_VERSION, torch.int32),
        columns.REWARDS: right("rewards", 0.0, torch.float32),
        columns.SCORES: torch.tensor([owner.score for owner in owners], dtype=torch.float32),
        columns.VALID: valid,
        columns.FINISHED: torch.tensor([row.finished for row in rows]),
        columns.ROW_WEIGHT: torch.tensor(weights, dtype=torch.float32),
        columns.GROUP: torch.tensor([owner.group for owner in owners]),
        columns.ROW_ID: torch.tensor([owner.row_id for owner in owners]),
        columns.PROMPT_INDEX: torch.tensor([owner.prompt_index for owner in owners]),
        **({columns.IMAGE_ROW: shows.long() - 1} if shows.any() else {}), **experts,
        **of_teacher,
    }  # fmt: skip


class Conversation:
    """One rollout.

    Args:
        chat_format: renders messages and reads replies.
        task: the data set's row; what the environment wants to know of it.

    `state` is the environment's own: whatever it keeps of this conversation. `teacher_opening`:
    messages that a teacher reads instead of `opening`; None: it reads what the policy reads.
    """

    def __init__(self, chat_format: ChatFormat, *, task: Mapping[str, Any] | None = None) -> None:
        self.chat_format = chat_format
        self.task = dict(task or {})
        self.state: dict[str, Any] = {}
        self.pictures: Pictures | None = None
        self.teacher_opening: Sequence[Message] | None = None
        self.nodes: list[Node] = []
        self.metrics: dict[str, float] = {}
        self.suffixes: Counter[str] = Counter()  # how often each kind of `Suffix` came
        self._leaf: int | None = None

    # --- what there is -----------------------------------------------------------------------

    def path(self, leaf: int | None = None) -> list[Node]:
        """The nodes from the first to `leaf`, by default the newest."""
        place, path = self._leaf if leaf is None else leaf, []
        while place is not None:
            path.append(self.nodes[place])
            place = self.nodes[place].parent
        return path[::-1]

    @property
    def reply(self) -> ParsedReply | None:
        """The assistant's latest turn on the newest path."""
        return next((node.reply for node in reversed(self.path()) if node.reply), None)

    @property
    def token_ids(self) -> list[int]:
        """The engine's prompt: the tokens of the newest path."""
        return [token for node in self.path() for token in node.token_ids]

    @property
    def messages(self) -> Messages:
        """All messages, in order."""
        return [dict(message) for node in self.path() for message in node.messages]

    @property
    def shown(self) -> dict[str, Any]:
        """Arguments for the engine beside the tokens: images, and how many tokens show them."""
        if self.pictures is None or not self.nodes:
            return {}
        return {"images": self.pictures.seen, "num_shown": len(self.path()[0].token_ids)}

    @property
    def opening(self) -> Messages:
        """The messages of the newest path before the first answer; a fork repeats them."""
        newest = self.path()
        return self._opening(newest[0].messages) if newest else []

    def _opening(self, said: Sequence[Mapping[str, Any]]) -> Messages:
        """The opening of the path that begins with the messages `said`."""
        begun = (node.messages for node in self.nodes if node.parent is None)
        first = next(each for each in begun if tuple(said[: len(each)]) == each)
        return [dict(message) for message in first]

    @property
    def num_turns(self) -> int:
        """Turns that the policy took."""
        return sum(node.sampled for node in self.nodes)

    @property
    def total_reward(self) -> float:
        """The sum of what its turns earned."""
        return sum(node.reward for node in self.nodes)

    # --- what is appended --------------------------------------------------------------------

    def append_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Appends messages of the environment, and the prompt of the assistant's next turn.

        Raises:
            ValueError: there are none, or the assistant has not answered the last ones.
            ChatFormatError: the template cannot write them after what is there.
        """
        if not messages:
            raise ValueError("messages=[] must hold at least one, or the conversation must end")
        before = self.path()
        if self.pictures is not None and not before:
            messages = self.pictures.words(messages, self.chat_format)
        cleaned = tuple(self.chat_format.cleaned(message) for message in messages)
        if not before:
            self._append(Node(None, cleaned, tuple(self._prompt_ids(cleaned))))
            return
        reply = before[-1].reply
        if reply is None:
            raise ValueError("messages must follow a sampled turn: append all of them at once")
        earlier = [message for node in before[:-1] for message in node.messages]
        last_id = before[-1].token_ids[-1]
        asked = [token for node in before[:-1] for token in node.token_ids]
        suffix = self.chat_format.bridge(asked, before[-1].token_ids, cleaned)
        if suffix is None:
            suffix = self.chat_format.suffix(earlier, reply, cleaned, last_id=last_id)
        self.suffixes[suffix.how] += 1
        if suffix.how != "fork":
            self._append(Node(self._leaf, cleaned, tuple(suffix.token_ids)))
            return
        # What was sampled is written again: what the policy merely spelled becomes no token.
        said = (self.chat_format.cleaned(message) for message in (*earlier, *before[-1].messages))
        history = (*said, *cleaned)
        self._append(Node(None, history, tuple(self._prompt_ids(history))))

    def _prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        if self.pictures is not None:
            return self.pictures.prompt_ids(messages, self.chat_format)
        return self.chat_format.prompt_ids(messages)

    def append_last_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Stores messages after the assistant's last turn, for the record only: they are neither
        read nor trained."""
        if messages:
            self._append(Node(self._leaf, tuple(broken_up(messages)), ()))

    def append_sampled(
        self, token_ids: Sequence[int], logprobs: Sequence[float],
        versions: Sequence[int] | None = None, *, finish: str = "stop",
        experts: torch.Tensor | None = None,
    ) -> ParsedReply:  # fmt: skip
        """Appends the policy's sampled tokens unchanged, the stop token among them, and returns the
        parsed turn. `versions`: of the weights that sampled each; None: unknown.
        """
        path = self.path()
        versions = [NO_VERSION] * len(token_ids) if versions is None else versions
        assert 0 < len(token_ids) == len(logprobs) == len(versions), "of each sampled token"
        assert path and not path[-1].sampled, "a turn answers messages"
        num_calls = sum(len(node.reply.tool_calls) for node in self.nodes if node.reply)
        reply = self.chat_format.parse(
            token_ids, finish=finish, first_call=num_calls, prompt_ids=path[-1].token_ids
        )
        self._append(
            Node(
                self._leaf, (reply.as_message(),), tuple(token_ids), reply, tuple(logprobs),
                tuple(versions), finish, experts=experts,
            )
        )  # fmt: skip
        return reply

    def add_reward(self, reward: float) -> None:
        """Gives the assistant's latest turn a reward.

        Raises:
            ValueError: it has taken none.
        """
        turns = [node for node in self.nodes if node.sampled]
        if not turns:
            raise ValueError("a reward must belong to a turn of the assistant: it has taken none")
        turns[-1].reward += float(reward)

    def adopt(self, other: Conversation) -> None:
        """Appends another conversation of the same rollout as paths of this one, and makes its
        newest path the newest here."""
        shift = len(self.nodes)
        for node in other.nodes:
            parent = None if node.parent is None else node.parent + shift
            self.nodes.append(replace(node, parent=parent))
        self.suffixes.update(other.suffixes)
        if other._leaf is not None:
            self._leaf = other._leaf + shift

    def branch(self, node: int) -> None:
        """Continues from an earlier node; the turns after it remain as a path of their own."""
        self._leaf = range(len(self.nodes))[node]

    def _append(self, node: Node) -> None:
        self.nodes.append(node)
        self._leaf = len(self.nodes) - 1

    # --- what is learnt from -----------------------------------------------------------------

    def rows(self) -> list[TrainingRow]:
        """One row per path; each sampled token is trained in the first row that contains it."""
        learnt: set[int] = set()
        parents = {node.parent for node in self.nodes}
        paths = (self.path(leaf) for leaf in range(len(self.nodes)) if leaf not in parents)
        return [row for path in paths if (row := _row(path, learnt)).num_sampled]

    def teacher_prompt_ids(self, row: TrainingRow) -> list[int]:
        """The prompt of a row as a teacher reads it."""
        if self.teacher_opening is None or not row.messages:
            return row.prompt_ids
        require(self.pictures is None, "teacher_prompt", ..., "be left out where prompts show "
                "images", "the teacher would see none")  # fmt: skip
        asked = row.messages[: row.num_prompt_messages]
        opening = [self.chat_format.cleaned(message) for message in self.teacher_opening]
        return self.chat_format.prompt_ids([*opening, *asked[len(self._opening(asked)) :]])
