"""`rllib generate`: completions of a trained model, for a file or in conversation."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rllib_llm.cli.session import prepare, shown_warnings, user_errors
from rllib_llm.shared.errors import UserError

if TYPE_CHECKING:
    import torch

    from rllib_llm.engines.params import SamplingParams

DEFAULT_NEW_TOKENS = 64
STREAMED_TOKENS = 4  # sampled between two looks at what there is to show
HALF_CHARACTER = "\ufffd"

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled; see `SamplingParams`.

    chat: prompts that are text become the user's turn in the model's chat template; None: where the
    model has one. system: the first message of each chat. stop: texts that end a completion and are
    no part of it.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False
    num_completions: int = 1
    seed: int = 0
    max_prompt_len: int = 512
    chat: bool | None = None
    system: str | None = None
    stop: Sequence[str] = ()


class Completer:
    """A model, its tokenizer and sampling settings. Noise goes by the number of a prompt."""

    def __init__(self, checkpoint: str, sampling: Sampling) -> None:
        from rllib_llm.checkpoints.folder import find_model
        from rllib_llm.engines.params import SamplingParams
        from rllib_llm.envs.prompts import PromptEncoder
        from rllib_llm.modules.pretrained import load_causal_lm
        from rllib_llm.modules.tokenizer import eos_token_ids, load_tokenizer

        model = find_model(checkpoint)
        self.sampling = sampling
        self.tokenizer = load_tokenizer(model)
        has_template = bool(self.tokenizer.chat_template)
        self.chats = has_template if sampling.chat is None else sampling.chat
        if sampling.system is not None and not self.chats:
            raise UserError(
                f"--system={sampling.system!r} must come with a chat: "
                + ("--no-chat leaves it out." if has_template else "there is no chat template.")
                + " Put it into the prompt instead."
            )
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
        self._num_done = 0

    def complete(self, prompts: list[Any]) -> list[list[dict[str, Any]]]:
        """Return, for each prompt (text or chat messages), its completions as JSON rows."""
        from rllib_llm.engines.engine import generate as sample
        from rllib_llm.shared.columns import pad_left

        n = self.sampling.num_completions
        ids = self._encode(prompts)
        prompt_ids, prompt_mask = pad_left(ids, self.params.pad_token_id)
        params = self._params_for(prompt_ids.shape[1])
        made = sample(
            self.model,
            prompt_ids,
            prompt_mask,
            params,
            num_completions=n,
            noise=self._noise(len(prompts), params),
        )
        self._num_done += len(prompts)
        rows = []
        for row in range(len(prompts) * n):
            sampled = made.completion_ids[row][made.completion_mask[row]].tolist()
            text, stopped = self._until_stop(self._text(ids[row // n], sampled))
            rows.append(
                {
                    "prompt": prompts[row // n],
                    "completion": text,
                    "num_tokens": len(sampled),
                    "finished": stopped or bool(made.finished[row]),
                }
            )
        return [rows[i * n : (i + 1) * n] for i in range(len(prompts))]

    def stream(self, prompt: Any) -> Iterator[str]:
        """The text of one completion, piece by piece as it is sampled; together what `complete`
        gives (up to the round-off of differently shaped matrix products)."""
        import torch

        from rllib_llm.engines.engine import generate as sample

        (ids,) = self._encode([prompt])
        params = self._params_for(len(ids))
        noise = self._noise(1, params)
        self._num_done += 1
        sampled: list[int] = []
        shown = ""
        while len(sampled) < params.max_new_tokens:
            count = min(STREAMED_TOKENS, params.max_new_tokens - len(sampled))
            context = torch.tensor([[*ids, *sampled]])
            made = sample(
                self.model,
                context,
                torch.ones_like(context, dtype=torch.bool),
                dataclasses.replace(params, max_new_tokens=count),
                noise=None if noise is None else noise[:1, len(sampled) : len(sampled) + count],
            )
            sampled += made.completion_ids[0][made.completion_mask[0]].tolist()
            text, stopped = self._until_stop(self._text(ids, sampled))
            done = stopped or bool(made.finished[0]) or len(sampled) >= params.max_new_tokens
            safe = text if done else text[: len(text) - self._held_back(text)]
            yield safe[len(shown) :]
            shown = safe
            if done:
                return

    def shortened(self, chat: Messages) -> Messages:
        """The chat without its oldest exchanges, where it is too long; a system message stays."""
        head = [message for message in chat[:1] if message["role"] == "system"]
        turns = chat[len(head) :]
        while len(turns) > 2 and self._num_tokens([*head, *turns]) > self.sampling.max_prompt_len:
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

    def _num_tokens(self, chat: Messages) -> int:
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode(self, prompts: list[Any]) -> list[list[int]]:
        from rllib_llm.envs.prompts import PromptRow

        rows = [
            PromptRow(self._num_done + i, self.as_chat(prompt), {})
            for i, prompt in enumerate(prompts)
        ]
        return self._encoder.encode(rows)[0]

    def _noise(self, num_prompts: int, params: SamplingParams) -> torch.Tensor | None:
        """Sampling noise of the next prompts, from the seed and their numbers."""
        import numpy as np

        from rllib_llm.engines.protocol import uniform_noise

        if params.greedy:
            return None
        n = self.sampling.num_completions
        rows = np.arange(self._num_done * n, (self._num_done + num_prompts) * n)
        return uniform_noise(self.sampling.seed, rows, params.max_new_tokens)

    def _params_for(self, prompt_len: int) -> SamplingParams:
        """Return the sampling settings; a limit that the user left open fits the model."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if self.sampling.max_new_tokens is not None or positions is None:
            return self.params
        room = max(1, min(DEFAULT_NEW_TOKENS, positions - prompt_len))
        return dataclasses.replace(self.params, max_new_tokens=room)

    def _text(self, prompt_ids: list[int], sampled: list[int]) -> str:
        from rllib_llm.envs.actions import decode_completions

        if self.chats:  # a turn of its own
            return str(self.tokenizer.decode(sampled, skip_special_tokens=True))
        return decode_completions(self.tokenizer, prompt_ids[-1:], [sampled])[0]

    def _until_stop(self, text: str) -> tuple[str, bool]:
        """The text before the first stop text in it, and whether there is one."""
        ends = [at for stop in self.sampling.stop if (at := text.find(stop)) >= 0]
        return (text[: min(ends)], True) if ends else (text, False)

    def _held_back(self, text: str) -> int:
        """Characters at the end that may be half a character or the beginning of a stop text."""
        longest = len(text) - len(text.rstrip(HALF_CHARACTER))
        for stop in self.sampling.stop:
            for length in range(1, len(stop)):
                if text.endswith(stop[:length]):
                    longest = max(longest, length)
        return longest


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
    """Read prompts from the terminal until an empty line or the end of input, and stream the
    model's answers. A chat continues from turn to turn until `/new`."""
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
