"""Writes what examples/digits.yaml and examples/digits_mae.yaml are about: scikit-learn's 1,797 handwritten digits of
8 x 8 pixels (Alpaydin and Kaynak, 1998), as digits/<name>/<number>.png.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def main(target: str = "digits") -> None:
    """Write the images, unless they are there."""
    found = load_digits()
    for number, (image, label) in enumerate(zip(found.images, found.target, strict=True)):
        path = Path(target) / NAMES[label] / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            Image.fromarray((image * 15.9375).astype(np.uint8)).save(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
