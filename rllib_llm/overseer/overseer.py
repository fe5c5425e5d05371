"""The state of a run's processes, and the queue of commands to them.

It observes and relays: processes report to it and ask it for commands, and nobody waits for it.
Started again, it is empty, and knows everything again after each has reported once.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rllib_llm.overseer.diagnosis import diagnose

NAMES = ("pause", "resume", "scale", "checkpoint", "stop")
WAITING, DONE, REFUSED = "waiting", "done", "refused"
LOST = "lost"  # the overseer that knew of it has ended


class CommandError(ValueError):
    """An unknown command, or one with missing arguments."""


@dataclass
class Command:
    """One command to one process.

    id: counts up; a process carries out each once, however often it hears of it.
    part: whom it is for.
    incarnation: the process that was there when the command was given; one that was started in its
        place refuses it.
    """

    id: int
    name: str
    part: str
    incarnation: str
    arguments: dict[str, Any] = field(default_factory=dict)
    state: str = WAITING
    answer: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def check_command(name: str, arguments: dict[str, Any]) -> None:
    """Raises CommandError unless a run can be told so."""
    if name not in NAMES:
        raise CommandError(
            f"command={name!r} must be one of {NAMES}: a run knows no other. Choose one."
        )
    if name == "scale":
        samplers = arguments.get("samplers")
        if isinstance(samplers, bool) or not isinstance(samplers, int) or samplers < 1:
            raise CommandError(
                f"samplers={samplers!r} must be a whole number of at least 1: it counts samplers. "
                "Write rllib scale RUN --samplers 2."
            )
    elif arguments:
        raise CommandError(
            f"arguments={arguments!r} must be left out: {name} takes none. Drop them."
        )


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
            report: "part" (its name), "kind", "trial", "incarnation", "pid", "node", and whatever
                else it has to say; "answers" to commands: [{"id", "state", "answer"}].
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
                    command.answer = f"{name} was started again since; it was told nothing"
            return [command.to_dict() for command in waiting if command.state == WAITING]

    def leave(self, part: str) -> None:
        """Removes a part that ended normally."""
        with self._lock:
            self._parts.pop(part, None)
            self._heard.pop(part, None)

    def command(
        self, name: str, arguments: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Tells every trial that is alive; the commands.

        Raises:
            CommandError: no such command.
        """
        given = dict(arguments or {})
        check_command(name, given)
        with self._lock:
            alive = [part for part in self._alive() if part["kind"] == "trial"]
            given_out = []
            for part in alive:
                command = Command(
                    next(self._ids), name, part["part"], part["incarnation"], dict(given)
                )
                self._commands[command.id] = command
                given_out.append(command.to_dict())
            for old in list(self._commands)[:-MAX_KEPT]:
                del self._commands[old]
            return given_out

    def commands(self, ids: list[int] | None = None) -> list[dict[str, Any]]:
        """Commands and what became of them, all that are remembered or those asked for."""
        with self._lock:
            chosen = self._commands.values() if ids is None else [
                self._commands[one] for one in ids if one in self._commands
            ]  # fmt: skip
            return [command.to_dict() for command in chosen]

    def status(self) -> dict[str, Any]:
        """Every part, with the seconds since it was heard, and a diagnosis of each trial."""
        with self._lock:
            parts = []
            for part in self._alive(FORGOTTEN_SECONDS):
                silent = self._clock() - self._heard[part["part"]]
                parts.append({**part, "silent_seconds": silent,
                              "is_silent": silent > SILENT_SECONDS})  # fmt: skip
        diagnoses = {
            part["part"]: vars(diagnose(part.get("recent_seconds") or {}))
            for part in parts
            if part["kind"] == "trial"
        }
        return {"parts": parts, "diagnoses": diagnoses}

    def health(self) -> dict[str, Any]:
        """Whether every part has been heard lately."""
        parts = self.status()["parts"]
        silent = [part["part"] for part in parts if part["is_silent"]]
        return {"ok": bool(parts) and not silent, "parts": len(parts), "silent": silent}

    def metrics(self) -> str:
        """Numbers of every part in Prometheus' text format."""
        lines = [
            "# HELP rllib_llm_phase_seconds Seconds that a part has spent in a phase.",
            "# TYPE rllib_llm_phase_seconds counter",
        ]
        parts = self.status()["parts"]
        for part in parts:
            for phase, seconds in (part.get("seconds") or {}).items():
                labels = f'part="{part["part"]}",phase="{phase}"'
                lines.append(f"rllib_llm_phase_seconds{{{labels}}} {seconds:.3f}")
        lines += [
            "# HELP rllib_llm_iteration Iterations that a trial has learnt.",
            "# TYPE rllib_llm_iteration gauge",
        ]
        for part in parts:
            if part.get("iteration") is not None:
                lines.append(f'rllib_llm_iteration{{part="{part["part"]}"}} {part["iteration"]}')
        return "\n".join(lines) + "\n"

    def _alive(self, seconds: float = SILENT_SECONDS) -> list[dict[str, Any]]:
        now = self._clock()
        return [
            part for name, part in sorted(self._parts.items()) if now - self._heard[name] <= seconds
        ]


def is_settled(commands: list[dict[str, Any]]) -> bool:
    """Whether nothing more will be heard of these."""
    return all(command["state"] in (DONE, REFUSED, LOST) for command in commands)
