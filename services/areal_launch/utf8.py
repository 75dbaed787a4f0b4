"""Makes a program's text UTF-8, whatever the locale."""

from __future__ import annotations

import locale
import os
import sys


def restart_in_utf8() -> None:
    """Replaces this process by the same command in Python's UTF-8 mode; most often does nothing.

    Only a locale of another encoding (GBK, ISO-8859-1) needs it. Files that processes of a stack
    exchange, and names of files in them, are UTF-8; the mode can be set only when Python starts.
    """
    if sys.flags.utf8_mode or locale.getencoding().lower().replace("-", "") == "utf8":
        return
    if not sys.executable:  # embedded: there is nothing to start
        return
    argv = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
    os.execve(sys.executable, argv, {**os.environ, "PYTHONUTF8": "1"})  # noqa: S606 - ourselves
