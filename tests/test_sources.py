"""Data sets that are neither folders nor CIFAR: Hugging Face's, and WebDataset shards."""

import io
import json
import re
import tarfile

import pytest
from classification_tasks import recipe_of, sample
from PIL import Image
from test_classification import CPU, batches

from stepsnet.engine.task import BatchShard
from stepsnet.errors import UserError
from stepsnet.recipes.imagenet import IMAGENET
from stepsnet.tasks.classification.data import InputSpec, load_images
from stepsnet.tasks.classification.sources import SOURCES
from stepsnet.tasks.classification.task import Classification
from stepsnet.tasks.images import UnreadableImage

SPEC = InputSpec((3, 16, 16), (0.5,) * 3, (0.25,) * 3, crop_pct=1.0)


def png(shade: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (16, 16), (shade, 0, 255 - shade)).save(content, "PNG")
    return content.getvalue()


def write_shard(path, samples):
    """samples: (key, files by suffix)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, files in samples:
            for suffix, content in files.items():
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


@pytest.fixture
def shards(tmp_path):
    """Six training images in two shards, labelled in both ways, and three for validation; shade 10·n is class n%3."""
    for shard, numbers in enumerate(((0, 1, 2), (3, 4, 5))):
        samples = [(f"a/{n:03}", {"png": png(10 * n), "cls": str(n % 3).encode()}) for n in numbers]
        write_shard(tmp_path / f"set-train-{shard:02}.tar", samples)
    samples = [(f"{n:03}", {"json": json.dumps({"label": n}).encode(), "png": png(10 * n)}) for n in range(3)]
    write_shard(tmp_path / "set-validation-00.tar", samples)
    return tmp_path


def shades(images):
    return [round((0.5 + 0.25 * image[0, 0, 0].item()) * 255) for image in images]


def test_shards_are_read_in_any_order_by_any_number_of_workers(shards):
    data = load_images(f"wds:{shards}", SPEC)
    assert data.classes == ("0", "1", "2") and len(data.train) == 6 and len(data.val) == 3
    seen = []
    for workers in (0, 2):
        found = batches(Classification(recipe_of(2, seed=1, workers=workers), data, SPEC), epoch=3)
        labels = [label for _, batch in found for label in batch.tolist()]
        got = [shade for images, _ in found for shade in shades(images)]
        assert [shade // 10 % 3 for shade in got] == labels and sorted(got) == [0, 10, 20, 30, 40, 50]
        seen.append(got)
    assert seen[0] == seen[1] != sorted(seen[0])
    resumed = batches(Classification(recipe_of(2, seed=1), data, SPEC), epoch=3, start=2)
    assert [shade for images, _ in resumed for shade in shades(images)] == seen[0][4:]
    assert shades(sample(data.val, 0, i, 0)[0] for i in range(3)) == [0, 10, 20]


def test_class_names_come_from_their_file(shards):
    (shards / "classnames.txt").write_text("ant\nbee\ncat\n")
    assert load_images(f"wds:{shards}", SPEC).classes == ("ant", "bee", "cat")
    (shards / "classnames.txt").write_text("crane\nbée\ncrane\n", encoding="utf-8-sig")
    assert load_images(f"wds:{shards}", SPEC).classes == ("crane (0)", "bée", "crane (2)")
    (shards / "classnames.txt").write_bytes("ant\nbée\ncat\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"cannot read .*classnames.txt: it is not UTF-8 \(line 2\)"):
        load_images(f"wds:{shards}", SPEC)
    (shards / "classnames.txt").write_text("ant\n")
    with pytest.raises(UserError, match=r"classnames.txt has 1 lines, expected one for each of the 3"):
        load_images(f"wds:{shards}", SPEC)


@pytest.mark.parametrize(
    "samples, expected",
    [
        ([("x", {"png": png(0)})], r"bad-train.tar: x.png has no class, expected x.cls"),
        (
            [("x", {"png": png(0), "cls": b"cat"})],
            r"bad-train.tar: x.cls: got b'cat', expected the number of a class",
        ),
        ([("x", {"cls": b"0"})], r"x has a class but no image, expected an image such as x\.jpg"),
        ([("x", {"heic": b"", "cls": b"0"})], r"x has a class but no image"),
        ([("x", {"png": png(0), "JPG": png(1), "cls": b"0"})], r"two images for one key, x.png and x.JPG, expected"),
        ([("x", {"png": png(0), "json": b'{"label": [1]}'})], r"x.json: got the class \[1\], expected 0 to 999,999"),
        ([("x", {"png": png(0), "json": b'{"label": 1e999}'})], r"x.json: got the class inf, expected 0 to"),
        ([("x", {"png": png(0), "cls": b"99999999999"})], r"x.cls: got the class 99999999999, expected 0 to"),
        ([("x", {"png": png(0), "json": b"[" * 100_000})], r"x.json: got b'.*', expected the number of a class"),
        ([("x", {"cls": b"1", "png": png(0), "json": b'{"label": 7}'})], r"x has the classes 1 and 7, expected one"),
        (None, r"cannot read .*bad-train.tar as a WebDataset shard: .*"),
    ],
)
def test_shards_that_do_not_fit_are_refused(shards, samples, expected):
    if samples is None:
        (shards / "bad-train.tar").write_text("no tar file, but long enough for a header" * 20)
    else:
        write_shard(shards / "bad-train.tar", samples)
    with pytest.raises(UserError, match=expected):
        load_images(f"wds:{shards}", SPEC)


def test_a_shard_that_is_gone_is_an_image_that_cannot_be_read(shards):
    data = load_images(f"wds:{shards}", SPEC)
    (shards / "set-train-00.tar").unlink()
    with pytest.raises(UnreadableImage, match="No such file or directory"):
        data.train.images.read(0)


def test_a_split_is_named_by_a_word_and_test_is_scored_where_nothing_is_for_validation(shards):
    write_shard(shards / "latest-train-02.tar", [("x", {"png": png(60), "cls": b"0"})])
    write_shard(shards / "set-test-00.tar", [(f"{n}", {"png": png(10 * n), "cls": b"0"}) for n in range(5)])
    data = load_images(f"wds:{shards}", SPEC)
    assert len(data.train) == 7 and len(data.val) == 3
    (shards / "set-validation-00.tar").unlink()
    assert len(load_images(f"wds:{shards}", SPEC).val) == 5
    write_shard(shards / "val" / "train-03.tar", [("x", {"png": png(60), "cls": b"0"})])
    with pytest.raises(UserError, match=r"val/train-03.tar is named as training and as validation"):
        load_images(f"wds:{shards}", SPEC)


def test_shards_are_needed_for_both_splits(shards):
    (shards / "set-validation-00.tar").unlink()
    with pytest.raises(UserError, match=r"nowhere is not a folder, expected --data wds:PATH"):
        load_images(f"wds:{shards}/nowhere", SPEC)
    with pytest.raises(UserError, match=r"no images in \*val\*.tar or \*test\*.tar"):
        load_images(f"wds:{shards}", SPEC)


def test_hugging_face_data_are_read(tmp_path):
    """A local folder in the hub's own image layout: no network."""
    for split, count in (("train", 4), ("validation", 2)):
        for shade, name in ((30, "cat"), (90, "dog")):
            folder = tmp_path / "set" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                (folder / f"{index}.png").write_bytes(png(shade + index))
    data = load_images(f"hfds:{tmp_path / 'set'}", SPEC, None, 0)
    assert data.classes == ("cat", "dog") and len(data.train) == 8 and len(data.val) == 4
    for index in range(4):
        image, label, failed = sample(data.val, 0, index, 0)
        assert not failed and shades([image])[0] - index % 2 == (30, 90)[label]
    data = load_images(f"hfds:{tmp_path / 'set'}", SPEC, IMAGENET.augment, 0)
    task = Classification(recipe_of(4, workers=2), data, SPEC)
    images, labels = next(task.batches(0, 0, BatchShard(), CPU))
    assert images.shape == (4, 3, 16, 16) and set(labels.tolist()) <= {0, 1}


