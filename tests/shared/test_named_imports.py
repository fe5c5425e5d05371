from __future__ import annotations

import sys

import pytest

from rllib_llm.shared.dotted import HOOK, IMPORTS, import_named, name_imports, runtime_env
from rllib_llm.shared.errors import Problems


def test_named_modules_are_imported_here_and_in_rays_processes(monkeypatch, tmp_path):
    (tmp_path / "my_names.py").write_text("import sys\nsys.my_names = 'registered'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(IMPORTS, raising=False)
    assert runtime_env() == {}
    name_imports([])
    assert runtime_env() == {}
    monkeypatch.setenv(IMPORTS, "")  # restored when the test has ended
    name_imports(["my_names", "json"])
    assert sys.my_names == "registered"
    assert runtime_env() == {
        "worker_process_setup_hook": HOOK,
        "env_vars": {IMPORTS: "my_names,json"},
    }
    del sys.modules["my_names"], sys.my_names
    import_named()  # as in another process
    assert sys.my_names == "registered"
    del sys.modules["my_names"], sys.my_names


def test_a_module_that_is_not_there_is_named(monkeypatch, tmp_path):
    with pytest.raises(Problems, match="--import='no_such_module' must name a module"):
        name_imports(["no_such_module"])
    (tmp_path / "needs_more.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_library'"):
        name_imports(["needs_more"])
