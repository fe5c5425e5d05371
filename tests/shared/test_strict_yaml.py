"""Texts that are no YAML: what is told names the line that is wrong, and what to do about it."""

from __future__ import annotations

import pytest
import yaml

from rllib_llm.shared.strict_yaml import yaml_error


@pytest.mark.parametrize(
    ("text", "place", "line", "rule"),
    [
        ("a:\n\trun: GRPO\n", (2, 1), "\trun: GRPO", "be indented with spaces"),
        ("a:\n  config\n    lr: 1\n", (2, 3), "  config", "a colon and a space"),
        ("a:\n  lr 1e-3\n  # c\n\n  seed: 2\n", (2, 3), "  lr 1e-3", "a colon and a space"),
        ("a:\n  seed: 2\n  lr:1\n", (3, 3), "  lr:1", "a colon and a space"),
        ("a:\n  seed: 2\n  lr 1\n  x: 3\n", (3, 3), "  lr 1", "a colon and a space"),
        ("a:\n  lr: 1\n    seed: 2\n", (3, 9), "    seed: 2", "have one value"),
        ("a:\n  x: of: b\n", (2, 8), "  x: of: b", "quotes around it"),
        ("a:\n  x: 'GRPO\n  y: 1\n", (2, 6), "  x: 'GRPO", "close its quote"),
        ("a:\n  x: [1, 2\n  y: 1\n", (2, 6), "  x: [1, 2", "close its bracket"),
        ("a:\n  x: {b: ${c.d}}\n", (2, 11), "  x: {b: ${c.d}}", "quotes around ${...}"),
        ("a: [{b: x} {b: y}]\n", (1, 4), "a: [{b: x} {b: y}]", "commas between"),
        ("a:\n  x: @b\n", (2, 6), "  x: @b", "be valid YAML"),
        ("a: 1\nb: \x00\n", (2, 4), "b: \x00", "be valid YAML"),
    ],
)
def test_the_line_that_is_wrong_is_shown_with_what_is_wrong(text, place, line, rule):
    with pytest.raises(yaml.YAMLError) as caught:
        yaml.safe_load(text)
    (found,) = yaml_error(caught.value, text, "my.yaml").found
    assert found.name == "my.yaml, line {}, column {}: {!r}".format(*place, line)
    assert rule in found.rule and found.reason and found.remedy


def test_a_value_on_the_command_line_has_no_line_number():
    with pytest.raises(yaml.YAMLError) as caught:
        yaml.safe_load("[1, 2")
    told = str(yaml_error(caught.value, "[1, 2", "--set lr"))
    assert told.startswith("--set lr: '[1, 2' must close its bracket")
