"""Steps-Transformer against transformers' LLaMA of the same parameters: training, generation, and the cache.

    python benchmarks/language.py [--depths 6 12 24] [--width 128] [--out results/benchmarks/language.json]
    python benchmarks/language.py --paper 30M 44M [--threads 1] [--out results/benchmarks/language_paper.json]

For each depth, a baseline and the StepsNet that the half-compute rule makes of it. They take turns, update by update
and text by text, so that noise hits both alike; ratios are between neighbouring measurements. A third model has the
StepsNet's depth at one width and about as many parameters: it shows what depth alone costs. With ``--paper``, the
models of Table 4 are measured instead. With one thread, times are processor time, which other programs on the machine
disturb less than wall-clock time. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from outcome import conclude, rounded_quartiles
from transformers import LlamaConfig, LlamaForCausalLM

from stepsnet.bench import find_candidates
from stepsnet.models.build import build_model
from stepsnet.models.steps_transformer import create
from stepsnet.plan import plan_steps

VOCABULARY, LENGTH, BATCH, ROUNDS, NEW_TOKENS = 4096, 128, 8, 9, 48


def llama(width: int, depth: int, heads: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=round(8 * width / 3),
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    return LlamaForCausalLM(config)


def models_of(width: int, depth: int) -> dict[str, torch.nn.Module]:
    plan = plan_steps(width, depth, 3, head_dim=32)
    steps = create(
        widths=plan.widths,
        depths=plan.depths,
        num_attention_heads=plan.num_heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
    )
    blocks = sum(plan.depths)
    narrow = next(w for w in range(width, 0, -8) if w * w * blocks <= width * width * depth)
    heads = next(h for h in range(max(narrow // 32, 1), 0, -1) if narrow % (2 * h) == 0)
    return {
        "baseline": llama(width, depth, width // 32),
        "StepsNet": steps,
        "as deep": llama(narrow, blocks, heads),
    }


def models_of_paper(size: str) -> dict[str, torch.nn.Module]:
    rows = {candidate.name: candidate.spec for candidate in find_candidates(["table:4"])}
    baseline = f"Transformer {size}"
    after = list(rows)[list(rows).index(baseline) + 1]  # the StepsNet of this size, which its name may round otherwise
    return {"baseline": build_model(rows[baseline]), "StepsNet": build_model(rows[after])}


def seconds(function: Callable[[], object]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    function()
    return clock() - started


def cache_bytes(model: torch.nn.Module) -> int:
    with torch.no_grad():
        cache = model(torch.zeros(1, LENGTH, dtype=torch.long), use_cache=True).past_key_values
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


def measure(models: dict[str, torch.nn.Module]) -> dict[str, Any]:
    batch = torch.randint(VOCABULARY, (BATCH, LENGTH))
    prompt = batch[:1, :16]
    optimizers = {name: torch.optim.AdamW(model.parameters(), fused=True) for name, model in models.items()}
    times: dict[str, dict[str, list[float]]] = {"train": {name: [] for name in models}}
    times["generate"] = {name: [] for name in models}

    def update(name: str) -> None:
        models[name].train()
        models[name](batch, labels=batch, use_cache=False).loss.backward()
        optimizers[name].step()
        optimizers[name].zero_grad()

    def generate(name: str) -> None:
        models[name].eval()
        kwargs: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
        models[name].generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **kwargs)

    for turn in range(ROUNDS + 2):
        for kind, function in (("train", update), ("generate", generate)):
            for name in models:
                took = seconds(lambda: function(name))  # noqa: B023
                if turn > 1:  # the first two warm up
                    times[kind][name].append(took)
    tokens = {"train": BATCH * LENGTH, "generate": NEW_TOKENS}
    rows = {}
    for name, model in models.items():
        row: dict[str, Any] = {
            "layers": model.config.num_hidden_layers,
            "params": sum(parameter.numel() for parameter in model.parameters()),
            "cache_bytes_per_token": cache_bytes(model) / LENGTH,
        }
        for kind, found in times.items():
            row[f"{kind}_tokens_per_second"] = rounded_quartiles([tokens[kind] / took for took in found[name]], 1)
            ratios = [base / took for base, took in zip(found["baseline"], found[name])]
            row[f"{kind}_speed_over_baseline"] = rounded_quartiles(ratios)
        rows[name] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 12, 24])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--paper", nargs="+", choices=["30M", "44M", "63M"], help="rows of Table 4, by the baseline")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.paper:
        rows: list[dict] = [{"size": size, "models": measure(models_of_paper(size))} for size in options.paper]
    else:
        rows = [
            {"width": options.width, "depth": depth, "models": measure(models_of(options.width, depth))}
            for depth in options.depths
        ]
    conclude("language", {"batch_size": BATCH, "seq_len": LENGTH, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
