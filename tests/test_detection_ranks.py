"""Detection on two processes: they score and train as one does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from coco_images import write_coco
from detection_tasks import CPU, TINY, Unsure, make_task
from ports import free_ports

from stepsnet.engine.task import BatchShard
from stepsnet.runs.evaluate import evaluate_run

pytestmark = pytest.mark.usefixtures("session_cache")


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp("coco") / "data")


ON_TWO_RANKS = """
import json, os, sys
from pathlib import Path
coco, out, tests, ports, *tiny = sys.argv[1:]
ports = iter(ports.split(","))
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # each group of processes meets in a store of its own
sys.path.insert(0, tests)
from detection_tasks import CPU, Unsure, make_task
from stepsnet.cli import main
from stepsnet.engine.distributed import init_distributed
from stepsnet.engine.task import BatchShard
os.environ["MASTER_PORT"] = next(ports)
with init_distributed("cpu") as context:
    task = make_task(coco)
    scores = task.evaluate(Unsure(task.data), BatchShard(context.rank, context.world_size), CPU)
    Path(out, f"scores{context.rank}.json").write_text(json.dumps(scores))
for parallel, name, changes in (
    ("ddp", "pennfudan/mask_rcnn", []),
    # a cascade whose backbone is not a StepsNet has no steps to be sharded by
    ("fsdp", "pennfudan/cascade", ["model.args.backbone=test_resnet"]),
):
    os.environ["MASTER_PORT"] = next(ports)
    command = ["train", name, "--data", f"coco:{coco}", "--run", str(Path(out, parallel))]
    if status := main([*command, *tiny, "epochs=1", f"parallel={parallel}", *changes]):
        sys.exit(status)
"""


@pytest.fixture(scope="module")
def two_ranks(coco, tmp_path_factory):
    """What two processes make: the scores of one that knows, and a run with DDP and one with FSDP."""
    out = tmp_path_factory.mktemp("two")
    (out / "script.py").write_text(ON_TWO_RANKS)
    port, *ports = free_ports(4)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    command = [*launch, str(out / "script.py"), str(coco), str(out), str(Path(__file__).parent), ",".join(ports), *TINY]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STEPSNET_CACHE": str(out / "cache")}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return out


def test_ap_is_of_all_ranks_records_each_counted_once(coco, two_ranks):
    task = make_task(coco)
    alone = task.evaluate(Unsure(task.data), BatchShard(), CPU)
    assert 0 < alone["box_ap"] < 100 and 0 < alone["mask_ap"] < 100
    for rank in range(2):  # both ranks know
        assert json.loads((two_ranks / f"scores{rank}.json").read_text()) == alone


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_and_score_as_one(two_ranks, parallel):
    folder = two_ranks / parallel
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ranks"] == 2 and (folder / "inspection.json").exists()  # one rank's work
    alone = evaluate_run(folder)  # three images, of which one rank had two
    assert alone == {
        key.removeprefix("val_"): summary["metrics"][key] for key in summary["metrics"] if key.startswith("val_")
    }
