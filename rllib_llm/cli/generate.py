"""`rllib generate`: completions of a trained model, from a file or in conversation."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rllib_llm.cli.session import prepare
from rllib_llm.user_errors import user_errors

if TYPE_CHECKING:
    from rllib_llm.engines.params import SamplingParams

BATCH_PROMPTS = 32
DEFAULT_NEW_TOKENS = 64


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled; see `SamplingParams`."""

    max_new_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    greedy: bool
    num_completions: int
    seed: int
    max_prompt_len: int
    chat: bool


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
        bool, typer.Option("--chat", help="Wrap each prompt in the model's chat template.")
    ] = False,
) -> None:
    """Complete prompts with a trained model.

    The model is loaded from the checkpoint as an ordinary Hugging Face folder; Ray is not started.
    """
    prepare()
    sampling = Sampling(
        max_new_tokens,
        temperature,
        top_p,
        top_k,
        greedy,
        num_completions,
        seed,
        max_prompt_len,
        chat,
    )
    with user_errors():
        completer = Completer(checkpoint, sampling)
        rows = _prompt_rows(file) if file is not None else None
    if rows is not None:
        _complete_file(completer, rows, out)
    elif sys.stdin.isatty():
        _converse(completer)
    else:
        _complete_file(completer, [{"prompt": line.rstrip("\n")} for line in sys.stdin], out)


class Completer:
    """A model, its tokenizer and sampling settings. Noise goes by the number of a prompt."""

    def __init__(self, checkpoint: str, sampling: Sampling) -> None:
        from rllib_llm.checkpoints.model_folder import find_model
        from rllib_llm.engines.params import SamplingParams
        from rllib_llm.envs.prompts import PromptEncoder
        from rllib_llm.modules.pretrained import load_causal_lm, load_tokenizer
        from rllib_llm.modules.tokenizer import eos_token_ids

        model = find_model(checkpoint)
        self.sampling = sampling
        self.tokenizer = load_tokenizer(model)
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
        import numpy as np

        from rllib_llm.engines.engine import generate as sample
        from rllib_llm.engines.noise import uniform_noise
        from rllib_llm.envs.prompts import PromptRow, pad_left

        start, n = self._num_done, self.sampling.num_completions
        rows = [PromptRow(start + i, self._wrapped(p), {}) for i, p in enumerate(prompts)]
        ids, _ = self._encoder.encode(rows)
        prompt_ids, prompt_mask = pad_left(ids, self.params.pad_token_id)
        row_ids = np.arange(start * n, (start + len(prompts)) * n)
        params = self._params_for(prompt_ids.shape[1])
        noise = uniform_noise(self.sampling.seed, row_ids, params.max_new_tokens)
        made = sample(
            self.model,
            prompt_ids,
            prompt_mask,
            params,
            num_completions=n,
            noise=None if params.greedy else noise,
        )
        self._num_done += len(prompts)
        completions = [
            {
                "prompt": prompts[row // n],
                "completion": self._text(made.completion_ids[row], made.completion_mask[row]),
                "num_tokens": int(made.completion_mask[row].sum()),
                "finished": bool(made.finished[row]),
            }
            for row in range(len(prompts) * n)
        ]
        return [completions[i * n : (i + 1) * n] for i in range(len(prompts))]

    def _params_for(self, prompt_len: int) -> SamplingParams:
        """Return the sampling settings; a limit that the user left open fits the model."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if self.sampling.max_new_tokens is not None or positions is None:
            return self.params
        room = max(1, min(DEFAULT_NEW_TOKENS, positions - prompt_len))
        return dataclasses.replace(self.params, max_new_tokens=room)

    def _wrapped(self, prompt: Any) -> Any:
        if self.sampling.chat and isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        return prompt

    def _text(self, ids: Any, mask: Any) -> str:
        return str(self.tokenizer.decode(ids[mask], skip_special_tokens=True))


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
    Console(stderr=True).print(f"{num_lines} completions in {out}", highlight=False)


def _json_lines(completer: Completer, prompts: list[Any]) -> Iterator[str]:
    for start in range(0, len(prompts), BATCH_PROMPTS):
        for group in completer.complete(prompts[start : start + BATCH_PROMPTS]):
            for row in group:
                yield json.dumps(row, ensure_ascii=False)


def _converse(completer: Completer) -> None:
    """Read prompts from the terminal until an empty line or the end of input."""
    console = Console()
    console.print("Type a beginning; the model goes on. An empty line ends.", style="dim")
    while True:
        try:
            prompt = console.input("[bold cyan]prompt>[/bold cyan] ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not prompt.strip():
            return
        with user_errors():
            for row in completer.complete([prompt])[0]:
                console.print(f"[dim]{prompt}[/dim]", end="", highlight=False)
                console.print(row["completion"], markup=False, highlight=False, soft_wrap=True)
