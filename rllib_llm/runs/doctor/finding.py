"""What a rule found: its name, how bad it is, what there is, what is wrong with it, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from rllib_llm.shared.errors import SettingError, SettingWarning, ended, sentence

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One finding of the doctor.

    id: area and subject, e.g. "settings.temperature": the same wherever the rule is applied.
    severity: "error": it cannot run, or not as it was meant; "warning": somebody should look;
        "note": a fact worth knowing.
    found, reason, remedy: what there is, why that matters, what to do.
    where: experiment or place it is about, "" for the machine.
    rule: what follows "must" where what there is breaks a rule, such as "be at most 1".
    """

    id: str
    severity: Severity
    found: str
    reason: str
    remedy: str
    where: str = ""
    rule: str = ""

    @classmethod
    def from_error(cls, error: BaseException, area: str, where: str = "") -> Finding:
        """The finding of a rule that raises."""
        if not isinstance(error, SettingError):
            text = " ".join(str(error).split()).removeprefix(f"{where}: ")
            return cls(f"{area}.unfit", "error", text, "", "", where)
        named = error.found.removeprefix(f"{where}.").removeprefix("config.")
        place = error.where.removeprefix(where).lstrip(".: ").removeprefix("config").lstrip(".: ")
        found = f"{place}: {named}" if place else named
        subject = "unknown" if error.unknown else error.subject or "unfit"
        remedy = error.remedy_sentence
        return cls(f"{area}.{subject}", "error", found, error.reason, remedy, where, error.rule)

    @classmethod
    def from_warning(cls, warning: Warning | str) -> Finding:
        """The finding of a rule that warns."""
        if isinstance(warning, SettingWarning):
            found, remedy = warning.found, ended(warning.remedy)
            return cls(warning.id, "warning", found, warning.reason, remedy)
        return cls("settings.unsuited", "warning", str(warning), "", "")

    def at(self, where: str) -> Finding:
        """The same, about another place."""
        return replace(self, where=where)

    @property
    def sentence(self) -> str:
        """What is wrong, without the remedy."""
        return sentence(self.found, self.rule, self.reason)

    def text(self) -> str:
        """All of it in one line."""
        head = f"{self.where}: " if self.where else ""
        return head + " ".join(filter(None, (self.sentence, self.remedy)))


def exit_code(findings: Iterable[Finding]) -> int:
    """0: nothing to look at, 1: warnings, 2: errors."""
    severities = {finding.severity for finding in findings}
    return 2 if "error" in severities else int("warning" in severities)


def distinct(findings: Iterable[Finding]) -> list[Finding]:
    """Each once, errors first; of two about the same setting at the same place the first."""
    order = ("error", "warning", "note")
    kept: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        several = finding.id.endswith((".unknown", ".unfit"))
        key = (finding.id, finding.where, finding.found if several else "")
        kept.setdefault(key, finding)
    return sorted(kept.values(), key=lambda finding: order.index(finding.severity))
