"""Under mpirun: the process group from MPI, gradients by MPI's own all-reduce.

pip install 'gradientflow[demo,mpi]'
mpirun -n 2 --bind-to none python examples/mpi_digits.py
"""

import torch
import torch.distributed as dist
from digits import arguments, batches, build, finish
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradientflow


def main() -> None:
    args = arguments(recipe="lazy-mpi")
    gradientflow.init_from_mpi()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if args.stock:
        trained, flow = DistributedDataParallel(model), None
    else:
        trained, flow = model, gradientflow.attach(model, optimizer, args.recipe)
    for images, labels in batches(args.steps, dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        loss = cross_entropy(trained(images), labels)
        loss.backward()
        optimizer.step()
    if flow is not None:
        flow.close()
    finish(args, model, loss.item(), dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
