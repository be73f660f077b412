"""The examples in the help of each command. The tests check the options of each; the manual pages show them too."""

from __future__ import annotations

EXAMPLES = {  # the first ones are of pqcache itself
    "": """\
# Copy a table, and refresh it later
pqcache sync hdfs://namenode:8020/warehouse/shop cache/shop
pqcache sync cache/shop
# Set the row-group size for training, and inspect the result
pqcache repartition cache/shop --row-group-size 128MB
pqcache inspect cache/shop
# More about a command
pqcache sync --help
man pqcache-sync
""",
    "sync": """\
# The first run, with options that are remembered
pqcache sync s3://lake/warehouse/shop cache/shop \\
    --where "dt >= '2026-11-01'" --row-group-size 128MB
# Every later run
pqcache sync cache/shop
# Show what a run would do
pqcache sync cache/shop --dry-run
# All caches of a directory, for Prometheus, and with a mail on a failure
pqcache sync --all /data/cache --bwlimit '08:00,100MB 19:00,off' \\
    --metrics /var/lib/node_exporter/pqcache.prom \\
    --on-failure 'mail -s "$PQCACHE_ERROR" ops < /dev/null'
# A first run that trainings read while it copies
pqcache sync s3://lake/warehouse/shop cache/shop --fill
""",
    "repartition": """\
# Rewrite a cache into a new snapshot
pqcache repartition cache/shop --row-group-size 64MB
# Rewrite a table on HDFS to a local directory
pqcache repartition hdfs://namenode:8020/warehouse/shop shop-128mb
# Store token windows as bytes, and shuffle the rows of each partition
pqcache repartition cache/text --dense tokens --narrow --shuffle 7
# Rewrite on HDFS with a Dask cluster, each row group within one block
pqcache repartition hdfs://namenode:8020/warehouse/shop \\
    hdfs://namenode:8020/warehouse/shop-aligned \\
    --align block --scheduler tcp://scheduler:8786
""",
    "inspect": """\
# Compare row groups on HDFS with the block size
pqcache inspect hdfs://namenode:8020/warehouse/shop
# Show the first two rows
pqcache inspect cache/shop --sample 2
# Rows per partition as JSON
pqcache inspect cache/shop --json | jq '.partitions[] | {path, rows}'
""",
    "rows": """\
# Show the rows of batch 1234 and their values
pqcache rows cache/shop --state checkpoint.json --batch 1234 --sample
# Whether the epoch of two ranks had every row exactly once
pqcache rows cache/shop --prove proof-0.json proof-1.json
# The files of its rows, of a training with a filter
pqcache rows cache/shop --state checkpoint.json --batch 1234 \\
    --filters "price > 0.5" --json | jq -r .file | sort | uniq -c
""",
    "verify": """\
# Decode every page, and repair what is damaged
pqcache verify cache/shop --deep --repair
# List files that have changed at the source
pqcache verify cache/shop --source
""",
    "index": """\
# Build key indexes of two columns
pqcache index cache/shop --key user_id --key email
# List the key indexes
pqcache index cache/shop
# Remove one
pqcache index cache/shop --drop email
""",
    "bench": """\
# Measure what a training reads
pqcache bench cache/shop --columns id,price,tokens --batch-size 1024
# Measure other numbers of workers
pqcache bench cache/shop --workers 0,4,12 --seconds 10
""",
    "gc": """\
# Remove all snapshots but the current one
pqcache gc cache/shop --keep 1
# Keep snapshots of the last two days for programs that hold no lease
pqcache gc cache/shop --keep 1 --older-than 48h
""",
    "log": """\
# Bytes fetched in the last thirty runs
pqcache log cache/shop --last 30 --json | jq -s 'map(.fetched_bytes) | add'
""",
    "add": """\
# Two tables, and a sync of all
export PQCACHE_ROOT=/data/cache
pqcache add s3://lake/warehouse/shop
pqcache add hdfs://namenode:8020/warehouse/users people
pqcache sync --all
""",
    "remove": """\
# Remove the cache /data/cache/people
pqcache remove people --root /data/cache
""",
    "status": """\
# All caches below a directory
pqcache status /data/cache
# For a monitor: exit code 1 if one is older
PQCACHE_ROOT=/data/cache pqcache status --max-age 30h
""",
    "serve": """\
# Serve a cache to a cluster, with a token that is in a file
openssl rand -hex 32 > token; chmod 600 token
pqcache serve cache/shop --bind 10.0.0.7 --token-file token
# On the other nodes
pqcache sync pqcache+http://10.0.0.7:8700/shop cache/shop \\
    -o token_file=$PWD/token
""",
    "snapshots": """\
# List what there is to go back to
pqcache snapshots cache/shop
""",
    "pin": """\
# Keep what a model was trained on, and let it go later
pqcache pin cache/shop 20261120T040003Z-0007 --name paper
pqcache unpin cache/shop paper
""",
    "unpin": """\
# Let it go
pqcache unpin cache/shop paper
""",
    "rollback": """\
# Go back to an older snapshot
pqcache snapshots cache/shop
pqcache rollback cache/shop 20261120T040003Z-0007
# By its number, and stay there: syncs publish nothing
pqcache rollback cache/shop 7 --hold
# Publish what they have made, and end that
pqcache rollback cache/shop --release
""",
    "demo": """\
# Run it, and look at what it has made
pqcache demo
pqcache inspect pqcache-demo/cache
# Leave its files in another directory
pqcache demo build/demo
""",
    "help": """\
# All options of sync
pqcache help sync
""",
}
