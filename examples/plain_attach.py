"""Plain PyTorch with `attach`: handwritten digits, two lines beside the loop that was there.

torchrun --standalone --nproc-per-node 2 examples/plain_attach.py
torchrun --standalone --nproc-per-node 2 examples/plain_attach.py --stock     # the same with stock DDP
"""

import torch
import torch.distributed as dist
from digits import arguments, batches, build, finish
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradientflow


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
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
