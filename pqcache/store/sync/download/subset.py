"""Selects columns and rows of a source, and the partitions that may hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pqcache.errors import ParquetError, PqcacheError, SourceDenied, SourceError, UsageError, no_column
from pqcache.events import ignore
from pqcache.parquet.rewrite.recipe import canonical_json
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.timeouts import FEW_TRIES, with_retries
from pqcache.store.manifest import DIRECTORY, SourceFile, TableVersion, declared_types
from pqcache.store.partition_paths import parent, partition_schema, partition_table, partition_values, with_hints

if TYPE_CHECKING:
    import pyarrow as pa

_AT_ONCE = 16  # footers

KnownTypes = Callable[[], "pa.Schema | None"]


@dataclass(frozen=True)
class Subset:
    """The columns and rows (None for all) that are taken from every file.

    ``where`` is a condition that partition columns alone do not decide, and ``where_types`` the types of the partition
    columns in it. ``partitions`` holds the typed partition values of each directory. ``types`` are those of the named
    columns in files; older files without such a column have nulls. With ``ignore_case``, columns get their names from
    ``spelling``, which is keyed by lower-case path.
    """

    columns: tuple[str, ...] | None = None
    where: str | None = None
    partitions: Mapping[str, Mapping[str, pa.Scalar]] = field(default_factory=dict, compare=False)
    types: Mapping[str, pa.DataType] = field(default_factory=dict, compare=False)
    ignore_case: bool = False
    spelling: Mapping[tuple[str, ...], str] = field(default_factory=dict, compare=False)
    where_types: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def is_all(self) -> bool:
        """Whether files are copied as they are."""
        return self.columns is None and self.where is None and not self.ignore_case

    @property
    def recipe(self) -> str:
        """The subset as canonical JSON; empty for all of a file."""
        values: dict[str, Any] = {} if self.columns is None else {"columns": sorted(self.columns)}
        if self.where is not None:
            values["where"] = self.where
        if self.where_types:
            values["where_types"] = self.where_types
        if self.ignore_case:
            values["ignore_case"] = True
        return canonical_json(values) if values else ""


EVERYTHING = Subset()


def known_types(table: TableVersion | None, declared: Mapping[str, str]) -> pa.Schema | None:
    """Partition types of a directory's snapshot, without those no longer declared."""
    from pqcache.store.manifest_file import schema_of_table  # as below

    schema = schema_of_table(table)
    if table is None or schema is None or table.format != DIRECTORY:
        return None
    for name in declared_types(table).keys() - declared.keys():
        schema = schema.remove(schema.get_field_index(name))
    return schema


def types_of_source(
    source: Source, directories: Sequence[str], declared: Mapping[str, str], known: pa.Schema | None
) -> tuple[pa.Schema, dict[str, dict[str, SourceError]]]:
    """Apply `partition_schema` to a source, which may be a table."""
    from pqcache.store.manifest_file import schema_of_table  # as below

    return partition_schema(directories, declared, schema_of_table(source.table_version), known)


def select_subset(
    source: Source,
    files: Sequence[SourceFile],
    where: str | None,
    columns: Sequence[str] | None,
    declared: Mapping[str, str],
    known: KnownTypes,
    ignore_case: bool = False,
) -> tuple[list[SourceFile], Subset]:
    """Select the files that may hold wanted rows, and the subset to take from each.

    Partitions are pruned by their values, with the types of `types_of_source`; a partition with a value that doesn't
    fit is taken unless its other values exclude it. If ``where`` or ``columns`` name columns in the files, footers are
    read for their types, until all are known; rows are then filtered while they are fetched. A column that no file has
    raises UsageError.
    """
    everything = Subset(ignore_case=ignore_case)
    if not where and columns is None:
        return list(files), everything
    import pyarrow as pa  # a plain sync need not wait for it

    directories = sorted({parent(file.path) for file in files})
    schema, misfits = types_of_source(source, directories, declared, known())
    table = partition_table(directories, schema, misfits)
    row_where = None
    in_files: list[tuple[str, ...]] = []
    if where:
        from pqcache.filters.expression import expression_of, rows_where
        from pqcache.filters.parse import parse_condition, where_columns  # as above
        from pqcache.filters.pruning import prune_row_groups
        from pqcache.parquet.schema import condition_schema_of

        in_files = where_columns(where)
    named = {".".join(path).lower() for path in in_files}
    mixed = _mixed(source, files, table, [name for name in table.column_names if name.lower() in named])
    inside = table.drop_columns(mixed)
    names = inside.column_names
    named_inside = [name for name in names if name.lower() in named]
    in_paths = {name.lower() for name in names}
    in_files = [path for path in in_files if ".".join(path).lower() not in in_paths]
    wanted = [name for name in columns or () if name not in names]
    types = _types(source, files, wanted, in_files, inside.schema, ignore_case)
    if where:
        known_columns = condition_schema_of(pa.schema([*types.items(), *inside.schema]))
        version = source.table_version
        declarable = version is None or version.format == DIRECTORY
        condition = parse_condition(where, with_hints(known_columns, inside, declarable))

        def may_match(positions: Sequence[int], unknown: Iterable[str] = ()) -> Iterator[int]:
            rows = {"rows": pa.array([1] * len(positions), pa.int64())}
            rows |= {f"{name}:nulls": pa.array([0] * len(positions), pa.int64()) for name in unknown}
            constants = {name: inside[name].take(pa.array(positions, pa.int64())) for name in names}
            for name in unknown:
                constants.pop(name, None)
            some = prune_row_groups(condition, pa.table(rows), constants).some
            yield from (position for position, maybe in zip(positions, some, strict=True) if maybe)

        if not in_files:
            taken = set(rows_where(inside, expression_of(condition)).tolist())
        else:
            row_where = where
            taken = set(may_match(range(len(directories))))
        unfit: dict[tuple[str, ...], list[int]] = {}
        for position, directory in enumerate(directories):
            if directory in misfits:
                unfit.setdefault(tuple(misfits[directory]), []).append(position)
        taken.update(position for unknown, some in unfit.items() for position in may_match(some, unknown))
        kept = {directories[position] for position in taken}
        files = [file for file in files if parent(file.path) in kept]
    if columns is None and row_where is None:
        return list(files), everything
    values = {
        d: {name: table[name][i] for name in table.column_names if name in names or name in partition_values(d)}
        for i, d in enumerate(directories)
    }
    return list(files), Subset(
        columns=None if columns is None else tuple(columns),
        where=row_where,
        partitions=values,
        types=types,
        ignore_case=ignore_case,
        where_types={} if row_where is None else {name: str(inside.schema.field(name).type) for name in named_inside},
    )


