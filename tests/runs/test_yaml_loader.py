from __future__ import annotations

import time

import pytest

from rllib_llm.runs.yaml_loader import parse, parse_mapping, read
from rllib_llm.shared.errors import Problems


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),  # text in YAML 1.1, which wants a dot
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("7", 7),
        ("1e", "1e"),
        ("1.2.3", "1.2.3"),
        ("e-5", "e-5"),
        ("0x1F", 31),
        ("true", True),
        ("null", None),
        ("'1e-5'", "1e-5"),
    ],
)
def test_numbers_are_numbers(text: str, value: object):
    parsed = parse(f"key: {text}", "test")["key"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_what_looks_like_a_date_is_text():
    text = "day: 2026-11-26\nnone: 2026-13-45"
    assert parse(text, "x") == {"day": "2026-11-26", "none": "2026-13-45"}


def test_what_looks_like_a_time_of_day_is_text():  # 45000 and 750.5 in YAML 1.1
    assert parse("at: 12:30:00\nlong: 12:30.5", "x") == {"at": "12:30:00", "long": "12:30.5"}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[" * 2000 + "]" * 2000, "at most 100 levels"),
        ("{a: " * 101 + "1" + "}" * 101, "at most 100 levels"),
        ("\n".join(" " * i + "a:" for i in range(2000)), "at most 100 levels"),
        ("a0: &a0 1\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 200)), "at most"),
        ("a: &a {b: 1, c: *a}", "not refer to what it stands in"),
        ("a: &a [1, [*a]]", "not refer to what it stands in"),
        ("!!int abc", "hold a value of its type"),
        ("!!bool abc", "hold a value of its type"),
        ("!!timestamp abc", "hold a value of its type"),
        ("9" * 5000, "hold a value of its type"),  # Python's own limit is 4300 digits
    ],
)
def test_texts_on_which_pyyaml_fails_with_errors_of_python(text, rule):
    with pytest.raises(Problems, match=rule):
        parse(text, "x.yaml")


def test_a_hundred_levels_and_an_alias_in_two_places_are_read():
    assert parse("[" * 100 + "]" * 100, "x.yaml") != []
    assert parse("{a: &a [1], b: [*a, *a]}", "x.yaml") == {"a": [1], "b": [[1], [1]]}


def test_a_key_written_twice_is_an_error():
    with pytest.raises(Problems, match="line 3, column 1: 'lr: 3' must have 'lr' once"):
        parse("lr: 1\nother: 2\nlr: 3", "x.yaml")


def test_anchors_and_merges_still_work():
    text = "base: &b {lr: 1, seed: 2}\nnext: {<<: *b, lr: 3}"
    assert parse(text, "test")["next"] == {"lr": 3, "seed": 2}


def test_broken_yaml_names_file_and_line():
    with pytest.raises(Problems, match=r"x\.yaml, line 2, column 4: '  b: \['"):
        parse("a: 1\n  b: [", "x.yaml")


def test_yaml_cannot_make_python_objects():
    with pytest.raises(Problems, match="could not determine a constructor"):
        parse("!!python/object/apply:os.getcwd []", "x.yaml")


@pytest.mark.parametrize("name", ["my_rewards.py", "prompts.csv"])
def test_a_module_or_data_in_place_of_the_file_is_told(name, tmp_path):
    (tmp_path / name).write_text("def good(completions): pass")
    with pytest.raises(Problems, match=r"must be a YAML file .*: it ends in \.(py|csv)"):
        read(tmp_path / name)


def test_a_missing_file_names_those_that_are_there(tmp_path):
    (tmp_path / "there.yaml").write_text("a: 1")
    with pytest.raises(Problems, match=r"must be a YAML file: there is none.*there\.yaml"):
        read(tmp_path / "absent.yaml")


def test_options_take_json_yaml_or_a_file(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("lr: 1e-3")
    assert parse_mapping('{"lr": 0.001}', "--config") == {"lr": 0.001}
    assert parse_mapping("lr: 1e-3", "--config") == {"lr": 0.001}
    assert parse_mapping(str(file), "--config") == {"lr": 0.001}
    assert parse_mapping("", "--config") == {}
    with pytest.raises(Problems, match="--config='3' must be a mapping: it is int"):
        parse_mapping("3", "--config")


def test_a_mapping_that_merges_may_itself_be_merged():
    text = "b: &b {x: 1, y: 1}\nm: {c: &c {<<: *b, y: 2}}\nl: {<<: *c, y: 3}\n"
    assert parse(text, "f") == {
        "b": {"x": 1, "y": 1}, "m": {"c": {"x": 1, "y": 2}}, "l": {"x": 1, "y": 3},
    }  # fmt: skip
    with pytest.raises(Problems, match="must have 'y' once"):
        parse("b: &b {x: 1}\nm: {<<: *b, y: 2, y: 3}\n", "f")


def test_a_misspelt_file_is_answered_with_the_nearest(tmp_path):
    (tmp_path / "calm.yaml").write_text("a: {run: SFT}")
    with pytest.raises(Problems, match="there is none. Did you mean '.*calm.yaml'"):
        read(tmp_path / "clam.yaml")
    with pytest.raises(Problems, match="there is none. Files there: .*calm.yaml"):
        read(tmp_path / "something_else_entirely.yaml")


def test_a_file_that_is_too_large_for_settings_is_not_parsed(tmp_path):
    """PyYAML reads less than 100 KB a second."""
    path = tmp_path / "rows.yaml"
    path.write_text("- {prompt: a}\n" * 1_000_000)
    start = time.perf_counter()
    with pytest.raises(Problems) as caught:
        read(path)
    assert time.perf_counter() - start < 5
    assert (caught.value.problem.name, caught.value.problem.rule) == ("file", "be at most 256 KiB")
