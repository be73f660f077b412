"""The arguments and options of the commands: names, groups, and what the help says of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pqcache.console.help import CHECKS, DESTINATION, GUARDS, KEYS, OUTPUT, ROW_GROUPS, RUN, SHOWN, STORE, TAKEN

# of several commands
Options = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--option",
        metavar="KEY=VALUE",
        help="An option of the store, like endpoint=http://host:9000. May be given several times.",
        rich_help_panel=STORE,
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Write one JSON object per event, and a summary at the end.", rich_help_panel=OUTPUT),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing but errors.", rich_help_panel=OUTPUT)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done and do nothing.", rich_help_panel=RUN)]
Jobs = Annotated[int, typer.Option("-j", "--jobs", metavar="N", min=1, help="Files at once.", rich_help_panel=RUN)]
Wait = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="Wait so long for another run to end. Without it, such a run means exit code 75 at once.",
        rich_help_panel=RUN,
    ),
]
CacheArgument = Annotated[Path, typer.Argument(metavar="CACHE", readable=False, help="The cache directory.")]
Version = Annotated[bool, typer.Option("--version", help="Show the version; with -v, of all that matters in a report.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Say more, with --version.")]

# sync
Source = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="hdfs://, webhdfs://, s3://, file:// or a path; or a cache, alone."),
]
OptionalCache = Annotated[
    Path | None, typer.Argument(metavar="CACHE", readable=False, help="The local cache directory.")
]
Where = Annotated[
    str | None,
    typer.Option(
        metavar="CONDITION",
        help="* Take only the rows that satisfy a SQL condition, like \"dt >= '2026-11-01' and price > 0\". "
        "'' takes all again.",
        rich_help_panel=TAKEN,
    ),
]
Columns = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,...",
        help="* Fetch the bytes of these columns only. '' takes all again.",
        rich_help_panel=TAKEN,
    ),
]
Shard = Annotated[
    str | None,
    typer.Option(
        metavar="I/N",
        help="* Keep only the share of node I of N, from 0/N on: whole files, about as many bytes for each node. "
        "'' takes all again. With another I or N, files that are left out count as dropped.",
        rich_help_panel=TAKEN,
    ),
]
Marker = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="* Take only partitions whose writer has left a file of this name, like _SUCCESS.",
        rich_help_panel=TAKEN,
    ),
]
Settle = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        help="* Leave files younger than this, like 10m, for the next run.",
        rich_help_panel=TAKEN,
    ),
]
CutAs = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="* Repartition files as they come: the largest row group in bytes on disk, like 128MB.",
        rich_help_panel=ROW_GROUPS,
    ),
]
Keep = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="* Snapshots to keep, the current one among them. 2 at first.",
        rich_help_panel=GUARDS,
    ),
]
MaxDelete = Annotated[
    str | None,
    typer.Option(
        metavar="N|P%",
        help="* Publish nothing if more files than this would be dropped. 50% at first.",
        rich_help_panel=GUARDS,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Drop them all the same.", rich_help_panel=GUARDS)]
Checksum = Annotated[
    bool | None,
    typer.Option(
        "--checksum/--no-checksum",
        help="* Compare every file with the store's own checksum, where it has one. Costs CPU; off at first.",
        rich_help_panel=GUARDS,
    ),
]
HdfsDriver = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="* Which client reads hdfs:// sources: hdfs-native, the default, or hdfs3.",
        rich_help_panel=STORE,
    ),
]
Retries = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="How often what fails for a passing reason is tried again.",
        rich_help_panel=STORE,
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0.1,
        help="A server that sends nothing for so long counts as unavailable.",
        rich_help_panel=STORE,
    ),
]

# repartition
From = Annotated[str, typer.Argument(metavar="SOURCE", help="A cache, a directory or a URL.")]
Dest = Annotated[
    str | None,
    typer.Argument(metavar="DEST", help="A new directory: a path, hdfs:// or s3://. A cache needs none."),
]
RowGroupSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="* The largest row group in compressed bytes, like 64MB. 128MB at first.",
        rich_help_panel=ROW_GROUPS,
    ),
]
Compression = Annotated[
    str | None,
    typer.Option(
        metavar="CODEC",
        help="* zstd, zstd:LEVEL (1 to 22), lz4, snappy, none, or keep for each column's own.",
        rich_help_panel=ROW_GROUPS,
    ),
]
Compat = Annotated[
    bool | None,
    typer.Option(
        "--compat/--no-compat",
        help="* Write only what old readers know: no DELTA, no BYTE_STREAM_SPLIT, and snappy.",
        rich_help_panel=ROW_GROUPS,
    ),
]
KeepInt96 = Annotated[
    bool | None,
    typer.Option(
        "--keep-int96/--no-keep-int96",
        help="* Leave INT96 time stamps as they are.",
        rich_help_panel=ROW_GROUPS,
    ),
]
Dense = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN",
        help="* Store lists of one length as bytes, which are read several times faster. "
        "'auto' proposes columns, 'none' turns all back.",
        rich_help_panel=ROW_GROUPS,
    ),
]
Narrow = Annotated[
    bool,
    typer.Option(
        "--narrow",
        help="* Dense integers in the smallest type that holds every value.",
        rich_help_panel=ROW_GROUPS,
    ),
]
Shuffle = Annotated[
    int | None,
    typer.Option(metavar="SEED", min=0, help="* Permute the rows of each partition.", rich_help_panel=ROW_GROUPS),
]
Align = Annotated[
    str | None,
    typer.Option(
        metavar="block",
        help="Put no row group of DEST across a block boundary.",
        rich_help_panel=DESTINATION,
    ),
]
BlockSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Size of the blocks: 128MB with --align, else the cluster's own.",
        rich_help_panel=DESTINATION,
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Do the work on a Dask cluster, like tcp://host:8786.", rich_help_panel=RUN),
]
PartitionJobs = Annotated[
    int, typer.Option("-j", "--jobs", metavar="N", min=1, help="Partitions at once.", rich_help_panel=RUN)
]

# inspect
Target = Annotated[str, typer.Argument(metavar="TARGET", help="A cache, a directory, a file or a URL.")]
MeasuredAgainst = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="What row groups are measured against: by default the size that a cache was repartitioned to, HDFS's own "
        "block size, elsewhere 128MB.",
        rich_help_panel=SHOWN,
    ),
]
AllPartitions = Annotated[
    bool, typer.Option("--partitions", help="All partitions, however many.", rich_help_panel=SHOWN)
]
OnlyColumns = Annotated[bool, typer.Option("--columns", help="Only the columns, all of them.", rich_help_panel=SHOWN)]
OnlySchema = Annotated[bool, typer.Option("--schema", help="Only names and types.", rich_help_panel=SHOWN)]
OnlyFiles = Annotated[
    bool, typer.Option("--files", help="Only the files, each with its largest row group.", rich_help_panel=SHOWN)
]
OnlyRowGroups = Annotated[
    bool,
    typer.Option(
        "--row-groups",
        help="Only the row groups; those that are too large are marked with '!'.",
        rich_help_panel=SHOWN,
    ),
]
Sample = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Only the first N rows of a local dataset.", rich_help_panel=SHOWN),
]
Diff = Annotated[
    tuple[str, str] | None,
    typer.Option(metavar="OLD NEW", help="Only what differs between two snapshots of a cache.", rich_help_panel=SHOWN),
]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write one page with charts, which needs no other file.", rich_help_panel=OUTPUT),
]
FooterJobs = Annotated[
    int, typer.Option("-j", "--jobs", metavar="N", min=1, help="Footers read at once.", rich_help_panel=RUN)
]
OneJson = Annotated[bool, typer.Option("--json", help="Write JSON.", rich_help_panel=OUTPUT)]

# verify
Deep = Annotated[
    bool,
    typer.Option(
        "--deep",
        help="Also compare the checksums that were recorded, decode every page, and check the statistics.",
        rich_help_panel=CHECKS,
    ),
]
AtSource = Annotated[
    bool,
    typer.Option("--source", help="Also tell which files have changed at the source since.", rich_help_panel=CHECKS),
]
Engine = Annotated[
    str | None,
    typer.Option(
        metavar="fastparquet",
        help="Also compare every value with what fastparquet reads. Implies --deep.",
        rich_help_panel=CHECKS,
    ),
]
Repair = Annotated[
    bool,
    typer.Option("--repair", help="Fetch what is damaged again, into a new snapshot.", rich_help_panel=CHECKS),
]
Processes = Annotated[
    int | None,
    typer.Option(
        "-j",
        "--jobs",
        metavar="N",
        min=1,
        help="Processes that read; by default one per processor.",
        rich_help_panel=RUN,
    ),
]

# index
Key = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN", help="Make a key index of this column. May be given several times.", rich_help_panel=KEYS
    ),
]
Drop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN",
        help="Remove the key index of this column, and make none any more. May be given several times.",
        rich_help_panel=KEYS,
    ),
]
Sorters = Annotated[
    int | None,
    typer.Option(
        "-j",
        "--jobs",
        metavar="N",
        min=1,
        help="Threads that read and sort; by default one per processor, at most 4.",
        rich_help_panel=RUN,
    ),
]

# log
Last = Annotated[int, typer.Option("-n", "--last", metavar="N", min=1, help="How many runs to show.")]
RunsJson = Annotated[bool, typer.Option("--json", help="Write one JSON object per run.")]

# gc
KeepNow = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Snapshots to keep, the current one among them; by default what the cache remembers.",
        rich_help_panel=GUARDS,
    ),
]
OlderThan = Annotated[
    str,
    typer.Option(metavar="DURATION", help="Remove only snapshots older than this, like 48h.", rich_help_panel=GUARDS),
]

# of bench
LocalTarget = Annotated[str, typer.Argument(metavar="TARGET", help="A cache, a directory or a file.")]
BenchColumns = Annotated[
    str | None,
    typer.Option("--columns", metavar="A,B,...", help="Columns to read; all by default.", rich_help_panel=TAKEN),
]
Filters = Annotated[
    str | None,
    typer.Option(metavar="CONDITION", help="Rows to read, as the dataset's filters.", rich_help_panel=TAKEN),
]
BatchSize = Annotated[int, typer.Option(metavar="N", min=1, help="Rows of a batch.", rich_help_panel=RUN)]
Memory = Annotated[
    str, typer.Option(metavar="SIZE", help="Memory for decoded row groups, as the dataset's.", rich_help_panel=RUN)
]
Workers = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Numbers of DataLoader workers; 0, 1, 2, 4 ... cores.", rich_help_panel=RUN),
]
ReportJson = Annotated[bool, typer.Option("--json", help="Write one JSON object.", rich_help_panel=OUTPUT)]
Seconds = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.01, help="How long to measure each.", rich_help_panel=RUN)
]
