"""rllib_llm/Verifiers-v0: task sets of verifiers 0.4, in this process.

    env_config: {taskset: my_package, taskset_config: {split: train}, num_tasks: 1000}

The task set's prompts, tools (`@vf.tool` of its toolsets), stops, rewards, metrics and judges are
verifiers' own; turns and tokens are ours. Nothing is started per rollout: verifiers would run a
harness and a server of each toolset as processes. The state of a rollout is its trace's: a toolset,
shared or not, sees it for the time of a call. Tasks that need a container, and hooks and rewards
that take a `runtime`, have one where the setting `runtime` says which (`verifiers_runtimes.py`).
What needs a server of its own, or what a model said to be rewritten, is refused, never scored
without.
"""

from __future__ import annotations

import contextvars
import functools
import importlib.util
import inspect
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rllib_llm.conversations.chat_format import Message
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.envs.adapters.verifiers_runtimes import Runtimes, bash_in, is_running
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.settings import declared
from rllib_llm.envs.tools import FunctionTool, tool_schema
from rllib_llm.shared.dotted import import_dotted, looks_dotted
from rllib_llm.shared.errors import require
from rllib_llm.shared.messages import blamed_on, told
from rllib_llm.shared.remote import Away, call
from rllib_llm.shared.setting import Settings, setting


def prompt_of(task: Any) -> list[dict[str, Any]]:
    """A task's first messages as chat templates take them."""
    data, prompt = task.data, task.data.prompt
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = [_as_chat(message) for message in prompt]
    if data.system_prompt:
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return messages


def _as_chat(message: Any) -> dict[str, Any]:
    """A message of verifiers as chat templates take it; it must be text."""
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.types import content_text

    given = message_to_wire(message)
    if isinstance(message.content, list):
        require(not any(part.type != "text" for part in message.content),
                f"messages of the role {message.role!r}", ..., "be text",
                "the policy reads no images")  # fmt: skip
        given["content"] = content_text(message.content)
    return {**given, "content": given["content"] or ""}  # templates would write None as a word


