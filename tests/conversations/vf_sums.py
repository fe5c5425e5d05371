"""A task set as authors of verifiers write them: sums, a tool with a state, a reward, a metric."""

from __future__ import annotations

import asyncio
import datetime
import re
from difflib import SequenceMatcher

import pydantic
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class Used(vf.State):
    count: int = 0


class Adder(vf.Toolset[vf.ToolsetConfig, Used]):
    TOOL_PREFIX = "sums"

    async def setup_task(self, task) -> None:
        self.asked = task.prompt

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        self.state.count += 1
        return f"{a + b} ({self.asked})"


class SumTask(vf.Task[SumData, Used]):
    @classmethod
    def toolsets(cls, config) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def polite(self, trace: vf.Trace) -> float:
        return 0.25 * len(trace.tool_messages)

    @vf.metric
    async def additions(self, trace: vf.Trace) -> float:
        return float(trace.state.count)

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return len(trace.tool_messages) >= 3


class SumsConfig(vf.TasksetConfig):
    most: int = 2


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for number in range(1, self.config.most + 1):
            data = SumData(prompt=f"1+{number}?", system_prompt="Add.", answer=str(1 + number))
            yield SumTask(data, self.config.task)


class Boxed(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        yield vf.Task(vf.TaskData(prompt="x", image="python:3.12"))


class RuntimeTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def ran(self, trace: vf.Trace, runtime) -> float:
        return 1.0


class Raising(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        raise KeyError("row")


class Running(vf.Taskset[RuntimeTask, vf.TasksetConfig]):
    def load(self):
        yield RuntimeTask(vf.TaskData(prompt="x"))


class Endless(vf.Taskset[SumTask, SumsConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            number += 1
            yield SumTask(SumData(prompt=f"1+{number}?", answer=str(1 + number)))


# --- after verifiers' own scratchpad: one writable toolset of all rollouts ----------------------


class Word(vf.State):
    word: str = ""


class Scratchpad(vf.Toolset[vf.SharedToolsetConfig, Word]):
    @vf.tool
    async def roundtrip(self, word: str) -> str:
        """Stores a word and reads it back."""
        self.state.word += word
        await asyncio.sleep(0.01)
        return self.state.word

    @vf.tool
    def shout(self) -> str:
        """Says the word loudly; not async."""
        self.state.word = self.state.word.upper()
        return self.state.word


class ScratchpadData(vf.TaskData):
    word: str


class ScratchpadTask(vf.Task[ScratchpadData, Word]):
    @vf.stop
    async def done(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 4

    @vf.reward
    async def isolated(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.word)

    @vf.reward
    async def kept(self, trace: vf.Trace) -> float:
        return float(trace.state.word == self.data.word.upper())

    @vf.metric
    async def output_tokens(self, trace: vf.Trace) -> float:
        return float(trace.num_output_tokens)

    @vf.metric
    async def total_tokens(self, trace: vf.Trace) -> float:
        return float(trace.num_total_tokens)


class Scratchpads(vf.Taskset[ScratchpadTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config) -> list[vf.Toolset]:
        return [Scratchpad(vf.SharedToolsetConfig())]

    def load(self):
        for word in ("alpha", "bravo", "charlie", "delta"):
            yield ScratchpadTask(ScratchpadData(prompt=f"Say {word}.", word=word))


# --- two toolsets of one state -------------------------------------------------------------------


class Count(vf.State):
    count: int = 0


class Ones(vf.Toolset[vf.ToolsetConfig, Count]):
    @vf.tool
    async def one(self) -> str:
        """Adds one."""
        self.state.count += 1
        return str(self.state.count)


class Hundreds(vf.Toolset[vf.ToolsetConfig, Count]):
    @vf.tool
    async def hundred(self) -> str:
        """Adds a hundred."""
        self.state.count += 100
        return str(self.state.count)


class CountTask(vf.Task[vf.TaskData, Count]):
    @classmethod
    def toolsets(cls, config) -> list[vf.Toolset]:
        return [Ones(vf.ToolsetConfig()), Hundreds(vf.ToolsetConfig())]

    @vf.reward
    async def counted(self, trace: vf.Trace) -> float:
        return float(trace.state.count)

    @vf.metric
    async def was_cut(self, trace: vf.Trace) -> float:
        return float(trace.is_truncated and trace.stop_condition == "max_turns")

    @vf.metric
    async def completed(self, trace: vf.Trace) -> float:
        return float(trace.stop_condition == "agent_completed")


class Counts(vf.Taskset[CountTask, vf.TasksetConfig]):
    def load(self):
        yield CountTask(vf.TaskData(prompt="Count."))


# --- what is refused -----------------------------------------------------------------------------


class GuardedTask(vf.Task[vf.TaskData]):
    @vf.intercept
    async def guard(self, response: vf.Response) -> vf.Response | None:
        return None


class Guarded(vf.Taskset[GuardedTask, vf.TasksetConfig]):
    def load(self):
        yield GuardedTask(vf.TaskData(prompt="x"))


class WatchedTask(vf.Task[vf.TaskData]):
    @vf.stop
    async def long(self, response: vf.Response) -> bool:
        return True


class Watched(vf.Taskset[WatchedTask, vf.TasksetConfig]):
    def load(self):
        yield WatchedTask(vf.TaskData(prompt="x"))


class RemoteTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config) -> list[vf.Toolset]:
        return [Ones(vf.ToolsetConfig(url="http://localhost:1/mcp"))]


class Remote(vf.Taskset[RemoteTask, vf.TasksetConfig]):
    def load(self):
        yield RemoteTask(vf.TaskData(prompt="x"))


# --- verifiers' own reverse_text, as it stands in its repository (MIT), with other rows ---------

_TAG = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


class ReverseData(vf.TaskData):
    answer: str


class ReverseTask(vf.Task[ReverseData]):
    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def lcs(self, trace: vf.Trace) -> float:
        match = _TAG.search(trace.last_reply or "")
        response = match.group(1).strip() if match else ""
        return SequenceMatcher(None, response, self.data.answer).ratio()


class Reverse(vf.Taskset[ReverseTask, vf.TasksetConfig]):
    def load(self):
        for text in ("hello world", "Ein Satz, mit Komma.", "abcabcabc"):
            yield ReverseTask(ReverseData(prompt=text, answer=text[::-1]))
        asked = vf.ToolCall(id="c0", name="look", arguments='{"a": 1}')
        said = [
            vf.UserMessage(content="Look."),
            vf.AssistantMessage(content=None, tool_calls=[asked]),
            vf.ToolMessage(content="seen", tool_call_id="c0", name="look"),
        ]
        yield ReverseTask(ReverseData(prompt=said, answer="x"))


class Mixed(vf.Taskset[vf.Task, vf.TasksetConfig]):
    """Tasks of two classes, one with tools."""

    def load(self):
        yield SumTask(SumData(prompt="1+1?", answer="2"))
        yield CountTask(vf.TaskData(prompt="Count."))


class Dynamic(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """As verifiers' own of NeMo Gym: its tools are registered, not declared."""

    def register(self, mcp) -> None:
        mcp.add_tool(lambda: "1", name="one")


class DynamicTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config) -> list[vf.Toolset]:
        return [Dynamic(vf.ToolsetConfig())]


class Dynamics(vf.Taskset[DynamicTask, vf.TasksetConfig]):
    def load(self):
        yield DynamicTask(vf.TaskData(prompt="x"))


# --- tools whose arguments and results are no plain JSON -----------------------------------------


class Point(pydantic.BaseModel):
    x: int
    y: int = 2


class Kit(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def model(self, point: Point) -> str:
        """Adds the parts of a point."""
        return str(point.x + point.y)

    @vf.tool
    def year(self, day: datetime.date, plus: int = 0) -> int:
        """Says the year of a day."""
        return day.year + plus

    @vf.tool
    async def pair(self) -> list[str]:
        """Gives two."""
        return ["a", "b"]

    @vf.tool
    async def point(self) -> Point:
        """Gives a point."""
        return Point(x=1)


class KitTask(vf.Task[vf.TaskData]):
    """Without a reward."""

    @classmethod
    def toolsets(cls, config) -> list[vf.Toolset]:
        return [Kit(vf.ToolsetConfig())]


class Kits(vf.Taskset[KitTask, vf.TasksetConfig]):
    def load(self):
        yield KitTask(vf.TaskData(prompt="x"))


class Skilled(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        yield vf.Task(vf.TaskData(prompt="x", skills=["rows/skills"]))


class KeyedTask(vf.Task[vf.TaskData]):
    def runtime_env(self):
        return {"KEY": "1"}


class Keyed(vf.Taskset[KeyedTask, vf.TasksetConfig]):
    def load(self):
        yield KeyedTask(vf.TaskData(prompt="x"))


class Systems(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        yield vf.Task(vf.TaskData(prompt="x", system_prompt="Be brief."))
