"""Samples stored completions again from the weights in a run's checkpoints.

A completion is a function of seed, row, turn and token index, and of the weights (see the
explanation "determinism"). So anybody with the rollouts and a checkpoint can check whether these
tokens were sampled by these weights. What is computed together decides the last bits only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import random
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.dataset as ds
import torch
from gymnasium.spaces import Discrete
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm.checkpoints.algorithm import saved_config
from rllib_llm.checkpoints.folder import MANIFEST, MODEL_IN_CHECKPOINT, check
from rllib_llm.data.rollouts import open_rollouts, query, rollouts_by_trial
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Ended, Noise, Row, uniform_noise
from rllib_llm.engines.sampling import truncate
from rllib_llm.envs.adapters.agent import AgentEnv
from rllib_llm.envs.registry import creator
from rllib_llm.rollouts.policy import EVALUATION_SEED, ModulePolicy
from rllib_llm.shared.errors import require
from rllib_llm.shared.run_layout import RunFolder
from rllib_llm.shared.storage import Place, local_copy, read_json

# Nats by which two computations of one log-prob may differ: about a hundred times what the
# explanation "determinism" tells of float32, ten times what it tells of half precision.
ROUND_OFF = {torch.float32: 2.0**-10, torch.bfloat16: 2.0**-2, torch.float16: 2.0**-2}
NO_TOKEN = -1  # where what is sampled anew has ended
INITIAL_VERSION = 0  # of the weights that the setting `model` names
_KEY = ("iteration", "position", "sample", "status")  # names a completion, of one row or more


@dataclass(frozen=True)
class Difference:
    """A token or log-prob that differs from the one sampled again.

    token: its place in the completion, from 0. miss: by how much of the distribution the noise
    misses the stored token (in nats where decoding is greedy); 0 where the tokens agree.
    """

    token: int
    stored_id: int
    sampled_id: int
    stored: str
    sampled: str
    stored_logprob: float
    sampled_logprob: float
    miss: float
    is_round_off: bool

    def __str__(self) -> str:
        stored, sampled = f"{self.stored!r} ({self.stored_id})", f"{self.sampled!r}"
        what = f"{stored} is stored, {sampled} ({self.sampled_id}) sampled, off by {self.miss:.2g}"
        if self.stored_id == self.sampled_id:
            numbers = f"{self.stored_logprob:.6g} is stored, {self.sampled_logprob:.6g} computed"
            what = f"{stored}: log-prob {numbers}"
        why = "within round-off" if self.is_round_off else "more than round-off"
        return f"token {self.token}: {what}, {why}"


@dataclass
class Checked:
    """A completion that was sampled again.

    num_tokens: of those that were compared. num_unknown: sampled tokens whose weights are not kept.
    logprob_errors: nats, of the compared tokens before the first that differs. differences: the
        first of each turn, a log-prob's by round-off left out.
    """

    iteration: int
    position: int
    sample: int
    status: str
    prompt: str
    completion: str
    num_unknown: int
    num_tokens: int = 0
    has_same_tokens: bool = True
    logprob_errors: list[float] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether nothing differs by more than round-off."""
        return all(each.is_round_off for each in self.differences)

    def __str__(self) -> str:
        name = f"iteration {self.iteration}, prompt {self.position}.{self.sample} ({self.status})"
        lines = [f"{name}: {self.differences[0] if self.differences else 'agrees'}"]
        return "\n".join([*lines, f"  prompt: {self.prompt}", f"  completion: {self.completion}"])


