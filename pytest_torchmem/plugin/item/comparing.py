"""What a measurement is compared with under the options of a run, and what it is told without."""

from __future__ import annotations

from pathlib import Path

from pytest_torchmem.analysis.judge.environments import Environment
from pytest_torchmem.plugin.options.settings import Settings
from pytest_torchmem.store.baseline_file import EntryError
from pytest_torchmem.store.baselines import BaselineStore, Reference
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.findings import Finding, FindingKind


def find_reference(
    store: BaselineStore, settings: Settings, module: Path, environment: Environment, key: str
) -> Reference | None:
    """Return what to compare an entry with; None where it counts as new. Raises `BaselineError`."""
    stores_new = Change.NEW in settings.accepted
    try:
        reference = store.reference(module, environment, key)
        if reference and stores_new:
            # Contributors are read late. Damage to them has to show before the entry is trusted.
            len(reference.entry.live), len(reference.entry.retained_live)
    except EntryError:
        if stores_new:
            return None  # what is right, the new measurement says
        raise
    return reference


def missing_baseline(settings: Settings, key: str, shown: str, near: str) -> tuple[Finding, ...]:
    """Return a finding where an entry is required and neither there nor about to be stored."""
    stores_new = Change.NEW in settings.accepted or settings.follow_renames
    if not settings.require_baseline or stores_new:
        return ()
    other = f"; nearest is {near}, --torchmem-baseline-from={near} accepts it" if near else ""
    text = f"there is no baseline for {key} in {shown}{other}"
    return (Finding(FindingKind.NO_BASELINE, "total", text),)
