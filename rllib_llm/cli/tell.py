"""`rllib pause | resume | scale | checkpoint | stop RUN`: what a run that goes on can be told."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rllib_llm.cli.panel import user_errors
from rllib_llm.cli.status import Folder
from rllib_llm.overseer.client import find_run
from rllib_llm.overseer.commands import DONE, WAITING
from rllib_llm.shared.errors import UserError

DEFAULT_WAIT_S = 60.0
NOT_ANSWERED = 2  # the exit code where a command was refused or lost
Wait = Annotated[
    float,
    typer.Option(
        "--wait", min=0, help="Seconds to wait for the answer, which comes after this iteration."
    ),
]


def pause(run: Folder, wait: Wait = DEFAULT_WAIT_S) -> None:
    """Have a run wait after its iteration; nothing is lost."""
    _tell(run, "pause", wait)


def resume(run: Folder, wait: Wait = DEFAULT_WAIT_S) -> None:
    """Have a paused run go on."""
    _tell(run, "resume", wait)


def scale(
    run: Folder,
    samplers: Annotated[int, typer.Option("--samplers", help="Samplers from now on.")],
    wait: Wait = DEFAULT_WAIT_S,
) -> None:
    """Start or end samplers while a run goes on; what is learnt stays the same."""
    _tell(run, "scale", wait, samplers=samplers)


def checkpoint(run: Folder, wait: Wait = DEFAULT_WAIT_S) -> None:
    """Have a checkpoint saved after this iteration."""
    _tell(run, "checkpoint", wait)


def stop(run: Folder, wait: Wait = DEFAULT_WAIT_S) -> None:
    """Have a run save a checkpoint and end, as Ctrl-C once does; --resume goes on."""
    _tell(run, "stop", wait)


def _tell(folder: str, command: str, wait: float, **arguments: Any) -> None:
    with user_errors():
        told = find_run(folder).tell(command, timeout_s=wait, **arguments)
        if not told:
            raise UserError(
                f"run={folder!r} must have a trial that answers: none has been heard in the last "
                "seconds. Look with rllib status."
            )
    for one in told:
        print(f"{one['part']}: {one['answer'] or 'told; it does so after this iteration'}")
    if any(one["state"] not in (DONE, WAITING) for one in told):
        raise typer.Exit(NOT_ANSWERED)
