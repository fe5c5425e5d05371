"""The frozen reference: log-probs of completions under the model that training started from."""

from __future__ import annotations

import logging
import os
import warnings

import torch
from torch import Tensor

from rllib_llm.modules.logprobs import score_completions
from rllib_llm.modules.packing import pack_right, token_batches
from rllib_llm.modules.pretrained import load_causal_lm, load_quantized
from rllib_llm.modules.quantization import model_bytes, next_token_drift

logger = logging.getLogger(__name__)

DEFAULT_BATCH_TOKENS = 16_384


class FrozenReference:
    """A frozen causal language model; each replica loads its own copy.

    model: folder, hub id or dotted path.
    quantization, backend: see `modules/quantization.py`.
    dtype: of the weights that are not quantised, and of the activations.
    products: the library that multiplies float32 on a CPU, "mkl" or "onednn".
    batch_tokens: tokens (padding included) of one forward pass; lower it when memory runs out.
    measure_drift: rows of the first batch on which a quantised model is compared with the
        unquantised one, which is loaded for that moment; 0 = not measured. The result is in
        `metrics()`.

    Raises:
        ModelSourceError, ValueError, ImportError: see `load_quantized`.
    """

    def __init__(
        self,
        model: str | os.PathLike,
        *,
        quantization: str = "none",
        backend: str = "auto",
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "float32",
        products: str = "mkl",
        batch_tokens: int = DEFAULT_BATCH_TOKENS,
        measure_drift: int = 0,
    ):
        check_measure_drift(measure_drift, quantization)
        token_batches(torch.ones(1), batch_tokens)
        self.model = load_quantized(
            load_causal_lm,
            model,
            quantization=quantization,
            backend=backend,
            dtype=dtype,
            device=device,
            products=products,
        )
        self.drift: dict[str, float] = {}
        self._source, self._device, self._batch_tokens = model, torch.device(device), batch_tokens
        self._drift_rows = measure_drift if quantization != "none" else 0

    @torch.no_grad()
    def logprobs(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        temperature: float = 1.0,
    ) -> Tensor:
        """Log-probs [B, T] float32 of the completion tokens, 0 where the mask is False.

        prompt_ids [B, P] left-padded, completion_ids [B, T] right-padded, masks bool; logits are
        divided by `temperature`. The result is on the device of `completion_ids`.
        """
        columns = (prompt_ids, prompt_mask, completion_ids, completion_mask)
        if self._drift_rows:
            self.measure(*(column[: self._drift_rows] for column in columns))
        lengths = prompt_mask.sum(dim=1) + completion_mask.sum(dim=1)
        result = torch.zeros(completion_ids.shape, device=completion_ids.device)
        for rows in token_batches(lengths, self._batch_tokens):
            rows = rows.to(completion_ids.device)
            batch = [column[rows].to(self._device) for column in columns]
            scored = score_completions(self.model, *batch, temperature=temperature)
            result[rows] = scored.logprobs.to(result.device)
        return result

    def measure(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
    ) -> dict[str, float]:
        """Drift against the unquantised model on these texts, kept in `drift`: kl, top1."""
        self._drift_rows = 0
        ids, mask = pack_right(prompt_ids, prompt_mask, completion_ids, completion_mask)
        exact_model = load_causal_lm(self._source, dtype="float32", device=self._device)
        self.drift = next_token_drift(self.model, exact_model, ids, mask)
        log_drift(self._source, self.drift, model_bytes(self.model), model_bytes(exact_model))
        return self.drift

    def metrics(self) -> dict[str, float]:
        """{"drift/kl", "drift/top1"} once measured, else {}."""
        return {f"drift/{name}": value for name, value in self.drift.items()}


def check_measure_drift(measure_drift: int, quantization: str) -> None:
    """Raises ValueError for a negative number of rows, warns where there is nothing to measure."""
    if not isinstance(measure_drift, int) or measure_drift < 0:
        raise ValueError(
            f"measure_drift={measure_drift!r} must be a whole number of at least 0: that many rows "
            "are scored by the unquantised model too. Use 0 to leave it out, 8 to see it."
        )
    if measure_drift and quantization == "none":
        warnings.warn(
            f"measure_drift={measure_drift!r} has no effect with quantization='none': the model is "
            "exact. Remove it, or choose a quantization.",
            stacklevel=3,
        )


def log_drift(model: object, drift: dict[str, float], size: int, exact_size: int) -> None:
    """Reports drift and bytes of a quantised model to the log."""
    shown = ", ".join(f"{name} {value:.3g}" for name, value in drift.items())
    logger.info(
        "Drift of %r from its unquantised weights: %s (%.1f of %.1f MB).",
        str(model), shown, size / 1e6, exact_size / 1e6,
    )  # fmt: skip
