"""Rows one behind another: what each token has read, and the same numbers as padded rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

from rllib_llm.modules.logprobs import (
    ReferencePolicy,
    score_completions,
    text_logprobs,
)
from rllib_llm.modules.packed_attention import PACKED
from rllib_llm.modules.packing import (
    WantedTokens,
    completion_rows,
    pack,
    pack_dense,
    recurring_size,
    text_rows,
)
from rllib_llm.modules.sequence_scores import sequence_scores
from rllib_llm.modules.trunk import (
    is_fusible,
    reads_dense,
    trunk_hidden,
    wanted_hidden,
    wanted_tokens,
)
from tests.modules.tiny_models import FAMILIES, VOCAB, tiny_model
from tests.rounding import assert_as_near


def words(wanted: WantedTokens) -> list[tuple[list[int], int]]:
    """(what was attended to by the token that predicts, the token to predict), in order."""
    ids, positions = wanted.input_ids[0].tolist(), wanted.position_ids[0].tolist()
    found = []
    for at, target in zip(wanted.predicted_at.tolist(), wanted.targets.tolist(), strict=True):
        place = int(wanted.layout.places[at])
        for block in wanted.layout.blocks:
            if place < block.queries.numel():
                break
            place -= block.queries.numel()
        row, col = divmod(place, block.queries.shape[1])
        assert int(block.queries[row, col]) == at
        seen = torch.arange(block.keys.shape[1]) <= col
        if block.mask is not None:
            seen = block.mask[row, 0, col] == 0
        tokens = block.keys[row][seen].tolist()
        assert [positions[token] for token in tokens] == list(range(len(tokens)))
        found.append(([ids[token] for token in tokens], target))
    return found


def mask_of(rows: list[str]) -> torch.Tensor:
    return torch.tensor([[char == "1" for char in row] for row in rows])


def test_rows_of_one_prompt_share_it_wherever_they_lie():
    # Rows 0 and 2 have the prompt 5, row 1 has 3 4; the last tokens 7, 1 and 6 predict nothing.
    wanted = pack_dense(completion_rows(
        torch.tensor([[0, 5], [3, 4], [9, 5]]),
        mask_of(["01", "11", "01"]),
        torch.tensor([[6, 7, 0, 0], [8, 9, 1, 0], [6, 0, 0, 0]]),
        mask_of(["1100", "1010", "1000"]),
    ))  # fmt: skip
    assert sorted(wanted.input_ids[0].tolist()) == [3, 4, 5, 6, 8, 9]
    assert words(wanted) == [([5], 6), ([5, 6], 7), ([3, 4], 8), ([3, 4, 8, 9], 1), ([5], 6)]
    answers = wanted.unpack(torch.tensor([10.0, 20.0, 30.0, 40.0, 50.0]))
    assert answers.tolist() == [[10, 20, 0, 0], [30, 0, 40, 0], [50, 0, 0, 0]]
    assert wanted.num_padding == 0


def test_rows_with_nothing_in_common_are_one_block_without_a_mask():
    wanted = pack_dense(text_rows(torch.tensor([[7, 8, 9], [0, 7, 8]]), mask_of(["111", "011"]),
                                  None))  # fmt: skip
    assert wanted.input_ids.tolist() == [[7, 8, 7]]
    assert words(wanted) == [([7], 8), ([7, 8], 9), ([7], 8)]
    (block,) = wanted.layout.blocks
    assert block.mask is None


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.booleans(), min_size=3, max_size=3).filter(any),
            st.lists(st.booleans(), min_size=5, max_size=5),
            st.integers(0, 1),
        ),
        min_size=1,
        max_size=6,
    ).filter(lambda rows: any(any(completion) for _, completion, _ in rows)),
    st.booleans(),
)
def test_any_masks_give_what_padded_rows_give(rows, recurring):
    num_rows = len(rows)
    prompt_mask = torch.tensor([prompt for prompt, _, _ in rows])
    completion_mask = torch.tensor([completion for _, completion, _ in rows])
    # Few different prompts, so that some are shared.
    prompt_ids = torch.tensor([[10 + 3 * kind + col for col in range(3)] for _, _, kind in rows])
    completion_ids = torch.arange(500, 500 + num_rows * 5).view(num_rows, 5)
    packed = completion_rows(prompt_ids, prompt_mask, completion_ids, completion_mask)
    padded, dense = pack(packed), pack_dense(packed, recurring=recurring)
    longest = padded.input_ids.shape[1]
    expected = [
        (padded.input_ids[at // longest, : at % longest + 1].tolist(), target)
        for at, target in zip(padded.predicted_at.tolist(), padded.targets.tolist(), strict=True)
    ]
    assert words(dense)[: len(expected)] == expected
    assert torch.equal(dense.places, padded.places) and dense.shape == padded.shape
    num_read = dense.input_ids.numel() - dense.num_padding
    assert num_read <= padded.input_ids.numel() - padded.num_padding
    if recurring:
        assert dense.input_ids.numel() % 16 == len(dense.targets) % 16 == 0
        assert dense.num_padding < 16


def test_sizes_that_come_again_are_few_and_hardly_larger():
    # 16 up to 512, 32 up to 1024 ...: a multiple of a 32nd of the power of two below.
    assert [recurring_size(width, 8) for width in (7, 9, 95, 257)] == [8, 16, 96, 264]
    sizes = {1: 16, 16: 16, 17: 32, 500: 512, 513: 528, 1024: 1024, 1025: 1056, 2113: 2176}
    assert {number: recurring_size(number) for number in sizes} == sizes
    assert len({recurring_size(number) for number in range(2048, 4096)}) == 33  # 4096 among them
    assert all(recurring_size(n) - n < n / 32 for n in range(512, 5000))


# --- the same numbers -----------------------------------------------------------------------------

DENSE = (
    "llama",
    "qwen2 (tied)",
    "qwen3",
    "gpt2",
    "cohere (logit scale)",
    "granite (logits scaling)",
    "phi (head bias)",
    "opt (decoder inside the trunk)",
)


def group_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two prompts of different length, rows of both mixed, completions of 1 to 7 tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, VOCAB, (2, 5), generator=generator)
    prompt_mask = mask_of(["00111", "11111"])
    prompt_of = torch.tensor([0, 1, 1, 0, 0, 1])
    lengths = torch.tensor([4, 7, 1, 7, 2, 5])
    mask = torch.arange(7) < lengths.unsqueeze(1)
    mask[1, 2:4] = False  # tool output
    return {
        "prompt_ids": prompts[prompt_of],
        "prompt_mask": prompt_mask[prompt_of],
        "completion_ids": torch.randint(3, VOCAB, (6, 7), generator=generator),
        "completion_mask": mask,
    }


def stats_and_gradients(model, rows):
    outputs = score_completions(model, **rows, temperature=0.7, entropy=True, hidden=True)
    loss = outputs.logprobs.square().sum() + outputs.entropy.sum() + outputs.hidden.sum()
    model.zero_grad(set_to_none=True)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return outputs, gradients


@pytest.mark.parametrize("family", DENSE)
def test_log_probs_and_gradients_are_those_of_padded_rows(family):
    rows = group_batch()
    padded, exact = tiny_model(family), tiny_model(family).double()
    for model in (padded, exact):
        # Attention of another kind than torch's SDPA: rows are padded.
        model.set_attn_implementation("eager")
    expected, expected_gradients = stats_and_gradients(padded, rows)
    assert expected.num_padding > 0
    exactly, exact_gradients = stats_and_gradients(exact, rows)
    outputs, gradients = stats_and_gradients(tiny_model(family), rows)
    # Prompts of 3 and 5 tokens once, and every completion without its last token.
    assert (outputs.num_computed, outputs.num_padding) == (8 + 3 + 6 + 0 + 6 + 1 + 4, 0)
    for name in ("logprobs", "entropy", "hidden"):
        found, plain = getattr(outputs, name), getattr(expected, name)
        assert_as_near(found, plain, getattr(exactly, name).double())
    assert gradients.keys() == expected_gradients.keys()
    # Together, since a key's bias has the gradient 0 but for rounding.
    names = list(gradients)
    assert_as_near(
        [gradients[name] for name in names],
        [expected_gradients[name] for name in names],
        [exact_gradients[name] for name in names],
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_cannot_be_laid_out_is_padded(family):
    model, rows = tiny_model(family), group_batch()
    if family == "gemma2 (soft-cap)" and model.config._attn_implementation == "sdpa":
        pytest.skip("this version of transformers leaves Gemma 2's soft-cap out of its attention")
    outputs = score_completions(model, **rows)
    assert (outputs.num_padding == 0) == (family in DENSE)


def test_texts_have_no_padding_either():
    model = tiny_model()
    ids, attention = torch.randint(3, VOCAB, (3, 6)), mask_of(["111111", "001111", "110000"])
    rows = text_rows(ids, attention, None)
    assert wanted_tokens(model.model, rows).num_padding == 0
    dense = text_logprobs(model, ids, attention)
    model.set_attn_implementation("eager")  # noticed, though the trunk was tried before
    assert wanted_tokens(model.model, rows).num_padding == 6
    padded = text_logprobs(model, ids, attention)
    torch.testing.assert_close(dense, padded, atol=1e-5, rtol=1e-5)


def test_gradient_checkpointing_computes_the_same_again():
    rows = group_batch()
    _, expected = stats_and_gradients(tiny_model(), rows)
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    _, gradients = stats_and_gradients(model, rows)
    # With checkpoints the layers are transformers' own, without them the fused ones.
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5 * scale, rtol=1e-5)


def test_a_model_with_our_attention_is_the_model_itself():
    model, ids = tiny_model(), torch.randint(3, VOCAB, (2, 6))
    mask = mask_of(["001111", "111111"])
    before = model(input_ids=ids, attention_mask=mask.long()).logits
    assert reads_dense(model.model)
    assert model.config._attn_implementation == PACKED
    after = model(input_ids=ids, attention_mask=mask.long()).logits
    assert torch.equal(after[mask], before[mask])
    assert "attn_implementation" not in model.config.to_json_string()


def test_long_prompts_are_not_shared_where_the_mask_would_outgrow_them():
    ids = torch.randint(3, VOCAB, (4, 9))
    ids[:, :4] = ids[0, :4]
    everything = torch.ones_like(ids, dtype=torch.bool)
    rows = completion_rows(ids[:, :4], everything[:, :4], ids[:, 4:], everything[:, 4:])
    shared = pack_dense(rows)
    apart = pack_dense(rows, max_mask=4 * 5 * 9 - 1)
    assert len(shared.layout.blocks) == 2 and len(apart.layout.blocks) == 1
    assert words(shared) == words(apart)


# --- sizes that come again ------------------------------------------------------------------------


def states_and_gradients(hidden_of, trunk, wanted: WantedTokens) -> list[torch.Tensor]:
    trunk.zero_grad(set_to_none=True)
    states = wanted.unpack(hidden_of(trunk, wanted))
    states.square().sum().backward()
    gradients = [p.grad for p in trunk.parameters() if p.grad is not None]
    return [states.detach(), *gradients]


def both_forms(rows: dict[str, torch.Tensor]) -> tuple[WantedTokens, WantedTokens]:
    packed = completion_rows(*rows.values())
    plain, filled = pack_dense(packed), pack_dense(packed, recurring=True)
    assert (plain.num_padding, filled.num_padding, len(filled.targets) % 16) == (0, 4, 0)
    return plain, filled


@pytest.mark.parametrize("family", DENSE)
def test_filler_changes_no_state_and_no_gradient(family):
    trunk = tiny_model(family).double().get_decoder()
    assert reads_dense(trunk)
    expected, found = (
        states_and_gradients(own_states, trunk, form) for form in both_forms(group_batch())
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def own_states(trunk, wanted: WantedTokens) -> torch.Tensor:
    """By transformers' own layers."""
    return wanted.pick(trunk_hidden(trunk, wanted))


