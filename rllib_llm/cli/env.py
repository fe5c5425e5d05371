"""`rllib env`: the environments by name, and a check of your own."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rllib_llm.cli.options import IMPORT_HELP
from rllib_llm.cli.session import prepare, shown_warnings, user_errors
from rllib_llm.runs.yaml_loader import parse_mapping

app = typer.Typer(help="Environments: list them, check one.", no_args_is_help=True)


@app.command("list")
def list_envs() -> None:
    """List the environments of this package."""
    from rllib_llm.envs.registry import ENVIRONMENTS

    table = Table(box=None, pad_edge=False)
    table.add_column("name", style="cyan", no_wrap=True)
    table.add_column("what it does")
    for name, path in sorted(ENVIRONMENTS.items()):
        table.add_row(name, _purpose(path.partition(":")[0]))
    Console().print(table)


def _purpose(module: str) -> str:
    """Return the first sentence of the module's docstring, without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    sentence = " ".join(docstring.partition("\n\n")[0].split())
    return sentence.partition(": ")[2] or sentence


@app.command("check")
def check(
    env: Annotated[
        str, typer.Argument(help="A name, or the dotted path of an environment or its creator.")
    ],
    env_config: Annotated[
        str, typer.Option("--env-config", "-c", help="Its settings, as JSON or YAML.")
    ] = "{}",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="The policy whose token ids prompts are: a folder, a hub id or a dotted path. "
            "The same as model in --env-config.",
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Prompts of the batches it is tried with.")] = 3,
    num_completions: Annotated[int, typer.Option(help="Completions of each prompt.")] = 2,
    imports: Annotated[list[str] | None, typer.Option("--import", help=IMPORT_HELP)] = None,
) -> None:
    """Run an environment with random completions and report violations of its contract.

    Exits with 1 where it breaks the contract.
    """
    prepare(imports=imports)
    console = Console()
    with user_errors(), shown_warnings():
        from rllib_llm.envs.check_env import check_env

        settings = parse_mapping(env_config, "--env-config")
        problems = check_env(
            env,
            settings if model is None else {**settings, "model": model},
            num_prompts=num_prompts,
            num_completions=num_completions,
            report=lambda line: console.print(f"chat template, {line}", markup=False),
            agent_server=_open_agent_server,
        )
    if not problems:
        console.print(f"[green]{env} keeps the contract.[/green]", highlight=False)
        return
    console.print(f"[red]{env} has {len(problems)} problem(s):[/red]", highlight=False)
    for problem in problems:
        console.print(f"  - {problem}", markup=False, highlight=False)
    raise typer.Exit(1)


def _open_agent_server(*arguments: Any, **settings: Any) -> Any:
    # Here, since it wants the packages of `rllib-llm[serve]`.
    from rllib_llm.serving.http_server import open_agent_server

    return open_agent_server(*arguments, **settings)
