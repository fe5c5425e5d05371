"""YAML as this package reads it, and explanations, in plain words, of texts that it cannot read."""

from __future__ import annotations

import re
from typing import Any, ClassVar, NamedTuple

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
            raise _not_composed("it stands within what it names", mark)
        if node is None or self._level + self._height(node) > MAX_LEVELS:
            raise _not_composed("nested too deep", mark)
        return node

    def _height(self, node: yaml.Node) -> int:
        """Levels of a node and what is in it."""
        if node not in self._levels_below:
            inner: list[yaml.Node] = []
            if isinstance(node, yaml.MappingNode):
                inner = [each for pair in node.value for each in pair]
            elif isinstance(node, yaml.SequenceNode):
                inner = node.value
            below = max((self._levels_below[each] for each in inner), default=0)
            self._levels_below[node] = below + 1
        return self._levels_below[node]

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """As PyYAML's. Keys are looked at here, where they stand as the file has them: merge keys
        (`<<: *other`) add to a mapping later."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if isinstance(key, str) and key != "<<":
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is written twice", key_node.start_mark
                    )
                seen.add(key)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As PyYAML's, whose own errors of a value that its tag does not allow tell no place."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise yaml.constructor.ConstructorError(
                None, None, f"no value of its type: {error}", node.start_mark
            ) from error


def _not_composed(problem: str, mark: yaml.Mark) -> yaml.YAMLError:
    return yaml.composer.ComposerError(None, None, problem, mark)


for _type, _pattern in (("int", INT), ("float", FLOAT)):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_type}", _pattern, list("-+.0123456789"))


def read_text(text: str) -> Any:
    """Return the value of the YAML (or JSON) `text`.

    Raises:
        yaml.YAMLError: it is not YAML; see `fault`.
    """
    return yaml.load(text, Loader)  # noqa: S506 - Loader is a SafeLoader


# --- what is wrong -------------------------------------------------------------------------------

NO_SPACE = re.compile(r"""\s*(- )?[\w.-]+:[^\s:/]""")  # `lr:1`, where `lr: 1` was meant

BLOCK = re.compile(r"(^|[:-] +)[|>][-+\d]*\s*(#.*)?$")  # what begins a text of several lines
BEFORE_NAME = r"[\s-]*"


class Fault(NamedTuple):
    """A line that YAML cannot be read beyond; of the text nothing is quoted but a key twice there.

    line, column: from 0.
    rule: what the line must do, as in `Problems`.
    """

    line: int
    column: int
    rule: str
    reason: str
    remedy: str


# What PyYAML says: rule, reason, remedy; a lower one is asked only where the upper ones do not fit.
KNOWN = (
    (r"character '\\t'", "be indented with spaces", "YAML takes no tabs there",
     "Replace the tab with spaces"),
    (r"nested too deep", f"be nested at most {MAX_LEVELS} levels deep",
     "what reads deeper ones may fail", "Make it flatter, or take out brackets that are too many"),
    (r"within what it names", "not refer to what it stands in", "it would never end",
     "Write the value instead of the `*`"),
    (r"no value of its type", "hold a value of its type", "YAML cannot read it as that",
     "Correct it, or put it in quotes and leave out its `!!`"),
    (r"undefined alias", "name an anchor that stands above", "`*` refers to what `&` has named",
     "Write the name that has the `&`, or put a text that begins with `*` in quotes"),
    (r"cannot start any token|alias|tag '", "have quotes around the value",
     "its first character has a meaning of its own in YAML", "Put the value in quotes"),
    (r"escape", "have single quotes", "a backslash begins a special character in double quotes",
     "Replace them, or write each backslash twice"),
    (r"quoted scalar", "close its quote", "the text goes on to the end of the file",
     "Write the missing quote"),
    (r"unhashable", "have a name before its braces", "a mapping cannot be the name of a setting",
     "Write `name: {...}`, or put the value in quotes"),
    (r"another document", "be part of one document", "a line of `---` begins another",
     "Take that line out"),
    (r"found '<scalar>'", "end where its quote ends", "text follows the closing quote",
     "Put the whole value in quotes of the other kind, or close the quote of a line above"),
    (r"found '[]}]'", "open a bracket before it closes it", "there is one that closes nothing",
     "Take it out"),
    (r"'-'|block sequence", "not be an entry of a list", "its neighbours are `name: value`",
     "Indent the list below the name that it belongs to"),
    (r"got '\${'", "have quotes around ${...}", "within brackets a brace begins a mapping",
     'Write "${name.model}", with the quotes'),
    (r"flow (sequence|mapping|node.*<stream end>)",
     "close its bracket and have commas between entries", "the entries end in something else",
     "Write the missing bracket, comma or space after a colon"),
    (r"expected (<block end>|'<document start>')", "be indented as the lines of its level",
     "no line above that it could belong to begins in the same column",
     "Move it below the first letter of its neighbours"),
)  # fmt: skip
NO_KEY = ("have a colon and a space after its name", "it is read as a mere text",
          "Write `name: value`")  # fmt: skip
DEEPER = ("be indented as the line above", "that has a value already, and nothing can be below it",
          "Move it to the left, or leave the upper value out")  # fmt: skip
TWO_COLONS = ("have quotes around its value", "a colon and a space in it begin another value",
              "Put the value in quotes")  # fmt: skip
BLOCK_TEXT = ("be indented as the text below `|` or `>`", "the text ends before a line with less",
              "Move it to the right")  # fmt: skip
OTHER = ("be valid YAML", "it cannot be read from there on",
         "Look at indentation, quotes, brackets and colons here and in the line above")  # fmt: skip


def fault(error: yaml.YAMLError, text: str) -> Fault:
    """The line that is probably wrong in `text`, on which PyYAML failed with `error`."""
    lines = text.splitlines() or [""]
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        before = text[: getattr(error, "position", 0)]
        return Fault(before.count("\n"), 0, "be text", "it has a control character", "Take it out")
    mark, said = error.problem_mark, f"{error.context or ''}: {error.problem or ''}"
    if "mapping values" in said:
        return _colon(lines, mark.line, mark.column)
    if "written twice" in said:
        return Fault(mark.line, mark.column, "stand once", said[2:], "Take one of the two out")
    if "simple key" in said and error.context_mark is not None:
        line, column = error.context_mark.line, error.context_mark.column
        is_text = " " in lines[line].strip() and _ends_block_text(lines, line)
        return Fault(line, column, *(BLOCK_TEXT if is_text else NO_KEY))
    if "got '{'" in said and lines[mark.line][: mark.column].endswith("$"):
        said = said.replace("got '{'", "got '${'")
    told = next((told for pattern, *told in KNOWN if re.search(pattern, said)), OTHER)
    opens = re.search(r"quoted scalar: found unexp|flow", said)
    if opens and not re.search(r"got '\$?{'", said) and error.context_mark is not None:
        mark = error.context_mark  # where it was opened
    if "flow node" in said and "<stream end>" in said:
        mark = _opened(text) or mark
    line = min(mark.line, len(lines) - 1)
    if "\\t" not in said and _ends_block_text(lines, line):
        return Fault(line, _indent(lines[line]), *BLOCK_TEXT)
    return Fault(line, mark.column, *told)


def _opened(text: str) -> yaml.Mark | None:
    """Where the innermost bracket that stays open begins."""
    opened: list[yaml.Mark] = []
    for token in yaml.scan(text):
        if isinstance(token, yaml.FlowSequenceStartToken | yaml.FlowMappingStartToken):
            opened.append(token.start_mark)
        elif isinstance(token, yaml.FlowSequenceEndToken | yaml.FlowMappingEndToken):
            opened.pop()
    return opened[-1] if opened else None


def _ends_block_text(lines: list[str], number: int) -> bool:
    """Whether a line, which is neither an entry nor has a name, comes right after a text below `|`
    or `>`."""
    if re.match(r"\s*(- |.*:(\s|$))", lines[number]):
        return False
    begun = None  # how far the name of the text is indented
    for line in lines[:number]:
        if line.strip() and (begun is None or _indent(line) <= begun):
            begun = _indent(line, BEFORE_NAME) if BLOCK.search(line) else None
    return begun is not None


def _indent(line: str, before: str = r"\s*") -> int:
    found = re.match(before, line)
    return 0 if found is None else found.end()


def _colon(lines: list[str], line: int, column: int) -> Fault:
    """The fault of a value that is not allowed where it stands: it is in one of two lines."""
    if re.search(r":\s", lines[line][:column]):
        return Fault(line, column, *TWO_COLONS)
    above = next((n for n in range(line - 1, -1, -1) if lines[n].strip()), None)
    if above is None or not NO_SPACE.match(lines[above]) and ":" in lines[above]:
        return Fault(line, column, *(OTHER if above is None else DEEPER))
    return Fault(above, len(lines[above]) - len(lines[above].lstrip()), *NO_KEY)


def yaml_error(error: yaml.YAMLError, text: str, where: str) -> Problems:
    """The user's error of a `text` that is not YAML, with the line itself; `where`: a file, or the
    option whose value it is."""
    found = fault(error, text)
    if "\n" in text:
        where = f"{where}, line {found.line + 1}, column {found.column + 1}"
    lines = text.splitlines() or [""]
    return Problems(shown(lines[found.line]), found.rule, found.reason, found.remedy).within(where)
