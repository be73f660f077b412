"""What a URL and its options say about a bucket of Google Cloud Storage or a container of Azure Blob Storage."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pqcache.errors import UsageError
from pqcache.store.drivers.base import check_options
from pqcache.store.urls import redact, url_scheme

GCS_SCHEMES = ("gs", "gcs")
AZURE_SCHEMES = ("az", "abfs", "abfss")
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
_GCS_ADVICE = "check GOOGLE_APPLICATION_CREDENTIALS, -o service_account=FILE, or -o anon=true for public data"
_AZURE_ADVICE = (
    "check AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, -o use_azure_cli=true, or -o anon=true for public data"
)


@dataclass(frozen=True, kw_only=True, repr=False)
class BucketConfig:
    """A bucket or container, a path in it, and obstore's configuration, which may hold secrets.

    Attributes:
        scheme: ``gs`` or ``az``, whatever the URL says.
        base: the URL of the bucket as the user wrote it, fit to be shown.
        bucket: its name.
        root: the path in it, without a slash at either end.
        config: values by obstore's names.
        advice: what to do where access is denied.
    """

    scheme: str
    base: str
    bucket: str
    root: str
    advice: str
    config: Mapping[str, str] = field(default_factory=dict)

    @property
    def allow_http(self) -> bool:
        """Whether the named endpoint has no TLS."""
        return any(self.config.get(name, "").startswith("http://") for name in ("endpoint", "base_url"))

    @property
    def endpoint_words(self) -> str:
        """How the endpoint was set, in words."""
        named = any(name in self.config for name in ("endpoint", "base_url"))
        return "the endpoint" if named else "the name of the account" if self.scheme == "az" else "proxies"

    @property
    def is_anonymous(self) -> bool:
        return self.config.get("skip_signature", "").lower() == "true"

    @property
    def bucket_word(self) -> str:
        """What the store calls a bucket."""
        return "bucket" if self.scheme == "gs" else "container"

    @property
    def credentials(self) -> str:
        """Where its options come from, in words."""
        return "options and the GOOGLE_* variables" if self.scheme == "gs" else "options and the AZURE_* variables"


def place_of(url: str, options: Mapping[str, str]) -> BucketConfig:
    """Return the place that a URL names; an unknown option, or no bucket or account, raises UsageError."""
    scheme = url_scheme(url)
    netloc, _, path = url.partition("://")[2].partition("/")
    root, shown = path.strip("/"), redact(url)
    if scheme in GCS_SCHEMES:
        check_options(f"{scheme}://", options, GCS_OPTIONS)
        config = _named(options, _GCS_NAMES)
        if "base_url" not in config and (emulator := os.environ.get("STORAGE_EMULATOR_HOST")):
            config["base_url"] = emulator if "://" in emulator else f"http://{emulator}"
        _protect_machine(config, config.get("base_url", ""), "GOOGLE_")
        _check_bucket(shown, netloc, f"{scheme}://BUCKET/PATH")
        _check_endpoint(config.get("base_url", ""))
        base = f"{scheme}://{netloc}"
        return BucketConfig(scheme="gs", base=base, bucket=netloc, root=root, config=config, advice=_GCS_ADVICE)
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
    base = f"{scheme}://{netloc}"
    return BucketConfig(scheme="az", base=base, bucket=container, root=root, config=config, advice=_AZURE_ADVICE)


def _named(options: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    return {names.get(name, name): value for name, value in options.items()}


def _from_host(shown: str, host: str) -> dict[str, str]:
    """Parse ACCOUNT.dfs.core.windows.net; clouds with other names need their endpoint as well."""
    if not host:
        return {}
    match = re.fullmatch(r"([^.:@/]+)\.(?:dfs|blob)\.([\w.-]+)", host)
    if match is None:
        advice = "write CONTAINER@ACCOUNT.dfs.core.windows.net, or CONTAINER alone with -o endpoint=URL"
        raise UsageError(shown, "has no account that is known", advice)
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
    """Read anonymously if no credentials are given and the endpoint has no TLS: the machine's must not leak."""
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
