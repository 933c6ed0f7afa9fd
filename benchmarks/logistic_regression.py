"""What logistic regression reaches on the pixels of scikit-learn's handwritten digits, as a scale for every network.

The split is that of ``data: digits``: a fifth for validation, stratified by class, with seed 0. The grey values are
divided by 16, and scikit-learn's defaults are kept, except for the number of iterations.

    python benchmarks/logistic_regression.py [--out results/benchmarks/logistic_regression.json]

Takes a second, and ends in one JSON line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outcome import conclude
from sklearn import __version__ as sklearn_version
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pixels, labels = load_digits(return_X_y=True)
    train_pixels, val_pixels, train_labels, val_labels = train_test_split(
        pixels / 16, labels, test_size=0.2, random_state=0, stratify=labels
    )
    model = LogisticRegression(max_iter=1000).fit(train_pixels, train_labels)
    result = {
        "train_samples": len(train_labels),
        "val_samples": len(val_labels),
        "params": model.coef_.size + model.intercept_.size,
        "metrics": {
            "train_top1": 100 * model.score(train_pixels, train_labels),
            "val_top1": 100 * model.score(val_pixels, val_labels),
        },
        "scikit_learn": sklearn_version,
    }
    conclude("logistic_regression", result, options.out)


if __name__ == "__main__":
    main()
