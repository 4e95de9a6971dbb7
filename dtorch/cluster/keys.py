"""API keys: made once, shown once, kept as hashes in a file that only its owner can read.

A key is ``dt_<id>_<secret>``: the id finds the entry, the secret (256 random bits) proves the right to it. The file holds
SHA-256 of the secret; a slow hash would add nothing against guessing 256 bits. Comparisons take the same time whether a key
exists or not.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

import msgspec

from dtorch.cluster.quotas import Limits
from dtorch.transport.errors import AuthError

PREFIX = "dt"
Role = Literal["client", "worker", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
MAX_KEY_CHARACTERS = 200


class Key(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entry of the file."""

    id: str
    name: str  # of whoever is served: the tenant
    role: Role
    sha256: str  # of the secret, hexadecimal
    created: float  # seconds since 1970
    weight: float = 1.0  # share of a device against others who wait for it
    priority: int = 0  # higher ones go first, always
    limits: Limits = Limits()


_decoder = msgspec.json.Decoder(tuple[Key, ...])


def default_path() -> Path:
    """``dtorch/keys.json`` in the user's folder for such data (XDG_DATA_HOME)."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "dtorch" / "keys.json"


class KeyFile:
    """Keys in a file, which other processes may change at any time.

    Args:
        path: need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int] | None = None  # of the file as it was read last: time changed, inode
        self._keys: dict[str, Key] = {}

    def entries(self) -> tuple[Key, ...]:
        """All entries, read anew if the file has changed.

        Raises:
            ValueError: the file holds something else.
        """
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._seen, self._keys = None, {}
            return ()
        seen = (status.st_mtime_ns, status.st_ino)
        if seen != self._seen:
            try:
                found = _decoder.decode(self.path.read_bytes())
            except msgspec.MsgspecError as error:
                raise ValueError(f"{self.path} is no file of keys: {error}") from error
            self._seen, self._keys = seen, {key.id: key for key in found}
        return tuple(self._keys.values())

    def create(
        self, name: str, role: Role = "client", *, weight: float = 1.0, priority: int = 0, limits: Limits | None = None
    ) -> tuple[Key, str]:
        """Make a key; the answer is its entry and the key itself, which is kept nowhere.

        Raises:
            ValueError: a fact is not what it can be.
        """
        if not name or len(name) > 100 or not name.isprintable():
            raise ValueError(f"a key is named by 1 to 100 printable characters, not {name!r}")
        if role not in ROLES:
            raise ValueError(f"a key's role is one of {', '.join(ROLES)}, not {role!r}")
        if not 0 < weight < float("inf"):
            raise ValueError(f"a weight is a number above 0, not {weight!r}")
        limits = limits or Limits()
        if min(limits.max_devices, limits.max_bytes, limits.max_ops, limits.max_sessions) < 0:
            raise ValueError(f"limits are at least 0 (no limit): {limits}")
        secret = secrets.token_urlsafe(32)
        with self._changing() as keys:
            number = secrets.token_hex(4)
            while any(key.id == number for key in keys):
                number = secrets.token_hex(4)
            made = Key(number, name, role, _hash(secret), round(time.time(), 3), weight, priority, limits)
            keys.append(made)
        return made, f"{PREFIX}_{number}_{secret}"

    def revoke(self, which: str) -> tuple[Key, ...]:
        """Take back the key of that id, or all of that name; the answer is their entries, () if there are none."""
        with self._changing() as keys:
            gone = tuple(key for key in keys if which in (key.id, key.name))
            keys[:] = [key for key in keys if key not in gone]
        return gone

    def verify(self, given: str) -> Key:
        """The entry of a key.

        Raises:
            AuthError: there is none.
        """
        self.entries()
        parts = given[:MAX_KEY_CHARACTERS].split("_", 2)
        found = self._keys.get(parts[1]) if len(parts) == 3 and parts[0] == PREFIX else None
        right = hmac.compare_digest(_hash(parts[-1]), found.sha256 if found is not None else "0" * 64)
        if found is None or not right:
            raise AuthError("this key is not known here")
        return found

    @contextmanager
    def _changing(self) -> Iterator[list[Key]]:
        """The entries, to be changed by this process alone; written at the end."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = list(self.entries())
            yield keys
            draft = self.path.with_name(self.path.name + ".new")
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(keys)))
            draft.replace(self.path)
        finally:
            os.close(lock)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
