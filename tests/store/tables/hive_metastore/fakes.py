"""Metastores of other versions, with other logins, and servers that are none: in this process, on 127.0.0.1."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hive_metastore.ThriftHiveMetastore import Processor
from hive_metastore.ttypes import (
    GetTableResult,
    NoSuchObjectException,
    Partition,
    Table,
)
from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.transport.TSocket import TSocket
from thrift.transport.TTransport import TBufferedTransport, TFramedTransport, TTransportException

from pqcache.store.tables.base import partition_path


class FakeMetastore:
    """Tables and partitions in memory, with the calls of a metastore's client that tests use, and those of pqcache."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}
        self.partitions: dict[str, dict[tuple[str, ...], Partition]] = {}
        self.asked: list[int] = []  # for how many partitions at once

    def create_database(self, _database: object) -> None: ...

    def create_table(self, table: Table) -> None:
        self.tables[table.tableName], self.partitions[table.tableName] = table, {}

    def alter_table(self, _database: str, name: str, table: Table) -> None:
        self.tables[name] = table

    def add_partitions(self, partitions: list[Partition]) -> None:
        for partition in partitions:
            self.alter_partition("", partition.tableName, partition)

    def alter_partition(self, _database: str, name: str, partition: Partition) -> None:
        self.partitions[name][tuple(partition.values)] = partition

    def drop_partition(self, _database: str, name: str, values: list[str], _delete: bool) -> None:
        del self.partitions[name][tuple(values)]

    def get_table(self, _database: str, name: str) -> Table:
        if name not in self.tables:
            raise NoSuchObjectException(f"{name} table not found")
        return self.tables[name]

    def get_table_req(self, request: Any) -> GetTableResult:
        return GetTableResult(table=self.get_table(request.dbName, request.tblName))

    def get_partition_names(self, _database: str, name: str, _count: int) -> list[str]:
        return list(self._by_name(name))

    def get_partitions_by_names(self, _database: str, name: str, names: list[str]) -> list[Partition]:
        found = self._by_name(name)
        self.asked.append(len(names))
        return [found[each] for each in names if each in found]

    def _by_name(self, name: str) -> dict[str, Partition]:
        keys = [key.name for key in self.tables[name].partitionKeys]
        return {partition_path(dict(zip(keys, values, strict=True))): partition
                for values, partition in self.partitions[name].items()}  # fmt: skip


@contextmanager
def metastore(
    handler: FakeMetastore,
    unknown: tuple[str, ...] = (),
    framed: bool = False,
    login: tuple[bytes, bytes] | None = None,
) -> Iterator[int]:
    """Answer as a metastore without the calls ``unknown``; with ``login`` only who gives that user and password."""
    processor = Processor(handler)
    for name in unknown:
        del processor._processMap[name]

    def serve(client: socket.socket) -> None:
        plain = TSocket()
        plain.setHandle(client)
        if login is not None and not _is_login(client, login):
            return
        transport = TFramedTransport(plain) if framed or login is not None else TBufferedTransport(plain)
        protocol = TBinaryProtocol(transport)
        with suppress(TTransportException, EOFError):
            while True:
                processor.process(protocol, protocol)

    with server(serve) as port:
        yield port


@contextmanager
def server(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Listen on 127.0.0.1 and give each connection to ``serve``, which may return with it open."""
    clients: list[socket.socket] = []

    def handle(client: socket.socket) -> None:
        with suppress(OSError):
            serve(client)
        with suppress(OSError):
            client.close()

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                clients.append(client)
                threading.Thread(target=handle, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    for client in clients:
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
        client.close()


def _is_login(client: socket.socket, login: tuple[bytes, bytes]) -> bool:
    """Take part in a SASL login with PLAIN; what follows is framed."""

    def receive(size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += client.recv(size - len(data)) or b"\0" * size
        return data

    def message() -> bytes:
        _, length = struct.unpack(">BI", receive(5))
        return receive(length)

    mechanism, answer = message(), message()
    if mechanism == b"PLAIN" and answer == b"\0" + b"\0".join(login):
        client.sendall(struct.pack(">BI", 5, 0))
        return True
    reason = b"Error validating the login " + answer.replace(b"\0", b" ")
    client.sendall(struct.pack(">BI", 3, len(reason)) + reason)
    return False
