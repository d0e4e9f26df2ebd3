"""What codecs have not sent yet goes into each library's own checkpoints: to go on is to have gone on.

One job a library: ten steps, a checkpoint, ten more; then the checkpoint is loaded and the same ten follow once more.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_examples import LIMIT_S, TORCHRUN, run

#: Always: whether a codec pays is measured anew, and another plan has other results.
RECIPE = "lazy+topk:5%:always"

ACCELERATE = """
import sys, torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from digits import batches, build
from gradientflow.integrations.accelerate import Accelerator
accelerator = Accelerator({recipe!r}, cpu=True)
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = accelerator.prepare(model, optimizer)
data = list(batches(20, accelerator.process_index, accelerator.num_processes))
def go(steps):
    for number in steps:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(data[number][0]), data[number][1]))
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
middle = go(range(10))
accelerator.save_state(sys.argv[1])
expected = go(range(10, 20))
accelerator.load_state(sys.argv[1])
found = go(range(10, 20))
assert torch.equal(found, expected) and not torch.equal(found, middle)
dist.barrier(); dist.destroy_process_group()
"""

LIGHTNING = """
import sys, torch, lightning, torch.distributed as dist
from digits import BATCH, build, data
from lightning_digits import Reader
from gradientflow.integrations.lightning import GradientFlowStrategy
def fit(path=None):
    # Ten batches a rank: an epoch, since Lightning cannot go on within one.
    few = torch.utils.data.Subset(data(), range(20 * BATCH))
    reader = Reader()
    keep = lightning.pytorch.callbacks.ModelCheckpoint(sys.argv[1], "{epoch}", save_top_k=-1)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=GradientFlowStrategy({recipe!r}), max_epochs=2,
        logger=False, callbacks=[keep], enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1)
    trainer.fit(reader, torch.utils.data.DataLoader(few, BATCH), ckpt_path=path, weights_only=False)
    assert trainer.global_step == 20
    return torch.cat([p.detach().flatten() for p in reader.parameters()]).clone()
expected = fit()
assert torch.equal(fit(sys.argv[1] + "/epoch=0.ckpt"), expected)
dist.barrier(); dist.destroy_process_group()
"""

TRANSFORMERS = """
import sys, torch, transformers, torch.distributed as dist
from transformers_trainer import CONTEXT, texts
from gradientflow.integrations.transformers import Trainer
def build():
    transformers.set_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64,
        n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
def train(path=None):
    model = build()
    told = transformers.TrainingArguments(sys.argv[1], max_steps=20, per_device_train_batch_size=4, use_cpu=True,
        report_to="none", save_strategy="steps", save_steps=10, disable_tqdm=True, optim="sgd", learning_rate=0.05,
        logging_strategy="no", ddp_find_unused_parameters=False)
    Trainer(model=model, args=told, train_dataset=texts(200), recipe={recipe!r}).train(resume_from_checkpoint=path)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
expected = train()
found = train(sys.argv[1] + "/checkpoint-10")
assert torch.equal(found, expected)
dist.barrier(); dist.destroy_process_group()
"""


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    ("library", "script", "launcher"),
    [("accelerate", ACCELERATE, TORCHRUN), ("lightning", LIGHTNING, []), ("transformers", TRANSFORMERS, TORCHRUN)],
    ids=["accelerate", "lightning", "transformers"],
)
def test_to_go_on_is_to_have_gone_on(
    library: str, script: str, launcher: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library, reason="make test-integrations has it")
    examples = Path(__file__).parent.parent.parent / "examples"
    monkeypatch.setenv("PYTHONPATH", f"{examples}:{examples.parent / 'src'}")
    path = tmp_path / "resume.py"
    path.write_text(script.replace("{recipe!r}", repr(RECIPE)))
    run(*launcher, str(path), str(tmp_path))
