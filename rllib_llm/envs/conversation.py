"""rllib_llm/Conversation-v0: conversations of many turns, tools, rewards where earned.

    task ─▶ start ─▶ messages ─▶ policy ─▶ reply ─┬─▶ its tool calls are run ─▶ results ─▶ policy
                                    ▲             └─▶ respond ─▶ messages ─────▶ policy
                                    └─ until respond says that it is done, or a limit is reached

A user's environment is a subclass with `respond`, or just tools and reward functions. What
the policy samples and how conversations become batches is the sampler's
(`rollouts/conversation_sampler.py`).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from ray.rllib.utils.spaces.repeated import Repeated

from rllib_llm.conversations.chat_format import ChatFormat, Message, Messages
from rllib_llm.conversations.conversation import Conversation, Pictures
from rllib_llm.conversations.proof import Proof, prove, require_tools
from rllib_llm.data.image_prompts import ImagePrompts
from rllib_llm.envs.judges.rewards import RewardSum
from rllib_llm.envs.prompts import PromptRow
from rllib_llm.envs.rlhf import (
    check_prompts,
    frozen_reference,
    frozen_teacher,
    policy_tokenizer,
    prompt_source,
    reward_terms,
    with_defaults,
)
from rllib_llm.envs.settings import ENV_SETTINGS, declared
from rllib_llm.envs.tools import MCPServers, Toolbox
from rllib_llm.modules.images import image_columns
from rllib_llm.modules.model_source import num_embeddings, num_positions
from rllib_llm.shared.dotted import as_list
from rllib_llm.shared.errors import Problems, require
from rllib_llm.shared.messages import told
from rllib_llm.shared.openai_client import JUDGE_OUTAGE_S, OpenAIClient
from rllib_llm.shared.remote import Away, EventLoop
from rllib_llm.shared.setting import Settings, setting

# What a bandit needs and a conversation does not.
_OF_BANDITS = ("max_prompt_len", "prompt_overflow", "kl_coeff", "vocab_size")
# What reward functions get of a conversation beside its task's columns.
_OF_CONVERSATIONS = ("messages", "conversations", "environments")
DEFAULTS = {name: row for name, row in ENV_SETTINGS.items() if name not in _OF_BANDITS}


@dataclass(frozen=True)
class Response:
    """The environment's response to an assistant turn.

    messages: a user's words, or messages as chat templates take them. reward: what the turn
    earned. done: whether the conversation is over. invalid: why nothing may be learnt from it,
    where the environment failed; never a reward of 0 for that. metrics: numbers by name, of the
    whole conversation.
    """

    messages: str | Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    invalid: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


def proven_format(
    settings: Mapping[str, Any], tokenizer: Any, toolbox: Toolbox
) -> tuple[ChatFormat, list[Proof]]:
    """How conversations with these tools are written, and what was proven of it.

    Raises:
        ChatFormatError: a chat template that cannot write such conversations.
    """
    chat_format = ChatFormat(
        tokenizer, tools=toolbox.schemas, syntax=settings["tool_syntax"],
        **{name: settings[name] for name in ("history", "template_settings", "renderer")},
    )  # fmt: skip
    findings = prove(chat_format)
    if toolbox.tools:
        require_tools(chat_format, findings)
    return chat_format, findings


def first_messages(prompt: Any, system: str | None) -> Messages:
    """The messages of a task's prompt, text or a chat, after a system message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": "system", "content": system}, *messages] if system else messages


def no_room(num_tokens: int, *, max_tokens: int | None, positions: int | None) -> Problems | None:
    """The error of a first prompt that leaves no room for an answer; None where it leaves some.

    Args:
        num_tokens: of the prompt, with the system message and the tools' schemas.
        max_tokens: of a whole conversation, where it was set.
        positions: that the model reads, where that is known.
    """
    most = min((n for n in (max_tokens, positions) if n is not None), default=None)
    if most is None or num_tokens < most:
        return None
    name = f"the first prompt of {num_tokens} tokens"
    limit = f"the {positions} tokens that the model reads"
    remedy = "take a model with more positions"
    if positions is None or num_tokens < positions:
        limit, remedy = f"max_tokens={max_tokens}", f"raise max_tokens above {num_tokens}"
    remedy = f"Shorten the system message or the prompt, give fewer tools, or {remedy}"
    return Problems(name, f"leave room for an answer within {limit}", "", remedy)


