"""Checks a custom environment's contract; each finding says what was found and how to fix it.

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
from rllib_llm.envs.actions import BanditEnvError, misfit, told_columns
from rllib_llm.envs.adapters.agent import AgentEnv, OpenAgentServer, open_for, run_agents
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.conversation_rollouts import judge, run_rollouts
from rllib_llm.envs.registry import ENVIRONMENTS, make, not_batched
from rllib_llm.modules.pretrained import load_causal_lm
from rllib_llm.shared import columns
from rllib_llm.shared.columns import widen


class EnvContractError(ValueError):
    """An environment that breaks its contract; `problems` lists how."""

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
    checker: ConversationChecker | BanditChecker
    if isinstance(env, ConversationEnv):
        for finding in env.findings if report is not None else ():
            report(str(finding))
        checker = ConversationChecker(env, num_prompts, num_completions, seed, agent_server)
    else:
        checker = BanditChecker(env, num_prompts, num_completions, seed)
    checker.run()
    problems = checker.problems
    if checker.notes and not problems and not _takes_reference(made_from, dict(env_config or {})):
        warnings.warn(checker.notes[0], stacklevel=2)
    if raise_error and problems:
        raise EnvContractError(problems)
    return problems


def _takes_reference(creator: Any, env_config: dict[str, Any]) -> bool:
    """Whether an environment has a reference once it is given the setting that samplers add."""
    if isinstance(creator, str) and creator in ENVIRONMENTS:
        return True
    if creator is None or env_config.get("model") is None:
        return False
    env = make(creator, {**env_config, "reference": {"model": env_config["model"]}})
    return getattr(env, "reference", None) is not None


class EnvChecker:
    """Problems of one environment; each `check_*` returns True where it found none."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.problems: list[str] = []
        self.notes: list[str] = []  # what keeps the contract, and will be refused by default

    def check_tensor(
        self, where: str, value: Any, dtype: torch.dtype, shape: tuple[int | None, ...]
    ) -> bool:
        """True where `value` is a tensor of dtype and shape (None: any size)."""
        problem = misfit(where, value, dtype, shape)
        self.problems += [problem] if problem else []
        return not problem

    def check_finite(self, where: str, values: torch.Tensor) -> None:
        """A finding where a value is NaN or infinite."""
        if not bool(torch.isfinite(values).all()):
            self.problems.append(
                f"{where}={values.flatten().tolist()[:8]!r} must be finite: one NaN spoils the "
                "whole update. Mark such rows in infos['valid'] and give them 0, as RewardSum "
                "does."
            )

    def check_observation(self, where: str, observation: Any, batch_size: int) -> bool:
        """True if `observation` holds left-padded prompts of the vocabulary, one per row."""
        names = (columns.PROMPT_IDS, columns.PROMPT_MASK)
        if not isinstance(observation, Mapping) or any(name not in observation for name in names):
            arrived = list(observation) if isinstance(observation, Mapping) else type(observation)
            self.problems.append(
                f"{where} observation={arrived!r} must be a dict with {list(names)}: the sampler "
                "reads both. Return them."
            )
            return False
        ids, mask = (observation[name] for name in names)
        fits = self.check_tensor(f"{where} prompt_ids", ids, torch.int64, (batch_size, None))
        length = ids.shape[1] if fits else None
        fits &= self.check_tensor(f"{where} prompt_mask", mask, torch.bool, (batch_size, length))
        if not fits:
            return False
        before = len(self.problems)
        self._check_prompt_values(where, ids, mask)
        return len(self.problems) == before

    def _check_prompt_values(self, where: str, ids: torch.Tensor, mask: torch.Tensor) -> None:
        max_len = self.env.single_observation_space.max_len
        vocab_size = int(self.env.single_observation_space.child_space.n)
        if not 1 <= ids.shape[1] <= max_len:
            self.problems.append(
                f"{where} prompt_ids of shape {list(ids.shape)} must be 1 to {max_len} tokens "
                "long: the observation space says so. Truncate longer prompts, or raise max_len of "
                "the space."
            )
        if bool((mask[:, :-1] & ~mask[:, 1:]).any()) or not bool(mask[:, -1:].all()):
            row = int(((mask[:, :-1] & ~mask[:, 1:]).any(-1) | ~mask[:, -1]).nonzero()[0])
            self.problems.append(
                f"{where} prompt_mask[{row}]={mask[row].int().tolist()} must be False for padding "
                "at the left, then True to the end, at least once: generation starts behind the "
                "last column. Pad prompts at the left."
            )
        if bool(((ids < 0) | (ids >= vocab_size)).any()):
            bad = int(ids[(ids < 0) | (ids >= vocab_size)][0])
            self.problems.append(
                f"{where} prompt token id={bad} must be in 0..{vocab_size - 1}, padding too: the "
                "embedding has no other rows. Use the policy's tokenizer, and one of its ids for "
                "padding."
            )


