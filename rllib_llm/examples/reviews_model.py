"""The model of the reviews, made on the spot: a byte-pair tokenizer and a small untrained Llama."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rllib_llm.examples.characters import small_llama
from rllib_llm.examples.reviews_grammar import pretraining_texts

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
ALPHABET = [*string.ascii_letters, *string.digits, *".,!?'"]  # so that plain English has no <unk>
TOKENIZER_TEXTS = 2000
MAX_POSITIONS = 128


def build_tokenizer(vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Return a byte-pair tokenizer of `vocab_size` tokens, trained on the grammar's own texts.

    Pad, BOS, EOS and unknown are four tokens of their own. BOS is put before every text encoded
    with special tokens, EOS never. Decoding gives back the text to the letter.
    """
    bpe = Tokenizer(models.BPE(unk_token=UNK))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    specials = [PAD, BOS, EOS, UNK]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=ALPHABET,
        show_progress=False,
    )  # fmt: skip
    texts = (row["text"] for row in pretraining_texts(TOKENIZER_TEXTS, seed=0))
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, specials.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK,
        padding_side="left", model_max_length=MAX_POSITIONS, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_model(
    seed: int = 0, vocab_size: int = 512, **size: int
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return an untrained Llama of about one million parameters with its tokenizer, in a second.

    Equal arguments give equal weights and the same tokenizer; the global random state is kept.
    size: see `small_llama`.
    """
    usual = {"hidden_size": 192, "intermediate_size": 512, "max_len": MAX_POSITIONS}
    return small_llama(
        build_tokenizer(vocab_size),
        seed,
        **{**usual, **size},
        tie_word_embeddings=False,
        # Wide initial weights and slow rotations: a shallow model on short texts learns the
        # grammar in about half the steps that the usual 0.02 and 10 000 take.
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
