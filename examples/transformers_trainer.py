"""Hugging Face's Trainer with a recipe: a small GPT-2 learns to write Python's own documentation, byte by byte.

pip install 'gradientflow[transformers]'
torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py
"""

import argparse
import pydoc_data.topics
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

CONTEXT = 64


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    text = "".join(pydoc_data.topics.topics.values()).encode()
    pieces = [list(text[start : start + CONTEXT]) for start in range(0, count * CONTEXT, CONTEXT)]
    return [{"input_ids": torch.tensor(piece), "labels": torch.tensor(piece)} for piece in pieces]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--recipe", default="lazy")
    parser.add_argument("--stock", action="store_true", help="transformers' own Trainer")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", default="/tmp/gradientflow-trainer", help="where the Trainer writes")
    args = parser.parse_args()
    transformers.set_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    told = transformers.TrainingArguments(
        args.work, max_steps=args.steps, per_device_train_batch_size=8, learning_rate=1e-3, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=10,
    )  # fmt: skip
    if args.stock:
        trainer = transformers.Trainer(model=model, args=told, train_dataset=texts(1000))
    else:
        from gradientflow.integrations.transformers import Trainer

        trainer = Trainer(model=model, args=told, train_dataset=texts(1000), recipe=args.recipe)
    trainer.train()
    if trainer.is_world_process_zero() and args.out:
        torch.save(model.state_dict(), args.out)
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves while another is still in its last collective ends both
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
