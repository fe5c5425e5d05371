"""Where a run was made: versions, processor, commit; kept beside its results."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ENVIRONMENT_FILE = "environment.json"
PACKAGES = ("rllib-llm", "ray", "torch", "transformers", "peft", "bitsandbytes", "torchao", "vllm")
SECONDS_TO_ANSWER = 5.0


def describe_environment(folder: Path | None = None) -> dict[str, str]:
    """Versions, processor, GPUs and the commit of the code in `folder` (by default the present
    one)."""
    found = {
        "begun": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "Python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": str(os.cpu_count() or "?"),
        "GPUs": ", ".join(_gpus()) or "none",
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    commit = _commit(folder or Path.cwd())
    return {**found, "commit": commit} if commit else found


def write_environment(folder: Path) -> None:
    """Notes it in `folder`, unless it was noted before: a resumed run keeps its beginning."""
    file = folder / ENVIRONMENT_FILE
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(describe_environment(), indent=1), encoding="utf-8")


def read_environment(folder: Path) -> dict[str, str]:
    """What was noted in `folder`, {} where nothing was."""
    try:
        return json.loads((folder / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _commit(folder: Path) -> str:
    """The commit, "+" behind it where files were changed since; "" outside of a repository."""
    try:
        asked = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
