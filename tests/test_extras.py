"""What is not installed is named in one line; the core needs torch and timm alone."""

import os
import subprocess
import sys

import pytest
from import_orders import check_behind_each

BLOCKED = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"
TRAIN = ("pydantic", "yaml", "rich", "filelock", "sklearn", "matplotlib", "jinja2", "torchmetrics", "pycocotools")

# each in a process of its own, behind what takes long to import
COMMAND = """
import contextlib, io, os
os.chdir({folder!r})
from stepsnet.cli import main
with contextlib.redirect_stderr(io.StringIO()) as said:
    status = main({arguments!r})
assert status == 2 and len(said.getvalue().splitlines()) == 1, said.getvalue()
assert "is not installed; `pip install '.[{extra}" in said.getvalue(), said.getvalue()
"""
USE = """
import stepsnet.deploy.samples
try:
    {use}
except Exception as error:
    assert {said!r} in str(error), error
else:
    raise AssertionError("{use} needs nothing")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_missing_extra_is_one_line(tmp_path):
    cases = [
        (TRAIN, ["recipes"], "train"),
        (["rich"], ["train", "digits/tiny"], "train"),
        (["shtab"], ["--print-completion", "bash"], "train"),
        (["pycocotools"], ["train", "pennfudan/mask_rcnn"], "detection"),
        (["transformers"], ["train", "python-docs/tiny"], "language"),
    ]
    codes = [
        BLOCKED.format(names=names) + COMMAND.format(arguments=arguments, extra=extra, folder=str(tmp_path))
        for names, arguments, extra in cases
    ]
    for names, use, said in [
        (["pydantic"], "stepsnet.train", "pydantic is not installed; `pip install '.[train]'`"),
        (
            ["sklearn.datasets"],
            "stepsnet.deploy.samples.photographs(1, (3, 8, 8), [0], [1])",
            "sklearn is not installed",
        ),
    ]:
        codes.append(BLOCKED.format(names=names) + USE.format(use=use, said=said))
    check_behind_each(codes, "    pass", "torch, timm")
    assert not list(tmp_path.iterdir())


def test_the_core_needs_torch_and_timm_alone():
    code = BLOCKED.format(names=[*TRAIN, "transformers", "tokenizers", "datasets"])
    code += "import stepsnet, timm, torch\n"
    code += "model = timm.create_model('steps_deit_tiny_patch16_224')\n"
    code += "print(stepsnet.plan_steps(384, 12), stepsnet.StepsNet([torch.nn.Identity()], [4]))\n"
    code += "from stepsnet.cli import main\nmain(['plan', '--width', '384', '--depth', '12'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
