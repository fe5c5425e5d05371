"""Which of two coloured squares is larger: the smallest task that only a model that sees can solve.

An image shows a red and a blue square; the right completion is the colour of the larger one.
Everything is generated: `build_model` makes a small LLaVA with random weights, its character
tokenizer and its processor, `rows` the images, with the words to learn from or without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from rllib_llm.data.rows import MadeRows
from rllib_llm.examples.characters import character_tokenizer

QUESTION = "larger?"
COLOURS = {"red": (230, 40, 40), "blue": (40, 40, 230)}
SIDE = 24  # pixels of an image
_PATCH = 6
# Pixels of a square's side, which has a half of the image for itself, and how much two differ.
_LEAST, _MOST, _APART = 3, 11, 3
_SPECIAL = ("<pad>", "<eos>", "<unk>", "<image>", "<user>", "<assistant>")
_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Squares(MadeRows):
    """Rows {"image", "prompt", "answer"}, each a function of seed and index. `solved`: with
    "completion" to learn from in the answer's place."""

    def __init__(self, num_rows: int, seed: int, solved: bool) -> None:
        super().__init__(num_rows)
        self._seed, self._solved = seed, solved
        self.column_names = ("image", "prompt", "completion" if solved else "answer")

    def make(self, index: int) -> dict[str, Any]:
        """The row at `index`: sizes, colours, halves and places are drawn."""
        from PIL import Image  # few examples show something

        draw = np.random.default_rng([self._seed, index])
        smaller = int(draw.integers(_LEAST, _MOST - _APART + 1))
        sizes = draw.permutation([smaller, int(draw.integers(smaller + _APART, _MOST + 1))])
        names = draw.permutation(list(COLOURS)).tolist()
        pixels = np.full((SIDE, SIDE, 3), 255, dtype=np.uint8)
        for half, (size, name) in enumerate(zip(sizes, names, strict=True)):
            top, left = draw.integers(SIDE - size + 1), draw.integers(SIDE // 2 - size + 1)
            left += half * SIDE // 2
            pixels[top : top + size, left : left + size] = COLOURS[name]
        answer = names[int(sizes.argmax())]
        said = [{"role": "assistant", "content": answer}] if self._solved else answer
        asked = [{"role": "user", "content": QUESTION}]
        values = (Image.fromarray(pixels), asked, said)
        return dict(zip(self.column_names, values, strict=True))


def rows(num_rows: int = 2000, seed: int = 0, solved: bool = False) -> Squares:
    """A data set for a YAML file to name; see `Squares`."""
    return Squares(num_rows, seed, solved)


def correct(
    completions: Sequence[list[dict[str, str]]], answer: Sequence[str], **_: Any
) -> list[float]:
    """1.0 for each completion that is the answer, else 0.0."""
    pairs = zip(completions, answer, strict=True)
    return [float(said[-1]["content"] == right) for said, right in pairs]


def build_model(
    seed: int = 0, max_len: int = 64, hidden_size: int = 48
) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """A LLaVA with random weights, drawn with `seed`, and its processor, which holds the tokenizer;
    an image is 16 tokens."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = character_tokenizer(
        "".join(sorted(set(QUESTION).union(*COLOURS))), special=_SPECIAL,
        extra_special_tokens={"image_token": "<image>", "u": "<user>", "a": "<assistant>"},
        chat_template=_TEMPLATE,
    )  # fmt: skip
    processor = LlavaProcessor(
        CLIPImageProcessorPil(do_resize=False, do_center_crop=False), tokenizer,
        patch_size=_PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    )  # fmt: skip
    shape = {
        "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }  # fmt: skip
    text = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=max_len, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **shape,
    )  # fmt: skip
    config = LlavaConfig(
        text_config=text, image_token_index=_SPECIAL.index("<image>"),
        vision_config=CLIPVisionConfig(image_size=SIDE, patch_size=_PATCH, **shape),
        vision_feature_layer=-1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return LlavaForConditionalGeneration(config).eval(), processor
