"""From a module's ``id()`` to its path: ``GPT.layers.3.mlp``."""

from __future__ import annotations

import re
from typing import Final

from pytest_torchmem.analysis.op_tree import OpTree

# Names that wrappers put between a module and its parts; not what the user wrote.
_WRAPPERS: Final = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", ""}
)
_INDEX: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


class ModulePaths:
    """Resolves paths as of a moment: an ``id()`` may stand for another module later."""

    def __init__(self, tree: OpTree) -> None:
        trace = tree.trace
        ranks = tree.mark_ranks()[trace.module_edges["mark"]]
        self._edges: dict[int, list[tuple[float, int, str]]] = {}
        self._classes: dict[int, str] = {}
        columns = (trace.module_edges[name] for name in ("child", "parent", "name", "class_name"))
        rows = zip(ranks.tolist(), *(c.tolist() for c in columns), strict=True)
        for rank, child, parent, name, class_name in rows:
            self._edges.setdefault(child, []).append((rank, parent, trace.strings[name]))
            self._classes[child] = trace.strings[class_name]
        calls = trace.module_calls
        for module, name in zip(
            calls["module"].tolist(), calls["class_name"].tolist(), strict=True
        ):
            self._classes.setdefault(module, trace.strings[name])
        self._known: dict[tuple[int, float], str] = {}

    def path(self, module: int, rank: float) -> str:
        """The path of the module with that ``id()`` at ``rank``, from the class of its root."""
        key = (module, rank)
        if key not in self._known:
            self._known[key] = self._path(module, rank, frozenset())
        return self._known[key]

    def _path(self, module: int, rank: float, below: frozenset[int]) -> str:
        edges = self._edges.get(module, [])
        # A module dead before the first sample is found by what came later, if by anything.
        current = [edge for edge in edges if edge[0] <= rank] or edges[:1]
        # Parent 0 is noted when an id is first met: what came before was another module's.
        births = [i for i, (_, parent, _) in enumerate(current) if parent == 0]
        parents = {(parent, name) for _, parent, name in current[births[-1] + 1 if births else 0 :]}
        paths = [
            self._joined(self._path(parent, rank, below | {module}), name)
            for parent, name in parents
            if parent not in below and parent != module
        ]
        # A module with several parents gets one name, whatever order they were met in.
        own = self._classes.get(module, "")
        return min(paths, key=lambda p: (p.count("."), p)) if paths else own

    @staticmethod
    def _joined(parent: str, name: str) -> str:
        return parent if name in _WRAPPERS else f"{parent}.{name}"


def folded(path: str) -> str:
    """``GPT.layers.3.mlp`` as ``GPT.layers.*.mlp``: repeated layers are one."""
    return _INDEX.sub("*", path)
