"""What a host does while its link is measured: send to one host and receive from another, until it is killed.

A program of its own: `python -I -S traffic.py ADDRESS NEXT_ADDRESS PORT`. It says `connected` when both ways are.
"""

from __future__ import annotations

import socket
import sys
import threading
import time

_CHUNK_NBYTES = 2**18
_PATIENCE_S = 10.0


def main(own: str, following: str, port: int) -> None:
    with socket.create_server((own, port)) as server, _connect(following, port) as outgoing:
        incoming, _ = server.accept()
        print("connected", flush=True)
        threading.Thread(target=_receive, args=(incoming,), daemon=True).start()
        chunk = bytes(_CHUNK_NBYTES)
        while True:
            outgoing.sendall(chunk)


def _connect(address: str, port: int) -> socket.socket:
    end_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:  # it does not listen yet
            if time.monotonic() > end_s:
                raise
            time.sleep(0.01)


def _receive(incoming: socket.socket) -> None:
    chunk = bytearray(_CHUNK_NBYTES)
    while incoming.recv_into(chunk):
        pass


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
