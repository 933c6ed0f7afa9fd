"""Images decoded and augmented a second on one core: how many cores a device needs to be kept busy.

    python benchmarks/images.py [--images N] [--out results/benchmarks/images.json]

JPEGs of 500×375 pixels, as ImageNet's are on average, of noise and of a smooth picture (photographs lie between the
two), at 224×224 under the paper's augmentation, under crop and flip alone, and as in evaluation; and pictures of 32×32
pixels that are kept in memory, under crop and flip. They come in batches, as a loader asks for them.
Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from outcome import conclude, rounded_quartiles
from PIL import Image

from stepsnet.recipes.imagenet import IMAGENET
from stepsnet.settings.config import Augment
from stepsnet.tasks.classification.data import load_images
from stepsnet.tasks.classification.transforms import InputSpec

ROUNDS = 5
BATCH = 50
SPEC = InputSpec((3, 224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CROP_AND_FLIP = Augment(scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5)
AUGMENTS = {"paper's": IMAGENET.augment, "crop and flip": CROP_AND_FLIP, "evaluation": None}
SMALL = "crop and flip of 32×32 in memory"


def write_pictures(folder: Path, count: int, size: tuple[int, int], ending: str) -> None:
    rng = np.random.default_rng(0)
    for split, number in (("train", count), ("val", 1)):
        (folder / split / "pictures").mkdir(parents=True)
        for index in range(number):
            coarse = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
            picture = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
            if index % 2:
                noise = Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8))
                picture = Image.blend(picture, noise, 0.3)
            picture.save(folder / split / "pictures" / f"{index:04}.{ending}", quality=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rates: dict[str, list[float]] = {name: [] for name in (*AUGMENTS, SMALL)}
    with tempfile.TemporaryDirectory() as large, tempfile.TemporaryDirectory() as small:
        write_pictures(Path(large), options.images, (500, 375), "jpg")
        write_pictures(Path(small), options.images, (32, 32), "png")
        splits = {name: load_images(f"folder:{large}", SPEC, augment).train for name, augment in AUGMENTS.items()}
        of_small = dataclasses.replace(SPEC, input_size=(3, 32, 32))
        splits[SMALL] = load_images(f"folder:{small}", of_small, CROP_AND_FLIP, in_memory=True).train
        for turn in range(ROUNDS + 1):
            for name, samples in splits.items():
                started = time.perf_counter()
                for first in range(0, options.images, BATCH):
                    samples.batch([(turn, index, 0) for index in range(first, min(first + BATCH, options.images))])
                if turn:  # the first warms up
                    rates[name].append(options.images / (time.perf_counter() - started))
    conclude(
        "images",
        {"images_per_second_per_core": {name: rounded_quartiles(found, 1) for name, found in rates.items()}},
        options.out,
    )


if __name__ == "__main__":
    main()
