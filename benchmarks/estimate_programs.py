"""Programs estimated, beside what they measure, and what an estimate leaves behind.

python benchmarks/estimate_programs.py [program ...] [--output FILE.md]
"""

from __future__ import annotations

from estimated_beside_measured import compare
from workloads_estimated import PROGRAMS as FIRST
from workloads_estimated_further import FURTHER
from workloads_estimated_given import GIVEN
from workloads_estimated_held import HELD
from workloads_estimated_hub import HUB
from workloads_estimated_inside import INSIDE
from workloads_estimated_methods import METHODS
from workloads_estimated_more import MORE
from workloads_estimated_sequences import SEQUENCES
from workloads_estimated_text import TEXT
from workloads_estimated_usual import USUAL
from workloads_estimated_varied import VARIED
from workloads_estimated_vision import VISION
from workloads_estimated_ways import WAYS

PROGRAMS = FIRST | MORE | USUAL | VARIED | FURTHER | HELD | INSIDE | GIVEN | VISION | TEXT | WAYS
PROGRAMS |= SEQUENCES | HUB | METHODS

if __name__ == "__main__":
    compare(PROGRAMS, __file__, "Programs estimated, beside what they measure", apart=True)
