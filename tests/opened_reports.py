"""Reports of a run opened as their readers do, and held against its results file."""

from __future__ import annotations

import json
import pickle
import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from typing import Any

from pytest_torchmem.values.findings import words
from pytest_torchmem.values.units import MiB, format_size

Run = dict[str, Any]
ROWS = """[...document.querySelectorAll("details.test > summary")].map((summary) =>
  [...summary.children].map((child, place) => (place < 4 ? child.firstChild?.textContent
    : [...child.childNodes].map((node) => node.textContent).join("; ")) ?? ""))"""
CELLS = """(rows) => rows.map((row) => [...row.children].map((cell) => cell.innerText.trim()))"""


def results(path: Path) -> Run:
    """Return a results file as JSON, its tests by the part of their id behind the module."""
    run: Run = json.loads(path.read_text(encoding="utf-8"))
    assert (run["kind"], run["format"]) == ("torchmem-results", 1)
    run["tests"] = {test["test"].partition("::")[2]: test for test in run["tests"]}
    return run


def body(test: dict[str, Any]) -> dict[str, Any]:
    """Return the window of a test's body."""
    window: dict[str, Any] = (test["windows"] or test["unjudged"])[0]
    return window


def check_page(browser: Any, path: Path, run: Run, opened: str) -> None:
    """Open a page in a browser: the list, and in one test all figures, are those of the run."""
    trouble: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda r: trouble.append(r.url) if r.url[:5] != "file:" else None)
    test = run["tests"][opened]
    page.goto(f"{path.as_uri()}#test={test['test']}")
    page.wait_for_selector("details.test[open] .timeline canvas")
    rows = {row[1].partition("::")[2]: row for row in page.evaluate(ROWS)}
    assert set(rows) == set(run["tests"])
    for name, shown in run["tests"].items():
        window = body(shown)
        against = "not compared, ended by an exception" if shown["raised"] else window["status"]
        assert rows[name][0] == shown["status"], name
        assert rows[name][3] == format_size(window["result"]["peak"]["total"]), name
        assert parts(rows[name][4]) == parts(against), name
    counts = {chip.rpartition(" ")[0]: int(chip.rpartition(" ")[2]) for chip in chips(page)}
    assert counts == (run["counts"] if len(rows) > 1 else {})
    check_window(page, body(test))
    assert trouble == []
    page.close()


def check_window(page: Any, window: dict[str, Any]) -> None:
    """The readout at the peak, the sentences, the composition and the differences of a body."""
    peak = window["result"]["peak"]
    view = page.locator("details.test[open] .window").first
    readout = view.locator(".readout")
    assert readout.locator(".total").inner_text() == format_size(peak["total"])
    named = {words(c): format_size(size) for c, size in peak["at_peak"].items()}
    told = dict(zip(*[iter(readout.locator("ul").first.inner_text().split("\n"))] * 2, strict=True))
    assert told == named
    shown = view.locator(".sentences li").all_inner_texts()
    assert shown == window["sentences"]
    table = view.get_by_role("region", name="composition").locator("tbody tr")
    composition = {row[0]: row for row in table.evaluate_all(CELLS)}
    assert {c: composition[c][1] for c in named} == named
    assert composition["total"][1] == format_size(peak["total"])
    if baseline := window["baseline"]:
        assert composition["total"][3] == format_size(baseline["total"])
        for category, size in baseline["peaks"].items():
            assert composition[words(category)][3] == format_size(size)


def parts(status: str) -> set[str]:
    """Return the parts of what is said of a test's limits and its baseline, in any order."""
    return set(re.split("[;,] ", status))


def chips(page: Any) -> list[str]:
    """Return the statuses above a list, each with how many tests have it."""
    told: list[str] = page.locator(".tools .chips button").all_inner_texts()
    return told


def differences(browser: Any, path: Path, test: str) -> list[list[str]]:
    """Return the rows of the table of differences that a page shows for a test."""
    page = browser.new_page()
    page.goto(f"{path.as_uri()}#test={test}")
    region = page.locator("details.test[open]").get_by_role("region", name="differences")
    rows: list[list[str]] = region.first.locator("tbody tr").evaluate_all(CELLS)
    page.close()
    return rows


