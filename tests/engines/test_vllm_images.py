"""vLLM reads the images of prompts: the tokens and log-probs of our own decode loop."""

from __future__ import annotations

import pytest
import torch
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

pytest.importorskip(
    "vllm", reason="vLLM has an environment of its own: `make test-vllm` installs and tests it"
)

from rllib_llm.engines.engine import generate  # noqa: E402
from rllib_llm.engines.params import SamplingParams  # noqa: E402
from rllib_llm.engines.vllm_engine import VLLMEngine  # noqa: E402
from rllib_llm.envs import rlhf  # noqa: E402
from rllib_llm.examples import squares  # noqa: E402
from rllib_llm.examples.characters import character_tokenizer  # noqa: E402
from rllib_llm.modules.images import image_rows  # noqa: E402
from rllib_llm.rollouts.policy import EnginePolicy, Generation  # noqa: E402
from rllib_llm.shared import columns  # noqa: E402

pytestmark = pytest.mark.vllm

MODEL = f"{__name__}.build_model"
SPECIAL = ("<pad>", "<eos>", "<unk>", "<image>", "<fake_token_around_image>", "<global-img>",
           "<end_of_utterance>", "<user>", "<assistant>")  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}<assistant>"
)


def build_model():
    """An Idefics 3, which vLLM loads without torchvision, whose images are four tokens."""
    tokenizer = character_tokenizer(
        "\n abdelrgu?", special=SPECIAL, chat_template=TEMPLATE,
        additional_special_tokens=list(SPECIAL[3:]),
    )  # fmt: skip
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 28}, max_image_size={"longest_edge": 28}, do_image_splitting=False
    )
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    text = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": 1,
    }  # fmt: skip
    tower = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "initializer_range": 0.3,
    }  # fmt: skip
    config = Idefics3Config(
        text_config=text, vision_config=tower, image_token_id=SPECIAL.index("<image>"),
        scale_factor=1, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Idefics3ForConditionalGeneration(config).eval()
        with torch.no_grad():
            model.model.connector.modality_projection.proj.weight.normal_()
        return model, processor


def test_images_are_read_as_by_our_own_decode_loop():
    shown = [row["image"] for row in squares.rows(2)]
    words = [{"role": "user", "content": "larger?"}]
    env = rlhf.create({
        "model": MODEL, "max_prompt_len": 48, "shuffle": False,
        "prompts": [{"prompt": words, "images": images, "answer": "red"}
                    for images in ([shown[0]], [shown[1]], shown, [])],
        "reward_functions": ["rllib_llm.examples.squares.correct"],
    })  # fmt: skip
    prompts, _ = env.reset(options={"position": 0, "num_prompts": 4})
    model, _ = build_model()
    params = SamplingParams(0, (1,), max_new_tokens=12, greedy=True)
    own = generate(
        model, prompts[columns.PROMPT_IDS], prompts[columns.PROMPT_MASK], params,
        images=image_rows(prompts),
    )  # fmt: skip
    engine = VLLMEngine(
        MODEL, kv_cache_memory_bytes=64 * 1024**2, enforce_eager=True, max_model_len=96,
        limit_mm_per_prompt={"image": 2},
    )  # fmt: skip
    try:
        # Towers are never published.
        weights = {f"model.{n}": t for n, t in model.state_dict().items() if "text_model" in n}
        engine.load({**weights, "model.lm_head.weight": model.lm_head.weight}, 0)
        asked = Generation(params, 1, 0, torch.arange(4))
        made = EnginePolicy(engine, MODEL).generate(prompts, asked)
    finally:
        engine.close()
    assert torch.equal(made[columns.COMPLETION_IDS], own.completion_ids)
    assert torch.equal(made[columns.COMPLETION_MASK], own.completion_mask)
    torch.testing.assert_close(
        made[columns.SAMPLER_LOGPROBS], own.logprobs, rtol=0, atol=1e-4
    )
    # What is seen makes a difference.
    assert len({*map(tuple, own.completion_ids.tolist())}) == 4
