from __future__ import annotations

import pytest
import torch

from rllib_llm.envs.frozen_models import RewardModelScorer
from rllib_llm.envs.judges.rewards import RewardBatch, RewardSum, RewardTerm
from rllib_llm.modules.sequence_scores import write_score_normalization
from rllib_llm.shared.errors import Problems
from tests import tiny_models as tiny

TOKENIZER = tiny.byte_tokenizer()
EOS = 2
PROMPTS = ["How was it?", "Go", "A longer prompt, this one."]
COMPLETIONS = [" Good.", " on and on", "!"]
FINISHED = [True, False, True]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("judge"), tiny.llama_classifier(), TOKENIZER)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    """The same judge with another tokenizer."""
    tokenizer = tiny.byte_tokenizer(reverse=True)
    return tiny.save(tmp_path_factory.mktemp("other"), tiny.llama_classifier(), tokenizer)


def rows(tokenizer=TOKENIZER) -> list[list[int]]:
    """Prompt and completion as ids, EOS where the completion ended by itself."""
    return [
        tokenizer(prompt + completion)["input_ids"] + [EOS] * finished
        for prompt, completion, finished in zip(PROMPTS, COMPLETIONS, FINISHED, strict=True)
    ]


def tensors(filler: int = 3, extra: int = 0):
    prompts = [TOKENIZER(prompt)["input_ids"] for prompt in PROMPTS]
    completions = [row[len(prompt) :] for row, prompt in zip(rows(), prompts, strict=True)]
    left = tiny.padded(prompts, left=True, filler=filler, extra=extra)
    return (*left, *tiny.padded(completions, filler=filler, extra=extra))


@torch.no_grad()
def expected(token_rows: list[list[int]], model=None) -> list[float]:
    """transformers' own scores of single texts, which need no padding; no pad id to search for."""
    model = model or tiny.llama_classifier(pad_token_id=None)
    return [model(torch.tensor([row])).logits[0, 0].item() for row in token_rows]


# --- the policy's tokenizer: token ids -----------------------------------------------------


@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
@pytest.mark.parametrize(("filler", "extra"), [(3, 0), (EOS, 0), (EOS, 6), (9, 3)])
def test_scores_of_token_ids_whatever_pads_them(folder, batch_tokens, filler, extra):
    scorer = RewardModelScorer(folder, tokenizer=TOKENIZER, batch_tokens=batch_tokens)
    assert scorer.wants_tokens
    scores = scorer(*tensors(filler, extra))
    assert scores.dtype == torch.float32
    assert scores.tolist() == pytest.approx(expected(rows()), abs=2e-5)


def test_a_judge_whose_pad_token_is_eos_reads_the_completions_eos(tmp_path):
    tokenizer = tiny.byte_tokenizer(pad="</s>")
    model = tiny.llama_classifier()
    model.config.pad_token_id = EOS
    path = tiny.save(tmp_path, model, tokenizer)
    scorer = RewardModelScorer(path, tokenizer=tokenizer)
    assert scorer.wants_tokens
    assert scorer(*tensors(EOS)).tolist() == pytest.approx(expected(rows()), abs=2e-5)
    cut = [row[:-1] if row[-1] == EOS else row for row in rows()]
    assert scorer(*tensors(EOS)).tolist() != pytest.approx(expected(cut), abs=1e-3)


def test_nothing_of_it_can_be_trained(folder):
    scorer = RewardModelScorer(folder, tokenizer=TOKENIZER)
    with torch.enable_grad():
        assert not scorer(*tensors()).requires_grad
    assert not any(parameter.requires_grad for parameter in scorer.model.parameters())


def test_too_long_rows_lose_their_beginning_and_are_counted(folder):
    scorer = RewardModelScorer(folder, tokenizer=TOKENIZER, max_length=12)
    with pytest.warns(UserWarning, match="max_length=12 and lose their beginning"):
        scores = scorer(*tensors())
    # All three of 1+11+6+1, 1+2+10 and 1+26+1+1 tokens are too long; BOS and the last 11 stay.
    shortened = [[1, *row[-11:]] for row in rows()]
    assert scores.tolist() == pytest.approx(expected(shortened), abs=2e-5)
    assert scorer.metrics() == {"num_truncated": 3.0}


# --- another tokenizer: texts --------------------------------------------------------------


def test_another_tokenizer_reads_the_same_texts(other_folder):
    scorer = RewardModelScorer(other_folder, tokenizer=TOKENIZER, append_eos=True)
    assert not scorer.wants_tokens
    ids, mask = tensors()[2:]
    completion_ids = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
    scores = scorer(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=completion_ids)
    wanted = expected(rows(tiny.byte_tokenizer(reverse=True)))
    assert scores.tolist() == pytest.approx(wanted, abs=2e-5)


def test_eos_is_appended_for_judges_of_the_reward_model_stage(tmp_path):
    tokenizer = tiny.byte_tokenizer(reverse=True)
    path = tiny.save(tmp_path, tiny.llama_classifier(), tokenizer)
    text = tokenizer("ab")["input_ids"]
    stranger = RewardModelScorer(path, tokenizer=TOKENIZER)
    assert stranger.score_texts(["a"], ["b"]).tolist() == pytest.approx(expected([text]), abs=2e-5)
    write_score_normalization(path, 0.0, 1.0)
    ours = RewardModelScorer(path, tokenizer=TOKENIZER)
    with_eos = expected([[*text, EOS]])
    assert ours.score_texts(["a"], ["b"]).tolist() == pytest.approx(with_eos, abs=2e-5)


