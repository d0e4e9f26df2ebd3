"""Stock DDP with our comm hook: its buckets, our codecs.

torchrun --standalone --nproc-per-node 2 examples/ddp_hook.py --codec int8
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from digits import batches, build, finish
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradientflow


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--codec", default="int8", help="as after the first + of a recipe")
    parser.add_argument("--double", action="store_true", help="train in float64")
    parser.add_argument("--stock", action="store_true", help="without the hook")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.recipe = f"DDP with {args.codec}"
    dist.init_process_group("gloo")
    model = build().to(torch.float64 if args.double else torch.float32)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    state = None
    if not args.stock:
        state = gradientflow.HookState(ddp, args.codec, optimizer=optimizer)
        ddp.register_comm_hook(state, gradientflow.hook)
    for images, labels in batches(args.steps, dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        loss = cross_entropy(ddp(images.to(next(model.parameters()).dtype)), labels)
        loss.backward()
        optimizer.step()
    if state is not None:
        state.close()
    finish(args, model, loss.item(), dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
