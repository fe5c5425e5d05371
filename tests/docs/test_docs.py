"""What the documentation says is so: its code runs, its files are valid, its pages are complete."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from rllib_llm.cli.main import app
from rllib_llm.runs.plan import check_experiments
from rllib_llm.runs.yaml_loader import load, parse
from tests.docs.code_blocks import Block, blocks_of, run_python
from tests.test_house import trees

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Names that stand for what only the reader has; such a file is parsed, its keys are checked.
PLACEHOLDER = re.compile(r"my-org/")


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def trials_are_slow(page: Path) -> Any:
    """A page whose blocks train, or start trials, is read by the slow tests."""
    starts = any(re.search(r"Tuner\(|\.train\(\)", b.code) for b in blocks_of(page) if b.runs)
    return pytest.param(page, marks=[pytest.mark.slow] if starts else [])


@pytest.mark.parametrize("page", map(trials_are_slow, PAGES), ids=names(PAGES))
def test_code_blocks_run(page: Path, tmp_path, monkeypatch, ray_session):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    namespace = {"__name__": "__docs__", "folder": str(tmp_path / "results")}
    for block in blocks_of(page):
        if block.title is not None:
            (tmp_path / block.title).write_text(block.code, encoding="utf-8")
        if block.language == "python" and block.runs:
            if block.title is None:
                run_python(block, page, namespace)
            else:
                compile(block.code, block.title, "exec")
    for block in blocks_of(page):
        if block.language == "yaml":
            check_yaml(block, tmp_path)
    for name in set(sys.modules) - before:  # the pages' own modules share names
        module_file = getattr(sys.modules[name], "__file__", None) or ""
        if module_file.startswith(str(tmp_path)):
            del sys.modules[name]


def check_yaml(block: Block, folder: Path) -> None:
    """A block is a file that `rllib train file` would start, or of settings that it would know."""
    data = parse(block.code, block.title or "the block")
    assert isinstance(data, dict)
    if not any(isinstance(spec, dict) and "run" in spec for spec in data.values()):
        assert block.title is None
        return
    experiments = load(data, block.title or "the block", here=folder)
    if not PLACEHOLDER.search(block.code):
        check_experiments(experiments)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_commands_and_their_options_exist(page: Path):
    for block in blocks_of(page):
        if block.language == "sh":
            for line in block.code.splitlines():
                words = shlex.split(line, comments=True)
                if words and words[0] == "rllib":
                    check_command(words[1:], line)
    # Others stand in sentences, whose dots are for arguments, or are indented.
    for line in re.findall(r"(?:^ {4}|`)(rllib [^`\n]+)", page.read_text("utf-8"), re.MULTILINE):
        check_options(shlex.split(line, comments=True)[1:], line)


def check_command(words: list[str], line: str) -> None:
    command, words = check_options(words, line)
    assert words or not command.params or not any(p.required for p in command.params), line


def check_options(words: list[str], line: str) -> tuple[Any, list[str]]:
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert not hasattr(command, "commands") or not words or words[0].startswith("-"), line
    options = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    unknown = {word.partition("=")[0] for word in words if word.startswith("-")} - options
    assert not unknown, line
    return command, words


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/-]+\.md", text))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert listed == pages
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text("utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not broken


def test_the_first_page_leads_to_every_other():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", index)) | {"index.md"}
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - linked == set()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def test_reference_pages_and_the_drawing_are_those_of_the_code(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import house
    import reference

    for name, page in reference.PAGES.items():
        written = (reference.FOLDER / name).read_text("utf-8")
        assert written == page(), "python scripts/reference.py"
    drawn = house.PAGE.read_text("utf-8")
    assert drawn == house.with_drawing(drawn), "python scripts/house.py"
    import scale

    for file in scale.PAGES:
        computed = file.read_text(encoding="utf-8")
        assert computed == scale.page_with(scale.tables(), computed), "python scripts/scale.py"


def test_scripts_and_benchmarks_import_names_that_exist():
    """They run apart from the tests, so that a moved name would show months later."""
    wanted = {
        (file.name, node.module, alias.name)
        for file in [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("scripts/*.py")]
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rllib_llm.")
        for alias in node.names
    }
    assert len(wanted) > 100
    assert [
        (file, module, name)
        for file, module, name in sorted(wanted)
        if not hasattr(importlib.import_module(module), name)
        and not ROOT.joinpath(*module.split("."), f"{name}.py").is_file()
    ] == []


def test_figures_of_the_benchmarks_are_those_recorded(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import figures

    pages = {page: page.read_text("utf-8") for page in figures.PAGES}
    assert pages == figures.pages_with(figures.read(), pages), "python scripts/figures.py"
    readme, scale = pages.values()
    measured = scale[scale.index("## Measured") :]
    # Nobody types a measurement: decimals stand in the recorded tables alone.
    by_hand = [figures.MARKED.sub("", text) for text in (readme, measured)]
    assert [re.findall(r"\d+\.\d+(?: ms| s|%| %)?", text) for text in by_hand] == [[], []]
    assert not [line for text in by_hand for line in text.splitlines() if line.startswith("|")]
    entries = [*figures.read()["headlines"], *figures.read()["tables"].values()]
    assert all(e["command"] and e["recorded"] for e in entries)
    assert [
        e["recorded_in"] for e in entries if not re.match("[0-9a-f]{7}", e["recorded_in"])
    ] == []
    assert len(readme.split()) < 5000  # half of what could not be read as a page


def test_a_tree_of_weights_takes_as_long_as_its_rounds_of_one_link(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import figures

    keys = ["mb", "nodes", "receivers", "tree_rounds", "tree_s"]
    rows = figures.rows_of_lines("weights_nodes.jsonl", keys)
    # One receiver of 100 MB took 0.21 s, and 8 nodes are reached in 4 rounds: 1, 3, 7, 15 have it.
    assert ["100", "8", "64", "4", "0.84"] in rows
    # 1000 MB took 3.65 s, so 400 MB take 1.46 s, three times.
    assert ["400", "4", "4", "3", "4.38"] in rows


def test_mistakes_are_answered_before_a_run_and_without_tracebacks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import mistakes

    answers = mistakes.answers()
    assert len(answers) >= 60
    assert [m for m, answer in answers.items() if not answer] == []
    assert [m for m, answer in answers.items() if mistakes.TRACEBACK in answer] == []
    assert mistakes.PAGE.read_text("utf-8") == mistakes.page(answers), "python scripts/mistakes.py"


def test_the_house_has_no_circles(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import house

    assert house.circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert house.circles(house.arrows()) == []
    assert house.circles(house.module_imports()) == []


def test_every_room_is_described():
    page = (ROOT / "docs/explanations/house.md").read_text("utf-8")
    described = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    package = ROOT / "rllib_llm"
    assert described == {path.parent.name for path in package.glob("*/__init__.py")}


def test_each_walk_names_at_most_twelve_files_that_exist():
    page = (ROOT / "docs/explanations/house.md").read_text("utf-8")
    walks = [re.findall(r"^\d+\. `([^`]+)`", part, re.MULTILINE) for part in page.split("\n## ")]
    assert [0 < len(walk) <= 12 for walk in walks if walk] == [True, True]
    files = [name for walk in walks for name in walk if name.endswith(".py")]
    assert files and all((ROOT / "rllib_llm" / file).is_file() for file in files)


def test_the_site_has_settings_that_yaml_reads():
    # MkDocs' own tags are no plain YAML; the rest must be.
    text = re.sub(r"!!python/name:\S+", "x", (ROOT / "mkdocs.yml").read_text("utf-8"))
    assert yaml.safe_load(text)["docs_dir"] == "docs"


# What strangers had to read twice in earlier versions.
OPAQUE = (
    "as of all", "gone on with", "what there is of", "what comes of it", "lets rows go",
    "let go of", "told of all", "a matter of the machine", "who does not come", "is said of it",
    "is told of", "are told of", "whoever",
)  # fmt: skip


def test_no_text_has_a_phrase_that_had_to_be_read_twice():
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("rllib_llm/**/*.py")]
    found = [
        (str(file.relative_to(ROOT)), phrase)
        for file in files
        for phrase in OPAQUE
        if phrase in " ".join(file.read_text("utf-8").lower().split())
    ]
    assert found == []


def test_docstrings_say_what_they_return_or_do():
    """A noun or a verb comes first, not "What is ..." or "Of the ..."."""
    opaque = ("What ", "Who ", "Whose ", "Of ", "Has ", "Lets ", "Goes ")
    found = [
        f"{path.relative_to(ROOT)}:{node.body[0].lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module))
        if (ast.get_docstring(node) or "").startswith(opaque)
    ]
    assert found == []
