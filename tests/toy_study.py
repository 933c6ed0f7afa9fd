"""A study that takes seconds, for the tests of studies."""

import yaml

from stepsnet.cli import main

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
