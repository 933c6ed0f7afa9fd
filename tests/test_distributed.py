"""Two real processes over gloo: the same curve as one, with DDP and FSDP, and checkpoints that change ranks."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from line_fits import ALONE
from PIL import Image
from ports import free_ports
from safetensors.torch import load_file
from segmentation_images import TINY, write_camvid
from two_ranks import score_segmenter

from stepsnet.cli import main
from stepsnet.recipes import find_recipe
from stepsnet.residual import DESIGNS
from stepsnet.run_folder.folder import lock_folder
from stepsnet.runs.evaluate import evaluate_run
from stepsnet.settings.config import ModelSpec
from stepsnet.settings.overrides import to_yaml

SETTINGS = ["epochs=2", "batch_size=128", "model.args.depths=[2,1,1]", "log_interval=1", "device=cpu"]
SETTINGS += ["checkpoint_interval=4", "ema_decay=0.9", "stream_epochs=1"]


LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def start(folder, *arguments, recipe="digits/tiny", settings=SETTINGS):
    """Two ranks in a launch of their own, as one of them is to be killed or refused."""
    command = [*LAUNCH, "-m", "--", "stepsnet", "train", recipe, "--run", str(folder), *settings, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "alone"
    assert main(["train", "digits/tiny", "--run", str(folder), *SETTINGS]) == 0
    return folder


# without averages, where the wrapped model itself is evaluated between two epochs
SMOOTHED = ["ema_decay=null", "label_smoothing=0.5", "train_samples=256", "stream_epochs=0"]
SMOOTHED += ["holdout=200", "score_test=true"]
TEXT = ["model.args.widths=[16,32]", "model.args.depths=[1,1]", "model.args.num_attention_heads=[2,2]", "seq_len=16"]
TEXT += ["model.args.vocab_size=270", "vocab_size=262", "epoch_updates=6", "epochs=2", "batch_size=4", "log_interval=1"]
TEXT += ["grad_checkpointing=[2]", "checkpoint_interval=4", "ema_decay=0.9", "device=cpu"]


def trained(folder, name, *words):
    return ["train", *words, "--run", str(folder / name)]


def of_text(folder):
    return ["python-docs/tiny", "--data", f"text:{folder / 'text.txt'}", *TEXT]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A folder with what two processes have made and said, of which each is started once."""
    folder = tmp_path_factory.mktemp("two")
    write_images(folder / "images", 4, 4, "val/cat/1.png", "val/dog/1.png")  # the former is rank 0's
    (folder / "text.txt").write_text("step by step, the network widens.\n" * 60)
    (folder / "segmenter.yaml").write_text(to_yaml(segmenter(folder)))
    jobs = [
        ("ddp", trained(folder, "ddp", "digits/tiny", *SETTINGS, "accumulation_steps=2")),
        ("copy_ddp", None),
        ("longer", ["resume", str(folder / "longer"), "epochs=3"]),
        ("smoothed", trained(folder, "smoothed", "digits/tiny", *SETTINGS, *SMOOTHED)),
        ("text_ddp", trained(folder, "text_ddp", *of_text(folder), "ema_decay=null")),
        ("text_fsdp", trained(folder, "text_fsdp", *of_text(folder), "parallel=fsdp")),
        ("segmenter", trained(folder, "segmenter", str(folder / "segmenter.yaml"), "parallel=fsdp", "ema_decay=0.9")),
        *((name, None) for name in ("score_segmenter", "undecodable", "designs", "stop_one", "poison_one")),
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    port, *ports = free_ports(1 + len(jobs))
    script = Path(__file__).with_name("two_ranks.py")
    command = [*LAUNCH[:-1], "--master-port", port, str(script), str(folder), ",".join(ports)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STEPSNET_CACHE": str(folder / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def answers(folder, name):
    """What each rank has found."""
    return [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in (0, 1)]


def write_images(folder, train, val, *broken):
    """So many images of each of two classes."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{index}.png")
    for name in broken:
        (folder / name).write_text("this is a text")


def segmenter(folder):
    """A recipe of UPerNet on three pictures of two sizes, by sliding windows."""
    return dataclasses.replace(
        find_recipe("camvid/tiny"),
        model=ModelSpec("upernet", TINY),
        baseline=None,
        data=f"camvid:{write_camvid(folder / 'camvid')}",
        device="cpu",
        scale=(400, 28),
        crop_size=32,
        batch_size=4,
        epochs=2,
        epoch_updates=2,
        warmup_epochs=0.0,
        log_interval=1,
        eval_window=16,
        eval_stride=8,
    )


def assert_same(folder, alone):
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-4)
    summaries = [json.loads((path / "summary.json").read_text())["metrics"] for path in (folder, alone)]
    assert summaries[0]["val_loss"] == pytest.approx(summaries[1]["val_loss"], rel=1e-3)
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, alone))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() < 2e-3, name


def test_two_ranks_of_ddp_train_as_one_process(two_ranks, alone):
    assert "effective batch 128 = 2 ranks × 2 accumulated × 32" in (two_ranks / "ddp0.txt").read_text()
    assert_same(two_ranks / "ddp", alone)
    out = (two_ranks / "longer0.txt").read_text()
    assert out.count("3 epochs instead of 2: after update 22 lr is ") == 1 and "after 3 epochs: " in out
    assert (two_ranks / "longer" / "epochs-2" / "summary.json").exists()
    assert all(not (two_ranks / f"{name}1.txt").read_text() for name in ("ddp", "longer"))  # rank 0 alone speaks


def test_each_epoch_is_trained_with_label_smoothing_and_the_test_split_is_scored(two_ranks, tmp_path):
    assert main(trained(tmp_path, "one", "digits/tiny", *SETTINGS, *SMOOTHED)) == 0
    assert_same(two_ranks / "smoothed", tmp_path / "one")
    ours, theirs = (
        json.loads((folder / "summary.json").read_text())["metrics"]
        for folder in (two_ranks / "smoothed", tmp_path / "one")
    )
    for key in ("test_loss", "test_top1"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-3)
    scores = evaluate_run(two_ranks / "smoothed", "digits@test")
    assert scores["loss"] == pytest.approx(ours["test_loss"], rel=1e-4) and scores["top1"] == ours["test_top1"]
    assert ours["test_loss"] != pytest.approx(ours["val_loss"], rel=1e-3)


def test_a_signal_to_one_rank_stops_both_after_the_same_update(two_ranks):
    """With what rank 0 says of it, which has not got it."""
    said = f"stopped by SIGTERM after update 3; `stepsnet resume {two_ranks / 'stopped'}` goes on from there"
    assert answers(two_ranks, "stop_one") == [[said, 3]] * 2


def test_data_of_one_rank_that_are_not_finite_end_both_with_one_message(two_ranks):
    (said, step), other = answers(two_ranks, "poison_one")
    assert other == [said, step] and step == 3 and said.startswith("loss: got nan at update 3, expected a finite")
    assert "every module's output is finite on rank 0" in said
    assert "the first module whose output is not finite is 0;" in said


def test_fsdp_is_killed_and_goes_on_in_one_process(tmp_path, alone, capsys):
    folder = tmp_path / "fsdp"
    process = start(folder, "parallel=fsdp")
    deadline = time.monotonic() + 240
    while not (folder / "checkpoints" / "step-00000008").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for line in os.popen(f"pgrep -f {folder}").read().split():  # torchrun's children are in sessions of their own
        os.kill(int(line), signal.SIGKILL)
    with lock_folder(folder, wait=60):  # until they have died
        pass
    assert any((folder / "checkpoints").glob("step-*/shards/*.distcp"))
    capsys.readouterr()
    assert main(["resume", str(folder)]) == 0 and "resumed after update" in capsys.readouterr().out
    assert_same(folder, alone)


def test_a_sharded_run_that_diverges_ends_on_both_ranks_with_one_line(tmp_path):
    folder = tmp_path / "fsdp"
    process = start(folder, "parallel=fsdp", "lr=1e6", "warmup_epochs=0", "clip_grad=null", "ema_decay=null")
    out, _ = process.communicate(timeout=300)  # a rank that waited for the other's part would not end
    assert process.returncode != 0
    assert out.count("expected a finite number") == 1 and "try a new run with a lower lr (now 1e+06)" in out, out
    (line,) = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"diverged"' in line]
    assert f"at update {json.loads(line)['step']}, expected a finite number" in out
    assert not (folder / "summary.json").exists()


def test_every_design_of_the_stream_trains_on_two_ranks_as_on_one(two_ranks):
    assert answers(two_ranks, "designs") == [[list(DESIGNS), []]] * 2


def test_undecodable_images_of_every_rank_are_named_and_counted(two_ranks):
    for named, refused in answers(two_ranks, "undecodable"):
        assert len(named) == 3 and "cat/1.png" in " ".join(named) and "dog/1.png" in " ".join(named)
        assert named[-1].endswith("the metrics cover 6 of the 8 images to evaluate")
        assert len(refused) == 1 and "2 samples cannot be decoded, expected at most max_undecodable=1" in refused[0]


def test_a_language_model_trains_on_two_ranks_as_on_one(two_ranks, tmp_path, monkeypatch, capsys):
    """Its embedding and head are one tensor, which FSDP must keep one, in its checkpoints too."""
    monkeypatch.setenv("STEPSNET_CACHE", str(two_ranks / "cache"))
    alone = tmp_path / "alone"
    assert main(trained(tmp_path, "alone", *of_text(two_ranks))) == 0
    assert losses(two_ranks / "text_ddp") == pytest.approx(losses(alone), rel=1e-4)
    ours = load_file(two_ranks / "text_ddp" / "model.safetensors")  # without averages
    theirs = load_file(max((alone / "checkpoints").iterdir()) / "model.safetensors")
    assert "lm_head.weight" not in ours and ours.keys() == theirs.keys()
    assert all((ours[name] - theirs[name]).abs().max() < 2e-3 for name in ours)
    fsdp = shutil.copytree(two_ranks / "text_fsdp", tmp_path / "fsdp")
    assert_same(fsdp, alone)
    shutil.rmtree(fsdp / "checkpoints" / "step-00000012")
    (fsdp / "summary.json").unlink()
    capsys.readouterr()
    assert main(["resume", str(fsdp)]) == 0 and "resumed after update 8" in capsys.readouterr().out
    assert_same(fsdp, alone)


def test_ranks_that_disagree_are_told(tmp_path):
    code = (
        "import os, sys; rank = os.environ['RANK']\n"
        "from stepsnet.cli import main\n"
        f"run = {str(tmp_path / 'run')!r}\n"
        "sys.exit(main(['train', 'digits/tiny', '--run', run, 'device=cpu', f'seed={rank}']))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    result = subprocess.run([*LAUNCH, str(script)], capture_output=True, text=True, timeout=240)
    assert result.returncode != 0
    assert "seed: got 1 on rank 1, expected rank 0's 0" in result.stderr
    assert not (tmp_path / "run").exists()


def test_ranks_whose_data_differ_are_told(tmp_path):
    """As where each machine has a copy of its own, and one of them is not whole."""
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "text.txt").write_text("step by step\n" * (400 + rank))
    code = (
        "import os, sys\n"
        f"os.chdir({str(tmp_path)!r} + '/' + os.environ['RANK'])\n"
        "from stepsnet.cli import main\n"
        f"words = ['train', 'python-docs/tiny', '--data', 'text:text.txt', '--run', {str(tmp_path / 'run')!r}]\n"
        "words += ['batch_size=4', 'seq_len=64', 'epoch_updates=4', 'tokenizer=characters', 'vocab_size=null']\n"
        "sys.exit(main([*words, 'device=cpu']))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {**os.environ, "STEPSNET_CACHE": str(tmp_path / "cache")}
    result = subprocess.run([*LAUNCH, str(script)], capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode != 0
    said = "data: got {'train': 4691, 'evaluated': 522, 'updates an epoch': 4} on rank 1, expected rank 0's {'train': "
    assert said in result.stderr and not (tmp_path / "run").exists()


def test_an_evaluation_that_fails_loses_no_update(tmp_path, capsys):
    """Each rank counts what it cannot decode by itself, and the sum, which is too large, is known in the evaluation."""
    write_images(tmp_path / "data", 8, 4, "train/cat/1.png", "val/dog/1.png")
    settings = ["--data", f"folder:{tmp_path / 'data'}", "img_size=16", "batch_size=4", "epochs=1", "device=cpu"]
    settings += ["model.args.num_classes=2", "model.args.widths=[24]", "model.args.depths=[1]"]
    settings += ["model.args.num_heads=[2]", "train_samples=16", "max_undecodable=1"]
    process = start(tmp_path / "run", recipe="cifar10/shallow", settings=settings)
    out, _ = process.communicate(timeout=300)
    assert process.returncode != 0 and "samples cannot be decoded, expected at most max_undecodable=1" in out, out
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    assert main(["resume", str(tmp_path / "run"), "max_undecodable=9"]) == 0
    assert "resumed after update 4" in capsys.readouterr().out


def test_ranks_go_on_from_one_checkpoint_or_not_at_all(tmp_path, alone):
    folder = shutil.copytree(alone, tmp_path / "run")
    latest = max((folder / "checkpoints").iterdir())
    code = (
        "import os, pathlib, sys\n"
        "from stepsnet.run_folder import checkpoint\n"
        "from stepsnet.engine import train_state\n"
        "def of_rank(folder, kept=train_state.checkpoint_folders):\n"
        f"    return [path for path in kept(folder) if os.environ['RANK'] == '0' or path.name != {latest.name!r}]\n"
        "checkpoint.checkpoint_folders = of_rank\n"  # of a machine whose disk has not got the newest
        "from stepsnet.cli import main\n"
        f"sys.exit(main(['resume', {str(folder)!r}, 'epochs=3']))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    result = subprocess.run([*LAUNCH, str(script)], capture_output=True, text=True, timeout=240)
    assert result.returncode != 0 and "after 3 epochs" not in result.stdout + result.stderr
    assert "rank 1 cannot read the one of update 22" in result.stderr
    assert max((folder / "checkpoints").iterdir()) == latest  # nothing was trained


def test_a_segmenter_and_its_average_train_on_two_ranks_of_fsdp(two_ranks, monkeypatch):
    """Its batch norms' statistics are whole on every rank, while its weights are shared out."""
    monkeypatch.setenv("STEPSNET_CACHE", str(two_ranks / "cache"))
    folder = two_ranks / "segmenter"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ranks"] == 2 and 0 < summary["metrics"]["val_miou"] < 100
    alone = evaluate_run(folder)  # by one process, with the statistics that rank 0 has saved
    assert alone["loss"] == pytest.approx(summary["metrics"]["val_loss"], rel=1e-4)
    assert len(losses(folder)) == 4 and np.isfinite(losses(folder)).all()
    weights = load_file(folder / "model.safetensors")
    assert weights["decode_head.bottleneck.batch_norm.running_var"].isfinite().all()


def test_pixels_are_counted_over_all_ranks(two_ranks, monkeypatch):
    """FSDP waits for every rank at every forward pass, and pictures of two sizes have different numbers of windows."""
    monkeypatch.setenv("STEPSNET_CACHE", str(two_ranks / "cache"))
    alone = score_segmenter(two_ranks, ALONE)
    assert answers(two_ranks, "score_segmenter")[0] == pytest.approx(alone, abs=1e-3) and alone["pixel_accuracy"] > 0
