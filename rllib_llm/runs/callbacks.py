"""The Tune callbacks that `rllib train` uses, for a `Tuner` in Python."""

from __future__ import annotations

from ray.tune import Callback

from rllib_llm.runs.best_checkpoint import KeepBestCheckpoint
from rllib_llm.runs.broken_trials import EndBrokenTrials
from rllib_llm.runs.failure_checkpoints import UseFailureCheckpoints
from rllib_llm.runs.hung_trials import RestartHungTrials
from rllib_llm.runs.result_log import NoOtherCsv, ResultLog
from rllib_llm.runs.save_on_stop import SaveOnStop
from rllib_llm.runs.timed_checkpoints import TimedCheckpoints


def default_callbacks(
    *,
    checkpoint_interval_s: float | str | None = "auto",
    hung_trial_timeout_s: float | str | None = "auto",
    metric: str | None = None,
    mode: str | None = None,
    wandb_project: str | None = None,
) -> list[Callback]:
    """Return new callbacks for one `tune.RunConfig(callbacks=...)`, whose storage is a folder.

    They write each result once, however often a trial is started again; have a checkpoint saved
    every few minutes, on Ctrl-C and SIGTERM, and before an iteration that failed; keep the best
    one; restart trials that hang, and end those whose reward function has a bug.

    Args:
        checkpoint_interval_s: see `TimedCheckpoints`; None: no checkpoints by time.
        hung_trial_timeout_s: see `RestartHungTrials`; None: a silent trial is waited for.
        metric, mode: the result that `best_checkpoint` goes by; see `KeepBestCheckpoint`.
        wandb_project: a Weights & Biases project for results and tables of sampled texts.
    """
    callbacks: list[Callback] = [ResultLog(), NoOtherCsv()]
    if checkpoint_interval_s is not None:
        callbacks.append(TimedCheckpoints(checkpoint_interval_s))
    callbacks += [KeepBestCheckpoint(metric, mode), UseFailureCheckpoints(), SaveOnStop()]
    callbacks += [RestartHungTrials(hung_trial_timeout_s), EndBrokenTrials()]
    if wandb_project is not None:
        from rllib_llm.runs.wandb_logger import RESUME, WandbLogger, check_wandb

        check_wandb(None)
        callbacks.append(WandbLogger(project=wandb_project, resume=RESUME))
    return callbacks
