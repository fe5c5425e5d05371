from __future__ import annotations

import json
import math
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants as hub_constants
from transformers import BertConfig, BertForMaskedLM, GenerationConfig

from rllib_llm.modules.model_source import load_with_retries, source_kind
from rllib_llm.modules.pretrained import (
    disable_dropout,
    load_causal_lm,
    load_sequence_classifier,
    score_head,
)
from rllib_llm.modules.tokenizer import (
    ensure_pad_token,
    eos_token_ids,
    load_generation_config,
    load_tokenizer,
)
from rllib_llm.shared.errors import Problems
from tests import tiny_models as tiny

IDS = torch.tensor([[1, 7, 8, 9]])


@pytest.fixture
def folder(tmp_path):
    return tiny.save(tmp_path / "lm", tiny.llama(), tiny.byte_tokenizer())


@pytest.fixture
def judge_folder(tmp_path):
    return tiny.save(tmp_path / "judge", tiny.llama_classifier(), tiny.byte_tokenizer())


# --- what is loaded ------------------------------------------------------------------------


def test_causal_lm_from_a_folder_is_the_saved_one_without_dropout(folder):
    model = load_causal_lm(folder)
    assert not model.training
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, tiny.llama()(IDS).logits)
        model.train()
        assert torch.equal(model(IDS).logits, tiny.llama()(IDS).logits)
    assert model.config.attention_dropout == 0.1  # saved with it again


def test_dtype_is_that_of_the_weights(folder):
    assert load_causal_lm(folder, dtype="bfloat16").dtype == torch.bfloat16
    assert load_causal_lm(folder, dtype=torch.float32).dtype == torch.float32


def test_dotted_path_gives_the_same_weights_every_time_and_keeps_the_random_state():
    path = "tests.tiny_models.build_random_llama"
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = load_causal_lm(path)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    second = load_causal_lm("tests.tiny_models:build_random_llama")
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert load_tokenizer(path).pad_token == "<pad>"


def test_classifier_keeps_its_own_head(judge_folder):
    for new_head in (False, True):
        model = load_sequence_classifier(judge_folder, new_head=new_head)
        assert torch.equal(model.score.weight, tiny.llama_classifier().score.weight)


@pytest.mark.parametrize("dotted", [False, True])
def test_new_head_stands_on_the_causal_lms_trunk(folder, dotted):
    source = "tests.tiny_models.build_llama" if dotted else folder
    model = load_sequence_classifier(source, new_head=True, seed=1)
    again = load_sequence_classifier(source, new_head=True, seed=1)
    other = load_sequence_classifier(source, new_head=True, seed=2)
    head = score_head(model).weight
    assert head.shape == (1, 64)
    assert torch.equal(head, score_head(again).weight)
    assert not torch.equal(head, score_head(other).weight)
    # N(0, 1/65): the mean square of 64 draws is 1/65 up to a relative sqrt(2/64) = 0.18.
    assert head.square().mean().item() == pytest.approx(1 / 65, rel=3 * math.sqrt(2 / 64))
    with torch.no_grad():
        ours, lm = model.model(IDS).last_hidden_state, tiny.llama().model(IDS).last_hidden_state
    assert torch.equal(ours, lm)


def test_disable_dropout_reaches_modules_and_numbers():
    model = tiny.bert_classifier().train()
    disable_dropout(model)
    mask = torch.ones_like(IDS)
    first, second = (model(IDS, attention_mask=mask).logits for _ in range(2))
    assert torch.equal(first, second)


def test_eos_embedding_gets_a_gradient_where_the_pad_token_is_eos(tmp_path):
    model = load_causal_lm(tiny.save(tmp_path, tiny.llama(pad_token_id=2), tiny.byte_tokenizer()))
    model(torch.tensor([[1, 2, 7]])).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad[2].abs().sum() > 0


# --- tokenizers ----------------------------------------------------------------------------


