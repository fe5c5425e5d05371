"""The session of a command: starts Ray quietly, prints errors on stderr."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from rllib_llm.cli.options import RayOptions
from rllib_llm.shared.dotted import name_imports, runtime_env
from rllib_llm.shared.errors import Problems, require
from rllib_llm.shared.messages import LOGGERS as LIBRARIES
from rllib_llm.shared.messages import VERBOSE

stderr = Console(stderr=True)


def show(message: str, title: str = "error") -> None:
    """Print `message` between two red rules on stderr. Words are not broken, so that paths can be
    copied; an indented line (a command) stays on one line."""
    wrapper = textwrap.TextWrapper(
        max(20, stderr.width), break_long_words=False, break_on_hyphens=False
    )
    lines: list[str] = []
    for paragraph in message.splitlines():
        lines += [paragraph] if paragraph.startswith(" ") else wrapper.wrap(paragraph) or [""]
    stderr.print(Rule(title, align="left", style="red"))
    stderr.print(Text("\n".join(lines)), soft_wrap=True)
    stderr.print(Rule(style="red"))


@contextlib.contextmanager
def user_errors(verbosity: int = 0) -> Iterator[None]:
    """Turn mistakes of the user (ValueError, files and modules) into a panel and exit 2.

    With a `verbosity` above 0 the traceback comes first.
    """
    try:
        yield
    except BrokenPipeError:  # `| head`
        raise
    except (OSError, ValueError, ImportError) as error:
        if verbosity:
            stderr.print_exception()
        show(str(error) or type(error).__name__)
        raise typer.Exit(2) from error


def new_folder(option: str, given: str, reason: str) -> Path:
    """The folder that an option names; raises Problems where it holds something."""
    folder = Path(given).expanduser()
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(is_new, option, given, "be new or empty", reason, "Name another folder")
    return folder


@contextlib.contextmanager
def extra_serve(command: str) -> Iterator[None]:
    """Raises Problems where a package of the extra `serve` is missing or unfit."""
    try:
        yield
    except ImportError as error:
        remedy = "pip install 'rllib-llm[serve]'"
        raise Problems(f"`{command}`", "find the packages of `serve`", error, remedy) from error


@contextlib.contextmanager
def shown_warnings() -> Iterator[list[str]]:
    """Print each different `UserWarning` of the block once, when it has ended without an error, and
    add it to the list that is yielded."""
    shown: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield shown
    texts = (str(w.message) for w in caught if issubclass(w.category, UserWarning))
    shown += dict.fromkeys(texts)
    for text in shown:
        line = Text.assemble(("warning: ", "yellow"), text)
        stderr.print(line, soft_wrap=True, highlight=False)


# ray.init() sets the level of "ray"; those below it with a level of their own keep theirs. That of
# authentication tells at each start what Ray does by default.
LOGGERS = ("ray", "ray.tune", "ray.rllib", "ray.train", "ray._private.authentication", *LIBRARIES)
SECONDS_TO_CONNECT = 20.0


def prepare(verbosity: int = 0, imports: Sequence[str] | None = None) -> None:
    """Make this process ready to load algorithms: quiet, and able to import from its folder.

    Ray's workers inherit both, and import the modules `imports`. Call it before Ray is imported.
    Values of the environment that the user has set are kept.
    """
    defaults = {
        # Ray hides GPUs from actors that ask for none, in future versions no longer: it warns.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Relative paths in a config mean the folder the command was started in.
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "RAY_AIR_NEW_OUTPUT": "0",
        "RAY_DEDUP_LOGS": "1",
        "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore::DeprecationWarning,ignore::FutureWarning",
        # Tune records what trials have saved every ten seconds; a killed run shall find its last.
        "TUNE_GLOBAL_CHECKPOINT_S": "1",
    }
    if verbosity == 0:
        defaults["TRANSFORMERS_VERBOSITY"] = "error"
        defaults["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        defaults["HF_HUB_VERBOSITY"] = "error"  # what it tries again it tells each time
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if verbosity:
        os.environ[VERBOSE] = str(verbosity)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(log_level(verbosity))
    if verbosity == 0:  # what fails is shown once, by us
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    # Imports make millions of objects that stay: looking for garbage among them takes a tenth of
    # the seconds until a command begins its work.
    gc.set_threshold(100_000, 50, 50)
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if folder not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *paths])
    with user_errors(verbosity):
        name_imports(imports or ())


@contextlib.contextmanager
def ray_session(
    options: RayOptions, needed_cpus: float = 1
) -> Iterator[list[dict[str, float]]]:
    """Connect to Ray, or start it here, and yield the resources of each of the cluster's nodes.

    A Ray that already runs in this process is used and left running.

    Args:
        options: what the command line says.
        needed_cpus: CPUs that one trial reserves. A local Ray is given at least so many, since they
            are slots for processes, not cores; on fewer cores the processes take turns.
    """
    import ray

    from rllib_llm.shared.ray_compat import own_ray_has_ended, resources_by_node

    if ray.is_initialized():
        yield resources_by_node()
        return
    check_address(options.ray_address)
    begun = time.time()
    try:
        ray.init(**_init_arguments(options, needed_cpus))
    except Exception as error:
        # Where its processes do not come up, Ray raises an Exception of no other class.
        if not isinstance(error, ConnectionError | RuntimeError) and type(error) is not Exception:
            raise
        if options.ray_address:
            raise _no_cluster(options.ray_address, error) from error
        remedy = "Try again when less is running here, or use a cluster that runs (--ray-address)"
        why = "; in its logs: ".join(filter(None, (str(error), _logged_error(begun))))
        raise Problems("Ray", "start on this machine", why, remedy) from error
    try:
        yield resources_by_node()
    finally:
        if not own_ray_has_ended():
            ray.shutdown()


def _logged_error(since: float) -> str:
    """The last error in the logs of a Ray that was started since then, "" if there is none."""
    session = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "session_latest").resolve()
    with contextlib.suppress(OSError):
        if session.stat().st_ctime >= since - 1:  # of a file system's coarser clock
            files = sorted(session.glob("logs/*.err"), key=lambda file: file.stat().st_mtime)
            texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
            lines = [line for text in texts for line in text.splitlines()]
            return next((line for line in reversed(lines) if re.search(" [EC] ", line)), "")
    return ""


def check_address(address: str | None, seconds: float = SECONDS_TO_CONNECT) -> None:
    """Raise Problems where a cluster's address, "host:port" or "ray://host:port", does not answer
    in so many seconds: Ray would try for minutes, and log each attempt."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not address or not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), seconds).close()
        if not address.startswith("ray://"):
            _check_health(address, seconds)
    except (OSError, subprocess.SubprocessError) as error:
        raise _no_cluster(address, "none answers there") from error


