"""Context managers without a generator."""

from __future__ import annotations

import sys

import pytest

from pytest_torchmem.contexts import Around


def test_the_end_gets_what_the_beginning_returned_also_after_an_exception() -> None:
    ended: list[str] = []
    with pytest.raises(ZeroDivisionError), Around(lambda: "begun", ended.append) as value:
        assert value == "begun"
        assert not ended
        1 / 0  # noqa: B018
    assert ended == ["begun"]


def test_no_call_of_c_stands_between_the_block_and_its_ends() -> None:
    depth, depths = 0, []

    def trace(frame: object, event: str, _: object) -> None:
        nonlocal depth
        depth += {"c_call": 1, "c_return": -1, "c_exception": -1}.get(event, 0)

    around = Around(lambda: depths.append(depth), lambda _: depths.append(depth))
    sys.setprofile(trace)
    try:
        with around:
            pass
    finally:
        sys.setprofile(None)
    assert [d - depths[0] for d in depths] == [0, 0]
    assert depths[0] == 1  # the append itself