def test_good_pad_token_stays_without_a_warning(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = load_tokenizer(folder)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<pad>", 3)


def test_missing_pad_token_takes_a_spare_one_and_the_vocabulary_keeps_its_size(tmp_path):
    tokenizer = tiny.byte_tokenizer(pad=None)
    size = len(tokenizer)
    path = tiny.save(tmp_path, tiny.llama(), tokenizer)
    loaded = load_tokenizer(path)
    assert loaded.pad_token == "<unk>"
    assert len(loaded) == size


def test_pad_that_is_eos_is_replaced(tmp_path):
    path = tiny.save(tmp_path, tiny.llama(), tiny.byte_tokenizer(pad="</s>"))
    tokenizer = load_tokenizer(path)
    assert tokenizer.pad_token == "<unk>"
    assert tokenizer.pad_token_id not in eos_token_ids(tokenizer)


def test_pad_that_is_a_further_eos_of_the_generation_config_is_replaced(tmp_path):
    path = tiny.save(tmp_path, tiny.llama(), tiny.byte_tokenizer())
    GenerationConfig(eos_token_id=[2, 3]).save_pretrained(path)  # 3 is <pad>
    assert load_tokenizer(path).pad_token == "<unk>"


def test_eos_pads_where_nothing_else_can():
    everything = dict.fromkeys(("unk", "bos", "eos"), "<|endoftext|>")  # as in GPT-2
    tokenizer = tiny.byte_tokenizer(everything, pad=None)
    ensure_pad_token(tokenizer)
    assert tokenizer.pad_token == "<|endoftext|>"


def test_reserved_tokens_pad_before_unknown_and_bos():
    tokenizer = tiny.byte_tokenizer(pad=None)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|reserved_special_token_0|>"]})
    ensure_pad_token(tokenizer)
    assert tokenizer.pad_token == "<|reserved_special_token_0|>"


def test_no_special_token_at_all_is_an_error():
    with pytest.raises(ValueError, match="tokenizer.pad_token=None must be a token"):
        ensure_pad_token(tiny.byte_tokenizer({}, pad=None))


def test_vocabulary_larger_than_the_embedding(tmp_path):
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens(["extra"])
    path = tiny.save(tmp_path, tiny.llama(), tokenizer)
    with pytest.raises(Problems) as caught:
        load_tokenizer(path)
    assert caught.value.problem.name == "the tokenizer's largest id"
    assert caught.value.problem.value == 260


def test_eos_ids_of_every_source():
    model = tiny.llama()
    assert eos_token_ids(model) == (2,)
    assert eos_token_ids(tiny.byte_tokenizer()) == (2,)
    assert eos_token_ids(model, GenerationConfig(eos_token_id=[7, 2]), None) == (2, 7)
    assert eos_token_ids(None) == ()


def test_generation_config_is_optional(folder, judge_folder):
    assert load_generation_config(folder).eos_token_id == 2
    assert load_generation_config(judge_folder) is None


# --- bad input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("/no/such/folder", "there is no folder '/no/such/folder'. Check the path"),
        ("~/no such folder", f"there is no folder '{Path.home()}/no such folder'"),
        ("model.gguf", "it is the name of a file. Name the folder that holds it"),
        ("", "it is empty"),
        (None, "it is a NoneType"),
        (3, "it is a int"),
    ],
)
def test_no_model_there(value, message):
    for load in (load_causal_lm, load_sequence_classifier, load_tokenizer):
        with pytest.raises(Problems, match=message) as error:
            load(value)
        assert "hub id such as 'org/name'" in str(error.value)


def test_a_file_and_an_empty_folder(tmp_path):
    file = tmp_path / "weights.bin"
    file.touch()
    with pytest.raises(Problems, match="it is the name of a file. Name the folder"):
        load_causal_lm(file)
    (tmp_path / "empty").mkdir()
    with pytest.raises(Problems, match=r"no config.json \(it holds nothing\)"):
        load_causal_lm(tmp_path / "empty")
    with pytest.raises(Problems, match=r"no config.json \(it holds empty, weights.bin\)"):
        load_causal_lm(tmp_path)


