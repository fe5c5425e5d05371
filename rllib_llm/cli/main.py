"""The console script `rllib` (and `rllib-llm`, the same)."""

from __future__ import annotations

from typing import Annotated

import typer

from rllib_llm.cli import env, examples, train
from rllib_llm.cli.doctor import doctor
from rllib_llm.cli.env import judge, reward_server
from rllib_llm.cli.evaluate import evaluate
from rllib_llm.cli.export import export
from rllib_llm.cli.generate import generate
from rllib_llm.cli.runs import (
    checkpoint,
    pause,
    report,
    resume,
    rollouts,
    scale,
    status,
    stop,
    top,
    verify,
)
from rllib_llm.cli.serve import serve

app = typer.Typer(
    name="rllib",
    help="Reinforcement learning from feedback for language models, on Ray RLlib.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        names = ("rllib-llm", "ray", "torch", "transformers")
        print(", ".join(f"{name} {version(name)}" for name in names))
        raise typer.Exit()


@app.callback()
def rllib(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the versions of this package and of what it is built on.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Reinforcement learning from feedback for language models, on Ray RLlib."""


app.add_typer(train.app, name="train")
for command in (evaluate, generate, export, rollouts, verify, serve, judge, reward_server, doctor,
                report, status, top, pause, resume, scale, checkpoint, stop):  # fmt: skip
    app.command(command.__name__.replace("_", "-"))(command)
app.command("config")(examples.show_config)
app.add_typer(examples.app, name="example")
app.add_typer(env.app, name="env")

if __name__ == "__main__":
    app()
