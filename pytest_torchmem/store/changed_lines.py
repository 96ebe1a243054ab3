"""The lines of a project that are not as they were when a baseline was stored."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple, TypeAlias

from pytest_torchmem.store.baseline_rows import origins_path
from pytest_torchmem.store.changed_code import (
    Lines,
    changed_statements,
    edited_lines,
    renamed_functions,
)
from pytest_torchmem.store.git import git_output
from pytest_torchmem.values.contributors import Source
from pytest_torchmem.values.findings import CodeLines

_TOGETHER: Final = 20
"""So many lines that were changed together are told as one place."""
_HUNK: Final = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_FILE: Final = "+++ b/"
_PLAIN: Final = ("--no-color", "--src-prefix=a/", "--dst-prefix=b/")
_WHOLE: Final = f"--unified={1 << 30}"
_STARTS: Final = re.compile(r"^diff --git ", re.MULTILINE)
_NO_FILE: Final = "--- /dev/null"
_RENAMED: Final = ("rename from ", "rename to ")
# Of a line that is gone or that came, but for comments.
_CODE: Final = re.compile(r"[-+]\s*[^\s#]")
_SETTINGS: Final = ("*.yaml", "*.yml", "*.json", "*.toml", "*.ini", "*.cfg")
# Baselines, and what is hidden: the settings of tools.
_NOT_SETTINGS: Final = tuple(
    f":(exclude,glob)**/{name}" for name in ("__torchmem__/**", ".*/**", ".*")
)
# What is kept of a project: no data, and nothing of the tools and packages in its folder.
_KEPT_SUFFIXES: Final = (".py", *(pattern[1:] for pattern in _SETTINGS))
_KEPT_FILE_BYTES: Final = 1 << 18
_KEPT_FILES: Final = 5000
_WALKED_FOLDERS: Final = 5000
_NOT_WALKED: Final = frozenset({"__torchmem__", "__pycache__", "site-packages", "node_modules"})


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines of a file that are not as they were.

    Attributes:
        first: The first line that was changed or added; the one that follows, where lines are gone.
        last: The last one; the one before ``first`` where lines are gone.
        was: Where the lines were that it took the place of; none where lines were only added.
        is_code: They are more than comments and empty lines, of a file that was there and still is.
    """

    first: int
    last: int
    was: range
    is_code: bool = False

    @property
    def is_now(self) -> range:
        return range(self.first, self.last + 1)


Changes: TypeAlias = Mapping[str, list[Hunk]]
"""The hunks of each file, by the name that it has now."""


class StoredEntry(NamedTuple):
    """An entry of a baseline: the file that it is in, and its text there."""

    file: Path
    text: str


class KeptCode:
    """The code of a project as it was when this machine wrote its baselines.

    Git knows the code of a baseline once both are committed. Until then, and where there is no
    repository, the code is kept beside: in a bare repository of ours, in a folder that may be
    deleted at any time. An entry of a baseline is known by its content, wherever it is moved to: an
    update of some entries leaves the others with the code that they were measured with.
    """

    def __init__(self, folder: Path, place: Callable[[], Path]) -> None:
        self._folder = folder
        self._place = place

    @cached_property
    def repository(self) -> Path:
        return self._place() / "code"

    def keep(self, entries: Iterable[str]) -> None:
        """Keep the code as it is now, as that of some entries; where git fails, keep nothing."""
        with contextlib.suppress(OSError):
            if not self.repository.exists():
                git_output(self._folder, "init", "--quiet", repository=self.repository)
            tree = self.tree_now()
            for entry in entries if tree else ():
                self._note(entry).write_text(tree)

    def tree_now(self) -> str:
        """Return git's name for the code as it is now; ``""`` where git fails."""
        index = self.repository / f"index-{os.getpid()}"  # workers of xdist may ask at one time
        try:
            files = "\0".join(islice(_code_below(self._folder), _KEPT_FILES))
            self._git(index, "update-index", "--add", "-z", "--stdin", given=files)
            return self._git(index, "write-tree").strip()
        finally:
            for file in (index, index.with_name(f"{index.name}.lock")):
                file.unlink(missing_ok=True)

    def _git(self, index: Path, *arguments: str, given: str = "") -> str:
        return git_output(
            self._folder, *arguments, repository=self.repository, index=index, given=given
        )

    def tree_of(self, entry: str) -> str:
        """Return git's name for the code of an entry; ``""`` where it was written elsewhere."""
        try:
            return self._note(entry).read_text()
        except (OSError, ValueError):
            return ""

    def _note(self, entry: str) -> Path:
        name = hashlib.sha256(entry.encode("utf-8", "surrogatepass")).hexdigest()
        return self.repository.with_name(name)


