"""`rllib generate`: completions of a trained model, for a file or in conversation."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.console import Console
from typer import Argument, Option

from rllib_llm.cli.options import takes
from rllib_llm.cli.session import prepare, shown_warnings, user_errors
from rllib_llm.shared.errors import Problems, require

if TYPE_CHECKING:
    from rllib_llm.engines.params import SamplingParams

DEFAULT_NEW_TOKENS = 64
BATCH_PROMPTS = 32
NEW_CHAT = "/new"
TOKENS_BEFORE = 8  # of a prompt, decoded with its completion for the space between them

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class GenerateOptions:
    """How completions are sampled: the options of `rllib generate`."""

    # fmt: off
    max_new_tokens: Annotated[int | None, Option(
        min=1, help="Longest completion, tokens. Default: 64, or what the model has room for."
    )] = None
    temperature: Annotated[float, Option(
        min=0.0, help="Logits are divided by it; 0 is the same as --greedy.")] = 1.0
    top_p: Annotated[float, Option(
        help="Sample from the likeliest tokens with this probability.")] = 1.0
    top_k: Annotated[int, Option(help="Sample from the k likeliest tokens; 0: all.")] = 0
    greedy: Annotated[bool, Option("--greedy", help="Take the likeliest token.")] = False
    num_completions: Annotated[int, Option(min=1, help="Completions of each prompt.")] = 1
    seed: Annotated[int, Option(help="The same seed gives the same completions.")] = 0
    max_prompt_len: Annotated[int, Option(
        min=1, help="Tokens; of a longer prompt the end is kept.")] = 512
    chat: Annotated[bool | None, Option(
        "--chat/--no-chat", help="Make each prompt a user turn in the model's chat template. "
        "Default: if the model has one.")] = None
    system: Annotated[str | None, Option(help="System message of the chats.")] = None
    template_settings: Annotated[str | None, Option(
        help="Variables of the chat template, as {enable_thinking: false}.")] = None
    stop: Annotated[list[str] | None, Option(
        "--stop", help="A text that ends a completion; \\n is a line break. May be repeated."
    )] = None
    # fmt: on


class CompletionPiece(NamedTuple):
    """The new part of a completion."""

    number: int
    """Of the completion: those of the first prompt come first."""
    text: str
    num_tokens: int
    """Sampled so far."""
    finished: bool
    """Whether it has ended by itself, at a stop token or text."""


class CheckpointCompleter:
    """A model, its tokenizer and sampling settings. Noise goes by the number of a prompt."""

    def __init__(self, checkpoint: str, sampling: GenerateOptions) -> None:
        from rllib_llm.checkpoints.folder import find_model
        from rllib_llm.engines.params import SamplingParams
        from rllib_llm.envs.prompts import PromptEncoder
        from rllib_llm.modules.pretrained import load_causal_lm
        from rllib_llm.modules.tokenizer import eos_token_ids, load_tokenizer
        from rllib_llm.runs.yaml_loader import parse

        model = find_model(checkpoint)
        self.sampling = sampling
        self._stops = [unescaped(text) for text in sampling.stop or ()]
        given = parse(sampling.template_settings or "{}", "--template-settings")
        require(isinstance(given, dict), "--template-settings", sampling.template_settings,
                "be a mapping of variables", remedy="Write '{enable_thinking: false}'")  # fmt: skip
        self.tokenizer = load_tokenizer(model, template_settings=given)
        has_template = bool(self.tokenizer.chat_template)
        self.chats = has_template if sampling.chat is None else sampling.chat
        why = "--no-chat leaves it out" if has_template else "there is no chat template"
        require(sampling.system is None or self.chats, "--system", sampling.system,
                "come with a chat", why, "Put it into the prompt instead")  # fmt: skip
        self.model = load_causal_lm(model)
        self.params = SamplingParams(
            pad_token_id=self.tokenizer.pad_token_id,
            stop_token_ids=eos_token_ids(
                self.model.config, self.tokenizer, self.model.generation_config
            ),
            max_new_tokens=sampling.max_new_tokens or DEFAULT_NEW_TOKENS,
            temperature=sampling.temperature or 1.0,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            greedy=sampling.greedy or sampling.temperature == 0,
        )
        self._encoder = PromptEncoder(self.tokenizer, sampling.max_prompt_len)
        self._engine: Any = None
        self._num_done = 0

    def complete(self, prompts: list[Any]) -> list[dict[str, Any]]:
        """Return the completions of each prompt (text or chat messages) as JSON rows."""
        n = self.sampling.num_completions
        rows = [{"prompt": prompt, "completion": ""} for prompt in prompts for _ in range(n)]
        for number, text, num_tokens, finished in self.sample(prompts, n):
            rows[number]["completion"] += text
            rows[number] |= {"num_tokens": num_tokens, "finished": finished}
        return rows

    def sample(self, prompts: list[Any], n: int = 1) -> Iterator[CompletionPiece]:
        """Samples `n` completions of each prompt; their pieces as they come."""
        from rllib_llm.data.decoding import TextStream
        from rllib_llm.engines.protocol import NOT_FINITE, Noise, Row
        from rllib_llm.engines.torch_engine import TorchEngine

        prompt_ids = [ids for ids in self._encode(prompts) for _ in range(n)]
        first, self._num_done = self._num_done * n, self._num_done + len(prompts)
        # One that was abandoned in the middle of its work is not used again.
        engine, self._engine = self._engine or TorchEngine(self.model, version=0), None
        engine.add([
            Row(i, ids, self._params_for(len(ids)), noise=Noise(self.sampling.seed, first + i),
                group=i // n)
            for i, ids in enumerate(prompt_ids)
        ])  # fmt: skip
        left: dict[Any, TextStream] = {
            i: TextStream(self.tokenizer, () if self.chats else ids[-TOKENS_BEFORE:], self._stops)
            for i, ids in enumerate(prompt_ids)
        }
        counts: dict[Any, int] = dict.fromkeys(left, 0)
        while left:
            ended = {each.id: each.tokens.since(counts[each.id]) for each in engine.step()}
            going = [i for i in left if i not in ended]
            new = engine.sampled(going, [counts[i] for i in going])
            for i, tokens in [*ended.items(), *zip(going, new, strict=True)]:
                if tokens.finish == "error":
                    raise Problems(NOT_FINITE)
                stream, text = left[i], ""
                for token in tokens.token_ids:
                    counts[i] += 1
                    if token not in self.params.stop_token_ids:
                        text += stream.push(token)
                    if stream.stopped_by is not None:
                        break
                if i in ended or stream.stopped_by is not None:
                    text += stream.finish()
                    engine.abort([i])
                    del left[i]
                finished = tokens.finish == "stop" or stream.stopped_by is not None
                yield CompletionPiece(i, text, counts[i], finished)
        self._engine = engine

    def shortened(self, chat: Messages) -> Messages:
        """The chat without its oldest exchanges, where it is too long; a system message stays."""
        from rllib_llm.data.encoding import render_chat

        head = [message for message in chat[:1] if message["role"] == "system"]
        turns = chat[len(head) :]
        while len(turns) > 2:
            text = render_chat(self.tokenizer, [*head, *turns], generation_prompt=True)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) <= self.sampling.max_prompt_len:
                break
            turns = turns[2:]
        return [*head, *turns]

    def as_chat(self, prompt: Any) -> Any:
        """A prompt as the model reads it: messages in a chat, with the system's first."""
        if not self.chats and isinstance(prompt, str):
            return prompt
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.sampling.system is not None and chat[0]["role"] != "system":
            chat.insert(0, {"role": "system", "content": self.sampling.system})
        return chat

    def _encode(self, prompts: list[Any]) -> list[list[int]]:
        from rllib_llm.envs.prompts import PromptRow

        rows = [
            PromptRow(self._num_done + i, self.as_chat(prompt), {})
            for i, prompt in enumerate(prompts)
        ]
        return self._encoder.encode(rows)[0]

    def _params_for(self, prompt_len: int) -> SamplingParams:
        """Return the sampling settings; a limit that the user left open fits the model."""
        from rllib_llm.modules.model_source import text_config

        text = text_config(self.model)
        positions = getattr(text, "max_position_embeddings", None)
        if self.sampling.max_new_tokens is not None or positions is None:
            return self.params
        room = max(1, min(DEFAULT_NEW_TOKENS, positions - prompt_len))
        return dataclasses.replace(self.params, max_new_tokens=room)


