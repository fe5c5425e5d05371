"""What checks of an environment share: the list of findings, tensors and observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rllib_llm.shared import columns


class Problems:
    """Problems of one environment; each `check_*` returns True where it found none."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.problems: list[str] = []
        self.notes: list[str] = []  # what keeps the contract, and will be refused by default

    def add(self, arrived: str, rule: str, reason: str, remedy: str) -> None:
        """One finding, in the form of every message of this package."""
        self.problems.append(f"{arrived} must be {rule}: {reason}. {remedy}.")

    def check_tensor(
        self, where: str, value: Any, dtype: torch.dtype, shape: tuple[int | None, ...]
    ) -> bool:
        """True where `value` is a tensor of dtype and shape (None: any size)."""
        wanted = (
            f"a torch tensor of {dtype}, shape {[s if s is not None else 'any' for s in shape]}"
        )
        if not isinstance(value, torch.Tensor):
            arrived, reason = f"of type {type(value).__name__}", "batches stay on the device"
        elif value.dtype != dtype or len(value.shape) != len(shape):
            arrived, reason = f"of {value.dtype}, shape {list(value.shape)}", "the learner reads it"
        elif any(s is not None and s != n for s, n in zip(shape, value.shape, strict=True)):
            arrived, reason = f"of shape {list(value.shape)}", "there is one row for each episode"
        else:
            return True
        self.add(f"{where} {arrived}", wanted, reason, "Return such a tensor")
        return False

    def check_finite(self, where: str, values: torch.Tensor) -> None:
        """A finding where a value is NaN or infinite."""
        if not bool(torch.isfinite(values).all()):
            self.add(
                f"{where}={values.flatten().tolist()[:8]!r}",
                "finite",
                "one NaN spoils the whole update",
                "Mark such rows in infos['valid'] and give them 0, as RewardSum does",
            )

    def check_observation(self, where: str, observation: Any, batch_size: int) -> bool:
        """True where `observation` holds left-padded prompts of the vocabulary, one per row."""
        names = (columns.PROMPT_IDS, columns.PROMPT_MASK)
        if not isinstance(observation, Mapping) or any(name not in observation for name in names):
            arrived = list(observation) if isinstance(observation, Mapping) else type(observation)
            self.add(
                f"{where} observation={arrived!r}",
                f"a dict with {list(names)}",
                "the sampler reads both",
                "Return them",
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
            self.add(
                f"{where} prompt_ids of shape {list(ids.shape)}",
                f"1 to {max_len} tokens long",
                "the observation space says so",
                "Truncate longer prompts, or raise max_len of the space",
            )
        if bool((mask[:, :-1] & ~mask[:, 1:]).any()) or not bool(mask[:, -1:].all()):
            row = int(((mask[:, :-1] & ~mask[:, 1:]).any(-1) | ~mask[:, -1]).nonzero()[0])
            self.add(
                f"{where} prompt_mask[{row}]={mask[row].int().tolist()}",
                "False for padding at the left, then True to the end, at least once",
                "generation starts behind the last column",
                "Pad prompts at the left",
            )
        if bool(((ids < 0) | (ids >= vocab_size)).any()):
            bad = int(ids[(ids < 0) | (ids >= vocab_size)][0])
            self.add(
                f"{where} prompt token id={bad}",
                f"in 0..{vocab_size - 1}, padding too",
                "the embedding has no other rows",
                "Use the policy's tokenizer, and one of its ids for padding",
            )
