"""One batch of the rows of several datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pqcache.errors import UsageError
from pqcache.torch.batch import Batch, Position
from pqcache.torch.batch_rows import CU_SEQLENS, row_count
from pqcache.torch.host_tensors import concatenated
from pqcache.torch.ragged import Ragged


def joined(parts: Mapping[str, Any], position: Position) -> Batch:
    """Return the rows of all datasets' batches, one dataset after the other; ``parts`` of the batch says how many.

    Columns that are not the same in all of them raise UsageError.
    """
    for name, part in parts.items():
        if not isinstance(part, dict):
            reason = f"the transform of {name!r} returns {type(part).__name__}"
            raise UsageError("within_batch=True", reason, "return a dict of columns, which can be joined")
    first, *others = parts.items()
    for name, part in others:
        if part.keys() != first[1].keys():
            raise _different(first[0], name, f"columns {', '.join(first[1])} and {', '.join(part)}")
    columns = {column: _joined(column, {name: part[column] for name, part in parts.items()}) for column in first[1]}
    counts = tuple((name, row_count(part)) for name, part in parts.items())
    return Batch(columns, _with_parts(position, counts))


def _with_parts(position: Position, counts: tuple[tuple[str, int], ...]) -> Position:
    return Position(**{**position.__dict__, "parts": counts})


def _joined(column: str, parts: Mapping[str, Any]) -> Any:
    (name, first), *others = parts.items()
    values = list(parts.values())
    if column == CU_SEQLENS:
        return _joined_ends(values)
    for other, value in others:
        if type(value) is not type(first):
            raise _different(name, other, f"{column!r} as {type(first).__name__} and as {type(value).__name__}")
    if isinstance(first, dict):
        if any(value.keys() != first.keys() for value in values):
            raise _different(name, others[0][0], f"other fields in {column!r}")
        return {key: _joined(f"{column}.{key}", {n: value[key] for n, value in parts.items()}) for key in first}
    if isinstance(first, Ragged):
        return _joined_ragged(column, parts)
    if isinstance(first, list):
        return [item for value in values for item in value]
    if not isinstance(first, torch.Tensor):
        raise UsageError("within_batch=True", f"{column!r} is {type(first).__name__}, which cannot be joined")
    for other, value in others:
        if (value.dtype, value.shape[1:]) != (first.dtype, first.shape[1:]):
            kinds = [f"{str(v.dtype)[6:]} {tuple(v.shape[1:])}" for v in (first, value)]
            raise _different(name, other, f"{column!r} as {kinds[0]} and as {kinds[1]}")
    return concatenated(values)


def _joined_ends(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``cu_seqlens`` of packed batches that are joined."""
    lengths = torch.cat([value.diff() for value in values])
    return torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])


def _joined_ragged(column: str, parts: Mapping[str, Any]) -> Ragged:
    values: Sequence[Ragged] = list(parts.values())
    if len({value.kind for value in values}) > 1:
        one, other = list(parts)[:2]
        raise _different(one, other, f"{column!r} of other kinds")
    ends, offsets = 0, [torch.zeros(1, dtype=torch.int64)]
    for value in values:
        offsets.append(value.offsets[1:] + ends)
        ends += int(value.offsets[-1])
    inner = _joined(column, {name: value.values for name, value in parts.items()})
    return Ragged(inner, torch.cat(offsets), values[0].kind)


def _different(one: str, other: str, what: str) -> UsageError:
    return UsageError(
        "within_batch=True",
        f"{one!r} and {other!r} have {what}",
        "read the same columns of one type, or let a transform make them so",
    )
