"""What was said, as verifiers has it: a task's messages as ours, ours in verifiers' record."""

from __future__ import annotations

import json
from typing import Any

from rllib_llm.conversations.chat_format import Message
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.envs.rlhf import EnvConfigError


def prompt_of(task: Any) -> list[dict[str, Any]]:
    """A task's first messages as chat templates take them."""
    data = task.data
    prompt = data.prompt
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = [_as_chat(message) for message in prompt]
    if data.system_prompt:
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return messages


def _as_chat(message: Any) -> dict[str, Any]:
    """A message of verifiers as chat templates take it.

    Raises:
        EnvConfigError: it is more than text.
    """
    from verifiers.v1.types import content_text

    given = message.model_dump(exclude_none=True)
    if isinstance(given.get("content"), list):
        if any(part["type"] != "text" for part in given["content"]):
            raise EnvConfigError(
                f"messages of the role {message.role!r} must be text: the policy reads no images. "
                "Leave such tasks out."
            )
        given["content"] = content_text(message.content)
    for asked in given.get("tool_calls", ()):
        arguments = json.loads(asked.pop("arguments"))
        asked["function"] = {"name": asked.pop("name"), "arguments": arguments}
    return given


def new_trace(task: Any) -> Any:
    """verifiers' record of a conversation that begins, with a state of its own."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        state=state_cls(type(task))(),
    )


def write_nodes(trace: Any, conversation: Conversation) -> None:
    """Writes what was said into the record, in place of what it has."""
    import verifiers.v1 as vf
    from verifiers.v1.types import Usage

    trace.nodes, trace.calls, num_read = [], [], 0
    for node in conversation.path():
        for message in node.messages:
            written = write_message(trace, message)
            if node.sampled:
                written.sampled, written.mask = True, [True] * len(node.token_ids)
                written.token_ids, written.logprobs = list(node.token_ids), list(node.logprobs)
                finish = "tool_calls" if message.get("tool_calls") else "stop"
                call = vf.ModelCall(
                    node=len(trace.nodes) - 1,
                    finish_reason=finish if node.finish == "stop" else "length",
                    usage=Usage(prompt_tokens=num_read, completion_tokens=len(node.token_ids)),
                )
                trace.calls.append(call)
        num_read += len(node.token_ids)


def write_message(trace: Any, message: Message) -> Any:
    """Appends a message to the record; its node."""
    import verifiers.v1 as vf

    parent = len(trace.nodes) - 1 if trace.nodes else None
    trace.nodes.append(vf.MessageNode(parent=parent, message=_as_vf(message)))
    return trace.nodes[-1]


def _as_vf(message: Message) -> Any:
    """A message of ours as verifiers has it."""
    from verifiers.v1 import types

    content = message.get("content") or ""
    if message["role"] == "system":
        return types.SystemMessage(content=content)
    if message["role"] == "user":
        return types.UserMessage(content=content)
    if message["role"] == "tool":
        return types.ToolMessage(
            content=content, tool_call_id=str(message.get("tool_call_id", "")),
            name=message.get("name"),
        )  # fmt: skip
    calls = [
        types.ToolCall(
            id=str(asked["id"]), name=asked["function"]["name"],
            arguments=json.dumps(asked["function"]["arguments"]),
        )
        for asked in message.get("tool_calls", ())
    ]  # fmt: skip
    return types.AssistantMessage(
        content=content, reasoning_content=message.get("reasoning_content"),
        tool_calls=calls or None,
    )  # fmt: skip