@dataclass(frozen=True)
class Verification:
    """The results for one trial.

    versions: of the weights that are kept. num_stored, num_askable: completions in the store, and
    those of which some tokens were sampled by weights that are kept. missing: completions for each
    version that is not kept.
    """

    trial: str
    versions: list[int]
    num_stored: int
    num_askable: int
    missing: dict[int, int]
    completions: list[Checked]

    @property
    def agrees(self) -> bool:
        """Whether something was compared, and nothing differs by more than round-off."""
        return bool(self.completions) and all(each.agrees for each in self.completions)

    def bits(self) -> tuple[float, float]:
        """Bits to which probabilities agree, in the median and at worst: -log2 of the log-probs'
        difference in nats; inf where they are bit for bit the same."""
        errors = [error for each in self.completions for error in each.logprob_errors]
        median, worst = (
            -math.log2(error) if error else math.inf
            for error in (statistics.median(errors), max(errors))
        )
        return median, worst

    def __str__(self) -> str:
        num, same = len(self.completions), sum(each.has_same_tokens for each in self.completions)
        lines = [f"{self.trial}: {num} of {self.num_stored} completions sampled anew from the "
                 f"weights of {_named(self.versions)}"]  # fmt: skip
        if num:
            lines.append(f"{same} of {num} completions agree token for token")
        if any(each.logprob_errors for each in self.completions):
            median, worst = ("the last bit" if bits == math.inf else f"{max(bits, 0.0):.1f} bits"
                             for bits in self.bits())  # fmt: skip
            known = "" if any(each.differences for each in self.completions) else ": round-off"
            lines[-1] += f"; half of the log-probs agree to {median}, all to {worst}{known}"
        if self.missing:
            lost = f"{self.num_stored - self.num_askable} completions"
            lines.append(f"cannot be checked: {lost}; no checkpoint holds {_named(self.missing)}")
        if unknown := sum(each.num_unknown for each in self.completions):
            lines.append(f"left out: {unknown} tokens of these completions, of other weights")
        return "\n".join([*lines, *(str(each) for each in self.completions if each.differences)])


def verify(run: str | Path, num_samples: int = 16, seed: int = 0) -> list[Verification]:
    """Samples `num_samples` random completions of each trial of a run again, from the weights of
    their version, and compares.

    Version 0 is what the setting `model` names; others are taken from the trial's checkpoints.

    Args:
        run: folder or URL of a run, a stage or a trial.
        num_samples: >= 1, completions of each trial.
        seed: which ones are drawn.

    Raises:
        NoRolloutsError: the run kept no rollouts.
        CheckpointError: a checkpoint is damaged.
        Problems: a trial without checkpoints, or one whose completions this package did not
            sample by their seeds.
    """
    return [
        _Trial(trial).verify(open_rollouts([folder]), num_samples, seed)
        for trial, folder in rollouts_by_trial(run).items()
    ]


@dataclass(frozen=True)
class _Piece:
    """Consecutive tokens `start` .. `end` - 1 of a completion that one version sampled in one turn,
    which begins at `first`."""

    row: dict[str, Any]
    version: int
    turn: int
    first: int
    start: int
    end: int


def pieces(rows: Sequence[dict[str, Any]], *, keeps_cache: bool) -> Iterator[_Piece]:
    """The pieces of a completion, or of a conversation, whose paths are several rows.

    Args:
        rows: of the store, in order.
        keeps_cache: whether tokens behind a change of weights were sampled with the KV cache of
            those before: nothing computes them again, and they are left out.
    """
    turn = 0
    for row in rows:
        turns = [(0, len(row["completion_ids"]))]
        if row["messages"] is not None:  # each run of True in the mask
            runs = groupby(enumerate(row["loss_mask"]), key=lambda pair: pair[1])
            places = [[place for place, _ in run] for value, run in runs if value]
            turns = [(run[0], run[-1] + 1) for run in places]
        for first, last in turns:
            spans = [span for span in row["version_spans"] if first <= span["start"] < last]
            for span in spans[: 1 if keeps_cache else None]:
                yield _Piece(row, span["version"], turn, first, span["start"], span["end"])
            turn += 1


