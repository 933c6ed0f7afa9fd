"""Images decoded and augmented a second on one core: how many cores a device needs to be kept busy.

    python benchmarks/images.py [--images N] [--out results/benchmarks/images.json]

JPEGs of 500×375 pixels, as ImageNet's are on average, of noise and of a smooth picture (photographs lie
between the two), under the paper's augmentation at 224×224, under none but crop and flip, and as in evaluation.
Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from outcome import conclude, rounded_quartiles
from PIL import Image

from stepsnet.config import Augment
from stepsnet.tasks.classification.data import InputSpec, load_images

ROUNDS = 5
SPEC = InputSpec((3, 224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
AUGMENTS = {
    "paper's": Augment(),
    "crop and flip": Augment(color_jitter=0.0, auto_augment=None, re_prob=0.0),
    "evaluation": None,
}


def write_pictures(folder: Path, count: int) -> None:
    rng, size = np.random.default_rng(0), (500, 375)
    for split, number in (("train", count), ("val", 1)):
        (folder / split / "pictures").mkdir(parents=True)
        for index in range(number):
            coarse = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
            picture = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
            if index % 2:
                noise = Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8))
                picture = Image.blend(picture, noise, 0.3)
            picture.save(folder / split / "pictures" / f"{index:04}.jpg", quality=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rates: dict[str, list[float]] = {name: [] for name in AUGMENTS}
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(Path(folder), options.images)
        splits = {name: load_images(f"folder:{folder}", SPEC, augment).train for name, augment in AUGMENTS.items()}
        for turn in range(ROUNDS + 1):
            for name, samples in splits.items():
                started = time.perf_counter()
                for index in range(options.images):
                    samples[(turn, index, 0)]
                if turn:  # the first warms up
                    rates[name].append(options.images / (time.perf_counter() - started))
    conclude(
        "images",
        {"images_per_second_per_core": {name: rounded_quartiles(found, 1) for name, found in rates.items()}},
        options.out,
    )


if __name__ == "__main__":
    main()
