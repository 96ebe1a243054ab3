"""Bytes by category over time: the one type for measured and estimated memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pytest_torchmem.values.contributors import Category, CategoryBytes

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """How many bytes of each category were live, on one device, after each change.

    Attributes:
        times_ns: int64, shape (T,), not decreasing; the moment of each change. Estimated timelines
            count graph nodes instead.
        sizes: int64, shape (T, C); row t holds the bytes live after change t, one column for each
            `Category` in the enum's order.
        estimated: True when the numbers were not measured.
    """

    times_ns: NDArray[np.int64]
    sizes: NDArray[np.int64]
    estimated: bool = False

    @property
    def total(self) -> NDArray[np.int64]:
        """The footprint: int64, shape (T,)."""
        total: NDArray[np.int64] = self.sizes.sum(axis=1)
        return total

    def of(self, category: Category) -> NDArray[np.int64]:
        """Bytes of one category: int64, shape (T,)."""
        return self.sizes[:, category.column]

    def at(self, row: int) -> CategoryBytes:
        """The composition after change ``row``."""
        return CategoryBytes(*(int(amount) for amount in self.sizes[row]))

    @property
    def peak_row(self) -> int:
        """The first row at which the footprint is largest; the timeline must not be empty."""
        return int(np.argmax(self.total))

    @property
    def largest(self) -> CategoryBytes:
        """Each category's own largest value over time; zeros for an empty timeline."""
        if not len(self.sizes):
            return CategoryBytes()
        return CategoryBytes(*(int(amount) for amount in self.sizes.max(axis=0)))
