"""Ray's workers as forks of a process that has imported torch, transformers and RLlib.

Each worker imports them for some six seconds of a core, and tests start hundreds of workers. Ray
runs this file in place of its own for each:

    raylet ──▶ this file ──▶ socket ──▶ server ──fork──▶ default_worker.py

The first worker of a raylet with certain environment variables makes their server. It has imported
libraries and done nothing else: it has no thread, no connection, and nothing of this project, which
each worker imports by itself. Programs that tests start have workers as Ray starts them.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
from pathlib import Path

IMPORTED = (
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama", "ray.rllib.algorithms.ppo",
    "ray.rllib.core.learner.torch.torch_learner", "ray.tune",
)  # fmt: skip
RAYLET, JOB = "RAY_RAYLET_PID", "RAY_JOB_ID"  # what raylets tell their workers
CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="  # for Ray's own file
NUM_BYTES = 4  # of a request's length


def install() -> None:
    """Has the Ray that this process starts have its workers forked."""
    if sys.platform == "linux":
        from ray._private import ray_constants

        ray_constants.SETUP_WORKER_FILENAME = __file__  # is joined to a folder, which it replaces


def main(arguments: list[str]) -> None:
    """Asks the server for a worker, and makes the server where there is none."""
    worker = [each for each in arguments if not each.startswith((CONTEXT, LANGUAGE))]
    contexts = [each.removeprefix(CONTEXT) for each in arguments if each.startswith(CONTEXT)]
    context = json.loads(contexts[0]) if contexts else {}
    if context.get("command_prefix") or context.get("override_worker_entrypoint"):
        own = Path(worker[0]).with_name("setup_worker.py")
        os.execv(sys.executable, [sys.executable, str(own), *arguments])
    os.environ.update(context.get("env_vars") or {})
    address = server_address()
    with address.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(address))
        except (FileNotFoundError, ConnectionRefusedError):
            address.unlink(missing_ok=True)
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(str(address))
            listening.listen(128)
            if os.fork() == 0:
                lock.close()
                connection.close()
                return run(*serve(listening, address))
            connection.connect(str(address))
    request = json.dumps([worker, dict(os.environ)]).encode()
    with connection:
        socket.send_fds(connection, [len(request).to_bytes(NUM_BYTES, "big")], [1, 2])
        connection.sendall(request)


def server_address() -> Path:
    """Of the server of this raylet's workers with these variables."""
    variables = sorted(item for item in os.environ.items() if item[0] != JOB)
    key = hashlib.sha256(repr(variables).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"forked_workers_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{os.environ[RAYLET]}_{key}"


def serve(listening: socket.socket, address: Path) -> tuple[list[str], dict[str, str]]:
    """Forks workers until the raylet ends; returns a worker's arguments and variables, in it."""
    os.setsid()
    raylet = os.pidfd_open(int(os.environ[RAYLET]))
    import_libraries()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    while True:
        ready, _, _ = select.select([listening, raylet], [], [])
        if raylet in ready:
            address.unlink()
            address.with_suffix(".lock").unlink()
            os._exit(0)
        connection, _ = listening.accept()
        if os.fork():
            connection.close()
            continue
        os.setpgid(0, 0)  # raylets end whatever is in the group of a worker that has ended
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listening.close()
        os.close(raylet)
        with connection, connection.makefile("rb") as file:
            length, files, *_ = socket.recv_fds(connection, NUM_BYTES, 2)
            worker, variables = json.loads(file.read(int.from_bytes(length, "big")))
        for number, output in enumerate(files, 1):
            os.dup2(output, number)
            os.close(output)
        return worker, variables


def import_libraries() -> None:
    """Imports what workers need, without a draw from Ray's generator of ids: it is seeded by its
    first draw, and forks that share its state would draw the same ids."""
    import ray.actor

    class Drawn(ray.ActorClassID):
        @classmethod
        def from_random(cls):
            return ray.ActorClassID(os.urandom(ray.ActorClassID.size()))

    drawn, ray.actor.ActorClassID = ray.actor.ActorClassID, Drawn
    for name in IMPORTED:
        importlib.import_module(name)
    ray.actor.ActorClassID = drawn


def run(worker: list[str], variables: dict[str, str]) -> None:
    """Ray's own program for workers."""
    import numpy as np

    np.random.seed()  # not what the server would
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = worker
    sys.path[0] = str(Path(worker[0]).parent)
    runpy.run_path(worker[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