def _mixed(source: Source, files: Sequence[SourceFile], table: pa.Table, names: Sequence[str]) -> list[str]:
    """Partition columns among ``names`` that are in files whose paths lack them."""
    found = []
    for name in names:
        without = [file for file in files if name not in partition_values(parent(file.path))]
        if without and any(name in schema.names for schema in _schemas(source, without)):
            found.append(name)
    return found


def _schemas(source: Source, files: Sequence[SourceFile], every: bool = False) -> Iterator[pa.Schema]:
    """Yield the schemas of the first, the last and a middle file, or the table's.

    With ``every``, all other schemas follow, the newest first. Unreadable ones are left out, as their download will
    raise; if all are unreadable, the first error is raised.
    """
    from pqcache.store.manifest_file import schema_of_table
    from pqcache.store.sync.table_schema import read_remote_footer  # a plain sync need not wait for it
    from pqcache.system.threads import in_parallel

    version = source.table_version
    of_table = schema_of_table(version)
    if version is not None and version.has_all_columns and of_table is not None:  # which all files are read as
        yield of_table
        return

    def read(file: SourceFile) -> pa.Schema | PqcacheError:
        try:
            return with_retries(lambda: read_remote_footer(source, file)[1], file.path, FEW_TRIES, ignore)
        except (ParquetError, SourceDenied) as error:
            return error

    some = list(dict.fromkeys([files[0], files[-1], files[len(files) // 2]] if files else []))
    rest = sorted((f for f in files if f not in some), key=lambda f: -f.identity.mtime_ns) if every else []
    batches = [*([file] for file in some), *(rest[n : n + _AT_ONCE] for n in range(0, len(rest), _AT_ONCE))]
    errors: list[PqcacheError] = []
    for batch in batches:
        for found in in_parallel([partial(read, file) for file in batch], _AT_ONCE):
            if isinstance(found, PqcacheError):
                errors.append(found)
            else:
                yield found
    if errors and len(errors) == len(some) + len(rest):
        raise errors[0]


def _types(
    source: Source,
    files: Sequence[SourceFile],
    names: Sequence[str],
    paths: Sequence[tuple[str, ...]],
    partitions: pa.Schema,
    ignore_case: bool,
) -> dict[str, pa.DataType]:
    """Types of columns by their names in the files, from the first files that have them; see `_schemas`.

    ``names`` are spelled as in the files, ``paths`` are columns and fields of structs in a condition. Both come and go
    over time: a struct gets the fields of all files examined. Raises UsageError for a column in no file; the error also
    lists the columns ``partitions``.
    """
    from pqcache.filters.expression import operand_of  # a plain sync need not wait for it
    from pqcache.parquet.schema import condition_schema_of, with_fields

    found: dict[str, pa.DataType] = {}
    known: dict[str, None] = {}
    absent, unresolved = dict.fromkeys(names), dict[tuple[str, ...], UsageError | None](dict.fromkeys(paths))
    for schema in _schemas(source, files, every=True) if absent or unresolved else ():
        if ignore_case:
            schema = _in_spelling(schema, names)
        known |= dict.fromkeys(schema.names)
        here = {name for name in names if name in schema.names}
        for path in paths:
            try:
                here.add(operand_of(path, _with_partitions(condition_schema_of(schema), partitions)).column)
                unresolved.pop(path, None)
            except UsageError as error:
                if path in unresolved:
                    unresolved[path] = error
        for column in schema:
            if column.name in here:
                found[column.name] = with_fields(found.get(column.name, column.type), column.type)
                absent.pop(column.name, None)
        if not (absent or unresolved):
            break
    known |= dict.fromkeys(partitions.names)
    for name in absent:
        raise no_column(source.url, name, known)
    for reason in filter(None, unresolved.values()):
        raise reason.within(source.url)
    return found


def _in_spelling(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    import pyarrow as pa  # as above

    known = {name.lower(): name for name in names}
    return pa.schema([column.with_name(known.get(column.name.lower(), column.name)) for column in schema])


def _with_partitions(schema: pa.Schema, partitions: pa.Schema) -> pa.Schema:
    import pyarrow as pa  # as above

    return pa.schema([*schema, *(field for field in partitions if field.name not in schema.names)])
