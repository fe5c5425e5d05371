"""Places by path or URL: `s3://bucket/folder` and whatever pyarrow's file systems know.

What works on a path of this machine works on a `UrlPath`, as far as this package needs it. Models
and checkpoints are read from files, so `local_copy` brings a folder here, once for each version.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow.fs
from pyarrow.fs import FileInfo, FileSelector, FileType, LocalFileSystem

from rllib_llm.shared.errors import Problems, nearest, require

CACHE = "RLLIB_LLM_CACHE"  # environment variable: the folder for local copies


def is_url(place: object) -> bool:
    """Whether `place` is a URL and no path."""
    return isinstance(place, UrlPath) or "://" in str(place)


def folder_like(path: Path, cutoff: float = 0.6) -> str:
    """The folder beside `path`, which is not there, whose name is nearest to its; "" for none."""
    try:
        names = [other.name for other in path.parent.iterdir() if other.is_dir()]
    except OSError:
        return ""
    close = nearest(path.name, names, num=1, cutoff=cutoff)
    found = str(path.with_name(close[0])) if close else ""
    return f"./{found}" if found and path.parent == Path() else found


def open_storage(url: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """File system and path in it of a URL.

    Raises:
        Problems: pyarrow knows no such file system, or it does not answer.
    """
    try:
        filesystem, path = pyarrow.fs.FileSystem.from_uri(url)
    except (OSError, ValueError) as error:
        is_web = url.startswith(("http://", "https://"))
        remedy = "Download it" if is_web else "Check it, and the credentials in the environment"
        rule = "be a path or a URL that pyarrow knows, such as s3://bucket/folder or gs://..."
        raise Problems(repr(url), rule, error, remedy) from error
    return filesystem, path.rstrip("/")


class UrlPath:
    """A folder or file by URL, with the methods of `pathlib.Path` that this package uses."""

    def __init__(self, url: str | UrlPath) -> None:
        whole = str(url)
        self._url, _, self._query = whole.partition("?")  # s3://...?endpoint_override=...
        self._url = self._url.rstrip("/")
        self._opened: tuple[pyarrow.fs.FileSystem, str] | None = None

    def __str__(self) -> str:
        return f"{self._url}?{self._query}" if self._query else self._url

    def __repr__(self) -> str:
        return f"UrlPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UrlPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str | os.PathLike) -> UrlPath:
        inner = PurePosixPath(os.fspath(name))
        return self._at(f"{self._url}/{inner}", lambda path: f"{path}/{inner}")

    def __reduce__(self) -> Any:
        return UrlPath, (str(self),)

    @property
    def name(self) -> str:
        return PurePosixPath(self._url).name

    @property
    def parent(self) -> UrlPath:
        return self._at(self._url.rpartition("/")[0], lambda path: path.rpartition("/")[0])

    def _at(self, url: str, path_of: Callable[[str], str]) -> UrlPath:
        """Another one of the same file system."""
        found = UrlPath(f"{url}?{self._query}" if self._query else url)
        if self._opened is not None:
            filesystem, path = self._opened
            found._opened = (filesystem, path_of(path))
        return found

    @property
    def filesystem(self) -> pyarrow.fs.FileSystem:
        """pyarrow's file system that it lies in."""
        return self._open()[0]

    @property
    def path(self) -> str:
        """Its path in the file system."""
        return self._open()[1]

    def _open(self) -> tuple[pyarrow.fs.FileSystem, str]:
        if self._opened is None:
            self._opened = open_storage(str(self))
        return self._opened

    def is_relative_to(self, folder: object) -> bool:
        """Whether it lies in `folder`."""
        return isinstance(folder, UrlPath) and PurePosixPath(self._url).is_relative_to(folder._url)

    def relative_to(self, folder: Place) -> PurePosixPath:
        """Its path from `folder` on, which lies in the same storage."""
        assert isinstance(folder, UrlPath), "it contains this"
        return PurePosixPath(self._url).relative_to(PurePosixPath(folder._url))

    def _info(self) -> FileInfo:
        return self.filesystem.get_file_info(self.path)

    def exists(self) -> bool:
        return self._info().type != FileType.NotFound

    def is_file(self) -> bool:
        return self._info().type == FileType.File

    def is_dir(self) -> bool:
        return self._info().type == FileType.Directory

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        self.filesystem.create_dir(self.path, recursive=parents)

    def iterdir(self) -> Iterator[UrlPath]:
        selector = FileSelector(self.path, allow_not_found=True)
        for info in self.filesystem.get_file_info(selector):
            yield self / info.base_name

    def glob(self, pattern: str) -> Iterator[UrlPath]:
        """Its entries by a pattern of names, one for each level, or `**/name` at any depth."""
        depth = None if pattern.startswith("**/") else pattern.count("/")
        selector = FileSelector(self.path, allow_not_found=True, recursive=depth != 0)
        wanted = pattern.removeprefix("**/")
        for info in self.filesystem.get_file_info(selector):
            inner = info.path.removeprefix(self.path).strip("/")
            name = inner if depth is not None else info.base_name
            same_depth = depth is None or inner.count("/") == depth
            if same_depth and fnmatch.fnmatchcase(name, wanted):
                yield self / inner

    def read_bytes(self) -> bytes:
        with self.filesystem.open_input_stream(self.path) as stream:
            return bytes(stream.read())

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def write_bytes(self, content: bytes) -> None:
        with self.filesystem.open_output_stream(self.path) as stream:
            stream.write(content)

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok or self.exists():
            self.filesystem.delete_file(self.path)


Place = Path | UrlPath


