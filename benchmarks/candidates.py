"""What could make models quicker on a CPU, each measured alone: what `stepsnet.optimize` has, and what it leaves out.

    python benchmarks/candidates.py [--rounds 15] [--out results/benchmarks/candidates.json]

Runs with and without a change take turns on one thread, timed in processor time. Ratios are between neighbouring
measurements, and above 1 if the change helps. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from language import models_of_paper
from outcome import conclude, rounded_quartiles
from timm.layers import Attention
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from stepsnet import optimize
from stepsnet.models.blocks import blocks_of
from stepsnet.models.compilation import compile_blocks
from stepsnet.models.windows import permute_windows

Functions = tuple[Callable[[], Tensor], Callable[[], Tensor]]


def of_models(name: str, change: Callable[[nn.Module], nn.Module]) -> Functions:
    """A forward pass of a timm model as it is, and with the change."""
    torch.manual_seed(0)
    plain = timm.create_model(name).eval()
    changed, x = change(copy.deepcopy(plain)), torch.randn(2, 3, 224, 224)
    return lambda: plain(x), lambda: changed(x)


def folded_norms(model: nn.Module) -> nn.Module:
    for parent in list(model.modules()):
        children = list(parent.named_children())
        for (conv_name, conv), (norm_name, norm) in itertools.pairwise(children):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(parent, conv_name, fuse_conv_bn_eval(conv, norm))
                setattr(parent, norm_name, nn.Identity())
    return model


def channels_last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)


def fused_attention(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True
    return model


def permuted(model: nn.Module) -> nn.Module:
    permute_windows(model)
    return model


def compiled(model: nn.Module) -> nn.Module:
    compile_blocks(model)
    return model


def padded_heads(size: int, padded: int) -> Functions:
    """Attention of 2 heads over 197 tokens, without and with zero-padded heads; the padding itself is not timed."""
    q, k, v = (torch.randn(2, 2, 197, size) for _ in range(3))
    wide = [F.pad(part, (0, padded - size)) for part in (q, k, v)]
    scale = size**-0.5
    return (
        lambda: F.scaled_dot_product_attention(q, k, v, scale=scale),
        lambda: F.scaled_dot_product_attention(*wide, scale=scale)[..., :size],
    )


def bfloat16_padded(name: str, change: Callable[[nn.Module], None]) -> Functions:
    """The frozen graph of a model under autocast, without and with a change to its modules."""
    torch.manual_seed(0)
    plain = timm.create_model(name).eval()
    changed, x = copy.deepcopy(plain), torch.randn(2, 3, 224, 224)
    for module in list(changed.modules()):
        change(module)

    def under_autocast(model: nn.Module) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x).float()

        return run

    return under_autocast(optimize(plain)), under_autocast(optimize(changed))


def pad_product(module: nn.Module) -> None:
    """Pad a linear layer with zeros to multiples of the processor's matrix units: 32 inputs, 16 outputs."""
    if not isinstance(module, nn.Linear):
        return
    inputs, outputs = -module.in_features % 32, -module.out_features % 16

    def forward(x: Tensor) -> Tensor:
        weight, bias = F.pad(module.weight, (0, inputs, 0, outputs)), F.pad(module.bias, (0, outputs))
        return F.linear(F.pad(x, (0, inputs)), weight, bias)[..., : module.out_features]

    if inputs or outputs:
        module.forward = forward


