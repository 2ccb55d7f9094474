"""A folder of image files as a dataset; Pillow is imported when the first one opens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from torchlens.errors import DataError

__all__ = ["ImageFolder", "open_image_folder"]

_SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)


class ImageFolder(Dataset[Any]):
    """RGB images below one folder, in the order of their relative names."""

    def __init__(
        self, root: Path, names: tuple[str, ...], transform: Callable[[Any], Any]
    ) -> None:
        self.root = root
        self.names = names
        self.transform = transform

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> Any:
        from PIL import Image

        with Image.open(self.root / self.names[row]) as image:
            return self.transform(image.convert("RGB"))

    def raw_bytes(self, row: int) -> bytes:
        """Return the file of one row as it lies on disk."""
        return (self.root / self.names[row]).read_bytes()


def open_image_folder(
    root: Path, transform: Callable[[Any], Any] | None
) -> ImageFolder:
    """Find the images below `root`.

    Raises:
        DataError: If there is no such folder, no image in it, or no `transform`.
    """
    if not root.is_dir():
        raise DataError(
            f"There is no folder {str(root)!r}. A string is taken for the path of a "
            f"folder of images; other data is passed as a dataset, tensor or list."
        )
    if transform is None:
        raise DataError(
            f"The images in {str(root)!r} need transform=, which turns an RGB image "
            f"into the tensor that the model expects. Torchvision weights bring "
            f"theirs: ResNet18_Weights.DEFAULT.transforms()."
        )
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.suffix.lower() in _SUFFIXES and path.is_file()
    )
    if not names:
        raise DataError(
            f"The folder {str(root)!r} holds no image: no file ends in "
            f"{', '.join(sorted(_SUFFIXES))}."
        )
    return ImageFolder(root, tuple(names), transform)
