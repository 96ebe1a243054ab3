"""Which inputs an operator may write to."""

from __future__ import annotations

import pytest
import torch

from pytest_torchmem.record.profiled.mentions import OTHER_LIST, TENSOR, TENSORS, Signature, resolve
from pytest_torchmem.values.trace import Mutable

NO, YES, UNKNOWN = Mutable.NO, Mutable.YES, Mutable.UNKNOWN
NOTHING = type(None)


@pytest.mark.parametrize(
    ("name", "kinds", "mutable"),
    [
        ("aten::add", (TENSOR, TENSOR, int), (NO, NO, NO)),
        ("aten::add_", (TENSOR, TENSOR, int), (YES, NO, NO)),
        ("aten::add", (TENSOR, TENSOR, float, TENSOR), (NO, NO, NO, YES)),
        ("aten::linear", (TENSOR, TENSOR, NOTHING), (NO, NO, NO)),
        ("aten::cat", (TENSORS, int), (NO, NO)),
        ("aten::_foreach_add_", (TENSORS, TENSORS, int), (YES, NO, NO)),
        ("aten::_foreach_mul", (TENSORS, float), (NO, NO)),
        ("aten::index_put_", (TENSOR, TENSORS, TENSOR, bool), (YES, NO, NO, NO)),
        # The profiler has no kind for sizes and dtypes: it records None in their place.
        ("aten::view", (TENSOR, NOTHING), (NO, NO)),
    ],
)
def test_an_input_is_mutable_where_the_schema_writes_to_it(name, kinds, mutable):
    signature = resolve(name, kinds)
    assert (signature.is_operator, signature.mutable) == (True, mutable)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("aten::add_", (TENSOR,)),
        ("aten::add_", (OTHER_LIST, TENSOR, int)),
        ("forward::layer", (TENSOR,)),
        ("no namespace at all", (TENSOR,)),
        ("aten::", (TENSOR,)),
    ],
)
def test_what_no_schema_fits_is_no_operator_and_may_write_to_anything(name, kinds):
    assert resolve(name, kinds) == Signature(False, (UNKNOWN,) * len(kinds))


def test_an_input_that_any_overload_writes_to_is_mutable():
    library = torch.library.Library("torchmem_overloads", "DEF")
    library.define("scale.copies(Tensor x, int by) -> Tensor")
    library.define("scale.writes(Tensor(a!) x, bool by) -> ()")
    # True is an int as well: both overloads take it.
    assert resolve("torchmem_overloads::scale", (TENSOR, bool)).mutable == (YES, NO)
    assert resolve("torchmem_overloads::scale", (TENSOR, int)).mutable == (NO, NO)
    assert resolve("torchmem_overloads::scale", (TENSOR, bool)).overloads == (
        "copies",
        "writes",
    )


def test_an_operator_registered_later_is_found_by_the_next_recording():
    name = "torchmem_late::scale"
    assert not resolve(name, (TENSOR,)).is_operator
    library = torch.library.Library("torchmem_late", "DEF")
    library.define("scale(Tensor x) -> Tensor")
    assert resolve(name, (TENSOR,)).is_operator
