"""The token that a served cache asks its clients for: read from a file or the environment, never from a command line.

Server and client read it in the same way. It is compared in constant time, and no error shows any part of it.
"""

from __future__ import annotations

import hmac
import os
import stat

from pqcache.errors import UsageError
from pqcache.store.urls import quoted
from pqcache.system.disk import open_regular

TOKEN = "PQCACHE_TOKEN"  # the environment's variable
_SHORTEST = 16  # characters
_LONGEST = 4096


def read_token(file: str | os.PathLike[str] | None) -> str:
    """The token in ``file``, else in the environment; empty if there is neither.

    A file that cannot be read, or that others can read, and a token that is too short raise UsageError.
    """
    if file is None:
        text = os.environ.get(TOKEN, "").strip()
        return checked_token(text, TOKEN) if text else ""
    try:
        with open(file, "rb", opener=open_regular) as opened:
            mode, content = os.fstat(opened.fileno()).st_mode, opened.read(_LONGEST + 1)
    except OSError as error:
        raise UsageError(file, f"cannot be read ({error.strerror})", "name the file that holds the token") from None
    token = checked_token(content.decode("latin-1").strip(), str(file))
    if mode & stat.S_IROTH:
        raise UsageError(file, "holds a token, and every user can read it", f"chmod 600 {quoted(file)}")
    return token


def checked_token(text: str, where: str) -> str:
    """Refuse tokens that are easily guessed or aren't a single word; ``where`` is for the error."""
    if not _SHORTEST <= len(text) <= _LONGEST:
        reason = f"has a token of {len(text)} characters, and takes {_SHORTEST} to {_LONGEST:,}"
        raise UsageError(where, reason, "make one with: openssl rand -hex 32")
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise UsageError(where, "has a token with other characters than ASCII", "make one with: openssl rand -hex 32")
    return text


def is_same_token(given: str, token: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())