@takes(GenerateOptions)
def generate(
    checkpoint: Annotated[str, Argument(
        help="Checkpoint, trial, run, Hugging Face folder or hub id.")],
    file: Annotated[Path | None, Option(
        "--file", "-f", help="Prompts: JSONL, CSV or Parquet with a column `prompt` (or "
        "`messages`), or text with one prompt per line. Without it: from the terminal, or from "
        "standard input.")] = None,
    column: Annotated[str | None, Option(
        help="The column of --file that holds the prompts.")] = None,
    out: Annotated[Path | None, Option(
        "--out", "-o", help="JSONL file for the completions of --file.")] = None,
    *,
    options: GenerateOptions,
) -> None:  # fmt: skip
    """Complete prompts with a trained model, or talk to it.

    The model is loaded from the checkpoint as an ordinary Hugging Face folder; Ray is not started.
    """
    prepare()
    with user_errors():
        require(column is None or file, "--column", column, "come with --file", "", "")
        completer = CheckpointCompleter(checkpoint, options)
        talks = file is None and sys.stdin.isatty()
        prompts = [] if talks else _prompts(file, column)
    if talks:
        converse(completer, Console())
        return
    with user_errors():  # JSON lines, to the file or to standard output
        batches = (prompts[i : i + BATCH_PROMPTS] for i in range(0, len(prompts), BATCH_PROMPTS))
        rows = (row for batch in batches for row in completer.complete(batch))
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        if out is None:
            for line in lines:
                print(line, flush=True)
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("w", encoding="utf-8") as stream:
            num_lines = sum(stream.write(f"{line}\n") > 0 for line in lines)
    text = f"{num_lines} completions in {out}"
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


