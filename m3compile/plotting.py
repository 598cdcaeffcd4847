"""Pictures of numbers, with matplotlib where it is installed (extra `plot`)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from m3compile.errors import DependencyError, OperationError, RequestError


def check_plot(path: Path) -> None:
    """Refuse, before any work, a picture that could not be written.

    Raises:
        DependencyError: matplotlib is not installed.
        RequestError: there is no such folder, or matplotlib does not write such files.
    """
    figure = new_figure(1, 1)
    if not path.absolute().parent.is_dir():
        raise RequestError(f"--plot {path}: its folder does not exist")
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise RequestError(f"--plot {path}: expected a name that ends in .{', .'.join(known)}")


def new_figure(width: float, height: float) -> Any:
    """A figure of that many inches; not pyplot's: nothing global is touched, no window is opened.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise DependencyError(
            f"--plot needs matplotlib, which does not import here ({error}); "
            "install m3compile[plot]"
        ) from error
    return module.Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a picture; its format is that of the name.

    Raises:
        OperationError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise OperationError(f"cannot write {path}: {error.strerror or error}") from None
