from __future__ import annotations

import pytest
import torch

from rllib_llm.envs.actions import BanditEnvError, decode_completions, told_columns
from rllib_llm.envs.check_env import check_env
from rllib_llm.shared import columns
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


def test_special_tokens_are_left_out():
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
    told = {
        columns.LOSS_MASK: SAMPLED,
        columns.WEIGHTS_VERSION: VERSIONS,
        columns.GROUP: torch.tensor([7, 7]),
    }
    found = told_columns({**told, "scores": torch.zeros(2)}, EXISTS)
    assert found.keys() == told.keys() and all(found[name] is told[name] for name in told)
    assert told_columns({"scores": torch.zeros(2)}, EXISTS) == {}


@pytest.mark.parametrize(
    "infos, said",
    [
        ({columns.LOSS_MASK: SAMPLED.int()},
         r"infos\['loss_mask'\] of torch.int32, shape \[2, 4\] must be .* of torch.bool"),
        ({columns.LOSS_MASK: SAMPLED[:, :3]}, r"shape \[2, 3\] must be .* shape \[2, 4\]"),
        ({columns.LOSS_MASK: SAMPLED.tolist()}, r"infos\['loss_mask'\] of type list must be"),
        ({columns.LOSS_MASK: torch.ones(2, 4).bool()},
         r"infos\['loss_mask'\]\[1\]=\[1, 1, 1, 1\] must be False where completion_mask is, "),
        ({columns.LOSS_MASK: SAMPLED & (torch.arange(2) < 1).unsqueeze(1)},
         r"infos\['loss_mask'\]\[1\]=\[0, 0, 0, 0\] must be True somewhere"),
        ({columns.WEIGHTS_VERSION: VERSIONS.long()}, r"torch.int64, .* tensor of torch.int32"),
        ({columns.LOSS_MASK: SAMPLED, columns.WEIGHTS_VERSION: VERSIONS.clamp(min=0)},
         r"infos\['weights_version'\] must be -1 where nothing was sampled"),
        ({columns.GROUP: torch.zeros(2, 4, dtype=torch.int64)},
         r"infos\['group'\] of torch.int64, shape \[2, 4\] must be .* shape \[2\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(infos, said):
    with pytest.raises(BanditEnvError, match=said):
        told_columns(infos, EXISTS)


def test_check_env_finds_it():
    env = word_env()
    step = env.step

    def told(actions):
        *result, infos = step(actions)
        infos[columns.LOSS_MASK] = torch.ones_like(actions[columns.COMPLETION_MASK])
        return *result, infos

    env.step = told
    (problem,) = check_env(env)
    assert "infos['loss_mask'][0]=[1, 1, 1, 1, 1, 1] must be False" in problem
