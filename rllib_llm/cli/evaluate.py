"""`rllib evaluate`: results of a checkpoint on held-out prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from rllib_llm.cli.options import RayOptions, takes
from rllib_llm.cli.session import prepare, ray_session, show, stderr, user_errors
from rllib_llm.runs.results import flatten, number
from rllib_llm.runs.yaml_loader import laid_over, parse_mapping
from rllib_llm.shared.errors import report, require

if TYPE_CHECKING:
    from rllib_llm.algorithms.language_model_config import LanguageModelConfig


@takes(RayOptions)
def evaluate(
    checkpoint: Annotated[str, Argument(
        help="Checkpoint, trial or run of `rllib train`, or its URL.")],
    duration: Annotated[int | None, Option(
        "--duration", "--episodes", min=1,
        help="Completions (or episodes) to judge. Default: what the run was configured with."
    )] = None,
    env: Annotated[str | None, Option("--env", "-e", help="Another environment than the run's."
    )] = None,
    samples: Annotated[int | None, Option(
        min=1, help="Completions sampled for each prompt, instead of a greedy one; --episodes "
        "counts all of them.")] = None,
    pass_at: Annotated[str | None, Option(
        help="The k of pass@k, pass^k and maj@k, such as 1,4,16.")] = None,
    pass_on: Annotated[str | None, Option(
        help="The reward's component, 0 or 1, that decides what passes.")] = None,
    answer_pattern: Annotated[str | None, Option(
        help="Regular expression of the answer that counts in maj@k: the first group of its last "
        "match. Default: the whole completion.")] = None,
    config: Annotated[str, Option(
        "--config", "-c", help="Settings that override the checkpoint's, as JSON or YAML: "
        '\'{"env_config": {"split": "eval"}}\'.')] = "{}",
    out: Annotated[Path | None, Option("--out", "-o", help="JSON file for the results.")] = None,
    *,
    options: RayOptions,
) -> None:  # fmt: skip
    """Evaluate a checkpoint and print the results."""
    prepare(options.verbose, options.imports)
    with user_errors(options.verbose):
        settings = parse_mapping(config, "--config")
        if env is not None:
            settings["env"] = env
        if duration is not None:
            settings["evaluation_duration"] = duration
        given: dict[str, Any] = {"pass_on": pass_on, "answer_pattern": answer_pattern}
        overlay = {name: value for name, value in given.items() if value is not None}
        if samples is not None or pass_at is not None:  # several completions of each prompt
            ks = parse_mapping(f"ks: [{pass_at or ''}]", "--pass-at")["ks"]
            count = samples or max(ks, default=1)
            are_numbers = all(isinstance(k, int) and 1 <= k <= count for k in ks)
            rule = f"be numbers from 1 to --samples={count}, such as 1,4"
            require(are_numbers, "--pass-at", pass_at, rule, "", "")
            overlay |= {"explore": True, "num_completions": count, "pass_at": ks or None}
        if overlay:
            overlay = {**(settings.get("evaluation_config") or {}), **overlay}
            settings["evaluation_config"] = overlay
        from rllib_llm.checkpoints.algorithm import find_checkpoint

        folder = find_checkpoint(checkpoint)
        algorithm_config = config_for_evaluation(folder, settings)
    with ray_session(options), user_errors(options.verbose):
        results = run_evaluation(folder, algorithm_config, options.verbose)
    flat = {key: value for key, raw in results.items() if (value := number(raw)) is not None}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(flat, indent=1), encoding="utf-8")
    console = Console()
    console.print(f"[bold]{escape(str(folder))}[/bold]", highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("result")
    table.add_column("value", justify="right")
    for key in sorted(flat):
        table.add_row(key, f"{flat[key]:.6g}")
    console.print(table)


def config_for_evaluation(checkpoint: Path, settings: dict[str, Any]) -> Any:
    """Return the config that the checkpoint was made with, `settings` laid over it.

    Raises:
        ValueError: unknown or impossible settings.
    """
    from rllib_llm.algorithms.language_model_config import LanguageModelConfig
    from rllib_llm.algorithms.rlhf_config import RLHFConfig
    from rllib_llm.algorithms.supervised import SupervisedConfig
    from rllib_llm.checkpoints.algorithm import saved_config
    from rllib_llm.config.sampling import engine_of
    from rllib_llm.config.schema import sound_settings

    config = saved_config(checkpoint)
    if isinstance(config, LanguageModelConfig):
        config = without_training_data(config, checkpoint)
    settings, found = sound_settings(config, settings)
    report(problem.within("--config") for problem in found)
    config = config.copy(copy_frozen=False)
    if isinstance(held_out := settings.get("evaluation_config"), Mapping):
        settings["evaluation_config"] = laid_over(config.evaluation_config or {}, held_out)
    config = config.update_from_dict(settings)
    # Results of this process alone, with its evaluation sampler.
    config.num_env_runners = 0
    config.evaluation_interval = config.evaluation_interval or 1
    config.evaluation_error_after_n_consecutive_skips = 1  # it is all that was asked for
    if isinstance(config, SupervisedConfig):
        require(config.eval_data is not None, "checkpoint", str(checkpoint), "have held-out rows",
                "its run had no eval_data", "Add --config '{eval_data: FILE}'")  # fmt: skip
    if isinstance(config, RLHFConfig):  # what follows the run must not follow this
        config.weights_name = config.serve = config.weights_push = None
        engine = engine_of(config)
        if engine is not None and not engine.takes_weights:  # they are those of a run
            config.engine, config.engine_settings = "torch", None
    config.validate()
    return config


def without_training_data(config: LanguageModelConfig, checkpoint: Path) -> LanguageModelConfig:
    """Return the config without training data: held-out rows take its place, and the checkpoint's
    own model that of a supervised stage's starting model, unless that is its reference."""
    from rllib_llm.algorithms.dpo import DPOConfig
    from rllib_llm.algorithms.ppo_ptx import PPOPtxConfig
    from rllib_llm.algorithms.reward_model import RewardModelConfig
    from rllib_llm.algorithms.supervised import SupervisedConfig
    from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT
    from rllib_llm.modules.lora import is_adapter_folder

    config = config.copy(copy_frozen=False)
    if isinstance(config, SupervisedConfig):
        config.data = config.eval_data or config.data
        has_reference = isinstance(config, DPOConfig) and not config.reference_free
        if not (has_reference or is_adapter_folder(checkpoint / MODEL_IN_CHECKPOINT)):
            config.pretrained_model = str((checkpoint / MODEL_IN_CHECKPOINT).resolve())
    if isinstance(config, RewardModelConfig):
        config.normalization_data = None
    if isinstance(config, PPOPtxConfig):
        config.ptx_coeff, config.ptx_data = 0.0, None
    if config.env_config.get("eval_prompts") is not None:
        prompts = config.env_config["eval_prompts"]
        config.env_config = {**config.env_config, "prompts": prompts}
    return config


def run_evaluation(checkpoint: Path, config: Any, verbosity: int = 0) -> dict[str, Any]:
    """Return the flat results of one evaluation of the checkpoint under `config`.

    Raises:
        typer.Exit: the server that generates gave no answer; a panel says so.
    """
    from rllib_llm.checkpoints.algorithm import class_and_arguments
    from rllib_llm.shared.remote import ServerError

    made, _ = class_and_arguments(checkpoint)
    algorithm = made.from_checkpoint(str(checkpoint.resolve()), config=config)
    try:
        results = algorithm.evaluate()
        return flatten(getattr(algorithm, "eval_metrics", None) or results)
    except ServerError as error:
        if verbosity:
            stderr.print_exception()
        show(str(error), title="evaluation failed")
        raise typer.Exit(1) from error
    finally:
        algorithm.stop()