def away(found: list[torch.Tensor], exact: list[torch.Tensor]) -> torch.Tensor:
    """Relative differences of the states, and of all gradients together."""

    def norm(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.double().flatten() for tensor in tensors]).norm()

    off = [a.double() - b.double() for a, b in zip(found, exact, strict=True)]
    return torch.stack([norm(off[:1]) / norm(exact[:1]), norm(off[1:]) / norm(exact[1:])])


@pytest.mark.parametrize("family", ["llama", "qwen2 (tied)", "qwen3"])
def test_fused_layers_read_filler_like_any_token(family):
    trunk = tiny_model(family).get_decoder()
    assert is_fusible(trunk)
    plain, filled = (
        states_and_gradients(wanted_hidden, trunk, form) for form in both_forms(group_batch())
    )
    exact = states_and_gradients(
        own_states, tiny_model(family).double().get_decoder(), both_forms(group_batch())[0]
    )
    for which in (slice(0, 1), slice(1, None)):  # states, gradients
        assert_as_near(filled[which], plain[which], exact[which])

    # In bfloat16 other numbers are rounded: as far from float64, on average over a few batches.
    half = tiny_model(family).bfloat16().get_decoder()
    exact_trunk = tiny_model(family).bfloat16().double().get_decoder()
    assert is_fusible(half) and reads_dense(exact_trunk)
    errors = []
    for seed in range(6):
        forms = both_forms(group_batch(seed))
        exact = states_and_gradients(own_states, exact_trunk, forms[0])
        errors.append(
            torch.stack([away(states_and_gradients(wanted_hidden, half, f), exact) for f in forms])
        )
    without = torch.stack(errors).mean(dim=0)[0]
    surplus = torch.stack([filled - plain for plain, filled in errors])
    # A tenth, and what a mean of six varies by: its standard error.
    varies = 3 * surplus.std(dim=0) / len(surplus) ** 0.5
    assert (surplus.mean(dim=0) < 0.1 * without + varies).all()


