"""Every design on two ranks of DDP and of FSDP, against one process: a job of two_ranks.py."""

import torch
import torch.distributed as dist
from residual_networks import STEPS, deit
from torch.nn import functional as F

from stepsnet.engine.distributed import parallelize
from stepsnet.models.blocks import blocks_of, recompute_blocks
from stepsnet.residual import DESIGNS

SEVERAL_TENSORS = ("value_residual", "dense_former", "mudd", "attention_residuals")
IMAGES, LABELS = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 5


def losses(model, wrapped, part):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(IMAGES[part]), LABELS[part])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)


def compare_designs(context):
    """The designs that were compared, and what there is to say of those that differ."""
    said = []
    for name in DESIGNS:
        alone = deit(name, **STEPS)
        expected = losses(alone, alone, slice(0, 8))
        for way in ("ddp", "fsdp") if name in SEVERAL_TENSORS else ("fsdp",):
            model = deit(name, **STEPS)
            recompute_blocks(blocks_of(model)[:2])
            got = losses(model, parallelize(model, way, context), slice(4 * context.rank, 4 * context.rank + 4))
            dist.all_reduce(got)
            if not torch.allclose(got / 2, expected, atol=2e-4):
                said.append(f"{name} {way}: got {(got / 2).tolist()}, expected {expected.tolist()}")
    return [list(DESIGNS), said]
