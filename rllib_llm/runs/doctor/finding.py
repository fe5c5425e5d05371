"""What a rule found: its name, how bad it is, what there is, what it must be, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Severity = Literal["error", "warning", "note"]
# The form of every complaint: `name=value must be rule: reason. remedy.`
COMPLAINT = re.compile(
    r"(?P<where>.*?\w: )?(?P<found>.+?) (?P<rule>must .+?\.) (?P<remedy>[A-Z][^.]*(\.[^ ].*)?\.?)$",
    re.DOTALL,
)
SETTING = re.compile(
    r"^(?P<name>[\w.]+)(\[['\"](?P<key>\w+)['\"]\])?(?==| must| kwargs| is missing| in row)"
)


@dataclass(frozen=True)
class Finding:
    """One finding of the doctor.

    id: area and subject, e.g. "settings.temperature": the same wherever the rule is applied.
    severity: "error": it cannot run, or not as it was meant; "warning": somebody should look;
        "note": a fact worth knowing.
    found, rule, remedy: what there is, what it must be and why, what to do; one sentence each.
    where: experiment or place it is about, "" for the machine.
    """

    id: str
    severity: Severity
    found: str
    rule: str
    remedy: str
    where: str = ""

    @classmethod
    def from_error(cls, error: BaseException, area: str, where: str = "") -> Finding:
        """The finding of a rule that raises, by the form of its message."""
        text = " ".join(str(error).split()).removeprefix(f"{where}: ")
        subject = _subject(text, where)
        match = COMPLAINT.match(text)
        if match is None:
            return cls(f"{area}.{subject}", "error", text, "", "", where)
        found = f"{match['where'] or ''}{match['found']}"
        return cls(f"{area}.{subject}", "error", found, match["rule"], match["remedy"], where)

    def at(self, where: str) -> Finding:
        """The same, about another place."""
        return replace(self, where=where)

    def text(self) -> str:
        """All of it in one line."""
        head = f"{self.where}: " if self.where else ""
        return head + " ".join(filter(None, (self.found, self.rule, self.remedy)))


def _subject(text: str, where: str) -> str:
    """The setting that a complaint is about, "unknown" where it is of an unknown one."""
    if "unknown" in text.partition(". ")[0].lower() or "is none of them" in text:
        return "unknown"
    text = text.removeprefix(f"{where}.config.").removeprefix(f"{where}.")
    # "data: row 0 of ...", "env_config: prompt in row 0 ...": of the place before the colon.
    head = re.match(r"^(?:[\w.]+\.)?(\w+): (.+)", text)
    match = SETTING.match(text) or (SETTING.match(head[2]) if head else None)
    if match is not None:
        return match["key"] or match["name"].rpartition(".")[2]
    return head[1] if head else "unfit"


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
