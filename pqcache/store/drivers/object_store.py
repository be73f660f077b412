"""A source and a target on Google Cloud Storage or Azure Blob Storage, through obstore.

obstore's threads do not survive a fork. If the parent has used it, a child gets an error instead of waiting forever.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore

from pqcache.errors import (
    PqcacheError,
    SourceChanged,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
    first_line,
)
from pqcache.options import TIMEOUT
from pqcache.store.drivers.base import HIDDEN, STAGING, Capabilities, StagedFile, StoreTarget, check_options, read_range
from pqcache.store.drivers.remote import RemoteSource, answer_error, censored
from pqcache.store.drivers.timeouts import with_time_limit
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.urls import redact, url_scheme

_ANON = "true reads public data without credentials"
GCS_OPTIONS = {
    "endpoint": "URL of a compatible store, as STORAGE_EMULATOR_HOST",
    "service_account": "file with a service account's key, as GOOGLE_APPLICATION_CREDENTIALS",
    "token": "OAuth access token",
    "anon": _ANON,
}
AZURE_OPTIONS = {
    "account_name": "storage account, as AZURE_STORAGE_ACCOUNT_NAME, or az://CONTAINER@ACCOUNT.HOST/PATH",
    "account_key": "its key, as AZURE_STORAGE_ACCOUNT_KEY",
    "sas_token": "shared access signature, as AZURE_STORAGE_SAS_TOKEN",
    "connection_string": "account, key and endpoint, as AZURE_STORAGE_CONNECTION_STRING",
    "tenant_id": "tenant of a service principal, as AZURE_TENANT_ID",
    "client_id": "its id, as AZURE_CLIENT_ID",
    "client_secret": "its secret, as AZURE_CLIENT_SECRET",
    "token": "OAuth access token",
    "use_azure_cli": "true takes the credentials of `az login`",
    "endpoint": "URL of a compatible store",
    "anon": _ANON,
}
_CREDENTIALS = {"account_key", "sas_key", "client_id", "token", "bearer_token", "use_azure_cli", "service_account"}
_CREDENTIAL = r"key|sas|token|client|cli$|msi|identity|service_account|credentials"  # in the name of a variable
# obstore's names where they differ
_GCS_NAMES = {"endpoint": "base_url", "token": "bearer_token", "anon": "skip_signature"}
_AZURE_NAMES = {"sas_token": "sas_key", "anon": "skip_signature"}
_ADVICE = {  # if access is denied
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS, -o service_account=FILE, or -o anon=true for public data",
    "az": "check AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, -o use_azure_cli=true, or -o anon=true for public "
    "data",
}


@dataclass(frozen=True, kw_only=True, repr=False)
class BucketConfig:
    """A bucket or container and a path in it, without a slash at either end.

    ``scheme`` is ``gs`` or ``az``, whatever the URL says. ``config``, by obstore's names, may hold secrets.
    """

    scheme: str
    bucket: str
    root: str
    config: Mapping[str, str]

    @property
    def endpoint(self) -> str:
        """Empty for Google's or Azure's own."""
        return self.config.get("endpoint") or self.config.get("base_url", "")


def place_of(url: str, options: Mapping[str, str]) -> BucketConfig:
    """Parse a URL and its options; raises UsageError for an unknown option, or a missing bucket or account."""
    scheme = url_scheme(url)
    netloc, _, path = url.partition("://")[2].partition("/")
    root, shown = path.strip("/"), redact(url)
    if scheme in ("gs", "gcs"):
        check_options(f"{scheme}://", options, GCS_OPTIONS)
        config = _named(options, _GCS_NAMES)
        if "base_url" not in config and (emulator := os.environ.get("STORAGE_EMULATOR_HOST")):
            config["base_url"] = emulator if "://" in emulator else f"http://{emulator}"
        _protect_machine(config, config.get("base_url", ""), "GOOGLE_")
        _check_bucket(shown, netloc, f"{scheme}://BUCKET/PATH")
        _check_endpoint(config.get("base_url", ""))
        return BucketConfig(scheme="gs", bucket=netloc, root=root, config=config)
    check_options(f"{scheme}://", options, AZURE_OPTIONS)
    container, _, host = netloc.partition("@")
    _check_bucket(shown, container, f"{scheme}://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH")
    config = {**_from_connection_string(options), **_from_host(shown, host), **_named(options, _AZURE_NAMES)}
    config.pop("connection_string", None)
    _check_endpoint(config.get("endpoint", ""))
    _protect_machine(config, config.get("endpoint", ""), "AZURE_")
    if not (config.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")):
        advice = f"write {scheme}://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH, or give -o account_name=ACCOUNT"
        raise UsageError(shown, "names no storage account", advice)
    return BucketConfig(scheme="az", bucket=container, root=root, config=config)


def _named(options: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    return {names.get(name, name): value for name, value in options.items()}


def _from_host(shown: str, host: str) -> dict[str, str]:
    """Parse ACCOUNT.dfs.core.windows.net; clouds with other host names also need an endpoint."""
    if not host:
        return {}
    match = re.fullmatch(r"([^.:@/]+)\.(?:dfs|blob)\.([\w.-]+)", host)
    if match is None:
        advice = "write CONTAINER@ACCOUNT.dfs.core.windows.net, or CONTAINER alone with -o endpoint=URL"
        raise UsageError(shown, "names no storage account", advice)
    account, cloud = match.groups()
    if cloud == "core.windows.net":
        return {"account_name": account}
    return {"account_name": account, "endpoint": f"https://{account}.blob.{cloud}"}


def _from_connection_string(options: Mapping[str, str]) -> dict[str, str]:
    """Settings in Azure's connection string, from the option or the environment."""
    text = options.get("connection_string") or os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    parts = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    if text and "AccountName" not in parts and "BlobEndpoint" not in parts:
        raise UsageError("the connection string", "has no AccountName", "copy it from the account's access keys")
    endpoint = parts.get("BlobEndpoint", "")
    if not endpoint and "EndpointSuffix" in parts:
        protocol, suffix = parts.get("DefaultEndpointsProtocol", "https"), parts["EndpointSuffix"]
        endpoint = f"{protocol}://{parts.get('AccountName', '')}.blob.{suffix}"
    found = {
        "account_name": parts.get("AccountName", ""),
        "account_key": parts.get("AccountKey", ""),
        "sas_key": parts.get("SharedAccessSignature", ""),
        "endpoint": endpoint.rstrip("/"),
    }
    return {name: value for name, value in found.items() if value}


