"""Horovod as one of the methods, where it is installed.

Horovod's own wrapper takes an optimizer; here all methods share one, so the same is done around the module: each
gradient is handed to Horovod when it is there, Horovod fuses and exchanges in its own thread, and the end of backward
waits for all. Its Gloo controller is used, with a rendezvous server on rank 0, so no launcher of its own is needed.

Run with Horovod 0.28.1, built as C++17 for this torch, on a loopback. On a lab's hosts, told
the interface, one of two ended with "connect [127.0.0.1]: Connection refused"; why was not found.
"""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradientflow.runtime.autograd import at_end_of_backward

#: Live as long as the library.
_servers: list[Any] = []


class Horovod(nn.Module):
    """Averages gradients in backward passes that follow its own forward pass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._hvd = _initialised()
        self._active = False
        self._handles: list[Any] = []
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any) -> Any:
        self._active = True
        return self.module(*inputs)

    def _hook(self, name: str) -> Any:
        def send(parameter: torch.Tensor) -> None:
            if self._active:
                if not self._handles:
                    at_end_of_backward(self._wait)
                self._handles.append(self._hvd.allreduce_async_(parameter.grad, name=name, op=self._hvd.Average))

        return send

    def _wait(self) -> None:
        self._active = False
        handles, self._handles = self._handles, []
        for handle in handles:
            self._hvd.synchronize(handle)


def _initialised() -> Any:
    """`horovod.torch` with the world of the process group. Collective."""
    hvd = importlib.import_module("horovod.torch")
    if hvd.is_initialized():
        return hvd
    rank, world = dist.get_rank(), dist.get_world_size()
    names: list[str] = [""] * world
    dist.all_gather_object(names, f"{socket.gethostname()}-{rank}")
    where: list[Any] = [None]
    if rank == 0:
        hosts = importlib.import_module("horovod.runner.common.util.hosts")
        server = importlib.import_module("horovod.runner.http.http_server").RendezvousServer(verbose=0)
        port = server.start()
        server.init(hosts.get_host_assignments(hosts.parse_hosts(",".join(f"{name}:1" for name in names)), world))
        where[0] = (os.environ["MASTER_ADDR"], port)
        _servers.append(server)
    dist.broadcast_object_list(where, src=0)
    address, port = where[0]
    told = {
        "HOROVOD_RANK": rank,
        "HOROVOD_SIZE": world,
        "HOROVOD_LOCAL_RANK": 0,
        "HOROVOD_LOCAL_SIZE": 1,
        "HOROVOD_CROSS_RANK": rank,
        "HOROVOD_CROSS_SIZE": world,
        "HOROVOD_HOSTNAME": names[rank],
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in told.items()})
    hvd.init()
    return hvd