def test_only_products_of_bfloat16_on_a_processor_get_them():
    rows = group_batch()
    for dtype, num_padding in ((torch.bfloat16, 4), (torch.float32, 0)):
        assert score_completions(tiny_model("llama").to(dtype), **rows).num_padding == num_padding


def test_surplus_tokens_are_nobodys_business():
    rows = group_batch()
    half, exact = tiny_model("llama").bfloat16(), tiny_model("llama")
    # Between two forms of the same weights, in pieces whose last is of another size than the first.
    for chunk in (None, 5):
        kl = score_completions(
            half, **rows, full_kl_to=ReferencePolicy(exact), logits_chunk_tokens=chunk
        ).full_kl
        assert kl.shape == rows["completion_mask"].shape
        assert float(kl.detach().abs().max()) < 0.01
        assert not kl[~rows["completion_mask"]].any()
    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_config(half.config).eval()
    ids, mask = rows["completion_ids"], rows["completion_mask"].clone()
    mask[:, 0] = True
    expected = sequence_scores(judge, ids, mask, label=1)
    found = sequence_scores(judge.bfloat16(), ids, mask, label=1)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)


def test_the_shortest_rows_are_filled_first():
    # Left-padded prompts of 9 and 2 tokens, nothing in common; completions of 1 and 5 tokens.
    prompts = torch.arange(1, 19).view(2, 9)
    prompt_mask = torch.arange(9) >= torch.tensor([[0], [7]])
    mask = torch.arange(5) < torch.tensor([[1], [5]])
    rows = completion_rows(prompts, prompt_mask, torch.arange(20, 30).view(2, 5), mask)
    wanted = pack_dense(rows, recurring=True)
    # 9 and 6 tokens are read; one of filler makes 16 of them, and goes to the second row.
    assert (wanted.input_ids.numel(), wanted.num_padding) == (16, 1)
    (block,) = wanted.layout.blocks
    assert block.queries.shape == (2, 16)
    assert wanted.input_ids[0, -1] == 0 and wanted.position_ids[0, -1] == 0
