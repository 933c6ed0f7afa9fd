"""A trained ViT's function in a StepsNet: norms folded, stream rotated, blocks cut. compress.py has the experiment."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from timm.layers import RmsNorm
from torch import Tensor, nn

import stepsnet

Plan = dict[str, tuple[int, ...]]


def readers(model: Any) -> list[tuple[nn.Module, str, nn.Linear]]:
    """(owner, its norm's name, the linear layer behind it) for everything that reads the stream."""
    of_blocks = [part for b in model.blocks for part in ((b, "norm1", b.attn.qkv), (b, "norm2", b.mlp.fc1))]
    return [*of_blocks, (model, "fc_norm", model.head)]


def writers(model: Any) -> list[nn.Module]:
    return [model.patch_embed.proj, *(part for b in model.blocks for part in (b.attn.proj, b.mlp.fc2))]


@torch.no_grad()
def with_rms_norms(model: Any) -> Any:
    """A copy that computes the same with RMSNorms without weights: LN(x) = RMSNorm(x - mean) γ + β."""
    result = copy.deepcopy(model)
    for owner, name, linear in readers(result):
        norm = getattr(owner, name)
        linear.bias += linear.weight @ norm.bias
        linear.weight *= norm.weight
        setattr(owner, name, RmsNorm(norm.weight.numel(), eps=norm.eps))
    width = result.embed_dim
    apply_to_stream(result, torch.eye(width) - 1 / width, to_readers=False)
    return result


@torch.no_grad()
def apply_to_stream(model: Any, m: Tensor, to_readers: bool) -> None:
    """x -> xM for what is written to the stream; where M is orthogonal and readers undo it, the function stays."""
    for writer in writers(model):
        writer.weight.copy_(torch.tensordot(m.T, writer.weight, 1))
        writer.bias.copy_(m.T @ writer.bias)
    model.pos_embed.copy_(model.pos_embed @ m)
    for _, _, linear in readers(model) if to_readers else ():
        linear.weight.copy_(linear.weight @ m)


def rotate(model: Any, q: Tensor) -> None:
    """The stream x as xQ, Q (C, C) orthogonal; the function of the model, which has RMSNorms, stays."""
    apply_to_stream(model, q, to_readers=True)


class Watched:
    """What the blocks read, write and activate, of one pass over the calibration images."""

    @torch.no_grad()
    def __init__(self, model: Any, images: Tensor):
        self.seconds: list[Tensor] = []  # (C, C) a block: second moments of what it reads and writes
        self.heads: list[Tensor] = []  # (B N, H, D): what attention's output projection takes
        self.units: list[Tensor] = []  # (hidden,): mean square of the hidden activations
        x = model.pos_drop(model.patch_embed(images) + model.pos_embed)  # (B, N, C)
        for b in model.blocks:
            moment = torch.zeros(x.shape[-1], x.shape[-1])
            for norm, branch in ((b.norm1, b.attn), (b.norm2, b.mlp)):
                kept: list[Tensor] = []
                inner = branch.proj if branch is b.attn else branch.fc2
                handle = inner.register_forward_pre_hook(lambda module, args, kept=kept: kept.append(args[0]))
                read = norm(x)
                written = branch(read)
                handle.remove()
                size = x.square().mean(-1, keepdim=True).sqrt()
                for part in (read, written / size):
                    rows = part.flatten(0, 1)
                    second = rows.T @ rows
                    moment += second / second.trace()
                if branch is b.attn:
                    self.heads.append(kept[0].flatten(0, 1).unflatten(-1, (b.attn.num_heads, -1)))
                else:
                    self.units.append(kept[0].square().mean((0, 1)))
                x = x + written
            self.seconds.append(moment)


def greedy_rotation(seconds: list[Tensor], widths: tuple[int, ...], depths: tuple[int, ...]) -> Tensor:
    """(C, C) orthogonal: step by step the leading directions of its blocks in the complement of those before."""
    width = widths[-1]
    found = torch.zeros(width, 0)
    first = 0
    for c, depth in zip(widths, depths):
        moment = torch.stack(seconds[first : first + depth]).sum(0)
        first += depth
        outside = torch.eye(width) - found @ found.T
        _, vectors = torch.linalg.eigh(outside @ moment @ outside)  # ascending
        new = vectors[:, width - (c - found.shape[1]) :].flip(1)
        found = torch.linalg.qr(torch.cat((found, outside @ new), 1))[0]
    return found


def student_like(teacher: Any, plan: Plan) -> Any:
    """A StepsNet of the plan with the teacher's stem and head, RMSNorms, and blocks at random."""
    return stepsnet.stepify(teacher, plan=plan)


@torch.no_grad()
def inherit(teacher: Any, plan: Plan, images: Tensor) -> Any:
    """The student with the teacher's blocks cut to their channels, heads and hidden units."""
    student, watched = student_like(teacher, plan), Watched(teacher, images)
    width = teacher.embed_dim
    for index, (mine, theirs) in enumerate(zip(student.blocks, teacher.blocks)):
        block, c = mine.block, mine.block.norm1.weight.numel()
        out, size = theirs.attn.proj.weight[:c], theirs.attn.head_dim
        carried = torch.stack(
            [
                (watched.heads[index][:, h] @ out[:, h * size : (h + 1) * size].T).square().mean()
                for h in range(theirs.attn.num_heads)
            ]
        )
        heads = carried.topk(block.attn.num_heads).indices.sort().values
        rows = (heads[:, None] * size + torch.arange(size)).flatten()
        qkv = torch.cat([rows + part * width for part in range(3)])
        units = watched.units[index] * theirs.mlp.fc2.weight[:c].square().sum(0)
        units = units.topk(block.mlp.fc1.out_features).indices.sort().values
        block.attn.qkv.weight.copy_(theirs.attn.qkv.weight[qkv, :c])
        block.attn.qkv.bias.copy_(theirs.attn.qkv.bias[qkv])
        block.attn.proj.weight.copy_(out[:, rows])
        block.attn.proj.bias.copy_(theirs.attn.proj.bias[:c])
        block.mlp.fc1.weight.copy_(theirs.mlp.fc1.weight[units, :c])
        block.mlp.fc1.bias.copy_(theirs.mlp.fc1.bias[units])
        block.mlp.fc2.weight.copy_(theirs.mlp.fc2.weight[:c, units])
        block.mlp.fc2.bias.copy_(theirs.mlp.fc2.bias[:c])
        for norm in (block.norm1, block.norm2):
            norm.weight.fill_(math.sqrt(width / c))
    return student


def streams_and_logits(model: Any, plan: Plan, images: Tensor) -> tuple[list[Tensor], Tensor]:
    """The first C_i channels of the stream behind each step, and the logits."""
    x = model.pos_drop(model.patch_embed(images) + model.pos_embed)
    ends = [sum(plan["depths"][: i + 1]) for i in range(len(plan["depths"]))]
    found = []
    for index, block in enumerate(model.blocks, 1):
        x = block(x)
        if index in ends:
            found.append(x[..., : plan["widths"][ends.index(index)]])
    return found, model.forward_head(x)
