from __future__ import annotations

import re
from pathlib import Path

from rllib_llm.runs.doctor.machine_rules import TRIED, installation_rules

ROOT = Path(__file__).resolve().parents[3]
HAVE = {"ray": "2.60.0", "torch": "2.13.0", "transformers": "5.23.0"}


def found(versions, requirements=None) -> list[tuple[str, str, str]]:
    rules = installation_rules(versions, requirements=requirements or {})
    return [(problem.name, problem.rule, problem.severity) for problem in rules]


def test_what_was_tried_is_silent():
    needed = {"rllib-llm": ["ray[rllib]>=2.60,<2.61", "torch>=2.6", 'httpx; extra == "openai"']}
    assert found(HAVE, needed) == []


def test_wrong_and_missing_packages_are_errors():
    needed = {"rllib-llm": ["ray[rllib]>=2.60,<2.61", "peft>=0.15"]}
    assert found({**HAVE, "ray": "2.58.0"}, needed) == [
        ("ray 2.58.0", "be <2.61,>=2.60 for rllib-llm", "error"),
        ("peft", "be installed", "error"),
        ("ray 2.58.0: this package was tried with 2.60.0; others may behave otherwise", "", "note"),
    ]


def test_packages_at_odds_with_each_other_are_a_warning():
    # vLLM wants one torch alone, which is why `make test-vllm` has an environment of its own.
    needed = {"vllm": ["torch==2.9.0"]}
    assert found({**HAVE, "vllm": "0.32"}, needed) == [
        ("torch 2.13.0", "be ==2.9.0 for vllm 0.32", "warning")
    ]


def test_the_table_of_tried_versions_is_that_of_the_constraints():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", "\n".join(lines), re.MULTILINE))
    assert {name: pinned[name] for name in TRIED} == TRIED


def test_this_machine_has_versions_and_memory(tmp_path):
    from rllib_llm.runs.doctor.machine_rules import Machine

    machine = Machine.here(tmp_path / "not" / "yet")
    assert machine.versions["torch"] and machine.memory > 0 and machine.cpus >= 1
    assert machine.disk_bytes > 0
