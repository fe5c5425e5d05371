"""A policy in training on preference pairs: both completions of a prompt in one forward."""

from __future__ import annotations

from typing import Any

import torch

from rllib_llm import columns
from rllib_llm.modules.causal_lm import CausalLMModule
from rllib_llm.modules.packing.logprobs import ReferencePolicy, score_completions
from rllib_llm.modules.reward_model_module import stack_pairs


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
        return scored.logprobs.sum(dim=1).chunk(2)
