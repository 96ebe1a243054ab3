"""Baselines are found, one is chosen for a test, and sources get the names that they have there.

Of a file entries are added, replaced, renamed or removed; all others stay, whoever wrote them
meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path, PurePath
from typing import Final

from pytest_torchmem.store import baseline_file
from pytest_torchmem.store.baseline_file import EntryError, StoredEntries
from pytest_torchmem.store.baseline_rows import (
    are_as_written,
    entry_lines,
    explains,
    origin_line,
    origins_path,
    render_origins,
)
from pytest_torchmem.store.changed_lines import ChangedLines, KeptCode, StoredEntry
from pytest_torchmem.store.files import LOCK, locked, remove_litter, replace_file
from pytest_torchmem.values.baseline import (
    BaselineEntry,
    Environment,
    Numbers,
    Reference,
    environment_name,
    nearest,
    same_kind,
)
from pytest_torchmem.values.contributors import Contributor
from pytest_torchmem.values.errors import BaselineError
from pytest_torchmem.values.results import Result

FOLDER: Final = "__torchmem__"
_ABOVE: Final = "__above__"
"""Stands for ``..`` in the place of a test module that is not below the rootdir."""

FOR_GIT: Final = {
    ".gitattributes": "*.json merge=union\n*.origins merge=union -diff linguist-generated\n",
    ".gitignore": f"{LOCK}\n.*.json.*\n",
}
"""Files that tell git about baselines. Each line of a baseline names its entry. So git can keep the
lines of both of two branches, and nobody has to choose. The lock is not to be committed, and
neither are files that a killed update left."""


class BaselineStore:
    """The baseline files of a run.

    Reading is lazy and remembered; a file that cannot be read raises its `BaselineError` each time
    it is asked for, and is never written to.
    """

    def __init__(
        self,
        rootdir: Path,
        folder: Path | None,
        fallbacks: Sequence[str] = (),
        kept: KeptCode | None = None,
    ) -> None:
        self._rootdir = rootdir
        self.folder = folder
        self.changed_lines = ChangedLines(rootdir, kept)
        self._fallbacks = tuple(fallbacks)
        self._files: dict[Path, StoredEntries | BaselineError] = {}
        self._others: dict[Path, tuple[Environment, StoredEntries] | None] = {}
        self._names: dict[Path, tuple[str, ...]] = {}
        self._paths: dict[tuple[Path, tuple[tuple[str, str], ...]], Path] = {}

    def path(self, module: Path, environment: Environment) -> Path:
        """Return the file for one test module in one environment."""
        place = module, tuple(environment.items())
        if place not in self._paths:
            self._paths[place] = self.path_in(module, environment_name(environment))
        return self._paths[place]

    def root(self, module: Path) -> Path:
        """Return the folder that holds a folder for each environment."""
        return module.parent / FOLDER if self.folder is None else self.folder

    def path_in(self, module: Path, environment: str) -> Path:
        """Return the file for one test module in the environment of a name."""
        name = f"{module.stem if module.suffix == '.py' else module.name}.json"
        folder = self.root(module) / environment
        if self.folder is not None:
            with contextlib.suppress(ValueError):  # on Windows: on another drive
                parts = Path(os.path.relpath(module.parent, self._rootdir)).parts
                folder = folder.joinpath(*(_ABOVE if part == os.pardir else part for part in parts))
        return folder / name

    def files(self, root: Path) -> Iterator[tuple[Path, Path]]:
        """Yield the baseline files in a folder, each with the test module that it is of.

        The module of ``test_x.json`` is ``test_x``, with or without ``.py``.
        """
        start = root.parent if self.folder is None else self._rootdir
        for path in sorted(root.glob("*/**/*.json")):
            if not path.name.startswith("."):
                parts = path.relative_to(root).with_suffix("").parts[1:]
                places = (os.pardir if part == _ABOVE else part for part in parts)
                yield Path(os.path.normpath(start.joinpath(*places))), path

    def environment_of(self, path: Path) -> str:
        """Return the name of the environment that a baseline file is of."""
        root = self.folder or next(p for p in path.parents if p.name == FOLDER)
        return path.relative_to(root).parts[0]

    def renamed_keys(
        self, path: Path, environment: Environment, keys: Iterable[str], module: Path
    ) -> dict[str, str]:
        """Return new keys by old ones, for tests whose function has another name now."""
        file, renamed = Path(os.path.relpath(module, self._rootdir)).as_posix(), {}
        for key in keys:
            entry = self.stored_entry(path, environment, key)
            for old, new in self.changed_lines.renamed_functions(entry, file).items():
                if key == old or key.startswith((f"{old}[", f"{old}::")):
                    renamed[key] = new + key.removeprefix(old)
        return renamed

    def renamed_from(
        self, module: Path, environment: Environment, key: str
    ) -> tuple[Path, str, str] | None:
        """Return where a test's entry is under an old name: the file, the key, and that name.

        The function had it, or the module, of which no other one that is gone has such an entry.
        Raises `BaselineError`.
        """
        path = self.path(module, environment)
        renamed = self.renamed_keys(path, environment, self.keys(path, environment), module)
        for old, new in renamed.items():
            if new == key:
                return path, old, old
        gone = [
            (file, key, f"that of {was.name.removesuffix('.py')}.py")
            for was, file in self.files(self.root(module))
            if self.environment_of(file) == self.environment_of(path) and not was.exists()
            if not was.with_name(f"{was.name}.py").exists() and key in self.keys(file, environment)
        ]
        return gone[0] if len(gone) == 1 else None

    def forget(self) -> None:
        """Read files anew that have been moved meanwhile."""
        self._files.clear()

    def keys(self, path: Path, environment: Environment) -> frozenset[str]:
        """Return the keys of all entries in a file. Raises `BaselineError`."""
        return frozenset(self._entries(path, environment).lines)

    def entry(self, path: Path, environment: Environment, key: str) -> BaselineEntry | None:
        """Return one entry, or None where the file has none. Raises `BaselineError`."""
        entries = self._entries(path, environment)
        return entries.entry(key, path) if key in entries.lines else None

    def reference(self, module: Path, environment: Environment, key: str) -> Reference | None:
        """Return what to compare with: the entry of this environment, or of one a user named.

        Raises `BaselineError`.
        """
        path = self.path(module, environment)
        own = self._entries(path, environment)
        if key in own.lines:
            return own.reference(key, path)
        for name in self._fallbacks:
            path = self.path_in(module, name)
            other = self._other(path)
            if other and same_kind(environment, other[0]) and key in other[1].lines:
                return other[1].reference(key, path, name)
        return None

    def stored_entry(self, path: Path, environment: Environment, key: str) -> StoredEntry:
        """Return the text of an entry and its file; no text of one that is not there."""
        with contextlib.suppress(BaselineError):
            return StoredEntry(path, "".join(self._entries(path, environment).lines.get(key, ())))
        return StoredEntry(path, "")

    def nearest(self, module: Path, environment: Environment, key: str) -> str:
        """Return the name of the nearest environment that has the entry; ``""`` without one."""
        files = (self._other(self.path_in(module, name)) for name in self._environments(module))
        near = nearest(environment, [file[0] for file in files if file and key in file[1].lines])
        return environment_name(near) if near else ""

    def unknown_fallbacks(self, modules: Iterable[Path]) -> tuple[str, ...]:
        """Return the names of environments that a user gave, and none of the modules has."""
        environments = {name for module in modules for name in self._environments(module)}
        return tuple(name for name in self._fallbacks if name not in environments)

    def _environments(self, module: Path) -> tuple[str, ...]:
        root = self.root(module)
        if root not in self._names:
            folders: list[str] = []
            with contextlib.suppress(OSError):
                folders = sorted(path.name for path in root.iterdir() if path.is_dir())
            self._names[root] = tuple(folders)
        return self._names[root]

    def _other(self, path: Path) -> tuple[Environment, StoredEntries] | None:
        """Return a file of whichever environment; None where there is none that can be read."""
        if path not in self._others:
            self._others[path] = None
            if path.exists():
                with contextlib.suppress(BaselineError):
                    self._others[path] = baseline_file.read_any(path)
        return self._others[path]

    def _entries(self, path: Path, environment: Environment) -> StoredEntries:
        if path not in self._files:
            try:
                self._files[path] = baseline_file.read_file(path, environment)
            except BaselineError as error:
                self._files[path] = error
        entries = self._files[path]
        if isinstance(entries, BaselineError):
            raise entries
        return entries


def tell_git(root: Path) -> None:
    """Put the files that tell git into a folder of baselines that has none."""
    for name, text in FOR_GIT.items():
        path = root / name
        if root.is_dir() and not path.exists():
            with contextlib.suppress(OSError):
                replace_file(path, text)


def entry_key(nodeid: str, region: str = "") -> str:
    """Return the key of a test's entry, or of one of its regions: the node id within its module."""
    key = nodeid.partition("::")[2] or nodeid
    return f"{key}::{region}" if region else key


