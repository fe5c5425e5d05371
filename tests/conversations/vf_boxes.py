"""A task set of verifiers whose tasks are done in a container, as those of SWE-bench are: a file is
to be mended, and a command in the container says whether it is."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile

import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult, Runtime


class MendData(vf.TaskData):
    asked: str = "done"
    broken: str = ""  # the hook that fails, or "box": the policy breaks it


class Seen(vf.State):
    at_end: str = ""


class MendConfig(vf.TaskConfig):
    pass


class Mend(vf.Task[MendData, Seen, MendConfig]):
    NEEDS_CONTAINER = True

    def runtime_env(self):
        return {"WHO": "the task"}

    async def setup(self, runtime: Runtime) -> None:
        await self._at("setup", runtime)
        await runtime.write("state.txt", b"broken")

    async def finalize(self, trace: vf.Trace, runtime: Runtime) -> None:
        await self._at("finalize", runtime)
        if self.data.broken != "box":
            trace.state.at_end = (await runtime.read("state.txt")).decode().strip()

    @vf.reward
    async def mended(self, trace: vf.Trace, runtime: Runtime) -> float:
        await self._at("mended", runtime)
        done = await runtime.run(["grep", "-q", self.data.asked, "state.txt"], {})
        return float(done.exit_code == 0)

    @vf.metric
    async def changed(self, trace: vf.Trace) -> float:
        return float(trace.state.at_end != "broken")

    async def _at(self, hook: str, runtime: Runtime) -> None:
        if self.data.broken == f"late {hook}":
            await runtime.run(["sleep", "600"], {})
        if self.data.broken == hook:
            raise OSError(f"{hook} failed")


class MendsConfig(vf.TasksetConfig):
    data: dict = {}


class Mends(vf.Taskset[Mend, MendsConfig]):
    def load(self):
        yield Mend(MendData(**{"prompt": "Mend state.txt.", "image": "mend:1", **self.config.data}))


class Folder(Runtime):
    """A runtime of one's own: a folder. It counts those that live."""

    live: set[str] = set()

    def __init__(self, config, name=None) -> None:
        super().__init__(name)
        self.config = config

    async def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.live.add(self.name)

    def cleanup(self) -> None:
        self.live.discard(self.name)

    async def run(self, argv, env):
        if self.name not in self.live:
            return ProgramResult(1, "", "no such container")
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, cwd=self.folder.name, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except FileNotFoundError as error:
            return ProgramResult(127, "", str(error))
        try:
            out, err = await process.communicate()
        except BaseException:
            process.kill()
            raise
        return ProgramResult(process.returncode or 0, out.decode(), err.decode())

    async def _read(self, path, max_bytes=None):
        return (await self.run(["cat", path], {})).stdout.encode()

    async def write(self, path, data):
        await self.run(["sh", "-c", f"echo {data.decode()} > {path}"], {})


class Dying(Folder):
    """Is gone once its task is set up."""

    async def prepare_execution(self, routes) -> None:
        self.cleanup()


class Bare(Folder):
    """Has no bash."""

    async def run(self, argv, env):
        return await super().run(["no-bash" if argv[0] == "bash" else argv[0], *argv[1:]], env)


class Staging(Mend):
    async def stage_verifier(self, trace: vf.Trace, runtime: Runtime) -> None:
        pass


class Stagings(vf.Taskset[Staging, vf.TasksetConfig]):
    def load(self):
        yield Staging(MendData(prompt="Mend state.txt."))


class NoRuntime:
    pass
