"""From the process that ran a test to the one that speaks and writes.

What a test measured travels on its report, as plain builtins: it arrives with the test, and stays
when the worker dies later. Without xdist the report takes the same way within one process.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Final

import pytest

from pytest_torchmem.plugin.stash import PAYLOAD
from pytest_torchmem.values.json_values import Json
from pytest_torchmem.values.measured import MeasuredTest

TRACE: Final = "trace"
_ATTRIBUTE: Final = "torchmem"
_GROUP: Final = re.compile(r"@[^\]/:]*$")


def attach(item: pytest.Item, report: pytest.TestReport) -> None:
    """Send what the test measured along with its report.

    It is taken out of the item, so that one measurement is sent once: reports of subtests are made
    while the body still runs, and a rerun reuses the item.
    """
    payload = item.stash.get(PAYLOAD, None)
    if payload is not None:
        del item.stash[PAYLOAD]
        setattr(report, _ATTRIBUTE, payload)


def detach(report: pytest.TestReport) -> MeasuredTest | None:
    """Return what came with a report, or None where nothing was measured."""
    payload: Mapping[str, Json] | None = getattr(report, _ATTRIBUTE, None)
    return None if payload is None else MeasuredTest.from_json(payload)


def trace_with(report: pytest.TestReport) -> bytes:
    """Return the recording that came with a report; nothing where none did."""
    payload: Mapping[str, Json] = getattr(report, _ATTRIBUTE, {})
    return base64.b64decode(payload.get(TRACE, ""))


def plain_nodeid(item: pytest.Item) -> str:
    """Return the node id without the group that xdist appends to it for ``--dist=loadgroup``."""
    grouped = item.get_closest_marker("xdist_group") is not None
    return _without_group(item.nodeid, grouped, item.config)


def reported_nodeid(report: pytest.TestReport, config: pytest.Config) -> str:
    """Return the node id of a report, as `plain_nodeid` gives it for its test."""
    return _without_group(report.nodeid, "xdist_group" in report.keywords, config)


def _without_group(nodeid: str, grouped: bool, config: pytest.Config) -> str:
    # A worker is started without --dist, and is told of it by an option that xdist sets.
    by_group = getattr(config.option, "dist", "no") == "loadgroup"
    by_group = by_group or getattr(config.option, "loadgroup", False)
    return _GROUP.sub("", nodeid) if grouped and by_group else nodeid
