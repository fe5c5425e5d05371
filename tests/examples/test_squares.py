from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from rllib_llm.data.image_prompts import ImagePrompts
from rllib_llm.examples import squares
from rllib_llm.examples.squares import COLOURS, build_model, correct, rows
from rllib_llm.modules.rl_modules import CausalLMModule
from rllib_llm.modules.tokenizer import load_tokenizer

MODEL = "rllib_llm.examples.squares.build_model"


def sizes(image) -> dict[str, int]:
    """Pixels of each colour."""
    pixels = np.asarray(image)
    return {name: int((pixels == rgb).all(axis=-1).sum()) for name, rgb in COLOURS.items()}


def test_the_answer_is_the_colour_with_more_pixels():
    made = rows(200, seed=1)
    for row in made:
        found = sizes(row["image"])
        assert row["answer"] == max(found, key=found.__getitem__)
        # Squares of different sizes, both whole: two of them share no pixel.
        sides = [number**0.5 for number in found.values()]
        assert all(side == int(side) and 3 <= side <= 11 for side in sides)
        assert abs(sides[0] - sides[1]) >= 3
    shares = [row["answer"] for row in made].count("red") / len(made)
    assert shares == pytest.approx(0.5, abs=0.1)  # three standard deviations of 200 coins
    solved = rows(2, seed=1, solved=True)[1]
    assert solved["completion"][0]["content"] == made[1]["answer"]
    assert solved["image"].tobytes() == made[1]["image"].tobytes()  # of seed and index alone


def test_the_reward_is_of_the_whole_answer():
    said = [[{"role": "assistant", "content": text}] for text in ("red", "blue", "redr", "")]
    assert correct(said, answer=["red"] * 4) == [1, 0, 0, 0]


def test_the_model_is_a_function_of_its_seed_and_reads_images():
    (one, processor), (two, _), (three, _) = (build_model(seed) for seed in (0, 0, 1))
    weights = [next(model.parameters()) for model in (one, two, three)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    prompts = ImagePrompts(MODEL, load_tokenizer(MODEL))
    row = rows(1)[0]
    ids, seen, text = prompts.prompt(row["prompt"], [row["image"]])
    assert text == f"<user><image>{squares.QUESTION}<eos><assistant>"
    # 24 x 24 pixels in patches of 6 x 6 are 16 tokens.
    assert ids.count(prompts.image_token_id) == 16
    assert seen["pixel_values"].shape == (1, 3, 24, 24)
    whole = processor(text=[text], images=[[row["image"]]], add_special_tokens=False)
    assert whole["input_ids"][0] == ids


def test_the_processor_of_a_function_is_saved_with_the_model(tmp_path):
    policy = CausalLMModule(model_config={
        "pretrained_model": MODEL, "dtype": "float32", "temperature": 1.0, "critic": "none",
    })  # fmt: skip
    policy.export_pretrained(tmp_path)
    row = rows(1)[0]
    (_, own), read = build_model(), AutoProcessor.from_pretrained(tmp_path)
    given = {"text": ["<image>?"], "images": [[row["image"]]], "return_tensors": "pt"}
    first, second = own(**given), read(**given)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert load_tokenizer(tmp_path).chat_template == load_tokenizer(MODEL).chat_template
