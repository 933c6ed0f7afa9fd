"""Run by torchrun: what test_distributed.py asks of two ranks that end well, one job after the other.

The launch and the imports take ten seconds of a core, and most jobs take one. Each job has a group of processes of its
own. Arguments: the folder of ``jobs.json`` and of the data, which gets the answers, and a port for each job.
"""

import json
import os
import shutil
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
from classification_tasks import recipe_of
from line_fits import SETTINGS, Points, Stopping, made, make_model
from residual_ranks import compare_designs

from stepsnet.cli import main
from stepsnet.engine.distributed import init_distributed, parallelize
from stepsnet.engine.interrupt import Interrupted
from stepsnet.engine.task import BatchShard
from stepsnet.engine.train import train
from stepsnet.engine.update import Diverged
from stepsnet.errors import UserError
from stepsnet.run_folder.checkpoint import latest
from stepsnet.settings.overrides import read_recipe
from stepsnet.tasks import build_task
from stepsnet.tasks.classification.data import load_images
from stepsnet.tasks.classification.task import Classification
from stepsnet.tasks.classification.transforms import InputSpec


def fit(folder, context, task):
    train(make_model(), task, SETTINGS, made(folder), context, report=lambda event: None)


def copy_ddp(folder, context):
    context.on_main(lambda: str(shutil.copytree(folder / "ddp", folder / "longer")))


def stop_one(folder, context):
    """Rank 1 alone gets a signal, whose number rank 0 cannot know; what is said, and the update of the checkpoint."""
    try:
        fit(folder / "stopped", context, Stopping(at=3, number=signal.SIGINT) if context.rank else Points())
    except Interrupted as error:
        return str(error), latest(folder / "stopped" / "checkpoints")[0].state["position"]["step"]


def poison_one(folder, context):
    """Rank 1 alone has data that are not finite; what is said, and the update that it is said of."""
    try:
        fit(folder / "poisoned", context, Points(poison_at=(0, 2) if context.rank else None))
    except Diverged as error:
        return str(error), error.step


def undecodable(folder, context):
    """What a task says of images that cannot be decoded, where they are as many as may be, and where one more."""
    spec = InputSpec((3, 16, 16), (0.5,) * 3, (0.25,) * 3)
    model, said = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 2)), []
    for most in (2, 1):
        data = load_images(f"folder:{folder / 'images'}", spec)
        task = Classification(recipe_of(4, max_undecodable=most), data, spec)
        try:
            task.evaluate(model, BatchShard(context.rank, context.world_size), context.device)
            said.append(task.notices())
        except UserError as error:
            said.append([str(error)])
    return said


def score_segmenter(folder, context):
    torch.manual_seed(0)
    model, task = build_task(read_recipe(folder / "segmenter.yaml"))
    model = parallelize(model.eval(), "fsdp", context)
    return task.evaluate(model, BatchShard(context.rank, context.world_size), context.device)


def designs(folder, context):
    return compare_designs(context)


def run(folder, name, words):
    """A command, or without words the function of this name; what rank 0 prints, or each rank returns, is kept."""
    rank = os.environ["RANK"]
    if words:
        with open(folder / f"{name}{rank}.txt", "w") as file, redirect_stdout(file):
            if status := main(words):
                sys.exit(f"{name} ends with status {status}")
        return
    with init_distributed("cpu") as context:
        answer = globals()[name](folder, context)
    (folder / f"{name}{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # each group meets in a store of its own
    for (name, words), port in zip(json.loads(Path(sys.argv[1], "jobs.json").read_text()), sys.argv[2].split(",")):
        os.environ["MASTER_PORT"] = port
        run(Path(sys.argv[1]), name, words)
