"""Who may talk to a server, and who may listen.

plain   no encryption: a password that the server draws and tells through the job's store. It keeps jobs apart that
        meet by accident, and stops nobody who can read the store or the wire. On loopback; elsewhere if told so.
job     CURVE (libzmq's Curve25519 encryption) with keys that the server draws and tells through the store: whoever can
        read the store, which has no authentication of its own, can join.
files   CURVE with keys from files that `gradientflow keys` made and that never travel: workers know the server's key,
        the server knows the workers'. This is the mode that authenticates.

All of them are checked in libzmq's handshake, before a byte of ours is read.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Literal, NamedTuple

import zmq
from zmq.utils import z85

from gradientflow.documents import Record
from gradientflow.errors import UsageError
from gradientflow.exchange.reach import is_loopback

Mode = Literal["plain", "job", "files"]
_USER = "worker"
_NAMES = ("server", "worker")


class Pair(NamedTuple):
    public: str
    secret: str

    @classmethod
    def new(cls) -> Pair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


class KeyFiles(NamedTuple):
    """What `gradientflow keys` wrote."""

    server: Pair
    worker: Pair

    @classmethod
    def read(cls, directory: Path) -> KeyFiles:
        pairs = []
        for name in _NAMES:
            path = directory / f"{name}.key"
            try:
                with open(path, encoding="utf-8") as file:
                    words = file.read(4096).split()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not text"
                raise UsageError(
                    f"cannot read {path} ({reason}): make keys with `gradientflow keys DIRECTORY`"
                ) from None
            if len(words) != 2 or any(len(word) != 40 for word in words):
                raise UsageError(f"{path} holds no pair of keys: make them with `gradientflow keys DIRECTORY`")
            if path.stat().st_mode & 0o077:
                raise UsageError(f"{path} can be read by others than its owner: chmod 600 it, or make new keys")
            try:
                matches = zmq.curve_public(words[1].encode()).decode() == words[0]
            except (ValueError, zmq.ZMQError):
                matches = False
            if not matches:
                raise UsageError(f"{path} holds keys that do not belong together: make new ones")
            pairs.append(Pair(*words))
        return cls(*pairs)

    @classmethod
    def write_new(cls, directory: Path) -> list[Path]:
        """Nothing is overwritten."""
        paths = [directory / f"{name}.key" for name in _NAMES]
        there = [str(path) for path in paths if path.exists()]
        if there:
            raise UsageError(f"{there[0]} is there already: give another directory, or delete it if nobody uses it")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for path in paths:
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(handle, "w") as file:
                    file.write("\n".join(Pair.new()) + "\n")
        except OSError as error:
            raise UsageError(f"cannot write keys to {directory}: {error.strerror}") from None
        return paths


class Invitation(Record):
    """How to connect to a server, as it tells workers through the store."""

    address: str
    port: int
    mode: Mode
    password: str = ""
    server_public: str = ""
    worker_public: str = ""
    worker_secret: str = ""

    @property
    def endpoint(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"tcp://{host}:{self.port}"


class Lock:
    """A server's side. everywhere: plain mode is for other networks than loopback, too."""

    def __init__(self, mode: Mode, files: KeyFiles | None = None, *, everywhere: bool = False) -> None:
        self.mode: Mode = mode
        self._everywhere = everywhere
        self._password = secrets.token_hex(16)
        self._server = files.server if files else Pair.new()
        self._worker = files.worker if files else Pair.new()

    @property
    def passwords(self) -> dict[str, str]:
        return {_USER: self._password}

    @property
    def allowed(self) -> set[bytes]:
        """Public keys, of 32 bytes."""
        return {z85.decode(self._worker.public.encode())}

    def close(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Before it is bound there."""
        if self.mode == "plain" and not self._everywhere and not is_loopback(address):
            raise UsageError(
                f"plain mode at {address}: whoever is on that network could read gradients and change them. Give key "
                "files (`gradientflow keys`), or say --plain, or GRADIENTFLOW_PLAIN=1, if everybody there may"
            )
        if self.mode == "plain":
            socket.plain_server = True
        else:
            socket.curve_server = True
            socket.curve_secretkey = self._server.secret.encode()

    def invitation(self, address: str, port: int) -> Invitation:
        if self.mode == "plain":
            return Invitation(address=address, port=port, mode="plain", password=self._password)
        if self.mode == "files":
            return Invitation(address=address, port=port, mode="files")
        return Invitation(
            address=address,
            port=port,
            mode="job",
            server_public=self._server.public,
            worker_public=self._worker.public,
            worker_secret=self._worker.secret,
        )


def open_for(socket: zmq.Socket[bytes], invitation: Invitation, files: KeyFiles | None) -> None:
    """A worker's side, before it connects. Who has key files talks to nobody without."""
    if (files is not None) != (invitation.mode == "files"):
        told = "has key files" if files else "has no key files"
        raise UsageError(
            f"the server at {invitation.address} is in mode {invitation.mode!r} and this worker {told}: give "
            "GRADIENTFLOW_KEYS to all of them, or to none"
        )
    if invitation.mode == "plain":
        socket.plain_username = _USER.encode()
        socket.plain_password = invitation.password.encode()
        return
    server = files.server.public if files else invitation.server_public
    worker = files.worker if files else Pair(invitation.worker_public, invitation.worker_secret)
    socket.curve_serverkey = server.encode()
    socket.curve_publickey = worker.public.encode()
    socket.curve_secretkey = worker.secret.encode()
