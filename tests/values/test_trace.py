"""Columns of a trace: the codes of enums, and the texts that numbers stand for."""

import numpy as np

from pytest_torchmem.values.trace import Ownership, Trace, are_among


def test_codes_are_among_members():
    codes = np.array([Ownership.LIVE, Ownership.SAVED, Ownership.LEAF, Ownership.SAVED], np.uint8)
    found = are_among(codes, (Ownership.SAVED, Ownership.RETURNED))
    assert found.tolist() == [False, True, False, True]
    assert are_among(codes[:0], ()).tolist() == []


def test_each_text_is_looked_at_once_and_no_text_stands_for_minus_one():
    trace, seen = Trace(strings=("mm", "unused", "last")), list[str]()

    def wanted(text: str) -> bool:
        seen.append(text)
        return text != "mm"

    found = trace.texts_are(np.array([2, -1, 0, 2], np.int32), wanted)
    assert found.tolist() == [True, False, False, True]
    assert seen == ["mm", "last"]
    assert trace.texts_are(np.array([-1], np.int32), lambda _: True).tolist() == [False]
