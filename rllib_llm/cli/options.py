"""Command-line options that several commands share, with the names of Ray 2.40's `rllib`."""

from __future__ import annotations

from typing import Annotated

import typer

from rllib_llm.cli.overrides import HELP as SET_HELP

Algo = Annotated[
    str | None,
    typer.Option("--algo", "--run", "-a", "-r", help="Algorithm: PPOPtx, SFT, RewardModel, ..., any "
                 "of RLlib's (PPO, ...), or a dotted path to a class."),
]
Env = Annotated[
    str | None,
    typer.Option("--env", "-e", help="Environment: a name of `rllib env list`, a gymnasium id, or a "
                 "dotted path to a class."),
]
Config = Annotated[
    str,
    typer.Option("--config", "-c", help="Settings of the algorithm as JSON or YAML, or a file."),
]
Stop = Annotated[
    str,
    typer.Option("--stop", "-s", help='When a trial ends, as JSON or YAML: \'{"episode": 4000}\'. '
                 "Merged over what the file says."),
]
ExperimentName = Annotated[
    str | None,
    typer.Option("--experiment-name", "-n", help="Folder of the run under --storage-path. "
                 "Default: the file's name and the time."),
]
StoragePath = Annotated[
    str | None,
    typer.Option("--storage-path", "--local-dir", help="Folder for all results. "
                 "Default: ~/ray_results."),
]
NumSamples = Annotated[
    int | None,
    typer.Option("--num-samples", help="How often the search space is sampled."),
]
CheckpointFreq = Annotated[
    int | None,
    typer.Option("--checkpoint-freq", help="Iterations between checkpoints, 0 for none on the way."),
]
CheckpointAtEnd = Annotated[
    bool | None,
    typer.Option("--checkpoint-at-end/--no-checkpoint-at-end", help="Save a checkpoint at the end. "
                 "On by default."),
]
KeepCheckpointsNum = Annotated[
    int | None,
    typer.Option("--keep-checkpoints-num", help="Checkpoints kept per trial. Default: all."),
]
CheckpointScoreAttr = Annotated[
    str | None,
    typer.Option("--checkpoint-score-attr", help="Keep the checkpoints with the highest of this "
                 "result, with `min-` before it the lowest. Default: the newest."),
]
Restore = Annotated[
    str | None,
    typer.Option("--restore", help="Checkpoint from which the trials start."),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Continue the run of --experiment-name, or the newest run of this "
                 "file: finished stages are kept, the others go on from their last checkpoint."),
]
Scheduler = Annotated[
    str | None,
    typer.Option("--scheduler", help="Tune scheduler: fifo, asha, hyperband, median_stopping, pbt."),
]
SchedulerConfig = Annotated[
    str,
    typer.Option("--scheduler-config", help="Arguments of the scheduler as JSON or YAML."),
]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray-address", help="Run on this Ray cluster (`auto` finds a local one) instead "
                 "of starting Ray here."),
]
RayNumCpus = Annotated[
    int | None, typer.Option("--ray-num-cpus", help="CPUs of the Ray that is started here.")
]
RayNumGpus = Annotated[
    int | None, typer.Option("--ray-num-gpus", help="GPUs of the Ray that is started here.")
]
RayObjectStoreMemory = Annotated[
    int | None,
    typer.Option("--ray-object-store-memory", help="Bytes of the object store started here."),
]
WandbKey = Annotated[
    str | None,
    typer.Option("--wandb-key", help="Log to Weights & Biases with this API key. Without a key, "
                 "--wandb-project uses your login, or no account with WANDB_MODE=offline."),
]
WandbProject = Annotated[
    str | None, typer.Option("--wandb-project", help="Weights & Biases project; switches it on.")
]
WandbRunName = Annotated[
    str | None, typer.Option("--wandb-run-name", help="Name of the Weights & Biases run.")
]
Set = Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)]
AsTest = Annotated[
    bool, typer.Option("--as-test", help="Exit with 1 where a pass criterion is not met.")
]
Verbose = Annotated[
    int,
    typer.Option("--verbose", "-v", count=True, help="Show what Ray's workers print; twice: also "
                 "debugging output."),
]