def _code_below(folder: Path) -> Iterator[str]:
    """Yield the files of code and settings below a folder, named from there."""
    for parent, folders, names in islice(os.walk(folder), _WALKED_FOLDERS):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in _NOT_WALKED
            and not Path(parent, name, "pyvenv.cfg").exists()
        ]
        for name in names:
            path = Path(parent, name)
            if not name.endswith(_KEPT_SUFFIXES) or not path.is_file():
                continue
            if path.stat().st_size <= _KEPT_FILE_BYTES:
                yield path.relative_to(folder).as_posix()


@dataclass(frozen=True, slots=True)
class _Then:
    """The code of a baseline.

    Attributes:
        commit: What git calls it.
        is_exact: The baseline was measured with it; else its code may be one that git never saw.
        now: What git calls the code as it is now; ``""`` for what lies in the folder.
        repository: Where it was kept; None for the project's own repository.
        is_cut_off: The history of a shallow clone begins with that commit: the baseline may be of
            an earlier one.
    """

    commit: str
    is_exact: bool
    now: str = ""
    repository: Path | None = None
    is_cut_off: bool = False


class ChangedLines:
    """The lines below a folder that are not as they were when a baseline was stored.

    A failure asks, to name of several equal causes the one that somebody touched. They are held
    against the code that was kept when this machine wrote the baseline, else against the commit of
    the baseline. Without git or a repository no line has changed. Git is asked once for each state
    of the code, and only when somebody wants to know of a line.

    All of it is asked about the entry that a test is compared with.

    A file of settings counts where code names it: ``"small.yaml"``, or ``"small"`` alone, as it is
    written where a suffix is added. Others are read by other programs than the tests.
    """

    def __init__(self, folder: Path, kept: KeptCode | None = None) -> None:
        self._folder = folder
        self._code_store = kept
        self._then_by_entry: dict[StoredEntry, _Then] = {}
        self._changes: dict[_Then, Changes] = {}
        self._names: dict[_Then, dict[str, str]] = defaultdict(dict)
        self._edited: dict[tuple[_Then, str], tuple[Lines, Lines] | None] = {}
        self._renamed: dict[tuple[_Then, str], dict[str, str]] = {}
        self._untracked: dict[str, str] = {}

    def keep(self, entries: Iterable[str]) -> None:
        """Keep the code as that of some entries, which were just written."""
        if self._code_store:
            self._code_store.keep(entries)

    def is_cut_off(self, entry: StoredEntry) -> bool:
        """True where a shallow clone lacks the commit that a baseline is of."""
        return self._code_of(entry).is_cut_off

    def is_same(self, entry: StoredEntry) -> bool:
        """True where the code is the one that was kept for an entry."""
        then = self._code_of(entry)
        return then.commit == then.now

    def changed_at(self, entry: StoredEntry, source: Source) -> CodeLines | None:
        """Return the lines that were changed together with a line; None for one that was not.

        Comments and layout do not count. All lines of a file that git was not told of yet were
        added. So many lines say nothing about one of them: then it stands alone.
        """
        then, file, line = self._code_of(entry), source.file, source.line
        hunks = self._since(then).get(file)
        if hunks is not None:
            hunk = next((h for h in hunks if h.first <= line <= h.last), None)
            if hunk is None or not self._is_edited(then, file, hunk):
                return None
            if hunk.last - hunk.first < _TOGETHER:
                return CodeLines(file, hunk.first, hunk.last)
            return CodeLines(file, line, line)
        if file not in self._untracked:
            options = ("ls-files", "--others", "--exclude-standard", "--", f":(literal){file}")
            self._untracked[file] = git_output(self._folder, *options)
        is_new = not then.now and bool(self._untracked[file])
        return CodeLines(file, line, line) if is_new else None

    def _is_edited(self, then: _Then, file: str, hunk: Hunk) -> bool:
        """False where the statements of a hunk are what they were."""
        if (then, file) not in self._edited:
            texts = dict(self._whole(then, {file: [hunk]})).get(file)
            self._edited[then, file] = edited_lines(*texts) if texts else None
        if (edited := self._edited[then, file]) is None:
            return True
        gone, came = edited
        return not (came.isdisjoint(hunk.is_now) and gone.isdisjoint(hunk.was))

    def places(self, entry: StoredEntry) -> tuple[CodeLines, ...]:
        """Return the first line of code of each change since the baseline was stored.

        Of Python these count whose statements do something else than before. Where statements are
        only gone, the last line is the one before the first.
        """
        then = self._code_of(entry)
        since = {f: [h for h in some if h.is_code] for f, some in self._since(then).items()}
        lines = {f: [(h.first, min(h.first, h.last)) for h in some] for f, some in since.items()}
        for file, (was, now) in self._whole(then, since):
            if statements := changed_statements(was, now):
                gone, came = statements
                lines[file] = [
                    (first := min(came.intersection(h.is_now), default=h.first), min(first, h.last))
                    for h in since[file]
                    if not (came.isdisjoint(h.is_now) and gone.isdisjoint(h.was))
                ]
        return tuple(CodeLines(file, *line) for file, some in lines.items() for line in some)

    def renamed_functions(self, entry: StoredEntry, file: str) -> Mapping[str, str]:
        """Return the names that functions of a file have now, by those they had then."""
        then = self._code_of(entry)
        if (then, file) not in self._renamed:
            hunks = self._since(then).get(file, ())
            texts = dict(self._whole(then, {file: hunks})).get(file, ("", ""))
            self._renamed[then, file] = renamed_functions(*texts)
        return self._renamed[then, file]

    def _whole(
        self, then: _Then, files: Mapping[str, Sequence[Hunk]]
    ) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield files of Python that have hunks, each with its text before and now."""
        code = [file for file, hunks in files.items() if hunks and file.endswith(".py")]
        if not code:
            return
        names = {now: was for was, now in self._names[then].items()}
        literal = [f":(literal){file}" for some in code for file in {some, names.get(some, some)}]
        diff = self._git_diff(then, *_PLAIN, _WHOLE, "--", *literal)
        for part in _STARTS.split(diff)[1:]:
            head, _, body = part.partition("\n@@ ")
            file = head.rpartition(f"\n{_FILE}")[2].strip()
            if file in code:
                lines = body.split("\n")[1:]
                yield file, (_side(lines, " -"), _side(lines, " +"))

    def now_at(self, entry: StoredEntry, source: Source) -> Source:
        """Return where a line is that was at ``source`` when the baseline was stored.

        A line that was edited is where its successor is. A baseline that is not as it was committed
        may be of code that git does not know: its lines stay where they are.
        """
        then = self._code_of(entry)
        since = self._since(then)
        if not then.is_exact:
            return source
        source = replace(source, file=self._names[then].get(source.file, source.file))
        hunks = since.get(source.file)
        if not hunks or not source.line:
            return source
        shift = 0
        for hunk in hunks:
            if source.line in hunk.was:
                line = hunk.first + source.line - hunk.was.start
                return replace(source, line=max(hunk.first, min(line, hunk.last)))
            if source.line < hunk.was.start:
                break
            shift = hunk.last + 1 - hunk.was.stop
        return replace(source, line=source.line + shift)

    def _code_of(self, entry: StoredEntry) -> _Then:
        if entry not in self._then_by_entry:
            self._then_by_entry[entry] = self._kept_code(entry.text) or self._committed(entry.file)
        return self._then_by_entry[entry]

    def _kept_code(self, entry: str) -> _Then | None:
        tree = self._code_store.tree_of(entry) if self._code_store else ""
        if not self._code_store or not tree or not self._tree_now:
            return None
        return _Then(tree, True, self._tree_now, self._code_store.repository)

    @cached_property
    def _tree_now(self) -> str:
        with contextlib.suppress(OSError):
            return self._code_store.tree_now() if self._code_store else ""
        return ""

    def _committed(self, baseline: Path) -> _Then:
        """Return the commit that stored a baseline; the newest of all for one that is not in."""
        log = ("log", "-1", "--format=%H %P", "--", str(baseline))
        commit, _, parents = git_output(self._folder, *log).strip().partition(" ")
        files = (str(baseline), str(origins_path(baseline)))
        status = ("--literal-pathspecs", "status", "--porcelain", "--ignored", "--", *files)
        is_exact = not git_output(self._folder, *status)
        # Where the history is cut off, its first commit seems to have made everything.
        is_cut_off = bool(commit) and not parents and self._is_shallow
        return _Then(commit or "HEAD", is_exact, is_cut_off=is_cut_off)

    @cached_property
    def _is_shallow(self) -> bool:
        return git_output(self._folder, "rev-parse", "--is-shallow-repository").strip() == "true"

    def _since(self, then: _Then) -> Changes:
        """Return the changes by file, named from the folder."""
        if then not in self._changes:
            names = self._git_diff(then, "--name-only", "-z", "--", *_SETTINGS, *_NOT_SETTINGS)
            settings = self._named_in_code(then, list(filter(None, names.split("\0"))))
            literal = (f":(literal){file}" for file in settings)
            self._changes[then] = self._diff(then, self._names[then], "*.py", *literal)
        return self._changes[then]

    def _named_in_code(self, then: _Then, files: Sequence[str]) -> list[str]:
        """Return those files whose names stand in some Python code of the repository."""
        # What code writes to open a file: its name, or the end of a text without its suffix.
        paths = {file: PurePosixPath(file) for file in files}
        spellings = {f: (p.name, f'{p.stem}"', f"{p.stem}'") for f, p in paths.items()}
        patterns = [part for some in spellings.values() for text in some for part in ("-e", text)]
        if not patterns:
            return []
        plain = ("--no-color", "--no-line-number", "--word-regexp", "--fixed-strings")
        tree = (then.now,) if then.now else ()
        options = ("--only-matching", *plain, *patterns, *tree, "--", ":/*.py")
        text = self._git(then, "grep", "-h", *options)
        spelled = set(text.split("\n"))
        return [file for file, some in spellings.items() if not spelled.isdisjoint(some)]

    def _diff(self, then: _Then, names: dict[str, str], *files: str) -> Changes:
        """Return the changes of some files; ``names`` takes the new name of each that has one."""
        by_file: dict[str, list[Hunk]] = defaultdict(list)
        is_known, hunks, old_name = False, by_file[""], ""
        for line in self._git_diff(then, *_PLAIN, "--unified=0", "--", *files).split("\n"):
            if line.startswith("--- "):
                is_known = line != _NO_FILE
            elif line.startswith("+++ "):
                is_known = is_known and line.startswith(_FILE)
                hunks = by_file[line.removeprefix(_FILE).strip()]
            elif line.startswith(_RENAMED[0]):
                old_name = line.removeprefix(_RENAMED[0])
            elif line.startswith(_RENAMED[1]):
                names[old_name] = line.removeprefix(_RENAMED[1])
                by_file[names[old_name]] = []
            elif hunk := _HUNK.match(line):
                was, now = _lines(hunk[1], hunk[2]), _lines(hunk[3], hunk[4])
                hunks.append(Hunk(now.start, now.stop - 1, was))
            elif hunks and is_known and _CODE.match(line):
                hunks[-1] = replace(hunks[-1], is_code=True)
        return by_file

    def _git_diff(self, then: _Then, *arguments: str) -> str:
        plain = ("--no-ext-diff", "--find-renames", "--relative")
        sides = (then.commit, then.now) if then.now else (then.commit,)
        return self._git(then, "diff", *plain, *sides, *arguments)

    def _git(self, then: _Then, *arguments: str) -> str:
        return git_output(self._folder, *arguments, repository=then.repository)


def _side(diff: Iterable[str], signs: str) -> str:
    """Return the text that one side of a diff of a whole file has."""
    return "\n".join(line[1:] for line in diff if line[:1] in signs)


def _lines(first: str, count: str | None) -> range:
    """Return the lines that one side of a hunk names; for none of them git names the one before."""
    start, length = int(first), int(count or 1)
    start += not length
    return range(start, start + length)