def pad_heads_of(module: nn.Module) -> None:
    """Pad attention heads with zeros to a size that is a multiple of 16; the scale stays."""
    if not isinstance(module, Attention) or module.head_dim % 16 == 0:
        return

    def forward(x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        qkv = module.qkv(x).unflatten(-1, (3, module.num_heads, module.head_dim))
        q, k, v = F.pad(qkv, (0, -module.head_dim % 16)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, scale=module.scale)[..., : module.head_dim]
        return module.proj(y.transpose(1, 2).flatten(2))

    module.forward = forward


def joined_products(width: int, hidden: int) -> Functions:
    """The first two products of SwiGLU for one token, as in generation: separate, and joined into one."""
    x, gate, up = torch.randn(1, width), torch.randn(hidden, width), torch.randn(hidden, width)
    both = torch.cat([gate, up])
    return (
        lambda: F.silu(F.linear(x, gate)) * F.linear(x, up),
        lambda: (lambda a, b: F.silu(a) * b)(*F.linear(x, both).chunk(2, -1)),
    )


def fused_attention_alone(heads: int, size: int) -> Functions:
    """Attention over 197 tokens by products and a softmax, and by torch's fused kernel."""
    q, k, v = torch.randn(2, 197, 3, heads, size).permute(2, 0, 3, 1, 4).unbind(0)
    return (
        lambda: torch.softmax((q * size**-0.5) @ k.transpose(-2, -1), -1) @ v,
        lambda: F.scaled_dot_product_attention(q, k, v),
    )


def in_place(model: nn.Module) -> nn.Module:
    """Let blocks add their branches to the stream in place, which overwrites the container's input."""

    def forward(block: Any, x: Tensor) -> Tensor:
        x.add_(block.attn(block.norm1(x)))
        return x.add_(block.mlp(block.norm2(x)))

    for block in blocks_of(model):
        block.forward = functools.partial(forward, block)
    return model


def joined_attention(width: int, heads: int) -> Functions:
    """The products of query, key and value for one token: separate, and joined into one."""
    x, parts = torch.randn(1, width), [torch.randn(width, width) for _ in range(3)]
    whole = torch.cat(parts)

    def used(projections: Iterable[Tensor]) -> Tensor:
        q, k, v = (one.view(heads, -1) for one in projections)
        return q * k + v

    return (
        lambda: used(F.linear(x, part) for part in parts),
        lambda: used(F.linear(x, whole).chunk(3, -1)),
    )


def compiled_decoding(size: str) -> Functions:
    """Greedy generation of 48 tokens by the StepsNet of Table 4: as it is, and compiled with a cache of fixed size."""
    torch.manual_seed(0)
    plain = models_of_paper(size)["StepsNet"].eval()
    changed, prompt = copy.deepcopy(plain), torch.randint(4096, (1, 16))
    changed.forward = torch.compile(changed.forward)

    def generate(model: Any, **kwargs: Any) -> Callable[[], Tensor]:
        mask = torch.ones_like(prompt)
        length: dict[str, Any] = {"max_new_tokens": 48, "min_new_tokens": 48, "pad_token_id": 0, "do_sample": False}
        return lambda: model.generate(prompt, attention_mask=mask, **length, **kwargs).float()

    return generate(plain), generate(changed, cache_implementation="static")


CANDIDATES: dict[str, tuple[bool, Callable[[], Functions]]] = {
    "Swin's windows as one permutation, bias and mask once, Swin-T": (
        True,
        lambda: of_models("swin_tiny_patch4_window7_224", permuted),
    ),
    "the same, Steps-Swin-T": (True, lambda: of_models("steps_swin_tiny_patch4_window7_224", permuted)),
    "timm's `fused_attn` alone, Steps-Swin-T": (
        False,
        lambda: of_models("steps_swin_tiny_patch4_window7_224", fused_attention),
    ),
    "channels last, Steps-ResNet-50": (True, lambda: of_models("steps_resnet50", channels_last)),
    "batch norms folded, Steps-ResNet-50": (False, lambda: of_models("steps_resnet50", folded_norms)),
    "both, Steps-ResNet-50": (False, lambda: of_models("steps_resnet50", lambda m: channels_last(folded_norms(m)))),
    "branches added in place, Steps-DeiT-T": (False, lambda: of_models("steps_deit_tiny_patch16_224", in_place)),
    "blocks compiled one by one, Steps-DeiT-T": (False, lambda: of_models("steps_deit_tiny_patch16_224", compiled)),
    "fused attention in place of products, 4 heads of 68": (True, lambda: fused_attention_alone(4, 68)),
    "heads of 68 padded to 72": (False, lambda: padded_heads(68, 72)),
    "heads of 68 padded to 80": (False, lambda: padded_heads(68, 80)),
    "SwiGLU's products joined, width 272, one token": (False, lambda: joined_products(272, 725)),
    "query, key and value joined, width 272, one token": (False, lambda: joined_attention(272, 4)),
    "bfloat16, products padded to multiples of 32 and 16, Steps-DeiT-S": (
        False,
        lambda: bfloat16_padded("steps_deit_small_patch16_224", pad_product),
    ),
    "bfloat16, heads of 68 padded to 80, Steps-DeiT-S": (
        False,
        lambda: bfloat16_padded("steps_deit_small_patch16_224", pad_heads_of),
    ),
    "compiled decoding with a static cache, 30M of Table 4": (False, lambda: compiled_decoding("30M")),
}


@torch.inference_mode()
def measure(functions: Functions, rounds: int) -> tuple[dict[str, Any], float]:
    expected, found = (function() for function in functions)
    error = ((found - expected).norm() / expected.norm()).item()
    times: list[list[float]] = [[], []]
    started = time.process_time()
    functions[1]()
    repeats = max(1, min(500, int(0.02 / max(1e-5, time.process_time() - started))))
    for turn in range(rounds):
        for index in (0, 1) if turn % 2 else (1, 0):
            started = time.process_time()
            for _ in range(repeats):
                functions[index]()
            times[index].append(time.process_time() - started)
    return rounded_quartiles([without / with_it for without, with_it in zip(*times)], 3), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (kept, make) in CANDIDATES.items():
        started = time.perf_counter()
        ratio, error = measure(make(), options.rounds)
        found = {"speed_over_without": ratio, "relative_error": round(error, 7)}
        rows.append({"candidate": name, "kept": kept, **found})
        print(f"{name}: {ratio['median']}, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    conclude("candidates", {"rounds": options.rounds, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
