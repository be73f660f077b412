"""Partition paths and their values."""

from urllib.parse import quote

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pqcache.store.partition_paths import infer_type, is_hidden, partition_table, partition_values

_VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=20)


@given(st.dictionaries(_VALUES, _VALUES, min_size=1, max_size=4))
def test_escaped_values_come_back(values: dict[str, str]) -> None:
    path = "/".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in values.items())
    expected = {k: None if v == "__HIVE_DEFAULT_PARTITION__" else v for k, v in values.items()}
    assert partition_values(path) == expected


@given(st.integers(-(2**70), 2**70))
def test_only_canonical_int64_is_a_number(value: int) -> None:
    fits = -(2**63) <= value < 2**63
    assert infer_type([str(value)]) == (pa.int64() if fits else pa.string())
    assert infer_type([f"0{abs(value)}"]) == pa.string()


def test_types_come_from_all_directories() -> None:
    table = partition_table(["dt=2026-11-01/hour=7", "dt=2026-11-01/hour=x", "dt=__HIVE_DEFAULT_PARTITION__/hour=8"])
    assert table.schema == pa.schema([("dt", pa.string()), ("hour", pa.string())])
    assert table.to_pydict() == {"dt": ["2026-11-01", "2026-11-01", None], "hour": ["7", "x", "8"]}
    numbers = partition_table(["hour=7", "hour=__HIVE_DEFAULT_PARTITION__", "hour=-12"])
    assert numbers.to_pydict() == {"hour": [7, None, -12]}
    assert partition_table(["", ""]).num_rows == 2


def test_hidden_names() -> None:
    assert is_hidden("_SUCCESS")
    assert is_hidden(".x")
    assert not is_hidden("dt=_x")
