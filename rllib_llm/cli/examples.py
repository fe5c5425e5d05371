"""`rllib example ...` and `rllib config ALGO`: files to begin with, and every setting."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from rllib_llm.cli.options import AsJson, RunOptions, takes
from rllib_llm.cli.session import prepare, user_errors
from rllib_llm.cli.train import run_file
from rllib_llm.runs.yaml_loader import examples_folder
from rllib_llm.shared.errors import require, suggestion

app = typer.Typer(help="Ready experiments: list them, read one, run one.", no_args_is_help=True)
# A full stop after a whole word and before a capital: not those of "et al." and "Dr. GRPO".
SENTENCE_END = re.compile(r"(?<=[a-z0-9)]{3})\.\s+(?=[A-Z])")
Name = Annotated[str, Argument(help="Name of an example, as `rllib example list` gives it.")]
Filter = Annotated[str, Option("--filter", "-f", help="Only those with this text in them.")]


@app.command("list")
def list_examples(search: Filter = "") -> None:
    """List the examples."""
    table = Table(box=None, pad_edge=False)
    table.add_column("name", style="cyan", no_wrap=True)
    table.add_column("what it does")
    for name, file in example_files().items():
        text = description(file)
        if search.lower() in f"{name} {text}".lower():
            table.add_row(name, text)
    console = Console()
    console.print(table)
    console.print(
        "\nrllib example run NAME   [dim]# or get NAME, to make it your own[/dim]", highlight=False
    )


@app.command("get")
def get_example(
    name: Name,
    out: Annotated[Path | None, Option("--out", "-o", help="Write it to this file.")] = None,
) -> None:
    """Print an example's YAML."""
    with user_errors():
        text = find_example(name).read_text(encoding="utf-8")
        if out is None:
            print(text, end="")
            return
        require(not out.exists(), "--out", str(out), "be a new file", "it exists", "")
        out.write_text(text, encoding="utf-8")


@app.command("run")
@takes(RunOptions)
def run_example(name: Name, *, options: RunOptions) -> None:
    """Run an example; the options are those of `rllib train file`."""
    with user_errors():
        file = find_example(name)
    run_file(file, options)


def example_files() -> dict[str, Path]:
    """Return the examples' files by name, sorted."""
    return {file.stem: file for file in sorted(examples_folder().glob("*.yaml"))}


def find_example(name: str) -> Path:
    """Return the file of the example called `name`.

    Raises:
        Problems: no such example, with the nearest names.
    """
    files = example_files()
    name = name.removesuffix(".yaml")
    require(name in files, "example", name, "be an example", "", suggestion(name, files))
    return files[name]


def description(file: Path) -> str:
    """Return the first sentence of the comment at the file's top."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or not line.strip("# "):
            break
        lines.append(line.strip("# "))
    first = SENTENCE_END.split(" ".join(lines), maxsplit=1)[0]
    return first.rstrip(".") + ("." if first else "")


def show_config(
    algo: Annotated[str, Argument(
        help="Algorithm: PPOPtx, SFT, GRPO, ..., or a dotted path to a class.")],
    search: Filter = "",
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """List an algorithm's settings: what each may be, its default, and when it has an effect."""
    prepare()  # a user's algorithm is in this folder
    with user_errors():
        from rllib_llm.algorithms.registry import ALGORITHMS
        from rllib_llm.config.sections import settings_of
        from rllib_llm.runs.experiments import algorithm_class

        config_class = type(algorithm_class(algo, "algo").get_default_config())
        require(hasattr(config_class, "sections"), "algo", algo, "be an algorithm of this package",
                "RLlib documents its own", suggestion(algo, ALGORITHMS))  # fmt: skip
        rows = [
            row for row in settings_of(config_class)
            if search.lower() in " ".join(map(str, row.values())).lower()
        ]  # fmt: skip
        require(rows, "--filter", search, "be in a setting", f"it is in none of {algo}'s", "")
    if as_json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    console = Console()
    for section in dict.fromkeys(row["section"] for row in rows):
        console.print(_table(section, [row for row in rows if row["section"] == section]))
    console.print(
        "\nrllib example get NAME -o FILE   [dim]# a file to begin with[/dim]\n"
        "rllib train FILE --set NAME=VALUE   [dim]# one setting of it[/dim]",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _table(section: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f".{section}(...)", title_justify="left", title_style="bold", box=None)
    table.add_column("setting", style="cyan", no_wrap=True)
    table.add_column("default", style="green", max_width=24)
    table.add_column("what it is", ratio=1)
    for row in rows:
        bounds = f" [{row['range']}]" if row["range"] else ""
        parts = [
            f"{row['meaning']}{bounds}.",
            row["note"],
            f"Acts where {row['acts']}." if row["acts"] else "",
            f"TRL: {', '.join(row['trl'])}." if row["trl"] else "",
        ]
        what = " ".join(filter(None, parts))
        table.add_row(row["name"], escape(row["default"]), escape(what))
    return table
