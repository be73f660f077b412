"""What the demo checks its claims with: pyarrow alone, which knows nothing of pqcache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

Ids = npt.NDArray[np.int64]


def files(root: Path) -> list[str]:
    """Return the Parquet files below a directory, in order."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*.parquet"))


def held(root: Path) -> int:
    """Return the rows below a directory, by its footers."""
    return sum(pq.read_metadata(root / path).num_rows for path in files(root))


def row_group_sizes(root: Path) -> list[int]:
    """Return the compressed bytes of each row group below a directory, by its footers."""
    footers = [pq.read_metadata(root / path) for path in files(root)]
    groups = [footer.row_group(number) for footer in footers for number in range(footer.num_row_groups)]
    return [sum(g.column(c).total_compressed_size for c in range(g.num_columns)) for g in groups]


def all_ids(root: Path) -> Ids:
    """Return the ids of all rows below a directory, read with pyarrow alone."""
    columns = [pq.ParquetFile(root / path).read(["id"])["id"].to_numpy() for path in files(root)]
    ids: Ids = np.concatenate(columns)
    return ids


def same_ids(seen: Ids, expected: Ids) -> bool:
    """Return whether ``seen`` has each expected id once and no other."""
    return len(np.unique(seen)) == len(seen) and np.array_equal(np.sort(seen), np.sort(expected))


def same_rows(source: Path, copy: Path) -> bool:
    """Return whether each day's rows are equal in every value, in order, with schema and metadata."""
    days = sorted({path.partition("/")[0] for path in files(source)})
    return days == sorted({path.partition("/")[0] for path in files(copy)}) and all(
        day_rows(source / day).equals(day_rows(copy / day), check_metadata=True) for day in days
    )


def day_rows(directory: Path) -> pa.Table:
    """Return the rows of a day's files, in the order of their names."""
    return pa.concat_tables(pq.ParquetFile(directory / path).read() for path in files(directory))
