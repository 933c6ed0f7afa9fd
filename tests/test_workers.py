"""Workers end with the run, however it ends: they ignore SIGTERM, and Python waits for them when it exits."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from coco_images import write_coco
from segmentation_images import write_camvid
from torch.utils.data import Dataset

from stepsnet.errors import UserError
from stepsnet.tasks.classification.digits import load_digits
from stepsnet.tasks.classification.sources import Arrays, _picture
from stepsnet.tasks.loading import loaded

HERE = Path(__file__).parent
CPU = torch.device("cpu")


class Wrong(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        try:
            raise KeyError("of a library")
        except KeyError as error:
            raise UserError(f"data: sample {index} is wrong: got 1,\nexpected 2") from error


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mistake_in_the_data_is_the_same_line_with_any_number_of_workers(workers):
    with pytest.raises(UserError) as raised, loaded(Wrong(), CPU, workers, 2, batch_size=2) as batches:
        list(batches)
    assert str(raised.value) == "data: sample 0 is wrong: got 1,\\nexpected 2"


BROKEN = """
    import multiprocessing, sys
    from pathlib import Path
    import torch
    from torch import nn
    from stepsnet.engine.distributed import DistributedContext
    from stepsnet.settings.config import TrainingSettings
    from stepsnet.engine.task import BatchShard
    from stepsnet.engine.train import train

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, *args, **kwargs):
            raise ZeroDivisionError("of the model")

    def ends(made_by, kept=[]):
        try:
            made_by()
        except ZeroDivisionError as error:
            kept.append(error)  # and with it every frame
        else:
            raise SystemExit("nothing was raised")
        if left := multiprocessing.active_children():
            print(f"left: {left}", flush=True)

    device, root = torch.device("cpu"), Path(sys.argv[1])
    task = make(root)
    task.loss = lambda model, batch: model(batch)
    settings = TrainingSettings(epochs=1, batch_size=2, lr=0.1, device="cpu")
    context = DistributedContext(0, 1, device)
    (root / "run").mkdir()
    run = lambda: train(Broken(), task, settings, root / "run", context, report=lambda event: None)
    ends(run)
    ends(lambda: task.evaluate(Broken(), BatchShard(), device))
    run()
"""

TASKS = {
    "classification": """
        from stepsnet.tasks.classification.task import Classification
        from stepsnet.tasks.classification.data import InputSpec, load_images
        from classification_tasks import recipe_of
        from PIL import Image
        def make(root):
            for split in ("train", "val"):
                for name in ("cat", "dog"):
                    (root / split / name).mkdir(parents=True)
                    for number in range(9):
                        Image.new("RGB", (20, 20)).save(root / split / name / f"{number}.jpg")
            spec = InputSpec((3, 16, 16), (0,) * 3, (1,) * 3)
            return Classification(recipe_of(2, workers=2), load_images(f"folder:{root}", spec), spec)
    """,
    "detection": """
        from detection_tasks import make_task
        def make(root):
            return make_task(root / "data", batch_size=2, workers=2)
    """,
    "segmentation": """
        from stepsnet.recipes import find_recipe
        from stepsnet.settings.overrides import override
        from stepsnet.tasks import build_task
        def make(root):
            changes = [f"data=camvid:{root / 'data'}", "model.args.num_classes=3", "batch_size=2", "workers=2"]
            return build_task(override(find_recipe("camvid/tiny"), changes))[1]
    """,
}


@pytest.mark.parametrize("task", TASKS)
def test_a_process_with_workers_ends_after_an_exception(task, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))
    if task != "classification":
        {"detection": write_coco, "segmentation": write_camvid}[task](tmp_path / "data")
    code = textwrap.dedent(TASKS[task]) + textwrap.dedent(BROKEN)
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=HERE)
    try:
        out = process.communicate(timeout=100)[0]
    except subprocess.TimeoutExpired:
        process.kill()  # its workers see that it is gone
        pytest.fail(f"it never ended: {process.communicate()[0]}")
    assert process.returncode == 1 and out.rstrip().endswith("ZeroDivisionError: of the model"), out
    assert "left:" not in out and "nothing was raised" not in out


class Numbers(Dataset):
    def __init__(self, hang_at=None):
        self.hang_at = hang_at

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == self.hang_at:
            time.sleep(1000)
        return index


def test_leaving_the_block_ends_the_workers_and_no_others():
    other = multiprocessing.Process(target=time.sleep, args=(100,))
    other.start()
    try:
        with loaded(Numbers(), CPU, 2, 8, batch_size=1) as batches:
            assert next(batches).tolist() == [0] and len(multiprocessing.active_children()) == 3
        assert multiprocessing.active_children() == [other]
    finally:
        other.kill()
        other.join()


def test_a_worker_that_hangs_is_killed(monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # torch waits for 5 s, twice
    with loaded(Numbers(hang_at=3), CPU, 2, 8, batch_size=1) as batches:
        assert next(batches).tolist() == [0]
        time.sleep(0.2)
    assert not multiprocessing.active_children()


def test_workers_end_where_not_all_of_them_can_be_started(monkeypatch):
    start, begun = multiprocessing.Process.start, []

    def start_one(process):
        if begun:
            raise OSError("Cannot allocate memory")
        begun.append(process)
        start(process)

    monkeypatch.setattr(multiprocessing.Process, "start", start_one)
    with pytest.raises(OSError, match="Cannot allocate"), loaded(Numbers(), CPU, 2, 8, batch_size=1):
        pytest.fail("it was entered")
    assert begun and not multiprocessing.active_children()


class Pictures(Numbers):
    def __getitem__(self, index):
        return torch.full((4,), float(index)), torch.zeros(0, 4), index


@pytest.mark.parametrize("settings", [{"batch_size": 3}, {"batch_size": None}, {"batch_size": 3, "collate_fn": list}])
def test_workers_hand_on_what_the_run_itself_would_load(settings):
    found = []
    for workers in (0, 2):
        with loaded(Pictures(), CPU, workers, 8, **settings) as batches:
            found.append([str(batch) for batch in batches])
    assert found[0] == found[1] and found[0]


def assert_a_worker_ends_the_run(samples, error, match):
    with loaded(samples, CPU, 1, 8, batch_size=2) as batches, pytest.raises(error, match=match):
        next(batches)


def test_shared_memory_that_is_full_is_one_line(monkeypatch):
    def full(tensor):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)  # before the workers are forked
    line = r"workers: shared memory \(/dev/shm\) is full, .* or workers=0"
    assert_a_worker_ends_the_run(Pictures(), UserError, line)


def test_a_worker_that_is_killed_is_one_line():
    class Killed(Numbers):
        def __getitem__(self, index):
            os.kill(os.getpid(), signal.SIGKILL)

    line = r"workers: a process that loads data was killed, .* expected fewer of them"
    assert_a_worker_ends_the_run(Killed(), UserError, line)


def test_another_error_of_a_worker_stays_one():
    class Broken(Numbers):
        def __getitem__(self, index):
            raise RuntimeError("of the data")

    assert_a_worker_ends_the_run(Broken(), RuntimeError, "of the data")


def test_data_in_memory_reach_workers_that_are_not_forked():
    """As on macOS."""
    images, normalize, _ = load_digits()
    array = np.zeros((8, 8, 3), np.uint8)
    pictures = Arrays([array], [0], partial(_picture, "L"))
    again, read, other = pickle.loads(pickle.dumps((images.train, normalize, pictures)))
    assert torch.equal(read(again.read(5)), normalize(images.train.read(5)))
    assert other.read(0).mode == "L" and other.read(0).size == (8, 8)
