"""`rllib verify RUN`: stored completions sampled anew from the weights of the checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from rllib_llm.cli.panel import user_errors
from rllib_llm.cli.session import prepare


def verify(
    run: Annotated[str, typer.Argument(help="Folder or URL of a run, a stage or a trial.")],
    samples: Annotated[
        int, typer.Option("--samples", "-n", min=1, help="Completions of each trial.")
    ] = 16,
    seed: Annotated[int, typer.Option(help="Which completions are drawn.")] = 0,
) -> None:
    """Sample stored completions anew from the weights of the checkpoints, and compare.

    Exits with 1 where more than round-off differs, or nothing can be compared.
    """
    prepare()
    with user_errors():
        from rllib_llm.runs import verify as verification

        found = verification.verify(run, samples, seed)
    console = Console(highlight=False)
    for each in found:
        console.print(str(each), markup=False, soft_wrap=True)
    if not all(each.agrees for each in found):
        raise typer.Exit(1)
