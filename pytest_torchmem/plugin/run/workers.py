"""From the process that ran a test to the one that speaks and writes: with xdist they are two.

What a test measured travels on its report, as plain builtins: it arrives with the test, and stays
when the worker dies later. Without xdist the report takes the same way within one process.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from pytest_torchmem.values.findings import CodeLines
    from pytest_torchmem.values.json_values import Json
    from pytest_torchmem.values.measured import MeasuredTest

PAYLOAD: Final[pytest.StashKey[dict[str, Json]]] = pytest.StashKey()
"""Of a test: its measurements, until its next report takes them along."""

TRACE: Final = "trace"
_ATTRIBUTE: Final = "torchmem"
_GROUP: Final = re.compile(r"@[^\]/:]*$")
# What plugins that repeat tests add to them: a parameter, by the start of its name, and its id.
_REPETITIONS: Final = {
    "__pytest_repeat_step_number": re.compile(r"(^|-)\d+-\d+$"),
    "__flakefinder_": re.compile(r"^\d+(-|$)"),
}


def attach(item: pytest.Item, report: pytest.TestReport) -> None:
    """Send what the test measured along with its report.

    It is taken out of the item, so that one measurement is sent once: reports of subtests are made
    while the body still runs, and a rerun reuses the item.
    """
    payload = item.stash.get(PAYLOAD, None)
    if payload is not None:
        del item.stash[PAYLOAD]
        setattr(report, _ATTRIBUTE, payload)


def has_measured(report: pytest.TestReport) -> bool:
    """Return whether something that was measured came with a report."""
    return hasattr(report, _ATTRIBUTE)


def failure_of(report: pytest.TestReport) -> tuple[CodeLines, str, str] | None:
    """Return the lines that a failure blames, its kind with who holds what, and its first sentence.

    None for any other report.
    """
    payload: Mapping[str, Json] = getattr(report, _ATTRIBUTE, {})
    if not report.failed or payload.get("problem"):
        return None
    from pytest_torchmem.values.findings import CodeLines  # as `unpacked` does

    windows = (*payload.get("windows", ()), *payload.get("unjudged", ()))
    for window in windows:
        if window["sentence"]:
            place = window["place"]
            holders = window["result"]["retained"].get("holders", ())
            holder_texts = [f"{holder['fate']} {holder['by']}" for holder in holders[:1]]
            kind = " ".join((*window["kinds"][:1], *holder_texts))
            return (CodeLines.from_json(place), kind, window["sentence"]) if place else None
    return None


def detach(report: pytest.TestReport) -> bytes:
    """Take what came with a report off it; return it packed, and nothing where none came.

    pytest keeps the reports of all tests until its run is over. So are their results kept, and as
    values they would take ten times as much memory, of the process that is measured.
    """
    payload: Mapping[str, Json] = vars(report).pop(_ATTRIBUTE, {})
    record = {name: value for name, value in payload.items() if name != TRACE}
    return zlib.compress(json.dumps(record).encode(), level=1) if record else b""


def unpacked(packed: bytes) -> MeasuredTest:
    """Return what `detach` has packed."""
    from pytest_torchmem.values.measured import MeasuredTest  # a run that measures nothing does not

    return MeasuredTest.from_json(json.loads(zlib.decompress(packed)))


def trace_with(report: pytest.TestReport) -> bytes:
    """Return the recording that came with a report; nothing where none did."""
    payload: Mapping[str, Json] = getattr(report, _ATTRIBUTE, {})
    return base64.b64decode(payload.get(TRACE, ""))


def plain_nodeid(item: pytest.Item) -> str:
    """Return the node id without the group that xdist appends to it for ``--dist=loadgroup``."""
    grouped = item.get_closest_marker("xdist_group") is not None
    return _without_group(item.nodeid, grouped, item.config)


def baseline_nodeid(item: pytest.Item) -> str:
    """Return the node id that baselines know a test by: all repetitions of a test have one.

    Its repetitions are ``test_a[1-3]`` by pytest-repeat, and ``test_a[0]`` by pytest-flakefinder.
    """
    nodeid = plain_nodeid(item)
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    for start, pattern in _REPETITIONS.items():
        if any(name.startswith(start) for name in parameters):
            nodeid = _without_repetition(nodeid, pattern)
    return nodeid


def possible_baseline_nodeids(nodeid: str) -> frozenset[str]:
    """Return the node ids that baselines may know a test by, whose item is gone."""
    return frozenset({nodeid, *(_without_repetition(nodeid, p) for p in _REPETITIONS.values())})


def _without_repetition(nodeid: str, pattern: re.Pattern[str]) -> str:
    test, bracket, ids = nodeid.removesuffix("]").partition("[")
    other_words = pattern.sub("", ids)
    return f"{test}[{other_words}]" if bracket and other_words else test if bracket else nodeid


def reported_nodeid(report: pytest.TestReport, config: pytest.Config) -> str:
    """Return the node id of a report, as `plain_nodeid` gives it for its test."""
    return _without_group(report.nodeid, "xdist_group" in report.keywords, config)


def _without_group(nodeid: str, grouped: bool, config: pytest.Config) -> str:
    # A worker is started without --dist, and is told of it by an option that xdist sets.
    by_group = getattr(config.option, "dist", "no") == "loadgroup"
    by_group = by_group or getattr(config.option, "loadgroup", False)
    return _GROUP.sub("", nodeid) if grouped and by_group else nodeid


_PARTIAL: Final = "torchmem_partial"


def is_worker(config: pytest.Config) -> bool:
    """True in a process that runs tests for an xdist controller."""
    return hasattr(config, "workerinput")


def controls_workers(config: pytest.Config) -> bool:
    """True in the process of an xdist run that runs no tests itself."""
    return getattr(config.option, "dist", "no") != "no" and not is_worker(config)


def _selects(config: pytest.Config) -> bool:
    """True when the command line picks tests out of their modules, or may stop in the middle."""
    picks = ("keyword", "markexpr", "lf", "deselect", "stepwise", "collectonly")
    if any(getattr(config.option, name, None) for name in picks):
        return True
    return any("::" in str(argument) for argument in config.args)


class Selection:
    """Notices when not every test of a module is run: in a worker, for its controller as well."""

    def __init__(self, config: pytest.Config) -> None:
        self.partial = _selects(config)
        self._output: dict[str, object] = getattr(config, "workeroutput", {})
        self._output[_PARTIAL] = self.partial
        self._collected_count = 0

    def _note(self) -> None:
        self.partial = self._output[_PARTIAL] = True

    @pytest.hookimpl
    def pytest_itemcollected(self) -> None:
        self._collected_count += 1

    @pytest.hookimpl
    def pytest_deselected(self) -> None:
        self._note()

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed and "::" in report.nodeid:  # a class of a module that is there
            self._note()

    @pytest.hookimpl
    def pytest_keyboard_interrupt(self) -> None:
        """Note an early end; ``pytest.exit()`` comes here, too, whatever its exit code."""
        self._note()

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        # A conftest.py may take tests out of the list without saying so.
        if self._collected_count > len(session.items):
            self._note()


def ran_partially(node: object) -> bool:
    """True for a worker that deselected tests, and for one that died before it could say."""
    output: Mapping[str, object] = getattr(node, "workeroutput", {})
    return bool(output.get(_PARTIAL, True))
