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
from PIL import Image
from safetensors.torch import load_file
from segmentation_images import TINY, write_camvid

from stepsnet.config import ModelSpec
from stepsnet.overrides import to_yaml
from stepsnet.recipes import find_recipe
from stepsnet.residual import DESIGNS
from stepsnet.runs.evaluate import evaluate_run

SETTINGS = ["epochs=2", "batch_size=128", "model.args.depths=[2,1,1]", "log_interval=1", "device=cpu"]
SETTINGS += ["checkpoint_interval=4", "ema_decay=0.9", "stream_epochs=1"]


def start(folder, ranks, *arguments, recipe="digits/tiny", settings=SETTINGS):
    launch = [sys.executable, "-m"]
    if ranks > 1:
        launch += ["torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone", "-m", "--"]
    words = ["train", recipe, "--run", str(folder), *settings] if recipe else ["resume", str(folder)]
    command = [*launch, "stepsnet", *words, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )


def finish(process):
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return out


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "alone"
    finish(start(folder, 1))
    return folder


def assert_same(folder, alone):
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-4)
    summaries = [json.loads((path / "summary.json").read_text())["metrics"] for path in (folder, alone)]
    assert summaries[0]["val_loss"] == pytest.approx(summaries[1]["val_loss"], rel=1e-3)
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, alone))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() < 2e-3, name


def test_two_ranks_of_ddp_train_as_one_process(tmp_path, alone):
    out = finish(start(tmp_path / "ddp", 2))
    assert "effective batch 128 = 2 ranks × 1 accumulated × 64" in out
    assert_same(tmp_path / "ddp", alone)
    out = finish(start(tmp_path / "ddp", 2, "epochs=3", recipe=None))
    assert out.count("3 epochs in place of 2: after update 22 lr is ") == 1 and "after 3 epochs: " in out
    assert (tmp_path / "ddp" / "epochs-2" / "summary.json").exists()


def test_each_epoch_of_ddp_is_trained_with_label_smoothing(tmp_path):
    """Without averages, where the wrapped model itself is evaluated between two epochs."""
    settings = [*SETTINGS, "ema_decay=null", "label_smoothing=0.5", "train_samples=256", "stream_epochs=0"]
    for name, ranks in (("one", 1), ("two", 2)):
        finish(start(tmp_path / name, ranks, settings=settings))
    assert_same(tmp_path / "two", tmp_path / "one")


def test_fsdp_is_killed_and_goes_on_in_one_process(tmp_path, alone):
    folder = tmp_path / "fsdp"
    process = start(folder, 2, "parallel=fsdp")
    deadline = time.monotonic() + 240
    while not (folder / "checkpoints" / "step-00000008").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for line in os.popen(f"pgrep -f {folder}").read().split():  # torchrun's children are in sessions of their own
        os.kill(int(line), signal.SIGKILL)
    assert any((folder / "checkpoints").glob("step-*/shards/*.distcp"))
    out = finish(start(folder, 1, "--resume"))
    assert "resumed after update" in out
    assert_same(folder, alone)


def test_a_sharded_run_that_diverges_ends_on_both_ranks_with_one_line(tmp_path):
    folder = tmp_path / "fsdp"
    process = start(folder, 2, "parallel=fsdp", "lr=1e6", "warmup_epochs=0", "clip_grad=null", "ema_decay=null")
    out, _ = process.communicate(timeout=300)  # a rank that waited for the other's part would not end
    assert process.returncode != 0
    assert out.count("expected a finite number") == 1 and "a new run may have a lower lr (now 1e+06)" in out, out
    (line,) = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"diverged"' in line]
    assert f"at update {json.loads(line)['step']}, expected a finite number" in out
    assert not (folder / "summary.json").exists()


def test_every_design_of_the_stream_trains_on_two_ranks_as_on_one():
    script = Path(__file__).parent / "residual_ranks.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--standalone", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0 and done.stdout == f"{len(DESIGNS)} designs\n", done.stdout + done.stderr


def test_rank_0_scores_the_test_split_alone(tmp_path):
    settings = ["epochs=1", "batch_size=128", "model.args.depths=[1,1,1]", "device=cpu"]
    finish(start(tmp_path / "run", 2, "holdout=200", "score_test=true", settings=settings))
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert 0 < metrics["test_top1"] <= 100


