"""Tiny models and tokenizers, seeded, made in a moment."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
DECODER_SPECIALS = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>"}
ENCODER_SPECIALS = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]"}


def byte_tokenizer(
    specials: dict[str, str] | None = None, *, pad: str | None = "<pad>", reverse: bool = False
) -> PreTrainedTokenizerFast:
    """One token for each byte, special tokens first (ids 0, 1, ...), BOS in front of texts.

    `pad=None` leaves out pad token and its entry; `pad` may name EOS; `reverse` gives the same
    bytes other ids.
    """
    names = dict(DECODER_SPECIALS if specials is None else specials)
    names.pop("pad", None)
    if pad is not None:
        names["pad"] = pad
    letters = LETTERS[::-1] if reverse else LETTERS
    entries = list(dict.fromkeys([*names.values(), *letters]))
    vocabulary = {token: i for i, token in enumerate(entries)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if "bos" in names:
        bos = names["bos"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocabulary[bos])]
        )
    if "cls" in names:
        cls, sep = names["cls"], names["sep"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} $B:1 {sep}:1",
            special_tokens=[(cls, vocabulary[cls]), (sep, vocabulary[sep])],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": token for role, token in names.items()},
    )


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's and Mistral 0.1's: a space in front of every text, "\u2581" for spaces, BOS."""
    names = ["<unk>", "<s>", "</s>", "<pad>", "\u2581", *"0123456789+= abcdefghijklmnopqrstuvwxyz."]
    merged = ["\u2581t", "he", "\u2581the", "\u2581c", "at", "\u2581cat", "42"]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("\u2581", "c"), ("a", "t"),
              ("\u2581c", "at"), ("4", "2")]  # fmt: skip
    vocabulary = {token: i for i, token in enumerate([*names, *merged])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        pad_token="<pad>", clean_up_tokenization_spaces=False,
    )  # fmt: skip


def llama_config(vocab_size: int = 260, **changes) -> LlamaConfig:
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "initializer_range": 0.1,  # distributions far from uniform, so that drift shows
        "attention_dropout": 0.1,
    }
    return LlamaConfig(**(settings | changes))


_made: dict[Any, Any] = {}


def copied(build: Callable[[], Any], *key: Any) -> Any:
    """A copy of what `build()` makes, which is called once for each key, dtype and device: drawing
    a tiny model takes ten times as long as copying it."""
    key = (*key, torch.get_default_dtype(), torch.get_default_device())
    if key not in _made:
        _made[key] = build()
    return copy.deepcopy(_made[key])


def seeded(build, config, seed: int = 0):
    def drawn():
        torch.manual_seed(seed)
        return build(config).eval()

    with torch.random.fork_rng():
        return copied(drawn, build, repr(vars(config)), seed)


def llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    return seeded(LlamaForCausalLM, llama_config(**changes), seed)


def llama_classifier(seed: int = 0, num_labels: int = 1, **changes):
    config = llama_config(num_labels=num_labels, **changes)
    return seeded(LlamaForSequenceClassification, config, seed)


def _gpt2_config(**changes) -> GPT2Config:
    return GPT2Config(
        vocab_size=260, n_positions=128, n_embd=64, n_layer=2, n_head=2, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2, pad_token_id=3, **changes,
    )  # fmt: skip


def gpt2(seed: int = 0, **changes) -> GPT2LMHeadModel:
    return seeded(GPT2LMHeadModel, _gpt2_config(**changes), seed)


def gpt2_classifier(seed: int = 0) -> GPT2ForSequenceClassification:
    return seeded(GPT2ForSequenceClassification, _gpt2_config(num_labels=1), seed)


def bert_classifier(seed: int = 0, num_labels: int = 2) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=260, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=128, num_labels=num_labels,
        initializer_range=0.3, pad_token_id=3,
    )  # fmt: skip
    return seeded(BertForSequenceClassification, config, seed)


def save(folder: Path, model, tokenizer) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def padded(rows: list[list[int]], *, left: bool = False, filler: int = 3, extra: int = 0):
    """(ids, mask) of unequal rows, padded on one side, `extra` positions more than needed."""
    length = max(map(len, rows)) + extra
    ids = torch.full((len(rows), length), filler)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(length - len(row), length) if left else slice(0, len(row))
        ids[i, place] = torch.tensor(row)
        mask[i, place] = True
    return ids, mask


def build_llama():
    return llama(), byte_tokenizer()


def build_random_llama():
    """Weights from whatever torch's random state is, as a user's function might do."""
    return LlamaForCausalLM(llama_config()), byte_tokenizer()


def build_classifier():
    return llama_classifier(), byte_tokenizer()


def build_nothing():
    return llama()


NOT_A_FUNCTION = 3
