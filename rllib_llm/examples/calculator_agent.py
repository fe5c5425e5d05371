"""An agent for `rllib_llm/Agent-v0`: it has the policy work out sums, with a calculator.

It is an ordinary program for OpenAI's client, and knows nothing of training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import openai

from rllib_llm.envs.tools import FunctionTool
from rllib_llm.examples.calculator import calculator


async def run(base_url: str, task: Mapping[str, Any]) -> dict[str, float]:
    """1 where the last words are the right number, and how often the calculator was called."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    tools: list[Any] = [FunctionTool(calculator).schema]
    num_calls = 0
    # The session is on this machine, without TLS: to read certificates would take longer than all
    # else that this function does.
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", http_client=http) as client:
        while True:
            answer = await client.chat.completions.create(
                model="gpt-4o", messages=messages, tools=tools
            )
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls or num_calls == 2:
                break
            for call in said.tool_calls:
                assert call.type == "function", "the only kind of tool that was offered"
                num_calls += 1
                messages.append(
                    {"role": "tool", "tool_call_id": call.id, "content": _result(call.function)}
                )
    is_right = (said.content or "").strip() == task["answer"]
    return {"reward": float(is_right), "calculator_calls": float(num_calls)}


def _result(function: Any) -> str:
    try:
        return calculator(**json.loads(function.arguments))
    except (TypeError, ValueError) as error:
        return f"Error: {error}"