UNDECODABLE = """
import sys, torch
from stepsnet.engine.distributed import init_distributed
from stepsnet.engine.task import BatchShard
from stepsnet.errors import UserError
from stepsnet.tasks.classification.data import load_images
from stepsnet.tasks.classification.task import Classification
from stepsnet.tasks.classification.transforms import InputSpec
spec = InputSpec((3, 16, 16), (0.5,) * 3, (0.25,) * 3)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 2))
with init_distributed("cpu") as context:
    shard = BatchShard(context.rank, context.world_size)
    for most in (2, 1):
        task = Classification(load_images(sys.argv[1], spec), 4, input_size=spec.input_size, max_undecodable=most)
        try:
            task.evaluate(model, shard, context.device)
            said = task.notices()
        except UserError as error:
            said = [str(error)]
        with open(f"{sys.argv[2]}{context.rank}", "a") as file:
            print(len(said), *said, file=file)
"""


def test_undecodable_images_of_every_rank_are_named_and_counted(tmp_path):
    rng = np.random.default_rng(0)
    for split, name in (("train", "cat"), ("train", "dog"), ("val", "cat"), ("val", "dog")):
        (tmp_path / split / name).mkdir(parents=True)
        for index in range(4):
            pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / split / name / f"{index}.png")
    for name in ("cat", "dog"):  # the former is rank 0's, the latter rank 1's
        (tmp_path / "val" / name / "1.png").write_text("this is a text")
    (tmp_path / "script.py").write_text(UNDECODABLE)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*launch, str(tmp_path / "script.py"), f"folder:{tmp_path}", str(tmp_path / "said")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        named, refused = (tmp_path / f"said{rank}").read_text().splitlines()
        assert named.startswith("3 ") and "cat/1.png" in named and "dog/1.png" in named
        assert named.endswith("the metrics are of 6 of the 8 images to evaluate")
        assert "2 samples cannot be decoded, expected at most max_undecodable=1" in refused


TEXT = ["model.args.widths=[16,32]", "model.args.depths=[1,1]", "model.args.num_attention_heads=[2,2]", "seq_len=16"]
TEXT += ["model.args.vocab_size=270", "vocab_size=262", "epoch_updates=6", "epochs=2", "batch_size=4", "log_interval=1"]
TEXT += ["grad_checkpointing=[2]", "checkpoint_interval=4", "ema_decay=0.9", "device=cpu"]


def test_a_language_model_trains_on_two_ranks_as_on_one(tmp_path, monkeypatch):
    """Its embedding and head are one tensor, which FSDP must keep one, in its checkpoints too."""
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("step by step, the network widens.\n" * 60)

    def run(name, ranks, *arguments):
        words = ["--data", f"text:{tmp_path / 'text.txt'}", *TEXT, *arguments]
        return finish(start(tmp_path / name, ranks, *words, recipe="python-docs/tiny", settings=[]))

    run("alone", 1)
    run("ddp", 2)
    run("fsdp", 2, "parallel=fsdp")
    run("unaveraged", 2, "ema_decay=null", "epochs=1")
    assert "lm_head.weight" not in load_file(tmp_path / "unaveraged" / "model.safetensors")
    for name in ("ddp", "fsdp"):
        assert_same(tmp_path / name, tmp_path / "alone")
    shutil.rmtree(tmp_path / "fsdp" / "checkpoints" / "step-00000012")
    (tmp_path / "fsdp" / "summary.json").unlink()
    assert "resumed after update 8" in run("fsdp", 1, "--resume")
    assert_same(tmp_path / "fsdp", tmp_path / "alone")