def test_an_adapter_and_an_rllib_checkpoint_are_told_apart(tmp_path):
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(Problems, match="PEFT adapter.*merge_and_unload"):
        load_causal_lm(tmp_path)
    checkpoint = tmp_path / "checkpoint"
    inside = checkpoint / "learner_group" / "learner" / "rl_module" / "default_policy"
    inside.mkdir(parents=True)
    with pytest.raises(Problems, match="an RLlib checkpoint.*Use .*default_policy"):
        load_causal_lm(checkpoint)


def test_wrong_kind_of_model(folder, judge_folder, tmp_path):
    with pytest.raises(Problems, match="LlamaForSequenceClassification.*causal language"):
        load_causal_lm(judge_folder)
    with pytest.raises(Problems, match="LlamaForCausalLM.*sequence classifier is wanted"):
        load_sequence_classifier(folder)
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=260)
    path = tiny.save(tmp_path / "mlm", BertForMaskedLM(config), tiny.byte_tokenizer())
    with pytest.raises(Problems, match="BertForMaskedLM"):
        load_causal_lm(path)


def test_broken_folders(folder):
    write = (Path(folder) / "config.json").write_text
    config = json.loads((Path(folder) / "config.json").read_text())
    write("{")
    with pytest.raises(Problems, match="cannot be loaded.*not a valid JSON"):
        load_causal_lm(folder)
    write(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(Problems, match=r"9 weights.*missing.*first is model.layers.2"):
        load_causal_lm(folder)
    write(json.dumps(config | {"intermediate_size": 99}))
    with pytest.raises(Problems, match="missing from it or have another shape"):
        load_causal_lm(folder)
    write(json.dumps(config))
    (Path(folder) / "model.safetensors").write_text("cut off")
    with pytest.raises(Problems, match="SafetensorError"):
        load_causal_lm(folder)


def test_broken_weights_in_torch_s_own_format_are_of_the_folder_too(folder):
    weights = Path(folder) / "pytorch_model.bin"
    (Path(folder) / "model.safetensors").unlink()
    torch.save(tiny.llama().state_dict(), weights)
    whole = weights.read_bytes()
    for written in (b"", whole[: len(whole) // 2], whole[:100]):
        weights.write_bytes(written)
        with pytest.raises(Problems, match="folder cannot be loaded"):
            load_causal_lm(folder)
    weights.write_bytes(pickle.dumps(print))
    with pytest.raises(Problems, match=r"\(its weights are no pickle of tensors alone\)"):
        load_causal_lm(folder)
    torch.save([1], weights)
    with pytest.raises(Problems, match=r"folder cannot be loaded \(TypeError"):
        load_causal_lm(folder)


def test_folder_without_tokenizer(tmp_path):
    tiny.llama().save_pretrained(tmp_path)
    with pytest.raises(Problems, match="no tokenizer .it holds config.json, "):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.build", "no_such_package"),
        ("tests.tiny_models.build_lama", "Did you mean 'build_llama'"),
        ("tests.tiny_models.NOT_A_FUNCTION", "is not a callable object. Name a function"),
        ("tests.tiny_models.save", "missing a required argument: 'folder'. Name a function"),
        ("tests.tiny_models.build_nothing", "the function returned LlamaForCausalLM"),
    ],
)
def test_bad_dotted_paths(path, message):
    with pytest.raises(ValueError, match=message):
        load_causal_lm(path)


def test_wrong_kind_from_a_dotted_path():
    with pytest.raises(Problems, match="causal language model is wanted"):
        load_causal_lm("tests.tiny_models.build_classifier")
    with pytest.raises(Problems, match="sequence classifier is wanted"):
        load_sequence_classifier("tests.tiny_models.build_llama")


def test_unknown_dtype(folder):
    with pytest.raises(ValueError, match="dtype='int8' must be one of float32, bfloat16, float16"):
        load_causal_lm(folder, dtype="int8")


@pytest.fixture
def asks_the_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)


