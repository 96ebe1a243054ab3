"""Public names for annotations: the types that results, profiles and their parts have."""

from pytest_torchmem.analysis.estimated.estimated_result import Estimate, NodeBytes
from pytest_torchmem.analysis.events.averages import Average
from pytest_torchmem.analysis.events.calls import CallList
from pytest_torchmem.analysis.events.metrics import Event, EventMetrics, MemoryEvent
from pytest_torchmem.analysis.storages.timeline import Timeline
from pytest_torchmem.measuring.block import Measure, Measured
from pytest_torchmem.measuring.events import Events
from pytest_torchmem.measuring.ranks import RankResult
from pytest_torchmem.values.contributors import CategoryBytes, Contributor, Phase, Source
from pytest_torchmem.values.errors import LimitError
from pytest_torchmem.values.picture import Span
from pytest_torchmem.values.results import Counters, Fate, Holder, Peak, Retained
from pytest_torchmem.values.trace import EventKind

__all__ = [
    "Average",
    "CallList",
    "CategoryBytes",
    "Contributor",
    "Counters",
    "Estimate",
    "Event",
    "EventKind",
    "EventMetrics",
    "Events",
    "Fate",
    "Holder",
    "LimitError",
    "Measure",
    "Measured",
    "MemoryEvent",
    "NodeBytes",
    "Peak",
    "Phase",
    "RankResult",
    "Retained",
    "Source",
    "Span",
    "Timeline",
]
