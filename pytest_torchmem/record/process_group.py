"""The process group of a job, where there is one."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch.distributed as dist

#: The ranks that take part; a process alone has none.
ProcessGroup: TypeAlias = "dist.ProcessGroup"


def group_rank(group: ProcessGroup | None = None) -> tuple[int, int] | None:
    """Return this process's rank in a group and the group's size; None without a group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(group), dist.get_world_size(group)


def gather(value: object, group: ProcessGroup | None = None) -> list[Any]:
    """Return the value that each rank of a group gave, by rank. All of them have to call it."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group)
    return gathered
