"""Real processes, killed at random moments and in the middle of writing a checkpoint, end as if they had not been."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from stepsnet.run_folder.checkpoint import latest

CLOCKS = ("samples_per_second", "memory_gib")
SMALL = ["model.args.widths=[24,48]", "model.args.depths=[2,1]", "model.args.num_heads=[2,3]", "train_samples=24"]
SMALL += ["epochs=4", "batch_size=4", "checkpoint_interval=1", "ema_decay=0.9", "log_interval=1", "device=cpu"]
SMALL += [
    "model.args.num_classes=2",
    "model.args.drop_path_rate=0.2",
    "stream_epochs=2",
    "amp_dtype=bfloat16",
    "img_size=32",
]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 3)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 256, (36, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{index}.png")
    return folder


def start(pictures, run, *arguments, **kwargs):
    command = [sys.executable, "-m", "stepsnet", "train", "cifar10/shallow", "--data", f"folder:{pictures}"]
    command += ["--run", str(run), "--auto-resume", *SMALL, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kwargs)


def finish(process):
    out = process.communicate(timeout=240)[0]
    assert process.returncode == 0, out


def kill(process, checkpoints, step, writing):
    """Kill a run once it has written the checkpoint of an update, or with ``writing`` while it writes the next one.

    Returns whether the kill has left a half-written checkpoint.
    """
    while "effective batch" not in process.stdout.readline():
        assert process.poll() is None
    while not any(int(path.name[5:]) >= step for path in checkpoints.glob("step-*")):
        assert process.poll() is None, process.communicate()[0]
    began = time.time()
    while writing and process.poll() is None and not half_written(checkpoints, began):
        pass
    process.kill()
    process.communicate()
    return half_written(checkpoints, began)


def half_written(checkpoints, since):
    try:
        return any(
            entry.name.startswith(".step-") and entry.stat().st_ctime > since for entry in os.scandir(checkpoints)
        )
    except FileNotFoundError:  # not begun, or renamed this very moment
        return False


def everything(run):
    """Weights, averages, optimizer and metrics of a run that has ended."""
    checkpoint, passed_over = latest(run / "checkpoints")
    assert not passed_over and not list((run / "checkpoints").glob(".step-*"))
    tensors = {f"end {name}": tensor for name, tensor in load_file(run / "model.safetensors").items()}
    for file in ("model", "averages"):
        weights = load_file(checkpoint.path / f"{file}.safetensors")
        tensors |= {f"{file} {name}": tensor for name, tensor in weights.items()}
    for name, moments in checkpoint.state["optimizer"]["state"].items():
        tensors |= {f"{name} {key}": torch.as_tensor(value) for key, value in moments.items()}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return tensors, [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]


def test_a_run_killed_anywhere_ends_as_if_it_had_not_been(pictures, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(pictures, whole))
    moments, torn = random.Random(0), 0
    for first, (workers, writing) in zip((1, 7, 13), ((4, True), (0, True), (4, False))):  # of 24 updates
        process = start(pictures, killed, f"workers={workers}")
        torn += kill(process, killed / "checkpoints", moments.randrange(first, first + 6), writing)
        assert not (killed / "summary.json").exists()
    assert torn, "no kill hit a checkpoint that was being written"
    finish(start(pictures, killed, "workers=1"))
    (tensors, lines), (expected_tensors, expected_lines) = everything(killed), everything(whole)
    assert lines == expected_lines and any(line["kind"] == "step" for line in lines)
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected_tensors[name]), name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_leaves_a_checkpoint(pictures, tmp_path, number):
    """As Ctrl-C, torchrun, Slurm and a closed terminal do: the workers must not die of it before the run has saved."""
    endless = ["workers=2", "epochs=500", "checkpoint_interval=0", "stream_epochs=0"]
    default = partial(signal.signal, number, signal.SIG_DFL)  # under nohup a signal would be left out
    process = start(pictures, tmp_path / "run", *endless, start_new_session=True, preexec_fn=default)
    lines = tmp_path / "run" / "metrics.jsonl"
    while not (lines.exists() and lines.stat().st_size):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.killpg(process.pid, number)
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 128 + number and f"stopped by {number.name} after update" in out, out
    checkpoint, _ = latest(tmp_path / "run" / "checkpoints")
    after = checkpoint.state["position"]["step"]
    assert f"after update {after}; `stepsnet resume {tmp_path / 'run'}` goes on from there" in out


def test_a_disk_that_is_full_is_one_line_and_keeps_what_is_there(pictures, tmp_path):
    def no_file_above_20_kb():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that write() fails, as on a full disk

    process = start(pictures, tmp_path / "run", preexec_fn=no_file_above_20_kb)
    out = process.communicate(timeout=240)[0]
    assert process.returncode == 2, out
    assert "Traceback" not in out and out.splitlines()[-1].startswith("stepsnet: checkpoint: cannot write"), out
    assert latest(tmp_path / "run" / "checkpoints")[0] is None
    finish(start(pictures, tmp_path / "run", "epochs=4"))  # with room again, it goes on


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_is_one_line(pictures, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    process = start(pictures, tmp_path / "locked" / "run")
    out = process.communicate(timeout=240)[0]
    assert process.returncode == 2 and "Permission denied" in out.splitlines()[-1], out


def test_a_signal_leaves_nothing_of_an_export(tmp_path):
    command = [sys.executable, "-m", "stepsnet", "export", "test_vit", "--out", str(tmp_path / "vit.onnx")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not list(tmp_path.iterdir()):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.terminate()
    out = process.communicate(timeout=120)[0]
    assert (process.returncode, list(tmp_path.iterdir())) == (143, []), out
    assert out.splitlines()[-1] == "stepsnet: stopped by SIGTERM"
