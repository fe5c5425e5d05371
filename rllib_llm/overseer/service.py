"""A run's overseer: the state of its processes and the queue of commands to them; the named actor
that holds it, created by the first trial that needs it; and its client, what `rllib status`, `rllib
pause` ... use. HTTP on loopback only, authenticated by the run's token.

It observes and relays: processes report to it and ask it for commands, and none waits for it.
After a restart it is empty, and knows everything again once each has reported. Where processes are,
and whether they live, stands in their reports too: Ray's State API, which has it, needs the
dashboard, without which `rllib train` starts Ray.

GET  /health /status /topology /metrics      GET /commands?id=1&id=2
POST /commands  {"name": "scale", "arguments": {"samplers": 4}}   →  {"commands": [{"id", ...}]}

run = find_run("results/my_run")
print(run.status()["diagnoses"])
run.tell("scale", samplers=4)       # waits until it was answered
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import os
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rllib_llm.overseer.phases import diagnose
from rllib_llm.shared.errors import Problems, require
from rllib_llm.shared.remote import NAMESPACE
from rllib_llm.shared.run_layout import RunFolder, name_one
from rllib_llm.shared.storage import place, read_json

NAMES = ("pause", "resume", "scale", "checkpoint", "stop")
WAITING, DONE, REFUSED = "waiting", "done", "refused"
LOST = "lost"  # the overseer that knew of it has ended
_OTHERWISE = (
    "Start the run with `--set overseer=true` and name its folder as `rllib train` shows it; if it "
    "has just begun, wait for its first iteration"
)


@dataclass
class Command:
    """One command to one process.

    id: counts up; a process carries out each once, however often it hears of it.
    part: the recipient.
    incarnation: the process that existed when the command was given; one that was started in its
        place refuses it.
    """

    id: int
    name: str
    part: str
    incarnation: str
    arguments: dict[str, Any] = field(default_factory=dict)
    state: str = WAITING
    answer: str = ""


SILENT_SECONDS = 15.0  # after which a part counts as silent
FORGOTTEN_SECONDS = 600.0  # after which it is left out
MAX_KEPT = 200  # commands that are remembered


class Overseer:
    """Reports come in, commands go out with the replies. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._parts: dict[str, dict[str, Any]] = {}
        self._heard: dict[str, float] = {}
        self._commands: dict[int, Command] = {}
        # Ids of an overseer that is started again go on above those before.
        self._ids = itertools.count(int(clock() * 1000))

    def report(self, report: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Stores a part's report and returns its unanswered commands.

        Args:
            report: "part" (its name), "kind", "trial", "incarnation", "pid", "node", and further
                facts; "answers" to commands: [{"id", "state", "answer"}].
        """
        with self._lock:
            for answer in report.get("answers", ()):
                command = self._commands.get(answer["id"])
                if command is not None:
                    command.state, command.answer = answer["state"], answer["answer"]
            name = report["part"]
            self._parts[name] = {k: v for k, v in report.items() if k != "answers"}
            self._heard[name] = self._clock()
            waiting = [c for c in self._commands.values() if c.part == name and c.state == WAITING]
            for command in waiting:
                if command.incarnation != report["incarnation"]:
                    command.state = REFUSED
                    command.answer = f"{name} was started again since, and has not received it"
            return [asdict(command) for command in waiting if command.state == WAITING]

    def leave(self, part: str) -> None:
        """Removes a part that ended normally."""
        with self._lock:
            self._parts.pop(part, None)
            self._heard.pop(part, None)

    def command(
        self, name: str, arguments: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Queues a command for every trial that is alive; returns the commands.

        Raises:
            Problems: no such command.
        """
        given = dict(arguments or {})
        require(name in NAMES, "command", name, f"be one of {NAMES}", "", "")
        samplers = given.pop("samplers", None) if name == "scale" else 1
        is_count = type(samplers) is int and samplers >= 1
        require(is_count, "samplers", samplers, "be a whole number of at least 1", "", "")
        require(not given, "arguments", given, "be left out", f"{name} takes none of them", "")
        given |= {"samplers": samplers} if name == "scale" else {}
        with self._lock:
            new = [
                Command(next(self._ids), name, part["part"], part["incarnation"], {**given})
                for part in self._alive() if part["kind"] == "trial"
            ]  # fmt: skip
            self._commands |= {command.id: command for command in new}
            for old in list(self._commands)[:-MAX_KEPT]:
                del self._commands[old]
            return [asdict(command) for command in new]

    def commands(self, ids: list[int] | None = None) -> list[dict[str, Any]]:
        """Commands and what became of them, all that are remembered or those asked for."""
        with self._lock:
            known = self._commands
            return [asdict(known[i]) for i in (known if ids is None else ids) if i in known]

    def status(self) -> dict[str, Any]:
        """Every part, with the seconds since it was heard, and a diagnosis of each trial."""
        with self._lock:
            now, parts = self._clock(), []
            for part in self._alive(FORGOTTEN_SECONDS):
                silent = now - self._heard[part["part"]]
                state = {"silent_seconds": silent, "is_silent": silent > SILENT_SECONDS}
                parts.append({**part, **state})
        samplers = {
            part["trial"] for part in parts
            if part["kind"] == "sampler" and not part["part"].startswith("evaluation ")
        }  # fmt: skip
        trials = [part for part in parts if part["kind"] == "trial"]
        return {"parts": parts, "diagnoses": {
            trial["part"]: vars(
                diagnose(trial.get("recent_seconds") or {}, trial["trial"] in samplers)
            ) for trial in trials
        }}  # fmt: skip

    def health(self) -> dict[str, Any]:
        """Whether every part has been heard lately."""
        parts = self.status()["parts"]
        silent = [part["part"] for part in parts if part["is_silent"]]
        return {"ok": bool(parts) and not silent, "parts": len(parts), "silent": silent}

    def metrics(self) -> str:
        """Numbers of every part in Prometheus' text format."""
        parts = self.status()["parts"]
        lines = [
            "# HELP rllib_llm_phase_seconds Seconds that a part has spent in a phase.",
            "# TYPE rllib_llm_phase_seconds counter",
            *(f'rllib_llm_phase_seconds{{part="{part["part"]}",phase="{phase}"}} {seconds:.3f}'
              for part in parts for phase, seconds in (part.get("seconds") or {}).items()),
            "# HELP rllib_llm_iteration Iterations that a trial has learnt.",
            "# TYPE rllib_llm_iteration gauge",
            *(f'rllib_llm_iteration{{part="{part["part"]}"}} {part["iteration"]}'
              for part in parts if part.get("iteration") is not None),
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def _alive(self, seconds: float = SILENT_SECONDS) -> list[dict[str, Any]]:
        now = self._clock()
        return [
            part for name, part in sorted(self._parts.items()) if now - self._heard[name] <= seconds
        ]


# In the folder of a stage, JSON {"url", "token"}. Without that ending: of a run that is resumed,
# Tune puts every .json and .pkl file of that folder back, again and again, as it was at first.
ADDRESS_FILE = "overseer.address"
MAX_BODY = 64 * 1024


class OverseerServer:
    """Serves an overseer until it is closed; its address and token are in `folder`, readable by the
    user alone."""

    def __init__(self, overseer: Overseer, folder: Path) -> None:
        self.file = folder / ADDRESS_FILE
        # That of a previous overseer of this run, so that its clients keep working.
        self.token = read_json(self.file).get("token") or secrets.token_urlsafe(24)
        names = {"overseer": overseer, "token": self.token}
        handler = type("Handler", (_RequestHandler,), names)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="overseer", daemon=True).start()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_suffix(f".{os.getpid()}")
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump({"url": self.url, "token": self.token}, stream)
        os.replace(new, self.file)

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()


class _RequestHandler(BaseHTTPRequestHandler):
    overseer: Overseer
    token: str

    def do_GET(self) -> None:  # noqa: N802  (the library's name)
        if not self._is_allowed():
            return
        parts = urlsplit(self.path)
        answers: dict[str, Any] = {
            "/health": self.overseer.health,
            "/status": self.overseer.status,
            "/topology": lambda: {"parts": self.overseer.status()["parts"]},
        }
        if parts.path == "/metrics":
            self._send(HTTPStatus.OK, self.overseer.metrics(), "text/plain; version=0.0.4")
        elif parts.path == "/commands":
            ids = [int(one) for one in parse_qs(parts.query).get("id", []) if one.isdigit()]
            self._send_json({"commands": self.overseer.commands(ids or None)})
        elif parts.path in answers:
            self._send_json(answers[parts.path]())
        else:
            self._send_json({"error": f"{parts.path} is nothing here"}, HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:  # noqa: N802
        if not self._is_allowed():
            return
        length = int(self.headers.get("Content-Length") or 0)
        try:
            if urlsplit(self.path).path != "/commands" or length > MAX_BODY:
                raise ValueError(f"{self.path} takes no command of {length} bytes.")
            body = json.loads(self.rfile.read(length) or b"{}")
            commands = self.overseer.command(str(body.get("name")), body.get("arguments"))
        except (ValueError, AttributeError, TypeError) as error:
            self._send_json({"error": str(error)}, HTTPStatus.BAD_REQUEST)
            return
        self._send_json({"commands": commands})

    def _is_allowed(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        # A page in a browser cannot send the token, nor an address that is not loopback's.
        host = self.headers.get("Host", "").partition(":")[0]
        if hmac.compare_digest(given, self.token.encode()) and host in ("127.0.0.1", "localhost"):
            return True
        self._send_json({"error": "the run's token is missing"}, HTTPStatus.UNAUTHORIZED)
        return False

    def _send_json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(status, json.dumps(value), "application/json")

    def _send(self, status: HTTPStatus, text: str, kind: str) -> None:
        data = text.encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Nothing: requests come every second."""


MAX_CALLS = 64  # at once; each takes microseconds


class OverseerActor(Overseer):
    """An `Overseer` with its HTTP server."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._server = OverseerServer(self, Path(folder))

    def pid(self) -> int:
        """Its process id."""
        return os.getpid()


def overseer_name(folder: Path) -> str:
    """Name of the actor that oversees the Tune run in `folder`."""
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    return f"overseer-{folder.name}-{digest}"


def open_overseer(folder: Path) -> Any:
    """The overseer of the run in `folder`, made where there is none; it reserves nothing, and ends
    with the process that made it."""
    node = ray.get_runtime_context().get_node_id()
    maker = ray.remote(OverseerActor).options(
        name=overseer_name(folder), namespace=NAMESPACE, get_if_exists=True, num_cpus=0,
        max_concurrency=MAX_CALLS, max_restarts=-1,
        # Its folder is here; a trial's placement group has no place for it.
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
    )  # fmt: skip
    return maker.remote(str(folder))


SECONDS_TO_ANSWER = 5.0
POLL_S = 0.3


class NoOverseerError(Problems):
    """A run without an overseer that answers."""


class Run:
    """A running run, found by its overseer's address file."""

    def __init__(self, file: Path) -> None:
        self.folder = file.parent
        self._file = file

    def status(self) -> dict[str, Any]:
        """Parts and diagnoses; see `Overseer.status`."""
        return self._ask("/status")

    def health(self) -> dict[str, Any]:
        """See `Overseer.health`."""
        return self._ask("/health")

    def metrics(self) -> str:
        """Prometheus' text format."""
        return self._read("/metrics").decode("utf-8")

    def tell(
        self, command: str, *, timeout_s: float = 0.0, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Sends a command to every trial of the run; returns the commands with their answers.

        Args:
            timeout_s: how long to wait for answers; a command is carried out when the trial's
                iteration ends, however long that takes. One that is not answered by then is
                "waiting", and one that its overseer has forgotten is "lost".

        Raises:
            NoOverseerError: the overseer does not answer.
            Problems: no such command.
        """
        body = json.dumps({"name": command, "arguments": arguments}).encode()
        commands = self._ask("/commands", body)["commands"]
        end = time.monotonic() + timeout_s
        while any(each["state"] == WAITING for each in commands) and time.monotonic() < end:
            time.sleep(POLL_S)
            commands = self._updated(commands)
        return commands

    def _updated(self, commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            ids = "&".join(f"id={each['id']}" for each in commands)
            found = {each["id"]: each for each in self._ask(f"/commands?{ids}")["commands"]}
        except NoOverseerError:  # it is started again, or the run has ended
            return commands
        lost = {"state": LOST, "answer": "the overseer was started again; whether it was carried "
                "out shows in rllib status"}  # fmt: skip
        return [found.get(each["id"], {**each, **lost}) for each in commands]

    def _ask(self, path: str, body: bytes | None = None) -> Any:
        return json.loads(self._read(path, body))

    def _read(self, path: str, body: bytes | None = None) -> bytes:
        try:
            address = json.loads(self._file.read_text(encoding="utf-8"))
            request = urllib.request.Request(
                address["url"] + path, body, {"Authorization": f"Bearer {address['token']}"}
            )
            # Not through a proxy: it is this machine.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=SECONDS_TO_ANSWER) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.BAD_REQUEST:
                raise Problems(json.loads(error.read())["error"]) from error
            raise self._unanswered(error) from error  # another server has its port now
        except (OSError, HTTPException, ValueError, KeyError) as error:
            raise self._unanswered(error) from error

    def _unanswered(self, error: Exception) -> NoOverseerError:
        return NoOverseerError(
            "run", "be in progress, on this machine", f"its overseer does not answer ({error})",
            "It has ended, or its overseer restarts, which takes up to a minute", str(self.folder),
        )  # fmt: skip


def find_run(folder: str | Path) -> Run:
    """The run in `folder`; of several stages, the one that started last.

    Raises:
        Problems: no run was overseen there.
    """
    root = place(folder)
    found = RunFolder(root).in_stages(ADDRESS_FILE)
    files = [file for file in found if isinstance(file, Path)]  # an overseer is on this machine
    files.sort(key=lambda file: file.stat().st_mtime)
    if not files:
        inside = name_one(RunFolder(root).holding(ADDRESS_FILE))
        rule = "be the folder of a run with `overseer: true` in its config"
        raise Problems("run", rule, "", inside or _OTHERWISE, str(root))
    return Run(files[-1].resolve())
