"""Changes of a baseline file: entries that are added, replaced, renamed or removed.

All other entries stay as they are in the file, whoever wrote them meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_torchmem.store.baseline_file import (
    EntryError,
    StoredEntries,
    parse_file,
    render,
    text_of,
)
from pytest_torchmem.store.baseline_rows import (
    entry_lines,
    explains,
    origin_line,
    origins_path,
    render_origins,
)
from pytest_torchmem.store.files import locked, remove_litter, replace_file
from pytest_torchmem.values.baseline import BaselineEntry, Environment, Numbers, environment_name
from pytest_torchmem.values.errors import BaselineError


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

    Entries that ``changes`` does not name stay as they are in the file, and so does their text
    unless it was of another format. A file without entries has no text.
    """
    text = text_of(path)
    lines, _ = _changed(path, parse_file(path, text, environment), changes)
    return text, render(environment, lines)


def _changed(
    path: Path, stored: StoredEntries, changes: FileChanges
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the lines of a file and of its origins as they would be."""
    moved = {old: new for old, new in changes.renamed.items() if old in stored.lines}
    stay = stored.lines.keys() - changes.removed - changes.written.keys() - moved.keys()
    found = {key: _kept(path, stored, key) for key in stay}
    entries = {new: stored.entry(old, path) for old, new in moved.items()}
    for key, entry in {**entries, **changes.written}.items():
        found[key] = entry_lines(key, Numbers.of(entry)), [origin_line(key, entry)]
    lines = {key: some for key, (some, _) in found.items()}
    return lines, {key: some for key, (_, some) in found.items() if some}


def _kept(path: Path, stored: StoredEntries, key: str) -> tuple[list[str], list[str]]:
    """Return the lines of an entry that stays: in today's format, or as they are if damaged."""
    lines, origins = stored.lines[key], stored.origins.get(key, [])
    try:
        found = stored.numbers(key, path)
    except EntryError:
        return lines, origins
    if isinstance(found, BaselineEntry):
        return entry_lines(key, Numbers.of(found)), [origin_line(key, found)]
    return entry_lines(key, found), [line for line in origins if explains(line, key, found)][:1]


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
            stored = parse_file(path, text_of(path), environment)
            lines, origins = _changed(path, stored, changes)
            # The numbers come last: origins without their numbers are not used, and an update that
            # is killed in between is made again.
            _put(origins_path(path), render_origins(origins))
            _put(path, render(environment, lines))
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
