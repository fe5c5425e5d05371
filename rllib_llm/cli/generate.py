"""`rllib generate`: completions of a trained model, for a file or in conversation."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rllib_llm.cli.completer import Completer, Messages, Sampling
from rllib_llm.cli.panel import shown_warnings, user_errors
from rllib_llm.cli.session import prepare
from rllib_llm.shared.errors import UserError

BATCH_PROMPTS = 32
NEW_CHAT = "/new"


def generate(
    checkpoint: Annotated[
        str, typer.Argument(help="Checkpoint, trial folder, Hugging Face folder or hub id.")
    ],
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="Prompts: JSONL or Parquet with a column `prompt` (or "
            "`messages`), or text with one prompt per line. Without it: from the "
            "terminal, or from standard input.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="JSONL file for the completions of --file.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Longest completion, tokens. Default: 64, or what the model has room for."
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Logits are divided by it; 0 is the same as --greedy.")
    ] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample from this probability mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from so many tokens; 0: all.")] = 0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token.")] = False,
    num_completions: Annotated[int, typer.Option(min=1, help="Completions of each prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed gives the same completions.")] = 0,
    max_prompt_len: Annotated[
        int, typer.Option(min=1, help="Tokens; of a longer prompt the end is kept.")
    ] = 512,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Make each prompt the user's turn in the model's chat template. Default: where "
            "the model has one.",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="System message of the chats.")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop",
            help="A text that ends a completion, \\n for a line's end; as often as needed.",
        ),
    ] = None,
) -> None:
    """Complete prompts with a trained model, or talk to it.

    The model is loaded from the checkpoint as an ordinary Hugging Face folder; Ray is not started.
    """
    prepare()
    with user_errors():
        stops = [unescaped(text) for text in stop or ()]
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        greedy=greedy,
        num_completions=num_completions,
        seed=seed,
        max_prompt_len=max_prompt_len,
        chat=chat,
        system=system,
        stop=stops,
    )
    with user_errors():
        completer = Completer(checkpoint, sampling)
        rows = _prompt_rows(file) if file is not None else None
    if rows is not None:
        _complete_file(completer, rows, out)
    elif sys.stdin.isatty():
        converse(completer, Console())
    else:
        _complete_file(completer, [{"prompt": line.rstrip("\n")} for line in sys.stdin], out)


def unescaped(text: str) -> str:
    """Return `text` with Python's escapes, such as `\\n`, as the characters that they mean.

    Raises:
        UserError: a backslash begins no escape.
    """
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise UserError(
            f"--stop={text!r} must hold whole escapes: {error.reason}. Write a backslash twice."
        ) from error


def _prompt_rows(file: Path) -> list[dict[str, Any]]:
    from rllib_llm.envs.prompts import PromptSource

    source = PromptSource(str(file), shuffle=False)
    return [{"prompt": source.row(index).prompt} for index in range(len(source))]


def _complete_file(completer: Completer, rows: list[dict[str, Any]], out: Path | None) -> None:
    """Write the completions of all rows as JSON lines, to the file `out` or to standard output."""
    with user_errors():
        lines = _json_lines(completer, [row["prompt"] for row in rows])
        if out is None:
            for line in lines:
                print(line, flush=True)
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("w", encoding="utf-8") as stream:
            num_lines = sum(stream.write(f"{line}\n") > 0 for line in lines)
    text = f"{num_lines} completions in {out}"
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


def _json_lines(completer: Completer, prompts: list[Any]) -> Iterator[str]:
    for start in range(0, len(prompts), BATCH_PROMPTS):
        for group in completer.complete(prompts[start : start + BATCH_PROMPTS]):
            for row in group:
                yield json.dumps(row, ensure_ascii=False)


def converse(completer: Completer, console: Console) -> None:
    """Read prompts from the terminal until an empty line or the end of input, and show what the
    model answers as it comes. A chat goes on from turn to turn until `/new`."""
    if completer.chats:
        told = f"A chat: the model remembers it. {NEW_CHAT} begins another, an empty line ends."
    else:
        told = "Type a beginning; the model goes on. An empty line ends."
    console.print(told, style="dim", highlight=False)
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
                answer = _show(completer.stream(given), console)
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
