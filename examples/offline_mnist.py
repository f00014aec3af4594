"""Handwritten digits in MNIST's file format, for machines that cannot download MNIST.

scikit-learn brings 1,797 handwritten digits of 8x8 pixels with it (the test set of "Optical
Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, UCI Machine Learning Repository,
1998). They are enlarged to 20x20 pixels, centred on 28x28 as MNIST's are, and written as the four
IDX files that torchvision looks for before it downloads. So ``datasets.MNIST(root, download=True)``
reads them without a network. They are not MNIST: 1,440 images to train with, 357 to test, and
easier to tell apart.

    python examples/offline_mnist.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

TRAIN_IMAGES = 1440  # as with MNIST, a last batch of 64 leaves no rank of 8 with a single image
SPLIT_SEED = 0  # the digits are sorted by writer: mixed once, the same way everywhere


def write(root: str | Path) -> Path:
    """Write the four files below ``root``, unless they are there.

    Args:
        root: the folder that is given to ``datasets.MNIST``.

    Returns:
        The folder of the files, ``root/MNIST/raw``.
    """
    folder = Path(root) / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = _digits()
    for part, rows in {
        "train": slice(None, TRAIN_IMAGES),
        "t10k": slice(TRAIN_IMAGES, None),
    }.items():
        _write_idx(folder / f"{part}-images-idx3-ubyte", images[rows])
        _write_idx(folder / f"{part}-labels-idx1-ubyte", labels[rows])
    return folder


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 of shape (1797, 28, 28), and labels, uint8 of shape (1797,)."""
    bundle = load_digits()
    # grey levels are 0 … 16
    small = torch.from_numpy(bundle.images).float().unsqueeze(1) * (255 / 16)
    large = torch.nn.functional.interpolate(
        small, size=(20, 20), mode="bilinear", align_corners=False
    )
    framed = torch.nn.functional.pad(large, (4, 4, 4, 4)).squeeze(1).round().to(torch.uint8).numpy()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(framed))
    return framed[order], bundle.target.astype(np.uint8)[order]


def _write_idx(path: Path, values: np.ndarray) -> None:
    """Write bytes in IDX format.

    Two zero bytes, type 8 (unsigned byte), dimensions, sizes, values, big-endian.
    """
    if path.exists():
        return
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes()
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(header + np.ascontiguousarray(values).tobytes())
    partial.replace(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python offline_mnist.py FOLDER")
    print(f"{write(sys.argv[1])}: scikit-learn's 1,797 handwritten digits in MNIST's format")