def unpadded(observation: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """The prompts of an observation as lists of ids, without their padding."""
    ids, mask = observation[columns.PROMPT_IDS], observation[columns.PROMPT_MASK]
    return [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]


# Of an environment that gives scores; one that does not is learnt from by its rewards.
_REQUIRED_INFOS = (
    columns.SCORES, columns.VALID, "components", "metrics", "num_completion_tokens",
)  # fmt: skip


class BanditChecker(EnvChecker):
    """Hands out prompts, answers with random completions, looks at the result; what cannot be seen
    after a finding is left out."""

    def __init__(self, env: Any, num_prompts: int, num_completions: int, seed: int) -> None:
        super().__init__(env)
        self.num_prompts, self.num_completions = num_prompts, num_completions
        numbers = {"num_prompts": num_prompts, "num_completions": num_completions}
        self.options = {"position": 1, **numbers}
        self.batch_size = num_prompts * num_completions
        self.generator = torch.Generator().manual_seed(seed)

    def run(self) -> None:
        """Every check below."""
        if self.check_spaces() and self.check_reset():
            self.check_step()
            self.check_padding()
            self.check_refusals()
            self.check_rewards()

    def check_reset(self) -> bool:
        """False if observations cannot be read, so that further checks are impossible."""
        observation, infos = self.env.reset(options=self.options)
        if not self.check_observation("reset()", observation, self.batch_size):
            return False
        self.check_reset_infos(infos)
        if self.check_groups(observation):
            self.check_positions(observation)
        return True

    def check_spaces(self) -> bool:
        """False where the spaces are not read as the sampler reads them."""
        env = self.env
        before = len(self.problems)
        if not isinstance(env, VectorEnv):
            self.problems.append(str(not_batched(env)))
            return False
        for name in ("single_observation_space", "single_action_space"):
            space = getattr(env, name, None)
            fits = isinstance(space, Repeated) and isinstance(space.child_space, spaces.Discrete)
            if not fits:
                self.problems.append(
                    f"{name}={space!r} must be Repeated(Discrete(vocab_size), max_len): prompts "
                    "and completions are token ids of varying number. Take "
                    "ray.rllib.utils.spaces.repeated.Repeated."
                )
        if len(self.problems) == before:
            vocabularies = [
                int(space.child_space.n)  # type: ignore[attr-defined]
                for space in (env.single_observation_space, env.single_action_space)
            ]
            if vocabularies[0] != vocabularies[1]:
                self.problems.append(
                    f"vocabulary sizes={vocabularies!r} of observation and action space must be "
                    "the same: one policy reads the prompts and writes the completions. Use its "
                    "vocabulary size in both."
                )
        num_envs = getattr(env, "num_envs", None)
        if not isinstance(num_envs, int) or num_envs < 1:
            self.problems.append(
                f"num_envs={num_envs!r} must be an integer of at least 1: it is the number of "
                "prompts in a batch. Set it in __init__."
            )
        return len(self.problems) == before

    def check_reset_infos(self, infos: Any) -> None:
        """The infos of `reset`: which prompts they are."""
        if not isinstance(infos, Mapping) or not {columns.PROMPT_INDEX, "position"} <= set(infos):
            arrived = list(infos) if isinstance(infos, Mapping) else type(infos)
            self.problems.append(
                f"reset() infos={arrived!r} must be a dict with 'prompt_index' and 'position': "
                "samples are matched by the row of their prompt. Return both."
            )
            return
        index = infos[columns.PROMPT_INDEX]
        where = "reset() infos['prompt_index']"
        self.check_tensor(where, index, torch.int64, (self.batch_size,))
        if infos["position"] != 1:
            self.problems.append(
                f"reset() infos['position']={infos['position']!r} must be the position asked for, "
                "1: runs continue from it. Return options['position']."
            )

    def check_groups(self, observation: Mapping[str, torch.Tensor]) -> bool:
        """False where the completions of a prompt do not stand together."""
        prompts = unpadded(observation)
        for start in range(0, len(prompts), self.num_completions):
            group = prompts[start : start + self.num_completions]
            if any(prompt != group[0] for prompt in group):
                self.problems.append(
                    f"prompts of rows {start}..{start + self.num_completions - 1}={group!r} must "
                    "be the same: they are one group, the completions of one prompt, and groups "
                    "are adjacent. Repeat each prompt num_completions times in a row "
                    "(repeat_interleave)."
                )
                return False
        return True

    def check_positions(self, observation: Mapping[str, torch.Tensor]) -> None:
        """Prompts are a function of their position."""
        first = unpadded(observation)
        again = unpadded(self.env.reset(options=self.options)[0])
        if first != again:
            self.problems.append(
                "prompts of reset() at the same position twice must be the same: runs are "
                "continued and repeated by position alone. Make prompts a function of (seed, "
                "position), as PromptSource does."
            )
            return
        shifted = {**self.options, "position": 2, "num_prompts": self.num_prompts - 1}
        tail = unpadded(self.env.reset(options=shifted)[0])
        if tail != first[self.num_completions :]:
            self.problems.append(
                "prompts of reset() at position 2 must be those of position 1 without the first: "
                "batches of any size walk through the same order. Count positions in prompts, not "
                "in batches or rows."
            )

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
        device = self.env.device if hasattr(self.env, "device") else "cpu"
        actions = {
            columns.COMPLETION_IDS: ids,
            columns.COMPLETION_MASK: mask,
            columns.SAMPLER_LOGPROBS: logprobs,
        }
        return {name: value.to(device) for name, value in actions.items()}

    def step(self, actions: Mapping[str, torch.Tensor]) -> Any:
        """The answer to actions behind the same prompts as always."""
        self.env.reset(options=self.options)
        return self.env.step(dict(actions))

    def check_step(self) -> None:
        """Checks the results of `step`, and that it does not modify the actions."""
        actions = self.random_actions()
        before = {name: value.clone() for name, value in actions.items()}
        result = self.step(actions)
        if not isinstance(result, tuple) or len(result) != 5:
            self.problems.append(
                f"step() result of type {type(result).__name__} must be (observation, rewards, "
                "terminations, truncations, infos): gymnasium's order. Return these five."
            )
            return
        observation, rewards, terminations, truncations, infos = result
        if any(not torch.equal(before[name], actions[name]) for name in before):
            self.problems.append(
                "actions after step() must be as they were before: the learner trains on the same "
                "tensors. Do not write into them; clone first."
            )
        self.check_observation("step()", observation, self.env.num_envs)
        size = (self.batch_size,)
        if self.check_tensor("step() rewards", rewards, torch.float32, size):
            self.check_finite("step() rewards", rewards)
        for name, flags, wanted in (
            ("terminations", terminations, True),
            ("truncations", truncations, False),
        ):
            fits = self.check_tensor(f"step() {name}", flags, torch.bool, size)
            if fits and not bool((flags == wanted).all()):
                self.problems.append(
                    f"step() {name}={flags.tolist()!r} must be all {wanted}: an episode is one "
                    "completion and ends with it. Return torch.ones or torch.zeros of bool."
                )
        if not isinstance(infos, Mapping) or columns.SCORES in infos:
            self.check_infos(infos, actions)

    def check_infos(self, infos: Any, actions: Mapping[str, torch.Tensor]) -> None:
        """The infos of judged completions: there, of the right type and shape, and true."""
        missing = [k for k in _REQUIRED_INFOS if not isinstance(infos, Mapping) or k not in infos]
        if missing:
            self.problems.append(
                f"step() infos without {missing} must be a dict with {list(_REQUIRED_INFOS)}: the "
                "learner and the metrics read them. Return them."
            )
            return
        mask = actions[columns.COMPLETION_MASK]
        try:
            told_columns(infos, mask)
        except BanditEnvError as error:
            self.problems.append(f"step() {error}")
        scores, valid = infos[columns.SCORES], infos[columns.VALID]
        size = (self.batch_size,)
        fits = self.check_tensor("step() infos['scores']", scores, torch.float32, size)
        if fits:
            self.check_finite("step() infos['scores']", scores)
        fits &= self.check_tensor("step() infos['valid']", valid, torch.bool, size)
        if fits and bool((scores[~valid] != 0).any()):
            self.problems.append(
                f"step() infos['scores'] where not valid={scores[~valid].tolist()!r} must be 0: "
                "such rows must not move any mean. Set them to 0."
            )
        for group in ("components", "metrics"):
            for name, values in dict(infos[group]).items():
                where = f"step() infos[{group!r}][{name!r}]"
                self.check_tensor(where, values, torch.float32, size)
        counts, right = infos["num_completion_tokens"], mask.sum(-1)
        where = "step() infos['num_completion_tokens']"
        fits = self.check_tensor(where, counts, torch.int64, size)
        if fits and not bool((counts == right).all()):
            self.problems.append(
                f"{where}={counts.tolist()!r} must be {right.tolist()}: it counts the True entries "
                "of completion_mask, the stop token too. Return completion_mask.sum(-1)."
            )
        self.check_reference(infos, mask)

    def check_reference(self, infos: Mapping[str, Any], mask: torch.Tensor) -> None:
        """The reference's log-probs, where the environment gives any."""
        if columns.REF_LOGPROBS not in infos:
            self.notes.append(
                "step() infos have no 'ref_logprobs': training with ref_kl_coeff above 0, as it is "
                "by default, will refuse the first batch, unless the environment takes the setting "
                "'reference' that samplers add. Take it, set reference_in='learner', or set "
                "ref_kl_coeff=0."
            )
            return
        where, ref_logprobs = "step() infos['ref_logprobs']", infos[columns.REF_LOGPROBS]
        if not self.check_tensor(where, ref_logprobs, torch.float32, tuple(mask.shape)):
            return
        if "kl" in infos:
            self.check_tensor("step() infos['kl']", infos["kl"], torch.float32, (mask.shape[0],))
        self.check_finite(where, ref_logprobs)
        if bool((ref_logprobs[~mask] != 0).any()) or bool((ref_logprobs > 1e-6).any()):
            self.problems.append(
                f"{where} of padding or above 0 must be at most 0, and exactly 0 where "
                "completion_mask is False: they are log-probabilities of the completion's tokens. "
                "Multiply by the mask; subtract the log-sum-exp."
            )

    def check_padding(self) -> None:
        """Scores must not see padding; a score that differs from call to call tells nothing."""
        if self.problems or self.env.single_action_space.max_len < 4:
            return
        actions = self.random_actions(extra=2)
        short = {name: value[:, :-2] for name, value in actions.items()}
        scores = []
        for given in (short, short, actions):
            _, rewards, _, _, infos = self.step(given)
            scores.append(infos.get(columns.SCORES, rewards))
        random_scores = not torch.allclose(scores[0], scores[1], atol=1e-4)
        if not random_scores and not torch.allclose(scores[0], scores[2], atol=1e-4):
            self.problems.append(
                f"scores with two more columns of padding={scores[2].tolist()!r} must be as "
                f"without them, {scores[0].tolist()!r}: padding depends on the other rows of a "
                "batch. Cut completions to completion_mask before judging them."
            )

    def check_rewards(self) -> None:
        """Scores are learnt from where there are any: rewards that say something else are a
        mistake, unless they are less a KL."""
        if self.problems:
            return
        _, rewards, _, _, infos = self.step(self.random_actions())
        scores = infos.get(columns.SCORES, rewards)
        if "kl" not in infos and not torch.allclose(rewards, scores):
            self.problems.append(
                f"step() rewards={rewards.tolist()!r} must be infos['scores'], "
                f"{scores.tolist()!r}: where there are scores, these are learnt from and rewards "
                "are only reported. Return the scores as rewards, or leave them out of infos to "
                "have rewards learnt from."
            )

    def check_refusals(self) -> None:
        """Wrong actions must raise an error, not be judged."""
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
            self.problems.append(
                f"step() given {what} must be an error: wrong batches would be learnt from "
                "unnoticed. Check actions first; rllib_llm.envs.actions.check_actions does."
            )


_WORDS = 12  # tokens of a random turn, at most


class ConversationChecker(EnvChecker):
    """Talks to an environment with random words, drawn with `seed`, twice, and compares."""

    def __init__(
        self, env: ConversationEnv, num_prompts: int, num_completions: int, seed: int,
        agent_server: OpenAgentServer | None,
    ) -> None:  # fmt: skip
        super().__init__(env)
        self.agent_server, self.seed = agent_server, seed
        self.num_prompts, self.num_completions = num_prompts, num_completions

    def run(self) -> None:
        """Two batches of the same conversations."""
        one, two = self._talk(), self._talk()
        scores = [batch[columns.SCORES][batch[columns.VALID]] for batch in (one, two)]
        if not all(bool(torch.isfinite(column).all()) for column in scores):
            self.problems.append(
                f"scores={scores[0].tolist()!r} must be finite numbers: a reward that is NaN or "
                "infinite ends the training. Return Response(invalid=reason) where there is none."
            )
        same = torch.equal(one[columns.PROMPT_INDEX], two[columns.PROMPT_INDEX])
        if not same or not torch.equal(one[columns.PROMPT_IDS], two[columns.PROMPT_IDS]):
            self.problems.append(
                "tasks at one position must be the same each time: a run that is resumed, or a "
                "sampler that is restarted, asks for them again. Draw what is random from the "
                "task, not from a global generator."
            )

    def _talk(self) -> dict[str, torch.Tensor]:
        env = self.env
        attempts = self._as_agent(env) if isinstance(env, AgentEnv) else self._with_words(env)
        return judge(env, attempts, int(env.tokenizer.pad_token_id or 0)).columns

    def _as_agent(self, env: AgentEnv) -> list[Rollout]:
        """Episodes of an agent, which talks to the model itself."""
        from rllib_llm.engines.torch_engine import TorchEngine

        if self.agent_server is None:
            raise ValueError(
                "agent_server=None must be given for an environment of agents: they talk to a "
                "server. Pass rllib_llm.serving.http_server.open_agent_server."
            )
        engine = TorchEngine(load_causal_lm(env.settings["model"]), version=0)
        ends = env.chat_format.stop_token_ids
        return run_agents(
            env, env.tasks.rows(1, self.num_prompts), first_position=1,
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
            env, env.tasks.rows(1, self.num_prompts), first_position=1,
            num_completions=self.num_completions, complete=complete, max_new_tokens=_WORDS,
        )  # fmt: skip
