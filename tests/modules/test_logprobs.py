"""Log-probs and entropy against the model's own logits, row by row and without padding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from rllib_llm.modules.logprobs import (
    ReferencePolicy,
    completion_hidden,
    score_completions,
    text_logprobs,
)
from rllib_llm.numerics.kl import full_kl
from rllib_llm.shared.errors import Problems
from tests.modules.tiny_models import FAMILIES, VOCAB, tiny_model
from tests.rounding import assert_as_near, neighbour


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Three rows: ragged prompts; a cut completion, one with a hole, one of a single token."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "prompt_ids": torch.randint(3, VOCAB, (3, 5), generator=generator),
        "prompt_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]).bool(),
        "completion_ids": torch.randint(3, VOCAB, (3, 7), generator=generator),
        "completion_mask": torch.tensor(
            [[1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0]]
        ).bool(),
    }


def own_logits(model, rows: dict[str, torch.Tensor], row: int) -> torch.Tensor:
    """The model's logits [completion_len, vocab] that predict a row's completion, unpadded."""
    mask = rows["completion_mask"][row]
    length = int(mask.nonzero().max()) + 1
    prompt = rows["prompt_ids"][row][rows["prompt_mask"][row]]
    ids = torch.cat([prompt, rows["completion_ids"][row, :length]]).unsqueeze(0)
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.pad(logits, (0, 0, 0, len(mask) - length))


def exactly(model):
    """A copy of it in float64."""
    return copy.deepcopy(model).double()


def own_stats(model, rows, temperature=1.0):
    """Log-probs and entropies [batch, completion_len] from the model's own logits."""
    logits = torch.stack([own_logits(model, rows, row) for row in range(3)]) / temperature
    all_logprobs = logits.log_softmax(-1)
    logprobs = all_logprobs.gather(-1, rows["completion_ids"].unsqueeze(-1)).squeeze(-1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return logprobs * rows["completion_mask"], entropy * rows["completion_mask"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("logits_chunk_tokens", [None, 3])
def test_log_probs_and_entropy_are_the_models_own(family, logits_chunk_tokens, recwarn):
    model, rows = tiny_model(family), batch()
    outputs = score_completions(
        model, **rows, temperature=0.7, entropy=True, logits_chunk_tokens=logits_chunk_tokens
    )
    plain, exact = (own_stats(one, rows, temperature=0.7) for one in (model, exactly(model)))
    assert_as_near(outputs.logprobs, plain[0], exact[0])
    assert_as_near(outputs.entropy, plain[1], exact[1])
    assert not [warning for warning in recwarn if "run whole" in str(warning.message)]


def test_entropy_and_hidden_only_on_request():
    outputs = score_completions(tiny_model(), **batch())
    assert outputs.entropy is None
    assert outputs.hidden is None


def test_temperature_divides_the_logits():
    model, rows = tiny_model(), batch()
    for temperature in (0.5, 1.0, 2.0):
        plain, exact = (own_stats(one, rows, temperature)[0] for one in (model, exactly(model)))
        logprobs = score_completions(model, **rows, temperature=temperature).logprobs
        assert_as_near(logprobs, plain, exact)


@pytest.mark.parametrize("logits_chunk_tokens", [None, 4])
def test_rows_may_have_their_own_temperatures(logits_chunk_tokens):
    """And the gradients of the model's own logits, each row divided by its own."""
    model, rows, temperature = tiny_model(), batch(), torch.tensor([0.5, 1.0, 2.0])

    def results(model, logprobs, entropy):
        model.zero_grad(set_to_none=True)
        (logprobs.sum() + 0.3 * entropy.square().sum()).backward()
        return [logprobs, entropy, *(parameter.grad for parameter in model.parameters())]

    plain, exact = (
        results(one, *own_stats(one, rows, temperature.view(3, 1, 1)))
        for one in (model, exactly(model))
    )
    outputs = score_completions(
        model, **rows, temperature=temperature, entropy=True,
        logits_chunk_tokens=logits_chunk_tokens,
    )  # fmt: skip
    found = results(model, outputs.logprobs, outputs.entropy)
    assert_as_near(found, plain, exact)


def test_padding_changes_nothing():
    model, rows = tiny_model("mistral (sliding window)"), batch()
    expected = score_completions(model, **rows, entropy=True, hidden=True)
    padded = {
        # Rubbish ids of every kind lie in the padding.
        "prompt_ids": F.pad(rows["prompt_ids"], (4, 0), value=-100),
        "prompt_mask": F.pad(rows["prompt_mask"], (4, 0)),
        "completion_ids": F.pad(rows["completion_ids"], (0, 3), value=VOCAB + 5),
        "completion_mask": F.pad(rows["completion_mask"], (0, 3)),
    }
    outputs = score_completions(model, **padded, entropy=True, hidden=True)
    for name in ("logprobs", "entropy", "hidden"):
        ours, whole = getattr(outputs, name)[:, :7], getattr(expected, name)
        torch.testing.assert_close(ours, whole, atol=1e-6, rtol=1e-5)
        assert (getattr(outputs, name)[:, 7:] == 0).all()


def test_rows_alone_equal_rows_together():
    model, rows = tiny_model(), batch()
    together = score_completions(model, **rows).logprobs
    for row in range(3):
        alone = score_completions(model, **{k: v[row : row + 1] for k, v in rows.items()}).logprobs
        torch.testing.assert_close(alone[0], together[row], atol=1e-6, rtol=1e-5)


def test_masked_out_tokens_are_read_but_not_scored():
    model, rows = tiny_model(), batch()
    before = score_completions(model, **rows).logprobs
    changed = {**rows, "completion_ids": rows["completion_ids"].clone()}
    changed["completion_ids"][1, 2:4] = 50  # tool output of row 1
    after = score_completions(model, **changed).logprobs
    assert (after[1, 2:4] == 0).all()
    torch.testing.assert_close(after[1, :2], before[1, :2])
    assert (after[1, 4:] != before[1, 4:]).all()


def test_rows_without_a_completion_are_zero():
    model, rows = tiny_model(), batch()
    rows["completion_mask"][0] = False
    outputs = score_completions(model, **rows, entropy=True)
    assert (outputs.logprobs[0] == 0).all()
    rows["completion_mask"][:] = False
    outputs = score_completions(model, **rows, entropy=True, hidden=True)
    assert (outputs.logprobs == 0).all()
    outputs.logprobs.sum().backward()


@pytest.mark.parametrize("family", ["qwen2 (tied)", "gemma2 (soft-cap)", "phi (head bias)"])
@pytest.mark.parametrize("logits_chunk_tokens", [None, 1, 4])
def test_gradients_are_those_of_the_models_own_logits(family, logits_chunk_tokens):
    model, rows = tiny_model(family), batch()

    def gradients(model, logprobs, entropy):
        model.zero_grad(set_to_none=True)
        (logprobs.sum() + 0.3 * entropy.square().sum()).backward()
        return [parameter.grad for parameter in model.parameters()]

    # Round-off of tied weights moves gradients of 86 by some 1e-3. A single run of the plain path
    # is off by anything between 5e-4 and 3e-3, so that run alone is no bound.
    moved = [neighbour(model, seed) for seed in range(3)]
    plain, exact, *neighbours = (
        gradients(one, *own_stats(one, rows, temperature=0.7))
        for one in (model, exactly(model), *moved)
    )
    outputs = score_completions(
        model, **rows, temperature=0.7, entropy=True, logits_chunk_tokens=logits_chunk_tokens
    )
    found = gradients(model, outputs.logprobs, outputs.entropy)
    for (name, _), one, *others in zip(model.named_parameters(), found, plain, exact, strict=True):
        assert one.shape == others[0].shape, name
    assert_as_near(found, plain, exact, neighbours=neighbours)


def test_gradient_through_the_entropy_alone_and_the_hidden_states():
    model, rows = tiny_model(), batch()
    _, entropy = own_stats(model, rows)
    entropy.sum().backward()
    expected = model.lm_head.weight.grad.clone()
    model.zero_grad(set_to_none=True)
    outputs = score_completions(model, **rows, entropy=True, hidden=True)
    outputs.entropy.sum().backward(retain_graph=True)
    torch.testing.assert_close(model.lm_head.weight.grad, expected, atol=1e-5, rtol=1e-4)
    model.zero_grad(set_to_none=True)
    outputs.hidden.sum().backward()
    assert model.lm_head.weight.grad is None
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0


def test_chunks_hold_no_logits_for_the_backward_pass():
    model, rows = tiny_model(), batch()
    held: list[tuple[int, ...]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tuple(tensor.shape))
        return tensor

    def logits_held(chunk_tokens: int) -> list[tuple[int, ...]]:
        held.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            score_completions(model, **rows, entropy=True, logits_chunk_tokens=chunk_tokens)
        # [32, VOCAB] is the head's weight.
        return [shape for shape in held if shape[-1:] == (VOCAB,) and shape[0] != 32]

    num_tokens = int(rows["completion_mask"].sum())
    assert logits_held(num_tokens) == [(num_tokens, VOCAB)]
    assert logits_held(4) == []


def test_no_grad_gives_the_same_numbers_without_a_graph():
    model, rows = tiny_model(), batch()
    with torch.no_grad():
        outputs = score_completions(model, **rows, logits_chunk_tokens=3)
    assert not outputs.logprobs.requires_grad
    torch.testing.assert_close(outputs.logprobs, score_completions(model, **rows).logprobs)


@pytest.mark.parametrize("family", ["llama", "gemma2 (soft-cap)", "cohere (logit scale)"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_log_probs_are_the_models(family, dtype):
    # Fused layers in bfloat16 round less often than the model's own forward pass.
    model, rows = tiny_model(family).to(dtype), batch()
    outputs = score_completions(model, **rows, entropy=True)
    assert outputs.logprobs.dtype == outputs.entropy.dtype == torch.float32
    with torch.no_grad():
        plain, exact = (own_stats(one, rows) for one in (model, exactly(model)))
    assert_as_near(outputs.logprobs, plain[0], exact[0], factor=2.0, computed=dtype)
    assert_as_near(outputs.entropy, plain[1], exact[1], factor=2.0, computed=dtype)
    outputs.logprobs.sum().backward()
    assert model.get_output_embeddings().weight.grad.dtype == dtype


def test_half_precision_probabilities_add_up_to_one():
    model = tiny_model().to(torch.bfloat16)
    every_token = torch.arange(VOCAB).unsqueeze(1)
    prompt = torch.full((VOCAB, 3), 7)
    ones = torch.ones_like
    logprobs = score_completions(
        model, prompt, ones(prompt).bool(), every_token, ones(every_token).bool()
    ).logprobs
    # Of logits that are rounded to eight bits, each row's on its own: a product of equal rows need
    # not round them alike. They are rounded no more after that: not where they are normalised.
    assert torch.equal(logprobs, logprobs.float())
    assert (logprobs != logprobs.bfloat16()).float().mean() > 0.9
    spacing = torch.finfo(torch.bfloat16).eps * float(logprobs.abs().max())
    assert logprobs.exp().sum().item() == pytest.approx(1.0, abs=spacing)


# --- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [False, True])
def test_text_log_probs_equal_the_models_cross_entropy(left):
    model = tiny_model()
    lengths = [6, 3, 1]
    texts = [torch.randint(3, VOCAB, (length,)) for length in lengths]
    ids = torch.zeros(3, 8, dtype=torch.long)
    attention = torch.zeros(3, 8).bool()
    for row, text in enumerate(texts):
        place = slice(8 - len(text), 8) if left else slice(0, len(text))
        ids[row, place], attention[row, place] = text, True
    logprobs = text_logprobs(model, ids, attention, logits_chunk_tokens=2)

    def own(model, text):
        scores = model(input_ids=text.unsqueeze(0)).logits[0].log_softmax(-1)
        return scores[:-1].gather(-1, text[1:, None]).squeeze(-1)

    ours = [logprobs[row][attention[row]] for row in range(3)]
    assert [float(one[0]) for one in ours] == [0, 0, 0]  # nothing predicts a first token
    plain, exact = ([own(one, text) for text in texts[:2]] for one in (model, exactly(model)))
    assert_as_near([one[1:] for one in ours[:2]], plain, exact)
    assert (logprobs[~attention] == 0).all()


def test_text_log_probs_only_where_the_loss_mask_says():
    model = tiny_model()
    ids = torch.randint(3, VOCAB, (2, 6))
    attention = torch.ones(2, 6).bool()
    loss_mask = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    masked = text_logprobs(model, ids, attention, loss_mask)
    whole = text_logprobs(model, ids, attention)
    torch.testing.assert_close(masked, whole * loss_mask, atol=1e-6, rtol=1e-5)


def test_a_text_is_the_completion_of_its_first_token():
    model, ids = tiny_model(), torch.randint(3, VOCAB, (2, 6))
    ones = torch.ones(2, 6).bool()
    as_text = text_logprobs(model, ids, ones)
    as_completion = score_completions(model, ids[:, :1], ones[:, :1], ids[:, 1:], ones[:, 1:])
    torch.testing.assert_close(as_text[:, 1:], as_completion.logprobs)


# --- hidden states and the exact KL --------------------------------------------------------------


def test_hidden_is_the_state_that_predicts_the_token():
    model, rows = tiny_model(), batch()
    hidden = score_completions(model, **rows, hidden=True).hidden
    prompt = rows["prompt_ids"][0][rows["prompt_mask"][0]]
    ids = torch.cat([prompt, rows["completion_ids"][0, :4]]).unsqueeze(0)
    plain, exact = (one.model(input_ids=ids)[0][0, 2:6] for one in (model, exactly(model)))
    # Completion token 0 of row 0 is predicted at the prompt's last token, place 2 of 3.
    assert_as_near(hidden[0, :4], plain, exact)
    assert (hidden[0, 4:] == 0).all()


def test_a_bare_trunk_gives_the_same_hidden_states():
    model, rows = tiny_model(), batch()
    torch.testing.assert_close(
        completion_hidden(model.model, **rows),
        score_completions(model, **rows, hidden=True).hidden,
    )


@pytest.mark.parametrize("logits_chunk_tokens", [None, 3])
def test_full_kl_is_that_of_both_models_logits(logits_chunk_tokens):
    model, ref_model, rows = tiny_model(seed=0), tiny_model(seed=1), batch()
    kl = score_completions(
        model, **rows, temperature=0.7, logits_chunk_tokens=logits_chunk_tokens,
        full_kl_to=ReferencePolicy(ref_model),
    ).full_kl  # fmt: skip
    expected = torch.stack(
        [
            full_kl(own_logits(model, rows, row) / 0.7, own_logits(ref_model, rows, row) / 0.7)
            for row in range(3)
        ]
    )
    torch.testing.assert_close(kl, expected * rows["completion_mask"], atol=1e-5, rtol=1e-5)
    kl.sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0
    assert ref_model.lm_head.weight.grad is None
    own = score_completions(model, **rows, full_kl_to=ReferencePolicy(model)).full_kl
    assert (own == 0).all()


# --- errors --------------------------------------------------------------------------------------


def test_a_row_without_a_prompt_is_named():
    model, rows = tiny_model(), batch()
    no_prompt = rows["prompt_mask"].clone()
    no_prompt[1] = False
    with pytest.raises(Problems) as caught:
        score_completions(model, **{**rows, "prompt_mask": no_prompt})
    assert caught.value.problem.name == "prompt_mask[1]"
