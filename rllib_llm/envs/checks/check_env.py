"""What an environment of one's own gets wrong: every finding says what arrived and what to do.

    problems = check_env("my_package.envs:create", {"num_envs": 4})
    print(*problems, sep="\\n")

It hands the environment random completions and looks at what comes back; it does not train.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from ray.rllib.utils.spaces.repeated import Repeated

from rllib_llm.envs.adapters.agent import OpenAgentServer
from rllib_llm.envs.checks.check_conversation import ConversationChecker
from rllib_llm.envs.checks.check_findings import Problems
from rllib_llm.envs.checks.check_judging import JudgingChecker
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.registry import ENVIRONMENTS, make
from rllib_llm.shared import columns


class EnvContractError(ValueError):
    """An environment that does not keep the contract; `problems` lists what it gets wrong."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(f"{len(problems)} problem(s):\n" + "\n".join(f"- {p}" for p in problems))
        self.problems = problems


def check_env(
    env: str | Callable[..., Any] | VectorEnv,
    env_config: Mapping[str, Any] | None = None,
    *,
    num_prompts: int = 3,
    num_completions: int = 2,
    seed: int = 0,
    raise_error: bool = False,
    report: Callable[[str], None] | None = None,
    agent_server: OpenAgentServer | None = None,
) -> list[str]:
    """Returns the problems of an environment, an empty list where it keeps the contract.

    Args:
        env: an environment, or what `registry.make` makes one of (id, dotted path, creator).
        env_config: for making it.
        num_prompts, num_completions: of the batches it is tried with, at least 2 each.
        seed: of the random completions.
        raise_error: raise `EnvContractError` where there are problems.
        report: is told, line by line, what was proven of a chat template.
        agent_server: for an environment of agents, which talk to a server: what makes it, as
            `rllib_llm.serving.http_server.open_agent_server`.

    What keeps the contract but needs other settings than the default ones is warned of. An
    exception of the environment itself passes through: its traceback says more than we could.
    """
    if min(num_prompts, num_completions) < 2:
        raise ValueError(
            f"num_prompts={num_prompts!r}, num_completions={num_completions!r} must be at least 2: "
            "with one, order and groups cannot be seen. Raise them."
        )
    made_from = None
    if inspect.isclass(env) or not hasattr(env, "step"):
        made_from, env = env, make(env, env_config)
    options = {
        "position": 1,
        "num_prompts": num_prompts,
        "num_completions": num_completions,
    }
    findings = Problems(env)
    if isinstance(env, ConversationEnv):
        for finding in env.findings if report is not None else ():
            report(str(finding))
        ConversationChecker(
            findings, num_prompts=num_prompts, num_completions=num_completions, seed=seed,
            agent_server=agent_server,
        ).run()  # fmt: skip
        if raise_error and findings.problems:
            raise EnvContractError(findings.problems)
        return findings.problems
    checker = PromptChecker(findings, options)
    if checker.check_spaces() and checker.check_reset():
        JudgingChecker(findings, options, seed).run()
    silent = findings.problems or not findings.notes
    if not silent and not _takes_reference(made_from, dict(env_config or {})):
        warnings.warn(findings.notes[0], stacklevel=2)
    if raise_error and findings.problems:
        raise EnvContractError(findings.problems)
    return findings.problems


def _takes_reference(creator: Any, env_config: dict[str, Any]) -> bool:
    """Whether an environment has a reference once it is given the setting that samplers add."""
    if isinstance(creator, str) and creator in ENVIRONMENTS:
        return True
    if creator is None or env_config.get("model") is None:
        return False
    env = make(creator, {**env_config, "reference": {"model": env_config["model"]}})
    return getattr(env, "reference", None) is not None


