"""Texts that are no YAML: what is told names the line that is wrong, and what to do about it."""

from __future__ import annotations

import pytest
import yaml

from rllib_llm.shared.strict_yaml import yaml_error


@pytest.mark.parametrize(
    ("text", "place", "line", "rule", "remedy"),
    [
        ("a:\n\trun: GRPO\n", (2, 1), "\trun: GRPO", "be indented with spaces", "the tab"),
        ("a:\n  lr:1\n  seed: 2\n", (2, 3), "  lr:1", "a colon and a space", "`name: value`"),
        ("a:\n  seed: 2\n  lr:1\n", (3, 3), "  lr:1", "a colon and a space", "`name: value`"),
        ("a:\n  config\n    lr: 1\n", (2, 3), "  config", "a colon and a space", "value"),
        ("a:\n  lr: 1\n    seed: 2\n", (3, 9), "    seed: 2", "as the line above", "to the left"),
        ("a:\n    lr: 1\n  seed: 2\n", (3, 3), "  seed: 2", "lines of its level", "neighbours"),
        ("a:\n  x: {b: 1}\n    y: 2\n", (3, 5), "    y: 2", "lines of its level", "neighbours"),
        ("a:\n  x: 'GRPO\n  y: 1\n", (2, 6), "  x: 'GRPO", "close its quote", "missing quote"),
        ("a:\n  x: [1, 2\n  y: 1\n", (2, 6), "  x: [1, 2", "close its bracket", "bracket"),
        ("a:\n  x: {b: ${c.d}}\n", (2, 11), "  x: {b: ${c.d}}", "quotes around ${...}", "quotes"),
        ("a:\n  x: of: b\n", (2, 8), "  x: of: b", "quotes around its value", "in quotes"),
        ("a:\n  x: @b\n", (2, 6), "  x: @b", "quotes around the value", "in quotes"),
        ("a:\n  x: 1\n  - y\n", (3, 3), "  - y", "not be an entry of a list", "Indent"),
        ('a:\n  x: "C:\\dir"\n', (2, 10), '  x: "C:\\dir"', "single quotes", "backslash"),
        ("a:\n  x: {{y}}\n", (2, 7), "  x: {{y}}", "a name before its braces", "quotes"),
        ("a: [{b: x} {b: y}]\n", (1, 12), "a: [{b: x} {b: y}]", "commas between", "comma"),
        ("a: [\n  1,\n", (1, 4), "a: [", "close its bracket", "missing bracket"),
        ("a: &b 1\nc: *d\n", (2, 4), "c: *d", "an anchor that stands above", "has the `&`"),
        ("a: |\n  b\n'c d\n", (3, 1), "'c d", "as the text below `|`", "to the right"),
        ("a: >-\n  b\n@c\n", (3, 1), "@c", "as the text below `|`", "to the right"),
        ("a: |\n  b\nc d\n", (3, 1), "c d", "as the text below `|`", "to the right"),
        ("a: |\n  b\nc: @d\n", (3, 4), "c: @d", "quotes around the value", "in quotes"),
        ("a: 1\n---\nb: 2\n", (2, 1), "---", "one document", "line out"),
        ("a: 1\nb: \x00\n", (2, 1), "b: \x00", "be text", "out"),
    ],
)
def test_the_line_that_is_wrong_is_shown_with_what_is_wrong(text, place, line, rule, remedy):
    with pytest.raises(yaml.YAMLError) as caught:
        yaml.safe_load(text)
    error = yaml_error(caught.value, text, "my.yaml")
    assert error.where == "my.yaml, line {}, column {}".format(*place)
    assert error.name == repr(line)
    assert rule in error.rule and remedy in error.remedy


def test_a_value_on_the_command_line_has_no_line_number():
    with pytest.raises(yaml.YAMLError) as caught:
        yaml.safe_load("[1, 2")
    told = str(yaml_error(caught.value, "[1, 2", "--set lr"))
    assert told.startswith("--set lr: '[1, 2' must close its bracket")
