"""Checks of `step`: what an environment answers to completions, good and bad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rllib_llm.envs.actions import BanditEnvError, told_columns
from rllib_llm.envs.checks.check_findings import Problems
from rllib_llm.shared import columns
from rllib_llm.shared.padding import widen

# Of an environment that gives scores; one that does not is learnt from by its rewards.
_REQUIRED_INFOS = (
    columns.SCORES,
    columns.VALID,
    "components",
    "metrics",
    "num_completion_tokens",
)


class JudgingChecker:
    """Hands out prompts with `options`, answers with random completions, looks at the result."""

    def __init__(self, findings: Problems, options: Mapping[str, int], seed: int) -> None:
        self.findings = findings
        self.env = findings.env
        self.options = options
        self.batch_size = options["num_prompts"] * options["num_completions"]
        self.generator = torch.Generator().manual_seed(seed)

    def run(self) -> None:
        """Every check below."""
        self.check_step(self.options, self.batch_size)
        self.check_padding(self.options, self.batch_size)
        self.check_refusals(self.options, self.batch_size)
        self.check_rewards(self.options, self.batch_size)

    def random_actions(self, batch_size: int, extra: int = 0) -> dict[str, torch.Tensor]:
        """Completions of every length from 1, right-padded with `extra` further columns of 0."""
        space = self.env.single_action_space
        length = min(space.max_len - extra, 6)
        vocab_size = int(space.child_space.n)
        ids = torch.randint(vocab_size, (batch_size, length), generator=self.generator)
        mask = torch.arange(length)[None, :] < 1 + torch.arange(batch_size)[:, None] % length
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

    def check_step(self, options: Mapping[str, int], batch_size: int) -> None:
        """What `step` returns, and that it leaves the actions alone."""
        self.env.reset(options=options)
        actions = self.random_actions(batch_size)
        before = {name: value.clone() for name, value in actions.items()}
        result = self.env.step(dict(actions))
        if not isinstance(result, tuple) or len(result) != 5:
            self.findings.add(
                f"step() result of type {type(result).__name__}",
                "(observation, rewards, terminations, truncations, infos)",
                "gymnasium's order",
                "Return these five",
            )
            return
        observation, rewards, terminations, truncations, infos = result
        if any(not torch.equal(before[name], actions[name]) for name in before):
            self.findings.add(
                "actions after step()",
                "as they were before",
                "the learner trains on the same tensors",
                "Do not write into them; clone first",
            )
        self.findings.check_observation("step()", observation, self.env.num_envs)
        if self.findings.check_tensor("step() rewards", rewards, torch.float32, (batch_size,)):
            self.findings.check_finite("step() rewards", rewards)
        for name, flags, wanted in (
            ("terminations", terminations, True),
            ("truncations", truncations, False),
        ):
            if self.findings.check_tensor(
                f"step() {name}", flags, torch.bool, (batch_size,)
            ) and not bool((flags == wanted).all()):
                self.findings.add(
                    f"step() {name}={flags.tolist()!r}",
                    f"all {wanted}",
                    "an episode is one completion and ends with it",
                    "Return torch.ones or torch.zeros of bool",
                )
        if not isinstance(infos, Mapping) or columns.SCORES in infos:
            self.check_infos(infos, actions, batch_size)

    def check_infos(self, infos: Any, actions: Mapping[str, torch.Tensor], batch_size: int) -> None:
        """The infos of judged completions: there, of the right type and shape, and true."""
        missing = [k for k in _REQUIRED_INFOS if not isinstance(infos, Mapping) or k not in infos]
        if missing:
            self.findings.add(
                f"step() infos without {missing}",
                f"a dict with {list(_REQUIRED_INFOS)}",
                "the learner and the metrics read them",
                "Return them",
            )
            return
        mask = actions[columns.COMPLETION_MASK]
        try:
            told_columns(infos, mask)
        except BanditEnvError as error:
            self.findings.problems.append(f"step() {error}")
        scores, valid = infos[columns.SCORES], infos[columns.VALID]
        fits = self.findings.check_tensor(
            "step() infos['scores']", scores, torch.float32, (batch_size,)
        )
        if fits:
            self.findings.check_finite("step() infos['scores']", scores)
        if (
            self.findings.check_tensor("step() infos['valid']", valid, torch.bool, (batch_size,))
            and fits
        ):
            self.check_invalid_scores(scores, valid)
        for group in ("components", "metrics"):
            for name, values in dict(infos[group]).items():
                where = f"step() infos[{group!r}][{name!r}]"
                self.findings.check_tensor(where, values, torch.float32, (batch_size,))
        counts, right = infos["num_completion_tokens"], mask.sum(-1)
        where = "step() infos['num_completion_tokens']"
        if self.findings.check_tensor(where, counts, torch.int64, (batch_size,)) and not bool(
            (counts == right).all()
        ):
            self.findings.add(
                f"{where}={counts.tolist()!r}",
                f"{right.tolist()}",
                "it counts the True entries of completion_mask, the stop token too",
                "Return completion_mask.sum(-1)",
            )
        self.check_reference(infos, mask)

    def check_invalid_scores(self, scores: torch.Tensor, valid: torch.Tensor) -> None:
        """Rows that were not judged have score 0."""
        if bool((scores[~valid] != 0).any()):
            self.findings.add(
                f"step() infos['scores'] where not valid={scores[~valid].tolist()!r}",
                "0",
                "such rows must not move any mean",
                "Set them to 0",
            )

    def check_reference(self, infos: Mapping[str, Any], mask: torch.Tensor) -> None:
        """The reference's log-probs, where the environment gives any."""
        if columns.REF_LOGPROBS not in infos:
            self.findings.notes.append(
                "step() infos have no 'ref_logprobs': training with ref_kl_coeff above 0, as it is "
                "by default, will refuse the first batch, unless the environment takes the setting "
                "'reference' that samplers add. Take it, set reference_in='learner', or set "
                "ref_kl_coeff=0."
            )
            return
        where, ref_logprobs = "step() infos['ref_logprobs']", infos[columns.REF_LOGPROBS]
        if not self.findings.check_tensor(where, ref_logprobs, torch.float32, tuple(mask.shape)):
            return
        if "kl" in infos:
            self.findings.check_tensor(
                "step() infos['kl']", infos["kl"], torch.float32, (mask.shape[0],)
            )
        self.findings.check_finite(where, ref_logprobs)
        if bool((ref_logprobs[~mask] != 0).any()) or bool((ref_logprobs > 1e-6).any()):
            self.findings.add(
                f"{where} of padding or above 0",
                "at most 0, and exactly 0 where completion_mask is False",
                "they are log-probabilities of the completion's tokens",
                "Multiply by the mask; subtract the log-sum-exp",
            )

    def check_padding(self, options: Mapping[str, int], batch_size: int) -> None:
        """Scores must not see padding; a score that differs from call to call tells nothing."""
        if self.findings.problems or self.env.single_action_space.max_len < 4:
            return
        actions = self.random_actions(batch_size, extra=2)
        short = {name: value[:, :-2] for name, value in actions.items()}
        scores = []
        for given in (short, short, actions):
            self.env.reset(options=options)
            _, rewards, _, _, infos = self.env.step(dict(given))
            scores.append(infos.get(columns.SCORES, rewards))
        random_scores = not torch.allclose(scores[0], scores[1], atol=1e-4)
        if not random_scores and not torch.allclose(scores[0], scores[2], atol=1e-4):
            self.findings.add(
                f"scores with two more columns of padding={scores[2].tolist()!r}",
                f"as without them, {scores[0].tolist()!r}",
                "padding depends on the other rows of a batch",
                "Cut completions to completion_mask before judging them",
            )

    def check_rewards(self, options: Mapping[str, int], batch_size: int) -> None:
        """Scores are learnt from where there are any: rewards that say something else are a
        mistake, unless they are less a KL."""
        if self.findings.problems:
            return
        self.env.reset(options=options)
        _, rewards, _, _, infos = self.env.step(self.random_actions(batch_size))
        scores = infos.get(columns.SCORES, rewards)
        if "kl" in infos or torch.allclose(rewards, scores):
            return
        self.findings.add(
            f"step() rewards={rewards.tolist()!r}",
            f"infos['scores'], {scores.tolist()!r}",
            "where there are scores, these are learnt from and rewards are only reported",
            "Return the scores as rewards, or leave them out of infos to have rewards learnt from",
        )

    def check_refusals(self, options: Mapping[str, int], batch_size: int) -> None:
        """Wrong actions must raise an error, not be judged."""
        good = self.random_actions(batch_size)
        ids, mask = good[columns.COMPLETION_IDS], good[columns.COMPLETION_MASK]
        outside = ids.clone()
        outside[0, 0] = int(self.env.single_action_space.child_space.n)
        wrong = {
            "a completion too few": {name: value[:-1] for name, value in good.items()},
            "a token id outside the vocabulary": {**good, columns.COMPLETION_IDS: outside},
            "no completion_mask": {columns.COMPLETION_IDS: ids},
        }
        if mask.shape[1] > 1:
            wrong["a mask with a hole"] = {**good, columns.COMPLETION_MASK: _with_hole(mask)}
        for what, actions in wrong.items():
            self.env.reset(options=options)
            try:
                self.env.step(actions)
            except (ValueError, LookupError, TypeError, RuntimeError):
                continue
            self.findings.add(
                f"step() given {what}",
                "an error",
                "wrong batches would be learnt from unnoticed",
                "Check actions first; rllib_llm.envs.actions.check_actions does",
            )


def _with_hole(mask: torch.Tensor) -> torch.Tensor:
    mask = mask.clone()
    mask[-1, 0], mask[-1, -1] = False, True
    return mask