class ConversationEnv:
    """Tasks out, conversations in, rewards back; each replica has one event loop.

    Args:
        env_config: settings; their names and defaults are `DEFAULTS`, on which `defaults` of a
            subclass are laid: rows of settings, or defaults alone (see `with_defaults`).

    `start`, `respond` and `score` may be plain or async functions. They are called for many
    conversations at the same time, plain ones from several threads: what belongs to one
    conversation is kept in its `state`.

    Raises:
        Problems: an unknown or impossible setting.
        ChatFormatError: a chat template that cannot write such conversations.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    starts_with_prompt: ClassVar[bool] = False
    """Whether a `start` of its own returns `first_messages`, which are then checked at first."""
    runs_last_calls: ClassVar[bool] = False
    """Whether the tools of the last allowed turn are run."""
    end_seconds: ClassVar[float] = 60.0
    """The time limit of `end`."""
    sees: ClassVar[bool] = True
    """Whether the policy is shown the images of a task."""

    def __init__(self, env_config: Mapping[str, Any] | None = None) -> None:
        self.settings = with_defaults(env_config or {}, self.default_settings())
        self.tokenizer = policy_tokenizer(self.settings)
        self.events = EventLoop()
        self._servers = MCPServers(
            as_list(self.settings["mcp_servers"]), timeout_s=self.settings["tool_timeout_s"]
        )
        try:
            self._open()
        except BaseException:  # the servers' programs would keep running
            ConversationEnv.close(self)
            raise

    def _open(self) -> None:
        """Connects to the servers and makes all that the settings name."""
        self._served = self.events.run(self._servers.connect())
        self.toolbox = self._make_toolbox(self.tools())
        self.findings: list[Proof] = []
        self.chat_format = self._make_format(self.toolbox)
        rows, column = self.rows(), self.settings["prompt_column"]
        check_prompts(self.settings, rows)
        self.tasks = prompt_source(self.settings, rows, self.eval_rows(), column)
        terms = reward_terms(self.settings, self.tokenizer)
        self.rewards = RewardSum(terms) if terms else None
        self.reference = frozen_reference(self.settings, self.tokenizer)
        self.teacher = frozen_teacher(self.settings, self.tokenizer)
        self.num_envs = int(self.settings["num_envs"])
        # Updates of the policy so far, and in all, 0: not known; for reward functions that ask.
        self.global_step, self.max_steps = 0, 0
        self.keeps_parts = False  # whether infos have the rewards apart, for learners
        self.has_warned = False  # that a rollout failed
        model = self.settings["model"]
        self.num_positions = num_positions(model) if model else None
        self.max_tokens = self.settings["max_tokens"] or self.num_positions
        vocab_size = num_embeddings(model) if model else len(self.tokenizer)
        token: spaces.Discrete = spaces.Discrete(int(vocab_size))
        self.single_observation_space = Repeated(token, int(self.max_tokens or 2**20))
        self.single_action_space = self.single_observation_space
        self._check_task(self.tasks.rows(0, 1)[0])

    # --- what a subclass says ----------------------------------------------------------------

    def tools(self) -> Sequence[Any]:
        """Tools of every conversation: functions, dotted paths, or objects as `PolicyTool`."""
        return as_list(self.settings["tools"])

    def tools_of(self, conversation: Conversation) -> Sequence[Callable[..., Any]]:
        """Functions that implement the tools of this conversation alone, where they have to know
        it: those of `tools` under the same names."""
        return ()

    def toolbox_of(self, conversation: Conversation) -> Toolbox:
        """The tools of this conversation."""
        return self.toolbox.of(self.tools_of(conversation))

    def format_of(self, task: Mapping[str, Any]) -> ChatFormat:
        """How conversations about a task are written."""
        return self.chat_format

    def rows(self) -> Any:
        """Tasks, any source of `data/sources.py`: the setting `prompts`."""
        return self.settings["prompts"]

    def eval_rows(self) -> Any:
        """Held-out tasks, the same: the setting `eval_prompts`."""
        return self.settings["eval_prompts"]

    def start(
        self, conversation: Conversation
    ) -> str | Sequence[Message] | Awaitable[str | Sequence[Message]]:
        """The messages that begin a conversation, by default `first_messages`."""
        return self.first_messages(conversation)

    def first_messages(self, conversation: Conversation) -> Sequence[Message]:
        """The prompt of a task, after the setting `system`."""
        return first_messages(conversation.task["prompt"], self.settings["system"])

    def respond(self, conversation: Conversation) -> Response | Awaitable[Response]:
        """The environment's response to a turn without complete tool calls; by default it ends the
        conversation."""
        return Response(done=True)

    async def stops(self, conversation: Conversation, results: Sequence[Message]) -> bool:
        """Whether a conversation is over although its last turn called tools, which have answered
        `results`."""
        return False

    def score(self, conversation: Conversation) -> float | None | Awaitable[float | None]:
        """The score of the whole conversation at its end, added to turn scores and reward
        functions."""
        return None

    async def end(self, conversation: Conversation) -> None:
        """Frees what belongs to the conversation, such as a container; called last, however the
        conversation ended, also by an error or a time limit, and where `start` failed. It does not
        count in `max_seconds`; its own errors are logged, and change no result."""

    def teacher_messages(
        self, conversation: Conversation
    ) -> str | Sequence[Message] | None | Awaitable[str | Sequence[Message] | None]:
        """The messages that a teacher reads of a conversation that is over in place of its first
        ones, such as the task with its solution, or with what the environment has to say of the
        answers. By default the column `teacher_prompt`; None: what the policy reads.

        Raises:
            Problems: the column is empty.
        """
        column = self.settings["teacher_prompt"]
        if column is None:
            return None
        text = conversation.task.get(column)
        require(bool(text), f"the task's {column}", text, "be the teacher's prompt",
                "teacher_prompt names this column", "Fill it in, or leave it out")  # fmt: skip
        return first_messages(text, self.settings["system"])

    # --- parts -------------------------------------------------------------------------------

    def _make_toolbox(self, tools: Sequence[Any]) -> Toolbox:
        """These tools, and those of the MCP servers."""
        return Toolbox(
            [*tools, *self._served], timeout_s=self.settings["tool_timeout_s"],
            max_chars=self.settings["max_tool_chars"],
        )  # fmt: skip

    def _make_format(self, toolbox: Toolbox) -> ChatFormat:
        """How conversations with these tools are written, as far as it is proven."""
        chat_format, self.findings = proven_format(self.settings, self.tokenizer, toolbox)
        return chat_format

    def _check_task(self, row: PromptRow) -> None:
        """Raises what the first task's columns and messages are refused with: RewardError by reward
        functions, ChatFormatError by the chat template."""
        if self.rewards is not None:
            self.rewards.check_columns({*row.columns, *_OF_CONVERSATIONS})
        conversation = self.new_conversation(row, row.task())
        ConversationEnv.teacher_messages(self, conversation)
        if self.starts_with_prompt or type(self).start is ConversationEnv.start:
            conversation.append_messages(self.first_messages(conversation))

    @functools.cached_property
    def _image_prompts(self) -> ImagePrompts:
        return ImagePrompts(self.settings["model"], self.tokenizer, self.tokenizer.chat_template)

    def new_conversation(self, row: PromptRow, task: Mapping[str, Any]) -> Conversation:
        """The conversation about a task, with the images that its row shows.

        Raises:
            Problems: the policy, or who holds its conversations, reads text alone.
        """
        conversation = Conversation(self.format_of(task), task=task)
        if row.images:
            try:
                require(self.sees, "image", ..., "be left out here", "text alone is handed on",
                        "Drop or rename the column")  # fmt: skip
                conversation.pictures = Pictures(row.images, self._image_prompts, row.index)
            except Problems as error:
                raise error.within(f"row {row.index}") from error
        return conversation

    def images_at(self, positions: Sequence[int]) -> dict[str, torch.Tensor]:
        """Columns of what the tasks at these positions show, see `modules/images.py`."""
        rows = [self.tasks.rows(position, 1)[0] for position in positions]
        return image_columns([
            self._image_prompts.seen(row.images, row.index) if row.images else {} for row in rows
        ])  # fmt: skip

    @classmethod
    def default_settings(cls) -> dict[str, Any]:
        """Its settings by name: rows, or defaults alone."""
        return {**DEFAULTS, **cls.defaults}

    @property
    def device(self) -> torch.device:
        """The device of the output columns."""
        return torch.device(self.settings["device"])

    def close(self) -> None:
        """Ends the event loop, and the connections that live in it; again, it does nothing."""
        if not self.events.is_closed:
            self.events.run(self._servers.close())
            self.events.close()


_EXCHANGED = {"user": "assistant", "assistant": "user"}


class Player(Settings):
    """Another model that the policy talks with."""

    base_url: str | None = setting(None, "the address of the player's server, up to the version")
    model_name: str | None = setting(None, "the server's name for the player")
    system_of_player: str | None = setting(
        None, "what the player is told first; {columns} of the task are filled in"
    )
    player_settings: dict | None = setting(
        None, "further settings of its requests, such as temperature and max_tokens"
    )
    client_settings: dict | None = setting(
        None, "the settings of `OpenAIClient`, such as timeout_s, max_attempts and api_key_env"
    )
    last_words: str | None = setting(
        None, "what the player says in the turn that ends the conversation"
    )


class ChatEnv(ConversationEnv):
    """rllib_llm/Chat-v0: conversations with another model, on a server with OpenAI's interface.

        env_config: {base_url: "http://localhost:8000/v1", model_name: my-player}

    The task's prompt opens the conversation in the other player's name. The player answers every
    turn without complete tool calls: it is asked with the two sides exchanged, so that what the
    policy said is its user's. One that does not answer makes the rollout invalid.
    """

    defaults: ClassVar[Mapping[str, Any]] = declared(Player)

    def _open(self) -> None:
        super()._open()
        require(self.settings["model_name"], "env_config.model_name",
                self.settings["model_name"], "name a model of the server", "",
                "See GET /v1/models")  # fmt: skip
        self._client  # noqa: B018  (a wrong address is refused before anything is sampled)

    def _check_task(self, row: PromptRow) -> None:
        super()._check_task(row)
        self._player_system(row.task())

    @functools.cached_property
    def _client(self) -> OpenAIClient:
        waits = {"outage_s": JUDGE_OUTAGE_S, "outage_setting": "client_settings.outage_s"}
        settings = {**waits, **(self.settings["client_settings"] or {})}
        return OpenAIClient(self.settings["base_url"], **settings)

    async def respond(self, conversation: Conversation) -> Response:
        messages = self._player_system(conversation.task)
        messages += [
            {"role": _EXCHANGED[message["role"]], "content": message["content"]}
            for message in conversation.messages
            if message["role"] in _EXCHANGED and message["content"]  # no tool calls and results
        ]
        body = {
            **(self.settings["player_settings"] or {}),
            "model": self.settings["model_name"], "messages": messages,
        }  # fmt: skip
        asked = self._client.submit(
            "chat/completions", body, lambda answer: answer["choices"][0]["message"]["content"]
        )
        try:
            words = str(await asyncio.wrap_future(asked) or "")
        except Away as error:
            return Response(invalid=f"the other player did not answer: {error}")
        last = self.settings["last_words"]
        return Response(words, done=last is not None and last in words)

    def _player_system(self, task: Mapping[str, Any]) -> Messages:
        """The player's system message, where there is one.

        Raises:
            Problems: it names what the task has not.
        """
        system = self.settings["system_of_player"]
        if system is None:
            return []
        try:
            return [{"role": "system", "content": system.format(**task)}]
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise Problems(
                "system_of_player", f"name columns of the task in braces, {sorted(task)}",
                told(error), "Write { itself as {{", system,
            ) from error  # fmt: skip

    def close(self) -> None:
        """Closes the connections to the server as well."""
        self._client.close()
        super().close()
