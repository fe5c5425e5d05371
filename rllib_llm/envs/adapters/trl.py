"""rllib_llm/TRL-v0: environments and tools written for TRL's GRPOTrainer, as they are.

`environment_factory` is what TRL 1.16 takes: a class or another callable that makes an environment,
or {name: callable} for rows with a column `environment`. `reset(**row)` begins a conversation and
may return a text that is put after the last user message; the class's other public functions are
tools, and `get_reward()`, where there is one, is the conversation's score. Without a data set every
prompt is empty, and `reset` says all. `tools` are typed functions with docstrings. Reward functions
get `completions` as messages and `environments=`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from rllib_llm.conversations.chat_format import ChatFormat, Message
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.data.rows import MadeRows, Rows
from rllib_llm.data.sources import load_rows
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.settings import declared
from rllib_llm.envs.tools import FunctionTool, Toolbox, as_tool
from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import require
from rllib_llm.shared.messages import blamed_on
from rllib_llm.shared.remote import Away, OneThread
from rllib_llm.shared.setting import Settings, setting

_NO_TOOLS = ("reset", "get_reward")
_PROMPTS = ("prompt", "messages")
_ENVIRONMENT = "environment"  # of a row: which one; of a conversation's state: its own
_THREAD = "thread"  # of a conversation's state: the one in which its environment lives
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_EMPTY = {"role": "user", "content": ""}


class TRLSettings(Settings):
    """Settings of TRL's GRPOTrainer, and how many tasks there are."""

    environment_factory: Callable | dict | str | None = setting(
        None, "a callable, its dotted path, or {name: either}"
    )
    max_tool_calling_iterations: int | None = setting(
        None, "TRL's name of max_turns, which becomes this plus one", least=0
    )
    num_tasks: int = setting(1024, "the number of tasks where there is no data set", least=1)


