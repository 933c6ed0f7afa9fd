"""COCO data: what is refused before training, what may be left out, and that a check is made once."""

import json
import threading

import pytest
from coco_images import write_coco
from detection_tasks import load
from PIL import Image

from stepsnet.cli import main
from stepsnet.errors import UserError
from stepsnet.files.cache import cached_json
from stepsnet.tasks.detection import validate
from stepsnet.tasks.detection.data import DetectionSamples
from stepsnet.tasks.detection.scores import class_names

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def coco(tmp_path):
    return write_coco(tmp_path / "coco")


def change(coco, split="train", **records):
    """Change the JSON: ``annotations=lambda records: …`` gets the list."""
    file = coco / f"instances_{split}.json"
    content = json.loads(file.read_text())
    for key, spoil in records.items():
        spoil(content[key])
    file.write_text(json.dumps(content))


def of_first(**values):
    return lambda records: records[0].update(values)


def without(image):
    return lambda records: records.__setitem__(slice(None), [a for a in records if a["image_id"] != image])


def truncate(file):
    """What an aborted download leaves: the header, and the first half of the pixels."""
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])


def as_jpeg(file):
    """With PNG's suffix: the content says what it is."""
    Image.open(file).save(file, format="JPEG", quality=95)
    return file


BAD = {
    "no JSON": (
        lambda c: (c / "instances_train.json").write_text("{not"),
        "instances_train.json: Expecting property name",
    ),
    "a list": (lambda c: (c / "instances_val.json").write_text("[1, 2]"), "instances_val.json is not a COCO file of"),
    "captions": (
        lambda c: (c / "instances_train.json").write_text('{"images": [], "annotations": []}'),
        "got no list of categories, expected images, annotations and categories",
    ),
    "missing": (lambda c: (c / "images" / "train2.png").unlink(), r"image 2: .*train2.png is missing"),
    "not an image": (
        lambda c: (c / "images" / "train2.png").write_text("a text"),
        r"image 2: cannot read .*train2.png as an image",
    ),
    "truncated": (
        lambda c: truncate(as_jpeg(c / "images" / "val3.png")),
        r"image 3: cannot read .*val3.png as an image: .*truncated",
    ),
    "other size": (lambda c: change(c, images=of_first(width=99)), r"train1.png: got 48×64 pixels, expected 99×64 as"),
    "leads out": (
        lambda c: change(c, images=of_first(file_name="../images/train1.png")),
        r"image 1 \(.*\): got file_name '../images/train1.png', expected a file inside of .*images",
    ),
    "absolute": (
        lambda c: change(c, images=of_first(file_name="/etc/hosts")),
        "got file_name '/etc/hosts', expected a file inside of",
    ),
    "id twice": (
        lambda c: change(c, images=of_first(id=2)),
        r"image 2 \(train2.png\): got id 2, expected an integer that no other",
    ),
    "no size": (lambda c: change(c, images=of_first(height="48")), r"image 1 \(train1.png\): got height '48'"),
    "no area": (
        lambda c: change(c, annotations=of_first(bbox=[5, 5, 0, 9])),
        r"instances_train.json: annotation 1 of train1.png: the box \[5, 5, 0, 9\] has no area",
    ),
    "outside": (
        lambda c: change(c, "val", annotations=of_first(bbox=[5, 5, 60, 9])),
        r"instances_val.json: annotation 1 of val1.png: the box \[5, 5, 60, 9\] extends beyond its image of 48×64 "
        r"\(1 of \d+ annotations; set max_invalid=1 to cut boxes to their images\)",
    ),
    "before": (lambda c: change(c, annotations=of_first(bbox=[-9, 5, 20, 9])), "extends beyond its image of 48×64"),
    "far outside": (lambda c: change(c, annotations=of_first(bbox=[-30, 5, 20, 9])), "lies outside its image of 48×64"),
    "no box": (lambda c: change(c, annotations=of_first(bbox=[1, 2])), r"got bbox \[1, 2\], expected \[x, y, width"),
    "not a number": (
        lambda c: change(c, annotations=of_first(bbox=[1, 2, float("nan"), 3])),
        "annotation 1 of train1.png: got bbox",
    ),
    "category": (
        lambda c: change(c, annotations=of_first(category_id=4)),
        "annotation 1 of train1.png: got category_id 4, expected one of the categories, 3 to 7",
    ),
    "image": (
        lambda c: change(c, annotations=of_first(image_id=77)),
        "annotation 1: got image_id 77, expected the id of an image",
    ),
    "annotation twice": (
        lambda c: change(c, annotations=of_first(id=2)),
        "annotation 2: got id 2, expected an integer that no other",
    ),
    "polygon": (
        lambda c: change(c, annotations=of_first(segmentation=[[1, 2, 3, 4, 5]])),
        r"annotation 1 of train1.png: got a polygon \[1, 2, 3, 4, 5\], expected x and y of at least three points",
    ),
    "polygon far away": (
        lambda c: change(c, annotations=of_first(segmentation=[[1, 2, 3, 4, 1e9, 6]])),
        r"annotation 1 of train1.png: got a polygon .*, expected points in the image of 48×64",
    ),
    "polygon outside": (
        lambda c: change(c, annotations=of_first(segmentation=[[50, 2, 60, 4, 55, 6]])),
        r"annotation 1 of train1.png: got a polygon .*, expected points in the image of 48×64",
    ),
    "polygon not finite": (
        lambda c: change(c, annotations=of_first(segmentation=[[1, 2, 3, 4, float("inf"), 6]])),
        r"annotation 1 of train1.png: got a polygon .*, expected finite numbers",
    ),
    "area": (
        lambda c: change(c, annotations=of_first(area="big")),
        "got area 'big', expected a number of pixels, or null for that of the mask or box",
    ),
    "id too large": (
        lambda c: change(c, annotations=of_first(id=10**30)),
        r"annotation 10{30}: got id 10{30}, expected an integer that no other",
    ),
    "no segmentation": (
        lambda c: change(c, annotations=of_first(segmentation=None)),
        r"train.json: annotation 1 of train1.png: got no segmentation, expected polygons or RLE \(1 of 13 annotations; "
        r"set max_invalid=1 to leave out those that cannot be used\); to train without masks, "
        "set model.name=faster_rcnn or cascade_rcnn",
    ),
    "empty": (lambda c: change(c, annotations=of_first(segmentation=[])), "1 of train1.png: got no segmentation"),
    "boxes alone": (
        lambda c: change(c, annotations=lambda records: [record.pop("segmentation") for record in records]),
        r"instances_train.json has boxes and no segmentations, expected model.name=faster_rcnn or cascade_rcnn \(and "
        r"baseline.name\), which learn boxes alone",
    ),
    "RLE size": (
        lambda c: change(c, annotations=of_first(segmentation={"size": [48, 64], "counts": [1, 2]})),
        r"got RLE of size \[48, 64\], expected the image's, \[64, 48\]",
    ),
    "RLE counts": (
        lambda c: change(c, annotations=of_first(segmentation={"size": [64, 48], "counts": [1, 2]})),
        r"got RLE counts .*, expected a sum of 3072, the pixels of the image",
    ),
    "RLE string": (
        lambda c: change(c, annotations=of_first(segmentation={"size": [64, 48], "counts": "oooooo1o1"})),
        r"got RLE counts .*, expected a sum of 3072, the pixels of the image",
    ),
    "RLE string of half the size": (  # of which pycocotools would leave the rest of the mask as the memory was
        lambda c: change(c, annotations=of_first(segmentation={"size": [64, 48], "counts": "1"})),
        r"got RLE counts 1, expected a sum of 3072, the pixels of the image",
    ),
    "RLE of no counts": (
        lambda c: change(c, annotations=of_first(segmentation={"size": [64, 48], "counts": []})),
        r"got RLE counts \[\], expected a sum of 3072",
    ),
    "RLE of nothing": (
        lambda c: change(c, annotations=of_first(segmentation={"size": [64, 48], "counts": [3072]})),
        r"got RLE counts \[3072\], expected a mask of at least one pixel",
    ),
    "half a character": (
        lambda c: change(c, categories=of_first(name="\ud83d")),
        r"category \d+: got name '\\ud83d', expected text that UTF-8 can encode",
    ),
    "a zero byte": (
        lambda c: change(c, images=of_first(file_name="a\0.png")),
        "got file_name 'a.x00.png', expected a file",
    ),
    "one file twice": (
        lambda c: change(c, images=of_first(file_name="train2.png")),
        r"image 2 \(train2.png\): got the file of image \d+, expected one of its own",
    ),
    "crowd": (lambda c: change(c, annotations=of_first(iscrowd=5)), "got iscrowd 5, expected 0 or 1"),
    "no objects": (
        lambda c: change(c, annotations=without(2)),
        r"instances_train.json: 1 of 6 images have no objects to train on, such as train2.png \(id 2\); set "
        r"without_objects=leave_out, or without_objects=train to learn",
    ),
    "only a crowd": (
        lambda c: change(c, annotations=lambda records: [a.update(iscrowd=1) for a in records if a["image_id"] == 2]),
        "1 of 6 images have no objects to train on, such as train2.png",
    ),
    "nothing to score": (
        lambda c: change(c, "val", annotations=lambda records: records.clear()),
        r"instances_val.json: got no objects to score in 3 images, expected annotations besides crowds",
    ),
    "only crowds to score": (
        lambda c: change(c, "val", annotations=lambda records: [a.update(iscrowd=1) for a in records]),
        "instances_val.json: got no objects to score in 3 images",
    ),
    "no images": (
        lambda c: change(c, images=lambda records: records.clear()),
        "instances_train.json has no image, expected at least one",
    ),
    "other classes": (
        lambda c: change(c, "val", categories=of_first(name="ring")),
        r"instances_val.json has other categories: got 7 \(ring\), expected 7 \(disc\) as in .*instances_train.json",
    ),
    "no folder": (lambda c: (c / "images").rename(c / "elsewhere"), "has no folder of images of train"),
    "no file": (lambda c: (c / "instances_val.json").unlink(), "has no file of instances of val"),
}


