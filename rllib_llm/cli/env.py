"""`rllib env`, `rllib judge` and `rllib reward-server`: environments by name, and checks of
environments and reward functions without a training.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from rllib_llm.cli.options import Imports
from rllib_llm.cli.session import extra_serve, prepare, shown_warnings, user_errors
from rllib_llm.runs.yaml_loader import parse_mapping
from rllib_llm.shared.errors import errors_of, report, require

app = typer.Typer(help="Environments: list them, check one.", no_args_is_help=True)


@app.command("list")
def list_envs() -> None:
    """List the environments of this package."""
    from rllib_llm.envs.registry import ENVIRONMENTS

    table = Table(box=None, pad_edge=False)
    table.add_column("name", style="cyan", no_wrap=True)
    table.add_column("what it does")
    for name, path in sorted(ENVIRONMENTS.items()):
        table.add_row(name, _purpose(name, path))
    Console().print(table)


def _purpose(name: str, path: str) -> str:
    """Return the first sentence of the docstring that begins with `name`, else of the module's,
    without importing the module."""
    module = path.partition(":")[0]
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    docstrings = [ast.get_docstring(tree) or "", *(ast.get_docstring(c) or "" for c in classes)]
    docstring = next((d for d in docstrings if d.startswith(f"{name}:")), docstrings[0])
    sentence = " ".join(docstring.partition("\n\n")[0].split())
    return sentence.partition(": ")[2] or sentence


@app.command("check")
def check(
    env: Annotated[str, Argument(
        help="A name, the dotted path of an environment or its creator, or a YAML file: all those "
        "of its experiments, with their settings.")],
    env_config: Annotated[str, Option(
        "--env-config", "-c", help="Its settings, as JSON or YAML.")] = "{}",
    model: Annotated[str | None, Option(
        "--model", "-m", help="The policy, whose tokenizer encodes prompts: a folder, a hub id or "
        "a dotted path. The same as model in --env-config.")] = None,
    num_prompts: Annotated[int, Option(help="Prompts in each tried batch.")] = 3,
    num_completions: Annotated[int, Option(help="Completions of each prompt.")] = 2,
    imports: Imports = None,
) -> None:  # fmt: skip
    """Run an environment with random completions and report violations of its contract.

    Exits with 1 if it violates the contract.
    """
    prepare(imports=imports)
    console = Console()
    is_sound = True
    with user_errors(), shown_warnings():
        from rllib_llm.envs.check_env import check_env

        given = parse_mapping(env_config, "--env-config")
        given |= {} if model is None else {"model": model}
        is_file = Path(env).suffix in (".yaml", ".yml")
        for name, made_of, settings in _in_file(Path(env)) if is_file else [(env, env, {})]:
            problems = check_env(
                made_of, {**settings, **given}, num_prompts=num_prompts,
                num_completions=num_completions, agent_server=_open_agent_server,
                report=lambda line: console.print(f"chat template, {line}", markup=False),
            )  # fmt: skip
            if not problems:
                console.print(f"[green]{name} keeps the contract.[/green]", highlight=False)
                continue
            is_sound = False
            console.print(f"[red]{name} has {len(problems)} problem(s):[/red]", highlight=False)
            for problem in problems:
                console.print(f"  - {problem}", markup=False, highlight=False)
    if not is_sound:
        raise typer.Exit(1)


def _in_file(file: Path) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The environments of a file's experiments: a name, what each is made of, and its settings."""
    from rllib_llm.runs.doctor.stage import env_settings
    from rllib_llm.runs.experiments import with_stand_ins
    from rllib_llm.runs.plan import examined
    from rllib_llm.runs.yaml_loader import load_file

    experiments, errors = load_file(file)
    report(errors)
    found = 0
    for experiment in with_stand_ins(experiments):
        plan = examined(experiment)
        report(errors_of(plan.problems))
        stage = plan.stage
        for name, config in stage.config.env_configs().items() if stage and stage.is_rlhf else ():
            found += 1
            settings = env_settings(config) or {**config.env_config, "model": config.given_model()}
            place = f"{experiment.name}.envs.{name}" if name else experiment.name
            yield f"{place} ({config.env})", config.env, settings
    require(found, "file", str(file), "have an experiment with an environment")


def _open_agent_server(*arguments: Any, **settings: Any) -> Any:
    # Here, since it wants the packages of `rllib-llm[serve]`.
    from rllib_llm.serving.http_server import open_agent_server

    return open_agent_server(*arguments, **settings)


SPEC_HELP = (
    "A dotted path, or JSON or YAML as in env_config: "
    "'{function: my_judge.Judge, kwargs: {scale: 3}}'."
)


def judge(
    rows: Annotated[Path, Argument(
        help="JSONL, CSV or Parquet with prompt, completion and a label.")],
    function: Annotated[str, Option("--function", "-f", help=SPEC_HELP)],
    label: Annotated[str, Option(help="Column of the labels; higher is better.")] = "label",
    bins: Annotated[int, Option(min=1, help="Rows of the printed table.")] = 5,
    limit: Annotated[int | None, Option(min=1, help="Rows to judge. Default: all.")] = None,
    out: Annotated[Path | None, Option("--out", "-o", help="JSON file for the report.")] = None,
    imports: Imports = None,
) -> None:  # fmt: skip
    """Judge the rows of a file and compare the scores with labels."""
    prepare(imports=imports)
    with user_errors():
        from dataclasses import asdict

        from rllib_llm.data.sources import load_rows
        from rllib_llm.envs.judges.calibration import calibrate

        read = list(load_rows(str(rows)))[:limit]
        found = calibrate(_spec(function), read, label_column=label, num_bins=bins)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(asdict(found), indent=1), encoding="utf-8")
    for line in found.lines():
        Console().print(line, markup=False, highlight=False, soft_wrap=True)


def reward_server(
    function: Annotated[list[str], Option(
        "--function", "-f", help=f"{SPEC_HELP} May be repeated.")],
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on.")] = 8100,
    label_column: Annotated[str, Option(
        help="Column under which functions get OpenRLHF's and slime's label.")] = "answer",
    token_env: Annotated[str, Option(
        help="Environment variable that holds the token.")] = "RLLIB_REWARD_TOKEN",
    imports: Imports = None,
) -> None:  # fmt: skip
    """Serve reward functions: POST /v1/rewards, /get_reward (OpenRLHF's), /reward (slime's)."""
    prepare(imports=imports)
    with user_errors():
        token = os.environ.get(token_env, "")
        require(token, f"the environment variable {token_env}", ..., "hold the token that clients "
                "send", "it is empty", f"export {token_env}=$(openssl rand -hex 32)")  # fmt: skip
        with extra_serve("rllib reward-server"):
            import uvicorn

            from rllib_llm.envs.judges.reward_server import RewardService, make_app
        from rllib_llm.envs.judges.rewards import RewardSum
        from rllib_llm.serving.settings import url_of

        rewards = RewardSum([_spec(one) for one in function])
        app = make_app(RewardService(rewards, label_column=label_column), token)
    names = ", ".join(term.name for term in rewards.terms)
    Console(stderr=True).print(
        f"Rewards by {names}: {url_of(host, port)}/v1/rewards, /get_reward, /reward",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    uvicorn.run(app, host=host, port=port, log_level="warning")


def _spec(text: str) -> Any:
    """A reward function as `RewardSum` takes it."""
    return parse_mapping(text, "--function") if text.lstrip().startswith("{") else text