def test_images_behind_a_second_dot_are_told(shards):
    """A key ends at the first dot, by WebDataset's rule; beside it may be pictures that are no inputs."""
    write_shard(shards / "more-train.tar", [("x", {"png": png(0), "cls": b"0"}), ("a.b", {"png": png(0), "cls": b"2"})])
    data = load_images(f"wds:{shards}", SPEC)
    said = Classification(recipe_of(2), data, SPEC).remarks()[0]
    assert len(data.train) == 7 and "left out 1 image such as a.b.png: a key ends at the first dot, and" in said


@pytest.fixture
def pictures_in_columns(tmp_path):
    """Writes a data set of two pictures a split, with these columns beside them."""
    import datasets

    def write(image="image", classes=(), names=(), **columns):
        table = datasets.Dataset.from_dict(
            {image: [{"bytes": png(shade), "path": None} for shade in (0, 90)], **columns}
        )
        table = table.cast_column(image, datasets.Image())
        for column in classes:
            table = table.class_encode_column(column)
        if names:
            table = table.cast_column("label", datasets.ClassLabel(names=list(names)))
        for split in ("train", "validation"):
            table.to_parquet(str(tmp_path / "set" / f"{split}-0.parquet"))
        return f"hfds:{tmp_path / 'set'}"

    return write


