"""Bias, penalties and min-p as settings of a row, against a sampler of a few plain lines."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rllib_llm.engines.engine import generate
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Noise, Row, uniform_noise
from rllib_llm.shared.errors import Problems
from tests.engines.test_torch_engine import (
    PARAMS,
    assert_sampled,
    engine,
    prompts,
    published,
    tiny_model,
    until_empty,
)
from tests.engines.tiny_generations import PAD, STOPS, continued
from tests.modules.tiny_models import VOCAB

ADJUSTED = [
    replace(PARAMS, frequency_penalty=1.5),
    replace(PARAMS, presence_penalty=-1.0, temperature=0.7),
    replace(PARAMS, repetition_penalty=1.8, min_p=0.05),
    replace(PARAMS, greedy=True, repetition_penalty=0.6, frequency_penalty=0.4),
    replace(PARAMS, logit_bias={50: 4.0, 7: -100.0}, presence_penalty=0.5, top_k=9),
]


def plain(model, row: Row) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of a row, a full pass for each, in Python's own numbers."""
    params, text = row.params, list(row.token_ids)
    start = len(text) - row.num_sampled
    noise = uniform_noise(row.noise.seed, [row.noise.row], params.max_new_tokens)[0]
    logprobs = []
    while len(text) - start < params.max_new_tokens:
        logits = model(torch.tensor([text])).logits[0, -1].tolist()
        for token, value in dict(params.logit_bias).items():
            logits[token] += value
        for token in set(text):
            r = params.repetition_penalty
            logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
        sampled = text[start:]
        for token in set(sampled):
            logits[token] -= params.frequency_penalty * sampled.count(token)
            logits[token] -= params.presence_penalty
        scores = (torch.tensor(logits, dtype=torch.float64) / params.temperature).log_softmax(-1)
        weights = scores.exp()
        weights[weights < params.min_p * weights.max()] = 0
        if params.top_k:
            weights[weights < weights.topk(params.top_k).values[-1]] = 0
        if len(sampled) < params.min_new_tokens:
            weights[list(params.stop_token_ids)] = 0
        cdf = weights.cumsum(0)
        drawn = int(torch.searchsorted(cdf, noise[len(sampled)].double() * cdf[-1], right=True))
        token = int(scores.argmax()) if params.greedy else drawn
        text.append(token)
        logprobs.append(float(scores[token]))
        if token in params.stop_token_ids:
            break
    return text[len(row.token_ids) :], logprobs


def rows() -> list[Row]:
    held = enumerate(zip(prompts(), ADJUSTED, strict=True))
    return [Row(f"row {i}", *each, noise=Noise(1, i)) for i, each in held]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.mark.parametrize("looks", [1, 8])
def test_rows_are_sampled_as_their_settings_say(model, looks):
    ours = engine(model, steps_between_looks=looks)
    texts = enumerate(prompts())
    others = [Row(f"plain {i}", text, PARAMS, noise=Noise(2, i)) for i, text in texts]
    ours.add([row for pair in zip(rows(), others, strict=True) for row in pair])
    found = until_empty(ours)
    for row in [*rows(), *others]:
        assert_sampled(found[row.id], plain(model, row))
    # The penalties changed what is sampled.
    assert any(
        found[row.id].token_ids != plain(model, replace(row, params=PARAMS))[0] for row in rows()
    )


def test_rows_that_come_later_take_the_places_of_those_that_left(model):
    ours, found = engine(model, max_rows=2), {}
    for turn in range(3):
        again = [replace(row, id=(turn, row.id), noise=Noise(turn, 0)) for row in rows()]
        ours.add(again)
        found |= until_empty(ours)
        for row in again:
            assert_sampled(found[row.id], plain(model, row))


@pytest.mark.parametrize("num_steps", [1, 4])
def test_what_was_sampled_before_counts_as_sampled(model, num_steps):
    """Aborted and added again, here with what was sampled behind the prompt."""
    ours = engine(model)
    ours.add(rows())
    ended = {each.id: each for _ in range(num_steps) for each in ours.step()}
    parts = ours.abort([row.id for row in rows()])
    by_id = {row.id: row for row in rows()}
    ours.add([continued(by_id[part.id], part) for part in parts])
    rest = until_empty(ours)
    for part in parts:
        joined = [*part.token_ids, *rest[part.id].token_ids]
        assert joined == plain(model, by_id[part.id])[0]
    assert len(ended) + len(parts) == len(ADJUSTED)


def test_rows_that_are_computed_again_keep_their_counts(model):
    ours = engine(model)
    ours.add(rows())
    ended = [each for _ in range(3) for each in ours.step()]
    ours.load(published(model), 1, in_flight="recompute")
    found = until_empty(ours, ended)
    for row in rows():
        assert_sampled(found[row.id], plain(model, row))


def test_batches_of_completions_have_the_same_settings(model):
    (text, params), n = (prompts()[1], ADJUSTED[2]), 3
    ids = torch.tensor([text])
    noise = uniform_noise(1, range(n), params.max_new_tokens)
    out = generate(
        model, ids, torch.ones_like(ids, dtype=torch.bool), params, num_completions=n, noise=noise
    )
    for i in range(n):
        tokens, logprobs = plain(model, Row("row", text, params, noise=Noise(1, i)))
        assert out.completion_ids[i][out.completion_mask[i]].tolist() == tokens
        assert out.logprobs[i, : len(tokens)].tolist() == pytest.approx(logprobs, abs=1e-5)


def test_the_likeliest_tokens_are_those_with_the_penalties(model):
    params = replace(ADJUSTED[0], top_logprobs=3)
    row = Row("row", prompts()[0], params, noise=Noise(1, 0))
    ours = engine(model)
    ours.add([row])
    ended = until_empty(ours)["row"]
    for token, logprob, likeliest in zip(
        ended.token_ids, ended.logprobs, ended.likeliest, strict=True
    ):
        assert dict(likeliest).get(token, logprob) == logprob
        assert all(value >= logprob for i, value in likeliest if i != token) or token in dict(
            likeliest
        )


def test_tokens_that_the_model_does_not_have_are_refused_or_passed_over(model):
    ours = engine(model)
    with pytest.raises(Problems) as caught:
        ours.add([Row("row", [1], replace(PARAMS, logit_bias={VOCAB: 1.0}))])
    assert (caught.value.problem.name, caught.value.problem.value) == ("logit_bias", VOCAB)
    # A stop token that is never sampled: forbidding it must not end the engine.
    params = SamplingParams(PAD, (*STOPS, VOCAB + 5), max_new_tokens=4, min_new_tokens=4)
    ours.add([Row("row", [1], params)])
    assert until_empty(ours)["row"].num_tokens == 4
