"""Rows that show images, as the processor of a tiny Gemma 3 reads them."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Gemma3ImageProcessor, Gemma3Processor

from rllib_llm import DPOConfig, GRPOConfig, RewardModelConfig, SFTConfig
from rllib_llm.data.image_prompts import ImagePrompts
from rllib_llm.data.preferences import PairSource, PromptedPairSource
from rllib_llm.data.texts import TextSource
from rllib_llm.examples.characters import character_tokenizer
from rllib_llm.modules.images import image_rows
from rllib_llm.modules.tokenizer import load_tokenizer
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests import tiny_models
from tests.learners.tiny_learners import build, module_of, update
from tests.modules.test_multimodal import tiny

SPECIAL = ("<pad>", "</s>", "<unk>", "<image>", "<boi>", "<eoi>", "[u]", "[a]")
TEMPLATE = (
    "{% for m in messages %}{{ '[u]' if m.role == 'user' else '[a]' }}{% for part in m.content %}"
    "{{ '<boi>' if part.type == 'image' else part.text }}{% endfor %}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("gemma3"))


def saved(folder):
    """The folder of a tiny Gemma 3 whose images are four tokens."""
    tokenizer = character_tokenizer(
        "0123abc? \n", special=SPECIAL, extra_special_tokens={
            "image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>",
        },
    )  # fmt: skip
    model = tiny("gemma3")
    model.config.image_token_id = model.config.image_token_index = SPECIAL.index("<image>")
    model.save_pretrained(folder)
    size = {"height": 28, "width": 28}
    Gemma3Processor(
        Gemma3ImageProcessor(size=size), tokenizer, TEMPLATE, image_seq_length=4
    ).save_pretrained(folder)
    return folder


def image(shade: int) -> Image.Image:
    return Image.new("RGB", (28, 28), (shade, 0, 255 - shade))


def source(folder, rows, **settings) -> TextSource:
    return TextSource(
        rows, tokenizer=load_tokenizer(folder), max_length=64, shuffle=False, model=str(folder),
        **settings,
    )  # fmt: skip


def asked(question: str, *shown):
    parts = [{"type": "image", **each} for each in shown]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


ANSWER = {"role": "assistant", "content": "ab"}


@pytest.mark.parametrize(
    "row",
    [
        {"image": image(9), "messages": [{"role": "user", "content": "c?"}, ANSWER]},
        {"images": [image(9)], "messages": [asked("c?", {}), ANSWER]},
        {"messages": [asked("c?", {"image": image(9)}), ANSWER]},
        {"image": image(9), "prompt": [{"role": "user", "content": "c?"}], "completion": [ANSWER]},
    ],
    ids=["column", "column and place", "part", "prompt and completion"],
)
def test_a_chat_is_read_as_the_processor_reads_it(row, folder):
    processor, tokenizer = AutoProcessor.from_pretrained(folder), load_tokenizer(folder)
    whole = processor(
        text=["[u]<boi>c?[a]ab</s>"], images=[[image(9)]], return_tensors="pt",
        add_special_tokens=False,
    )  # fmt: skip
    batch = source(folder, [row]).batch(0, 1)
    assert torch.equal(batch[columns.INPUT_IDS], whole["input_ids"])
    assert torch.equal(image_rows(batch)[0]["pixel_values"], whole["pixel_values"])
    learnt = batch[columns.INPUT_IDS][batch[columns.LOSS_MASK]]
    assert tokenizer.convert_ids_to_tokens(learnt) == ["a", "b", "</s>"]


def test_a_text_shows_its_image_before_its_words_unless_it_says_where(folder):
    rows = [
        {"image": image(9), "prompt": "c?", "completion": "a"},
        {"images": [image(9), image(8)], "prompt": "c<boi>a<boi>?", "completion": "a"},
        {"image": None, "prompt": "c?", "completion": "a"},
    ]
    batch = source(folder, rows).batch(0, 3)
    tokens = load_tokenizer(folder).convert_ids_to_tokens
    first, second, third = (tokens(ids[m]) for ids, m in zip(
        batch[columns.INPUT_IDS], batch[columns.ATTENTION_MASK], strict=True
    ))  # fmt: skip
    # The processor puts empty lines around an image, which this tokenizer does not know.
    one = ["<unk>", "<boi>", *["<image>"] * 4, "<eoi>", "<unk>"]
    assert first == [*one, "c", "?", "a", "</s>"]
    assert second == ["c", *one, "a", *one, "?", "a", "</s>"]
    assert third == ["c", "?", "a", "</s>"]
    assert [len(row.get("pixel_values", ())) for row in image_rows(batch)] == [1, 2, 0]


def test_image_tokens_are_never_learnt(folder):
    row = {"image": image(9), "prompt": "c?", "completion": "a"}
    batch = source(folder, [row], loss_on="all").batch(0, 1)
    learnt = batch[columns.INPUT_IDS][batch[columns.LOSS_MASK]]
    tokens = load_tokenizer(folder).convert_ids_to_tokens(learnt)
    # Nothing predicts the first.
    assert tokens == ["<boi>", "<eoi>", "<unk>", "c", "?", "a", "</s>"]


@pytest.mark.parametrize("settings", [{"max_length": 8}])
def test_a_prompt_that_leaves_no_room_is_refused(folder, settings):
    rows = [{"image": image(9), "prompt": "c?", "completion": "a"}]
    short = TextSource(
        rows, tokenizer=load_tokenizer(folder), shuffle=False, model=str(folder), **settings
    )
    with pytest.raises(Problems) as error:
        short.batch(0, 1)
    assert "prompt" in error.value.problem.name


def test_a_model_of_text_refuses_images(tmp_path):
    tiny_models.save(tmp_path, tiny_models.llama(), tiny_models.byte_tokenizer())
    with pytest.raises(Problems) as error:
        ImagePrompts(str(tmp_path), load_tokenizer(tmp_path))
    assert error.value.problem.name == "image"


@pytest.mark.parametrize("train_vision", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sft_learns_what_is_seen(train_vision, folder):
    """Two colours are told apart, which text alone cannot."""
    rows = [
        {"image": image(shade), "messages": [{"role": "user", "content": "c?"},
                                             {"role": "assistant", "content": word}]}
        for shade, word in ((0, "a"), (255, "b"))
    ]  # fmt: skip
    config = (
        SFTConfig()
        .language_model(model=str(folder), train_vision=train_vision)
        .training(data=rows, lr=1e-2, train_batch_size_per_learner=2, minibatch_size=2)
    )
    learner = build(config)
    tower = {n: t.clone() for n, t in module_of(learner).state_dict().items() if "vision" in n}
    batch = config.make_source(
        rows, tokenizer=config.load_tokenizer(), max_length=64, shuffle=False
    ).batch(0, 2)
    losses = [update(learner, batch)["loss/sft"] for _ in range(30)]
    # Of three tokens the first has one bit, which only the image tells.
    assert losses[-1] < 0.1 < losses[0]
    after = module_of(learner).state_dict()
    assert train_vision != all(torch.equal(t, after[name]) for name, t in tower.items())


def told_apart(config, rows, num_updates=30):
    """Losses of updates with all rows."""
    learner = build(config)
    batch = config.make_source(
        rows, tokenizer=config.load_tokenizer(), max_length=64, shuffle=False
    ).batch(0, len(rows))
    assert batch[columns.IMAGE_ROW].tolist() == [0, 1]
    (name,) = (n for n in update(learner, batch) if n.startswith("loss/"))
    return [update(learner, batch)[name] for _ in range(num_updates)]


def preferred(shade: int, better: str, worse: str, **changes):
    return {
        "image": image(shade), "prompt": [{"role": "user", "content": "c?"}],
        "chosen": [{"role": "assistant", "content": better}],
        "rejected": [{"role": "assistant", "content": worse}], **changes,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DPOConfig, RewardModelConfig])
def test_preferences_for_what_is_seen_are_learnt(kind, folder):
    rows = [preferred(0, "a", "b"), preferred(255, "b", "a")]
    config = kind().language_model(model=str(folder)).training(
        data=rows, lr=1e-2, train_batch_size_per_learner=2, minibatch_size=2
    )
    losses = told_apart(config, rows)
    # Without the images both rows ask for the opposite of the other: ln 2 at best.
    assert losses[-1] < 0.1 < 0.5 < losses[0]


@pytest.mark.slow
def test_kto_compares_with_the_prompts_and_images_of_others(folder):
    rows = [preferred(0, "a", "b"), preferred(255, "b", "a")]
    config = DPOConfig().language_model(model=str(folder)).training(
        data=rows, lr=1e-2, train_batch_size_per_learner=2, minibatch_size=2, loss_type="kto",
        ref_kl_coeff=1.0,
    )  # fmt: skip
    losses = told_apart(config, rows)
    # Of two texts that are asked for as often as not the loss is 1/2 at best.
    assert losses[-1] < 0.1 < 0.4 < losses[0]


@pytest.mark.parametrize(
    "row",
    [
        preferred(9, "ab", "b"),
        preferred(9, "ab", "b", prompt="c?"),
        preferred(9, "ab", "b", image=None, prompt=[asked("c?", {"image": image(9)})]),
        {name: [asked("c?", {"image": image(9)}), {"role": "assistant", "content": text}]
         for name, text in (("chosen", "ab"), ("rejected", "b"))},
    ],
    ids=["column", "text", "part", "no prompt"],
)
def test_pairs_are_read_as_the_processor_reads_them(row, folder):
    given = {"tokenizer": load_tokenizer(folder), "max_length": 64, "model": str(folder)}
    if isinstance(row.get("prompt"), str):
        row = {**row, "chosen": "ab", "rejected": "b"}
    batch = PromptedPairSource([row], **given).batch(0, 1)
    whole = PairSource([row], **given).batch(0, 1)
    processor = AutoProcessor.from_pretrained(folder)
    begun = "<boi>c?" if isinstance(row.get("prompt"), str) else "[u]<boi>c?[a]"
    for name, said in (("chosen", "ab"), ("rejected", "b")):
        text = processor(
            text=[f"{begun}{said}</s>"], images=[[image(9)]], return_tensors="pt",
            add_special_tokens=False,
        )  # fmt: skip
        ids = [*batch[columns.PROMPT_IDS][0], *batch[f"{name}_ids"][0][batch[f"{name}_mask"][0]]]
        assert torch.equal(torch.stack(ids), text["input_ids"][0])
        assert torch.equal(whole[f"{name}_ids"][0][whole[f"{name}_mask"][0]], text["input_ids"][0])
        assert batch[f"{name}_loss_mask"].sum() == len(said) + 1
    for found in (batch, whole):
        assert torch.equal(image_rows(found)[0]["pixel_values"], text["pixel_values"])


def says_shade(completions, shade, **_):
    """1 where the first letter is "a" for black, "b" for white."""
    return [
        float(text[:1] == ("a" if dark == 0 else "b"))
        for text, dark in zip(completions, shade, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_grpo_learns_what_is_seen(folder):
    rows = [{"image": image(shade), "prompt": "c?", "shade": shade} for shade in (0, 255)]
    rows += [{"image": None, "prompt": "c?", "shade": 0}]  # one of text among them
    algorithm = (
        GRPOConfig()
        .language_model(model=str(folder))
        .prompts(data=rows, max_prompt_len=32)
        .rewards(functions=[says_shade])
        .sampling(max_new_tokens=1, num_completions=16)
        .training(lr=1e-2, train_batch_size_per_learner=96, minibatch_size=48, ref_kl_coeff=0.01)
        .build_algo()
    )
    scores = [algorithm.train()["objective"]["scores"] for _ in range(25)]
    algorithm.stop()
    assert sum(scores[-3:]) / 3 > 0.8 > scores[0]
