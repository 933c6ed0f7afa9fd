"""A study that takes seconds, for the tests of studies."""

import yaml

from stepsnet.cli import main
from stepsnet.study.run_plan import Planned

TOY = {
    "name": "toy",
    "question": "Does depth help?",
    "recipe": "digits/tiny",
    "settings": {
        "epochs": 2,
        "batch_size": 64,
        "warmup_epochs": 0.5,
        "holdout": 100,
        "train_samples": 128,
        "clean_samples": 50,
        "stream_epochs": 0,
        "stream_interval": 2,
        "model.args.widths": [16],
        "model.args.num_heads": [1],
    },
    "tuning": {"rates": [0.001, 0.002, 0.004], "seeds": [0], "length": 0.5, "most_rates": 3},
    "seeds": [1, 2],
    "flatness": {"share": 0.5, "within": 10.0},
    "contenders": [
        {"name": "plain", "points": {1: {"model.args.depths": [1]}, 2: {"model.args.depths": [2]}}},
    ],
    "criteria": [{"name": "gain", "left": "plain@2", "right": "plain@1", "margin": 1.0}],
    "claims": [{"text": "Depth helps.", "denial": "Depth does not help.", "criteria": ["gain"]}],
}


def declared(tmp_path, **changes):
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump(TOY | changes))
    return file


def run(*arguments, capsys):
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def records(cell, scores, moved=0.0, rates=(0.001, 0.002, 0.004)):
    """Results of all tuning runs, the second rate the best, and of a final run for each of ``scores``."""
    runs = [Planned(cell, "tuning", "", rate, 0) for rate in rates]
    runs += [Planned(cell, "final", "", 0.002, seed) for seed, _ in enumerate(scores, 1)]
    for planned in runs:
        tested = {"test_top1": scores[planned.seed - 1]} if planned.kind == "final" else {}
        curve = [{"epoch": 1, "train_clean_loss": 1.0}, {"epoch": 2, "train_clean_loss": 1.0 - moved}]
        yield {
            "study": "toy",
            "run": planned.name,
            "kind": planned.kind,
            "contender": cell.contender,
            "point": cell.point,
            "variant": "",
            "rate": planned.rate,
            "seed": planned.seed,
            "settings": {},
            "metrics": {"val_top1": -abs(planned.rate - 0.002), **tested},
            "curve": curve,
            "params": 12000,
            "macs": 3000000,
        }
