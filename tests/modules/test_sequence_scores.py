from __future__ import annotations

import pytest
import torch
from transformers import BartConfig, BartForSequenceClassification

from rllib_llm.modules.sequence_scores import label_index, sequence_scores
from rllib_llm.modules.trunk import reads_dense
from tests import tiny_models as tiny

EOS = 2
ROWS = [[1, 7, 8, EOS], [1, 9, 10, 11, 12, 13], [1, EOS, 20, 21, EOS], [1]]
BUILDS = [tiny.llama_classifier, tiny.gpt2_classifier, tiny.bert_classifier]


def alone(model, row: list[int], label: int | None = None) -> float:
    """The score of one text without any padding, as transformers gives it."""
    ids = torch.tensor([row])
    logits = model(ids, attention_mask=torch.ones_like(ids)).logits[0]
    return (logits[0] if len(logits) == 1 else logits[1] - logits[0]).item()


@torch.no_grad()
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("filler", [0, EOS, 3, 50])
def test_scores_do_not_depend_on_padding_nor_on_the_pad_id(build, filler):
    model = build()
    expected = [alone(model, row) for row in ROWS]
    for extra in (0, 5):
        ids, mask = tiny.padded(ROWS, filler=filler, extra=extra)
        assert sequence_scores(model, ids, mask).tolist() == pytest.approx(expected, abs=2e-5)


@torch.no_grad()
def test_eos_counts_where_the_pad_token_is_eos():
    # transformers itself reads the token before the first pad id from the right: with pad = EOS
    # that is the token before the text's own EOS.
    model = tiny.llama_classifier(pad_token_id=None)
    expected = alone(model, ROWS[0])
    model.config.pad_token_id = EOS
    ids, mask = tiny.padded(ROWS[:2], filler=EOS)
    assert sequence_scores(model, ids, mask)[0].item() == pytest.approx(expected, abs=2e-5)
    assert model(ids, attention_mask=mask.long()).logits[0, 0].item() != pytest.approx(expected)


def test_gradient_reaches_head_and_trunk():
    model = tiny.llama_classifier()
    sequence_scores(model, *tiny.padded(ROWS)).sum().backward()
    assert model.score.weight.grad.abs().sum() > 0
    assert model.model.embed_tokens.weight.grad[EOS].abs().sum() > 0


@torch.no_grad()
def test_several_labels_give_log_odds():
    model = tiny.llama_classifier(num_labels=3)
    ids, mask = tiny.padded(ROWS[1:2])
    logits = model(ids, attention_mask=mask.long()).logits[0]
    probability = logits.softmax(-1)[2]
    log_odds = (probability / (1 - probability)).log().item()
    assert sequence_scores(model, ids, mask, label=2).item() == pytest.approx(log_odds, abs=1e-4)


def test_which_label_is_the_positive_one():
    config = tiny.llama_config(num_labels=2)
    assert label_index(config) == 1
    assert label_index(config, 0) == 0
    config.id2label = {0: "POSITIVE", 1: "NEGATIVE"}
    assert label_index(config) == 0
    assert label_index(config, "negative") == 1
    with pytest.raises(ValueError, match="label='joy' must be one of.*POSITIVE"):
        label_index(config, "joy")
    with pytest.raises(ValueError, match="label=None must be one of"):
        label_index(tiny.llama_config(num_labels=3))


def test_encoder_decoders_are_refused():
    config = BartConfig(
        vocab_size=50, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1,
        decoder_attention_heads=1, encoder_ffn_dim=8, decoder_ffn_dim=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match="must be a decoder or an encoder"):
        sequence_scores(BartForSequenceClassification(config), *tiny.padded(ROWS))


@pytest.mark.parametrize("build", [tiny.llama_classifier, tiny.gpt2_classifier])
def test_rows_without_padding_have_the_scores_and_gradients_of_padded_ones(build):
    def scores_and_gradients(model):
        scores = sequence_scores(model, *tiny.padded(ROWS))
        (scores * torch.tensor([1.0, -2.0, 3.0, 0.5])).sum().backward()
        return scores, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    model = build()
    model.set_attn_implementation("eager")
    expected, expected_gradients = scores_and_gradients(model)
    model = build()
    assert reads_dense(model.base_model)
    scores, gradients = scores_and_gradients(model)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected_gradients[name], atol=1e-5 * scale, rtol=1e-5, msg=name
        )