def unescaped(text: str) -> str:
    """Return `text` with Python's escapes, such as `\\n`, as the characters that they mean.

    Raises:
        Problems: a backslash begins no escape.
    """
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        remedy = "Write a backslash twice"
        raise Problems("--stop", "hold whole escapes", error.reason, remedy, text) from error


def _prompts(file: Path | None, column: str | None) -> list[Any]:
    """The prompts of a file, or the lines of standard input."""
    if file is None:
        try:
            return [line.rstrip("\n") for line in sys.stdin]
        except UnicodeDecodeError as error:
            raise Problems("standard input", "be text in UTF-8", error, "Encode it so") from error
    from rllib_llm.envs.prompts import PromptSource

    try:
        source = PromptSource(str(file), prompt_column=column, shuffle=False)
    except Problems as error:
        if column is None and error.problem.name == "prompts.column":
            remedy = "Name the one that holds the prompts"
            raise Problems([replace(error.problem, name="--column", remedy=remedy)]) from error
        raise
    return [source.row(index).prompt for index in range(len(source))]


def converse(completer: CheckpointCompleter, console: Console) -> None:
    """Read prompts from the terminal until an empty line or the end of input, and stream the
    model's answers. A chat continues from turn to turn until `/new`."""
    if completer.chats:
        hint = f"A chat: the model remembers it. {NEW_CHAT} begins another, an empty line ends."
    else:
        hint = "Type a beginning; the model continues. An empty line ends."
    console.print(hint, style="dim", highlight=False)
    asked, answers = ("you> ", "model> ") if completer.chats else ("prompt> ", "answer> ")
    history: Messages = []
    while True:
        try:
            prompt = console.input(f"[bold cyan]{asked}[/bold cyan]")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not prompt.strip():
            return
        if prompt.strip() == NEW_CHAT:
            history = []
            continue
        with user_errors(), shown_warnings():
            turns = [*history, {"role": "user", "content": prompt}]
            given = completer.shortened(completer.as_chat(turns)) if completer.chats else prompt
            for number in range(completer.sampling.num_completions):
                console.print(answers, style="bold green", end="")
                answer = _show((piece.text for piece in completer.sample([given])), console)
                if number == 0:
                    history = [*turns, {"role": "assistant", "content": answer}]


def _show(pieces: Iterator[str], console: Console) -> str:
    """Print the pieces of a text as they come, and return it; Ctrl-C ends it."""
    text = ""
    try:
        for piece in pieces:
            text += piece
            console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        pass
    console.print()
    return text
