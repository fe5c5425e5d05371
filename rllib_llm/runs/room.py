"""Whether there is room for what will run: in the cluster, and on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rllib_llm.runs.experiment import Experiment
from rllib_llm.runs.stand_ins import model_of, with_stand_ins
from rllib_llm.shared.errors import UserError
from rllib_llm.shared.storage import Place

# A checkpoint holds weights and Adam's two moments; a fourth share is for critic and model folder.
CHECKPOINT_SHARES = 4
LEAST_FREE_BYTES = 100 * 1024**2


def check_resources(needed: Mapping[str, float], cluster: Mapping[str, float]) -> None:
    """Check that the cluster can hold one trial, which would otherwise wait for ever.

    Raises:
        UserError: it cannot.
    """
    for name, amount in needed.items():
        if amount > cluster.get(name, 0.0):
            raise UserError(
                name=f"one trial reserves {amount:g} {name}s and",
                rule=f"fit into Ray's {cluster.get(name, 0.0):g}",
                reason="it would wait for ever",
                remedy=f"Give Ray more (--ray-num-{name.lower()}s, a bigger cluster), or lower "
                f"num_env_runners, num_learners or num_{name.lower()}s_per_..",
            )


def check_disk(experiments: list[Experiment], folder: Place, free: int | None = None) -> None:
    """Check that the disk of `folder` has room for the experiments' checkpoints; a URL has no end.

    Models that are not local folders are of unknown size and count as small. `free`: its free
    bytes, where they are known.

    Raises:
        UserError: there is too little.
    """
    if not isinstance(folder, Path):
        return
    needed = LEAST_FREE_BYTES
    for experiment in with_stand_ins(experiments):
        model_bytes = _folder_bytes(model_of(experiment.config))
        needed += model_bytes * CHECKPOINT_SHARES * _num_checkpoints(experiment)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free if free is None else free
    if free < needed:
        raise UserError(
            name="storage_path",
            value=str(folder),
            rule=f"have about {_gigabytes(needed)} free for the checkpoints",
            reason=f"{_gigabytes(free)} are",
            remedy="Free some, choose another disk with --storage-path, or keep fewer with "
            "--keep-checkpoints-num",
        )


def _num_checkpoints(experiment: Experiment) -> int:
    """Return how many checkpoints one trial keeps, as far as the experiment says."""
    settings = experiment.checkpoint_config
    frequency = settings.get("checkpoint_frequency") or 0
    iterations = experiment.stop.get("training_iteration", 0)
    made = 1 + (int(iterations) // frequency if frequency else 0)
    return min(made, settings.get("num_to_keep") or made)


def _folder_bytes(model: Any) -> int:
    if not isinstance(model, str) or not Path(model).expanduser().is_dir():
        return 0
    folder = Path(model).expanduser()
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1024**3:.2f} GiB"
