"""Facts about this machine, gathered once; rules take them as an argument."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from rllib_llm.shared.process import multiplies_bfloat16, processor_features

GIB = 1024**3


@dataclass(frozen=True)
class Machine:
    """What rules about resources look at; bytes unless said otherwise.

    cpus: that this process may use: affinity, and the quota of its control group.
    features: of the processor, as Linux names them ("amx_bf16", "avx512_bf16", ...).
    gpu_memory: of each CUDA device.
    shm_bytes: free in /dev/shm, where Ray keeps its object store; None: there is no such folder.
    disk_bytes: free where results go.
    versions: installed packages, by lower-case name.
    """

    cpus: float = 1.0
    memory: int = 0
    features: frozenset[str] = frozenset()
    gpu_memory: tuple[int, ...] = ()
    shm_bytes: int | None = None
    disk_bytes: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls, folder: Path) -> Machine:
        """This machine, with results going to `folder`."""
        import psutil

        from rllib_llm.shared.process import usable_cores

        existing = next(path for path in (folder, *folder.parents) if path.exists())
        shm = Path("/dev/shm")
        return cls(
            cpus=usable_cores(),
            memory=min(psutil.virtual_memory().available, _memory_limit()),
            features=processor_features(),
            gpu_memory=_gpu_memory(),
            shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else None,
            disk_bytes=shutil.disk_usage(existing).free,
            versions=installed_versions(),
        )

    @property
    def computes_bfloat16(self) -> bool:
        """Whether products of bfloat16 are faster than of float32 here."""
        return multiplies_bfloat16(self.features) or bool(self.gpu_memory)


def installed_versions() -> dict[str, str]:
    """Version of every installed package, by its lower-case name with dashes."""
    from importlib.metadata import distributions

    found: dict[str, str] = {}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-"), distribution.version)
    return found


def _memory_limit() -> int:
    """What the control group of this process leaves it, without bound where it sets none."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except OSError:
        return 2**62
    return 2**62 if limit == "max" else max(0, int(limit) - used)


def _gpu_memory() -> tuple[int, ...]:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return ()
    import torch

    if not torch.cuda.is_available():
        return ()
    count = torch.cuda.device_count()
    return tuple(torch.cuda.get_device_properties(i).total_memory for i in range(count))
