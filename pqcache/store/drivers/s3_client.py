"""Clients of S3 and compatible stores, and the errors of pqcache for what they raise."""

from __future__ import annotations

import http.client
import logging
import re
from collections.abc import Mapping
from typing import Any

import botocore.exceptions
import botocore.session
import urllib3.exceptions
from botocore import UNSIGNED
from botocore.config import Config

from pqcache.errors import (
    SourceChanged,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
    first_line,
)
from pqcache.store.drivers.http_speed_floor import pool_classes
from pqcache.store.drivers.network_errors import known_cause
from pqcache.store.urls import redact, userinfo

log = logging.getLogger("pqcache.store")

OPTIONS = {
    "endpoint": "URL of a compatible store, as AWS_ENDPOINT_URL",
    "profile": "profile in ~/.aws/config, as AWS_PROFILE",
    "region": "region, as AWS_DEFAULT_REGION",
    "anon": "true reads public buckets without credentials",
    "key": "access key id, as AWS_ACCESS_KEY_ID",
    "secret": "secret access key, as AWS_SECRET_ACCESS_KEY",
    "token": "session token, as AWS_SESSION_TOKEN",
    "addressing": "path or virtual; by default what the endpoint needs",
    "requester_pays": "true pays for the requests",
}
_DENIED = {
    "403", "401", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch",
    "InvalidToken", "AllAccessDisabled", "AccountProblem",
}  # fmt: skip
_MISSING = {"404", "NoSuchKey", "NoSuchBucket", "NoSuchUpload", "NotFound"}
_NO_CREDENTIALS = (botocore.exceptions.NoCredentialsError, botocore.exceptions.PartialCredentialsError)
# a body is read through urllib3 or http.client, which raise errors of their own
ERRORS = (
    http.client.HTTPException,
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.ClientError,
    urllib3.exceptions.HTTPError,
    OSError,
)


def new_session(url: str, options: Mapping[str, str]) -> Any:
    """Return the session of all clients, which loads the description of S3 once."""
    user, password = userinfo(url)
    key, secret = options.get("key") or user, options.get("secret") or password
    if bool(key) != bool(secret):
        raise UsageError(redact(url), "has a key or a secret without the other", "give both, or neither")
    session = botocore.session.Session(profile=options.get("profile"))
    if key:
        session.set_credentials(key, secret, options.get("token"))
    return session


def new_client(session: Any, url: str, options: Mapping[str, str], timeout: float, attempts: int = 1) -> Any:
    """Return a client that waits ``timeout`` seconds for an answer; a bad endpoint or region raises UsageError."""
    config = Config(
        connect_timeout=5,
        read_timeout=timeout,
        # a download is retried by its caller, which knows how far it got
        retries={"total_max_attempts": attempts, "mode": "standard"},
        max_pool_connections=64,
        signature_version=UNSIGNED if is_true(options, "anon") else _signature(session),
        s3={"addressing_style": options["addressing"]} if "addressing" in options else None,
        response_checksum_validation="when_required",
        request_checksum_calculation="when_required",
    )
    try:
        region = options.get("region") or session.get_config_variable("region") or "us-east-1"
        client = session.create_client("s3", region_name=region, endpoint_url=options.get("endpoint"), config=config)
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise UsageError(redact(url), str(error)) from error
    _set_speed_floor(client, timeout)
    return client


def _signature(session: Any) -> str:
    """Return the version of signatures, which URLs are not signed by unless it is said."""
    return str((session.get_scoped_config().get("s3") or {}).get("signature_version", "s3v4"))


def _set_speed_floor(client: Any, timeout: float) -> None:
    """Let a client's answers have a floor of speed, also through a proxy."""
    pools = getattr(client._endpoint.http_session, "_pool_classes_by_scheme", None)
    if not isinstance(pools, dict):
        log.debug("s3: this botocore has no pools of connections that are known: an answer that drips has no limit")
        return
    pools.update(pool_classes(pools, timeout))  # it is the dict of all managers


def source_error(name: str, error: Exception) -> SourceError:
    """Return pqcache's error for what botocore, urllib3 or ``http.client`` has raised about the object ``name``."""
    if (known := known_cause(name, error)) is not None:
        return known
    if isinstance(error, botocore.exceptions.ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in _MISSING or status == 404:
            what = "no such bucket" if code == "NoSuchBucket" else "no such object"
            return SourceNotFound(name, what, "check the URL")
        if status == 412:
            return SourceChanged(name, "is not the version that was listed")
        if code == "InvalidObjectState":
            found = error.response["Error"].get("StorageClass")  # such as DEEP_ARCHIVE
            return SourceDenied(name, f"is archived ({found or code})", "restore it in the store")
        if code in _DENIED or status in (401, 403):
            return SourceDenied(
                name,
                f"access denied ({code})",
                "check the credentials (AWS_ACCESS_KEY_ID, AWS_PROFILE, -o profile=NAME, or -o anon=true "
                "for public data)",
            )
        if status >= 500 or status == 429 or code in ("SlowDown", "RequestTimeout"):
            return SourceUnavailable(name, f"the server answers {status} {code}", "try again later")
        return SourceError(name, f"the server answers {status} {code}")
    if isinstance(error, _NO_CREDENTIALS):
        return SourceDenied(
            name,
            "no credentials found",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or -o anon=true for public data",
        )
    reason = first_line(error)
    reason = re.sub(r"://[^/@\s\"]*@", "://***@", reason)  # AWS_ENDPOINT_URL may hold a password
    return SourceUnavailable(name, reason, "check the endpoint and the network")


def is_true(options: Mapping[str, str], name: str) -> bool:
    """Return whether an option is on; without it, it is off."""
    return options.get(name, "").lower() in ("1", "true", "yes")
