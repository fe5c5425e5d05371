"""Scores of texts by a sequence classifier, read at each text's last token by its mask.

Their mean and standard deviation on reference samples are kept in the model folder's config.json:
normalised by them, scores have mean 0 and standard deviation 1 whatever the scale of the reward
model (Stiennon et al. 2020; vwxyzjn, "The N implementation details of RLHF with PPO"). The stage
that trains a reward model writes them; every loader reads them.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel

from rllib_llm.modules.images import Shown
from rllib_llm.modules.model_source import model_config
from rllib_llm.modules.packing import TokenRows
from rllib_llm.modules.towers import seen_hidden
from rllib_llm.modules.trunk import wanted_hidden, wanted_tokens
from rllib_llm.shared.columns import fetched
from rllib_llm.shared.errors import Problems, require

POSITIVE_NAMES = ("positive", "pos", "good", "chosen")


def sequence_scores(
    classifier: PreTrainedModel, ids: Tensor, mask: Tensor, *, label: int | str | None = None,
    shown: Shown | None = None,
) -> Tensor:  # fmt: skip
    """Score [N] float32 of each right-padded text, `ids` [N, L] int64, `mask` [N, L] bool.

    transformers looks for the last token that is not the pad token, which is wrong where the pad
    token is the EOS token; the mask knows. Encoders (BERT's kind) pool as they do by themselves.
    With one output it is the score. With several the score is the log-odds of `label`, for two
    logit(positive) - logit(negative); see `label_index`. `shown`: what the texts show.

    Raises:
        ValueError: an encoder-decoder, images for an encoder, or a label that the classifier does
            not have.
    """
    require(not classifier.config.is_encoder_decoder, "reward_model", type(classifier).__name__,
            "be a decoder or an encoder",
            "this one is both, and pools at EOS tokens that a cut completion lacks")  # fmt: skip
    head = getattr(classifier, "score", None)
    if isinstance(head, nn.Module):
        states = _last_states(classifier, ids, mask, shown)
        logits = head(states.to(next(head.parameters()).dtype))
    else:
        require(shown is None, "image", ..., "be left out for this classifier", "it reads text")
        ids, mask = (tensor.to(classifier.device) for tensor in (ids, mask))
        logits = classifier(input_ids=ids, attention_mask=mask.long()).logits
    logits = logits.float()
    if logits.shape[1] == 1:
        return logits[:, 0]
    index = label_index(classifier.config, label)
    others = torch.cat([logits[:, :index], logits[:, index + 1 :]], dim=1)
    return logits[:, index] - others.logsumexp(dim=1)


def _last_states(
    classifier: PreTrainedModel, ids: Tensor, mask: Tensor, shown: Shown | None
) -> Tensor:
    """The trunk's state [N, hidden] at each text's last token."""
    trunk = classifier.base_model
    ids, mask = fetched((ids, mask))
    lengths = mask.sum(dim=1)
    # The state wanted is the one that predicts whatever comes next.
    place = torch.arange(ids.shape[1] + 1)
    rows = TokenRows(
        ids=pad(ids, (0, 1)),
        attended=place <= lengths.unsqueeze(1),
        wanted=place == lengths.unsqueeze(1),
        shown=shown,
    )
    if shown is not None:
        return seen_hidden(classifier, rows)[1]
    wanted = wanted_tokens(trunk, rows, dense=bool(lengths.all()))
    if wanted.layout is not None:
        return wanted.without_surplus(wanted_hidden(trunk, wanted))
    last = (lengths - 1).clamp(min=0)
    ids, mask, last = (t.to(trunk.device, non_blocking=True) for t in (ids, mask, last))
    hidden = trunk(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
    return hidden[torch.arange(len(ids), device=ids.device), last]


def label_index(config: PretrainedConfig, label: int | str | None = None) -> int:
    """Returns the index of the output whose log-odds are the score, in a classifier with several.

    label: its number or its name in `config.label2id`. None: the one named positive, pos, good or
    chosen, else of two labels the second, as in most sentiment and preference models.

    Raises:
        ValueError: no such label, or None with three labels or more and no such name.
    """
    names = {index: str(name) for index, name in (config.id2label or {}).items()}
    if label is None:
        named = [i for i, name in names.items() if name.lower() in POSITIVE_NAMES]
        if len(named) == 1 or len(names) == 2:
            return int(named[0]) if len(named) == 1 else 1
    elif label in names:
        return int(label)
    else:
        same_name = [i for i, name in names.items() if name.lower() == str(label).lower()]
        if same_name:
            return int(same_name[0])
    rule = f"be one of the classifier's labels {names}, by number or name"
    raise Problems("label", rule, "its log-odds are the score", value=label)


MEAN_KEY, STD_KEY = "rllib_llm_score_mean", "rllib_llm_score_std"


def write_score_normalization(folder: str | Path, mean: float, std: float) -> None:
    """Stores mean and std of the raw scores in a model's folder.

    Raises:
        ValueError: numbers that cannot normalise.
    """
    check_normalization(mean, std)
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text()) | {MEAN_KEY: float(mean), STD_KEY: float(std)}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def read_score_normalization(source: Any) -> tuple[float, float] | None:
    """Returns (mean, std) of raw scores, or None where none were stored.

    source: a config, or a model setting (folder, hub id, dotted path).
    """
    config = model_config(source) if isinstance(source, (str, os.PathLike)) else source
    mean, std = getattr(config, MEAN_KEY, None), getattr(config, STD_KEY, None)
    if mean is None or std is None:
        return None
    check_normalization(mean, std)
    return float(mean), float(std)


def check_normalization(mean: float, std: float) -> None:
    """Raises ValueError where (score - mean) / std would not be a number."""
    require(math.isfinite(mean) and math.isfinite(std) and std > 0, "normalize", (mean, std),
            "be a finite mean and a standard deviation above 0",
            "scores become (score - mean) / std")  # fmt: skip
