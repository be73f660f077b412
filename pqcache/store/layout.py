"""The names of a cache's files; ``docs/cache-format.md`` describes them."""

FILES = "_pqcache/files.arrow"
ROW_GROUPS = "_pqcache/row_groups.arrow"
LEASE = "_pqcache/lease"
SUMMARY = "_pqcache/summary.json"
CHECKSUMS = "_pqcache/checksums.json"
CONFIG = "pqcache.toml"
CONTENT = "content.json"