def test_a_class_of_hugging_face_that_is_null_is_named_by_its_row(pictures_in_columns):
    with pytest.raises(UserError, match=r"^data: got null as the class of sample 1 of train, expected 0 to 1$"):
        # the second row is null, and two names make two classes
        load_images(pictures_in_columns(names=["cat", "dog"], label=[0, None]), SPEC)


def test_shards_are_left_out_of_a_score_aloud(shards):
    samples = [("x", {"png": png(0), "cls": b"0"}), ("a.b", {"png": png(0), "cls": b"2"})]
    write_shard(shards / "more-val.tar", samples)
    task = Classification(recipe_of(2), load_images(f"wds:{shards}", SPEC), SPEC, for_training=False)
    (said,) = task.notices()
    assert said.startswith("left out 1 image such as a.b.png")


@pytest.mark.parametrize(
    ("column", "labels", "said"),
    [("fine_label", [0, 1], "image: .*, fine_label: int64"), ("label", ["cat", "dog"], "image: .*, label: string")],
)
def test_labels_of_hugging_face_without_classes_are_refused(column, labels, said, pictures_in_columns):
    with pytest.raises(UserError, match=f"got the columns {said}, expected label: ClassLabel"):
        load_images(pictures_in_columns(**{column: labels}), SPEC)


def test_columns_of_hugging_face_by_other_names(pictures_in_columns):
    data = pictures_in_columns("img", ["fine", "coarse"], fine=["cat", "dog"], coarse=["pet", "beast"])
    with pytest.raises(UserError, match=r"fine: int64, coarse: int64, expected label: ClassLabel .*hfds:NAME::COLUMN"):
        load_images(data, SPEC)
    with pytest.raises(UserError, match="expected breed: ClassLabel"):
        load_images(f"{data}::breed", SPEC)
    found = load_images(f"{data}::coarse", SPEC, None, 0)
    assert found.classes == ("beast", "pet") and found.val.labels.tolist() == [1, 0]
    found = load_images(pictures_in_columns("img", ["labels"], labels=["cat", "dog"]), SPEC, None, 0)
    assert found.classes == ("cat", "dog")


def test_what_hugging_face_data_have_no_image_in_cannot_be_read(pictures_in_columns, tmp_path, monkeypatch):
    """A cell that is null, one without bytes and a path, and the path of a file that is gone."""
    images = load_images(pictures_in_columns(classes=["label"], label=["cat", "dog"]), SPEC).val.images
    cells = [None, {"bytes": None, "path": None}, {"bytes": None, "path": str(tmp_path / "gone.png")}]
    monkeypatch.setattr(images, "rows", [{"image": cell} for cell in cells])
    for index, (name, reason) in enumerate([("", "neither its bytes nor its path")] * 2 + [(" (", "No such file")]):
        assert images.name(index).startswith(f"sample {index}{name}") and "None" not in images.name(index)
        for look in (images.read, images.shape):
            with pytest.raises(UnreadableImage, match=reason):
                look(index)


def test_a_relative_path_is_told_with_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in ("folder", "wds"):
        said = rf"data: none is not a folder \(looked up from {tmp_path}\), expected --data {kind}"
        with pytest.raises(UserError, match=said):
            load_images(f"{kind}:none", SPEC)


