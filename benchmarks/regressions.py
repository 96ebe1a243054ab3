"""Regressions in real model code: does the first line of the failure name what was edited?

    python -m benchmarks regressions                     # all, as a Markdown table
    python -m benchmarks regressions foreach sort -v     # some, with what was said
    python -m benchmarks regressions --gpu H100          # on a simulated GPU

A project holds one module and one test for each program of `benchmarks.regression_programs`. Its
baselines are stored before the edit, and everything is committed as a user's project would be. Then
all edits are made, and the project's tests run once. A program of several files has a project of
its own. Of each failure only the first line is read. It tells all that one line made. It is right
in a column if it names the line, category and operator of one of the answers that were written
down with the edit, or says that the line has other operators; and in bytes if the line made at
least half of those of the answer more (what the edit took away there counts, too) and the numbers
of the sentence add up to the growth. A row is right if
one answer has all four. *holder* says whether
the message names who keeps what was retained, and *edit* whether the first line names a line that
was edited, which may be another one than that which makes the memory.

A false alarm is a failure of a test whose memory did not change: the project as it was stored, with
its tests in reverse, with every line moved down, and with edits that rename and rearrange.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from benchmarks.regression_programs import HARMLESS, REGRESSIONS
from benchmarks.regression_programs.case import ANY, Blame, Harmless, Regression

GOAL: Final = 0.95

_UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE: Final = re.compile(r"(\d[\d.]*) (B|KiB|MiB|GiB)\b")
_CATEGORY: Final = re.compile(
    r"\b(parameter|gradient|optimizer state|input|autograd detail|activation|temporary|buffer"
    r"|workspace|unknown)s?\b"
)
_OPERATOR: Final = re.compile(r"\bfrom ([\w:.|]+)")
_ELSEWHERE: Final = re.compile(
    r"(?:, (?P<more>[\d.]+ \w+) more)?(?:(?:,| and) (?P<less>[\d.]+ \w+) less)? elsewhere"
)
_EXCESS: Final = re.compile(r"\+(\d[\d.]* (?:B|KiB|MiB|GiB))\b[^:]*\bover the baseline")
_PLACES: Final = re.compile(r"\b(\w+\.py):(\d+)(?:-(\d+))?")
_OTHERS: Final = re.compile(r"\band others (at|in)\b")
_EDIT: Final = re.compile(r"([\w.-]+\.\w+):(\d+)(?:-(\d+))?\b")
_CHANGED: Final = re.compile(r"; (?:changed since|also changed): ")
_CAUSE: Final = re.compile(r"\bbaseline of [^:]*: (.*)$")
_ON_THE_GPU: Final = 'import torch\n\ntorch.set_default_device("cuda")\n'
_MOVED: Final = "# One.\n# Two.\n# Three.\n\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a first line says of the line that it blames; "" and 0 for what it does not say.

    Attributes:
        categories: Those that the line's bytes are of.
        operator: The one that made most of them.
        has_others: The sentence says that the line has other operators, too.
        lines: The lines of ``file`` that it blames.
        size_bytes: What they made, as far as it is shown.
        adds_up: What they made and what is elsewhere are the growth, as far as it is shown.
    """

    categories: frozenset[str]
    operator: str
    has_others: bool
    file: str
    lines: range
    size_bytes: float
    adds_up: bool

    @classmethod
    def read(cls, sentence: str) -> Answer:
        found = _CAUSE.search(sentence)
        cause = _CHANGED.split(found[1])[0] if found else ""
        elsewhere = _ELSEWHERE.search(cause)
        cause = cause[: elsewhere.start()] if elsewhere else cause
        named = _CATEGORY.findall(cause) or _CATEGORY.findall(sentence.partition(" peaked")[0])
        operator, place, size = (p.search(cause) for p in (_OPERATOR, _PLACES, _SIZE))
        first, last = (int(place[2]), int(place[3] or place[2])) if place else (0, -1)
        size_bytes = _bytes(size[0]) if size else 0
        excess = _EXCESS.search(sentence)
        more, less = (elsewhere[n] or "0 B" if elsewhere else "0 B" for n in ("more", "less"))
        shown = [excess[1], size[0], more, less] if excess and size else []
        signed = zip((1, -1, -1, 1), map(_bytes, shown), strict=bool(shown))
        apart = abs(sum(sign * amount for sign, amount in signed))
        # Each is rounded to a tenth of its unit, and a two hundredth of the growth has no word.
        allowed = 1 + sum(_rounding(text) for text in shown) + sum(map(_bytes, shown[:1])) / 100
        return cls(
            frozenset(named),
            operator[1] if operator else "",
            bool(_OTHERS.search(cause)),
            place[1] if place else "",
            range(first, last + 1),
            size_bytes,
            bool(size_bytes and shown) and apart <= allowed,
        )


def _bytes(text: str) -> float:
    number, unit = text.split(" ")
    return float(number) * _UNITS[unit]


