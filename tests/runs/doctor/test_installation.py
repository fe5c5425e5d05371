from __future__ import annotations

import re
from pathlib import Path

from rllib_llm.runs.doctor.machine_rules import TRIED, installation_rules

ROOT = Path(__file__).resolve().parents[3]
HAVE = {"ray": "2.60.0", "torch": "2.13.0", "transformers": "5.23.0"}


def found(versions, requirements) -> list[tuple[str, str, str]]:
    rules = installation_rules(versions, requirements)
    return [(problem.name, problem.rule, problem.severity) for problem in rules]


def test_what_was_tried_is_silent():
    needed = ["ray[rllib]>=2.60,<2.61", "torch>=2.6", 'httpx; extra == "openai"']
    assert found(HAVE, needed) == []


def test_wrong_and_missing_packages_are_errors():
    needed = ["ray[rllib]>=2.60,<2.61", "peft>=0.15"]
    assert found({**HAVE, "ray": "2.58.0"}, needed) == [
        ("ray 2.58.0", "be <2.61,>=2.60 for rllib-llm", "error"),
        ("peft", "be installed", "error"),
        ("ray 2.58.0: this package was tried with 2.60.0; others may behave otherwise", "", "note"),
    ]


def test_what_it_requires_is_what_it_was_installed_with():
    missing = {problem.name for problem in installation_rules({"rllib-llm": "1"})}
    assert {"ray", "torch", "transformers"} <= missing


def test_the_table_of_tried_versions_is_that_of_the_constraints():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", "\n".join(lines), re.MULTILINE))
    assert {name: pinned[name] for name in TRIED} == TRIED


def test_this_machine_has_versions_and_memory(tmp_path):
    from rllib_llm.runs.doctor.machine_rules import Machine

    machine = Machine.here(tmp_path / "not" / "yet")
    assert machine.versions["torch"] and machine.memory > 0 and machine.cpus >= 1
    assert machine.disk_bytes > 0
