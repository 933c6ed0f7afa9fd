"""What predict takes and where it writes: folders of folders, each result beside none of anybody else's."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
from PIL import Image
from run_folders import closed

from stepsnet.cli import main
from stepsnet.errors import UserError
from stepsnet.files.writing import write_atomically
from stepsnet.recipes import find_recipe
from stepsnet.run_folder.checkpoint import save_weights
from stepsnet.settings.overrides import to_yaml
from stepsnet.tasks.class_names import save_classes
from stepsnet.tasks.outputs import Outputs, common_folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A classifier of digits as a run leaves it, untrained."""
    folder, recipe = tmp_path_factory.mktemp("run"), closed(find_recipe("digits/tiny"))
    write_atomically(folder / "config.yaml", to_yaml(recipe))
    save_weights(folder / "model.safetensors", timm.create_model(recipe.model.name, **recipe.model.args).state_dict())
    save_classes(folder, [f"digit [/b] {number}" for number in range(10)])
    return str(folder)


def draw(path, shade=100):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((12, 12, 3), shade, np.uint8)).save(path)
    return path


def test_folders_of_folders_in_order_each_picture_once(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = ["2.png", "10.png", "a/1.jpg", "a/b/1.jpg"]
    for name in reversed(names):
        draw(tmp_path / "in" / name)
    (tmp_path / "in" / "notes.txt").write_text("no picture")
    draw(tmp_path / "in" / ".hidden.png")
    (tmp_path / "in" / "a" / "round").symlink_to(tmp_path / "in", target_is_directory=True)
    asked = ["predict", run, "in", "in/2.png", "--out", "found"]
    assert main(asked) == 0
    out, err = capsys.readouterr()
    assert [line.partition(":")[0] for line in out.splitlines()] == [f"in/{name}" for name in names]
    assert err == "stepsnet: in: left out 1 file without an image's suffix, such as notes.txt\n"
    records = json.loads(Path("found/predictions.json").read_text())
    assert [record["file"] for record in records] == [f"in/{name}" for name in names]
    for option in ("--temperature=0", "--tokens=3", "--least=0.1", "--seed=1"):  # of other tasks
        assert main([*asked, option]) == 2
        assert f"{option.partition('=')[0]}: got" in capsys.readouterr().err
    assert main([*asked, "--top", "1"]) == 0 and len(json.loads(Path("found/predictions.json").read_text())) == 4
    Path("found/predictions.json").write_text("changed by hand")
    capsys.readouterr()
    assert main(asked) == 2 and "or is from an earlier version; --force replaces it" in capsys.readouterr().err
    assert Path("found/predictions.json").read_text() == "changed by hand"
    assert main([*asked, "--force"]) == 0 and Path("found/predictions.json").read_text().startswith("[")
    with Outputs(tmp_path / "in" / "drawn", tmp_path).reserved([]) as outputs:
        outputs.write(tmp_path / "in" / "drawn" / "a" / "1.png", (tmp_path / "in" / "2.png").read_bytes())
    capsys.readouterr()
    assert main(["predict", run, "in"]) == 0 and len(capsys.readouterr().out.splitlines()) == 4  # not its own
    (tmp_path / "none").mkdir()
    capsys.readouterr()
    assert main(["predict", run, "none"]) == 2 and "the folder none is empty, expected" in capsys.readouterr().err
    for name in ("1.heic", "2.heic"):
        (tmp_path / "none" / name).write_bytes(b"of a telephone")
    assert main(["predict", run, "none"]) == 2
    assert "has 2 files without an image's suffix, such as 1.heic, expected images" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "in" / "a")
    for name in ("2.png", "10.png"):
        (tmp_path / "in" / name).unlink()
    assert main(["predict", run, "in"]) == 2 and "in has only what stepsnet has written, exp" in capsys.readouterr().err


