"""Private names of torch stand in `record.torch_api` alone, with releases they were checked on."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pytest_torchmem.record import torch_api

ROOM = Path(torch_api.__file__).parent
RECORD = ROOM.parent
SUBJECTS = sorted(file.stem for file in ROOM.glob("*.py") if file.stem != "__init__")
# Private names of Python's own, of pytest's and of the compiler's library.
OTHERS = {"_getframe", "_current_frames", "_thread", "_bootstrap", "_find_and_load", "_pytest"}
OTHERS |= {"_Unwind_FindEnclosingFunction", "_asyncio", "_signal"}
PRIVATE = re.compile(r"_(?!_)\w+")
IN_TORCH = re.compile(r"torch(\.\w+)+")


def private_names(source: str) -> set[str]:
    """The private names in a source that are neither its own nor Python's or pytest's."""
    tree = ast.parse(source)
    return set(_names(tree)) - set(_own_names(tree)) - OTHERS


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        words: list[str] = []
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name):
                words = [name]
            case ast.Import(names=aliases):
                words = [word for alias in aliases for word in alias.name.split(".")]
            case ast.ImportFrom(module=str(module), names=aliases):
                words = [*module.split("."), *(alias.name for alias in aliases)]
            case ast.Constant(value=str(text)) if PRIVATE.fullmatch(text):
                words = [text]
            case ast.Constant(value=str(text)) if IN_TORCH.fullmatch(text):
                words = text.split(".")
        yield from (word for word in words if PRIVATE.fullmatch(word))


def _own_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def listed(subject: str) -> torch_api.Checked:
    module = importlib.import_module(f"{torch_api.__name__}.{subject}")
    checked: torch_api.Checked = module.CHECKED
    return checked


def source_of(subject: str) -> str:
    """The source of a file of the room, without its table."""
    tree = ast.parse((ROOM / f"{subject}.py").read_text())
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CHECKED")
    ]
    return ast.unparse(tree)


def words_of(subject: str) -> set[str]:
    return {word.rstrip("*") for name in listed(subject) for word in name.split(".")}


def test_no_other_file_has_a_private_name_of_torch() -> None:
    """Only these files import torch, which `test_layers` holds."""
    files = [file for file in RECORD.rglob("*.py") if file.parent != ROOM]
    assert len(files) > 30
    assert {file.name: names for file in files if (names := private_names(file.read_text()))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._autograd",
        "node._sequence_nr()",
        "from torch._functorch import vmap",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "import torch._dynamo",
        "getattr(module, '_parameters')",
        "sys.modules.get('torch._dynamo.callback')",
    ],
)
def test_a_private_name_is_found(line: str) -> None:
    assert private_names(line)


@pytest.mark.parametrize("line", ["self._mode", "sys._getframe()", "def _own(): ...\na._own()"])
def test_a_name_of_our_own_or_of_pythons_is_not_meant(line: str) -> None:
    assert not private_names(line)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_each_private_name_is_listed_with_releases(subject: str) -> None:
    known = words_of(subject)
    unlisted = {
        name
        for name in private_names(source_of(subject))
        if not any(word == name or (word.endswith("_") and word.startswith(name)) for word in known)
    }
    assert unlisted == set()


@pytest.mark.parametrize("subject", SUBJECTS)
def test_each_listed_name_is_used(subject: str) -> None:
    source = source_of(subject)
    ends = {name.rpartition(".")[2].rstrip("*") for name in listed(subject)}
    assert {end for end in ends if not re.search(rf"\b{end}", source)} == set()


# What an instance has and its class does not, by the class.
INSTANCES: dict[str, Callable[[], object]] = {
    "torch.autograd.graph.Node": lambda: (torch.ones(1, requires_grad=True) * 2).grad_fn,
    "torch.autograd.profiler.profile": torch.autograd.profiler.profile,
    "torch._ops.OpOverload": lambda: torch.ops.aten.mm.default,
}


def exists(name: str) -> bool:
    """Whether a name of torch is there: a module, an attribute, or an annotation of a class."""
    owner, _, last = name.rpartition(".")
    if owner in INSTANCES:
        return any(known.startswith(last.rstrip("*")) for known in dir(INSTANCES[owner]()))
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        place = sys.modules.get(owner)
        if place is None and exists(owner):
            place = pkgutil.resolve_name(owner)
        return hasattr(place, last) or last in getattr(place, "__annotations__", {})
    return True


def release(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.partition("+")[0].split(".")))


CHECKED_HERE = [
    name
    for subject in SUBJECTS
    for name, (first, last) in listed(subject).items()
    if release(first) <= release(torch.__version__) <= release(last)
    and (torch.backends.cuda.is_built() or not name.startswith("torch._C._cuda_"))
]


def test_the_installed_release_has_each_name_that_was_checked_on_it() -> None:
    assert [name for name in CHECKED_HERE if not exists(name)] == []


@pytest.mark.parametrize("name", ["torch._C._no_such", "torch._no_such.module"])
def test_a_name_that_is_gone_would_be_missed(name: str) -> None:
    assert not exists(name)
    assert exists("torch._dynamo.callback")


def test_the_first_release_is_not_after_the_last() -> None:
    for subject in SUBJECTS:
        assert all(release(first) <= release(last) for first, last in listed(subject).values())
