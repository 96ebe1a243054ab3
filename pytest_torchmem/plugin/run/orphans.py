"""Baseline files whose test module is gone: it was deleted, renamed or moved.

A run of the whole looks for them, so that no baseline is lost in silence.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import pytest

from pytest_torchmem.store.baseline_file import read_any
from pytest_torchmem.store.baselines import FOLDER, BaselineStore
from pytest_torchmem.store.files import locked
from pytest_torchmem.store.origins import origins_path
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.errors import BaselineError
from pytest_torchmem.values.measured import RunSummary

_ALIKE: Final = 0.5
"""The share of its tests that a module must have in common with one that is gone to be taken for
it."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A module that is gone, and its baselines.

    Attributes:
        module: Where the module was, with ``.py`` where its name had no other ending.
        files: Its baseline files, one for each environment.
        keys: The entries in them.
        moved_to: The new module that has most of its tests; None where there is none, or several.
    """

    module: Path
    files: tuple[Path, ...]
    keys: frozenset[str]
    moved_to: Path | None = None


def baseline_folders(config: pytest.Config, store: BaselineStore) -> set[Path]:
    """Return the folders of baselines at or below the places where this run looked for tests."""
    if store.folder is not None:
        return {store.folder}
    skipped = (*config.getini("norecursedirs"), "__pycache__")
    found = set()
    for argument in config.args:
        start = Path(config.invocation_params.dir, str(argument).partition("::")[0])
        for folder, names, _ in os.walk(start):
            if FOLDER in names:
                found.add(Path(folder, FOLDER))
            names[:] = [n for n in names if n != FOLDER and not any(fnmatch(n, p) for p in skipped)]
    return found


def find_orphans(
    folders: Iterable[Path], summary: RunSummary, store: BaselineStore
) -> list[Orphan]:
    """Return the modules that are gone and have baselines, and which new one each has become."""
    files: dict[Path, list[Path]] = defaultdict(list)
    for folder in folders:
        for module, file in store.files(folder):
            python = module.with_name(f"{module.name}.py")
            if not module.exists() and not python.exists():
                files[module if module.suffix else python].append(file)
    orphans = [_orphan(module, files[module]) for module in sorted(files)]
    new = dict(_new_modules(summary, store))
    return [_followed(orphan, orphans, new) for orphan in orphans if orphan.keys]


def _orphan(module: Path, files: Iterable[Path]) -> Orphan:
    found: dict[Path, frozenset[str]] = {}
    for file in files:
        with contextlib.suppress(BaselineError):  # what cannot be read is not ours to move
            found[file] = frozenset(read_any(file)[1].lines)
    return Orphan(module, tuple(sorted(found)), frozenset().union(*found.values()))


def _new_modules(
    summary: RunSummary, store: BaselineStore
) -> Iterator[tuple[Path, frozenset[str]]]:
    """Yield the modules without any baseline, and the keys of what was measured in them."""
    keys: dict[Path, set[str]] = defaultdict(set)
    known = set()
    for test, window in summary.windows:
        module = Path(test.file)
        if window.change is Change.NEW:
            keys[module].add(window.key)
        if window.change is Change.NEW and store.path(module, test.environment).exists():
            known.add(module)
    yield from ((module, frozenset(k)) for module, k in keys.items() if module not in known)


def _followed(orphan: Orphan, all_: list[Orphan], new: Mapping[Path, frozenset[str]]) -> Orphan:
    """Return an orphan with its new module: of both, neither may have another one as near."""
    near = [module for module, keys in new.items() if _alike(orphan.keys, keys) >= _ALIKE]
    if len(near) != 1:
        return orphan
    rivals = [other for other in all_ if _alike(other.keys, new[near[0]]) >= _ALIKE]
    if len(rivals) != 1:
        return orphan
    return Orphan(orphan.module, orphan.files, orphan.keys, near[0])


def _alike(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / max(len(one), len(other), 1)


def move(orphan: Orphan, store: BaselineStore) -> None:
    """Give the baselines of a module that is gone to the new one. Raises `OSError`."""
    module = orphan.moved_to or orphan.module
    for file in orphan.files:
        target = store.path_in(module, store.environment_of(file))
        with locked(store.root(module)):
            target.parent.mkdir(parents=True, exist_ok=True)
            for old, new in ((origins_path(file), origins_path(target)), (file, target)):
                if old.exists():
                    old.replace(new)


def remove(orphan: Orphan) -> None:
    """Remove the baselines of a module that is gone. Raises `OSError`."""
    for file in orphan.files:
        file.unlink(missing_ok=True)
        origins_path(file).unlink(missing_ok=True)
