"""Runs of a second: a line that is fitted through the training loop."""

import dataclasses
import json
import math
import os
import signal

import torch
from torch import nn

from stepsnet.engine.distributed import DistributedContext
from stepsnet.engine.randomness import data_order
from stepsnet.engine.task import Task
from stepsnet.engine.train import train
from stepsnet.settings.config import TrainingSettings

SETTINGS = TrainingSettings(
    epochs=3, batch_size=4, lr=0.05, warmup_epochs=1, clip_grad=1.0, weight_decay=0.1, device="cpu", stream_epochs=0
)
ALONE = DistributedContext(0, 1, torch.device("cpu"))
CLOCKS = ("samples_per_second", "memory_gib")


class Points(Task):
    """A line to be fitted; a dropout in the model shows whether randomness is a function of the step."""

    steps_per_epoch, batch_size, monitor = 5, 4, "loss"
    unit, units_per_sample = "points", 1

    def __init__(self, die_at=None, poison_at=None):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(20, 3, generator=generator)
        self.y = self.x.sum(-1, keepdim=True)
        self.die_at, self.poison_at, self.seen, self.untold = die_at, poison_at, 0, []

    def batches(self, epoch, start, shard, device):
        order = torch.from_numpy(data_order(SETTINGS.seed, epoch, 20))
        for number in range(start, self.steps_per_epoch):
            if self.die_at == (epoch, number):
                raise Killed
            scale = math.nan if self.poison_at == (epoch, number) else 1.0
            for positions in shard.micro_batches(number, self.batch_size):
                torch.rand(3)  # a task may draw as it likes
                chosen = order[list(positions)]
                yield self.x[chosen] * scale, self.y[chosen]

    def notices(self):
        told, self.untold = self.untold, []
        return told

    def loss(self, model, batch):
        error = ((model(batch[0]) - batch[1]) ** 2).mean()
        return error, {"top1": -error.detach()}

    @torch.no_grad()
    def evaluate(self, model, shard, device):
        error = ((model(self.x) - self.y) ** 2).mean().item()
        return {"loss": error}


class Stopping(Points):
    """A signal comes in the middle of an update, counted from 1."""

    def __init__(self, at, number=signal.SIGTERM):
        super().__init__()
        self.at, self.number = at, number

    def loss(self, model, batch):
        self.seen += 1
        if self.seen == self.at:
            os.kill(os.getpid(), self.number)
        return super().loss(model, batch)


class Killed(Exception):
    pass


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 1))


def make_quiet_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def fit(folder, task=None, settings=SETTINGS, make=make_model):
    model, events = make(), []
    torch.rand(7)  # what was drawn before must not matter
    folder.mkdir(exist_ok=True)
    result = train(model, task or Points(), settings, folder, ALONE, report=events.append)
    return model, result.metrics, events


def trained_with(folder, make=make_model, **changes):
    return fit(folder, settings=dataclasses.replace(SETTINGS, **changes), make=make)


def lines_without_speed(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]


def made(folder):
    folder.mkdir(exist_ok=True)
    return folder
