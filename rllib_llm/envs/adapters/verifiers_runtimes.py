"""Runtimes of verifiers, in which the container tasks of `rllib_llm/Verifiers-v0` run: one for each
conversation.

    start ─▶ make ─▶ vf.Runtime ─▶ docker run ... sleep infinity ─┬─▶ task.setup
                                                                  ├─▶ bash, for the policy
    end, close ─▶ stop ─▶ docker rm                               └─▶ task.finalize, task.score
    the end of this process, also by SIGKILL ─▶ the reaper ─▶ docker rm

What a runtime contains, and what not, the guide on containment says.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
import uuid
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import require
from rllib_llm.shared.messages import blamed_on, told
from rllib_llm.shared.remote import Away

logger = logging.getLogger(__name__)

# The reaper: its input ends with the process that made it; then it removes the containers with a
# label. It is no child of that process, since Ray kills the children of a worker that it ends. The
# second is for a container that was being made.
_REAP = """exec 3<&0
{ cat <&3; sleep 1; "$0" ps --all --quiet --filter "label=$1" | xargs -r "$0" rm --force; } &"""
_MOST_BYTES = 2**20  # of a command's output: the sampler reads all of it before it is shortened
_BASH = f'bash -c "$1" 2>&1 </dev/null | head -c {_MOST_BYTES}'


class Runtimes:
    """The runtimes of one environment.

    Args:
        given: verifiers' config of a runtime, {type: docker, ...}, or the type alone. Its key
            `class` is the dotted path of a `vf.Runtime`, which is made with the config and a name
            in place of verifiers' own; the path may also stand alone. `bash`: whether the policy
            has a tool of this name. Where it says nothing of networks, the policy has none.

    Raises:
        Problems: it is no such config, or the program that it needs is not there.
    """

    def __init__(self, given: Mapping[str, Any] | str) -> None:
        from pydantic import TypeAdapter
        from verifiers.v1 import runtimes

        if isinstance(given, str):
            given = {"class" if "." in given or ":" in given else "type": given}
        path, self.has_bash = given.get("class"), given.get("bash", True)
        settings = {"type": "docker", **given}
        config = {name: settings[name] for name in settings if name not in ("class", "bash")}
        require(isinstance(self.has_bash, bool), "runtime.bash", self.has_bash, "be true or false")
        with blamed_on(
            "runtime", given, "be a config of a runtime of verifiers",
            remedy="Write {type: docker}, or another type with its settings",
        ):  # fmt: skip
            config_of: TypeAdapter[Any] = TypeAdapter(runtimes.RuntimeConfig)
            self._config = config_of.validate_python(config)
            can_close = isinstance(self._config, runtimes.NetworkPolicyConfig)
            if can_close and not config.keys() & {"allow", "block", "network_access"}:
                self._config = config_of.validate_python({**config, "allow": [], "block": ["*"]})
            own = type(runtimes.make_runtime(self._config))
            self._kind = import_dotted(path, name="runtime.class") if path else own
            if not issubclass(self._kind, runtimes.Runtime):
                raise TypeError(f"{path} is no subclass of vf.Runtime")
        self._is_contained = self._kind is not runtimes.SubprocessRuntime
        if not self._is_contained:
            warnings.warn(
                "runtime 'subprocess' is no boundary: code of a model reads, changes and sends "
                "what the run's user can.", stacklevel=2,
            )  # fmt: skip
        self._engine = None
        if issubclass(self._kind, runtimes.DockerRuntime):
            self._engine = self._kind.engine
            require(shutil.which(self._engine), "runtime", given, "run here",
                    f"{self._engine} is not on PATH",
                    "Install it where samplers run, or give another type")  # fmt: skip
        self._label = f"rllib-llm={uuid.uuid4().hex}"
        self._reaper: subprocess.Popen[bytes] | None = None
        self._live: set[Any] = set()
        self._warned: set[tuple[str, str]] = set()

    def objection(self, task: Any) -> str:
        """Why a task cannot run in such a runtime; "" where it can."""
        if task.NEEDS_CONTAINER and not self._is_contained:
            return "it needs a container, and runtime 'subprocess' is none"
        try:
            self._config_for(task)
        except ValueError as error:
            return str(error)
        return ""

    def _config_for(self, task: Any) -> Any:
        """The config with the task's own image, folder, resources and networks."""
        from verifiers.v1.utils.compile import resolve_runtime_config

        return resolve_runtime_config(self._config, task, self._warned)

    def make(self, task: Any, name: str) -> Any:
        """A `vf.Runtime` for a task, which is not started yet; `stop` ends it."""
        from verifiers.v1.runtimes import register

        runtime = self._kind(self._config_for(task), name)
        if self._engine is not None:
            runtime._label_args += ["--label", self._label]  # the only way to name one of ours
            self._watch()
        register(runtime)
        self._live.add(runtime)
        runtime.env = dict(task.runtime_env())
        return runtime

    def _watch(self) -> None:
        if self._reaper is None:
            self._reaper = subprocess.Popen(
                ["sh", "-c", _REAP, str(self._engine), self._label], stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            self._reaper.wait()  # what it has forked goes on

    async def stop(self, runtime: Any) -> None:
        """Ends a runtime; where that fails, the log says so."""
        try:
            await runtime.stop()
        except Exception as error:  # noqa: BLE001  (of any provider)
            logger.warning("The runtime %s did not end: %s", runtime.name, told(error))
        self._live.discard(runtime)

    async def close(self) -> None:
        """Ends all runtimes."""
        await asyncio.gather(*map(self.stop, tuple(self._live)))
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()


def bash_in(runtime: Any) -> Callable[..., Any]:
    """The tool `bash` in a runtime, under the schema of verifiers' harness `bash`."""

    async def bash(command: str) -> str:
        """Run a bash command and return its combined stdout and stderr.

        Args:
            command: The bash command to run.
        """
        try:
            done = await runtime.run(["bash", "-c", _BASH, "bash", command], {})
        except Exception as error:  # noqa: BLE001  (of any provider; the policy has not caused it)
            raise Away(f"its runtime cannot be reached: {told(error)}") from error
        if done.exit_code:  # of `head`, not of the command
            await check_alive(runtime)
        return done.stdout + done.stderr

    return bash


async def check_alive(runtime: Any) -> None:
    """Raises Away where a runtime runs nothing any more, which a failed command does not show."""
    if not await runtime.alive():
        raise Away("the task's runtime has ended")