def _protect_machine(config: dict[str, str], endpoint: str, prefix: str) -> None:
    """Read anonymously if no credentials are given and the endpoint has no TLS, so the machine's don't leak."""
    given = {name for name in (*config, *os.environ) if name in _CREDENTIALS or name.startswith(prefix)}
    if endpoint.startswith("http://") and not any(re.search(_CREDENTIAL, name, re.IGNORECASE) for name in given):
        config.setdefault("skip_signature", "true")


def _check_bucket(shown: str, bucket: str, form: str) -> None:
    if not bucket:
        raise UsageError(shown, "no bucket" if "BUCKET" in form else "no container", f"write {form}")
    if "@" in bucket or ":" in bucket:
        raise UsageError(shown, "has a user, a password or a port", "give credentials with -o, or in the environment")


def _check_endpoint(endpoint: str) -> None:
    if "@" in endpoint or "?" in endpoint:
        raise UsageError("-o endpoint", "holds a user, a password or a signature", "give credentials as options")


log = logging.getLogger("pqcache.store")

_PAGE = 1000  # objects that a listing passes between threads at once
_PART, _MAX_PARTS, _PARALLEL_PARTS = 8 << 20, 10_000, 4  # of an upload; bytes, parts, parts at once
_PART_TIMEOUT = 120.0  # seconds for one part, however slow the network
_UPLOAD_TIMEOUT = 30 * 24 * 3600.0  # seconds for a file: each of its parts has a limit
_CLIENT_TRIES = 2  # of one request, before the caller tries the whole file again
_DELETED_AT_ONCE = 256  # as many as Azure takes in one request
_TAIL = 4096  # bytes that are compared after a copy
_LISTINGS = 5  # of files to remove, until none is left
_STORES = {"gs": GCSStore, "az": AzureStore}
_STATUSES = {FileNotFoundError: 404, PreconditionError: 412, PermissionDeniedError: 403, UnauthenticatedError: 401}
_process = {"used": False, "forked": False}


