"""Checks that the options of a dataset fit its columns: masks, fills, nulls and ``ragged``."""

from __future__ import annotations

from collections.abc import Container

from pqcache.errors import UsageError
from pqcache.reader.read_plan import ReadPlan
from pqcache.torch.tensors import Conversion, check_type, mask_name, null_error, paths_in


def masked_columns(plan: ReadPlan, conversion: Conversion, ragged: tuple[str, ...]) -> frozenset[str]:
    """Return the columns that get a mask; UsageError where options name others or types have no tensor form."""
    names = set(plan.columns)
    for field in plan.row_schema:
        check_type(field.name, field.type, conversion.decimals, plan.bounds)
    parts = {path for field in plan.row_schema for path in paths_in(field.name, field.type)}
    for option, named, known in (("ragged", ragged, names), ("nulls", dict(conversion.fill), parts)):
        for name in named:
            if name not in known:
                near = sorted(path for path in known if path.startswith(f"{name.partition('.')[0]}."))
                advice = f"there are: {', '.join(near)}" if near else ""
                raise UsageError(option, f"{name!r} is not among the columns", advice)
    masked = frozenset(field.name for field in plan.row_schema if conversion.mask and field.nullable)
    for name in masked:
        check_mask(name, names)
    return masked


def check_mask(name: str, columns: Container[str]) -> None:
    """Raise UsageError if the mask of a column has the name of another column."""
    if mask_name(name) in columns:
        reason = f"it would add {mask_name(name)!r}, which is a column already"
        raise UsageError("nulls='mask'", reason, "leave one of the two out with columns=, or fill nulls by column")


def check_nulls(plan: ReadPlan, conversion: Conversion) -> None:
    """Raise ParquetError where the files say that columns without a fill hold nulls, which get no mask."""
    if conversion.mask:
        return
    filled = {name for name, _ in conversion.fill}
    for name in plan.columns:
        if name not in filled and (count := plan.nulls(name)):
            raise null_error(name, count, "the dataset", conversion)
