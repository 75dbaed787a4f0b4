"""Images of a row: converts them between recipes, JSON, and inference servers.

    {"prompt": "How many?", "images": [PIL image | Path | bytes | data URL]}
        | submitted: a data URL, in the row's JSON
        v
    bytes of the file (PNG, JPEG)  -- data URL --> a server's `image_data`
                                   -- once per group, as they are --> the trainer

The file is sent, not its patches: patches take 24 bytes per pixel, a file rarely more than 2, and
the trainer's processor always makes the same patches of a file. No torch here.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal.errors import InvalidInput

_KINDS = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"RIFF", "webp"))


def data_url(file: bytes) -> str:
    """Returns the bytes of an image's file as a data URL.

    Raises:
        InvalidInput: The file is not a PNG, JPEG or WebP.
    """
    kind = next((kind for magic, kind in _KINDS if file.startswith(magic)), None)
    if kind is None:
        raise InvalidInput(
            f"image of {len(file)} bytes begins with {file[:8]!r}: expected a PNG, JPEG or WebP"
        )
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def row_images(row: dict[str, Any]) -> Sequence[Any]:
    """Returns a row's `images`, in any form.

    Raises:
        InvalidInput: `images` is not a list.
    """
    images = row.get("images") or ()
    if isinstance(images, (str, bytes)) or not isinstance(images, Sequence):
        raise InvalidInput(f"images: expected a list, got {type(images).__name__} {images!r:.40}")
    return images


def image_files(row: dict[str, Any]) -> tuple[bytes, ...]:
    """Returns the files of a row's `images`, as a workflow finds them.

    Raises:
        InvalidInput: `images` is not a list, or an item is not the data URL of an image.
    """
    return tuple(_file(each, number) for number, each in enumerate(row_images(row)))


def _file(image: Any, number: int) -> bytes:
    if isinstance(image, dict) and image.get("bytes"):  # as Parquet files of the Hub hold them
        image = image["bytes"]
    head, _, body = image.partition(",") if isinstance(image, str) else ("", "", "")
    if not (head.startswith("data:image/") and head.endswith(";base64")):
        raise InvalidInput(
            f"images[{number}]: expected data:image/…;base64,… (a row may give a PIL image, bytes "
            f"or a pathlib.Path, which become that), got {str(image)[:40]!r}"
        )
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise InvalidInput(f"images[{number}]: not base64 ({error})") from None


def portable(value: Any) -> str:
    """Converts an image of a row to a value that JSON can hold.

    Args:
        value: A PIL image, the bytes of an image's file, or its pathlib.Path.

    Raises:
        TypeError: The value is none of these (JSON encoders expect this error).
        InvalidInput: The file is missing, or is not an image.
    """
    if isinstance(value, Path):
        try:
            value = value.read_bytes()
        except OSError as error:
            raise InvalidInput(f"image {str(value)!r}: {error.strerror}") from None
    elif callable(getattr(value, "save", None)) and hasattr(value, "getpixel"):  # PIL's
        file = io.BytesIO()
        value.save(file, format="PNG")
        value = file.getvalue()
    if not isinstance(value, bytes):
        raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")
    return data_url(value)
