"""The path of a module, such as ``GPT.layers.3.mlp``, found from its ``id()``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pytest_torchmem.analysis.events.op_tree import OpTree

# Names that wrappers put between a module and its parts; not what the user wrote.
_WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_INDEX: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class _Path:
    root: int
    names: tuple[str, ...]


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
        self._called: set[int] = set(calls["module"].tolist())
        names = zip(calls["module"].tolist(), calls["class_name"].tolist(), strict=True)
        for module, class_name in names:
            self._classes.setdefault(module, trace.strings[class_name])
        self._known: dict[tuple[int, float], str] = {}

    def path(self, module: int, rank: float) -> str:
        """The path of the module with that ``id()`` at ``rank``, from the class of its root."""
        key = (module, rank)
        if key not in self._known:
            best = self._best(self._paths(module, rank, frozenset()))
            self._known[key] = ".".join((self._classes.get(best.root, ""), *best.names)).strip(".")
        return self._known[key]

    def _best(self, paths: list[_Path]) -> _Path:
        """The path by which a user knows a module that can be reached by several.

        A container made on the way, such as a slice of a ModuleList, holds modules too, but nobody
        calls it, and it does not reach as deep as the model. Within the model the shortest name is
        the one to use.
        """
        depth: dict[int, int] = {}
        for path in paths:
            depth[path.root] = max(depth.get(path.root, 0), len(path.names))
        return min(
            paths,
            key=lambda p: (
                p.root not in self._called,
                -depth[p.root],
                len(p.names),
                p.names,
                self._classes.get(p.root, ""),
            ),
        )

    def _paths(self, module: int, rank: float, below: frozenset[int]) -> list[_Path]:
        edges = self._edges.get(module, [])
        # A module dead before the first sample is found by what came later, if by anything.
        current = [edge for edge in edges if edge[0] <= rank] or edges[:1]
        # Parent 0 is noted when an id is first met: what came before was another module's.
        births = [i for i, (_, parent, _) in enumerate(current) if parent == 0]
        parents = {(parent, name) for _, parent, name in current[births[-1] + 1 if births else 0 :]}
        paths = [
            _below(path, name, module)
            for parent, name in sorted(parents)
            if parent not in below and parent not in (0, module)
            for path in self._paths(parent, rank, below | {module})
        ]
        return paths or [_Path(module, ())]


def _below(path: _Path, name: str, module: int) -> _Path:
    if name not in _WRAPPERS:
        return _Path(path.root, (*path.names, name))
    # A wrapper at the root is none of the user's modules either: the path begins at what it wraps.
    return path if path.names else _Path(module, ())


def folded(path: str) -> str:
    """``GPT.layers.3.mlp`` as ``GPT.layers.*.mlp``: repeated layers are one."""
    return _INDEX.sub("*", path)
