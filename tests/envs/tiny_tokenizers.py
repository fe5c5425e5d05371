"""Small tokenizers made on the spot, each with one habit of real ones."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "red", "big", "good", "bad", "and"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def word_tokenizer(
    *, bos: bool = False, eos_added: bool = False, chat: bool = False, pad: bool = True
) -> PreTrainedTokenizerFast:
    """One token for each word, marked in front as SentencePiece does ("▁cat"), so that decoding
    drops the space before the first word. `eos_added`: it puts EOS behind every text."""
    specials = ["<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>"]
    vocabulary = {token: i for i, token in enumerate(specials)}
    for word in WORDS:
        vocabulary["▁" + word] = len(vocabulary)
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    if bos or eos_added:
        template = ("<bos> " if bos else "") + "$A" + (" <eos>" if eos_added else "")
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<bos>", 1), ("<eos>", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>" if pad else None,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE if chat else None,
    )