def _rounding(text: str) -> float:
    unit = text.split(" ")[1]
    return 0.05 * _UNITS[unit] if unit != "B" else 0.0


@dataclass(frozen=True, slots=True)
class Score:
    """What is right in one message; ``holder`` is None where nobody keeps anything.

    ``edit`` is True where the first line names an edited line.
    """

    regression: Regression
    text: str
    category: bool
    operator: bool
    line: bool
    size: bool
    holder: bool | None
    edit: bool

    @property
    def sentence(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def columns(self) -> tuple[bool, ...]:
        return self.category, self.operator, self.line, self.size


def score(regression: Regression, text: str) -> Score:
    """Hold a failure's text against the answers of its regression; the best one counts."""
    answer = Answer.read(text.partition("\n")[0])
    graded = [_grade(regression, blame, answer) for blame in regression.blames]
    holder = regression.holder in text if regression.holder else None
    places = {
        (file, line)
        for file, first, last in _EDIT.findall(text.partition("\n")[0])
        for line in range(int(first), int(last or first) + 1)
    }
    is_named = not regression.edited_places.isdisjoint(places)
    return Score(regression, text, *max(graded, key=sum), holder, is_named)


def _grade(regression: Regression, blame: Blame, answer: Answer) -> tuple[bool, bool, bool, bool]:
    places = {(answer.file, line) for line in answer.lines}
    at_line = not regression.blamed_places.isdisjoint(places)
    is_diffuse = blame.operators == ANY
    return (
        not answer.categories.isdisjoint(blame.category.split("|")),
        is_diffuse or answer.has_others or answer.operator in blame.operators.split("|"),
        at_line or (is_diffuse and not answer.file),
        # What the line made before the edit counts against what it makes now.
        answer.adds_up and 2.05 * answer.size_bytes >= blame.size_bytes,
    )


class Project:
    """A folder with a module and a test for each program."""

    def __init__(self, folder: Path, gpu: str = "") -> None:
        self.folder = folder
        self._device = ["-otorchmem_device=cuda", f"--torchmem-simulate={gpu}"]
        if not gpu:
            self._device = ["-otorchmem_device=cpu"]
        folder.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\n")
        if gpu:
            (folder / "conftest.py").write_text(_ON_THE_GPU)
        self._git("init", "--quiet")

    def write(self, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            (self.folder / name).write_text(text, encoding="utf-8")

    def commit(self) -> None:
        who = ("-c", "user.name=someone", "-c", "user.email=someone@example.com")
        self._git("add", "--all")
        self._git(*who, "commit", "--quiet", "--message", "before")

    def _git(self, *arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=self.folder, check=True, capture_output=True)

    def run(self, names: Sequence[str], *options: str) -> dict[str, str]:
        """Run some programs' tests in a process of their own; return the texts of failures."""
        report = self.folder.with_suffix(".xml")
        tests = [f"test_{name}.py" for name in names]
        ours = ("-p", "pytest_torchmem.plugin.hooks", *self._device)
        quiet = ("-q", "-p", "no:cacheprovider", f"--junitxml={report}", *ours)
        # Python tells an edit of the same second and length apart from nothing.
        alone = {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *quiet, *options, *tests],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **alone},
            capture_output=True,
            text=True,
            check=False,
        )
        cases = list(ElementTree.parse(report).iter("testcase"))
        if len(cases) != len(names):
            raise RuntimeError(f"{len(cases)} of {len(names)} tests ran:\n{done.stdout[-4000:]}")
        problems = (
            (case.get("name", ""), case.findall("failure") + case.findall("error"))
            for case in cases
        )
        return {
            name.removeprefix("test_"): found[0].text or "" for name, found in problems if found
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all runs of a project said.

    Attributes:
        scores: Of each regression.
        alarms: Run and first line of each failure of a test whose memory did not change.
        quiet_count: How many tests ran whose memory did not change.
    """

    scores: tuple[Score, ...]
    alarms: tuple[tuple[str, str], ...]
    quiet_count: int

    @property
    def right_count(self) -> int:
        return sum(all(score.columns) for score in self.scores)


def run_all(
    regressions: Sequence[Regression], folder: Path, false_alarms: bool = True, gpu: str = ""
) -> Outcome:
    """Store baselines, look for false alarms, make all edits and score what the failures say.

    With a ``gpu`` everything is made on that one, which is simulated.
    """
    together = [r for r in regressions if not r.files]
    found = _run(together, HARMLESS if false_alarms else (), folder, gpu)
    scores = {each.regression.name: each for each in found.scores}
    for alone in (r for r in regressions if r.files):
        (scores[alone.name],) = _run([alone], (), folder.with_name(alone.name), gpu).scores
    return replace(found, scores=tuple(scores[r.name] for r in regressions if r.name in scores))


def _run(
    regressions: Sequence[Regression], edits: Sequence[Harmless], folder: Path, gpu: str
) -> Outcome:
    """Run one project; with harmless edits, look for false alarms in all of it."""
    if not regressions:
        return Outcome((), (), 0)
    project = Project(folder, gpu)
    names = [r.name for r in regressions] + [e.name for e in edits]
    before = {file: text for r in regressions for file, text in r.before.items()}
    before |= {f"{e.name}.py": e.before for e in edits}
    tests = {f"test_{r.name}.py": r.test for r in regressions}
    tests |= {f"test_{e.name}.py": e.test for e in edits}
    project.write(before | tests)
    if failures := project.run(names, "--torchmem-update-baseline"):
        if not gpu:
            raise RuntimeError(f"before any edit: {failures}")
        # Some need what a GPU does not compute, or make tensors where no default device holds.
        print(f"not run on {gpu}: {', '.join(failures)}", file=sys.stderr)
        regressions = [r for r in regressions if r.name not in failures]
    project.commit()
    alarms: list[tuple[str, str]] = []
    quiet_count = 0

    def quietly(what: str, some: Sequence[str]) -> None:
        nonlocal quiet_count
        quiet_count += len(some)
        failures = project.run(some)
        alarms.extend((f"{what}: {n}", t.partition("\n")[0]) for n, t in failures.items())

    if edits:
        quietly("as it was", names)
        quietly("in reverse", names[::-1])
        project.write({file: _MOVED + text for file, text in (before | tests).items()})
        quietly("lines moved", names)
        project.write(before | tests | {f"{e.name}.py": e.after for e in edits})
        quietly("edited", [e.name for e in edits])
    project.write({file: text for r in regressions for file, text in r.after.items()})
    failures = project.run([r.name for r in regressions])
    scores = tuple(score(r, failures.get(r.name, "")) for r in regressions)
    return Outcome(scores, tuple(alarms), quiet_count)


def table(outcome: Outcome, gpu: str = "") -> Iterable[str]:
    """Return the result as Markdown."""
    count = len(outcome.scores)
    yield "# Regressions, and what the first line of their failures says\n"
    where, option = (f", simulated {gpu}", f" --gpu {gpu}") if gpu else ("", "")
    yield (
        f"torch {torch.__version__}{where}, {datetime.date.today()}. "
        f"Made by `python -m benchmarks regressions{option}`, which says how it is scored.\n"
    )
    right = _share(outcome.right_count, count)
    yield f"**{right} are right in all four columns**; goal {GOAL:.0%}.\n"
    for place, column in enumerate(("category", "operator", "line", "bytes")):
        yield f"- {column}: {_share(sum(s.columns[place] for s in outcome.scores), count)}"
    held = [s.holder for s in outcome.scores if s.holder is not None]
    yield f"- holder, where something is kept: {_share(sum(held), len(held))}"
    yield f"- an edited line is named: {_share(sum(s.edit for s in outcome.scores), count)}"
    alarms = f"{len(outcome.alarms)} of {outcome.quiet_count}"
    yield f"- false alarms: {alarms} tests without a change\n"
    yield "| regression | category | operator | line | bytes | holder | edit | first line |"
    yield "|---|:-:|:-:|:-:|:-:|:-:|:-:|---|"
    for each in outcome.scores:
        marks = ["yes" if right else "**no**" for right in each.columns]
        marks.append("" if each.holder is None else "yes" if each.holder else "**no**")
        marks.append("yes" if each.edit else "**no**")
        said = each.sentence.replace("|", "\\|").replace("*", "\\*") or "(passed)"
        yield f"| {each.regression.name} | {' | '.join(marks)} | {said} |"
    for what, sentence in outcome.alarms:
        yield f"\nFalse alarm, {what}: {sentence}"


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "none"


def details(scores: Iterable[Score]) -> Iterable[str]:
    """Return what was said, and what would have been right, of each that is not."""
    for each in scores:
        if all(each.columns) and each.holder is not False:
            continue
        yield f"--- {each.regression.name}: {each.columns}, holder {each.holder}"
        yield each.text or "(passed)"
        yield f"right, at lines {sorted(each.regression.blamed_places)}:"
        yield from (f"    {blame}" for blame in each.regression.blames)
        yield f"    held by {each.regression.holder!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="some regressions; all without it")
    parser.add_argument("-v", "--verbose", action="store_true", help="show whole messages")
    parser.add_argument("--no-alarms", action="store_true", help="look for no false alarms")
    parser.add_argument("--gpu", default="", help="make them on a simulated GPU: H100")
    parser.add_argument("-o", "--output", type=Path, help="write the table to a file")
    arguments = parser.parse_args()
    chosen = [r for r in REGRESSIONS if not arguments.names or r.name in arguments.names]
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_all(
            chosen,
            Path(folder) / "project",
            not (arguments.names or arguments.no_alarms),
            arguments.gpu,
        )
    text = "\n".join(table(outcome, arguments.gpu)) + "\n"
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    print(text)
    if arguments.verbose:
        print("\n".join(details(outcome.scores)))
