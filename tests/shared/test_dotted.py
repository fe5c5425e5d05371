from __future__ import annotations

import importlib
import re
import sys

import pytest

from rllib_llm.shared.dotted import IMPORTS, import_dotted, looks_dotted, name_imports
from rllib_llm.shared.errors import Problems


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
        ("json.py", "it has no 'py'. Write 'json.NAME', with the name of a function or class."),
        ("json:lods", "it has no 'lods'. Did you mean 'loads'"),
        ("json.dumbs", "it has no 'dumbs'. Did you mean 'dumps'"),
    ],
)
def test_wrong_paths(path, message):
    with pytest.raises(Problems, match=message):
        import_dotted(path, name="reward_functions")


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        ("\nimport a_package_that_is_missing\n", ModuleNotFoundError,
         r"ModuleNotFoundError \(.*own\.py:2\): No module named 'a_package_that_is_missing'"),
        ("\n\nraise RuntimeError('broken')\n", RuntimeError,
         r"RuntimeError \(.*own\.py:3\): broken"),
        ("def f(:\n", SyntaxError, r"SyntaxError \(.*own\.py:1\): "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["own.f", "own:f"])
def test_a_module_whose_code_fails_is_named_with_its_line(
    code, kind, reason, path, tmp_path, monkeypatch
):
    (tmp_path / "own.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(Problems) as error:
        import_dotted(path, name="rewards")
    assert re.search(rf"^rewards='{path}' must .*{reason}", str(error.value))
    assert isinstance(error.value.__cause__, kind)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys\nsys.exit(3)\n", "3"),
        ("\nraise SystemExit('no data')\n", "no data"),
        ("import argparse\nargparse.ArgumentParser().parse_args(['--data'])\n", "2"),
    ],
)
def test_a_module_that_exits_is_named_with_its_line(code, status, tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(IMPORTS, "")
    importlib.invalidate_caches()
    reason = (
        "must name a module that can be imported: script.py must not exit when it is imported, and "
        f"line 2 does (SystemExit: {status}). Put that under `if __name__ == '__main__':`."
    )
    for path in ("script.f", "script:f"):
        with pytest.raises(Problems) as error:
            import_dotted(path, name="rewards")
        assert str(error.value) == f"rewards='{path}' {reason}"
    with pytest.raises(Problems) as error:
        name_imports(["script"])
    assert str(error.value) == f"--import='script' {reason}"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("./my_r.py", "Write my_r."),
        ("my-r", "Write package.module."),
        ("", "Write package.module."),
    ],
)
def test_a_file_is_no_module_s_name(given, meant):
    with pytest.raises(Problems, match="--import='.*' must be a module's name") as error:
        name_imports([given])
    assert str(error.value).endswith(meant)


def test_only_importable_packages_look_dotted():
    assert looks_dotted("json.loads") and looks_dotted("rllib_llm.shared.dotted:import_dotted")
    for other in ("imdb", "org/name", "file.jsonl", "./a.b", "no_such_package.thing"):
        assert not looks_dotted(other)


def test_a_module_of_this_folder_with_nearly_that_name_is_suggested(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Problems, match="no module 'myrewards'. Did you mean 'my_rewards'"):
        import_dotted("myrewards.brevity")
    with pytest.raises(Problems, match="no module 'elsewhere'. Install it"):
        import_dotted("elsewhere.brevity")