def test_kinds_of_sources(folder, asks_the_hub):
    assert source_kind(folder) == ("folder", folder)
    assert source_kind("org/name-1.5B") == ("hub", "org/name-1.5B")
    assert source_kind("gpt2") == ("hub", "gpt2")
    assert source_kind("a.b.c") == ("dotted", "a.b.c")
    assert source_kind("a.b:c") == ("dotted", "a.b:c")


def test_a_name_that_is_nowhere_is_refused_where_the_hub_may_not_be_asked(
    asks_the_hub, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert source_kind("tiny2") == ("hub", "tiny2")
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Problems, match="not in the local cache") as caught:
        source_kind("tiny2")
    assert caught.value.problem.remedy.startswith("Give a local folder")
    (tmp_path / "tiny").mkdir()
    with pytest.raises(Problems) as caught:
        source_kind("tiny2")
    assert caught.value.problem.remedy.startswith("Did you mean './tiny'? Give a local folder")
    with pytest.raises(Problems, match="not in the local cache and HF_HUB_OFFLINE is set"):
        source_kind("org/name")
    (tmp_path / "cache" / "models--tiny2" / "snapshots").mkdir(parents=True)
    assert source_kind("tiny2") == ("hub", "tiny2")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("tinny/", "./tiny"), ("./tinny", "./tiny"), ("{here}/tinny", "{here}/tiny")],
)
def test_a_misspelt_folder_is_answered_with_the_one_beside_it(given, meant, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tinny.txt").touch()  # no folder
    with pytest.raises(Problems) as error:
        source_kind(given.format(here=tmp_path))
    assert error.value.problem.remedy == f"Did you mean '{meant.format(here=tmp_path)}'?"


def test_a_failed_download_is_answered_with_the_folder_of_nearly_that_name(
    asks_the_hub, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    for error in (ConnectionError("away"), ValueError("404")):
        with pytest.raises(Problems, match=r"Did you mean '\./tiny'\? "):
            load_with_retries(Flaky(*[error] * 3), "tiny2", "hub", first_delay_s=0, offline=False)


# --- retries -------------------------------------------------------------------------------


class Flaky:
    """A loader that fails with the given errors before it returns "model"."""

    def __init__(self, *errors: Exception):
        self.errors = list(errors)
        self.num_calls = 0

    def __call__(self) -> str:
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "model"


def test_passing_failures_are_retried_and_reported(caplog):
    load = Flaky(ConnectionError("reset"), TimeoutError("slow"))
    assert load_with_retries(load, "org/name", "hub", first_delay_s=0, offline=False) == "model"
    assert load.num_calls == 3
    assert "attempt 1 of 3" in caplog.text and "reset" in caplog.text


def test_a_hub_out_of_reach_says_how_to_do_without():
    load = Flaky(*[ConnectionError("Name or service not known")] * 3)
    with pytest.raises(Problems, match="could not be reached.*--local-dir.*HF_HUB_OFFLINE"):
        load_with_retries(load, "org/name", "hub", first_delay_s=0, offline=False)
    assert load.num_calls == 3


def test_failures_for_good_are_not_retried():
    load = Flaky(OSError("org/name is not a valid model identifier"))
    with pytest.raises(Problems, match="not a valid model identifier.*hf auth login"):
        load_with_retries(load, "org/name", "hub", offline=False)
    assert load.num_calls == 1


def test_offline_there_is_nothing_to_retry():
    load = Flaky(ConnectionError("offline mode is enabled"))
    with pytest.raises(Problems, match="not in the local cache and HF_HUB_OFFLINE is set"):
        load_with_retries(load, "org/name", "hub", offline=True)
    assert load.num_calls == 1


def test_errors_in_code_pass_through():
    with pytest.raises(KeyError):
        load_with_retries(Flaky(KeyError("bug")), "org/name", "hub")
