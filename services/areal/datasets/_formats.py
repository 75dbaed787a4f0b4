"""Says what a file of rows seems to be if it is in no format that is read here."""

from __future__ import annotations

from pathlib import Path

READ = "expected Parquet, JSON Lines or JSON, in UTF-8"

_MAGIC = {
    b"\x1f\x8b": "compressed (gzip)",
    b"BZh": "compressed (bzip2)",
    b"\xfd7zXZ": "compressed (xz)",
    b"\x28\xb5\x2f\xfd": "compressed (zstd)",
    b"PK\x03\x04": "an archive (zip)",
    b"PAR1": "Parquet (name it .parquet)",
    b"ARROW1": "Arrow",
    b"\xff\xff\xff\xff": "Arrow",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
    b"version https://git-lfs": "a pointer of Git LFS (git lfs pull gets the file)",
}
_TABLES = (".csv", ".tsv")


def seems(name: str, content: bytes) -> str:
    """Returns what a file seems to be, or "" if that could be JSON or is not known.

    Args:
        name: The file's name; CSV has no other mark.
        content: The file, or its beginning.
    """
    for magic, kind in _MAGIC.items():
        if content.startswith(magic):
            return kind
    # JSON has no NUL, and every second byte of English text in UTF-16 is one.
    if b"\0" in content[:2]:
        return "text in UTF-16"
    named_so = Path(name).suffix.lower() in _TABLES
    return "CSV" if named_so and not content[:64].lstrip().startswith(b"{") else ""


def is_utf8(content: bytes) -> bool:
    """Returns whether a text is in UTF-8."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
