"""`rllib doctor [FILE]`: is this installation sound, and would this file run as it is meant?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from rllib_llm.cli.options import AsJson, Imports, Overrides, RayOptions
from rllib_llm.cli.session import check_address, prepare, ray_session, user_errors
from rllib_llm.shared.errors import (
    Problem,
    distinct,
    ended,
    errors_of,
    problems_of,
    refusals,
    require,
)

if TYPE_CHECKING:
    from rllib_llm.runs.experiments import Experiment
    from rllib_llm.runs.plan import Examined

COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


def doctor(
    file: Annotated[Path | None, Argument(
        help="YAML file with experiments. Default: only this machine.")] = None,
    deep: Annotated[bool, Option(
        "--deep", help="Load the models, too: run two iterations of each experiment, compare "
        "log-probs with a full forward pass, check the chat template and the rewards of right "
        "answers.")] = False,
    as_json: AsJson = False,
    start_ray: Annotated[bool, Option(
        "--ray/--no-ray", help="Start Ray for a moment. On by default.")] = True,
    ray_address: Annotated[str | None, Option(
        envvar="RAY_ADDRESS", help="The cluster that the run will use.")] = None,
    storage_path: Annotated[str | None, Option(
        help="Where results will go. Default: what the file says, else ~/ray_results.")] = None,
    overrides: Overrides = None,
    imports: Imports = None,
) -> None:  # fmt: skip
    """Check the installation, this machine and a file of experiments before a run.

    Exits with 0 if nothing was found, 1 for warnings, 2 for errors. Without --deep no weights are
    loaded and nothing is trained.
    """
    prepare(0, imports)
    with user_errors():
        require(start_ray or not deep, "--no-ray", ..., "be left out with --deep",
                "RLlib starts Ray for two iterations in one process, too", "Drop one")  # fmt: skip
        found = list(_diagnose(file, deep, start_ray, ray_address, storage_path, overrides))
        found = distinct(found)
    console = Console(quiet=as_json)
    if as_json:
        rows = [dataclasses.asdict(problem) for problem in found]
        for row in rows:  # a value as Python writes it
            value = row.pop("value")
            row |= {} if value is ... else {"value": repr(value)}
        print(json.dumps(rows, indent=1))
    for problem in found:  # a paragraph for each
        head = Text.assemble((problem.severity, COLOURS[problem.severity]), f"  {problem.sentence}")
        console.print(head, highlight=False)
        if problem.remedy:
            console.print(Text(f"  {ended(problem.remedy)}"), highlight=False)
    counts = {name: sum(f.severity == name for f in found) for name in ("error", "warning")}
    if any(counts.values()):
        parts = [f"{n} {name}{'s' * (n > 1)}" for name, n in counts.items() if n]
        console.print(f"[bold]{' and '.join(parts)}[/bold]")
    else:
        console.print("[green]No problem found.[/green]")
    raise typer.Exit(2 if counts["error"] else int(counts["warning"] > 0))


def _diagnose(
    file: Path | None, deep: bool, start_ray: bool, ray_address: str | None,
    storage_path: str | None, overrides: list[str] | None,
) -> Iterator[Problem]:  # fmt: skip
    from rllib_llm.runs.doctor.examine import deep_rules, examine
    from rllib_llm.runs.doctor.machine_rules import Machine, ray_rules
    from rllib_llm.runs.plan import named
    from rllib_llm.runs.run_folder import storage_root
    from rllib_llm.runs.yaml_loader import load_file

    experiments: list[Experiment] = []
    is_readable = True
    if file is not None:
        try:
            experiments, errors = load_file(file, overrides)
        except ValueError as broken:
            errors = problems_of(broken)
        is_readable = not errors
        yield from errors
    root = storage_root(storage_path, experiments)
    machine = Machine.here(root if isinstance(root, Path) else Path.cwd())
    found, sound = examine(experiments, machine, folder=root, is_here=ray_address is None)
    found += refusals(check_address, ray_address)
    yield from found
    can_run = is_readable and not errors_of(found)
    if can_run and ray_address is not None:
        yield from fits_cluster(sound, ray_address)
    elif can_run and start_ray:  # which takes seconds
        yield from ray_rules()
    for stage in [one.stage for one in sound if one.stage] if deep else ():
        try:
            yield from (named(problem, stage) for problem in deep_rules(stage))
        except (ValueError, RuntimeError, OSError) as error:
            yield from (problem.within(stage.experiment.name) for problem in problems_of(error))


def fits_cluster(sound: list[Examined], ray_address: str) -> Iterator[Problem]:
    """Errors of experiments of which one trial finds no place on the cluster's nodes, or that of a
    cluster which cannot be joined."""
    from rllib_llm.runs.plan import check_resources

    try:
        with ray_session(RayOptions(ray_address=ray_address)) as nodes:
            pass
    except ValueError as error:
        yield from problems_of(error)
        return
    for one in sound:
        for reservation in one.reserved:
            wrong = refusals(check_resources, reservation, nodes)
            yield from (problem.within(one.experiment.name) for problem in wrong)

