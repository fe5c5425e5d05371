"""A run's overseer from outside, by the run's folder: what `rllib status`, `rllib pause` ... use.

run = find_run("results/my_run")
print(run.status()["diagnoses"])
run.tell("scale", samplers=4)       # waits until it was answered
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any

from rllib_llm.overseer.actor import ADDRESS_FILE
from rllib_llm.overseer.overseer import LOST, is_settled
from rllib_llm.shared.errors import UserError

SECONDS_TO_ANSWER = 5.0
POLL_S = 0.3


class NoOverseerError(UserError):
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
        """Tells every trial of the run, and gives the commands with their answers.

        Args:
            timeout_s: how long to wait for answers; a command is carried out when the trial's
                iteration ends, however long that takes. One that is not answered by then is
                "waiting", and one that its overseer has forgotten is "lost".

        Raises:
            NoOverseerError: nobody answers.
            UserError: no such command.
        """
        body = json.dumps({"name": command, "arguments": arguments}).encode()
        told = self._ask("/commands", body)["commands"]
        end = time.monotonic() + timeout_s
        while not is_settled(told) and time.monotonic() < end:
            time.sleep(POLL_S)
            told = self._asked_again(told)
        return told

    def _asked_again(self, told: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The current state of commands; unchanged while there is no answer."""
        ids = {command["id"]: command for command in told}
        try:
            found = self._ask("/commands?" + "&".join(f"id={one}" for one in ids))["commands"]
        except NoOverseerError:  # it is started again, or the run has ended
            return told
        known = {command["id"]: command for command in found}
        lost = {"state": LOST, "answer": "the overseer was started again; whether it was carried "
                "out shows in rllib status"}  # fmt: skip
        return [known.get(one, {**command, **lost}) for one, command in ids.items()]

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
                raise UserError(json.loads(error.read())["error"]) from error
            raise self._nobody(error) from error  # somebody else has its port now
        except (OSError, HTTPException, ValueError, KeyError) as error:
            raise self._nobody(error) from error

    def _nobody(self, error: Exception) -> NoOverseerError:
        return NoOverseerError(
            f"run={str(self.folder)!r} must be a run that goes on, on this machine: its "
            f"overseer does not answer ({error}). Look whether the run has ended; a new "
            "overseer is there within a minute."
        )


def find_run(folder: str | Path) -> Run:
    """The run in `folder`; of several stages, the one that started last.

    Raises:
        UserError: no run was overseen there.
    """
    root = Path(folder).expanduser()
    files = [root / ADDRESS_FILE, *root.glob(f"*/{ADDRESS_FILE}")]
    files = sorted((file for file in files if file.is_file()), key=lambda f: f.stat().st_mtime)
    if not files:
        raise UserError(
            f"run={str(root)!r} must be the folder of a run that was started with an overseer: "
            "none has left its address there. Start the run with `overseer: true` in its config, "
            "and name its folder as `rllib train` shows it."
        )
    return Run(files[-1].resolve())
