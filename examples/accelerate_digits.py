"""Hugging Face Accelerate with our `Accelerator`: accumulation over two batches, as Accelerate does it.

pip install 'gradientflow[demo,accelerate]'
torchrun --standalone --nproc-per-node 2 examples/accelerate_digits.py
"""

import accelerate
import torch
import torch.distributed as dist
from digits import BATCH, arguments, build, data, finish
from torch.nn.functional import cross_entropy


def main() -> None:
    args = arguments()
    if args.stock:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    else:
        from gradientflow.integrations.accelerate import Accelerator

        accelerator = Accelerator(args.recipe, cpu=True, gradient_accumulation_steps=2)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = torch.utils.data.DataLoader(data(), BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    while done < args.steps:
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                    done += 1
                optimizer.step()
                optimizer.zero_grad()
            if done == args.steps:
                break
    finish(args, accelerator.unwrap_model(model), loss.item(), accelerator.process_index)
    accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
