from __future__ import annotations

import pytest

from rllib_llm.shared.dotted import DottedPathError, import_dotted, looks_dotted


def test_both_spellings_name_the_same_object():
    import rllib_llm.shared.dotted as module

    assert import_dotted("rllib_llm.shared.dotted.import_dotted") is module.import_dotted
    assert import_dotted("rllib_llm.shared.dotted:import_dotted") is module.import_dotted


def test_attributes_of_attributes():
    assert import_dotted("json:JSONDecoder.decode").__qualname__ == "JSONDecoder.decode"
    assert import_dotted("json.JSONDecoder.decode").__qualname__ == "JSONDecoder.decode"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("word", "must be a dotted path such as"),
        ("org/name", "must be a dotted path such as"),
        (3, "must be a dotted path such as"),
        ("no_such_package.thing", "no module 'no_such_package'. Install it, or put its folder"),
        ("json.no_such_module:thing", "no module 'json.no_such_module'"),
        ("json:lods", "it has no 'lods'. Did you mean 'loads'"),
        ("json.dumbs", "it has no 'dumbs'. Did you mean 'dumps'"),
    ],
)
def test_wrong_paths(path, message):
    with pytest.raises(DottedPathError, match=message):
        import_dotted(path, name="reward_functions")


def test_errors_inside_a_module_pass_through(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_missing\n")
    (tmp_path / "fails.py").write_text("raise RuntimeError('broken on import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
        import_dotted("needs_more:thing")
    with pytest.raises(RuntimeError, match="broken on import"):
        import_dotted("fails.thing")


def test_only_importable_packages_look_dotted():
    assert looks_dotted("json.loads") and looks_dotted("rllib_llm.shared.dotted:import_dotted")
    for other in ("imdb", "org/name", "file.jsonl", "./a.b", "no_such_package.thing"):
        assert not looks_dotted(other)