class _Trial:
    """The checkpoints of one trial, with whose weights its completions are sampled again."""

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self.checkpoints: dict[int, Place] = {}  # by the version of their weights
        for saved in RunFolder(folder).checkpoints():
            version = read_json(saved / MANIFEST).get("weights_version")
            if version is not None:
                self.checkpoints[version] = saved
        require(self.checkpoints, "run", str(folder), "hold a checkpoint with its weights", "",
                "Train with --checkpoint-at-end or --checkpoint-freq")  # fmt: skip
        newest = self.checkpoints[max(self.checkpoints)]
        self.config = saved_config(local_copy(newest))
        self.held_out = self.config.get_evaluation_config_object() or self.config
        # Those of each environment, by its name.
        self._trained, self._evaluated = self.config.env_configs(), self.held_out.env_configs()
        made = [creator(config.env) for config in self._trained.values()]
        kinds = [one.args[0] if isinstance(one, functools.partial) else one for one in made]
        is_agents = any(isinstance(kind, type) and issubclass(kind, AgentEnv) for kind in kinds)
        for name, holds, rule in (
            ("engine", self.config.engine == "torch", "be 'torch'"),
            ("generate_function", self.config.generate_function is None, "be None"),
            ("env", not is_agents, "be no agent's"),
        ):
            require(holds, name, getattr(self.config, name), rule, "only completions that the "
                    "policy samples with this package's noise can be sampled again",
                    "Look at `rllib rollouts`")  # fmt: skip
        spaces: Any = (Discrete(2), Discrete(2))  # nothing here depends on them
        spec = self.config.get_multi_rl_module_spec(
            spaces={DEFAULT_MODULE_ID: spaces}, inference_only=True
        ).rl_module_specs[DEFAULT_MODULE_ID]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._policy = ModulePolicy(lambda: spec.build().to(device), alias=False)

    def verify(self, rollouts: ds.Dataset, num_samples: int, seed: int) -> Verification:
        kept = {INITIAL_VERSION, *self.checkpoints}
        columns = [*_KEY, "version_spans"]
        versions: dict[tuple, set[int]] = {}
        for row in rollouts.to_table(columns=columns).to_pylist():
            of_row = versions.setdefault(tuple(row[name] for name in _KEY), set())
            of_row.update(span["version"] for span in row["version_spans"] or ())
        askable = sorted(key for key, those in versions.items() if those & kept)
        missing = Counter(v for those in versions.values() for v in those - kept)
        drawn = random.Random(seed).sample(askable, min(num_samples, len(askable)))
        completions = []
        for key in sorted(drawn):
            conditions = (pc.field(n) == value for n, value in zip(_KEY, key, strict=True))
            rows = query(rollouts.filter(functools.reduce(operator.and_, conditions)))
            completions.append(rows.to_pylist())
        return Verification(
            trial=self.folder.name,
            versions=sorted(kept & {v for those in versions.values() for v in those}),
            num_stored=len(versions), num_askable=len(askable),
            missing=dict(sorted(missing.items())), completions=self._compared(completions, kept),
        )  # fmt: skip

    @property
    def _model(self) -> Any:
        return self._policy.build().computing_model

    def _compared(self, completions: list[list[dict[str, Any]]], kept: set[int]) -> list[Checked]:
        """The comparison of each completion, sampled version by version."""
        dtypes = {parameter.dtype for parameter in self._model.parameters()}
        self._round_off = max(ROUND_OFF.get(dtype, 0.0) for dtype in dtypes)
        keeps_cache = self.config.streams and self.config.in_flight == "keep"
        found = [list(pieces(rows, keeps_cache=keeps_cache)) for rows in completions]
        wanted = [(piece, i) for i, own in enumerate(found) for piece in own
                  if piece.version in kept]  # fmt: skip
        checked = [
            Checked(
                **{name: rows[0][name] for name in _KEY},
                prompt=rows[0]["prompt"] or str(rows[0]["prompt_ids"]),
                completion=rows[0]["completion"] or str(rows[0]["completion_ids"]),
                num_unknown=sum(row["tokens"] for row in rows),
            )
            for rows in completions
        ]
        wanted.sort(key=lambda each: each[0].version)
        for version, part in groupby(wanted, key=lambda each: each[0].version):
            alike = list(part)
            ended = self._sample(version, [piece for piece, _ in alike])
            for (piece, i), made in zip(alike, ended, strict=True):
                self._compare(piece, made, checked[i])
        return checked

    def _sample(self, version: int, alike: list[_Piece]) -> list[Ended]:
        """Samples these pieces with the weights of a version."""
        if version in self.checkpoints:
            folder = local_copy(self.checkpoints[version])
            check(folder)
            self._policy.build().load_pretrained(folder / MODEL_IN_CHECKPOINT)
        engine = self._policy.open_engine(version)
        for i, piece in enumerate(alike):
            noise, params = self._asked(piece)
            tokens = [*piece.row["prompt_ids"], *piece.row["completion_ids"][: piece.start]]
            num, least = piece.end - piece.first, params.min_new_tokens
            params = dataclasses.replace(params, max_new_tokens=num, min_new_tokens=min(least, num))
            num_sampled = piece.start - piece.first
            engine.add([Row(i, tokens, params, num_sampled=num_sampled, noise=noise)])
        ended: dict[Any, Ended] = {}
        while engine.num_running:
            ended |= {each.id: each for each in engine.step()}
        engine.close()
        return [ended[i] for i in range(len(alike))]

    def _asked(self, piece: _Piece) -> tuple[Noise, SamplingParams]:
        row = piece.row
        configs, explores, of_prompt, more = self._trained, True, self.config.num_completions, 0
        if row["status"] == "evaluated":
            configs, explores, more = self._evaluated, self.held_out.explore, EVALUATION_SEED
            of_prompt = self.held_out.num_completions if explores else 1
        ids = self._policy.pad_token_id, self._policy.stop_token_ids
        config = configs[row["env"] if self.config.envs else ""]
        params = SamplingParams.of(config, *ids, greedy=not explores)
        if not params.min_new_tokens:  # as long as what is stored, whatever ended it
            params = dataclasses.replace(params, stop_token_ids=())
        place = row["position"] * of_prompt + row["sample"]
        return Noise(row["seed"] + more, place, piece.turn), params

    def _compare(self, piece: _Piece, made: Ended, of: Checked) -> None:
        """Add the comparison of one piece to that of its completion."""
        stored = piece.row["completion_ids"][piece.start : piece.end]
        logprobs = piece.row["logprobs"][piece.start : piece.end]
        pairs = zip(stored, [*made.token_ids, *[NO_TOKEN] * len(stored)], strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(stored))
        errors = [abs(a - b) for a, b in zip(logprobs[:same], made.logprobs[:same], strict=True)]
        # Not >: what is no number differs.
        differs = next((i for i, e in enumerate(errors) if not e <= self._round_off), same)
        if differs < len(stored):
            i, kept = differs, stored[differs]
            sampled = made.token_ids[i] if i < len(made.token_ids) else NO_TOKEN
            miss = 0.0 if kept == sampled else self._miss(piece, i)
            of.differences.append(Difference(
                token=piece.start + i, stored_id=kept, sampled_id=sampled, stored=self._text(kept),
                sampled=self._text(sampled), stored_logprob=logprobs[i],
                sampled_logprob=made.logprobs[i] if i < len(made.logprobs) else math.nan,
                miss=miss, is_round_off=kept != sampled and miss <= self._round_off,
            ))  # fmt: skip
        of.logprob_errors += errors
        of.num_tokens += len(stored)
        of.num_unknown -= len(stored)
        of.has_same_tokens &= same == len(stored)

    @torch.inference_mode()
    def _miss(self, piece: _Piece, i: int) -> float:
        """By how much the noise misses the stored token i of a piece, as a share of the
        distribution; in nats below the likeliest where decoding is greedy."""
        noise, params = self._asked(piece)
        place = piece.start + i
        stored = piece.row["completion_ids"][place]
        ids = torch.tensor([[*piece.row["prompt_ids"], *piece.row["completion_ids"][:place]]])
        model = self._model
        device = next(model.parameters()).device
        logits = model(input_ids=ids.to(device), use_cache=False).logits[0, -1].float().cpu()
        if not 0 <= stored < len(logits):
            return math.inf
        if place - piece.first < params.min_new_tokens:
            logits[list(params.stop_token_ids)] = -torch.inf
        if params.greedy:
            return float(logits.max() - logits[stored])
        weights = ((logits - logits.max()) / params.temperature).exp().unsqueeze(0)
        shares = truncate(weights, params)[0].double()
        end = float(shares[: stored + 1].sum() / shares.sum())
        begin = end - float(shares[stored] / shares.sum())
        row = uniform_noise(noise.seed, [noise.row], place - piece.first + 1, noise.turn)
        drawn = float(row[0, -1])
        return max(begin - drawn, drawn - end, 0.0)

    def _text(self, token: int) -> str:
        return self._policy.build().tokenizer.decode([token]) if token != NO_TOKEN else ""


def _named(versions: Collection[int]) -> str:
    """Versions in words, those in a row as "3-7"."""
    runs = groupby(enumerate(sorted(versions)), key=lambda pair: pair[1] - pair[0])
    ends = [[version for _, version in run] for _, run in runs]
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends]
    return f"version{'s' * (len(versions) > 1)} {', '.join(names)}"
