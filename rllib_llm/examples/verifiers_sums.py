"""The calculator's sums as a task set of verifiers, for `rllib_llm/Verifiers-v0`.

It is an ordinary one for verifiers 0.4, and knows nothing of this package but its sums.
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

from rllib_llm.examples.calculator import calculator as work_out
from rllib_llm.examples.calculator import problems


class SumData(vf.TaskData):
    """A sum and its result."""

    answer: str


class CalculatorTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """One tool, `calculator`."""

    TOOL_PREFIX = None

    @vf.tool
    def calculator(self, expression: str) -> str:
        """Works out an arithmetic expression."""
        return work_out(expression)


class SumTask(vf.Task[SumData]):
    """1 where the last words are the right number."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [CalculatorTools(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class SumsConfig(vf.TasksetConfig):
    """How many tasks there are."""

    num_problems: int = 20_000


class Sums(vf.Taskset[SumTask, SumsConfig]):
    """Sums of three- to four-digit numbers."""

    def load(self) -> Iterator[SumTask]:
        for row in problems(self.config.num_problems):
            data = SumData(prompt=row["prompt"], answer=row["answer"])
            yield SumTask(data, self.config.task)
