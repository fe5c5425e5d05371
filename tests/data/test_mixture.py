"""Several data sets by weight: shares, order, restarts, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rllib_llm.algorithms.dpo import DPOConfig
from rllib_llm.algorithms.sft import SFT, SFTConfig
from rllib_llm.data.mixture import batches_of, places_of
from rllib_llm.data.sources import check_source, entries_of, is_mixture, load_rows
from rllib_llm.data.texts import TextSource
from rllib_llm.examples.arithmetic import build_tokenizer
from rllib_llm.shared.errors import Problems


def test_the_places_of_a_hand_calculation():
    sources, places = places_of([2, 1], np.arange(6))
    # floor((p + 1) 2/3) above floor(p 2/3) at p = 1, 2, 4, 5.
    assert sources.tolist() == [1, 0, 0, 1, 0, 0] and places.tolist() == [0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize("weights", [[1.0], [1, 1, 1], [5, 2, 1.5, 0.25], [1e-3, 1, 2]])
def test_every_source_has_its_share_and_its_rows_in_order(weights):
    sources, places = places_of(weights, np.arange(5000))
    for number, weight in enumerate(weights):
        mine = sources == number
        assert places[mine].tolist() == list(range(mine.sum()))
        expected = np.arange(1, 5001) * weight / sum(weights)
        assert np.abs(np.cumsum(mine) - expected).max() <= number + 1


def texts(letter: str, count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{letter}", "completion": str(n)} for n in range(count)]


def mixed(shuffle: bool = True):
    data = [{"path": texts("1", 7), "weight": 2}, {"path": texts("2", 3), "weight": 1}]
    return batches_of(TextSource, data, tokenizer=build_tokenizer(), max_length=8, shuffle=shuffle)


def test_a_batch_is_that_of_its_positions_wherever_it_begins():
    source = mixed()
    whole = source.batch(0, 60)["input_ids"]
    parts = [mixed().batch(position, 12)["input_ids"] for position in range(0, 60, 12)]
    assert torch.equal(whole, torch.cat(parts))
    first, three = build_tokenizer().encode("12")
    assert (whole[:, 0] == first).sum() == 40 and (whole[:, 0] == three).sum() == 20
    assert len(source) == 10 and source.truncated_share == 0.0


def test_a_set_begins_anew_when_it_ends():
    texts = map(build_tokenizer().decode, mixed(shuffle=False).batch(0, 12)["input_ids"])
    own = [text[1] for text in texts if text[0] == "2"]
    assert own == ["0", "1", "2", "0"]


@pytest.mark.parametrize("weight", [0, True, "2"])
def test_an_entry_with_a_wrong_weight_is_named(weight):
    data = [{"path": [{"text": "1"}]}, {"path": [{"text": "1"}], "weight": weight}]
    with pytest.raises(Problems) as refused:
        check_source(data)
    assert refused.value.problem.name == "data[1].weight"


def test_entries_without_weights_have_equal_shares():
    data = [{"path": [{"text": text}]} for text in "12"]
    weighed = [entry | {"weight": 1} for entry in data]
    assert entries_of(data, "data") == entries_of(weighed, "data")
    assert is_mixture(data) and not is_mixture([{"path": "a.png", "text": "a"}])


def test_prompts_are_no_mixture():
    with pytest.raises(Problems) as refused:
        load_rows([{"path": "a.jsonl", "weight": 1}], name="prompts")
    assert refused.value.problem.name == "prompts"


def test_a_config_makes_it(tmp_path):
    config = SFTConfig().training(
        data=[{"path": texts("1", 4), "weight": 1}, {"path": texts("2", 4), "weight": 1}]
    )
    config.language_model(model="rllib_llm.examples.arithmetic.build_model")
    config.validate()
    settings = {"tokenizer": build_tokenizer(), "max_length": 8}
    source = config.make_source(config.data, shuffle=True, **settings)
    assert source.batch(0, 4)["input_ids"].shape[0] == 4


@pytest.mark.parametrize("loss_type", ["sigmoid", "kto"])
def test_a_part_of_one_completion_a_row_is_for_kto_alone(loss_type):
    pair = {"prompt": "1", "chosen": "2", "rejected": "3"}
    labelled = {"prompt": "1", "completion": "2", "label": True}
    config = DPOConfig().training(loss_type=loss_type)
    data = [{"path": [pair], "weight": 1}, {"path": [labelled], "weight": 1}]
    settings = {"tokenizer": build_tokenizer(), "max_length": 8, "shuffle": False}
    if loss_type == "kto":
        mask = config.make_source(data, **settings).batch(0, 2)["rejected_mask"]
        assert mask.any(dim=1).tolist() == [False, True]  # the second source takes position 0
        return
    with pytest.raises(Problems) as refused:
        config.make_source(data, **settings)
    assert refused.value.problem.name == "loss_type"


def test_an_entry_that_cannot_be_read_is_named_by_its_number(tmp_path):
    """By what looks for files, by what reads them, and in a list of files."""
    (tmp_path / "empty.jsonl").write_text("")
    good = {"path": [{"text": "1"}], "weight": 1}
    for entry in ("nothere.jsonl", "empty.jsonl"):
        data = [good, good, {"path": str(tmp_path / entry), "weight": 1}]
        with pytest.raises(Problems) as caught:
            check_source(data)
            batches_of(TextSource, data, tokenizer=build_tokenizer(), max_length=8)
        assert caught.value.problem.name == "data[2]"
    files = [str(tmp_path / name) for name in ("empty.jsonl", "nothere.jsonl")]
    for read in (check_source, load_rows):
        with pytest.raises(Problems) as caught:
            read(files)
        assert caught.value.problem.name == "data[1]"


def test_data_that_is_not_there_is_told_before_an_algorithm_is_made():
    """And with it Ray: the files are on this machine."""

    class Never(SFT):
        def __init__(self, *args, **kwargs):
            raise AssertionError("made")

    Never.config_class = SFTConfig
    config = SFTConfig(algo_class=Never).language_model(
        model="rllib_llm.examples.arithmetic.build_model"
    )  # fmt: skip
    config.training(data="nothere.jsonl", eval_data=["alsonot.csv"])
    with pytest.raises(Problems) as caught:
        config.build_algo()
    assert [problem.name for problem in caught.value.found] == ["data", "eval_data[0]"]