def new_trace(task: Any) -> Any:
    """A new verifiers trace with its own state."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()), state=state_cls(type(task))(),
    )  # fmt: skip


def write_nodes(trace: Any, conversation: Conversation) -> None:
    """Replaces the nodes of a trace by those of the conversation, forks among them: as in verifiers
    a branch begins where what was said before differs.

        asked ── said a ── told ── said b                what the policy read for b had "said a"
          └───── a without its thoughts ── told ── said c
    """
    import verifiers.v1 as vf
    from verifiers.v1.types import Usage

    trace.nodes, trace.calls = [], []
    ends: dict[int | None, tuple[int | None, int]] = {None: (None, 0)}  # of nodes: place and tokens
    for number, node in enumerate(conversation.nodes):
        parent, num_read = ends[node.parent]
        for message in node.messages:
            same = None if node.sampled else _place_of(trace, parent, message)
            if same is not None:
                parent = same
                continue
            written = write_message(trace, message, parent)
            parent = len(trace.nodes) - 1
            if node.sampled:
                written.sampled, written.mask = True, [True] * len(node.token_ids)
                written.token_ids, written.logprobs = list(node.token_ids), list(node.logprobs)
                finish = "tool_calls" if message.get("tool_calls") else "stop"
                usage = Usage(prompt_tokens=num_read, completion_tokens=len(node.token_ids))
                why = finish if node.finish == "stop" else "length"
                trace.calls.append(vf.ModelCall(node=parent, finish_reason=why, usage=usage))
        ends[number] = parent, num_read + len(node.token_ids)


def _place_of(trace: Any, parent: int | None, message: Message) -> int | None:
    """The node of this message after `parent`, if the record has it; a sampled one is the same only
    where the policy reads it again as it said it."""
    from verifiers.v1.dialects.chat import message_to_wire

    read = message_to_wire(_parsed(message))
    for place, node in enumerate(trace.nodes):
        if node.parent == parent and message_to_wire(node.message) == read:
            return place
    return None


def write_message(trace: Any, message: Message, parent: int | None) -> Any:
    """Appends a message to the record after the node `parent`; its node."""
    import verifiers.v1 as vf

    trace.nodes.append(vf.MessageNode(parent=parent, message=_parsed(message)))
    return trace.nodes[-1]


def _parsed(message: Message) -> Any:
    """The message as verifiers' own type."""
    from verifiers.v1.dialects.chat import parse_message

    calls = []
    for asked in message.get("tool_calls") or ():
        arguments = asked["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append({**asked, "function": {**asked["function"], "arguments": text}})
    return parse_message({**message, "tool_calls": calls})


_TRACE = "trace"  # under which a conversation's state holds verifiers' record of it
_TOOLSETS = "toolsets"
_RUNTIME, _AGENT = "runtime", "agent"  # the task's own, and as the agent's user sees it
# Of a task; verifiers gives the first two a runtime, and the last one's variables to it.
_HOOKS = ("setup", "finalize", "runtime_env")


class TaskSet(Settings):
    """A task set of verifiers."""

    taskset: Any = setting(
        None, "an installed package, one of verifiers' own, or a class's dotted path"
    )
    taskset_config: dict | None = setting(None, "the settings of the task set")
    num_tasks: int | None = setting(
        None, "the number of tasks that are taken; None: all there are", least=1
    )
    runtime: dict | str | None = setting(
        None, "the container of a task: verifiers' config of a runtime, such as {type: docker}, or "
        "the dotted path of a vf.Runtime",
    )  # fmt: skip


class VerifiersEnv(ConversationEnv):
    """One `vf.Task` and one `vf.Trace` for each conversation."""

    defaults: ClassVar[Mapping[str, Any]] = declared(TaskSet)
    starts_with_prompt = runs_last_calls = True  # verifiers refuses the request after them

    @functools.cached_property
    def taskset(self) -> Any:
        """The `vf.Taskset`."""
        if importlib.util.find_spec("verifiers") is None:
            raise ImportError(
                "rllib_llm/Verifiers-v0 needs verifiers, in an environment of its own, since it "
                "pins openai below 3: pip install 'rllib-llm[verifiers]'."
            )
        import verifiers.v1 as vf
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import environment_class, taskset_class

        given, config = self.settings["taskset"], self.settings["taskset_config"] or {}
        with blamed_on(
            "taskset", given, f"be a vf.Taskset with the settings taskset_config={dict(config)!r}",
            remedy="Give an installed package's name or a class's dotted path, and its settings",
        ):  # fmt: skip
            is_path = isinstance(given, str) and (":" in given or looks_dotted(given))
            kind = import_dotted(given, name="taskset") if is_path else given
            if isinstance(kind, str):
                kind = taskset_class(given)
                if environment_class(given) is not vf.SingleAgentEnv:
                    raise TypeError("it has its own vf.Env")
            config_type = concrete_type(kind, vf.TasksetConfig) or vf.TasksetConfig
            return kind(config_type(**config))

    @functools.cached_property
    def shared_toolsets(self) -> list[Any]:
        """Those of the task set, which all conversations use."""
        with blamed_on("taskset", self.settings["taskset"], "set its toolsets up"):
            toolsets = _checked(type(self.taskset).toolsets(self.taskset.config))
            for toolset in toolsets:
                self.events.run(toolset.setup())
        return toolsets

    @functools.cached_property
    def runtimes(self) -> Runtimes | None:
        """Makes the tasks' runtimes; None: they have none."""
        given = self.settings["runtime"]
        return None if given is None else Runtimes(given)

    @functools.cached_property
    def vf_tasks(self) -> list[Any]:
        """The `vf.Task`s, by position, all of which can be done here."""
        count = self.settings["num_tasks"]
        require(
            not (count is None and not self.taskset.bounded), "num_tasks", None, "be a number",
            "its tasks never end",
        )  # fmt: skip
        with blamed_on("taskset", self.settings["taskset"], "yield tasks"):
            tasks = list(itertools.islice(iter(self.taskset), count))
        require(tasks, "taskset", self.settings["taskset"], "have tasks")
        for task in tasks:
            _check_task(task, self.runtimes)
        return tasks

    def rows(self) -> Any:
        return [{"prompt": prompt_of(task), "position": i} for i, task in enumerate(self.vf_tasks)]

    def tools(self) -> Sequence[Any]:
        one_of_each = {type(task): task for task in reversed(self.vf_tasks)}
        found = {
            kind.__name__: _tools_of(_checked(kind.toolsets(task.config)))
            for kind, task in one_of_each.items()
        }
        names = {kind: sorted(tool.name for tool in tools) for kind, tools in found.items()}
        require(
            len({*map(tuple, names.values())}) == 1, "taskset", self.settings["taskset"],
            "have the same tools in all tasks", f"its tasks have {names}",
            "Make a task set of each, or give all of them all tools",
        )  # fmt: skip
        own = found[type(self.vf_tasks[0]).__name__]
        bash = [bash_in(None)] if self.runtimes and self.runtimes.has_bash else []
        return [*super().tools(), *bash, *own, *_tools_of(self.shared_toolsets)]

    def tools_of(self, conversation: Conversation) -> Sequence[Callable[..., Any]]:
        trace = conversation.state[_TRACE]
        bound = [
            _bound(toolset, method, trace)
            for toolset in (*conversation.state[_TOOLSETS], *self.shared_toolsets)
            for method in _methods(toolset)
        ]
        if self.runtimes is not None and self.runtimes.has_bash:
            bound.append(bash_in(conversation.state[_AGENT]))
        return bound

    async def start(self, conversation: Conversation) -> Any:
        from verifiers.v1.rollout import resolve_agent_runtime
        from verifiers.v1.utils.decorators import invoke

        task = self.vf_tasks[conversation.task["position"]]
        trace = conversation.state[_TRACE] = new_trace(task)
        if self.runtimes is not None:
            runtime = conversation.state[_RUNTIME] = self.runtimes.make(task, trace.id)
            await runtime.start()
            await runtime.prepare_setup()
            await invoke(task.setup, {"trace": trace, "runtime": runtime})
            agent = await resolve_agent_runtime(runtime, task.data.agent_user)
            conversation.state[_AGENT] = agent
            if self.runtimes.has_bash:
                tried = await agent.run(["bash", "-c", ":"], {})
                require(not tried.exit_code, "runtime.bash", True, "be false: the image has none",
                        tried.stderr, "Write so, or install bash in it")  # fmt: skip
            await runtime.prepare_execution([])  # the policy's network, without routes to verifiers
        toolsets = conversation.state[_TOOLSETS] = _checked(type(task).toolsets(task.config))
        for toolset in toolsets:
            await toolset.setup()
            await toolset.setup_task(task.data)
        return self.first_messages(conversation)

    async def stops(self, conversation: Conversation, results: Sequence[Message]) -> bool:
        import verifiers.v1 as vf
        from verifiers.v1.utils.decorators import invoke

        task, trace = self._record(conversation, results)
        if conversation.num_turns >= self.settings["max_turns"]:
            return False  # verifiers asks for its limits first
        for stop in task.hooks("stop"):
            if await call(invoke, stop, {vf.Trace: trace}):
                trace.stop(stop.__name__)
                return True
        return False

    async def score(self, conversation: Conversation) -> float | None:
        from verifiers.v1.utils.decorators import invoke

        task, trace = self._record(conversation)
        ending = "agent_completed"  # in verifiers' words, where no `@vf.stop` has stopped it
        if conversation.reply is not None and conversation.reply.tool_calls:
            has_turns = conversation.num_turns < self.settings["max_turns"]
            ending = "max_total_tokens" if has_turns else "max_turns"
        trace.stop(ending)
        runtime = conversation.state.get(_RUNTIME)
        await invoke(task.finalize, {"trace": trace, "runtime": runtime})
        await task.score(trace, runtime)
        if runtime is not None and not await is_running(runtime):  # its failures look wrong
            raise Away("the task's runtime has ended")
        unscored = sorted(name for name, reward in trace.rewards.items() if reward is None)
        if unscored:
            raise RuntimeError(f"the rewards {unscored} of {type(task).__name__} gave no number")
        numbers = {name: value for name, value in trace.metrics.items() if value is not None}
        conversation.metrics.update({name: float(value) for name, value in numbers.items()})
        return float(trace.reward) if trace.rewards else None

    async def end(self, conversation: Conversation) -> None:
        runtime = conversation.state.pop(_RUNTIME, None)
        if runtime is not None:
            await runtime.stop()

    def close(self) -> None:
        """Ends the tasks' runtimes as well."""
        super().close()
        if self.runtimes is not None:
            self.runtimes.close()

    def _record(
        self, conversation: Conversation, results: Sequence[Message] = ()
    ) -> tuple[Any, Any]:
        """The task of a conversation and its verifiers trace so far; `results`: tool results that
        are not in it yet."""
        trace = conversation.state[_TRACE]
        write_nodes(trace, conversation)
        for message in results:
            write_message(trace, message, len(trace.nodes) - 1)
        return self.vf_tasks[conversation.task["position"]], trace


def _check_task(task: Any, runtimes: Runtimes | None) -> None:
    """Raises Problems for a task that cannot be done in this process and such a runtime."""
    import verifiers.v1 as vf
    from verifiers.v1.session import hook_boundary
    from verifiers.v1.utils.decorators import discover_decorated

    rewriting = [hook.__name__ for hook in discover_decorated(task, "intercept")]
    stops = [hook.__name__ for hook in task.hooks("stop")
             if hook_boundary(hook, allow_trace=True) is not vf.Trace]  # fmt: skip
    hooks = [name for name in _HOOKS if getattr(type(task), name) is not getattr(vf.Task, name)]
    scoring = [*task.hooks("metric"), *task.hooks("reward")]
    scoring += [judge.score for judge in task.plugged_judges()]
    takes = [(f, inspect.signature(f).parameters.get("runtime")) for f in scoring]
    wants = [getattr(f, "__name__", str(f)) for f, p in takes if p and p.default is p.empty]
    data, alone = task.data, runtimes is None
    name = f"task {type(task).__name__} number {data.idx}"
    moves = data.artifacts or type(task).stage_verifier is not vf.Task.stage_verifier
    reasons = {
        "artifacts and stage_verifier want a second container": moves,
        "it runs in a container": alone and (task.NEEDS_CONTAINER or data.image or data.agent_user),
        f"{sorted([*hooks, *wants])} want a runtime": alone and (hooks or wants),
        "skills are installed by verifiers' harnesses": data.skills,
        f"@vf.intercept of {rewriting} rewrites what was sampled": rewriting,
        f"@vf.stop of {stops} looks at requests or responses, of which there are none": stops,
        "it has no prompt, and waits for a user to begin": data.prompt is None,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    require(not reason, name, ..., "need nothing but this process, and a runtime where one is set",
            reason, "Set runtime, as {type: docker}, if it wants one; else train with verifiers' "
            "harness against /inference/v1/generate of rllib serve")  # fmt: skip
    if runtimes is not None:
        with blamed_on(name, ..., "fit the runtime", remedy="Give another runtime"):
            runtimes.config_of(task)


def _checked(toolsets: Sequence[Any]) -> list[Any]:
    """The toolsets, none of which may run elsewhere or have tools that it does not declare."""
    import verifiers.v1 as vf

    for toolset in toolsets:
        config = toolset.config
        runtime = getattr(getattr(config, "runtime", None), "type", "subprocess")
        reasons = {
            f"it is a server at {getattr(config, 'url', '')}": getattr(config, "url", None),
            "it shares the agent's box (colocated)": getattr(config, "colocated", False),
            f"its runtime is {runtime!r}": runtime != "subprocess",
            "its register() offers tools that @vf.tool does not declare":
                type(toolset).register is not vf.Toolset.register,
        }  # fmt: skip
        reason = next((reason for reason, holds in reasons.items() if holds), "")
        require(not reason, f"toolset {type(toolset).__name__}", ..., "be one of this process",
                reason, "Name a server in mcp_servers, or train with verifiers' own harness"
                )  # fmt: skip
    return list(toolsets)


def _methods(toolset: Any) -> list[Callable[..., Any]]:
    """The methods that a toolset offers as tools."""
    from verifiers.v1.utils.decorators import discover_decorated

    return list(discover_decorated(toolset, "tool"))


def _tool_name(toolset: Any, method: Callable[..., Any]) -> str:
    own = getattr(method, "tool_name", None) or method.__name__
    return f"{toolset.server_name}_{own}" if toolset.server_name else own


def _bound(toolset: Any, method: Callable[..., Any], trace: Any) -> Callable[..., Any]:
    """A tool that sees the state of one rollout, and changes it."""

    async def called(**arguments: Any) -> Any:
        from verifiers.v1.mcp.server import _call_state
        from verifiers.v1.state import state_cls

        # As verifiers does it: the whole state goes to the toolset and comes back.
        state = state_cls(type(toolset)).model_validate_json(trace.state.model_dump_json())
        before = state.model_dump_json()
        token = _call_state.set(state)
        try:
            if inspect.iscoroutinefunction(method):
                result = await call(method, **arguments)
            else:  # a thread begins without what this task has set
                result = await call(contextvars.copy_context().run, method, **arguments)
        finally:
            _call_state.reset(token)
        if (after := state.model_dump_json()) != before:
            trace.state = type(trace.state).model_validate_json(after)
        return result

    called.__name__ = _tool_name(toolset, method)
    return called


class _VerifiersTool(FunctionTool):
    """A method of a toolset under the name and schema that verifiers would serve it with."""

    def __init__(self, toolset: Any, method: Callable[..., Any]) -> None:
        from mcp.server.mcpserver.tools import Tool

        own = getattr(method, "tool_name", None) or method.__name__
        self.name = _tool_name(toolset, method)
        description = inspect.getdoc(method) or own
        served = Tool.from_function(method, name=own, description=description)
        self.schema = tool_schema(self.name, description, served.parameters)
        self.function = method  # each conversation has its own: `tools_of`
        self._served = served.fn_metadata

    def objection(self, arguments: Mapping[str, Any]) -> str:
        try:
            self._served.validate_arguments(dict(arguments))
        except Exception as error:  # noqa: BLE001  (of a user's validators)
            return told(error)
        return ""

    async def run(self, arguments: Mapping[str, Any]) -> Any:
        """The result as verifiers' harness `null` writes it; the method gets what its type hints
        name, such as models and dates."""
        from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content

        result = await super().run(self._served.validate_arguments(dict(arguments)))
        given: Any = self._served.convert_result(result)
        said = mcp_content_to_chat_content(given.content)
        if not isinstance(said, str):  # nothing that the policy did
            raise Away(f"tool {self.name!r} must give texts: the policy reads no images")
        return said


def _tools_of(toolsets: Sequence[Any]) -> list[_VerifiersTool]:
    return [_VerifiersTool(toolset, method) for toolset in toolsets for method in _methods(toolset)]
