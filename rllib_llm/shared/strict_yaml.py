"""YAML as this package reads it, and what is wrong with texts that it cannot read."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from rllib_llm.shared.errors import Problems, shown

# PyYAML's, which are of YAML 1.1, without times of day (12:30:00 is 45000 there), and with the
# floats of YAML 1.2: 1e-5 needs neither a dot nor a sign.
INT = re.compile(r"^[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$")
FLOAT = re.compile(
    r"^([-+]?(\.[0-9][0-9_]*|[0-9]+|[0-9][0-9_]*\.[0-9_]*)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
OTHERWISE = ("int", "float", "timestamp")  # types that PyYAML reads otherwise, or not as text
MAX_LEVELS = 100  # of lists and mappings in each other; PyYAML's recursion ends at a few hundred


class RefusedError(yaml.MarkedYAMLError):
    """YAML that PyYAML would take, or fail on with an error of Python; `problem` is the rule."""


class Loader(yaml.SafeLoader):
    """The safe YAML loader with YAML 1.2 floats, dates and times as text, unique keys, and a limit
    on nesting."""

    yaml_implicit_resolvers: ClassVar = {
        first: [one for one in resolvers if one[0].rpartition(":")[2] not in OTHERWISE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._level = 0  # of the node that is being read
        self._levels_below: dict[yaml.Node, int] = {}  # of nodes that are read to their ends

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """As PyYAML's, which ends in a RecursionError where texts nest deep or without end."""
        is_alias, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark
        self._level += 1
        node = super().compose_node(parent, index) if self._level <= MAX_LEVELS else None
        self._level -= 1
        if is_alias and node is not None and node not in self._levels_below:
            raise RefusedError(None, None, "not refer to what it stands in", mark)
        if node is not None and not is_alias:
            inner = [] if isinstance(node, yaml.ScalarNode) else node.value
            if isinstance(node, yaml.MappingNode):
                inner = [each for pair in inner for each in pair]
            below = (self._levels_below[each] for each in inner)
            self._levels_below[node] = 1 + max(below, default=0)
        if node is None or self._level + self._levels_below[node] > MAX_LEVELS:
            raise RefusedError(None, None, f"be nested at most {MAX_LEVELS} levels deep", mark)
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """As PyYAML's. Keys are looked at here, where they stand as the file has them: merge keys
        (`<<: *other`) add to a mapping later."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if isinstance(key, str) and key != "<<":
                if key in seen:
                    raise RefusedError(None, None, f"have {key!r} once", key_node.start_mark)
                seen.add(key)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As PyYAML's, whose own errors of a value that its tag does not allow tell no place."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError, AttributeError) as error:
            mark = node.start_mark
            raise RefusedError(None, None, "hold a value of its type", mark) from error


for _type, _pattern in (("int", INT), ("float", FLOAT)):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_type}", _pattern, list("-+.0123456789"))


def read_text(text: str) -> Any:
    """Return the value of the YAML (or JSON) `text`.

    Raises:
        yaml.YAMLError: it is not YAML; see `yaml_error`.
    """
    return yaml.load(text, Loader)  # noqa: S506 - Loader is a SafeLoader


# What PyYAML says -> rule, remedy; the first that fits.
_RULES = {
    "character '\\t'": ("be indented with spaces", "Replace the tab with spaces"),
    "mapping values": ("have one value, and quotes around it where it has a colon and a space",
                       "Put the value in quotes, or see whether the line above has `name: value`"),
    "expected ':'": ("have a colon and a space after its name", "Write `name: value`"),
    "got '${'": ("have quotes around ${...}", 'Write "${name.model}", with the quotes'),
    "quoted scalar": ("close its quote", "Write the missing quote"),
    "flow ": ("close its bracket and have commas between entries",
              "Write the missing bracket, comma or space after a colon"),
}  # fmt: skip
_OPENED = ("quoted scalar", "flow ", "expected ':'")  # it is shown where it was opened
_COLON = re.compile(r":(?=\s|$)")


def yaml_error(error: yaml.YAMLError, text: str, where: str) -> Problems:
    """The user's error of a `text` that is not YAML, with the line; `where`: a file, or the option
    whose value it is."""
    lines = text.splitlines() or [""]
    mark, said = getattr(error, "problem_mark", None), str(error)
    if isinstance(error, yaml.reader.ReaderError):  # which has no mark
        before = text[: error.position]
        column = len(before) - before.rfind("\n") - 1
        mark = yaml.Mark(where, 0, before.count("\n"), column, None, 0)
    key, problem = "", getattr(error, "problem", None) or "it has a control character"
    if mark is not None:
        said = f"{getattr(error, 'context', '') or ''}: {problem}"
        if lines[min(mark.line, len(lines) - 1)][: mark.column].endswith("$"):
            said = said.replace("got '{'", "got '${'")
        key = next((key for key in _RULES if key in said), "")
        opened = getattr(error, "context_mark", None)
        mark = opened if key in _OPENED and opened is not None else mark
        # A name without a colon goes on in the next line, whose colon is then one too many.
        above = [n for n in range(mark.line) if lines[n].strip() and lines[n].lstrip()[0] != "#"]
        is_one_more = key == "mapping values" or "found '<block mapping start>'" in said
        is_alone = is_one_more and len(_COLON.findall(lines[mark.line])) == 1
        if is_alone and above and not _COLON.search(lines[above[-1]]):
            key, indent = "expected ':'", len(lines[above[-1]]) - len(lines[above[-1]].lstrip())
            mark = yaml.Mark(mark.name, 0, above[-1], indent, None, 0)
    rule, remedy = _RULES.get(
        key, ("be valid YAML", "Look at indentation, quotes, brackets and colons up to here")
    )
    if isinstance(error, RefusedError):
        rule, problem, remedy = problem, "", "Correct it"
    line = 0 if mark is None else min(mark.line, len(lines) - 1)
    if "\n" in text:
        where += f", line {line + 1}, column {(0 if mark is None else mark.column) + 1}"
    return Problems(shown(lines[line]), rule, problem, remedy).within(where)
