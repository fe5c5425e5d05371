"""What a run can be told while it goes on, and what becomes of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

NAMES = ("pause", "resume", "scale", "checkpoint", "stop")
WAITING, DONE, REFUSED = "waiting", "done", "refused"
LOST = "lost"  # the overseer that knew of it has ended


class CommandError(ValueError):
    """A command that does not exist, or lacks what it needs."""


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
