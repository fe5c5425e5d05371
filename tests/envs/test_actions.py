from __future__ import annotations

import pytest
import torch

from rllib_llm.envs.actions import decode_completions, info_columns
from rllib_llm.envs.check_env import check_env
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.envs.tiny_envs import word_env
from tests.envs.tiny_tokenizers import word_tokenizer
from tests.tiny_models import byte_tokenizer


def _ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_space_between_prompt_and_completion_is_kept():
    tokenizer = word_tokenizer()
    prompt, completion = _ids(tokenizer, "the cat"), _ids(tokenizer, "sat on")
    assert tokenizer.decode(completion) == "sat on"  # alone it would be lost
    assert decode_completions(tokenizer, [prompt[-1]], [completion]) == [" sat on"]


def test_special_tokens_inside_a_completion_are_shown():
    """Where <think> and <answer> are special, a format reward was always 0."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>", "<end>"]})
    tokenizer.chat_template = "{% for m in messages %}<U>{{ m.content }}<end>{% endfor %}"
    for end in ("", "</s>", "<end>", "<end></s><pad>"):
        ids = _ids(tokenizer, f"<answer>7</answer>{end}")
        assert decode_completions(tokenizer, [_ids(tokenizer, "=")[0]], [ids]) == [
            "<answer>7</answer>"
        ]


def test_tokens_that_end_a_completion_are_left_out():
    tokenizer = word_tokenizer(bos=True)
    sat = _ids(tokenizer, "sat")
    assert decode_completions(tokenizer, [1, 1], [[*sat, 2], [2]]) == ["sat", ""]  # behind BOS


def test_a_character_cut_in_two_by_the_prompts_end():
    tokenizer = byte_tokenizer()
    first, *rest = _ids(tokenizer, "é!")  # two bytes for the letter, one for the mark
    # Joined the bytes are one letter, which the prompt's part alone is not a beginning of.
    assert decode_completions(tokenizer, [first], [rest]) == [tokenizer.decode(rest)]


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked():
    tokenizer = word_tokenizer()
    ids = _ids(tokenizer, "the cat sat")
    plain = decode_completions(tokenizer, ids[:1], [ids[1:]])

    class Loud(type(tokenizer)):
        def _decode(self, token_ids, **options):
            return super()._decode(token_ids, **options).upper()

    tokenizer.__class__ = Loud
    assert decode_completions(tokenizer, ids[:1], [ids[1:]]) == [plain[0].upper()]


EXISTS = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
SAMPLED = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0]]).bool()
VERSIONS = torch.tensor([[3, -1, -1, 4], [-1, 3, -1, -1]], dtype=torch.int32)


def test_what_fits_is_taken_and_the_rest_of_the_infos_left():
    given = {
        columns.LOSS_MASK: SAMPLED,
        columns.WEIGHTS_VERSION: VERSIONS,
        columns.GROUP: torch.tensor([7, 7]),
    }
    found = info_columns({**given, "scores": torch.zeros(2)}, EXISTS)
    assert found.keys() == given.keys() and all(found[name] is given[name] for name in given)
    assert info_columns({"scores": torch.zeros(2)}, EXISTS) == {}


@pytest.mark.parametrize(
    "infos, name, rule",
    [
        ({columns.LOSS_MASK: SAMPLED.int()}, "infos['loss_mask']",
         "be a torch tensor of torch.bool, shape [2, 4]"),
        ({columns.LOSS_MASK: SAMPLED[:, :3]}, "infos['loss_mask']",
         "be a torch tensor of torch.bool, shape [2, 4]"),
        ({columns.LOSS_MASK: SAMPLED.tolist()}, "infos['loss_mask']",
         "be a torch tensor of torch.bool, shape [2, 4]"),
        ({columns.LOSS_MASK: torch.ones(2, 4).bool()}, "infos['loss_mask'][1]",
         "be False where completion_mask is"),
        ({columns.LOSS_MASK: SAMPLED & (torch.arange(2) < 1).unsqueeze(1)},
         "infos['loss_mask'][1]", "be True somewhere"),
        ({columns.WEIGHTS_VERSION: VERSIONS.long()}, "infos['weights_version']",
         "be a torch tensor of torch.int32, shape [2, 4]"),
        ({columns.LOSS_MASK: SAMPLED, columns.WEIGHTS_VERSION: VERSIONS.clamp(min=0)},
         "infos['weights_version']", "be -1 where nothing was sampled"),
        ({columns.GROUP: torch.zeros(2, 4, dtype=torch.int64)}, "infos['group']",
         "be a torch tensor of torch.int64, shape [2]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(infos, name, rule):
    with pytest.raises(Problems) as caught:
        info_columns(infos, EXISTS)
    assert (caught.value.problem.name, caught.value.problem.rule) == (name, rule)


def test_check_env_finds_it():
    env = word_env()
    step = env.step

    def wrong(actions):
        *result, infos = step(actions)
        infos[columns.LOSS_MASK] = torch.ones_like(actions[columns.COMPLETION_MASK])
        return *result, infos

    env.step = wrong
    (problem,) = check_env(env)
    assert problem.name == "step().infos['loss_mask'][0]"
    assert problem.rule == "be False where completion_mask is"
