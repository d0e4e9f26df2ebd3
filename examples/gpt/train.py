"""Trains a small GPT on the text of Python's own documentation, as such scripts are written: accumulation, autocast,
clipping, warm-up and cosine schedule, checkpoints and resuming. What is ours is marked; the rest is anybody's.

    torchrun --standalone --nproc-per-node 4 examples/gpt/train.py --checkpoint /tmp/gpt
    torchrun --standalone --nproc-per-node 4 examples/gpt/train.py --checkpoint /tmp/gpt --resume   # goes on
    torchrun --standalone --nproc-per-node 4 examples/gpt/train.py --stock                             # with stock DDP
"""

import argparse
import contextlib
import json
import math
import os
import pydoc_data.topics
from pathlib import Path

import torch
import torch.distributed as dist
from model import GPT
from torch.nn.parallel import DistributedDataParallel

import gradientflow

CONTEXT = 64


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200, help="how long the schedule is")
    parser.add_argument("--stop", type=int, help="end after so many steps of it")
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank and micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--recipe", help="how gradients travel; auto unless said here or by `gradientflow run`")
    parser.add_argument("--stock", action="store_true", help="torch's own DistributedDataParallel")
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="of stock DDP")
    parser.add_argument("--no-autocast", action="store_true")
    parser.add_argument("--checkpoint", type=Path, help="directory: saved at the end, and every --save-every steps")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint, if it is there")
    parser.add_argument("--losses", type=Path, help="losses as JSON, by step")
    return parser.parse_args()


def load_text() -> torch.Tensor:
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def micro_batch(text: torch.Tensor, batch: int, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drawn from (number, rank) alone, so that a job that goes on sees what it would have seen."""
    generator = torch.Generator().manual_seed(number * 1000 + rank)
    starts = torch.randint(len(text) - CONTEXT - 1, (batch,), generator=generator).tolist()
    pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
    return pieces[:, :-1], pieces[:, 1:]


def learning_rate(step: int, args: argparse.Namespace) -> float:
    warm_up = max(1, args.steps // 10)
    if step < warm_up:
        return args.lr * (step + 1) / warm_up
    done = (step - warm_up) / max(1, args.steps - warm_up)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def main() -> None:
    args = arguments()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT(context=CONTEXT, width=args.width, layers=args.layers).to(device)
    optimizer = torch.optim.AdamW(model.groups(decay=0.1), lr=args.lr, betas=(0.9, 0.95))

    step, losses = 0, []
    saved = gradientflow.load(args.checkpoint) if args.resume else {}  # ours
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, losses = saved["step"], saved["losses"]

    flow = None
    if args.stock:
        trained = DistributedDataParallel(model, bucket_cap_mb=args.bucket_mb)
        no_sync = trained.no_sync
    else:
        flow = gradientflow.attach(model, optimizer, args.recipe)  # ours
        trained, no_sync = model, flow.no_sync  # ours
        if saved:
            flow.load_state_dict(saved["flow"])  # ours: what codecs have not sent yet, and the plan

    text = load_text()
    if rank == 0:
        print(f"{world} workers, from step {step}", flush=True)
    while step < (args.stop or args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        optimizer.zero_grad()
        total = 0.0
        for micro in range(args.accumulate):
            tokens, targets = micro_batch(text, args.batch, step * args.accumulate + micro, rank)
            last = micro == args.accumulate - 1
            with contextlib.nullcontext() if last else no_sync():
                with torch.autocast(device.type, torch.bfloat16, enabled=not args.no_autocast):
                    loss = trained(tokens.to(device), targets.to(device)) / args.accumulate
                loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        step += 1
        mean = torch.tensor([total], device=device)
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
        if rank == 0 and (step % 20 == 0 or step == args.steps):
            print(f"step {step:4d}  loss {losses[-1]:.4f}  lr {learning_rate(step - 1, args):.2e}", flush=True)
        if args.checkpoint and (step % args.save_every == 0 or step in (args.stop, args.steps)):
            states = {"model": model, "optimizer": optimizer, "step": step, "losses": losses}
            gradientflow.save(args.checkpoint, flow, **states)  # ours: whole or not at all

    if rank == 0 and args.losses:
        args.losses.write_text(json.dumps(losses))
    if flow is not None:
        flow.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
