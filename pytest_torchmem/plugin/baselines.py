"""Baseline files: where they are, how they are read, and the one place that writes them.

docs/baseline-format.md describes the format.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, Final

from pytest_torchmem.analysis.baseline import BaselineEntry
from pytest_torchmem.analysis.results import Contributor, Result
from pytest_torchmem.errors import BaselineError

FORMAT: Final = 1
FORMATS: Final = {
    1: "0.1.0: entries by test, each with total, at_peak, peaks, live, retained, retained_live",
}
"""Every format number ever written, and what it brought."""

FOLDER: Final = "__torchmem__"

Environment = Mapping[str, str]


class BaselineStore:
    """The baseline files of a run.

    Reading is lazy and remembered; a file that cannot be read raises its `BaselineError` each time
    it is asked for, and is never written to.
    """

    def __init__(self, rootdir: Path, folder: Path | None) -> None:
        self._rootdir = rootdir
        self._folder = folder
        self._files: dict[Path, dict[str, Any] | BaselineError] = {}

    def path(self, module: Path, environment: Environment) -> Path:
        """Return the file for one test module in one environment."""
        name = f"{module.stem if module.suffix == '.py' else module.name}.json"
        key = environment_name(environment)
        if self._folder is None:
            return module.parent / FOLDER / key / name
        with contextlib.suppress(ValueError):
            return self._folder / key / module.parent.relative_to(self._rootdir) / name
        return self._folder / key / name

    def keys(self, path: Path, environment: Environment) -> frozenset[str]:
        """Return the keys of all entries in a file. Raises `BaselineError`."""
        return frozenset(self._entries(path, environment))

    def entry(self, path: Path, environment: Environment, key: str) -> BaselineEntry | None:
        """Return one entry, or None where the file has none. Raises `BaselineError`."""
        data = self._entries(path, environment).get(key)
        if data is None:
            return None
        try:
            return BaselineEntry.from_json(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _unreadable(path, f"the entry {key!r} is damaged ({error})") from None

    def _entries(self, path: Path, environment: Environment) -> dict[str, Any]:
        if path not in self._files:
            try:
                self._files[path] = read_file(path, environment)
            except BaselineError as error:
                self._files[path] = error
        entries = self._files[path]
        if isinstance(entries, BaselineError):
            raise entries
        return entries


def read_file(path: Path, environment: Environment) -> dict[str, Any]:
    """Return the raw entries of a file by key; no entries where there is no file.

    Raises `BaselineError` when the file is not JSON, is of another format or holds the numbers of
    another environment.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from None
    try:
        data = json.loads(
            text, object_pairs_hook=_unique, parse_float=_no_float, parse_constant=_no_float
        )
    except (ValueError, RecursionError) as error:
        conflict = re.search(r"^<{7}|^>{7}", text, re.MULTILINE)
        raise _unreadable(
            path, "it holds merge conflict markers" if conflict else str(error)
        ) from None
    _check(path, data, environment)
    entries: dict[str, Any] = data["entries"]
    return entries


def write_file(path: Path, environment: Environment, changes: Mapping[str, BaselineEntry]) -> None:
    """Add or replace entries; all others stay as they are in the file now.

    The file is read again just before, so entries that someone else wrote meanwhile are kept, and
    replaced in one step, so a reader never sees half of it. Raises `BaselineError` when the file
    cannot be read (it is left alone then) or written.
    """
    entries = read_file(path, environment)
    entries.update({key: entry.to_json() for key, entry in changes.items()})
    data = {"entries": entries, "environment": dict(environment), "format": FORMAT}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(render(data) + "\n", encoding="utf-8", newline="\n")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise BaselineError(
            f"the baseline {path} cannot be written ({error.strerror or error}); "
            "what it held before is unchanged. Make the folder writable and update again"
        ) from None


def render(value: object, depth: int = 0) -> str:
    """Return JSON that diffs well: sorted keys, one contributor or amount group per line."""
    if depth == 4 or not isinstance(value, dict | list) or not value:
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    if isinstance(value, dict) and depth and all(isinstance(v, int) for v in value.values()):
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    pad = "  " * depth
    if isinstance(value, dict):
        items = [
            f"{json.dumps(key, ensure_ascii=False)}: {render(value[key], depth + 1)}"
            for key in sorted(value)
        ]
        opening, closing = "{}"
    else:
        items = [render(item, 4) for item in value]
        opening, closing = "[]"
    body = ",\n".join(f"{pad}  {item}" for item in items)
    return f"{opening}\n{body}\n{pad}{closing}"


def environment_name(environment: Environment) -> str:
    """Return a folder name for an environment: ``cpu-torch2.13``, ``nvidia-h200-sm90-torch2.13``.

    Two environments may share a name when their device models differ in punctuation only; the file
    holds the environment in full, so they are told apart when it is read.
    """
    parts = [re.sub(r"[^a-z0-9]+", "-", environment["device"].lower()).strip("-")]
    if environment.get("capability"):
        parts.append("sm" + re.sub(r"[^a-z0-9]+", "", environment["capability"].lower()))
    parts.append("torch" + re.sub(r"[^a-z0-9.]+", "-", environment["torch"].lower()))
    if environment.get("allocator"):
        digest = hashlib.sha256(environment["allocator"].encode()).hexdigest()
        parts.append("alloc" + digest[:8])
    return "-".join(parts)


def entry_key(nodeid: str, region: str = "") -> str:
    """Return the key of a test's entry, or of one of its regions: the node id within its module."""
    key = nodeid.partition("::")[2] or nodeid
    return f"{key}::{region}" if region else key


def portable(result: Result, rootdir: Path) -> Result:
    """Return ``result`` with source files named the same on every machine."""

    def moved(live: tuple[Contributor, ...]) -> tuple[Contributor, ...]:
        return tuple(
            replace(c, source=replace(c.source, file=portable_path(c.source.file, rootdir)))
            if c.source
            else c
            for c in live
        )

    peak = replace(
        result.peak,
        live=moved(result.peak.live),
        live_by_category=moved(result.peak.live_by_category),
    )
    retained = replace(result.retained, live=moved(result.retained.live))
    return replace(result, peak=peak, retained=retained)


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


def _check(path: Path, data: object, environment: Environment) -> None:
    if not isinstance(data, dict) or not isinstance(data.get("entries"), dict):
        raise _unreadable(path, "it is not a baseline file")
    if data.get("format") not in list(FORMATS):
        raise BaselineError(
            f"the baseline {path} has format {data.get('format')!r}, and this version of "
            f"pytest-torchmem reads {', '.join(map(str, FORMATS))}; install a newer one"
        )
    if data.get("environment") != dict(environment):
        raise BaselineError(
            f"the baseline {path} was measured on {data.get('environment')!r}, "
            f"and this run is on {dict(environment)!r}; move the file away and update again"
        )


def _unreadable(path: Path, reason: str) -> BaselineError:
    return BaselineError(
        f"the baseline {path} cannot be read: {reason}. Restore it from version control, "
        "or delete it and run with --torchmem-update-baseline"
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} occurs twice")
    return data


def _no_float(text: str) -> Iterator[None]:
    raise ValueError(f"{text} is not a whole number")
