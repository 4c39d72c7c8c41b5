"""The program and its libraries, which an installed package has in installed/."""

import ctypes
import functools
import os
import pathlib
import sys

from .errors import CairnError

INSTALLED = pathlib.Path(__file__).resolve().parent / "installed"


def program():
    """Path of the program `cairn` in this package."""
    path = INSTALLED / "bin" / "cairn"
    if not path.is_file():
        raise CairnError(f"{path} is missing: this is the source, and not an installed wheel (tools/package --wheel)")
    return path


def main():
    """The command `cairn`: becomes the program."""
    path = str(program())
    os.execv(path, [path, *sys.argv[1:]])


@functools.cache
def library(name):
    """A shared library of the package; from the source tree, the system's."""
    path = INSTALLED / "lib" / name
    return ctypes.CDLL(str(path) if path.is_file() else name)