def test_an_image_of_a_folder_that_cannot_be_read_is_left_out_and_one_by_name_refused(run, tmp_path, capsys):
    folder = tmp_path / "in"
    for name in ("1.png", "3.png"):
        draw(folder / name)
    (folder / "2.png").write_bytes(b"no picture")
    draw(folder / "4.jpg")
    (folder / "4.jpg").write_bytes((folder / "4.jpg").read_bytes()[:-200])  # cut off
    assert main(["predict", run, str(folder), "--json", "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert [Path(record["file"]).name for record in json.loads(out)] == ["1.png", "3.png"]
    assert json.loads((tmp_path / "out" / "predictions.json").read_text()) == json.loads(out)
    first, second, last = err.splitlines()
    assert first.startswith(f"stepsnet: predict: left out {folder / '2.png'}, which cannot be read: ")
    assert "4.jpg" in second and last == "stepsnet: predict: 2 of 4 files cannot be read; the others are done"
    assert main(["predict", run, str(folder), str(folder / "2.png")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"cannot read {folder / '2.png'} as an image" in err.splitlines()[-1]
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "2.png").write_bytes(b"no picture")
    assert main(["predict", run, str(tmp_path / "bad")]) == 2 and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("files", "written"),
    [
        (["a.jpg"], ["a.png"]),
        (["x/a.jpg", "y/a.jpg"], ["x/a.png", "y/a.png"]),
        (["a.jpg", "a.png", "b.png"], ["a.jpg.png", "a.png.png", "b.png"]),
        (["a.jpg", "a.webp", "a.jpg.gif"], ["a.jpg.png", "a.webp.png", "a.jpg.gif.png"]),
        (["a.b.jpg"], ["a.b.png"]),
    ],
)
def test_each_input_has_an_output_of_its_own(files, written, tmp_path):
    outputs = Outputs(tmp_path / "out", tmp_path)
    assert outputs.paths([tmp_path / file for file in files], ".png") == [tmp_path / "out" / name for name in written]


def test_a_name_as_long_as_is_allowed_is_written_and_a_longer_one_refused_before(tmp_path):
    longest, longer = (tmp_path / "out" / ("é" * 124 + "a" * more + ".json") for more in (2, 3))
    outputs = Outputs(tmp_path / "out", tmp_path)
    with outputs.reserved([longest]):
        outputs.write(longest, "{}")
    assert longest.read_text() == "{}"
    with pytest.raises(UserError, match="has 256 bytes, expected a name of at most 255"), outputs.reserved([longer]):
        raise AssertionError


def test_the_common_folder_of_files_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert common_folder([Path("a")]) == tmp_path / "a"
    assert common_folder([Path("a/b"), Path("a/../a/c")]) == tmp_path / "a"


def test_nothing_of_anybody_else_is_replaced(tmp_path):
    picture, theirs = draw(tmp_path / "a.png"), tmp_path / "out" / "b.png"
    draw(theirs)
    before = theirs.read_bytes()
    for force in (False, True):  # an input never, whatever it is called
        (tmp_path / f"soft{force}.png").symlink_to(picture)
        for path in (picture, tmp_path / f"soft{force}.png"):
            with (
                pytest.raises(UserError, match="is an input"),
                Outputs(tmp_path, tmp_path, force).reserved([path], [picture]),
            ):
                raise AssertionError
    with pytest.raises(UserError, match="--force replaces it"), Outputs(theirs.parent, tmp_path).reserved([theirs]):
        raise AssertionError
    assert theirs.read_bytes() == before
    with Outputs(theirs.parent, tmp_path, force=True).reserved([theirs]) as outputs:
        outputs.write(theirs, "ours")
    again = Outputs(theirs.parent, tmp_path)
    assert again.own.has(theirs) and not again.own.has(picture)
    with pytest.raises(KeyboardInterrupt), again.reserved([theirs, theirs.with_name("c.png")]):
        again.write(theirs.with_name("c.png"), b"of a run that was interrupted")
        raise KeyboardInterrupt
    assert Outputs(theirs.parent, tmp_path).own.has(theirs.with_name("c.png"))
