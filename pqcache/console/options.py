"""The arguments and options of the commands: names, types, groups and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pqcache.console.help import CHECKS, DESTINATION, KEYS, OUTPUT, ROW_GROUPS, RUN, SAFETY, SELECTION, STORE, VIEW

# several commands
Options = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--option",
        metavar="KEY=VALUE",
        help="An option of the store, like endpoint=http://host:9000. Repeatable.",
        rich_help_panel=STORE,
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Write one JSON object per event, and a summary at the end.", rich_help_panel=OUTPUT),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print errors only.", rich_help_panel=OUTPUT)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and change nothing.", rich_help_panel=RUN)]
Jobs = Annotated[
    int, typer.Option("-j", "--jobs", metavar="N", min=1, help="Files fetched in parallel.", rich_help_panel=RUN)
]
Wait = Annotated[
    float,
    typer.Option(
        metavar="DURATION",
        help="How long to wait for another run to end, like 10m. Default: exit code 75 at once.",
        rich_help_panel=RUN,
    ),
]
CacheArgument = Annotated[str, typer.Argument(metavar="CACHE", help="The cache directory.")]
Version = Annotated[
    bool, typer.Option("--version", help="Show the version; with -v, also those of Python and of the libraries.")
]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="With --version: show more.")]

# sync
OptionalSource = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        show_default=False,
        help="A path or a URL: hdfs://, s3://, gs://, abfss://, http:// ... Or a cache alone, to repeat its sync.",
    ),
]
OptionalCache = Annotated[str | None, typer.Argument(metavar="CACHE", help="The local cache directory.")]
Where = Annotated[
    str | None,
    typer.Option(
        metavar="CONDITION",
        help="* SQL condition on the rows, like \"dt >= '2026-11-01' and price > 0\". '' removes it.",
        rich_help_panel=SELECTION,
    ),
]
Columns = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,...",
        help="* Fetch only the bytes of these columns. '' fetches all.",
        rich_help_panel=SELECTION,
    ),
]
Shard = Annotated[
    str | None,
    typer.Option(
        metavar="I/N",
        help="* Fetch only the share of node I of N, from 0/N on: complete files, about the same bytes for each node. "
        "'' fetches all. With another I or N, files that are left out count as deleted.",
        rich_help_panel=SELECTION,
    ),
]
Marker = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="* Fetch only partitions that contain a file of this name, like _SUCCESS.",
        rich_help_panel=SELECTION,
    ),
]
Settle = Annotated[
    float | None,
    typer.Option(
        metavar="DURATION",
        help="* Skip files younger than this, like 10m, until the next run.",
        rich_help_panel=SELECTION,
    ),
]
SyncRowGroupSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="* Repartition fetched files: the largest row group in bytes on disk, like 128MB.",
        rich_help_panel=ROW_GROUPS,
    ),
]
Keep = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="* Snapshots to keep, including the current one. Default: 2.",
        rich_help_panel=SAFETY,
    ),
]
MaxDelete = Annotated[
    str | None,
    typer.Option(
        metavar="N|P%",
        help="* Publish nothing if more files than this, or a larger share of rows, would be deleted. Default: 50%.",
        rich_help_panel=SAFETY,
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Publish although more than that is deleted.", rich_help_panel=SAFETY)
]
Checksum = Annotated[
    bool | None,
    typer.Option(
        "--checksum/--no-checksum",
        help="* Compare every file with the store's checksum, if it has one. Costs CPU. Default: off.",
        rich_help_panel=SAFETY,
    ),
]
Compare = Annotated[
    str,
    typer.Option(
        metavar="identity|content",
        help="How unchanged files are recognized: by size, time and tag, or also by their bytes or the store's MD5.",
        rich_help_panel=SAFETY,
    ),
]
HdfsDriver = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="* Client for hdfs:// sources: hdfs-native or hdfs3. Default: hdfs-native.",
        rich_help_panel=STORE,
    ),
]
Retries = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="How many tries in a row may fail. Default: as many as --retry-for allows.",
        rich_help_panel=STORE,
    ),
]
RetryFor = Annotated[
    float | None,
    typer.Option(
        metavar="DURATION",
        min=0,
        help="How long a transient failure is retried, then exit code 75. Default: 10m; a few seconds for the first "
        "contact of a new cache.",
        rich_help_panel=STORE,
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        metavar="DURATION",
        min=0.1,
        help="How long a server may send nothing before it counts as unavailable.",
        rich_help_panel=STORE,
    ),
]

# repartition
RepartitionSource = Annotated[str, typer.Argument(metavar="SOURCE", help="A cache, a directory or a URL.")]
Dest = Annotated[
    str | None,
    typer.Argument(metavar="DEST", help="A new path, hdfs://, s3://, gs:// or az:// URL. Absent: rewrite the cache."),
]
RowGroupSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="* The largest row group in compressed bytes, like 64MB. Default: 128MB.",
        rich_help_panel=ROW_GROUPS,
    ),
]
Compression = Annotated[
    str | None,
    typer.Option(
        metavar="CODEC",
        help="* zstd, zstd:LEVEL (1 to 22), lz4, snappy, none, or keep for the codec of each column. Default: lz4.",
        rich_help_panel=ROW_GROUPS,
    ),
]
Compat = Annotated[
    bool | None,
    typer.Option(
        "--compat/--no-compat",
        help="* Write for old readers: no DELTA, no BYTE_STREAM_SPLIT, and snappy.",
        rich_help_panel=ROW_GROUPS,
    ),
]
KeepInt96 = Annotated[
    bool | None,
    typer.Option("--keep-int96/--no-keep-int96", help="* Keep INT96 timestamps as INT96.", rich_help_panel=ROW_GROUPS),
]
Dense = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN",
        help="* Store lists of one length as fixed-length bytes, which read faster. Repeatable. "
        "'auto' proposes columns, 'none' converts all back to lists.",
        rich_help_panel=ROW_GROUPS,
    ),
]
Narrow = Annotated[
    bool,
    typer.Option(
        "--narrow",
        help="* Store dense integers in the smallest type that holds every value.",
        rich_help_panel=ROW_GROUPS,
    ),
]
Shuffle = Annotated[
    int | None,
    typer.Option(metavar="SEED", min=0, help="* Shuffle the rows of each partition.", rich_help_panel=ROW_GROUPS),
]
Align = Annotated[
    str | None,
    typer.Option(
        metavar="block", help="Put no row group of DEST across an HDFS block boundary.", rich_help_panel=DESTINATION
    ),
]
BlockSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Block size of DEST. Default: 128MB with --align, else that of the cluster.",
        rich_help_panel=DESTINATION,
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Run on Dask (tcp://host:8786), Ray (ray://host:10001) or Spark (spark://host:7077, yarn).",
        rich_help_panel=RUN,
    ),
]
PartitionJobs = Annotated[
    int, typer.Option("-j", "--jobs", metavar="N", min=1, help="Partitions rewritten in parallel.", rich_help_panel=RUN)
]

# inspect
Target = Annotated[str, typer.Argument(metavar="TARGET", help="A cache, a directory, a file or a URL.")]
InspectBlockSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Size that row groups are compared with. Default: the row-group size of a cache, the block size on HDFS, "
        "else 128MB.",
        rich_help_panel=VIEW,
    ),
]
AllPartitions = Annotated[bool, typer.Option("--partitions", help="Show all partitions.", rich_help_panel=VIEW)]
OnlyColumns = Annotated[
    bool, typer.Option("--columns", help="Show all columns and nothing else.", rich_help_panel=VIEW)
]
OnlySchema = Annotated[bool, typer.Option("--schema", help="Show column names and types.", rich_help_panel=VIEW)]
OnlyFiles = Annotated[
    bool, typer.Option("--files", help="Show the files, each with its largest row group.", rich_help_panel=VIEW)
]
OnlyRowGroups = Annotated[
    bool,
    typer.Option("--row-groups", help="Show the row groups; '!' marks those over the size.", rich_help_panel=VIEW),
]
Sample = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Show the first N rows of a local dataset.", rich_help_panel=VIEW),
]
Diff = Annotated[
    tuple[str, str] | None,
    typer.Option(metavar="OLD NEW", help="Show the difference between two snapshots of a cache.", rich_help_panel=VIEW),
]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a self-contained HTML page with charts.", rich_help_panel=OUTPUT),
]
FooterJobs = Annotated[
    int, typer.Option("-j", "--jobs", metavar="N", min=1, help="Footers read in parallel.", rich_help_panel=RUN)
]
InspectJson = Annotated[bool, typer.Option("--json", help="Write JSON.", rich_help_panel=OUTPUT)]

# verify
Deep = Annotated[
    bool,
    typer.Option(
        "--deep",
        help="Also compare checksums, decode every page, and check the statistics.",
        rich_help_panel=CHECKS,
    ),
]
CompareSource = Annotated[
    bool,
    typer.Option("--source", help="Also list files that have changed at the source.", rich_help_panel=CHECKS),
]
VerifyCompare = Annotated[
    str,
    typer.Option(
        metavar="identity|content",
        help="How --source compares files: by size, time and tag, or also by content, which implies --source.",
        rich_help_panel=CHECKS,
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        metavar="fastparquet",
        help="Also compare every value with fastparquet's. Implies --deep.",
        rich_help_panel=CHECKS,
    ),
]
Repair = Annotated[
    bool,
    typer.Option("--repair", help="Fetch damaged files again, into a new snapshot.", rich_help_panel=CHECKS),
]
VerifyProcesses = Annotated[
    int | None,
    typer.Option(
        "-j",
        "--jobs",
        metavar="N",
        min=1,
        help="Reading processes. Default: one per core.",
        rich_help_panel=RUN,
    ),
]

# index
Key = Annotated[
    list[str] | None,
    typer.Option(metavar="COLUMN", help="Build a key index of this column. Repeatable.", rich_help_panel=KEYS),
]
Drop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN",
        help="Remove the key index of this column, also from later snapshots. Repeatable.",
        rich_help_panel=KEYS,
    ),
]
IndexThreads = Annotated[
    int | None,
    typer.Option(
        "-j",
        "--jobs",
        metavar="N",
        min=1,
        help="Threads that read and sort. Default: one per core, at most 4.",
        rich_help_panel=RUN,
    ),
]

# log
Last = Annotated[int, typer.Option("-n", "--last", metavar="N", min=1, help="Number of runs to show.")]
LogJson = Annotated[bool, typer.Option("--json", help="Write one JSON object per run.")]

# gc
GcKeep = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Snapshots to keep, including the current one. Default: as the cache remembers.",
        rich_help_panel=SAFETY,
    ),
]
OlderThan = Annotated[
    float,
    typer.Option(metavar="DURATION", help="Remove only snapshots older than this, like 48h.", rich_help_panel=SAFETY),
]

# bench
LocalTarget = Annotated[str, typer.Argument(metavar="TARGET", help="A cache, a directory or a file.")]
BenchColumns = Annotated[
    str | None,
    typer.Option("--columns", metavar="A,B,...", help="Columns to read. Default: all.", rich_help_panel=SELECTION),
]
Filters = Annotated[
    str | None,
    typer.Option(
        metavar="CONDITION", help="Condition on the rows, as ParquetDataset(filters=).", rich_help_panel=SELECTION
    ),
]
BatchSize = Annotated[int, typer.Option(metavar="N", min=1, help="Rows per batch.", rich_help_panel=RUN)]
Memory = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Memory for decoded row groups, as ParquetDataset(memory=). Default: 2GB.",
        rich_help_panel=RUN,
    ),
]
Workers = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...", help="Numbers of DataLoader workers. Default: 0, 1, 2, 4 ... cores.", rich_help_panel=RUN
    ),
]
BenchJson = Annotated[bool, typer.Option("--json", help="Write one JSON object.", rich_help_panel=OUTPUT)]
Seconds = Annotated[
    float, typer.Option(metavar="DURATION", min=0.01, help="How long to measure each setting.", rich_help_panel=RUN)
]
