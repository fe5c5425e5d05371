"""Modules in training on preference pairs: a reward model, and a policy by DPO."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rllib_llm.modules.causal_lm import CausalLMModule
from rllib_llm.modules.hugging_face_module import HuggingFaceModule
from rllib_llm.modules.packing.logprobs import ReferencePolicy, score_completions
from rllib_llm.modules.packing.sequence_scores import sequence_scores
from rllib_llm.modules.pretrained import load_sequence_classifier, score_head
from rllib_llm.modules.tokenizer import load_tokenizer
from rllib_llm.shared import columns
from rllib_llm.shared.columns import widen


class RewardModelModule(HuggingFaceModule):
    """`model_config` keys: pretrained_model (a classifier, or a causal LM whose trunk gets a new
    head), dtype, seed (of the new head)."""

    def load(self) -> None:
        config = self.model_config
        self.tokenizer = load_tokenizer(
            config["pretrained_model"], chat_template=config.get("chat_template")
        )
        self.model = load_sequence_classifier(
            config["pretrained_model"], dtype=config["dtype"], new_head=True, seed=config["seed"]
        )
        self.save_memory(self.model)
        outputs = score_head(self.model).out_features
        if outputs != 1:
            raise ValueError(
                f"pretrained_model={config['pretrained_model']!r} has {outputs} outputs and must "
                "have 1: preference pairs train a single score. Start from a causal LM, or a "
                "classifier with num_labels=1."
            )

    def _forward_train(self, batch: dict[str, Any], **kwargs) -> dict[str, torch.Tensor]:
        """`scores` [2N]: of the N chosen texts, then of the N rejected ones, from one forward; or
        [N] of the texts `input_ids`, where these are given."""
        if columns.INPUT_IDS in batch:
            ids, mask = batch[columns.INPUT_IDS], batch[columns.ATTENTION_MASK]
        else:
            ids, mask = stack_pairs(batch)
        return {columns.SCORES: sequence_scores(self.computing_model, ids, mask).float()}

    def float32_parts(self) -> list[nn.Module]:
        """The head, where `sequence_scores` calls it itself."""
        head = getattr(self.model, "score", None)
        return [head] if isinstance(head, nn.Module) else []


_PAIR_NAMES = (
    (columns.CHOSEN_IDS, columns.REJECTED_IDS), (columns.CHOSEN_MASK, columns.REJECTED_MASK)
)  # fmt: skip


def stack_pairs(
    batch: dict[str, Any], names: tuple[tuple[str, str], ...] = _PAIR_NAMES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [2N, L] of the right-padded chosen and rejected rows under each other, as long
    as the longer; `names`: of the two columns of each."""
    length = max(batch[name].shape[1] for name in names[0])
    ids, mask = (torch.cat([widen(batch[name], length) for name in both]) for both in names)
    return ids, mask


class PreferenceModule(CausalLMModule):
    """`model_config` as `CausalLMModule`'s; there is no critic."""

    def _forward_train(
        self, batch: dict[str, Any], *, ref_logprobs_of: ReferencePolicy | None = None, **kwargs
    ) -> dict[str, torch.Tensor]:
        """`chosen_logprobs` and `rejected_logprobs` [N] float32, sums over the completions' tokens.

        ref_logprobs_of: of that policy instead, as `ref_chosen_logprobs` and
            `ref_rejected_logprobs`, without gradient.
        """
        if ref_logprobs_of is None:
            chosen, rejected = self._pair_logprobs(self.computing_model, batch)
            return {columns.CHOSEN_LOGPROBS: chosen, columns.REJECTED_LOGPROBS: rejected}
        with torch.no_grad(), ref_logprobs_of.context():
            chosen, rejected = self._pair_logprobs(ref_logprobs_of.model, batch)
        return {columns.REF_CHOSEN_LOGPROBS: chosen, columns.REF_REJECTED_LOGPROBS: rejected}

    def _pair_logprobs(self, model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        # Rows with the same prompt share it: it is read once for both completions.
        prompts = batch[columns.PROMPT_IDS], batch[columns.PROMPT_MASK]
        ids, mask = (torch.cat([prompt, prompt]) for prompt in prompts)
        scored = score_completions(model, ids, mask, *stack_pairs(batch))
        logprobs = scored.logprobs
        if columns.CHOSEN_LOSS_MASK in batch:
            names = (columns.CHOSEN_IDS, columns.REJECTED_IDS), (
                columns.CHOSEN_LOSS_MASK, columns.REJECTED_LOSS_MASK
            )  # fmt: skip
            logprobs = logprobs * stack_pairs(batch, names)[1]
        return logprobs.sum(dim=1).chunk(2)