def _no_cluster(address: str, why: object) -> Problems:
    remedy = "Start one with `ray start --head`, check the firewall, or leave it out"
    return Problems(_origin(address), "be a running Ray cluster", why, remedy, address)


def _origin(address: str) -> str:
    """The variable or the option that gave a cluster's address."""
    return "RAY_ADDRESS" if os.environ.get("RAY_ADDRESS") == address else "--ray-address"


# In another process, since Ray's client ends the process that it cannot connect.
HEALTH_CHECK = (
    "import sys; from ray.scripts.scripts import cli; print(flush=True); "
    "cli(['health-check', '--skip-version-check', '--address', sys.argv[1]])"
)


def _check_health(address: str, seconds: float) -> None:
    """Raise a SubprocessError where Ray does not answer in so many seconds, Problems where it
    refuses the token. They begin once Ray is imported, which alone takes longer where the machine
    is busy."""
    command = [sys.executable, "-c", HEALTH_CHECK, address]
    with (
        tempfile.TemporaryFile() as stderr_file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr_file) as child,
    ):
        try:
            assert child.stdout is not None
            child.stdout.readline()
            if not child.wait(seconds):
                return
        finally:
            child.kill()
        stderr_file.seek(0)
        require(
            b"authentication token" not in stderr_file.read().lower(), _origin(address), address,
            "be given the cluster's token", "this process's is refused, or it has none",
            "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN=<token>; without the latter Ray reads the "
            "file of RAY_AUTH_TOKEN_PATH, else ~/.ray/auth_token",
        )  # fmt: skip
        raise subprocess.CalledProcessError(child.returncode, command)


def _init_arguments(options: RayOptions, needed_cpus: float) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "log_to_driver": options.verbose > 0,
        "logging_level": log_level(options.verbose),
    }
    if hooks := runtime_env():
        arguments["runtime_env"] = hooks
    if options.ray_address:
        for name in ("ray_num_cpus", "ray_num_gpus", "ray_object_store_memory"):
            value = getattr(options, name)
            require(value is None, f"--{name.replace('_', '-')}", value, "be left out with "
                    + _origin(options.ray_address), "a running cluster has its own")  # fmt: skip
        return arguments | {"address": options.ray_address}
    return arguments | {
        "address": "local",
        "include_dashboard": False,
        "num_cpus": options.ray_num_cpus or max(os.cpu_count() or 1, math.ceil(needed_cpus)),
        "num_gpus": options.ray_num_gpus,
        "object_store_memory": options.ray_object_store_memory,
    }


def log_level(verbosity: int) -> int:
    """Return the level of Ray's loggers: errors, information, debugging."""
    return (logging.ERROR, logging.INFO, logging.DEBUG)[min(verbosity, 2)]


def show_progress(text: str) -> None:
    """Print what takes some seconds now, beside the results."""
    stderr.print(text, style="dim", highlight=False, soft_wrap=True)