def check_markdown(path: Path, run: Run) -> None:
    """Each test is a row with the peak of the run, and each failed one has its sentences."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"^\| (.+?) \| `(.+?)` \| (.*?) \| (.*?) \| .*\|$", text, re.MULTILINE)
    rows = {name.partition("::")[2]: (status, peak, told) for status, name, peak, told in found}
    headline = ", ".join(f"{count} {status}" for status, count in run["counts"].items())
    assert f"### Memory: {headline}\n" in text
    assert set(rows) == set(run["tests"])
    for name, test in run["tests"].items():
        assert rows[name][1] == format_size(body(test)["result"]["peak"]["total"])
        assert rows[name][0].endswith(test["status"])
        assert test["raised"] or rows[name][2].startswith(body(test)["status"])
        failed = test["outcome"] == "failed"
        assert ("failed" in rows[name][0]) == failed
        assert (f"<summary><code>{test['test']}</code></summary>" in text) == failed
        for sentence in body(test)["sentences"]:
            assert sentence in re.sub(r"\\(.)", r"\1", text)


def check_terminal(told: str, run: Run) -> None:
    """The table that closes a run has a row for each test, and counts what the run counts."""
    lines = told.splitlines()
    for name, test in run["tests"].items():
        (row,) = (line for line in lines if line.startswith(f"{test['test']} "))
        assert f"  {format_size(body(test)['result']['peak']['total'])}  " in row, name
        assert row.endswith(f"  {body(test)['status']}"), name
    (closing,) = (line for line in lines if line.startswith("memory: "))
    headline = ", ".join(f"{count} {status}" for status, count in run["counts"].items())
    assert re.sub(r" \(.*?\)", "", closing) == f"memory: {headline}"


def check_svg(path: Path, window: dict[str, Any]) -> None:
    """One outline for each category; the peak, the baseline and limits where they belong."""
    root = ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    outlines = {
        polygon.findtext(f"{space}title"): [
            float(point.split(",")[1]) for point in polygon.get("points", "").split()
        ]
        for polygon in root.iter(f"{space}polygon")
    }
    peak = window["result"]["peak"]
    assert set(outlines) == {words(category) for category in peak["by_category"]}
    texts = {node.text for node in root.iter(f"{space}text")}
    assert f"peak {format_size(peak['total'])}" in texts
    heights = [y for ys in outlines.values() for y in ys]
    top, bottom = min(heights), max(heights)
    held = {"baseline": window["baseline_bytes"], "limit": window["limits"].get("total", 0)}
    near = {name: size for name, size in held.items() if 0 < size <= 2 * peak["total"]}
    assert texts >= {f"{name} {format_size(size)}" for name, size in near.items()}
    lines = [line for line in root.iter(f"{space}line") if line.get("stroke-dasharray")]
    shares = sorted((bottom - float(line.get("y1", "0"))) / (bottom - top) for line in lines)
    expected = sorted(size / peak["total"] for size in near.values())
    assert all(abs(a - b) < 0.01 for a, b in zip(shares, expected, strict=True))


def check_chrome_trace(path: Path, window: dict[str, Any]) -> None:
    """Every counter reaches the peak of its category, beside slices that nest in each thread."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    tops: dict[str, int] = defaultdict(int)
    slices: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            tops[event["name"]] = max(tops[event["name"]], event["args"]["bytes"])
        elif event["ph"] == "X":
            slices[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    peak = window["result"]["peak"]
    assert tops.pop("memory footprint") == peak["total"]
    assert tops == {f"memory {c}": size for c, size in peak["by_category"].items()}
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert "aten::addmm" in names
    for thread in slices.values():
        ends: list[float] = []
        for begin, end in sorted(thread, key=lambda pair: (pair[0], -pair[1])):
            while ends and ends[-1] <= begin + 1e-6:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-3
            ends.append(end)


def check_snapshot(path: Path, window: dict[str, Any]) -> None:
    """Replaying the blocks of a memory_viz snapshot reaches the peak."""
    held: dict[int, int] = {}
    top = 0
    for entry in pickle.loads(path.read_bytes())["device_traces"][0]:
        if entry["action"] == "alloc":
            held[entry["addr"]] = entry["size"]
        else:
            held.pop(entry["addr"])
        top = max(top, sum(held.values()))
    assert top == window["result"]["peak"]["total"] >= MiB
