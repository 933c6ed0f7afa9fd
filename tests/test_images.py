"""Image files as a person sees them, whatever the format, and every way of being unreadable as one reason."""

import io
import os
import re
import struct
import threading
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, features

from stepsnet.errors import UserError
from stepsnet.tasks.images import (
    UnreadableImage,
    find_images,
    image_shape,
    image_sizes,
    open_image,
    open_stored,
    pixels_allowed,
    stored_size,
)
from stepsnet.tasks.orientation import are_stored, fit_of, on_turned

# (2, 3), red on the left and blue on the right, light at the top
PIXELS = np.array([[[250, 60, 60], [60, 60, 250]], [[150, 30, 30], [30, 30, 150]], [[60, 0, 0], [0, 0, 60]]], np.uint8)


def saved(tmp_path, name, image, **options):
    path = tmp_path / name
    image.save(path, **options)
    return path


def test_channels_of_16_bits_are_scaled_and_not_cut_off(tmp_path):
    values = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    expected = np.round(values / 65535 * 255).astype(np.uint8)
    for name in ("grey.png", "grey.tiff", "grey.pgm"):
        path = saved(tmp_path, name, Image.fromarray(values))
        assert np.array_equal(np.array(open_image(path, "L")), expected), name
        assert np.array_equal(np.array(open_image(path))[..., 2], expected), name
    path = saved(tmp_path, "float.tiff", Image.fromarray(values.astype(np.float32)))
    with pytest.raises(UnreadableImage, match="its pixels have 32 bits, expected 8 or 16"):
        open_image(path)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_an_image_upright(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(tmp_path, "turned.png", Image.fromarray(PIXELS), exif=exif)
    # EXIF 2.32, tag 0x0112: where the stored 0th row and 0th column are seen
    turned = {
        1: PIXELS,
        2: PIXELS[:, ::-1],
        3: PIXELS[::-1, ::-1],
        4: PIXELS[::-1],
        5: PIXELS.transpose(1, 0, 2),
        6: np.rot90(PIXELS, -1),
        7: np.rot90(PIXELS.transpose(1, 0, 2), 2),
        8: np.rot90(PIXELS),
    }[orientation]
    assert np.array_equal(np.array(open_image(path)), turned)
    assert image_sizes(path) == {(2, 3), turned.shape[1::-1]}
    assert np.array_equal(np.array(open_stored(path)), PIXELS)
    assert np.array_equal(np.array(open_image(path, as_stored=True)), PIXELS)
    if orientation == 1:
        assert fit_of(path, (2, 3)) == ""
    elif orientation < 5:
        assert fit_of(path, (2, 3)) == "both"
    else:
        assert (fit_of(path, (2, 3)), fit_of(path, (3, 2)), fit_of(path, (4, 4))) == ("stored", "upright", "")


@pytest.mark.parametrize("orientation", [3, 6])
def test_a_tiff_is_upright_whoever_asks(tmp_path, orientation):
    """Pillow turns it as it decodes it, and has no other way."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(tmp_path, "turned.tiff", Image.fromarray(PIXELS), exif=exif)
    upright = np.rot90(PIXELS, {3: 2, 6: -1}[orientation])
    assert np.array_equal(np.array(open_image(path)), upright)
    assert image_shape(path) == (3, *upright.shape[:2])
    assert fit_of(path, upright.shape[1::-1]) == fit_of(path, PIXELS.shape[1::-1]) == ""


@pytest.mark.parametrize(
    ("fits", "stored", "said"),
    [
        (["", "upright", "stored"], [False, False, True], None),
        (["", "both", "both"], [False, False, False], "2 of 3 images of val, such as b, have .* read upright; if"),
        (["stored", "both", ""], [True, True, False], "1 of 3 images of val, such as b, .* read as they are stored"),
        (["stored", "both", "upright"], [True, False, False], "1 of 3 .* read upright"),
    ],
)
def test_images_whose_size_does_not_tell_go_with_the_others_of_their_split(fits, stored, said):
    assert are_stored(fits) == stored
    lines = on_turned("val", ["a", "b", "c"], fits)
    assert bool(lines) == bool(said) and (not said or re.search(said, lines[0]))


def test_what_is_transparent_is_white(tmp_path):
    rgba = np.dstack([PIXELS, np.array([[0, 255], [128, 255], [255, 0]], np.uint8)])
    seen = np.array(open_image(saved(tmp_path, "alpha.png", Image.fromarray(rgba))))
    assert seen[0, 0].tolist() == seen[2, 1].tolist() == [255, 255, 255]
    assert np.array_equal(seen[:2, 1], PIXELS[:2, 1]) and np.array_equal(seen[2, 0], PIXELS[2, 0])
    assert np.allclose(seen[1, 0], PIXELS[1, 0].astype(int) * 128 / 255 + 127, atol=1)
    palette = Image.new("P", (2, 1))
    palette.putpalette([1, 2, 3, 250, 60, 60])
    palette.putdata([0, 1])
    with warnings.catch_warnings(action="error"):
        seen = np.array(open_image(saved(tmp_path, "palette.png", palette, transparency=bytes([0, 255]))))
    assert seen.tolist() == [[[255, 255, 255], [250, 60, 60]]]


def test_every_format_and_the_first_frame(tmp_path):
    big = Image.fromarray(PIXELS).resize((32, 48), Image.Resampling.NEAREST)
    other = Image.new("RGB", big.size)
    found = {
        "a.gif": {"save_all": True, "append_images": [other]},
        "a.webp": {"lossless": True, "save_all": True, "append_images": [other]},
        **{f"a.{suffix}": {} for suffix in ("bmp", "tif", "ppm", "tga", "jp2", "pcx", "JPG", "ico")},
        **({"a.avif": {"quality": 100, "subsampling": "4:4:4"}} if features.check("avif") else {}),
    }
    for name, options in found.items():
        path = saved(tmp_path, name, big, **options)
        got = np.asarray(open_image(path).resize((2, 3), Image.Resampling.BOX), dtype=int)
        assert np.abs(got - PIXELS).max() < 40, name
    cmyk = saved(tmp_path, "cmyk.jpg", Image.new("CMYK", (8, 8), (0, 255, 255, 0)), quality=95)
    assert np.abs(np.array(open_image(cmyk), dtype=int)[4, 4] - [255, 0, 0]).max() < 10
    images, others = find_images(tmp_path)
    assert len(images) == len(found) + 1 and not others


def test_a_folder_is_searched_once_whatever_links_to_it(tmp_path):
    (tmp_path / "in" / "deeper").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for folder, name in (("in", "1.png"), ("in/deeper", "2.JPG"), ("elsewhere", "3.webp")):
        (tmp_path / folder / name).touch()
    for name in ("notes.txt", "photo.heic", ".hidden.png"):
        (tmp_path / "in" / name).touch()
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in", target_is_directory=True)
    (tmp_path / "in" / "deeper" / "up").symlink_to(tmp_path / "in", target_is_directory=True)
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "in" / "beside").symlink_to(tmp_path, target_is_directory=True)  # and so to elsewhere again
    images, others = find_images(tmp_path / "in")
    assert [path.name for path in images] == ["1.png", "2.JPG", "3.webp"]
    assert [path.name for path in others] == ["notes.txt", "photo.heic"]


def test_what_is_no_image_file_is_refused_with_a_reason(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "text.png").write_text("this is a text")
    (tmp_path / "print.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")  # Ghostscript would run it
    for name, reason in {
        "pipe.png": "it is not a file",
        "": "it is not a file",
        "loop.png": "Too many levels of symbolic links",
        "gone.png": "no such file",
        "text.png": "cannot identify image file",
        "print.eps": "cannot identify image file",
        "x" * 300: "File name too long",
        "null\0": "embedded null byte",
    }.items():
        with pytest.raises(UnreadableImage, match=f"^{reason}$"):
            open_image(tmp_path / name if name else tmp_path)
    path = saved(tmp_path, "fine.png", Image.fromarray(PIXELS))
    monkeypatch.setenv("STEPSNET_MAX_IMAGE_PIXELS", "5")
    with pytest.raises(
        UnreadableImage, match="2 × 3 pixels, expected at most 5; set STEPSNET_MAX_IMAGE_PIXELS to allow more"
    ):
        open_image(path)
    monkeypatch.setenv("STEPSNET_MAX_IMAGE_PIXELS", "many")
    with pytest.raises(UserError, match="STEPSNET_MAX_IMAGE_PIXELS: got 'many', expected a number of pixels"):
        open_image(path)


def test_a_bomb_is_refused_by_its_header(tmp_path):
    content = io.BytesIO()
    Image.new("L", (8, 8)).save(content, "BMP")
    bomb = bytearray(content.getvalue())
    bomb[18:26] = struct.pack("<ii", 60_000, 60_000)
    (tmp_path / "bomb.bmp").write_bytes(bomb)
    with pytest.raises(UnreadableImage, match="pixels"):
        open_image(tmp_path / "bomb.bmp")


def test_the_bound_in_the_environment_is_the_one_that_counts(tmp_path, monkeypatch):
    """Pillow's own is raised while we read, for as long as some thread does, and is as it was afterwards."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 20_000, 20_000, 8, 0, 0, 0, 0)
    parts = (header, b"IDAT" + zlib.compress(b""), b"IEND")
    chunks = (struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)
    (tmp_path / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    with pytest.raises(UnreadableImage, match=r"400000000 pixels.* 178956970 pixels; set STEPSNET_MAX_IMAGE"):
        stored_size(tmp_path / "huge.png")
    monkeypatch.setenv("STEPSNET_MAX_IMAGE_PIXELS", "399999999")
    with pytest.raises(UnreadableImage, match="20000 × 20000 pixels, expected at most 399,999,999; set STEPSNET_MAX"):
        stored_size(tmp_path / "huge.png")
    monkeypatch.setenv("STEPSNET_MAX_IMAGE_PIXELS", "400000000")
    assert stored_size(tmp_path / "huge.png") == (20_000, 20_000)
    assert Image.MAX_IMAGE_PIXELS == 89_478_485
    is_inside, may_leave = threading.Event(), threading.Event()

    def read():
        with pixels_allowed():
            is_inside.set()
            may_leave.wait(60)

    thread = threading.Thread(target=read)
    with pixels_allowed():
        thread.start()
        assert is_inside.wait(60)
    assert Image.MAX_IMAGE_PIXELS == 200_000_000  # the other thread still reads
    may_leave.set()
    thread.join()
    assert Image.MAX_IMAGE_PIXELS == 89_478_485


WHOLE = {}
for kind in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "TGA", "DDS", "ICO", "PCX", "SGI", "JPEG2000"):
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).resize((16, 24)).save(buffer, kind)
    WHOLE[kind] = buffer.getvalue()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(sorted(WHOLE)), data=st.data())
def test_damaged_bytes_are_an_image_or_a_reason_of_one_line(kind, data, tmp_path):
    damaged = bytearray(WHOLE[kind])
    for position in data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=8)):
        damaged[position] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    path: Path = tmp_path / "damaged"
    path.write_bytes(damaged)
    for read in (open_image, open_stored, image_sizes):
        try:
            read(path)
        except UnreadableImage as error:
            assert str(error) and "\n" not in str(error) and str(path) not in str(error)
