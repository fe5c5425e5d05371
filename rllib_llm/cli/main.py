"""The console script `rllib` (and `rllib-llm`, the same)."""

from __future__ import annotations

from typing import Annotated

import typer

from rllib_llm.cli import (
    doctor,
    env,
    evaluate,
    examples,
    generate,
    judge,
    report,
    serve,
    status,
    train,
)

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
app.command("evaluate")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.command("rollouts")(report.rollouts)
app.command("verify")(report.verify)
app.command("serve")(serve.serve)
app.command("judge")(judge.judge)
app.command("reward-server")(judge.reward_server)
app.command("config")(examples.show_config)
app.command("doctor")(doctor.doctor)
app.command("report")(report.report)
app.command("status")(status.status)
app.command("top")(status.top)
for command in (status.pause, status.resume, status.scale, status.checkpoint, status.stop):
    app.command(command.__name__)(command)
app.add_typer(examples.app, name="example")
app.add_typer(env.app, name="env")

if __name__ == "__main__":
    app()
