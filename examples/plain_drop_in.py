"""Plain PyTorch with another import: `DistributedDataParallel` from gradientflow instead of torch's.

torchrun --standalone --nproc-per-node 2 examples/plain_drop_in.py
"""

import torch
import torch.distributed as dist
from digits import arguments, batches, build, finish
from torch.nn.functional import cross_entropy

import gradientflow


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    model = build()
    if args.stock:
        ddp = torch.nn.parallel.DistributedDataParallel(model)
    else:
        ddp = gradientflow.DistributedDataParallel(model, recipe=args.recipe)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for images, labels in batches(args.steps, dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        loss = cross_entropy(ddp(images), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 5.0)
        optimizer.step()
    finish(args, model, loss.item(), dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