def test_polygons_that_cover_no_pixel_are_told(coco):
    """COCO has some, which its own evaluation scores, so they are not left out."""
    thin = [[8, 8, 20, 8, 14, 8]]
    change(coco, annotations=lambda records: [a.update(segmentation=thin) for a in records[:2]])
    (line,) = load(coco).train.notices
    assert "2 of 13 annotations of instances_train.json have polygons that cover no pixel, such as annotation " in line
    beside_another = [*thin, [1, 1, 9, 1, 9, 9, 1, 9]]
    change(coco, annotations=lambda records: [a.update(segmentation=beside_another) for a in records])
    assert not load(coco).train.notices


def test_classes_have_names_of_their_own():
    names = ["cat", "cat", "cat (1)", "dog"]
    found = class_names([{"id": number, "name": name} for number, name in enumerate(names, 1)])
    assert found == {1: "cat (1)", 2: "cat (2)", 3: "cat (1) (3)", 4: "dog (4)"}
    assert class_names([{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]) == {1: "cat", 2: "dog"}


@pytest.mark.parametrize("case", BAD)
def test_every_mistake_is_one_line_with_file_and_record(coco, case):
    spoil, expected = BAD[case]
    load(coco)  # what is remembered of the whole one must not hide it
    spoil(coco)
    with pytest.raises(UserError, match=expected) as raised:
        load(coco)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_a_mistake_comes_before_training(coco, tmp_path, capsys):
    BAD["outside"][0](coco)
    run = tmp_path / "run"
    tiny = ["model.args.backbone=test_steps_swin", "model.args.backbone_args={}"]
    assert main(["train", "pennfudan/mask_rcnn", "--data", f"coco:{coco}", "--run", str(run), *tiny]) == 2
    err = capsys.readouterr().err
    assert "extends beyond its image" in err and len(err.strip().splitlines()) == 1 and not run.exists()
    change(coco, "val", annotations=of_first(bbox=[5, 5, 20, 20]))
    wrong = ["--data", f"coco:{coco}", "--run", str(run), *tiny, "model.args.num_classes=1"]
    assert main(["train", "pennfudan/mask_rcnn", *wrong]) == 2
    assert "model.args.num_classes: got 1, expected the data's 2" in capsys.readouterr().err
    assert main(["train", "pennfudan/mask_rcnn", "--data", "cocoa:nowhere", "--run", str(run), *tiny]) == 2
    assert "did you mean coco" in capsys.readouterr().err


def test_an_evaluated_split_without_objects_is_refused_and_no_other(tmp_path):
    coco = write_coco(tmp_path / "coco", test=2)
    change(coco, "test", annotations=lambda records: records.clear())
    load(coco)  # published test splits have no annotations
    with pytest.raises(UserError, match=r"instances_test.json: got no objects to score in 2 images"):
        load(f"{coco}@test", training=False)
    (coco / "instances_test.json").unlink()
    change(coco, annotations=lambda records: records.__delitem__(slice(2, None)))  # those of image 1
    with pytest.raises(UserError, match=r"instances_train.json: got no objects to score in 2 images"):
        load(coco, holdout=2, without_objects="leave_out")


def test_what_may_be_left_out_is_told(coco):
    change(coco, annotations=of_first(bbox=[5, 5, 0, 9]))
    change(coco, annotations=without(3))
    data = load(coco, max_invalid=1, without_objects="leave_out")
    told = data.train.left_out
    assert [str(one) for one in told] == [
        "left out: 1 of 11 annotations of instances_train.json, such as annotation 1 of train1.png: "
        "the box [5, 5, 0, 9] has no area",
        "left out: 1 of 6 images of instances_train.json, such as train3.png (id 3), which has no objects",
    ]
    assert len(data.train.images) == 5
    assert [5, 5, 0, 9] not in [a["bbox"] for a in data.train.content()["annotations"]]
    again = load(coco, max_invalid=1, without_objects="train")  # from the cache, and told as well
    assert len(again.train.images) == 6 and again.train.left_out == told[:1]
    _, target = DetectionSamples(again.train)[0, 2]
    assert target["boxes"].shape == (0, 4) and target["masks"].shape[0] == 0
    with pytest.raises(UserError, match=r"has no area \(1 of 11 annotations; set max_invalid=1 to leave out"):
        load(coco)


def test_a_box_that_reaches_out_is_cut_and_a_wrong_mask_left_out_where_so_many_are_accepted(coco):
    """The box of the first annotation, the mask of the second: both are of image 1."""

    def spoil(records):
        records[0] = {**records[0], "bbox": [-9, 5, 20, 90], "area": 7}
        records[1] = {**records[1], "segmentation": None}

    change(coco, annotations=spoil)
    with pytest.raises(UserError, match=r"\(2 of 13 annotations; set max_invalid=2 to leave out .* and cut boxes to"):
        load(coco, max_invalid=1)
    split = load(coco, max_invalid=2).train
    cut, *others = split.annotations[1]
    assert cut["bbox"] == [0, 5, 11, 59] and cut["area"] == 7
    left_out, reaches_out = (str(one) for one in split.left_out)
    assert left_out.startswith("left out: 1 of 13 annotations") and left_out.endswith("expected polygons or RLE")
    assert reaches_out.startswith("cut to the image: 1 of 13 annotations") and "[-9, 5, 20, 90]" in reaches_out
    assert split.content()["annotations"][0]["bbox"] == cut["bbox"]  # which the scores are of
    boxes = load(coco, masks=False, max_invalid=1).train
    assert boxes.annotations[1][0]["bbox"] == cut["bbox"] and len(boxes.annotations[1]) == len(others) + 2


@pytest.mark.parametrize("left", [0, -0.005])
def test_a_box_with_nothing_of_it_in_the_image_is_refused(coco, left):
    """Within the slack of a pixel, and without area once it is cut to the image."""
    (image,) = [one for one in json.loads((coco / "instances_train.json").read_text())["images"] if one["id"] == 1]
    change(coco, annotations=of_first(bbox=[image["width"] + left, 5, 1, 9]))
    with pytest.raises(UserError, match="lies outside its image"):
        load(coco)


def test_a_whole_data_set_is_looked_at_once(coco, monkeypatch):
    opened = []
    check_file = validate._check_file
    monkeypatch.setattr(validate, "_check_file", lambda *args: opened.append(args[2]["file_name"]) or check_file(*args))
    load(coco)
    assert len(opened) == 9
    load(coco)
    assert len(opened) == 9
    Image.new("RGB", (48, 64)).save(coco / "images" / "train1.png")
    load(coco)
    assert len(opened) == 9 + 6  # the split that changed
    change(coco, "val", annotations=of_first(area=1))
    load(coco)
    assert len(opened) == 9 + 6 + 3


def test_a_second_process_waits_for_what_the_first_finds(tmp_path, monkeypatch):
    asked, results, finding, second_started = [], [], threading.Event(), threading.Event()

    def find():
        asked.append(1)
        finding.set()
        assert second_started.wait(10)
        return {"1": "wrong"}

    def second():
        assert finding.wait(10)
        second_started.set()
        results.append(cached_json("kind/key.json", find))

    both = [threading.Thread(target=lambda: results.append(cached_json("kind/key.json", find)))]
    both.append(threading.Thread(target=second))
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert results == [{"1": "wrong"}] * 2 and asked == [1]
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot write .*file/kind: Not a directory; set STEPSNET_CACHE to another"):
        cached_json("kind/key.json", find)
