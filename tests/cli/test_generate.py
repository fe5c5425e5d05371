from __future__ import annotations

import dataclasses
import io
import json
import shutil

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT, find_model, write_manifest
from rllib_llm.cli.generate import (
    CheckpointCompleter,
    CompletionPiece,
    GenerateOptions,
    converse,
    unescaped,
)
from rllib_llm.cli.main import app
from rllib_llm.data.encoding import render_chat
from rllib_llm.examples import arithmetic
from rllib_llm.shared.errors import Problems
from tests.cli.said import said
from tests.envs.tiny_tokenizers import word_tokenizer


def tiny_llama(vocab_size: int) -> LlamaForCausalLM:
    """A Llama of 16 units that hardly ever ends by itself."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=128, eos_token_id=2, pad_token_id=0,
            initializer_range=0.6,
        )  # fmt: skip
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder that holds a small untrained model where a checkpoint does."""
    folder = tmp_path_factory.mktemp("trial") / "checkpoint_000000"
    model, tokenizer = arithmetic.build_model(0, hidden_size=16, num_layers=1, num_heads=2)
    for part in (model, tokenizer):
        part.save_pretrained(folder / MODEL_IN_CHECKPOINT)
    write_manifest(folder, {})
    return folder


def generate(*arguments: object, **kwargs: object):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], **kwargs)


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_a_file_of_prompts_gives_a_file_of_completions(checkpoint, tmp_path):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "deep" / "c.jsonl"
    prompts.write_text('{"prompt": "1+2="}\n{"prompt": "3+4="}\n', encoding="utf-8")
    result = generate(
        checkpoint, "--file", prompts, "--out", out, "--num-completions", 2,
        "--max-new-tokens", 5, "--seed", 3,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    made = rows(out.read_text(encoding="utf-8"))
    assert [row["prompt"] for row in made] == ["1+2=", "1+2=", "3+4=", "3+4="]
    assert all(1 <= row["num_tokens"] <= 5 for row in made)
    assert all(row["finished"] or row["num_tokens"] == 5 for row in made)
    assert f"4 completions in {out}" in said(result.output)


def test_the_column_of_prompts_is_named(checkpoint, tmp_path):
    table = tmp_path / "sums.csv"
    table.write_text("question,answer\n1+2=,3\n", encoding="utf-8")
    result = generate(checkpoint, "--file", table, "--column", "question", "--max-new-tokens", 2)
    assert [row["prompt"] for row in rows(result.stdout)] == ["1+2="]
    result = generate(checkpoint, "--file", table)
    assert result.exit_code == 2
    assert "--column must be set: " in said(result.output)
    assert "Name the one that holds the prompts." in said(result.output)
    result = generate(checkpoint, "--column", "question", input="1+2=\n")
    assert result.exit_code == 2
    assert "--column='question' must come with --file" in said(result.output)


def test_the_seed_decides_what_is_sampled(checkpoint):
    def completions(*arguments: object) -> list[str]:
        result = generate(checkpoint, *arguments, input="1+2=\n3+4=\n")
        return [row["completion"] for row in rows(result.output)]

    first = completions("--seed", 1)
    assert len(first) == 2
    assert completions("--seed", 1) == first
    assert completions("--seed", 2) != first
    assert completions("--greedy") == completions("--temperature", 0)


def test_chat_without_a_template_is_refused(checkpoint):
    result = generate(checkpoint, "--chat", input="hello\n")
    assert result.exit_code == 2
    assert "the tokenizer has no chat template" in said(result.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/at/all"], "checkpoint='/nowhere/at/all' must be a folder: there is none"),
        (["--temperature", "-1"], "Invalid value for '--temperature'"),
        (["--top-p", "2"], "top_p=2.0 must be above 0 and at most 1"),
        (["--file", "absent.jsonl"], "must be a file or folder that exists"),
    ],
)
def test_mistakes_are_told(checkpoint, arguments: list[str], message: str):
    if not arguments[0].startswith("/"):
        arguments = [str(checkpoint), *arguments]
    result = generate(*arguments)
    assert result.exit_code == 2
    assert message in said(result.output)


def test_the_model_is_found_in_checkpoint_trial_and_model_folders(checkpoint, tmp_path):
    model = str(checkpoint / MODEL_IN_CHECKPOINT)
    assert find_model(str(checkpoint)) == model
    assert find_model(str(checkpoint.parent)) == model
    unfinished = checkpoint.with_name("checkpoint_000001") / MODEL_IN_CHECKPOINT
    shutil.copytree(model, unfinished)  # all that a copy brought before it was killed
    assert find_model(str(checkpoint.parent)) == model
    with pytest.raises(ValueError, match="saving it was interrupted"):
        find_model(str(checkpoint.with_name("checkpoint_000001")))
    shutil.rmtree(checkpoint.with_name("checkpoint_000001"))
    assert find_model(model) == model
    assert find_model("org/name") == "org/name"
    trial = tmp_path / "run" / "grpo" / "trial"
    shutil.copytree(checkpoint, trial / checkpoint.name)
    for folder in (trial.parent, trial.parent.parent):  # a stage, and a run, of one trial
        assert find_model(str(folder)).startswith(str(trial))
    shutil.copytree(checkpoint, trial.with_name("other") / checkpoint.name)
    with pytest.raises(ValueError, match="must be one trial: it holds 2"):
        find_model(str(trial.parent))
    with pytest.raises(ValueError, match="must hold a model: there is no config.json"):
        find_model(str(tmp_path))