class TRLEnv(ConversationEnv):
    """One object of `environment_factory` for each conversation."""

    defaults: ClassVar[Mapping[str, Any]] = declared(TRLSettings)

    def __init__(self, env_config: Mapping[str, Any] | None = None) -> None:
        given = dict(env_config or {})
        most = given.get("max_tool_calling_iterations")
        if isinstance(most, int) and most >= 0:
            given.setdefault("max_turns", most + 1)
        super().__init__(given)

    # By the name of a row's environment, where there are several: each has tools of its own.

    @functools.cached_property
    def _toolboxes(self) -> dict[str, Toolbox]:
        return {name: self._make_toolbox(self._tools_with(name)) for name in self.factories if name}

    @functools.cached_property
    def _formats(self) -> dict[str, ChatFormat]:
        return {name: self._make_format(box) for name, box in self._toolboxes.items()}

    @functools.cached_property
    def factories(self) -> dict[str, _Factory]:
        """The factories of environments by the name that rows choose; that of all rows under ""."""
        given = self.settings["environment_factory"]
        named = given if isinstance(given, Mapping) else {} if given is None else {"": given}
        return {str(name): _factory(factory) for name, factory in named.items()}

    def _name_of(self, task: Mapping[str, Any]) -> str:
        """The environment that a row chooses, "" where there is no choice."""
        if not self.factories or "" in self.factories:
            return ""
        name = task.get(_ENVIRONMENT)
        require(name in self.factories, "environment of a row", name,
                f"be one of environment_factory, {sorted(self.factories)}")  # fmt: skip
        return str(name)

    def _tools_with(self, name: str) -> list[Any]:
        """The general tools, and the tools of an environment."""
        own = _methods(self.factories[name].first) if name in self.factories else []
        given = map(as_tool, super().tools())
        general = [_TRLTool(t.function) if type(t) is FunctionTool else t for t in given]
        return [*general, *map(_TRLTool, own)]

    def tools(self) -> Sequence[Any]:
        return self._tools_with("")

    def tools_of(self, conversation: Conversation) -> Sequence[Callable[..., Any]]:
        environment = conversation.state.get(_ENVIRONMENT)
        if environment is None:
            return ()
        thread = conversation.state[_THREAD]

        def called_in_thread(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            async def called(**arguments: Any) -> Any:
                return await thread.call(method, **arguments)

            return called

        return [called_in_thread(method) for method in _methods(environment)]

    def toolbox_of(self, conversation: Conversation) -> Toolbox:
        box = self._toolboxes.get(self._name_of(conversation.task), self.toolbox)
        return box.of(self.tools_of(conversation))

    def format_of(self, task: Mapping[str, Any]) -> ChatFormat:
        return self._formats.get(self._name_of(task), self.chat_format)

    def rows(self) -> Any:
        if self.settings["prompts"] is None and "" in self.factories:
            return [{"prompt": [_EMPTY]}] * self.settings["num_tasks"]
        return self._with_prompts(self.settings["prompts"], "prompts")

    def eval_rows(self) -> Any:
        return self._with_prompts(self.settings["eval_prompts"], "eval_prompts")

    def _with_prompts(self, source: Any, name: str) -> Any:
        """The rows of a source, with an empty prompt where they have none."""
        if source is None or self.settings["environment_factory"] is None:
            return source
        rows = load_rows(source, name=name)
        names = {*_PROMPTS, self.settings["prompt_column"]} & {*rows.columns}
        of_all = "prompt" not in names or not isinstance(source, (list, tuple))
        return rows if names and of_all else PromptedRows(rows)

    async def start(self, conversation: Conversation) -> Sequence[Message]:
        messages = [dict(message) for message in self.first_messages(conversation)]
        factory = self.factories.get(self._name_of(conversation.task))
        if factory is None:
            return messages
        thread = conversation.state[_THREAD] = OneThread()
        environment = conversation.state[_ENVIRONMENT] = await thread.call(factory.make)
        # The data set's own columns, without the one that chooses the environment.
        task = conversation.task
        added = {"messages"} if "prompt" in task else set()
        if self._name_of(task):
            added.add(_ENVIRONMENT)
        if self.settings["prompts"] is not None and task.get("prompt") == [_EMPTY]:
            added.add("prompt")
        row = {name: value for name, value in task.items() if name not in added}
        said = await thread.call(environment.reset, **row)
        if said is not None:
            before = messages[-1]["content"]
            before = before if isinstance(before, str) else _text_of(before, "a prompt")
            messages[-1]["content"] = before + _text_of(said, "reset()")
        return messages

    async def score(self, conversation: Conversation) -> float | None:
        environment = conversation.state.get(_ENVIRONMENT)
        get_reward = getattr(environment, "get_reward", None)
        return None if get_reward is None else await conversation.state[_THREAD].call(get_reward)


class PromptedRows(MadeRows):
    """Rows, those without a prompt with an empty one."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(len(rows))
        self._rows, self.description = rows, rows.description
        self.column_names = list(dict.fromkeys(["prompt", *rows.columns]))

    def make(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        has_one = any(row.get(name) is not None for name in _PROMPTS)
        return row if has_one else {**row, "prompt": [_EMPTY]}


class _TRLTool(FunctionTool):
    """A tool whose result is formatted as TRL formats it."""

    async def run(self, arguments: Mapping[str, Any]) -> Any:
        result = await super().run(arguments)
        if not isinstance(result, list) or not any(map(_is_part, result)):
            return str(result)
        try:
            return _text_of(result, f"tool {self.name!r}")
        except TypeError as error:  # nothing that the policy did
            raise Away(str(error)) from error


class _Factory(NamedTuple):
    make: Callable[[], Any]
    first: Any  # of what it makes, whose methods are the tools of all


def _factory(given: Any) -> _Factory:
    """The factory of an environment, which must make objects that can be reset."""
    factory = import_dotted(given, name="environment_factory") if isinstance(given, str) else given
    place, first = "env_config.environment_factory", None
    wanted = []
    with contextlib.suppress(TypeError, ValueError):  # it is not callable, or does not say
        parameters = inspect.signature(factory).parameters.values()
        wanted = [p.name for p in parameters if p.default is p.empty and p.kind not in _ANY_NUMBER]
    require(
        not wanted, place, given, "be callable without arguments, as in TRL", f"it wants {wanted}",
        "Give functools.partial(...), or a function that makes the environment",
    )  # fmt: skip
    if callable(factory):
        with blamed_on(place, given, "make an environment"):
            first = factory()
    require(
        callable(getattr(type(first), "reset", None)), place, given,
        "make objects with reset(**row)",
    )  # fmt: skip
    return _Factory(factory, first)


def _methods(environment: Any) -> list[Callable[..., Any]]:
    """The tools of an environment as TRL finds them: public methods, static ones, too, but none of
    the class, such as other ways to make it. They are looked for in the class: a property of the
    object would be computed."""
    found = inspect.getmembers(type(environment), inspect.isfunction)
    names = [name for name, _ in found if name not in _NO_TOOLS and not name.startswith("_")]
    return [getattr(environment, name) for name in names]


def _is_part(given: Any) -> bool:
    """Whether it is a part of a message: a text or a picture."""
    return isinstance(given, Mapping) and "type" in given


def _text_of(given: Any, whose: str) -> str:
    """Text, or the text of parts of a message; raises TypeError for pictures."""
    if isinstance(given, str):
        return given
    is_list = isinstance(given, (list, tuple))
    if is_list and all(_is_part(part) and part["type"] == "text" for part in given):
        return "".join(str(part["text"]) for part in given)
    raise TypeError(f"{whose} must give text, not {str(given)[:80]!r}: the policy reads no images")
