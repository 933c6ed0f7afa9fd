"""docs/recipes.md: a data set as it is drawn there is one that the sources open, and no kind is left out."""

import io
import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from classification_tasks import sample
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from stepsnet.recipes import find_recipe
from stepsnet.settings.config import Augment
from stepsnet.settings.overrides import override, read_recipe
from stepsnet.tasks.classification.data import load_images
from stepsnet.tasks.classification.sources import SOURCES as CLASSIFICATION
from stepsnet.tasks.classification.transforms import InputSpec
from stepsnet.tasks.detection.data import DetectionSamples, load_coco
from stepsnet.tasks.language.data import load_text
from stepsnet.tasks.language.sources import SOURCES as LANGUAGE
from stepsnet.tasks.segmentation.data import SOURCES as SEGMENTATION
from stepsnet.tasks.segmentation.data import load_pairs

TEXT = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
SPEC = InputSpec((3, 16, 16), (0.5,) * 3, (0.5,) * 3)
SIZE = (64, 48)  # of the image in the page's JSON
pytestmark = pytest.mark.usefixtures("own_cache")


def section(task, kind):
    """The text below ``#### `kind…` `` in a task's part."""
    part = re.search(rf"^### {task}\n(.*?)(?=^### |\Z)", TEXT, re.DOTALL | re.MULTILINE)[1]
    return re.search(rf"^#### `{kind}[:`][^\n]*\n(.*?)(?=^#### |\Z)", part, re.DOTALL | re.MULTILINE)[1]


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def files_of(tree):
    """The paths of a drawing, without its folders."""
    found, above = [], {}
    for line in tree.splitlines()[1:]:
        branch = re.search(r"[├└]── (\S+)", line)
        depth = branch.start() // 4
        above[depth] = branch[1]
        found.append("/".join(above[level] for level in range(depth + 1)))
    return [path for path in found if not any(other.startswith(f"{path}/") for other in found)]


def png(mode, value):
    content = io.BytesIO()
    Image.fromarray(np.full((SIZE[1], SIZE[0], *([3] if mode == "RGB" else [])), value, np.uint8)).save(content, "PNG")
    return content.getvalue()


def content_of(path, examples):
    name = path.rpartition("/")[2]
    if "instances_" in name:
        number = "1" if "train" in name else "2"
        return examples[0].replace("1.jpg", f"{number}.jpg").encode()
    if name == "classes.json":
        return examples[0].encode()
    if name == "objectInfo150.txt":
        return "\n".join(["Idx\tName", *(f"{number}\tthing {number}" for number in range(150))]).encode()
    kinds = {".txt": b"step by step " * 40, ".cls": b"0", ".jpg": png("RGB", 90), ".png": png("L", 1)}
    return b"cat\ndog" if name == "classnames.txt" else kinds[Path(name).suffix]


def write(root, tree, text):
    """Make what is drawn; the members of a tar file are drawn below it. Returns the drawn files."""
    files, examples = files_of(tree), blocks(text, "json")
    for path in files:
        archive, tar, member = path.partition(".tar/")
        target = root / (archive + ".tar" if tar else path)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = content_of(path, examples)
        if not tar:
            target.write_bytes(content)
            continue
        with tarfile.open(target, "a" if target.exists() else "w") as file:
            info = tarfile.TarInfo(member)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return files


def images_in(files, split):
    return sum(Path(path).suffix in (".jpg", ".png") and split in path for path in files)


def test_every_kind_of_data_is_on_the_page():
    kinds = {
        "Classification": {*CLASSIFICATION, "digits"},
        "Detection": {"coco"},
        "Segmentation": {*SEGMENTATION},
        "Language": {*LANGUAGE, "python-docs"},
    }
    parts = re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]
    assert {part.split("\n")[0]: set(re.findall(r"^#### `([\w-]+)", part, re.MULTILINE)) for part in parts} == kinds


@pytest.mark.parametrize("kind", ["folder", "wds", "hfds"])
def test_classification(kind, tmp_path):
    text = section("Classification", kind)
    (tree,) = blocks(text, "text")
    if kind == "hfds":
        pytest.importorskip("datasets")
    files = write(tmp_path, tree, text)
    data = load_images(f"{kind}:{tmp_path}", SPEC)
    assert (len(data.train), len(data.val)) == (images_in(files, "train"), images_in(files, "val"))
    assert data.classes == ("cat", "dog") and not sample(data.train, 0, 0, 0)[2]


@pytest.mark.parametrize("kind", [CIFAR10, CIFAR100])
def test_cifar(kind):
    (tree,) = blocks(section("Classification", kind.__name__.lower()), "text")
    names = [*(name for name, _ in (*kind.train_list, *kind.test_list)), kind.meta["filename"]]
    assert sorted(files_of(tree)) == sorted(f"{kind.base_folder}/{name}" for name in names)


def test_detection(tmp_path):
    text = section("Detection", "coco")
    for number, tree in enumerate(blocks(text, "text")):
        write(tmp_path / str(number), tree, text)
        data = load_coco(f"coco:{tmp_path / str(number)}")
        assert data.classes == ("cat",) and len(data.train.images) == len(data.val.images) == 1
        _, target = DetectionSamples(data.train)[0, 0]
        assert target["boxes"].tolist() == [[8, 8, 28, 18]] and int(target["masks"].sum()) == 200


@pytest.mark.parametrize("kind", [kind for kind in SEGMENTATION if kind != "camvid"])
def test_segmentation(kind, tmp_path):
    text = section("Segmentation", kind)
    (tree,) = blocks(text, "text")
    files = write(tmp_path, tree, text)
    data = load_pairs(f"{kind}:{tmp_path}")
    assert all(len(split.pairs) == 1 for split in data.splits.values())
    assert len(data.splits) == sum(path.startswith("images/") for path in files)
    assert data.classes[:2] == (("sky", "building") if kind == "folder" else ("thing 0", "thing 1"))
    assert "Another name of `folder:PATH`" in section("Segmentation", "camvid")
    assert SEGMENTATION["camvid"] is SEGMENTATION["folder"]


def test_language(tmp_path):
    text = section("Language", "text")
    (tree,) = blocks(text, "text")
    write(tmp_path, tree, text)
    assert set(load_text(f"text:{tmp_path}", "characters", None).splits) == {"train", "val", "test"}
    assert set(load_text(f"text:{tmp_path / 'train.txt'}", "characters", None).splits) == {"train", "val"}


def test_the_augmentation_of_the_page(tmp_path):
    (snippet,) = blocks(TEXT, "yaml")
    (tmp_path / "mine.yaml").write_text(f"name: mine\ndata: folder:x\nmodel: {{name: resnet18}}\n{snippet}")
    assert read_recipe(tmp_path / "mine.yaml").augment == Augment(hflip=0.5)
    assert override(find_recipe("cifar10/shallow"), ["augment=null"]).augment is None
    for written in re.findall(r"`tracker=(\w+)`", TEXT):
        assert override(find_recipe("digits/tiny"), [f"tracker={written}"]).tracker == written
    assert json.loads(blocks(section("Segmentation", "folder"), "json")[0])["ignore_index"] == 255
