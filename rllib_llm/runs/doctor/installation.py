"""Rules about the installation: tested versions, conflicting packages, whether Ray starts."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from rllib_llm.runs.doctor.stage import Finding

LEAST_PYTHON = (3, 10)
# What CI runs with; a test holds it to constraints.txt.
TRIED: Mapping[str, str] = {
    "ray": "2.60.0",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "gymnasium": "1.2.2",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
    "torchao": "0.18.0",
    "datasets": "5.2.0",
}
# Packages whose own requirements are compared: those that share torch or transformers.
NEIGHBOURS = (
    "accelerate", "bitsandbytes", "compressed-tensors", "datasets", "huggingface-hub", "peft",
    "ray", "safetensors", "tokenizers", "torch", "torchao", "torchaudio", "torchvision",
    "transformers", "trl", "triton", "vllm", "xformers",
)  # fmt: skip


def installation_rules(
    versions: Mapping[str, str],
    *,
    python: Sequence[int] | None = None,
    requirements: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Finding]:
    """Findings about packages.

    Args:
        versions: installed, by lower-case name.
        python: version of the interpreter; this one's by default.
        requirements: what packages require of others; read from the installed by default.
    """
    yield from _python(python or tuple(int(part) for part in platform.python_version_tuple()[:2]))
    if requirements is None:
        requirements = _installed_requirements(versions)
    for owner in ("rllib-llm", *NEIGHBOURS):
        for text in requirements.get(owner, ()):
            yield from _requirement(owner, text, versions)
    for name, tried in TRIED.items():
        have = versions.get(name)
        if have is not None and Version(have).release[:2] != Version(tried).release[:2]:
            yield Finding(
                "installation.untried", "note", f"{name} {have}",
                f"this package was tried with {tried}, and others may behave otherwise",
                f"pip install {name}=={tried} where something is odd.", where=name,
            )  # fmt: skip


def _python(version: Sequence[int]) -> Iterator[Finding]:
    if tuple(version) < LEAST_PYTHON:
        shown = ".".join(map(str, version))
        yield Finding(
            "installation.python", "error", f"python={shown}",
            "the package uses its syntax", "Make a new environment.", rule="be 3.10 or newer",
        )  # fmt: skip


def _installed_requirements(versions: Mapping[str, str]) -> dict[str, list[str]]:
    found = {}
    for name in ("rllib-llm", *NEIGHBOURS):
        if name in versions:
            found[name] = importlib.metadata.requires(name) or []
    return found


def _requirement(owner: str, text: str, versions: Mapping[str, str]) -> Iterator[Finding]:
    """The problem with one requirement, "name>=1,<2; marker", if any; extras are ignored."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return
    if "extra" in text and re.search(r";.*extra", text):
        return
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return
    name = requirement.name.lower().replace("_", "-")
    have = versions.get(name)
    if have is None:
        if owner == "rllib-llm":
            yield Finding(
                "installation.missing", "error", f"{name}",
                f"{owner} requires {requirement.specifier or 'it'}",
                f"pip install '{text.partition(';')[0].strip()}'.", where=name, rule="be installed",
            )  # fmt: skip
        return
    if requirement.specifier.contains(have, prereleases=True):
        return
    ours = owner == "rllib-llm"
    yield Finding(
        "installation.version" if ours else "installation.conflict",
        "error" if ours else "warning",
        f"{name} {have}",
        "its authors ask for it",
        f"pip install '{name}{requirement.specifier}'"
        + ("." if ours else f", or another version of {owner}."),
        where=f"{owner}: {name}",
        rule=f"be {requirement.specifier} for {owner} {versions.get(owner, '')}".rstrip(),
    )


SECONDS_TO_START = 60.0
STORE_BYTES = 80 * 1024**2  # the least that Ray accepts


def ray_rules() -> Iterator[Finding]:
    """Starts a small Ray cluster, unless this process has one, and runs a task in it."""
    import ray

    started = not ray.is_initialized()
    begin = time.monotonic()
    try:
        if started:
            ray.init(
                address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
                object_store_memory=STORE_BYTES, logging_level="ERROR",
            )  # fmt: skip
        answer = ray.get(ray.put("here"), timeout=SECONDS_TO_START)
        seconds = time.monotonic() - begin
        if answer == "here" and started:
            yield Finding(
                "ray.start", "note", f"Ray {ray.__version__} starts in {seconds:.1f} s", "", ""
            )
    except Exception as error:
        # Where its processes do not come up, Ray raises an Exception of no other class.
        of_ray = type(error) is Exception
        if not of_ray and not isinstance(error, OSError | RuntimeError | ValueError):
            raise
        yield Finding(
            "ray.start", "error", f"Ray does not start: {type(error).__name__}: {error}",
            "samplers and trials need it",
            "Look at /tmp/ray/session_latest/logs, free ports and memory, and stop old sessions "
            "(ray stop).",
        )  # fmt: skip
    finally:
        if started:
            ray.shutdown()