def portable(result: Result, rootdir: Path) -> Result:
    """Return ``result`` with source files named the same on every machine."""
    live = partial(portable_live, rootdir=rootdir)
    own = live(result.peak.live_by_category)
    peak = replace(result.peak, live=live(result.peak.live), live_by_category=own)
    retained = replace(result.retained, live=live(result.retained.live))
    return replace(result, peak=peak, retained=retained, grown=live(result.grown))


def portable_live(live: Iterable[Contributor], rootdir: Path) -> tuple[Contributor, ...]:
    """Return contributors with source files named the same on every machine."""
    return tuple(c.with_file(partial(portable_path, rootdir=rootdir)) for c in live)


@lru_cache(maxsize=4096)
def portable_path(file: str, rootdir: Path) -> str:
    """Return a source file relative to the rootdir, or to the folder of installed packages.

    A file that is in neither keeps its last two parts: enough to recognise, nothing of the machine.
    """
    path = PurePath(file)
    with contextlib.suppress(ValueError):
        return path.relative_to(rootdir).as_posix()
    for folder in ("site-packages", "dist-packages"):
        if folder in path.parts:
            at = len(path.parts) - path.parts[::-1].index(folder)
            return PurePath(*path.parts[at:]).as_posix()
    return PurePath(*path.parts[-2:]).as_posix() if path.is_absolute() else path.as_posix()