class PromptChecker:
    """Checks of the spaces and of `reset`; what cannot be seen after a finding is left out."""

    def __init__(self, findings: Problems, options: Mapping[str, int]) -> None:
        self.findings = findings
        self.env = findings.env
        self.options = options
        self.num_prompts = options["num_prompts"]
        self.num_completions = options["num_completions"]

    def check_reset(self) -> bool:
        """False where observations cannot be read, so that nothing more can be tried."""
        observation, infos = self.env.reset(options=self.options)
        batch_size = self.num_prompts * self.num_completions
        if not self.findings.check_observation("reset()", observation, batch_size):
            return False
        self.check_reset_infos(infos, batch_size)
        if self.check_groups(observation):
            self.check_positions(observation, self.options)
        return True

    def check_spaces(self) -> bool:
        """False where the spaces are not read as the sampler reads them."""
        env = self.env
        before = len(self.findings.problems)
        if not isinstance(env, VectorEnv):
            self.findings.add(
                f"the environment of type {type(env).__name__}",
                "a gymnasium.vector.VectorEnv",
                "one step judges a whole batch",
                "Build on rllib_llm.envs.bandit.BanditEnv",
            )
            return False
        for name in ("single_observation_space", "single_action_space"):
            space = getattr(env, name, None)
            fits = isinstance(space, Repeated) and isinstance(space.child_space, spaces.Discrete)
            if not fits:
                self.findings.add(
                    f"{name}={space!r}",
                    "Repeated(Discrete(vocab_size), max_len)",
                    "prompts and completions are token ids of varying number",
                    "Take ray.rllib.utils.spaces.repeated.Repeated",
                )
        if len(self.findings.problems) == before:
            vocabularies = [
                int(space.child_space.n)  # type: ignore[attr-defined]
                for space in (env.single_observation_space, env.single_action_space)
            ]
            if vocabularies[0] != vocabularies[1]:
                self.findings.add(
                    f"vocabulary sizes={vocabularies!r} of observation and action space",
                    "the same",
                    "one policy reads the prompts and writes the completions",
                    "Use its vocabulary size in both",
                )
        num_envs = getattr(env, "num_envs", None)
        if not isinstance(num_envs, int) or num_envs < 1:
            self.findings.add(
                f"num_envs={num_envs!r}",
                "an integer of at least 1",
                "it is the number of prompts in a batch",
                "Set it in __init__",
            )
        return len(self.findings.problems) == before

    def check_reset_infos(self, infos: Any, batch_size: int) -> None:
        """The infos of `reset`: which prompts they are."""
        if not isinstance(infos, Mapping) or not {columns.PROMPT_INDEX, "position"} <= set(infos):
            arrived = list(infos) if isinstance(infos, Mapping) else type(infos)
            self.findings.add(
                f"reset() infos={arrived!r}",
                "a dict with 'prompt_index' and 'position'",
                "samples are matched by the row of their prompt",
                "Return both",
            )
            return
        index = infos[columns.PROMPT_INDEX]
        self.findings.check_tensor(
            "reset() infos['prompt_index']", index, torch.int64, (batch_size,)
        )
        if infos["position"] != 1:
            self.findings.add(
                f"reset() infos['position']={infos['position']!r}",
                "the position asked for, 1",
                "runs continue from it",
                "Return options['position']",
            )

    def check_groups(self, observation: Mapping[str, torch.Tensor]) -> bool:
        """False where the completions of a prompt do not stand together."""
        prompts = unpadded(observation)
        for start in range(0, len(prompts), self.num_completions):
            group = prompts[start : start + self.num_completions]
            if any(prompt != group[0] for prompt in group):
                self.findings.add(
                    f"prompts of rows {start}..{start + self.num_completions - 1}={group!r}",
                    "the same",
                    "they are one group, the completions of one prompt, and groups are adjacent",
                    "Repeat each prompt num_completions times in a row (repeat_interleave)",
                )
                return False
        return True

    def check_positions(
        self, observation: Mapping[str, torch.Tensor], options: Mapping[str, int]
    ) -> None:
        """Prompts are a function of their position."""
        first = unpadded(observation)
        again = unpadded(self.env.reset(options=options)[0])
        if first != again:
            self.findings.add(
                "prompts of reset() at the same position twice",
                "the same",
                "runs are continued and repeated by position alone",
                "Make prompts a function of (seed, position), as PromptSource does",
            )
            return
        shifted = {**options, "position": 2, "num_prompts": self.num_prompts - 1}
        tail = unpadded(self.env.reset(options=shifted)[0])
        if tail != first[self.num_completions :]:
            self.findings.add(
                "prompts of reset() at position 2",
                "those of position 1 without the first",
                "batches of any size walk through the same order",
                "Count positions in prompts, not in batches or rows",
            )


def unpadded(observation: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """The prompts of an observation as lists of ids, without their padding."""
    ids, mask = observation[columns.PROMPT_IDS], observation[columns.PROMPT_MASK]
    return [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
