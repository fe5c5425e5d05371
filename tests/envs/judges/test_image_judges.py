"""Reward models as judges of completions whose prompts show images."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoProcessor

from rllib_llm.data.preferences import PairSource
from rllib_llm.envs import rlhf
from rllib_llm.envs.frozen_models import RewardModelScorer
from rllib_llm.examples.characters import CHAT_TEMPLATE
from rllib_llm.modules.images import files_text
from rllib_llm.modules.reward_model_module import RewardModelModule
from rllib_llm.modules.sequence_scores import write_score_normalization
from rllib_llm.modules.tokenizer import load_tokenizer
from rllib_llm.shared import columns
from rllib_llm.shared.columns import pad_right
from tests import tiny_models
from tests.data.test_image_prompts import asked, image, saved
from tests.modules.test_images import images_read, module

QUESTION = [{"role": "user", "content": "c?"}]
SAID = ["ab", "b", "ab", "b"]  # the last is cut off


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def judge(folder, tmp_path_factory):
    """What the RewardModel stage saves of a scorer that sees."""
    scorer = module(folder, RewardModelModule, seed=0)
    with torch.no_grad():
        scorer.model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    scorer.export_pretrained(path := tmp_path_factory.mktemp("judge"))
    write_score_normalization(path, 0.0, 1.0)
    return path


def judged(folder, judge, rows):
    """The environment, and scores of two completions for each of two prompts."""
    env = rlhf.create({
        "model": str(folder), "prompts": rows, "max_prompt_len": 32, "max_completion_len": 4,
        "shuffle": False, "reward_model": judge, "num_envs": 2,
    })  # fmt: skip
    env.reset(options={"num_prompts": 2, "num_completions": 2})
    tokenizer = load_tokenizer(folder)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in SAID]
    ids = [row + [tokenizer.eos_token_id] for row in ids[:3]] + ids[3:]
    ids, mask = pad_right(ids, 0)
    actions = {columns.COMPLETION_IDS: ids, columns.COMPLETION_MASK: mask}
    return env, env.step(actions)[-1][columns.SCORES]


def own_scores(model, texts, shown):
    """transformers' scores of single texts with an image, or none."""
    processor = AutoProcessor.from_pretrained(model.config._name_or_path)
    scores = []
    for text, seen in zip(texts, shown, strict=True):
        images = {} if seen is None else {"images": [[seen]]}
        given = processor(text=[text], return_tensors="pt", add_special_tokens=False, **images)
        if seen is None:
            given.pop("token_type_ids", None)
        with torch.no_grad():
            states = model.model(**given).last_hidden_state[0, -1]
            scores.append(model.score(states).squeeze())
    return torch.stack(scores)


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_judge_sees_what_a_prompt_shows(is_chat, folder, judge):
    rows = [{"image": image(9), "prompt": QUESTION if is_chat else "c?"},
            {"image": image(200), "prompt": QUESTION if is_chat else "c?"}]  # fmt: skip
    env, scores = judged(folder, str(judge), rows)
    begun = "[u]<boi>c?[a]" if is_chat else "<boi>c?"
    texts = [begun + text + "</s>" * (i < 3) for i, text in enumerate(SAID)]
    shown = [image(9)] * 2 + [image(200)] * 2
    model = env.rewards.terms[0].function.model
    torch.testing.assert_close(scores, own_scores(model, texts, shown), rtol=1e-5, atol=1e-5)
    assert (scores[0] - scores[2]).abs() > 1e-4  # the same words about another image
    # As the stage that trained it read them.
    pair = {**rows[0], "chosen": SAID[0], "rejected": SAID[1]}
    if is_chat:
        pair |= {name: [{"role": "assistant", "content": pair[name]}]
                 for name in ("chosen", "rejected")}  # fmt: skip
    batch = PairSource(
        [pair], tokenizer=load_tokenizer(judge), max_length=64, model=str(judge)
    ).batch(0, 1)
    stage = module(judge, RewardModelModule, seed=0)
    stage.model.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = stage.forward_train(batch)[columns.SCORES]
    torch.testing.assert_close(scores[:2], expected, rtol=1e-5, atol=1e-5)


def test_each_image_is_read_once_and_rows_of_text_stand_beside_them(folder, judge):
    rows = [{"image": image(9), "prompt": "c?"}, {"image": None, "prompt": "c?"}]
    env, scores = judged(folder, {"models": [str(judge)] * 2}, rows)
    texts = ["<boi>c?ab</s>", "<boi>c?b</s>", "c?ab</s>", "c?b"]
    scorers = env.rewards.terms[0].function.scorers
    expected = own_scores(scorers[0].model, texts, [image(9)] * 2 + [None] * 2)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    counts = images_read(scorers[0].model)
    scorers[0](prompts=["c?"] * 2, completions=["a", "b"], image_files=[files_text([image(9)])] * 2)
    assert counts == [1]


def test_a_judge_of_text_reads_the_words(folder, tmp_path):
    """Also where it has the policy's tokenizer, and would read the tokens of images as words."""
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tiny_models.save(tmp_path, tiny_models.llama_classifier(), tokenizer)
    rows = [{"prompt": [asked("c?", {"image": image(shade)})]} for shade in (9, 200)]
    _, scores = judged(folder, {"model": str(tmp_path), "normalize": False}, rows)
    scorer = RewardModelScorer(tmp_path)
    words = [[{"role": "user", "content": "c?"}]] * 4
    expected = scorer(prompts=["c?"] * 4, completions=SAID, messages=words)
    torch.testing.assert_close(scores, expected)
