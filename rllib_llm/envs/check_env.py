"""Checks a custom environment's contract; each problem says what was found and how to fix it.

    problems = check_env("my_package.envs:create", {"num_envs": 4})
    print(*problems, sep="\\n")

It hands the environment random completions and looks at what comes back; it does not train.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from ray.rllib.utils.spaces.repeated import Repeated

from rllib_llm.conversations.conversation import Rollout
from rllib_llm.engines.protocol import Ended
from rllib_llm.envs.actions import info_columns, misfit
from rllib_llm.envs.adapters.agent import AgentEnv, OpenAgentServer, open_for, run_agents
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.conversation_rollouts import judge, run_rollouts
from rllib_llm.envs.registry import ENVIRONMENTS, make, not_batched
from rllib_llm.modules.pretrained import load_causal_lm
from rllib_llm.shared import columns
from rllib_llm.shared.columns import widen
from rllib_llm.shared.errors import Problem, Problems, require


def check_env(
    env: str | Callable[..., Any] | VectorEnv, env_config: Mapping[str, Any] | None = None, *,
    num_prompts: int = 3, num_completions: int = 2, seed: int = 0, raise_error: bool = False,
    report: Callable[[str], None] | None = None, agent_server: OpenAgentServer | None = None,
) -> list[Problem]:  # fmt: skip
    """Returns the problems of an environment, an empty list where it keeps the contract.

    Args:
        env: an environment, or what `registry.make` makes one of (id, dotted path, creator).
        env_config: for making it.
        num_prompts, num_completions: of the batches it is tried with, at least 2 each.
        seed: of the random completions.
        raise_error: raise `Problems` where there are any.
        report: is called with each line of what was proven of a chat template.
        agent_server: for an environment of agents, which talk to a server: what makes it, as
            `rllib_llm.serving.http_server.open_agent_server`.

    What keeps the contract but needs other settings than the default ones is warned of. An
    exception of the environment itself passes through: its traceback says more than we could.
    """
    for name, count in (("num_prompts", num_prompts), ("num_completions", num_completions)):
        require(count >= 2, name, count, "be at least 2", "one shows no order and no group")
    made_from = None
    if inspect.isclass(env) or not hasattr(env, "step"):
        made_from, env = env, make(env, env_config)
    checker: ConversationChecker | BanditChecker
    if isinstance(env, ConversationEnv):
        for finding in env.findings if report is not None else ():
            report(str(finding))
        checker = ConversationChecker(env, num_prompts, num_completions, seed, agent_server)
    else:
        checker = BanditChecker(env, num_prompts, num_completions, seed)
    checker.run()
    model = (env_config or {}).get("model")
    is_made_here = isinstance(made_from, str) and made_from in ENVIRONMENTS
    lacks_reference = not checker.problems and not checker.has_reference and not is_made_here
    if lacks_reference and made_from is not None and model is not None:
        # Samplers add the setting, which the environment may take.
        made = make(made_from, {**(env_config or {}), "reference": {"model": model}})
        lacks_reference = getattr(made, "reference", None) is None
    if lacks_reference:
        warnings.warn(
            "step() infos have no 'ref_logprobs': training with ref_kl_coeff above 0, the default, "
            "refuses the first batch unless the environment takes the setting 'reference'. Take "
            "it, set reference_in='learner', or set ref_kl_coeff=0.", stacklevel=2,
        )  # fmt: skip
    if raise_error and checker.problems:
        raise Problems(checker.problems)
    return checker.problems


class EnvChecker:
    """Problems of one environment; each method adds those it finds and returns whether it found
    none."""

    def __init__(self, env: Any, num_prompts: int, num_completions: int) -> None:
        self.env, self.num_prompts, self.num_completions = env, num_prompts, num_completions
        self.problems: list[Problem] = []
        self.has_reference = True

    def expect(
        self, holds: bool, name: str, rule: str, reason: str, remedy: str = "", value: Any = ...
    ) -> bool:
        """Adds a problem unless the rule holds; returns whether it does."""
        if not holds:
            self.problems.append(Problem(name, rule, reason, remedy, value))
        return holds

    def tensor(
        self, where: str, value: Any, dtype: torch.dtype, shape: tuple[int | None, ...]
    ) -> bool:
        """`value` is a tensor of dtype and shape (None: any size)."""
        problem = misfit(where, value, dtype, shape)
        self.problems += [] if problem is None else [problem]
        return problem is None

    def finite(self, where: str, values: torch.Tensor) -> bool:
        """No value is NaN or infinite."""
        return self.expect(
            bool(torch.isfinite(values).all()), where, "be finite",
            "one NaN spoils the whole update", "Give such rows 0 and infos['valid'] False",
            values.flatten().tolist()[:8],
        )  # fmt: skip


def unpadded(observation: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """The prompts of an observation as lists of ids, without their padding."""
    ids, mask = observation[columns.PROMPT_IDS], observation[columns.PROMPT_MASK]
    return [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]


# Of an environment that gives scores; one that does not is learnt from by its rewards.
_REQUIRED_INFOS = (
    columns.SCORES, columns.VALID, "components", "metrics", "num_completion_tokens",
)  # fmt: skip


def _missing(given: Any, names: Sequence[str]) -> list[str]:
    return [name for name in names if not isinstance(given, Mapping) or name not in given]


class BanditChecker(EnvChecker):
    """Hands out prompts, answers with random completions, looks at the result; what cannot be seen
    after a problem is left out."""

    def __init__(self, env: Any, num_prompts: int, num_completions: int, seed: int) -> None:
        super().__init__(env, num_prompts, num_completions)
        numbers = {"num_prompts": num_prompts, "num_completions": num_completions}
        self.options = {"position": 1, **numbers}
        self.batch_size = num_prompts * num_completions
        self.generator = torch.Generator().manual_seed(seed)

    def run(self) -> None:
        """Every method below."""
        if not self.spaces():
            return
        observation, infos = self.env.reset(options=self.options)
        if not self.observation("reset()", observation, self.batch_size):
            return
        self.reset_infos(infos)
        if self.groups(observation):
            self.positions(observation)
        self.results()
        self.padding()
        self.refusals()
        self.rewards()

    def spaces(self) -> bool:
        """The spaces are as the sampler reads them."""
        env = self.env
        if not isinstance(env, VectorEnv):
            self.problems += not_batched(env).found
            return False
        sizes = []
        for name in ("single_observation_space", "single_action_space"):
            space = getattr(env, name, None)
            fits = isinstance(space, Repeated) and isinstance(space.child_space, spaces.Discrete)
            self.expect(
                fits, name, "be Repeated(Discrete(vocab_size), max_len)",
                "prompts and completions are token ids of varying number",
                "Take ray.rllib.utils.spaces.repeated.Repeated", space,
            )  # fmt: skip
            sizes += [int(space.child_space.n)] if fits else []  # type: ignore[union-attr]
        self.expect(
            len({*sizes}) < 2, "vocabulary sizes of both spaces", "be the same",
            "one policy reads the prompts and writes the completions", "Use its size", sizes,
        )  # fmt: skip
        count = getattr(env, "num_envs", None)
        self.expect(
            isinstance(count, int) and count >= 1, "num_envs", "be an integer of at least 1",
            "it is the number of prompts in a batch", "Set it in __init__", count,
        )  # fmt: skip
        return not self.problems

    def observation(self, where: str, observation: Any, batch_size: int) -> bool:
        """It holds left-padded prompts of the vocabulary, one for each row."""
        names = (columns.PROMPT_IDS, columns.PROMPT_MASK)
        if missing := _missing(observation, names):
            return self.expect(
                False, f"{where} observation", f"be a dict with {[*names]}", f"it lacks {missing}"
            )
        ids, mask = (observation[name] for name in names)
        fits = self.tensor(f"{where} prompt_ids", ids, torch.int64, (batch_size, None))
        length = ids.shape[1] if fits else None
        if not (self.tensor(f"{where} prompt_mask", mask, torch.bool, (batch_size, length)) & fits):
            return False
        space = self.env.single_observation_space
        vocab_size, before = int(space.child_space.n), len(self.problems)
        self.expect(
            1 <= ids.shape[1] <= space.max_len, f"{where} prompt_ids of {ids.shape[1]} columns",
            f"be 1 to {space.max_len} tokens long", "the observation space says so",
            "Truncate longer prompts, or raise max_len of the space",
        )  # fmt: skip
        ragged = (mask[:, :-1] & ~mask[:, 1:]).any(-1) | ~mask[:, -1:].any(-1)
        row = int(ragged.int().argmax())
        self.expect(
            not bool(ragged.any()), f"{where} prompt_mask[{row}]",
            "be False for padding at the left, then True to the end, at least once",
            "generation starts after the last column", "Pad prompts at the left",
            mask[row].int().tolist(),
        )  # fmt: skip
        outside = ids[(ids < 0) | (ids >= vocab_size)].tolist()
        self.expect(
            not outside, f"{where} prompt token id", f"be in 0..{vocab_size - 1}, padding too",
            "the embedding has no other rows", "Use the policy's tokenizer", [*outside, None][0],
        )  # fmt: skip
        return len(self.problems) == before

    def reset_infos(self, infos: Any) -> None:
        """The infos of `reset` say which prompts they are."""
        where, names = "reset() infos", (columns.PROMPT_INDEX, "position")
        if missing := _missing(infos, names):
            self.expect(False, where, f"be a dict with {[*names]}", f"it lacks {missing}")
            return
        index, position = (infos[name] for name in names)
        self.tensor(f"{where}['prompt_index']", index, torch.int64, (self.batch_size,))
        self.expect(
            position == 1, f"{where}['position']", "be the position asked for, 1",
            "runs continue from it", "Return options['position']", position,
        )  # fmt: skip

    def groups(self, observation: Mapping[str, torch.Tensor]) -> bool:
        """The completions of a prompt stand together."""
        prompts = unpadded(observation)
        starts = range(0, len(prompts), self.num_completions)
        groups = [prompts[start : start + self.num_completions] for start in starts]
        mixed = next((group for group in groups if any(p != group[0] for p in group)), None)
        return self.expect(
            mixed is None, "prompts of a group", "be the same",
            "its rows are the completions of one prompt, and adjacent",
            "Repeat each prompt num_completions times in a row (repeat_interleave)", mixed,
        )  # fmt: skip

    def positions(self, observation: Mapping[str, torch.Tensor]) -> None:
        """Prompts are a function of their position."""
        first = unpadded(observation)
        shifted = {**self.options, "position": 2, "num_prompts": self.num_prompts - 1}
        if self.expect(
            first == unpadded(self.env.reset(options=self.options)[0]),
            "prompts of reset() at the same position twice", "be the same",
            "runs are continued and repeated by position alone",
            "Make prompts a function of (seed, position), as PromptSource does",
        ):  # fmt: skip
            self.expect(
                unpadded(self.env.reset(options=shifted)[0]) == first[self.num_completions :],
                "prompts of reset() at position 2", "be those of position 1 without the first",
                "batches of any size walk through the same order",
                "Count positions in prompts, not in batches or rows",
            )  # fmt: skip

    def random_actions(self, extra: int = 0) -> dict[str, torch.Tensor]:
        """Completions of every length from 1, right-padded with `extra` further columns of 0."""
        space = self.env.single_action_space
        length = min(space.max_len - extra, 6)
        vocab_size = int(space.child_space.n)
        ids = torch.randint(vocab_size, (self.batch_size, length), generator=self.generator)
        rows = torch.arange(self.batch_size)
        mask = torch.arange(length)[None, :] < 1 + rows[:, None] % length
        ids = widen(torch.where(mask, ids, 0), length + extra)
        mask = widen(mask, length + extra)
        logprobs = torch.where(mask, -1.0, 0.0)
        device = getattr(self.env, "device", "cpu")
        return {
            columns.COMPLETION_IDS: ids.to(device), columns.COMPLETION_MASK: mask.to(device),
            columns.SAMPLER_LOGPROBS: logprobs.to(device),
        }  # fmt: skip

    def step(self, actions: Mapping[str, torch.Tensor]) -> Any:
        """The answer to actions after the same prompts as always."""
        self.env.reset(options=self.options)
        return self.env.step(dict(actions))

    def results(self) -> None:
        """`step` returns what it should, and does not modify the actions."""
        actions = self.random_actions()
        before = {name: value.clone() for name, value in actions.items()}
        result = self.step(actions)
        if not self.expect(
            isinstance(result, tuple) and len(result) == 5, "step()",
            "return (observation, rewards, terminations, truncations, infos)", "gymnasium's order",
            value=type(result),
        ):  # fmt: skip
            return
        observation, rewards, terminations, truncations, infos = result
        self.expect(
            all(torch.equal(before[name], actions[name]) for name in before),
            "actions after step()", "be as they were before",
            "the learner trains on the same tensors", "Clone them before you write into them",
        )  # fmt: skip
        self.observation("step()", observation, self.env.num_envs)
        size = (self.batch_size,)
        if self.tensor("step() rewards", rewards, torch.float32, size):
            self.finite("step() rewards", rewards)
        flags = {"terminations": (terminations, True), "truncations": (truncations, False)}
        for name, (column, wanted) in flags.items():
            if self.tensor(f"step() {name}", column, torch.bool, size):
                self.expect(
                    bool((column == wanted).all()), f"step() {name}", f"be all {wanted}",
                    "an episode is one completion and ends with it", value=column.tolist(),
                )  # fmt: skip
        if not isinstance(infos, Mapping) or columns.SCORES in infos:
            self.infos(infos, actions[columns.COMPLETION_MASK])

    def infos(self, infos: Any, mask: torch.Tensor) -> None:
        """The infos of judged completions are there, of the right type and shape, and true."""
        if missing := _missing(infos, _REQUIRED_INFOS):
            rule = f"be a dict with {[*_REQUIRED_INFOS]}"
            self.expect(False, "step() infos", rule, f"it lacks {missing}")
            return
        try:
            info_columns(infos, mask)
        except Problems as error:
            self.problems += error.within("step()").found
        where, size = "step() infos", (self.batch_size,)
        scores, valid = infos[columns.SCORES], infos[columns.VALID]
        fits = self.tensor(f"{where}['scores']", scores, torch.float32, size)
        if fits:
            self.finite(f"{where}['scores']", scores)
        if self.tensor(f"{where}['valid']", valid, torch.bool, size) and fits:
            self.expect(
                not bool((scores[~valid] != 0).any()), f"{where}['scores'] where not valid", "be 0",
                "such rows must not move any mean", value=scores[~valid].tolist(),
            )  # fmt: skip
        for group in ("components", "metrics"):
            for name, values in dict(infos[group]).items():
                self.tensor(f"{where}[{group!r}][{name!r}]", values, torch.float32, size)
        counts, right = infos["num_completion_tokens"], mask.sum(-1)
        if self.tensor(f"{where}['num_completion_tokens']", counts, torch.int64, size):
            self.expect(
                bool((counts == right).all()), f"{where}['num_completion_tokens']",
                f"be {right.tolist()}", "the stop token counts, too",
                "Return completion_mask.sum(-1)", counts.tolist(),
            )  # fmt: skip
        self.has_reference = columns.REF_LOGPROBS in infos
        if not self.has_reference:
            return
        where, ref_logprobs = f"{where}['ref_logprobs']", infos[columns.REF_LOGPROBS]
        if self.tensor(where, ref_logprobs, torch.float32, tuple(mask.shape)):
            if "kl" in infos:
                self.tensor("step() infos['kl']", infos["kl"], torch.float32, size)
            self.finite(where, ref_logprobs)
            is_masked = not bool((ref_logprobs[~mask] != 0).any())
            self.expect(
                is_masked and not bool((ref_logprobs > 1e-6).any()), where,
                "be at most 0, and exactly 0 where completion_mask is False",
                "they are log-probabilities of the completion's tokens",
                "Multiply by the mask; subtract the log-sum-exp",
            )  # fmt: skip

    def padding(self) -> None:
        """Scores do not see padding; a score that differs from call to call tells nothing."""
        if self.problems or self.env.single_action_space.max_len < 4:
            return
        actions = self.random_actions(extra=2)
        short = {name: value[:, :-2] for name, value in actions.items()}
        scores = []
        for given in (short, short, actions):
            _, rewards, _, _, infos = self.step(given)
            scores.append(infos.get(columns.SCORES, rewards))
        is_random = not torch.allclose(scores[0], scores[1], atol=1e-4)
        self.expect(
            is_random or torch.allclose(scores[0], scores[2], atol=1e-4),
            "scores with two more columns of padding", f"be {scores[0].tolist()}, as without them",
            "padding depends on the other rows of a batch",
            "Cut completions to completion_mask before judging them", scores[2].tolist(),
        )  # fmt: skip

    def refusals(self) -> None:
        """Wrong actions raise an error; they are not judged."""
        good = self.random_actions()
        ids, mask = good[columns.COMPLETION_IDS], good[columns.COMPLETION_MASK]
        outside = ids.clone()
        outside[0, 0] = int(self.env.single_action_space.child_space.n)
        wrong = {
            "a completion too few": {name: value[:-1] for name, value in good.items()},
            "a token id outside the vocabulary": {**good, columns.COMPLETION_IDS: outside},
            "no completion_mask": {columns.COMPLETION_IDS: ids},
        }
        if mask.shape[1] > 1:
            hole = mask.clone()
            hole[-1, 0], hole[-1, -1] = False, True
            wrong["a mask with a hole"] = {**good, columns.COMPLETION_MASK: hole}
        for what, actions in wrong.items():
            try:
                self.step(actions)
            except (ValueError, LookupError, TypeError, RuntimeError):
                continue
            self.expect(
                False, f"step() given {what}", "be an error", "such batches would be learnt from",
                "Check actions by rllib_llm.envs.actions.check_actions",
            )  # fmt: skip

    def rewards(self) -> None:
        """Rewards are the scores where there are any, less a KL where the environment has one."""
        if self.problems:
            return
        _, rewards, _, _, infos = self.step(self.random_actions())
        scores = infos.get(columns.SCORES, rewards)
        self.expect(
            "kl" in infos or torch.allclose(rewards, scores), "step() rewards",
            f"be infos['scores'], {scores.tolist()}",
            "scores are learnt from, and rewards are only reported",
            "Return the scores as rewards, or leave scores out of infos", rewards.tolist(),
        )  # fmt: skip


_WORDS = 12  # tokens of a random turn, at most


class ConversationChecker(EnvChecker):
    """Talks to an environment with random words, drawn with `seed`, twice, and compares."""

    def __init__(
        self, env: ConversationEnv, num_prompts: int, num_completions: int, seed: int,
        agent_server: OpenAgentServer | None,
    ) -> None:  # fmt: skip
        super().__init__(env, num_prompts, num_completions)
        self.agent_server, self.seed = agent_server, seed

    def run(self) -> None:
        """Two batches of the same conversations."""
        env = self.env
        talk = self._as_agent if isinstance(env, AgentEnv) else self._with_words
        pad_token_id = int(env.tokenizer.pad_token_id or 0)
        one, two = (judge(env, talk(env), pad_token_id).columns for _ in range(2))
        scores = [batch[columns.SCORES][batch[columns.VALID]] for batch in (one, two)]
        for column in scores:
            if not self.finite("scores", column):
                break
        same = torch.equal(one[columns.PROMPT_INDEX], two[columns.PROMPT_INDEX])
        self.expect(
            same and torch.equal(one[columns.PROMPT_IDS], two[columns.PROMPT_IDS]),
            "tasks at one position", "be the same each time", "resumed runs ask for them again",
            "Draw what is random from the task, not from a global generator",
        )  # fmt: skip

    def _as_agent(self, env: AgentEnv) -> list[Rollout]:
        """Episodes of an agent, which talks to the model itself."""
        from rllib_llm.engines.torch_engine import TorchEngine

        if self.agent_server is None:
            raise ValueError("agent_server must be given: an environment of agents talks to it")
        engine = TorchEngine(load_causal_lm(env.settings["model"]), version=0)
        ends = env.chat_format.stop_token_ids
        return run_agents(
            env, env.tasks.rows(1, self.num_prompts), positions=range(1, 1 + self.num_prompts),
            num_completions=self.num_completions, max_new_tokens=_WORDS,
            server=open_for(env, engine, self.agent_server, ends, "check_env"),
            sampling={"seed": self.seed},
        )  # fmt: skip

    def _with_words(self, env: ConversationEnv) -> list[Rollout]:
        known = set(env.tokenizer.all_special_ids)
        plain = [token for token in range(len(env.tokenizer)) if token not in known]
        end = env.chat_format.encode(env.chat_format.turn_end)

        async def complete(token_ids: Sequence[int], room: int, row: int, turn: int) -> Ended:
            generator = random.Random(f"{self.seed} {row} {turn}")  # for the first caller
            ids = [*generator.choices(plain, k=min(room - 1, _WORDS)), *end]
            return Ended(row, ids, [-1.0] * len(ids), [0] * len(ids), "stop")

        return run_rollouts(
            env, env.tasks.rows(1, self.num_prompts), positions=range(1, 1 + self.num_prompts),
            num_completions=self.num_completions, complete=complete, max_new_tokens=_WORDS,
        )  # fmt: skip
