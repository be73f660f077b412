"""Why a first copy cannot be read while it arrives."""

from __future__ import annotations

from pqcache.errors import ParquetError
from pqcache.store.drivers.base import Source
from pqcache.store.sync.listing import Listing


def obstacle(source: Source, listing: Listing) -> str:
    """Return why the files of a listing cannot be read before all is there; empty where they can."""
    if listing.subset.ignore_case:
        return "columns get one spelling while they are fetched"
    if listing.subset.where is not None:
        return "rows are filtered while they are fetched"
    shapes = (source.shape_of(file.path) for file in listing.files)
    if any(shape is not None and shape.deleted_rows is not None for shape in shapes):
        return "its table deletes rows of files"
    return ""


class NeedsRewriting(Exception):
    """The files as they are at the source have no index in common; once they are rewritten they have."""

    def __init__(self, error: ParquetError) -> None:
        super().__init__(f"{error.subject}: {error.reason}")
