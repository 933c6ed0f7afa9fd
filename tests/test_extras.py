"""What is not installed is named in one line; the core needs torch and timm alone."""

import subprocess
import sys

import pytest

BLOCKED = (
    "import sys\n"
    "for name in {names!r}: sys.modules[name] = None\n"
    "from stepsnet.cli import main\n"
    "sys.exit(main({arguments!r}))"
)
TRAIN = ("pydantic", "yaml", "rich", "filelock", "sklearn", "matplotlib", "jinja2", "torchmetrics", "pycocotools")


@pytest.mark.parametrize(
    ("names", "arguments", "extra"),
    [
        (TRAIN, ["recipes"], "train"),
        (["rich"], ["train", "digits/tiny"], "train"),
        (["shtab"], ["--print-completion", "bash"], "train"),
        (["pycocotools"], ["train", "pennfudan/mask_rcnn"], "detection"),
        (["transformers"], ["train", "python-docs/tiny"], "language"),
    ],
)
def test_a_missing_extra_is_one_line(names, arguments, extra, tmp_path):
    code = BLOCKED.format(names=list(names), arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "is not installed, expected `pip install '.[" + extra in done.stderr


def test_the_core_needs_torch_and_timm_alone():
    names = [*TRAIN, "transformers", "tokenizers", "datasets"]
    code = f"import sys\nfor name in {names!r}: sys.modules[name] = None\n"
    code += "import stepsnet, timm, torch\n"
    code += "model = timm.create_model('steps_deit_tiny_patch16_224')\n"
    code += "print(stepsnet.plan_steps(384, 12), stepsnet.StepsNet([torch.nn.Identity()], [4]))\n"
    code += "from stepsnet.cli import main\nmain(['plan', '--width', '384', '--depth', '12'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("names", "use", "said"),
    [
        (["pydantic"], "stepsnet.train", "pydantic is not installed, expected `pip install '.[train]'`"),
        (
            ["sklearn.datasets"],
            "stepsnet.deploy.samples.photographs(1, (3, 8, 8), [0], [1])",
            "sklearn is not installed",
        ),
    ],
)
def test_a_missing_extra_is_named_in_python_too(names, use, said, tmp_path):
    code = f"import sys\nfor name in {names!r}: sys.modules[name] = None\nimport stepsnet.deploy.samples\n{use}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1], done.stderr
