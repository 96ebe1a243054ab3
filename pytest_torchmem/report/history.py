"""The baselines' history: a table of all that was accepted, or a plot of each test.

The page is one file without scripts, with a plot and a table for each test.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from importlib import resources
from typing import Final

from pytest_torchmem.report.page.svg import escaped
from pytest_torchmem.report.text.tables import aligned
from pytest_torchmem.store.acceptances import Acceptance
from pytest_torchmem.values.baseline import TOTAL, Change
from pytest_torchmem.values.units import format_change, format_share, format_size, one_line

ROWS: Final = 30
"""The latest changes that the table of all tests shows."""

_BAR: Final = 30
_RELEASE: Final = re.compile(r"-torch([a-z0-9.]+)")


def by_test(history: Sequence[Acceptance]) -> dict[tuple[str, str], list[Acceptance]]:
    """Return the changes of each test in each environment, by both."""
    acceptances: dict[tuple[str, str], list[Acceptance]] = defaultdict(list)
    for item in history:
        acceptances[item.test, item.environment].append(item)
    return acceptances


def change_text(item: Acceptance) -> str:
    """Return a change in a few words: ``new``, ``+30 %``, ``activation +30 %``, ``removed``."""
    if item.change is Change.NEW:
        return "new"
    if item.change is Change.UNUSED or item.changed is None:
        return "removed"
    changed_number = item.changed
    by_bytes = changed_number.after_bytes - changed_number.before_bytes
    by = format_share(by_bytes, changed_number.before_bytes) or format_change(by_bytes)
    return by if changed_number.key == TOTAL else f"{changed_number.name} {by}"


def history_table(history: Sequence[Acceptance]) -> list[str]:
    """Return a line for each of the latest changes, the newest first."""
    latest = list(reversed(history))[:ROWS]
    rows = [
        [i.date, i.author, change_text(i), _size(i), i.test, i.environment, i.commit, i.subject]
        for i in latest
    ]
    headers = ["date", "who", "change", "peak", "test", "environment", "commit", ""]
    lines = aligned(rows, headers, "llrr")
    if len(history) > ROWS:
        lines.append(f"... and {len(history) - ROWS} older changes; name a test to see all of its")
    return lines


def history_plots(history: Sequence[Acceptance], plain: bool) -> list[str]:
    """Return a block for each test and environment: a bar for each size that was accepted."""
    lines: list[str] = []
    for (test, environment), items in by_test(history).items():
        largest = max((i.after_bytes for i in items), default=0) or 1
        rows = []
        for i in items:
            bar = ("#" if plain else "█") * round(_BAR * i.after_bytes / largest)
            rows.append([i.date, _size(i), bar, change_text(i), i.author, i.commit, i.subject])
        headers = ["date", "peak", "", "change", "who", "commit", ""]
        title = one_line(f"{test} on {environment}")
        lines += ["", title, *aligned(rows, headers, "lrlr")]
    return lines[1:]


def _size(item: Acceptance) -> str:
    return "-" if item.change is Change.UNUSED else format_size(item.after_bytes)


_WIDTH: Final = 360
_HEIGHT: Final = 96
_LEFT: Final = 62
_STYLE: Final = """
main { max-width: 60rem; margin: 0 auto; padding: 1rem; }
section { border-top: 1px solid var(--edge); padding: .5rem 0 1rem; }
h2 { font-size: 1rem; overflow-wrap: anywhere; }
h2 small { font-weight: normal; color: var(--faint); }
table { border-collapse: collapse; font-size: .875rem; width: 100%; }
td, th { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top; white-space: nowrap; }
th { font-weight: normal; color: var(--faint); }
td.number, th.number { text-align: right; min-width: 5rem; font-variant-numeric: tabular-nums; }
td.code { font-family: ui-monospace, monospace; }
td:last-child, th:last-child { width: 99%; white-space: normal; overflow-wrap: anywhere; }
svg { width: 22.5rem; max-width: 100%; height: auto; display: block; }
svg path { fill: none; stroke: var(--accent); stroke-width: 2; }
svg path.release { stroke: var(--edge); stroke-width: 1; stroke-dasharray: 3 3; }
svg circle { fill: var(--accent); }
svg text { fill: var(--faint); font: 11px system-ui, sans-serif; }
@media (max-width: 36rem) {
  thead { display: none; }
  tr { display: flex; flex-wrap: wrap; border-bottom: 1px solid var(--edge); }
  td { border: 0; }
  td.number, th.number { min-width: 0; }
  td:last-child { width: 100%; }
}
@media print { * { print-color-adjust: exact; } section { break-inside: avoid; } }
"""


def history_page(history: Sequence[Acceptance], commits: str = "") -> str:
    """Return the page of a history, the test whose peak changed by most first.

    ``commits`` is the address of commits on the code host, to which their names are added.
    """
    assets = resources.files("pytest_torchmem.report").joinpath("assets")
    css = assets.joinpath("page.css").read_text("utf-8")
    sections = [
        f"<section><h2>{escaped(test)} <small>on {escaped(machine)}</small></h2>\n"
        f"{_plot(items)}"
        "<table><thead><tr><th>date<th class=number>peak<th class=number>change<th>torch<th>who"
        f"<th>commit<th></thead>\n{''.join(_row(item, commits) for item in reversed(items))}"
        "</table></section>\n"
        for (test, machine), items in sorted(_over_releases(history).items(), key=_by_change)
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>History of baselines</title>\n<style>{css}{_STYLE}</style></head>\n"
        f"<body><main><h1>History of baselines</h1>\n{''.join(sections)}</main></body></html>\n"
    )


def _over_releases(history: Sequence[Acceptance]) -> dict[tuple[str, str], list[Acceptance]]:
    """Return the changes of each test on each machine, whatever release of torch it had."""
    acceptances: dict[tuple[str, str], list[Acceptance]] = defaultdict(list)
    for item in history:
        acceptances[item.test, _RELEASE.sub("", item.environment)].append(item)
    return acceptances


def _release(item: Acceptance) -> str:
    release = _RELEASE.search(item.environment)
    return release[1] if release else ""


def _by_change(pair: tuple[tuple[str, str], Sequence[Acceptance]]) -> tuple[float, str, str]:
    """Sort by the share by which the peak changed over all, the largest first; then by name."""
    name, items = pair
    sizes = [item.after_bytes for item in items if item.change is not Change.UNUSED]
    first, last = (sizes[0], sizes[-1]) if sizes else (0, 0)
    return -abs(last - first) / max(first, 1), *name


def _row(item: Acceptance, commits: str) -> str:
    size = "" if item.change is Change.UNUSED else format_size(item.after_bytes)
    numbers = "".join(f"<td class=number>{escaped(t)}" for t in (size, change_text(item)))
    commit = escaped(item.commit)
    link = f'<a href="{escaped(commits)}{commit}">{commit}</a>' if commits else commit
    return (
        f"<tr><td>{escaped(item.date)}{numbers}<td>{escaped(_release(item))}"
        f"<td>{escaped(item.author)}"
        f"<td class=code>{link}<td>{escaped(item.subject)}</tr>\n"
    )


def _plot(items: Sequence[Acceptance]) -> str:
    """Return a line that steps from one accepted size to the next, from zero to the largest.

    It ends where the entry was removed. Each release of torch has a line of its own, and its name
    where that begins. One size alone needs no plot.
    """
    sizes = [item.after_bytes for item in items if item.change is not Change.UNUSED]
    if len(sizes) < 2:
        return ""
    largest = max(sizes) or 1
    step = (_WIDTH - _LEFT - 8) / len(items)
    lines, begins = "", ""
    for release in dict.fromkeys(map(_release, items)):
        mine = [(place, item) for place, item in enumerate(items) if _release(item) == release]
        lines += _line(mine, step, largest)
        if release:
            x = _LEFT + mine[0][0] * step
            begins += f'<path class="release" d="M{x:.1f} 12V{_HEIGHT - 24}"/>'
            begins += f'<text x="{x + 3:.1f}" y="10">torch {escaped(release)}</text>'
    first, last = escaped(items[0].date), escaped(items[-1].date)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="accepted peaks over time">'
        f'<text x="0" y="18">{format_size(largest)}</text><text x="0" y="{_HEIGHT - 20}">0 B</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 4}">{first}</text>'
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 4}" text-anchor="end">{last}</text>'
        f"{begins}{lines}</svg>\n"
    )


def _line(items: Sequence[tuple[int, Acceptance]], step: float, largest: int) -> str:
    """Return the line of some changes, each with its place, and a dot for each."""
    path, dots, drawn = "", "", False
    ends = [place for place, _ in items[1:]] + [items[-1][0] + 1]
    for (place, item), end in zip(items, ends, strict=True):
        if item.change is Change.UNUSED:
            drawn = False
            continue
        x = _LEFT + place * step
        y = 14 + (_HEIGHT - 38) * (1 - item.after_bytes / largest)
        path += f"V{y:.1f}" if drawn else f"M{x:.1f} {y:.1f}"
        path += f"H{_LEFT + end * step:.1f}"
        drawn = True
        text = f"{item.date}: {format_size(item.after_bytes)}, {item.author}"
        dots += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escaped(text)}</title></circle>'
    return f'<path d="{path}"/>{dots}'
