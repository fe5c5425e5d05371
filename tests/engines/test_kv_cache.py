"""The cache shares prompts between completions, appends, and lets rows go."""

from __future__ import annotations

import torch
from transformers import AutoConfig

from rllib_llm.engines.kv_cache import (
    RepeatedPromptCache,
    SharedPromptLayer,
    num_shared_layers,
)


def prompt_states() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts of three positions, one head of two dimensions; values are minus the keys."""
    keys = torch.arange(12.0).view(2, 1, 3, 2)
    return keys, -keys


def filled(num_completions: int) -> SharedPromptLayer:
    prompts, layer = SharedPromptLayer(capacity=3), SharedPromptLayer(capacity=0)
    prompts.update(*prompt_states())
    layer.admit(prompts, [num_completions] * 2, room=(2 * num_completions, 5))
    return layer


def test_a_prompt_is_written_to_the_rows_of_all_its_completions():
    keys, values = prompt_states()
    layer = filled(num_completions=3)

    # Rows 0-2 belong to prompt 0, rows 3-5 to prompt 1.
    assert layer.keys.shape == (6, 1, 5, 2)
    assert torch.equal(layer.keys[:, :, :3], keys.repeat_interleave(3, dim=0))
    assert torch.equal(layer.values[:, :, :3], values.repeat_interleave(3, dim=0))
    assert layer.get_seq_length() == 3


def test_the_prefill_attends_to_its_own_states():
    keys, values = prompt_states()
    returned = SharedPromptLayer(capacity=5).update(keys, values)

    assert returned[0] is keys
    assert returned[1] is values


def test_new_positions_are_appended_and_everything_so_far_is_seen():
    layer = filled(num_completions=2)
    new = torch.full((4, 1, 1, 2), 7.0)
    assert layer.get_mask_sizes(1) == (4, 0)

    keys, values = layer.update(new, -new)

    assert keys.shape == values.shape == (4, 1, 4, 2)
    assert torch.equal(keys[:, :, 3:], new)
    assert torch.equal(values[:, :, 3:], -new)
    assert torch.equal(keys[:, :, :3], prompt_states()[0].repeat_interleave(2, dim=0))


def test_rows_move_to_free_places_and_the_rest_is_forgotten():
    layer = filled(num_completions=2)
    # Rows 0 and 2 have ended: row 3 takes the place of row 0; two rows are left.
    layer.move_rows(torch.tensor([3]), torch.tensor([0]), num_rows=2)

    keys, _ = layer.update(torch.zeros(2, 1, 1, 2), torch.zeros(2, 1, 1, 2))

    first, second = prompt_states()[0]
    assert torch.equal(keys[:, :, :3], torch.stack([second, first]))


def test_models_whose_pattern_lives_in_the_mask_share_prompts():
    for name, settings in (
        ("llama", {}),
        ("mistral", {"sliding_window": 4}),
        ("gemma2", {}),
        ("gpt2", {}),
    ):
        config = AutoConfig.for_model(name, **settings)
        assert num_shared_layers(config) == config.num_hidden_layers, name


def test_other_layers_get_the_cache_of_transformers():
    config = AutoConfig.for_model(
        "lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"]
    )

    assert num_shared_layers(config) is None


def test_the_cache_of_transformers_moves_rows_too():
    cache = RepeatedPromptCache()
    cache.update(torch.arange(4.0).view(4, 1, 1, 1), torch.zeros(4, 1, 1, 1), 0)

    # Rows 0 and 2 have ended, as above.
    cache.move_rows(torch.tensor([3]), torch.tensor([0]), num_rows=2)

    assert cache.layers[0].keys.flatten().tolist() == [3.0, 1.0]


def test_room_made_at_the_front_holds_numbers():
    """A longer prompt comes to short rows: what lies before these was never written."""
    layer = SharedPromptLayer(capacity=16)
    layer.update(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4))
    for buffer in (layer.keys, layer.values):
        buffer[:, :, 3:] = torch.nan  # as memory may be that nobody has written to
    layer.shift(-8)
    assert layer.length == 11
    for buffer in (layer.keys, layer.values):
        assert buffer[:, :, :8].eq(0).all() and buffer[:, :, 8:11].eq(1).all()
