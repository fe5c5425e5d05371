"""The one-step bandit: prompts out, whole completions in, rewards back.

    reset / step ──▶ {prompt_ids, prompt_mask} ──▶ sampler ──▶ {completion_ids, completion_mask}
         ▲                                                                  │ step
         └── next prompts, rewards, infos ◀── rewards.py, reference ◀───────┘

Everything is a batch of torch tensors on the environment's device. It leaves out generation (the
sampler's), advantages and any KL beyond the one number per completion (the learner's).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from ray.rllib.utils.spaces.repeated import Repeated
from transformers import PreTrainedTokenizerBase

from rllib_llm.envs.actions import check_actions, decode_completions, pad_completions
from rllib_llm.envs.judges.reward_functions import question, shown_message
from rllib_llm.envs.judges.rewards import RewardBatch, RewardSum
from rllib_llm.envs.prompts import PromptEncoder, PromptRow, PromptSource, teacher_prompts
from rllib_llm.envs.settings import check_values
from rllib_llm.modules.images import files_text
from rllib_llm.modules.model_source import check_lengths, num_positions, text_config
from rllib_llm.shared import columns
from rllib_llm.shared.columns import pad_left
from rllib_llm.shared.errors import require


class BanditEnv(VectorEnv):
    """A batch of prompts to be completed, each episode one completion long.

    Observations are {prompt_ids [B, P] int64 left-padded, prompt_mask [B, P] bool}; the rows of a
    group, the completions of one prompt, are adjacent. Prompts come by position (see
    `PromptSource`): the same position always gives the same prompts.

    Args:
        tokenizer: the policy's, with a pad token.
        prompts: where prompts come from.
        rewards: what judges the completions.
        reference: frozen model (an object with `logprobs(prompt_ids, prompt_mask, completion_ids,
            completion_mask, temperature)` [B, T] float32, see `FrozenReference`), or None.
        teacher: adds a teacher's columns, see `Teachers`, or None.
        model: the policy's, whose processor reads images.

    The others are declared in `envs/settings.py`. `num_envs` prompts are in a batch when `reset`
    gets no options, and in those `step` returns; `rewards = scores - kl_coeff * kl`.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self, *, tokenizer: PreTrainedTokenizerBase, prompts: PromptSource, rewards: RewardSum,
        num_envs: int = 8, max_prompt_len: int, max_completion_len: int,
        reference: Any | None = None, kl_coeff: float = 0.0, temperature: float = 1.0,
        prompt_overflow: str = "truncate_left", return_texts: bool = False,
        device: str | torch.device = "cpu", vocab_size: int | None = None,
        teacher: Any | None = None,
        teacher_prompt: str | None = None,
        model: str | None = None,
    ) -> None:  # fmt: skip
        check_values(
            num_envs=num_envs, max_prompt_len=max_prompt_len, kl_coeff=kl_coeff,
            max_completion_len=max_completion_len, temperature=temperature,
        )  # fmt: skip
        require(tokenizer.pad_token_id is not None, "tokenizer.pad_token_id", None, "be a token id",
                "", "Set tokenizer.pad_token, to one that is not the EOS token")  # fmt: skip
        require(not kl_coeff or reference is not None, "kl_coeff", kl_coeff,
                "be 0 without a reference", "it weighs the KL to the reference model")  # fmt: skip
        (first,) = prompts.rows(0, 1)
        rewards.check_columns(first.columns)
        self.tokenizer, self.prompts, self.rewards = tokenizer, prompts, rewards
        self.reference, self.return_texts = reference, return_texts
        self.teacher, self.teacher_prompt = teacher, teacher_prompt
        self.kl_coeff, self.temperature = float(kl_coeff), float(temperature)
        self.device = torch.device(device)
        self.max_completion_len = max_completion_len
        self.pad_token_id = int(tokenizer.pad_token_id)
        self.vocab_size = int(vocab_size or len(tokenizer))
        self.position = 0
        # Updates of the policy so far, and in all, 0: not known; for reward functions that ask.
        self.global_step, self.max_steps = 0, 0
        self.keeps_parts = False  # whether infos have the rewards apart, for learners
        self._encoder = PromptEncoder(tokenizer, max_prompt_len, prompt_overflow, model)
        self._encoder.check(prompts.all_rows() if prompt_overflow == "error" else [first])
        self._rows: list[PromptRow] = []
        self._texts: list[str] = []
        self._shown: list[str] = []
        self._observation: dict[str, torch.Tensor] = {}
        self._reference_lock = threading.Lock()
        self.num_envs = num_envs
        token: spaces.Discrete = spaces.Discrete(self.vocab_size)
        self.single_observation_space = Repeated(token, max_prompt_len)
        self.single_action_space = Repeated(token, max_completion_len)
        # gymnasium's batch_space does not know Repeated; a tuple is what it makes of such spaces.
        self.observation_space = spaces.Tuple([self.single_observation_space] * num_envs)
        self.action_space = spaces.Tuple([self.single_action_space] * num_envs)

    @property
    def max_prompt_len(self) -> int:
        """Longest prompt [tokens]."""
        return self._encoder.max_prompt_len

    def images_at(self, positions: Sequence[int]) -> dict[str, torch.Tensor]:
        """Columns of what the prompts at these positions show, see `modules/images.py`."""
        return self._encoder.images([self.prompts.rows(p, 1)[0] for p in positions])

    def fork(self) -> BanditEnv:
        """The same environment with prompts of its own, for another thread."""
        return copy.copy(self)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, int] | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Prompts at a position, `num_completions` rows for each.

        Args:
            seed: starts again at position 0. The order of prompts belongs to `PromptSource` and
                does not change, so samplers with different seeds see the same order.
            options: "position" (default: where the last batch ended), "num_prompts" (default
                `num_envs`), "num_completions" (default 1).

        Returns:
            The observation and infos {"prompt_index" [B] int64, the row in the data set;
            "position" int}.
        """
        super().reset(seed=seed)
        if seed is not None:
            self.position = 0
        chosen = {
            "position": self.position, "num_prompts": self.num_envs, "num_completions": 1,
        }  # fmt: skip
        for name, value in (options or {}).items():
            least = 0 if name == "position" else 1
            require(name in chosen and isinstance(value, int) and value >= least,
                    f"options[{name!r}]", value,
                    f"be an integer of at least {least}, under one of {[*chosen]}")  # fmt: skip
        return self._deal(**{**chosen, **(options or {})})

    def step(
        self, actions: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Judges one completion for each prompt handed out last, and hands out the next prompts.

        Args:
            actions: {completion_ids [B, T] int64 right-padded, completion_mask [B, T] bool, and
                optionally sampler_logprobs [B, T] float32}; or B lists of ids, as
                `action_space.sample()` gives them.

        Returns:
            The next observation (`num_envs` prompts), rewards [B] float32, terminations [B] all
            True, truncations [B] all False, and infos of the judged batch: scores [B] float32, what
            is learnt from (a user's environment may leave all infos out: then rewards are);
            valid [B] bool (False: a reward function failed there; do not learn from the row),
            components and metrics {name: [B] float32; 1 under "<function>_failed" where it did, and
            under "prompt_truncated" where the prompt lost its beginning}, num_completion_tokens [B]
            int64, prompt_index [B]; with a reference ref_logprobs [B, T] and, given
            sampler_logprobs, kl [B] = sum_t sampler_logprobs - ref_logprobs [nats]; texts when
            asked for; and of the next prompts next_prompt_index and next_position.

        Raises:
            Problems: no prompts handed out, or actions that do not fit them.
        """
        require(self._rows, "step()", ..., "follow reset()", "no prompts are handed out yet")
        if isinstance(actions, (list, tuple)):
            actions = pad_completions(actions, self.pad_token_id)
        infos = self._judge(check_actions(
            actions, batch_size=len(self._rows), max_len=self.max_completion_len,
            vocab_size=self.vocab_size, needs_logprobs=self.kl_coeff > 0, device=self.device,
        ))  # fmt: skip
        rewards = infos["scores"]
        if self.kl_coeff:
            rewards = rewards - self.kl_coeff * infos["kl"]
        terminations = torch.ones(len(rewards), dtype=torch.bool, device=self.device)
        observation, dealt = self._deal(self.position, self.num_envs, 1)
        infos["next_prompt_index"] = dealt["prompt_index"]
        infos["next_position"] = dealt["position"]
        return observation, rewards, terminations, ~terminations, infos

    def _deal(
        self, position: int, num_prompts: int, num_completions: int
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        rows = self.prompts.rows(position, num_prompts)
        token_ids, texts = self._encoder.encode(rows)
        highest = max(max(ids) for ids in token_ids)
        require(highest < self.vocab_size, "prompt token id", highest,
                f"be below vocab_size={self.vocab_size}", "",
                "Take the model's tokenizer")  # fmt: skip
        ids, mask = pad_left(token_ids, self.pad_token_id)
        self._rows = [row for row in rows for _ in range(num_completions)]
        self._prompt_index = torch.tensor([row.index for row in self._rows], device=self.device)
        self._texts = [text for text in texts for _ in range(num_completions)]
        shown = [files_text(row.images) for row in rows]
        self._shown = [each for each in shown for _ in range(num_completions)]
        if images := self._encoder.images(rows, with_files=True):
            images[columns.IMAGE_ROW] = images[columns.IMAGE_ROW].repeat_interleave(num_completions)
        self._observation = {
            columns.PROMPT_IDS: ids.repeat_interleave(num_completions, 0).to(self.device),
            columns.PROMPT_MASK: mask.repeat_interleave(num_completions, 0).to(self.device),
            **{name: column.to(self.device) for name, column in images.items()},
        }
        self.position = position + num_prompts
        infos = {columns.PROMPT_INDEX: self._prompt_index, "position": position}
        return dict(self._observation), infos

    def _judge(self, actions: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        ids, mask = actions[columns.COMPLETION_IDS], actions[columns.COMPLETION_MASK]
        completions: list[str] = []
        if self.rewards.wants_texts or self.return_texts or any(self._shown):
            last_prompt_ids = self._observation[columns.PROMPT_IDS][:, -1].tolist()
            rows = zip(ids.tolist(), mask.sum(-1).tolist(), strict=True)
            cut = [row[:length] for row, length in rows]
            completions = decode_completions(self.tokenizer, last_prompt_ids, cut)
        # Marks of images are those of the policy's processor.
        prompts = [row.prompt if row.images and isinstance(row.prompt, str) else text
                   for row, text in zip(self._rows, self._texts, strict=True)]  # fmt: skip
        names = dict.fromkeys(name for row in self._rows for name in row.columns)
        batch = RewardBatch(
            prompt_ids=self._observation[columns.PROMPT_IDS],
            prompt_mask=self._observation[columns.PROMPT_MASK], completion_ids=ids,
            completion_mask=mask, prompts=prompts, completions=completions,
            images=self._shown,
            columns={name: [row.columns.get(name) for row in self._rows] for name in names},
            global_step=self.global_step, epoch=self.position / len(self.prompts),
            max_steps=self.max_steps,
        )  # fmt: skip
        judged = self.rewards(batch)
        # Failed or truncated rows [B] are 0 and 1, so that their means are shares.
        truncated = torch.tensor([row.index in self._encoder.truncated for row in self._rows])
        shares = {f"{name}{columns.FAILED}": column for name, column in judged.failed.items()}
        shares[columns.PROMPT_TRUNCATED] = truncated.to(self.device)
        infos: dict[str, Any] = {
            columns.SCORES: judged.scores, columns.VALID: judged.valid,
            "components": judged.components,
            "metrics": judged.metrics | {name: share.float() for name, share in shares.items()},
            "num_completion_tokens": mask.sum(-1), columns.PROMPT_INDEX: self._prompt_index,
        }  # fmt: skip
        infos |= self._teacher_columns(ids, mask)
        if any(self._shown):
            infos[columns.IMAGES] = self._shown
        if self.keeps_parts:
            infos |= self.rewards.parts(judged.components)
        if completions:  # decoded anyway: who keeps them need not decode again
            infos["prompt_texts"], infos["completion_texts"] = self._texts, completions
            chats = [row.columns.get("messages") or () for row in self._rows]
            turns = ("\n".join(map(shown_message, chat)) for chat in chats)
            infos["turns"] = [shown or text for shown, text in zip(turns, self._texts, strict=True)]
            infos["question"] = [*map(question, chats)]
        if self.reference is None:
            return infos
        with self._reference_lock:
            seen = {"seen": self._observation} if columns.IMAGE_ROW in self._observation else {}
            ref_logprobs = self.reference.logprobs(
                batch.prompt_ids, batch.prompt_mask, ids, mask, self.temperature,
                **seen,
            ).to(self.device)
        infos[columns.REF_LOGPROBS] = ref_logprobs
        if columns.SAMPLER_LOGPROBS in actions:
            infos["kl"] = ((actions[columns.SAMPLER_LOGPROBS] - ref_logprobs) * mask).sum(-1)
        if hasattr(self.reference, "metrics"):
            for name, value in self.reference.metrics().items():
                infos["metrics"][f"reference/{name}"] = torch.full_like(judged.scores, value)
        return infos


    def _teacher_columns(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """The teacher's prompts, where it has its own, and what it says of completions."""
        require(self.teacher is None or columns.IMAGE_ROW not in self._observation, "teacher_in",
                "environment", "be 'learner' where prompts show images")  # fmt: skip
        names = (columns.PROMPT_IDS, columns.PROMPT_MASK)
        prompts = {name: self._observation[name] for name in names}
        found: dict[str, torch.Tensor] = {}
        if self.teacher_prompt is not None:
            given = teacher_prompts(self.tokenizer, self._rows, self.teacher_prompt)
            found = {name: column.to(self.device) for name, column in given.items()}
            prompts = dict(zip(prompts, found.values(), strict=True))
        if self.teacher is not None:
            with self._reference_lock:
                rows = [row.columns for row in self._rows]
                found |= self.teacher.judge(rows, *prompts.values(), ids, mask)
        return found


def check_env_lengths(env: Any, *, model: Any, max_new_tokens: int, chosen: bool) -> None:
    """Raises ValueError where prompts of `env` and completions do not fit into `model`, or into the
    environment's reference, together.

    chosen: whether someone set `max_prompt_len`. By default it says little, and the longest prompt
        of the data is asked for where it matters.
    """
    if not isinstance(env, BanditEnv) or model is None:
        return
    limits = {f"model={str(model)!r}": num_positions(model)}
    reference = getattr(env.reference, "model", None)
    if reference is not None:
        positions = getattr(text_config(reference), "max_position_embeddings", None)
        limits["the reference"] = positions
    for name, positions in limits.items():
        if positions is not None and env.max_prompt_len + max_new_tokens > positions:
            check_lengths(
                positions, max_prompt_len=env.max_prompt_len, max_new_tokens=max_new_tokens,
                model=name, longest_prompt=None if chosen else env._encoder.longest(env.prompts),
            )  # fmt: skip
