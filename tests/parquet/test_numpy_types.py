"""numpy's types of Arrow's numbers, found without pandas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import pqcache
from pqcache.parquet.types import numpy_dtype

NUMBERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
NUMBERS += [pa.float16(), pa.float32(), pa.float64()]


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
def test_it_is_the_type_of_the_values(kind: pa.DataType) -> None:
    assert numpy_dtype(kind) == pa.array([1], kind).to_numpy().dtype == np.dtype(kind.to_pandas_dtype())


def test_no_module_asks_for_the_types_of_pandas() -> None:
    """pyarrow before 26, the newest for Python 3.10, imports pandas for them, which pqcache does not require."""
    package = Path(pqcache.__file__).parent
    users = [path.name for path in package.rglob("*.py") if ".to_pandas_dtype(" in path.read_text()]
    assert users == []
