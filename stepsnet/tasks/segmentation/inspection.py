"""What a report shows of a segmenter: the classes that are there beside those that were predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from ...run_folder.inspection import Picture, Pictures, Section
from ..pictures import RULE, as_picture, best_median_worst, side_by_side, spread_over
from .data import IGNORED
from .drawing import draw_labels, draw_legend
from .scores import scores

__all__ = ["pictures_of"]

_SIDE = 420  # in pixels, of each of the two images in a picture

Predict = Callable[[int], tuple[Tensor, Tensor, Tensor]]  # index -> image (3, H, W), labels and prediction (H, W)


def pictures_of(predict: Predict, names: Sequence[str], classes: Sequence[str]) -> list[Section]:
    """Show the best, the median and the worst image.

    Args:
        predict: called for some images, and again for those that are drawn, so that few are in memory at a time.
        names: the names of the evaluated images.
    """
    miou = {}
    for index in spread_over(len(names)):
        _, labels, predicted = predict(index)
        if (labels != IGNORED).any():
            miou[index] = scores(_confusion(labels, predicted, classes))[0]["miou"]
    if not miou:
        return []
    pictures = [
        _picture(*predict(index), classes, f"{rank}: {miou[index]:.1f}%", names[index])
        for rank, index in best_median_worst(miou).items()
    ]
    about = (
        "Left: the annotated classes; pixels without a label have no color. Right: the predicted classes. The legend "
        f"has the IoU of each class in this image. These are {RULE.format(count=len(miou))}, ranked by the number in "
        "front: the mean IoU over these classes."
    )
    return [Pictures("Annotated and predicted classes", about, pictures, is_wide=True)]


def _confusion(labels: Tensor, predicted: Tensor, classes: Sequence[str]) -> Tensor:
    return multiclass_confusion_matrix(predicted[None], labels[None].long(), len(classes), ignore_index=IGNORED)


def _picture(
    image: Tensor, labels: Tensor, predicted: Tensor, classes: Sequence[str], title: str, name: str
) -> Picture:
    _, of_class = scores(_confusion(labels, predicted, classes))
    entries = [(label, classes[label], f"{iou:.1f}%") for label, iou in enumerate(of_class) if iou is not None]
    drawn = side_by_side([draw_labels(image, of_pixels.numpy()) for of_pixels in (labels, predicted)], _SIDE)
    whole = side_by_side([drawn, draw_legend(entries, drawn.height)], 4 * _SIDE)
    return as_picture(whole, title, name, side=4 * _SIDE)