def test_encoder_with_two_labels_gives_log_odds(tmp_path):
    tokenizer = tiny.byte_tokenizer(tiny.ENCODER_SPECIALS, pad="[PAD]")
    model = tiny.bert_classifier()
    scorer = RewardModelScorer(
        tiny.save(tmp_path, model, tokenizer), tokenizer=TOKENIZER, template="pair"
    )
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = torch.tensor([tokenizer(prompt, completion)["input_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0]
        wanted = (logits[1] - logits[0]).item()
        score = scorer.score_texts([prompt], [completion]).item()
        assert score == pytest.approx(wanted, abs=1e-4)


def test_template_makes_it_read_texts(folder):
    scorer = RewardModelScorer(folder, tokenizer=TOKENIZER, template="{completion}")
    assert not scorer.wants_tokens
    wanted = expected([TOKENIZER(text)["input_ids"] for text in COMPLETIONS])
    assert scorer.score_texts(PROMPTS, COMPLETIONS).tolist() == pytest.approx(wanted, abs=2e-5)


# --- as a reward function ------------------------------------------------------------------


def test_reward_sum_calls_it_either_way(folder, other_folder):
    prompt_ids, prompt_mask, completion_ids, completion_mask = tensors()
    batch = RewardBatch(
        prompt_ids, prompt_mask, completion_ids, completion_mask, PROMPTS, COMPLETIONS,
        {"answer": ["x"] * 3},
    )  # fmt: skip
    ours = RewardModelScorer(folder, tokenizer=TOKENIZER)
    other = RewardModelScorer(other_folder, tokenizer=TOKENIZER, append_eos=True)
    rewards = RewardSum([RewardTerm(ours, 1.0, "ours"), RewardTerm(other, 0.5, "other")])
    judged = rewards(batch)
    assert judged.components["ours"].tolist() == pytest.approx(expected(rows()), abs=2e-5)
    other_rows = rows(tiny.byte_tokenizer(reverse=True))
    assert judged.components["other"].tolist() == pytest.approx(expected(other_rows), abs=2e-5)
    assert torch.allclose(
        judged.scores, judged.components["ours"] + 0.5 * judged.components["other"]
    )


# --- normalisation -------------------------------------------------------------------------


def test_normalisation_is_read_given_or_left_out(tmp_path):
    path = tiny.save(tmp_path, tiny.llama_classifier(), TOKENIZER)
    write_score_normalization(path, 2.0, 4.0)
    raw = torch.tensor(expected(rows()))
    for setting, mean, std in ((None, 2.0, 4.0), (True, 2.0, 4.0), (False, 0, 1), ([1, 3], 1, 3)):
        scores = RewardModelScorer(path, tokenizer=TOKENIZER, normalize=setting)(*tensors())
        torch.testing.assert_close(scores, (raw - mean) / std, atol=2e-5, rtol=0)


# --- quantisation and drift ----------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["bf16", "int8", "nf4"])
def test_quantised_judge_reports_its_drift(folder, quantization):
    scorer = RewardModelScorer(
        folder, tokenizer=TOKENIZER, quantization=quantization, measure_drift=3
    )
    largest = (scorer(*tensors()) - torch.tensor(expected(rows()))).abs().max().item()
    drift = scorer.metrics()
    assert set(drift) == {"drift/rank_corr", "drift/max_abs", "num_truncated"}
    assert drift["drift/max_abs"] == pytest.approx(largest, abs=2e-5)
    assert 0 < largest < (1.0 if quantization == "nf4" else 0.1)


# --- bad input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"normalize": True}, "normalize=True must be .mean, std. or false"),
        ({"normalize": [1.0]}, r"normalize=\[1.0\] must be \(mean, std\)"),
        ({"normalize": (0.0, 0.0)}, "standard deviation above 0"),
        ({"max_length": 999}, "max_length=999 must be at least 1 and at most 128"),
        ({"max_length": 0}, "max_length=0"),
        ({"batch_tokens": 0}, "batch_tokens=0"),
        ({"quantization": "int3"}, "quantization='int3' must be one of"),
        ({"template": "no places"}, "template='no places'"),
        ({"measure_drift": 1.5}, "measure_drift=1.5 must be a whole number"),
    ],
)
def test_bad_settings(folder, settings, message):
    with pytest.raises(ValueError, match=message):
        RewardModelScorer(folder, tokenizer=TOKENIZER, **settings)


def test_bad_models(tmp_path):
    with pytest.raises(Problems, match="no config.json"):
        RewardModelScorer(tmp_path)
    lm = tiny.save(tmp_path / "lm", tiny.llama(), TOKENIZER)
    with pytest.raises(Problems, match="a sequence classifier is wanted here"):
        RewardModelScorer(lm)
    three = tiny.save(tmp_path / "three", tiny.llama_classifier(num_labels=3), TOKENIZER)
    with pytest.raises(ValueError, match="label=None must be one of the classifier's labels"):
        RewardModelScorer(three)