@dataclass(frozen=True, slots=True)
class FileChanges:
    """The changes of one file.

    Attributes:
        written: Entries to add or replace.
        removed: Keys of entries to delete.
        renamed: New keys of entries, by their old ones; each keeps its numbers.
    """

    written: Mapping[str, BaselineEntry] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)


def changed_text(path: Path, environment: Environment, changes: FileChanges) -> tuple[str, str]:
    """Return the text of a file as it is now and as it would be. Raises `BaselineError`.

    Entries that ``changes`` does not name stay as they are in the file, and so does their text. A
    file without entries has no text.
    """
    text = baseline_file.text_of(path)
    lines, _ = _changed_lines(path, baseline_file.parse_file(path, text, environment), changes)
    return text, baseline_file.render(environment, lines)


def _changed_lines(
    path: Path, stored: StoredEntries, changes: FileChanges
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the lines of a file and of its origins as they would be."""
    renamed = {old: new for old, new in changes.renamed.items() if old in stored.lines}
    stay = stored.lines.keys() - changes.removed - changes.written.keys() - renamed.keys()
    lines_by_key = {key: _lines_of_entry(path, stored, key) for key in stay}
    entries = {new: stored.entry(old, path) for old, new in renamed.items()}
    for key, entry in {**entries, **changes.written}.items():
        lines_by_key[key] = entry_lines(key, Numbers.of(entry)), [origin_line(key, entry)]
    lines = {key: some for key, (some, _) in lines_by_key.items()}
    return lines, {key: some for key, (_, some) in lines_by_key.items() if some}


def _lines_of_entry(path: Path, stored: StoredEntries, key: str) -> tuple[list[str], list[str]]:
    """Return the lines of an entry that stays, as we write them, or as they are if damaged.

    Lines are read only where a merge or a hand has left more or others than we write.
    """
    lines, origins = stored.lines[key], stored.origins.get(key, [])
    if len(origins) < 2 and are_as_written(key, lines):
        return lines, origins
    try:
        numbers = stored.numbers(key, path)
    except EntryError:
        return lines, origins
    return entry_lines(key, numbers), [line for line in origins if explains(line, key, numbers)][:1]


def root_of(path: Path, environment: Environment) -> Path:
    """Return the folder that holds a folder for each environment, told from one of its files."""
    name = environment_name(environment)
    return next((parent.parent for parent in path.parents if parent.name == name), path.parent)


def write_file(path: Path, environment: Environment, changes: FileChanges) -> None:
    """Apply changes to a file; all other entries stay as they are in the file now.

    The file is read again under a lock, so entries that another run wrote meanwhile are kept, and
    replaced in one step, so a reader never sees half of it. A file left without entries is
    removed. Raises `BaselineError` when the file cannot be read (it is left alone then) or written.
    """
    try:
        with locked(root_of(path, environment)):
            remove_litter(path.parent)
            stored = baseline_file.parse_file(path, baseline_file.text_of(path), environment)
            lines, origins = _changed_lines(path, stored, changes)
            # The numbers come last: origins without their numbers are not used, and an update that
            # is killed in between is made again.
            _put(origins_path(path), render_origins(origins))
            _put(path, baseline_file.render(environment, lines))
    except OSError as error:
        raise BaselineError(
            f"the baseline {path} cannot be written ({error.strerror or error}); "
            "what it held before is unchanged. Mend that and update again"
        ) from None


def _put(path: Path, text: str) -> None:
    if text:
        replace_file(path, text)
    else:
        path.unlink(missing_ok=True)
