"""Modules that a user named with `--import`: imported in every process, so that what they register
by name is known there."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

IMPORTS = "RLLIB_LLM_IMPORT"  # their names, for processes that are started from here
HOOK = "rllib_llm.named_imports.import_named"


def name_imports(modules: Sequence[str]) -> None:
    """Import the modules, here and, from now on, in processes that are started from here.

    Raises:
        ModuleNotFoundError: saying which.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            raise ModuleNotFoundError(
                f"--import={module!r} must be a module that can be imported: there is none. Start "
                "the command in its folder, or put the folder on PYTHONPATH.",
                name=error.name,
            ) from error
    if modules:
        os.environ[IMPORTS] = ",".join(modules)


def import_named() -> None:
    """In a process of Ray: import what was named."""
    for module in filter(None, os.environ.get(IMPORTS, "").split(",")):
        importlib.import_module(module)


def runtime_env() -> dict[str, Any]:
    """What `ray.init` has to be told so that Ray's processes import it, {} where nothing is."""
    if not os.environ.get(IMPORTS):
        return {}
    return {"worker_process_setup_hook": HOOK, "env_vars": {IMPORTS: os.environ[IMPORTS]}}