class ObjectStoreSource(RemoteSource):
    capabilities = Capabilities(reads_versions=True)
    raises = (BaseError, OSError, ValueError)

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        self.place = place_of(url, options)
        super().__init__(url, self.place.root, options, timeout)
        what = "the name of the account" if self.place.scheme == "az" else "proxies"
        self.network_advice = f"check {'the endpoint' if self.place.endpoint else what} and the network"
        self._check_process()
        _process["used"] = True
        try:
            self._store = new_store(self.place, timeout)
        except (BaseError, ValueError, OSError) as error:
            variables = "GOOGLE_*" if self.place.scheme == "gs" else "AZURE_*"
            advice = f"check the options and the {variables} variables"
            reason = re.sub(r"(Invalid Access Key).*", r"\1", first_line(error))  # the rest has a letter of it
            shown = censored(UsageError(self.url, reason, advice), self._secrets, error)
            raise shown from shown.__cause__

    def _list(self) -> Iterator[SourceFile]:
        start = len(self._root) + 1 if self._root else 0
        found, empty, directories = False, [], set()
        for page in with_time_limit(self._pages, self.first_timeout):
            for item in page:
                found, path = True, item["path"][start:]
                directories.add(path.rpartition("/")[0])
                if item["size"]:
                    yield SourceFile(path, _identity(item))
                else:
                    empty.append(SourceFile(path, _identity(item)))
        for file in empty:  # obstore leaves out the last '/' in the name of an object that stands for a directory
            if file.path not in _with_parents(directories):
                yield file
        if not found and self._root:
            with suppress(SourceNotFound):
                known = self.stat("")
                yield SourceFile(self.take_only_file(), known)

    def _stat(self, path: str) -> Identity:
        return _identity(obstore.head(self._store, self.key_of(path)))

    def _read(self, path: str, offset: int, length: int, tag: str) -> Iterator[bytes]:
        asked = {"range": (offset, offset + length), **({"if_match": f'"{tag}"'} if tag else {})}
        found = obstore.get(self._store, self.key_of(path), options=asked)
        if tag and _tag(found.meta) != tag:
            raise SourceChanged(self.name_of(path), "is not the version that was listed")
        if tuple(found.range) != (offset, offset + length):
            raise SourceUnavailable(self.name_of(path), "the server sent another range than was asked for")
        yield from found.stream(min_chunk_size=1)  # as they come: a slow connection is no stalled one

    def close(self) -> None:
        pass

    def _pages(self) -> Iterator[Any]:
        yield from obstore.list(self._store, f"{self._root}/" if self._root else None, chunk_size=_PAGE)

    def explain(self, name: str, error: BaseException) -> PqcacheError:
        text, scheme, advice = str(error), self.place.scheme, self.network_advice
        if "kind: Timeout" in text:  # by the client's own limit, which is the same
            return SourceUnavailable(name, "no answer in time", advice)
        match = re.search(r"status code: (\d{3})", text)
        code = found[1] if (found := re.search(r"<Code>(\w+)</Code>", text)) else ""
        said = " ".join(filter(None, [match[1] if match else "", code])) or type(error).__name__
        known = (meant for kind, meant in _STATUSES.items() if isinstance(error, kind))
        status = int(match[1]) if match else next(known, 0)
        if "token request" in text and status < 500:
            return SourceDenied(
                name, "no credentials found, and this machine has no account of its own", _ADVICE[scheme]
            )
        if code in ("ContainerNotFound", "NoSuchBucket"):
            return SourceNotFound(name, f"no such {'bucket' if scheme == 'gs' else 'container'}", "check the URL")
        if code in ("BlobArchived", "BlobBeingRehydrated"):
            return SourceDenied(name, f"is archived ({code})", "rehydrate it in the store")
        if status:
            return answer_error(name, 503 if code == "PendingCopyOperation" else status, said, _ADVICE[scheme])
        if (reason := re.search(r"HTTP error: ([^\n]*)", text)) is not None:
            kind = SourceError if "InvalidCertificate" in text else SourceUnavailable
            return kind(name, _unreachable(text, reason[1].partition(" for url ")[0]), advice)
        return SourceError(name, first_line(text))

    def _check_process(self) -> None:
        if _process["forked"]:
            reason = "obstore was used before this process was forked, and cannot be used in it"
            raise SourceError(self.url, reason, "fork before the first use, or start processes with 'spawn'")

    @contextmanager
    def errors(self, path: str) -> Iterator[None]:
        self._check_process()
        with super().errors(path):
            yield


def _forget_parent() -> None:
    _process["forked"] = _process["used"]


os.register_at_fork(after_in_child=_forget_parent)


def new_store(place: BucketConfig, timeout: float, retries: int = 0) -> Any:
    """obstore's client, by default without retries: a source's caller retries."""
    client = {
        "allow_http": place.endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=5),
        "read_timeout": timedelta(seconds=timeout),  # so that a thread that was given up ends
        "timeout": timedelta(days=30),  # of a whole download, however large
    }
    retry = {"max_retries": retries, "retry_timeout": timedelta(seconds=timeout)}
    return _STORES[place.scheme](place.bucket, config=place.config, client_options=client, retry_config=retry)


def _identity(item: Mapping[str, Any]) -> Identity:
    modified: datetime = item["last_modified"]  # a listing has milliseconds where an answer about one object has none
    return Identity(item["size"], int(modified.timestamp()) * 1_000_000_000, _tag(item))


def _tag(item: Mapping[str, Any]) -> str:
    return (item["e_tag"] or "").strip('"')


def _with_parents(directories: set[str]) -> set[str]:
    found: set[str] = set()
    for directory in directories:
        while directory and directory not in found:
            found.add(directory)
            directory = directory.rpartition("/")[0]
    return found