def test_configurations_of_hugging_face(tmp_path, tmp_path_factory, monkeypatch):
    """Named in the data's card, as on the hub."""
    # by a configuration's name, datasets takes another folder of this name for the same data
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("hub"))
    for config, shade in (("light", 200), ("dark", 20)):
        for split in ("train", "test"):
            for name in ("cat", "dog"):
                folder = tmp_path / config / split / name
                folder.mkdir(parents=True)
                (folder / "0.png").write_bytes(png(shade))
    configs = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("light", "dark"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for config, shade in (("light", 200), ("dark", 20)):
        for data in (f"hfds:{tmp_path}:{config}", f"hfds:{tmp_path}:{config}:label"):
            found = load_images(data, SPEC, None, 0)
            assert found.classes == ("cat", "dog") and shades([sample(found.train, 0, 0, 0)[0]]) == [shade]
    with pytest.raises(UserError, match=r"in the configuration label: .*light.*; hfds:NAME::COLUMN names a column$"):
        load_images(f"hfds:{tmp_path}:label", SPEC)
    with pytest.raises(UserError, match="expected hfds:NAME, hfds:NAME:CONFIG or hfds:NAME:CONFIG:COLUMN"):
        load_images(f"hfds:{tmp_path}:light:label:more", SPEC)


def test_what_hugging_face_cannot_load_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"cannot load hfds:.*nowhere"):
        load_images(f"hfds:{tmp_path}/nowhere", SPEC)


@pytest.mark.parametrize("broken", ["train", "validation"])
def test_a_split_of_hugging_face_that_fails_on_its_way_is_one_line(broken, pictures_in_columns, monkeypatch):
    import datasets

    load_dataset = datasets.load_dataset

    def failing(name, config, split):
        if split == broken:
            raise ConnectionError("the hub is gone")
        return load_dataset(name, config, split=split)

    data = pictures_in_columns(classes=["label"], label=["cat", "dog"])
    monkeypatch.setattr(datasets, "load_dataset", failing)
    with pytest.raises(UserError, match=r"^data: cannot load hfds:.*: the hub is gone$"):
        load_images(data, SPEC)


def test_a_damaged_shard_is_refused_and_not_read_up_to_the_damage(shards):
    """tarfile ends in silence at a header that is damaged, and at the end of a file that is cut off between members."""
    path = shards / "set-train-01.tar"
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        second = tar.getmembers()[2].offset
    flipped = bytearray(whole)
    flipped[second + 3] ^= 16  # in the name, so that the header's checksum is wrong
    for damaged, expected in {
        bytes(flipped): f"set-train-01.tar is damaged at byte {second:,}",
        whole[:second]: "set-train-01.tar has no end-of-archive mark, expected a whole tar file; it may be cut off",
        whole + whole: "set-train-01.tar is damaged at byte",  # cat a.tar b.tar
    }.items():
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=re.escape(expected)):
            load_images(f"wds:{shards}", SPEC)
    path.unlink()
    (shards / "set-train-01.tar.gz").touch()
    with pytest.raises(UserError, match=r"set-train-01.tar.gz is compressed, expected .tar, which can be read at any"):
        load_images(f"wds:{shards}", SPEC)


def test_members_of_every_image_format_count(shards):
    content = io.BytesIO()
    Image.new("RGB", (16, 16)).save(content, "GIF")
    samples = [(f"{n}", {suffix: content.getvalue(), "cls": b"0"}) for n, suffix in enumerate(("gif", "tif", "BMP"))]
    write_shard(shards / "more-train.tar", samples)
    assert len(load_images(f"wds:{shards}", SPEC).train) == 6 + 3


def test_what_a_users_source_cannot_open_or_leaves_empty_is_one_line(tmp_path, monkeypatch):
    class Images:
        def __init__(self, labels):
            self.labels = labels

        def read(self, index):
            return Image.new("RGB", (16, 16))

    def mine(path, mode):
        open(path).close()
        return ("a", "b"), Images([0, 1, 0, 1]), Images([])

    monkeypatch.setitem(SOURCES, "mine", mine)
    with pytest.raises(UserError, match=r"^data: mine:.*nothing: No such file or directory$"):
        load_images(f"mine:{tmp_path / 'nothing'}", SPEC)
    (tmp_path / "there").touch()
    with pytest.raises(UserError, match=r"^data: mine: got no images in val, expected at least one$"):
        load_images(f"mine:{tmp_path / 'there'}", SPEC)
