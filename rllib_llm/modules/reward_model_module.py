"""The RLModule of a reward model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rllib_llm.modules.hugging_face_module import HuggingFaceModule
from rllib_llm.modules.images import images_of
from rllib_llm.modules.pretrained import load_sequence_classifier, score_head
from rllib_llm.modules.rl_modules import stack_pairs
from rllib_llm.modules.sequence_scores import MEAN_KEY, STD_KEY, sequence_scores
from rllib_llm.modules.tokenizer import load_tokenizer
from rllib_llm.shared import columns
from rllib_llm.shared.errors import require


class RewardModelModule(HuggingFaceModule):
    """`model_config` keys: pretrained_model (a classifier, or a causal LM whose trunk gets a new
    head), dtype, seed (of the new head)."""

    def load(self) -> None:
        config = self.model_config
        self.tokenizer = load_tokenizer(
            config["pretrained_model"], chat_template=config.get("chat_template"),
            template_settings=config.get("template_settings"),
        )  # fmt: skip
        self.model = load_sequence_classifier(
            config["pretrained_model"], dtype=config["dtype"], new_head=True, seed=config["seed"]
        )
        for key in (MEAN_KEY, STD_KEY):  # of the scores before this training
            vars(self.model.config).pop(key, None)
        self.freeze_towers()
        self.save_memory(self.model)
        outputs = score_head(self.model).out_features
        require(outputs == 1, "model", config["pretrained_model"],
                f"have one output, not {outputs}",
                "preference pairs train a single score")  # fmt: skip

    def _forward_train(self, batch: dict[str, Any], **kwargs) -> dict[str, torch.Tensor]:
        """`scores` [2N]: of the N chosen texts, then of the N rejected ones, from one forward; or
        [N] of the texts `input_ids`, where these are given."""
        shown = images_of(batch)
        if columns.INPUT_IDS in batch:
            ids, mask = batch[columns.INPUT_IDS], batch[columns.ATTENTION_MASK]
        else:
            (ids, mask), shown = stack_pairs(batch), shown and shown.twice
        scores = sequence_scores(self.computing_model, ids, mask, shown=shown)
        return {columns.SCORES: scores.float()}

    def float32_parts(self) -> list[nn.Module]:
        """The head, where `sequence_scores` calls it itself."""
        head = getattr(self.model, "score", None)
        return [head] if isinstance(head, nn.Module) else []
