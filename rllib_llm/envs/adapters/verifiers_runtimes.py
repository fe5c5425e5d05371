"""Runtimes of verifiers for the container tasks of `rllib_llm/Verifiers-v0`.

    start ─▶ vf.Runtime ─▶ docker run ... sleep infinity ◀─ setup, bash, finalize, score
    end ─▶ docker rm ◀─ the reaper ◀─ the end of this process, also by SIGKILL

What a runtime contains, and what not, the guide on containment says.
"""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import require
from rllib_llm.shared.messages import blamed_on

# The reaper: its input ends with the process that made it; then it removes the containers with a
# label. It is no child of that process, since Ray kills the children of a worker that it ends. It
# looks again for 8.5 minutes: a `docker run` may outlive its process while it downloads an image.
_REAP = """exec 3<&0
{ cat <&3; for pause in 1 2 4 8 16 32 64 128 256; do sleep $pause
"$0" ps --all --quiet --filter "label=$1" | xargs -r "$0" rm --force; done; } &"""
# The sampler reads all that a command prints before it shortens it: a mebibyte at most.
_BASH = 'bash -c "$1" 2>&1 </dev/null | { head -c 1048576; cat >/dev/null; }'


class Runtimes:
    """The runtimes of one environment.

    Args:
        given: verifiers' config of a runtime, {type: docker, ...}, or the type alone. Its key
            `class` is the dotted path of a `vf.Runtime`, which is made with the config and a name
            in place of verifiers' own; the path may also stand alone. `bash`: whether the policy
            has a tool of this name. Where it says nothing of networks, the policy has none; in
            apptainer it has the machine's, for which `network_access: true` is wanted.

    Raises:
        Problems: it is no such config, or the program that it needs is not there.
    """

    def __init__(self, given: Mapping[str, Any] | str) -> None:
        from pydantic import TypeAdapter
        from verifiers.v1 import runtimes

        if isinstance(given, str):
            given = {"class" if "." in given or ":" in given else "type": given}
        config = {"type": "docker", **given}
        path, self.has_bash = config.pop("class", None), config.pop("bash", True)
        require(isinstance(self.has_bash, bool), "runtime.bash", self.has_bash, "be true or false")
        require(config["type"] != "subprocess", "runtime.type", "subprocess", "be a container's",
                "the policy's commands would be the run's own", "Write docker")  # fmt: skip
        with blamed_on("runtime", given, "be verifiers' config of a runtime", remedy="Correct it"):
            config_of: TypeAdapter[Any] = TypeAdapter(runtimes.RuntimeConfig)
            is_open = config["type"] == "apptainer" and config.pop("network_access", None)
            self._config = config_of.validate_python(config)
            can_close = isinstance(self._config, runtimes.NetworkPolicyConfig)
            require(can_close or is_open is True, "runtime.network_access", is_open, "be true",
                    f"{config['type']} gives the policy the network of this machine",
                    "Say so, or take docker or podman")  # fmt: skip
            if can_close and not config.keys() & {"allow", "block", "network_access"}:
                self._config = config_of.validate_python({**config, "allow": [], "block": ["*"]})
            own = type(runtimes.make_runtime(self._config))
            self._kind = import_dotted(path, name="runtime.class") if path else own
            if not issubclass(self._kind, runtimes.Runtime):
                raise TypeError(f"{path} is no subclass of vf.Runtime")
        self._label, self._reaper = f"rllib-llm={uuid.uuid4().hex}", None
        if issubclass(self._kind, runtimes.DockerRuntime):
            engine = self._kind.engine
            require(shutil.which(engine), "runtime", given, "run here", f"{engine} is not on PATH",
                    "Install it where samplers run")  # fmt: skip
            self._reaper = subprocess.Popen(
                ["sh", "-c", _REAP, engine, self._label], stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            self._reaper.wait()  # what it has forked goes on
        self._warned: set[tuple[str, str]] = set()

    def config_of(self, task: Any) -> Any:
        """The config with the task's own image, folder, resources and networks; raises ValueError
        where it cannot have these."""
        from verifiers.v1.utils.compile import resolve_runtime_config

        config = resolve_runtime_config(self._config, task, self._warned)
        hosts = task.data.network_allow  # verifiers takes those alone that the config allows, too
        require(not hosts or "*" in hosts or config.allow, "runtime.allow", ...,
                "have hosts of the task's", f"it wants {hosts}", f"Write {hosts}")  # fmt: skip
        return config

    def make(self, task: Any, name: str) -> Any:
        """A `vf.Runtime` for a task, which is not started yet."""
        from verifiers.v1.runtimes import register

        runtime = self._kind(self.config_of(task), name)
        if self._reaper is not None:
            runtime._label_args += ["--label", self._label]  # verifiers has no public way
        register(runtime)  # verifiers ends it at the exit of this process, if nothing did before
        runtime.env = dict(task.runtime_env())
        return runtime

    def close(self) -> None:
        """Removes the containers that are left, by the reaper."""
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()


async def is_running(runtime: Any) -> bool:
    """Whether a container runs, even a broken one; of other engines whether they run a command."""
    from verifiers.v1.runtimes import DockerRuntime

    if not isinstance(runtime, DockerRuntime):
        return bool(await runtime.alive())
    asked = (runtime.engine, "inspect", "--format", "{{.State.Running}}", runtime._container)
    return (await runtime._run_host(*asked)).stdout.strip() == "true"


def bash_in(runtime: Any) -> Callable[..., Any]:
    """The tool `bash` in a runtime, under the schema of verifiers' harness `bash`."""

    async def bash(command: str) -> str:
        """Run a bash command and return its combined stdout and stderr.

        Args:
            command: The bash command to run.
        """
        done = await runtime.run(["bash", "-c", _BASH, "bash", command], {})
        return done.stdout + done.stderr

    return bash
