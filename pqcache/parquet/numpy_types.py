"""Arrow's number types as numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa


def numpy_dtype(kind: pa.DataType) -> np.dtype[Any]:
    """``to_pandas_dtype`` of pyarrow before 26 needs pandas."""
    letter = "f" if pa.types.is_floating(kind) else "i" if pa.types.is_signed_integer(kind) else "u"
    return np.dtype(f"{letter}{kind.bit_width // 8}")
