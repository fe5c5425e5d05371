"""The learned judge: a frozen sequence classifier as a reward function."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rllib_llm.envs.judges.reward_texts import RewardTextEncoder, same_tokenizer
from rllib_llm.envs.reference import check_measure_drift, log_drift
from rllib_llm.modules.drift import score_drift
from rllib_llm.modules.packing.sequence_scores import label_index, sequence_scores
from rllib_llm.modules.packing.token_batches import pack_right, token_batches
from rllib_llm.modules.pretrained import load_sequence_classifier, load_tokenizer, score_head
from rllib_llm.modules.quantization import load_quantized, model_bytes
from rllib_llm.modules.score_normalization import check_normalization, read_score_normalization
from rllib_llm.shared.padding import pad_right, widen

logger = logging.getLogger(__name__)

DEFAULT_BATCH_TOKENS = 16_384


class RewardModelScorer:
    """Scores of completions by a sequence classifier; each replica loads its own.

    Where the reward model has the policy's tokenizer it reads the token ids exactly as they were
    sampled (prompt, then all tokens of the completion mask, so EOS where the completion has one),
    and `wants_tokens` is True. Otherwise, or with a `template`, it reads texts, encoded by its own
    tokenizer (`RewardTextEncoder`).

    model: folder, hub id or dotted path of a sequence classifier.
    tokenizer: the policy's; None always reads texts.
    quantization, backend, dtype, batch_tokens: as for `FrozenReference`.
    max_length: tokens of prompt and completion that are read, the last ones; None takes the reward
        model's own limit.
    normalize: (mean, std) with which scores become (score - mean) / std; None reads what the
        RewardModel stage stored in the model's config, False leaves scores as they are.
    label: of a classifier with several outputs, the one whose log-odds are the score.
    template: see `RewardTextEncoder`.
    append_eos: put EOS behind finished completions when texts are read; None does so for models
        that the RewardModel stage trained, whose texts end with EOS.
    measure_drift: as for `FrozenReference`.

    Raises:
        ModelSourceError, ValueError, ImportError: a model or setting that cannot be used.
    """

    name = "reward_model"

    def __init__(
        self,
        model: str | os.PathLike,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        quantization: str = "none",
        backend: str = "auto",
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "float32",
        max_length: int | None = None,
        normalize: Sequence[float] | bool | None = None,
        label: int | str | None = None,
        template: str | None = None,
        append_eos: bool | None = None,
        batch_tokens: int = DEFAULT_BATCH_TOKENS,
        measure_drift: int = 0,
    ):
        check_measure_drift(measure_drift, quantization)
        token_batches(torch.ones(1), batch_tokens)
        own_tokenizer = load_tokenizer(model)
        self.model = load_quantized(
            load_sequence_classifier,
            model,
            quantization=quantization,
            backend=backend,
            dtype=dtype,
            device=device,
        )
        if score_head(self.model).out_features > 1:
            label_index(self.model.config, label)
        self.wants_tokens = (
            tokenizer is not None and template is None and same_tokenizer(tokenizer, own_tokenizer)
        )
        stored = read_score_normalization(self.model.config)
        self.normalization = _normalization(normalize, stored)
        self.max_length = _max_length(max_length, self.model.config, own_tokenizer)
        self.drift: dict[str, float] = {}
        self._warned_truncated = False
        self._encoder = RewardTextEncoder(
            own_tokenizer,
            template=template,
            max_length=self.max_length,
            append_eos=stored is not None if append_eos is None else append_eos,
        )
        # Chat models end their turns with tokens other than EOS; all of them are special ones.
        self._policy_ends = set() if tokenizer is None else set(tokenizer.all_special_ids)
        self._source, self._device, self._batch_tokens = model, torch.device(device), batch_tokens
        self._label = label
        self._drift_rows = measure_drift if quantization != "none" else 0

    def __call__(
        self,
        *tokens: Tensor,
        prompts: Sequence[Any] = (),
        completions: Sequence[str] = (),
        completion_ids: Sequence[Sequence[int]] | None = None,
        messages: Sequence[Any] | None = None,
        **columns: Any,
    ) -> Tensor:
        """Scores [B] float32: of four tensors (see `score_tokens`), else of texts."""
        if tokens:
            return self.score_tokens(*tokens)
        finished = None
        if completion_ids is not None and self._policy_ends:
            finished = [len(ids) > 0 and ids[-1] in self._policy_ends for ids in completion_ids]
        return self.score_texts(prompts, completions, messages=messages, finished=finished)

    def score_tokens(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
    ) -> Tensor:
        """Scores [B] float32 of token ids, on their device.

        prompt_ids [B, P] left-padded, completion_ids [B, T] right-padded, masks bool.
        """
        ids, mask = pack_right(prompt_ids, prompt_mask, completion_ids, completion_mask)
        if ids.shape[1] > self.max_length:
            rows = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
            ids, mask = self._padded([self._encoder.shorten(row) for row in rows])
        return self._normalized_scores(ids, mask)

    def score_texts(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        *,
        messages: Sequence[Any] | None = None,
        finished: Sequence[bool] | None = None,
    ) -> Tensor:
        """Scores [B] float32 of texts, see `RewardTextEncoder.encode`."""
        rows = self._encoder.encode(prompts, completions, messages=messages, finished=finished)
        return self._normalized_scores(*self._padded(rows))

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Ids and mask [N, L], L at least 1."""
        ids, mask = (widen(part, max(1, part.shape[1])) for part in pad_right(rows, 0))
        return ids.to(self._device), mask.to(self._device)

    def metrics(self) -> dict[str, float]:
        """{"drift/rank_corr", "drift/max_abs"} once measured, and "num_truncated" texts so far."""
        drift = {f"drift/{name}": value for name, value in self.drift.items()}
        return {**drift, "num_truncated": float(self._encoder.num_truncated)}

    @torch.no_grad()
    def _normalized_scores(self, ids: Tensor, mask: Tensor) -> Tensor:
        self._warn_of_truncation()
        scores = self._run(self.model, ids, mask)
        if self._drift_rows:
            num_rows, self._drift_rows = self._drift_rows, 0
            self._measure(scores[:num_rows], ids[:num_rows], mask[:num_rows])
        mean, std = self.normalization
        return (scores - mean) / std

    def _run(self, model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
        scores = torch.zeros(len(ids), device=ids.device)
        lengths = mask.sum(dim=1)
        for rows in token_batches(lengths, self._batch_tokens):
            rows = rows.to(ids.device)
            longest = int(lengths[rows[0]])
            batch = (tensor[rows, :longest].to(self._device) for tensor in (ids, mask))
            scores[rows] = sequence_scores(model, *batch, label=self._label).to(scores.device)
        return scores

    def _measure(self, scores: Tensor, ids: Tensor, mask: Tensor) -> None:
        exact_model = load_sequence_classifier(self._source, dtype="float32", device=self._device)
        self.drift = score_drift(scores, self._run(exact_model, ids, mask))
        log_drift(self._source, self.drift, model_bytes(self.model), model_bytes(exact_model))

    def _warn_of_truncation(self) -> None:
        if self._encoder.num_truncated and not self._warned_truncated:
            self._warned_truncated = True
            warnings.warn(
                f"{self._encoder.num_truncated} texts are longer than the reward model's "
                f"max_length={self.max_length} tokens and lose their beginning; later ones are "
                "only counted. Shorten prompts or completions, or take a reward model that reads "
                "more.",
                stacklevel=4,
            )


def _normalization(
    given: Sequence[float] | bool | None, stored: tuple[float, float] | None
) -> tuple[float, float]:
    if given is False:
        return 0.0, 1.0
    if given is None or given is True:
        if given is True and stored is None:
            raise ValueError(
                "normalize=True must find a mean and standard deviation in the reward model's "
                "config: it holds none. Train it with the RewardModel stage, or give (mean, std)."
            )
        return stored or (0.0, 1.0)
    if isinstance(given, (str, float, int)) or len(given) != 2:
        raise ValueError(
            f"normalize={given!r} must be (mean, std), true, false or null: scores become "
            "(score - mean) / std. Give two numbers."
        )
    mean, std = given
    check_normalization(mean, std)
    return float(mean), float(std)


def _max_length(given: int | None, config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = int(tokenizer.model_max_length)
    limit = min(positions or longest, longest)
    if given is None:
        return limit
    if not 1 <= given <= limit:
        raise ValueError(
            f"max_length={given!r} must be at least 1 and at most {limit}: the reward model reads "
            "no more tokens. Lower it, or leave it out."
        )
    return given
