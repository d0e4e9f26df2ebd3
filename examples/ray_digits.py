"""Ray Train: two workers of a Ray cluster, which is started on this machine unless there is one.

pip install 'gradientflow[demo,ray]'
python examples/ray_digits.py
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
import torch.distributed as dist
from digits import arguments
from torch.nn.functional import cross_entropy


def train_one_worker(given: dict[str, Any]) -> None:
    from digits import batches, build, finish

    args = given["args"]
    model = build()
    if args.stock:
        trained = ray.train.torch.prepare_model(model)
    else:
        from gradientflow.integrations.ray import prepare_model

        trained = prepare_model(model, args.recipe)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
    for images, labels in batches(args.steps, dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        loss = cross_entropy(trained(images), labels)
        loss.backward()
        optimizer.step()
    finish(args, model, loss.item(), dist.get_rank())
    ray.train.report({"loss": loss.item()})


def fit(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as storage:
        ray.train.torch.TorchTrainer(
            train_one_worker,
            train_loop_config={"args": args},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=storage),
        ).fit()


def main() -> None:
    args = arguments()
    # Workers import what lies beside this file.
    path = os.pathsep.join([str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")])
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": path}})
    fit(args)
    ray.shutdown()


if __name__ == "__main__":
    main()
