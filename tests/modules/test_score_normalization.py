from __future__ import annotations

import pytest

from rllib_llm.modules.pretrained import load_sequence_classifier
from rllib_llm.modules.sequence_scores import (
    read_score_normalization,
    write_score_normalization,
)
from tests import tiny_models as tiny


def test_what_is_written_into_a_folder_is_read_again(tmp_path):
    path = tiny.save(tmp_path, tiny.llama_classifier(), tiny.byte_tokenizer())
    assert read_score_normalization(path) is None
    write_score_normalization(path, 1.5, 2.0)
    assert read_score_normalization(path) == (1.5, 2.0)
    assert load_sequence_classifier(path).config.model_type == "llama"


def test_dotted_paths_have_none_unless_their_config_says_so():
    assert read_score_normalization("tests.tiny_models.build_classifier") is None


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.0), (0.0, -1.0), (float("nan"), 1.0)])
def test_numbers_that_cannot_normalise(tmp_path, mean, std):
    with pytest.raises(ValueError, match="must be a finite mean and a standard deviation above 0"):
        write_score_normalization(tmp_path, mean, std)