def test_ranks_that_disagree_are_told(tmp_path):
    code = (
        "import os, sys; rank = os.environ['RANK']\n"
        "from stepsnet.cli import main\n"
        f"run = {str(tmp_path / 'run')!r}\n"
        "sys.exit(main(['train', 'digits/tiny', '--run', run, 'device=cpu', f'seed={rank}']))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    result = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=240)
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
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = {**os.environ, "STEPSNET_CACHE": str(tmp_path / "cache")}
    result = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode != 0
    said = "data: got {'train': 4691, 'evaluated': 522, 'updates an epoch': 4} on rank 1, expected rank 0's {'train': "
    assert said in result.stderr and not (tmp_path / "run").exists()


def test_an_evaluation_that_fails_loses_no_update(tmp_path):
    """Each rank counts what it cannot decode by itself, and the sum, which is too large, is known in the evaluation."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for name in ("cat", "dog"):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "data" / split / name / f"{index}.png")
    for name in ("train/cat/1.png", "val/dog/1.png"):
        (tmp_path / "data" / name).write_text("this is a text")
    settings = ["--data", f"folder:{tmp_path / 'data'}", "img_size=16", "batch_size=4", "epochs=1", "device=cpu"]
    settings += ["model.args.num_classes=2", "model.args.widths=[24]", "model.args.depths=[1]"]
    settings += ["model.args.num_heads=[2]", "train_samples=16", "max_undecodable=1"]
    process = start(tmp_path / "run", 2, recipe="cifar10/shallow", settings=settings)
    out, _ = process.communicate(timeout=300)
    assert process.returncode != 0 and "samples cannot be decoded, expected at most max_undecodable=1" in out, out
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    assert "resumed after update 4" in finish(start(tmp_path / "run", 2, "max_undecodable=9", recipe=None))


def test_ranks_go_on_from_one_checkpoint_or_not_at_all(tmp_path):
    folder = tmp_path / "run"
    finish(start(folder, 1))
    latest = max((folder / "checkpoints").iterdir())
    code = (
        "import os, pathlib, sys\n"
        "from stepsnet import checkpoint\n"
        "from stepsnet.engine import train_state\n"
        "def of_rank(folder, kept=train_state.checkpoint_folders):\n"
        f"    return [path for path in kept(folder) if os.environ['RANK'] == '0' or path.name != {latest.name!r}]\n"
        "checkpoint.checkpoint_folders = of_rank\n"  # of a machine whose disk has not got the newest
        "from stepsnet.cli import main\n"
        f"sys.exit(main(['resume', {str(folder)!r}, 'epochs=3']))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    result = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=240)
    assert result.returncode != 0 and "after 3 epochs" not in result.stdout + result.stderr
    assert "rank 1 cannot read that of update 22" in result.stderr
    assert max((folder / "checkpoints").iterdir()) == latest  # nothing was trained


SCORED = """
import dataclasses, json, sys, torch
from stepsnet.engine.distributed import init_distributed, parallelize
from stepsnet.engine.task import BatchShard
from stepsnet.overrides import read_recipe
from stepsnet.tasks import build_task
from pathlib import Path
torch.set_num_threads(1)
with init_distributed("cpu") as context:
    torch.manual_seed(0)
    model, task = build_task(read_recipe(Path(sys.argv[1])))
    model = parallelize(model.eval(), "fsdp", context)
    metrics = task.evaluate(model, BatchShard(context.rank, context.world_size), context.device)
    print(json.dumps(metrics) if context.is_main else "", flush=True)
"""


@pytest.fixture
def segmenter(tmp_path, monkeypatch):
    """A recipe of UPerNet on three pictures of two sizes, by sliding windows."""
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))
    recipe = dataclasses.replace(
        find_recipe("camvid/tiny"),
        model=ModelSpec("upernet", TINY),
        baseline=None,
        data=f"camvid:{write_camvid(tmp_path / 'camvid')}",
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
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    return tmp_path / "recipe.yaml"


def test_a_segmenter_and_its_average_train_on_two_ranks_of_fsdp(tmp_path, segmenter):
    """Its batch norms' statistics are whole on every rank, while its weights are shared out."""
    settings = ["parallel=fsdp", "ema_decay=0.9", "device=cpu"]
    finish(start(tmp_path / "fsdp", 2, recipe=str(segmenter), settings=settings))
    summary = json.loads((tmp_path / "fsdp" / "summary.json").read_text())
    assert summary["ranks"] == 2 and 0 < summary["metrics"]["val_miou"] < 100
    alone = evaluate_run(tmp_path / "fsdp")  # by one process, with the statistics that rank 0 has saved
    assert alone["loss"] == pytest.approx(summary["metrics"]["val_loss"], rel=1e-4)
    assert len(losses(tmp_path / "fsdp")) == 4 and np.isfinite(losses(tmp_path / "fsdp")).all()
    weights = load_file(tmp_path / "fsdp" / "model.safetensors")
    assert weights["decode_head.bottleneck.batch_norm.running_var"].isfinite().all()


def test_pixels_are_counted_over_all_ranks(tmp_path, segmenter):
    """FSDP waits for every rank at every forward pass, and pictures of two sizes have different numbers of windows."""
    (tmp_path / "script.py").write_text(SCORED)
    command = [str(tmp_path / "script.py"), str(segmenter)]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    found = []
    for how in ([], launch):
        done = subprocess.run([sys.executable, *how, *command], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))
    assert found[1] == pytest.approx(found[0], abs=1e-3) and found[0]["pixel_accuracy"] > 0
