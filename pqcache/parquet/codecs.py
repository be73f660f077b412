"""The compression codecs of Parquet, each with the names that it goes by."""

from __future__ import annotations

from typing import NamedTuple


class Codec(NamedTuple):
    """A codec.

    ``name`` is as in ``--compression``, ``metadata`` as in pyarrow's `ColumnChunkMetaData.compression`, ``arrow`` as in
    `pyarrow.Codec` (None for no codec), and ``number`` its CompressionCodec in parquet.thrift.
    """

    name: str
    number: int
    metadata: str
    arrow: str | None
    has_levels: bool = True


_ALL = (
    Codec("none", 0, "UNCOMPRESSED", None, has_levels=False),
    Codec("snappy", 1, "SNAPPY", "snappy", has_levels=False),
    Codec("gzip", 2, "GZIP", "gzip"),
    Codec("brotli", 4, "BROTLI", "brotli"),
    Codec("zstd", 6, "ZSTD", "zstd"),
    Codec("lz4", 7, "LZ4", "lz4_raw", has_levels=False),
)
CODECS = {codec.name: codec for codec in _ALL}
IN_METADATA = {codec.metadata: codec for codec in _ALL}


def codec_name(metadata: str) -> str:
    """Unknown codecs keep their name, in lower case."""
    known = IN_METADATA.get("LZ4" if metadata == "LZ4_RAW" else metadata)
    return metadata.lower() if known is None else known.name