def test_a_folder_that_is_not_there_is_none_of_the_hub_where_its_neighbours_are(
    tmp_path, monkeypatch
):
    (tmp_path / "weights" / "v2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="there is none. Did you mean 'weights/v2'"):
        find_model("weights/v3")
    assert find_model("gpt/v3") == "gpt/v3"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A Hugging Face folder of a small untrained model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = word_tokenizer(chat=True)
    model = tiny_llama(len(tokenizer))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def test_a_model_with_a_template_chats_by_default(chat_model):
    completer = CheckpointCompleter(str(chat_model), GenerateOptions(system="good"))
    assert completer.chats
    chat = completer.as_chat("the cat")
    assert chat == [
        {"role": "system", "content": "good"},
        {"role": "user", "content": "the cat"},
    ]
    result = generate(chat_model, "--seed", 1, input="the cat\n")
    plain = generate(chat_model, "--seed", 1, "--no-chat", input="the cat\n")
    (one,), (other,) = rows(result.output), rows(plain.output)
    assert one["prompt"] == other["prompt"] == "the cat"  # apart from the completion
    assert one["completion"] != other["completion"]  # the model read something else
    refused = generate(chat_model, "--no-chat", "--system", "good", input="the\n")
    assert refused.exit_code == 2 and "--system='good' must come with a chat" in said(
        refused.output
    )


def test_what_streams_is_what_is_completed_at_once(chat_model):
    # With seed 8 the completion is 62 tokens long, in a chat as without.
    for settings in ({"seed": 8}, {"greedy": True}, {"seed": 8, "chat": False}):
        sampling = GenerateOptions(**settings)
        (made,) = CheckpointCompleter(str(chat_model), sampling).complete(["the big dog"])
        pieces = list(CheckpointCompleter(str(chat_model), sampling).sample(["the big dog"]))
        assert "".join(piece.text for piece in pieces) == made["completion"]
        assert [piece.num_tokens for piece in pieces] == [*range(1, made["num_tokens"] + 1)]


def test_a_completion_does_not_depend_on_the_prompts_beside_it(chat_model):
    alone = CheckpointCompleter(str(chat_model), GenerateOptions(seed=8)).complete(["the big dog"])
    completer = CheckpointCompleter(str(chat_model), GenerateOptions(seed=8))
    both = completer.complete(["the big dog", "a cat"])
    assert both[0] == alone[0]


def test_an_interrupted_answer_does_not_disturb_the_next(chat_model):
    completer = CheckpointCompleter(str(chat_model), GenerateOptions(greedy=True))
    next(completer.sample(["the big dog"]))  # Ctrl-C comes behind its first token
    after = completer.complete(["the big dog"])
    anew = CheckpointCompleter(str(chat_model), GenerateOptions(greedy=True))
    assert after == anew.complete(["the big dog"])


def test_a_stop_text_ends_a_completion_and_is_no_part_of_it(chat_model):
    completer = CheckpointCompleter(str(chat_model), GenerateOptions(seed=4))
    whole = completer.complete(["the"])[0]["completion"]
    stop = "bad"
    expected = whole[: whole.index(stop)]
    assert expected.strip() and not expected.endswith("bad")
    stopped = CheckpointCompleter(str(chat_model), GenerateOptions(seed=4, stop=[stop]))
    row = stopped.complete(["the"])[0]
    assert row["completion"] == expected and row["finished"]
    again = CheckpointCompleter(str(chat_model), GenerateOptions(seed=4, stop=[stop]))
    pieces = list(again.sample(["the"]))
    assert "".join(piece.text for piece in pieces) == expected
    assert pieces[-1].num_tokens == row["num_tokens"]  # none behind the stop text


def test_a_long_chat_loses_its_oldest_exchanges_but_not_the_system_message(chat_model):
    completer = CheckpointCompleter(str(chat_model), GenerateOptions(system="good"))
    chat = [{"role": "system", "content": "good"}]
    for question, answer in (("cat", "sat"), ("dog", "ran")):
        chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    chat.append({"role": "user", "content": "mat"})
    assert completer.shortened(chat) == chat
    without_the_first = render_chat(
        completer.tokenizer, [chat[0], *chat[3:]], generation_prompt=True
    )
    room = len(completer.tokenizer(without_the_first, add_special_tokens=False)["input_ids"])
    completer.sampling = dataclasses.replace(completer.sampling, max_prompt_len=room)
    kept = completer.shortened(chat)
    assert [message["content"] for message in kept] == ["good", "dog", "ran", "mat"]
    assert completer.shortened(kept[-1:]) == kept[-1:]


def test_a_conversation_remembers_until_it_begins_anew(chat_model, monkeypatch):
    completer = CheckpointCompleter(str(chat_model), GenerateOptions(greedy=True, max_new_tokens=3))
    heard: list = []

    def sample(chats):
        heard.append([message["content"] for message in chats[0]])
        yield from (CompletionPiece(0, "an", 1, False), CompletionPiece(0, "swer", 2, True))

    monkeypatch.setattr(completer, "sample", sample)
    typed = iter(["cat", "dog", "/new", "mat", ""])
    out = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(out, "input", lambda prompt: next(typed))
    converse(completer, out)
    assert heard == [["cat"], ["cat", "answer", "dog"], ["mat"]]
    assert out.file.getvalue().count("model> answer\n") == 3


def test_a_stop_text_of_any_script_stays_as_it_is():
    assert unescaped("。") == "。" and unescaped("é🙂") == "é🙂"
    assert unescaped(r"\n\u3002") == "\n。" and unescaped(r"\\") == "\\"
    with pytest.raises(Problems, match="Write a backslash twice"):
        unescaped("\\")


def test_standard_input_that_is_no_text_is_a_sentence(checkpoint):
    done = CliRunner().invoke(app, ["generate", str(checkpoint)], input=b"1+1=\n\xff\xfe\n")
    assert isinstance(done.exception, SystemExit) and done.exit_code == 2
    assert "standard input must be text in UTF-8" in said(done.output)