def _unreachable(text: str, reason: str) -> str:
    """Host and cause from obstore's text, whose own summary is ``reason``."""
    asked = re.search(r"Error performing [A-Z]+ (https?://\S+)", text)
    host = urlsplit(asked[1]).netloc.rpartition("@")[2] if asked is not None else ""
    if (system := re.search(r'message: "([^"]+)"', text)) is not None:
        reason = system[1].lower()
    elif "InvalidCertificate" in text:
        reason = "its certificate is not valid"
    if not host:
        return reason
    return f"{host} cannot be reached ({reason})" if "kind: Connect" in text else f"{host}: {reason}"


class ObjectStoreTarget(StoreTarget):
    """A Target over obstore.

    These stores cannot rename, and obstore cannot complete an upload later. So the files of an attempt are staged in
    ``_pqcache/tmp``, then copied within the store to their final names, one after the other; each appears complete. The
    store makes the copies, so nothing is sent again.
    """

    _source: ObjectStoreSource

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        super().__init__(ObjectStoreSource(url, options, timeout))
        self._timeout = timeout
        place = self._source.place
        if place.config.get("skip_signature", "").lower() == "true":  # obstore would ask the machine for its account
            advice = "give -o token=TOKEN (any for an emulator)" if place.scheme == "gs" else "give -o account_key=KEY"
            raise UsageError(self._source.url, "is written with credentials only", f"{advice}, or in the environment")
        self._store = new_store(place, max(timeout, _PART_TIMEOUT), _CLIENT_TRIES)

    def begin(self) -> None:
        self.remove([file.path for file in self.list() if file.path.startswith(f"{STAGING}/")])

    def write(self, path: str, data: bytes) -> None:
        self._call(path, lambda key: obstore.put(self._store, key, data, use_multipart=False))

    def remove(self, paths: Sequence[str]) -> None:
        for first in range(0, len(paths), _DELETED_AT_ONCE):
            some = paths[first : first + _DELETED_AT_ONCE]
            keys = [self._source.key_of(path) for path in some]
            try:
                self._call("", partial(self._delete, keys))
            except SourceNotFound:  # one of them: which others are removed is not known
                for path in some:
                    with suppress(SourceNotFound):
                        self._call(path, lambda key: self._delete([key]))

    def stage(self, file: Path, token: str, path: str) -> StagedFile:
        size, staged = file.stat().st_size, f"{STAGING}/{token}/{path.rpartition('/')[2]}"
        part = max(_PART, -(-size // _MAX_PARTS))

        def put(key: str) -> None:
            obstore.put(self._store, key, file, chunk_size=part, max_concurrency=_PARALLEL_PARTS)

        self._call(staged, put, _UPLOAD_TIMEOUT)
        if (stored := self._source.stat(staged).size) != size:
            raise SourceUnavailable(self._source.name_of(staged), f"has {stored:,} bytes of {size:,} that were sent")
        return StagedFile(path, file, size, staged)

    def commit(self, token: str, directory: str, staged: Sequence[StagedFile], exclusive: bool) -> None:
        for item in staged:
            to = self._source.key_of(item.path)
            with suppress(SourceNotFound):  # published by an earlier call, whose answer was lost
                self._call(item.handle, partial(self._copy, to))
            self._check_copy(item)
        self.discard(token, staged)

    def discard(self, token: str, staged: Sequence[StagedFile]) -> None:
        try:
            self.remove([item.handle for item in staged])
        except SourceError as error:
            log.debug("%s: staged files are left: %s", self.url, error)

    def finish(self) -> None:
        for _ in range(_LISTINGS):  # an empty directory, which some accounts of Azure have, is listed once it is empty
            hidden = [file.path for file in self.list() if f"{file.path}/".startswith(f"{HIDDEN}/")]
            if not hidden:
                return
            self.remove(hidden)

    def abandon(self) -> None:
        self.finish()

    def _copy(self, to: str, key: str) -> None:
        obstore.copy(self._store, key, to)

    def _delete(self, keys: Sequence[str], _: str = "") -> None:
        obstore.delete(self._store, keys)

    def _check_copy(self, item: StagedFile) -> None:
        """Raise SourceUnavailable unless readers see the file: Azure may still be copying after its answer."""
        name, found = self._source.name_of(item.path), self._source.stat(item.path)
        start = max(0, item.size - _TAIL)
        tail = read_range(self._source, item.path, start, item.size - start) if found.size == item.size else b""
        with item.file.open("rb") as file:
            file.seek(start)
            if tail != file.read():
                raise SourceUnavailable(
                    name, "is not the file that was copied there", "check whether something else writes there"
                )

    def _call(self, path: str, call: Callable[[str], object], seconds: float | None = None) -> None:
        limit = max(self._timeout, _PART_TIMEOUT) * (_CLIENT_TRIES + 1) if seconds is None else seconds
        with self._source.errors(path):
            self._source.within(partial(call, self._source.key_of(path)), limit)
