"""A task set as authors of verifiers write them: sums, a tool with a state, a reward, a metric."""

from __future__ import annotations

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