def place(given: str | os.PathLike | UrlPath) -> Place:
    """The folder or file that `given` names, by path or by URL; `~` is this user's home."""
    if isinstance(given, UrlPath):
        return given
    return UrlPath(str(given)) if is_url(given) else Path(given).expanduser()


def placed(path: str, folder: Place) -> Place:
    """The file or folder at `path` of the file system that `folder`, above it, lies in."""
    if isinstance(folder, Path):
        return Path(path)
    inner = PurePosixPath(path).relative_to(folder.path)
    return folder / inner if inner.parts else folder


def place_in(filesystem: pyarrow.fs.FileSystem, path: str) -> Place:
    """The file or folder at `path` of a file system, as Tune names it."""
    if isinstance(filesystem, LocalFileSystem):
        return Path(path)
    found = UrlPath(f"{filesystem.type_name}://{path}")
    found._opened = (filesystem, path)
    return found


def upload(folder: Path, target: UrlPath) -> None:
    """Copies the contents of a local `folder` to `target`, replacing it."""
    filesystem, path = target.filesystem, target.path
    if target.is_dir():
        filesystem.delete_dir_contents(path)
    filesystem.create_dir(path, recursive=True)
    pyarrow.fs.copy_files(str(folder), path, LocalFileSystem(), filesystem)


def remove(folder: Place) -> None:
    """Removes a folder and all that is in it."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        folder.filesystem.delete_dir(folder.path)


def fetch_file(filesystem: pyarrow.fs.FileSystem, source: str, target: Path) -> None:
    """Copies a file here, if it is there and `target` is not."""
    if not target.exists() and filesystem.get_file_info(source).type == FileType.File:
        pyarrow.fs.copy_files(source, str(target), filesystem, LocalFileSystem())


def local_copy(source: str | os.PathLike | UrlPath) -> Path:
    """A local path of `source`: itself if it is local, else a copy.

    Copies are kept in `$RLLIB_LLM_CACHE`, by default in `~/.cache/rllib_llm`, one for each URL and
    state of its files; processes that want the same one at once each fetch it, and one wins.

    Raises:
        Problems: there is nothing at `source`.
    """
    if not (isinstance(source, UrlPath) or is_url(source)):
        return Path(source).expanduser()
    url = UrlPath(str(source))
    files = [url._info()]
    if files[0].type != FileType.File:
        selector = FileSelector(url.path, recursive=True, allow_not_found=True)
        inside = (i for i in url.filesystem.get_file_info(selector) if i.type == FileType.File)
        files = sorted(inside, key=lambda info: info.path)
    require(files, repr(str(url)), ..., "exist", "nothing lies there",
            "Check the URL, and the credentials in the environment")  # fmt: skip
    state = [(info.path, info.size, info.mtime_ns) for info in files]
    key = hashlib.sha256(json.dumps([str(url), state]).encode()).hexdigest()[:24]
    cache = Path(os.environ.get(CACHE, "~/.cache/rllib_llm")).expanduser()
    target = cache / key / (url.name or "root")
    if not target.exists():
        _fetch(url, files, target)
    return target


def _fetch(url: UrlPath, files: list[FileInfo], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=".partial-"))
    try:
        copied = partial / "copy"
        if [info.path for info in files] != [url.path]:
            copied.mkdir()
        pyarrow.fs.copy_files(url.path, str(copied), url.filesystem, LocalFileSystem())
        with contextlib.suppress(OSError):  # another process was quicker
            os.rename(copied, target)
        require(target.exists(), repr(str(url)), ..., "be readable", "its copy was not whole", "")
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def keep_json_rows(file: Path, key: str, first: int | None, num_last: int = 0) -> None:
    """Truncates a file of JSON rows: removes an incomplete last row, the last `num_last` rows, and
    the rows from the end whose `key` is `first` or higher, back to the first lower one; None keeps
    those."""
    if not file.is_file():
        return
    lines = file.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):  # its writer was killed within it
        lines.pop()
    del lines[max(0, len(lines) - num_last) :]
    while first is not None and lines and json.loads(lines[-1])[key] >= first:
        lines.pop()
    os.truncate(file, sum(map(len, lines)))


def new_lines(file: Path, start: int) -> tuple[list[str], int]:
    """The whole lines of a file from byte `start` on, and the byte after the last of them. In a
    file that was cut back meanwhile, lines in place of known ones may be left out."""
    if not file.is_file():
        return [], 0
    start = min(start, file.stat().st_size)
    with file.open("rb") as stream:
        stream.seek(max(0, start - 1))
        text = stream.read()
    begin = text.find(b"\n") + 1 if start else 0  # where a line begins
    end = text.rfind(b"\n") + 1
    lines = text[begin:end].decode("utf-8", errors="replace").splitlines()
    return lines, max(0, start - 1) + end


def read_json(file: Place) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def replace_text(file: Place, text: str) -> None:
    """Writes `text` to `file` atomically, since a process may be killed meanwhile."""
    new = file.parent / f".{file.name}.new"
    new.write_text(text, encoding="utf-8")
    if isinstance(file, UrlPath) and isinstance(new, UrlPath):
        file.filesystem.move(new.path, file.path)
    else:
        os.replace(str(new), str(file))


class BestEffort:
    """Writes files that a run does not need: an OSError, such as a full disk, is warned of once,
    and ends nothing."""

    def __init__(self, what: str) -> None:
        """`what`: the files, as a person calls them."""
        self._what, self._has_warned = what, False

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A block that writes; it ends with the first error."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self._what} cannot be written: {error}. Training continues without.",
                    stacklevel=4,
                )
