"""The reference pages that are made from the code: columns, commands, metrics and settings, and the
keys in the page on YAML.

python scripts/reference.py            writes them into docs/reference/
python scripts/reference.py --check    exits with 1 where a page is not what the code says
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click
import typer

import rllib_llm
from rllib_llm.algorithms.registry import ALGORITHMS, get_algorithm_class
from rllib_llm.cli.main import app
from rllib_llm.config.sections import settings_of
from rllib_llm.envs.registry import default_settings, env_ids
from rllib_llm.envs.settings import CONVERSATION, ENV_SETTINGS, PROMPTS, REWARDS
from rllib_llm.runs.experiments import CHECKPOINTS, EXPERIMENT
from rllib_llm.runs.metrics import GROUPS
from rllib_llm.shared.setting import Setting

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
_COLUMN = re.compile(r'^[A-Z_]+ = "(?P<name>\w+)"  # (?P<meaning>.*)$')
_BEGIN, _END = "<!-- table: made by scripts/reference.py -->\n", "<!-- end of table -->\n"
_SECTION = re.compile(r"^# --- (?P<title>.*?) -+$")


def columns_page() -> str:
    """Every column of a training batch, from the comments of `rllib_llm/shared/columns.py`."""
    lines = [
        "# Columns", "",
        "Shapes: B completions (rows), P prompt tokens (left-padded), T completion tokens "
        "(right-padded), N texts of L tokens. Masks are bool and True where a token counts.",
    ]  # fmt: skip
    file = Path(rllib_llm.__file__).parent / "shared" / "columns.py"
    source = file.read_text(encoding="utf-8")
    for line in source.splitlines():
        if section := _SECTION.match(line):
            lines += ["", f"## {_sentence(section['title'])}", "", "| column | what it is |"]
            lines.append("|---|---|")
        elif column := _COLUMN.match(line):
            lines.append(f"| `{column['name']}` | {column['meaning']} |")
    return "\n".join([*lines, ""])


def commands_page() -> str:
    """Every command with its arguments and options, from the command itself."""
    lines = ["# Commands", "", "`rllib` and `rllib-llm` are the same command."]
    command = typer.main.get_command(app)
    for path, entry in _leaves(command, ("rllib",)):
        summary = (entry.help or "").strip().split("\n\n")[0].replace("\n", " ")
        lines += ["", f"## `{' '.join(path)}`", "", summary, "", "| | |", "|---|---|"]
        for parameter in entry.params:
            if parameter.name in ("help", "install_completion", "show_completion"):
                continue
            lines.append(f"| {_usage(parameter)} | {_help(parameter)} |")
    return "\n".join([*lines, ""])


def _leaves(command, path):
    """The commands that do something, each with the words that lead to it."""
    children = getattr(command, "commands", {})
    if not children or getattr(command, "invoke_without_command", False):
        yield path, command
    for name in sorted(children):
        yield from _leaves(children[name], (*path, name))


def _usage(parameter: click.Parameter) -> str:
    if parameter.param_type_name == "argument":
        return f"`{str(parameter.name).upper()}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _help(parameter: click.Parameter) -> str:
    text = getattr(parameter, "help", None) or ""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def metrics_page() -> str:
    """Every result with unit and meaning, from the registry of names."""
    lines = [
        "# Metrics", "",
        "Results are nested by group in Python (`results['objective']['kl']`) and joined by `/` "
        "in files, in `stop:` and in Weights & Biases. Means are over the tokens or completions "
        "that count, padding excluded. A name in angle brackets stands for names of yours.",
    ]  # fmt: skip
    for title, rows in GROUPS.items():
        lines += ["", f"## {title}", ""]
        lines += ["| result | unit | meaning |", "|---|---|---|"]
        for names, unit, meaning in rows:
            shown = ", ".join(f"`{name}`" for name in names.split(", "))
            lines.append(f"| {shown} | {unit} | {meaning} |")
    return "\n".join([*lines, ""])


def yaml_page() -> str:
    """The page as it is, its table of keys from the settings of an experiment."""
    text = (FOLDER / "yaml.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    lines = ["", "| key | default | what it is |", "|---|---|---|"]
    for row in EXPERIMENT.settings:
        if row.name != "name":
            default = f"`{row.default}`" if isinstance(row.default, int) else ""
            lines.append(f"| `{row.name}` | {default} | {_sentence(row.meaning)} |")
        if row.name == "checkpoint_config":
            for inner in CHECKPOINTS.settings:
                lines.append(f"| `checkpoint_config.{inner.name}` | | {_sentence(inner.meaning)} |")
    return before + _BEGIN + "\n".join([*lines, "", ""]) + _END + rest.partition(_END)[2]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def settings_page() -> str:
    """Every setting of every algorithm, from the table of settings."""
    lines = [
        "# Settings", "",
        "A section is a method in Python (`.sampling(temperature=0.7)`) and a mapping in YAML "
        "(`sampling: {temperature: 0.7}`); in YAML a setting may also stand by itself, under the "
        "name in brackets where it has a longer one. Those marked (env) are kept in `env_config`. "
        "`rllib config ALGO` prints this for one algorithm, with its own defaults.",
    ]  # fmt: skip
    rows = {}
    for name in ALGORITHMS:
        config_class = type(get_algorithm_class(name).get_default_config())
        for row in settings_of(config_class):
            found = rows.setdefault(row["section"], {}).setdefault(row["flat"], row | {"in": {}})
            found["in"].setdefault(row["default"], []).append(name)
    for section, settings in rows.items():
        lines += ["", f"## {section}", ""]
        lines += ["| setting | default | what it is | when it acts | TRL |"]
        lines += ["|---|---|---|---|---|"]
        lines += [_setting(row).replace("\n", " ") for row in settings.values()]
    return "\n".join([*lines, *environment_tables(), ""])


def environment_tables():
    """The settings of `env_config` that belong to no section, and those of single environments."""
    shown = {row.name for part in (PROMPTS, REWARDS, CONVERSATION) for row in part.settings}
    tables = {"Every environment": [*ENV_SETTINGS.values()]}
    tables |= {f"`{name}`": default_settings(name).values() for name in env_ids()}
    for title, settings in tables.items():
        rows = [row for row in settings if isinstance(row, Setting) and row.name not in shown]
        shown |= {row.name for row in rows if title == "Every environment"}
        if rows:
            yield from ("", f"## env_config: {title}", "")
            yield from ("| setting | default | what it is |", "|---|---|---|")
        for row in rows:
            what = row.sentence.replace("|", "\\|")
            yield f"| `{row.name}` | `{row.default!r}` | {what} |"


def _setting(row):
    name = f"`{row['name']}`"
    if row["place"] == "env_config":
        name += " (env)"
    elif row["flat"] != row["name"]:
        name += f" (`{row['flat']}`)"
    usual, *others = sorted(row["in"], key=lambda default: -len(row["in"][default]))
    default = "; ".join(
        [f"`{usual}`", *(f"`{other}` in {', '.join(row['in'][other])}" for other in others)]
    )
    bounds = f" ({row['range']})" if row["range"] else ""
    what = f"{row['meaning']}{bounds}. {row['note']}"
    cells = (name, default, what.strip(), row["acts"], ", ".join(f"`{n}`" for n in row["trl"]))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


PAGES = {
    "settings.md": settings_page,
    "columns.md": columns_page,
    "commands.md": commands_page,
    "metrics.md": metrics_page,
    "yaml.md": yaml_page,
}


def main() -> int:
    stale = []
    for name, page in PAGES.items():
        path, text = FOLDER / name, page()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
