"""Running an exported ONNX file from Python, without torch.

    encoder = m3compile.onnx.load("encoder.onnx")
    embeddings = encoder.encode(pixel_values, grid_thw)

Needs NumPy and ONNX Runtime only. Importing this module imports neither torch nor ONNX Runtime.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m3compile.buckets import segments_of
from m3compile.errors import (
    ArtifactDamagedError,
    ArtifactIncompatibleError,
    ArtifactNotFoundError,
    DependencyError,
    InputError,
    OperationError,
    RequestError,
)
from m3compile.grids import Grid, check_row_shape, read_grids
from m3compile.onnx_format import EMBEDDINGS, PIXEL_VALUES, SEGMENTS, OnnxMetadata, from_properties

Array = npt.NDArray[Any]

# One run's activations grow with its patches, and small ones with patches times segments.
MAX_PATCHES = 16_384
_MAX_SEGMENTS = 128


class OnnxEncoder:
    """An ONNX file in a session of ONNX Runtime. Made by `load`; threads may share it.

    Attributes:
        metadata: what the file says of itself.
    """

    def __init__(self, session: Any, metadata: OnnxMetadata, max_patches: int) -> None:
        self.metadata = metadata
        self._session = session
        self._config = metadata.config
        self._max_patches = max_patches
        self._dtype = np.dtype(metadata.dtype)

    def encode(self, pixel_values: Array | Sequence[Array], grid_thw: Any) -> list[Array]:
        """Encode a batch of images and clips.

        Args:
            pixel_values: (N, patch_dim) rows of all items end to end, or a list of one array an
                item; any float dtype.
            grid_thw: (num_items, 3) ints: an array or nested lists; patches along time, height and
                width of every item.

        Returns:
            One (t*h*w / 4, width) array an item, in input order, in the file's dtype. A segment
            that had a non-finite pixel is NaN throughout.

        Raises:
            InputError: the batch breaks a rule; names the item. Nothing has run.
            OperationError: ONNX Runtime failed, such as for lack of memory.
        """
        grids = read_grids(grid_thw)
        rows = self._rows(pixel_values, grids)
        frames = self._config.vision_segment_max_frames
        segments = [segment for grid in grids for segment in segments_of(*grid, frames)]
        parts = []
        start = 0
        for run in _runs(segments, self._max_patches):
            end = start + sum(t * h * w for t, h, w in run)
            parts.append(self.run(rows[start:end], np.array(run, np.int64)))
            start = end
        if not grids:
            return []
        tokens = [t * h * w // self._config.patches_per_token for t, h, w in grids]
        return np.split(np.concatenate(parts), np.cumsum(tokens)[:-1])

    def run(self, pixel_values: Array, segments: Array) -> Array:
        """One run of the file itself; nothing is checked that ONNX Runtime does not check.

        Args:
            pixel_values: (num_patches, patch_dim) of any float dtype, num_patches a multiple of 4.
                Rows past the last segment may hold anything.
            segments: (num_segments, 3) ints `t, h, w`; zero rows are unused.

        Returns:
            (num_patches / 4, width) in the file's dtype; rows past the last segment are
            unspecified.

        Raises:
            OperationError: ONNX Runtime failed.
        """
        # Beyond the range of half floats is infinity, which is what such a pixel then means.
        with np.errstate(over="ignore"):
            rows = np.ascontiguousarray(pixel_values, self._dtype)
        feeds = {PIXEL_VALUES: rows, SEGMENTS: np.ascontiguousarray(segments, np.int64)}
        try:
            (embeddings,) = self._session.run([EMBEDDINGS], feeds)
        # Its errors share no base but Exception, and RuntimeError for some.
        except Exception as error:
            raise OperationError(f"ONNX Runtime failed: {_first_line(error)}") from error
        result: Array = embeddings
        return result

    def _rows(self, pixel_values: Array | Sequence[Array], grids: list[Grid]) -> Array:
        """Checked rows of all items, (N, patch_dim)."""
        patch_dim = self._config.patch_dim
        if isinstance(pixel_values, np.ndarray):
            _check_rows("pixel_values", pixel_values, grids, patch_dim)
            return pixel_values
        if not isinstance(pixel_values, (list, tuple)):
            raise InputError(
                f"pixel_values is a {type(pixel_values).__name__}, expected a NumPy array or a "
                "list of them"
            )
        if len(pixel_values) != len(grids):
            raise InputError(
                f"pixel_values is a list of {len(pixel_values)} arrays, grid_thw has "
                f"{len(grids)} items; expected one array an item"
            )
        for index, (part, grid) in enumerate(zip(pixel_values, grids, strict=True)):
            name = f"item {index}: pixel_values"
            if not isinstance(part, np.ndarray):
                raise InputError(f"{name} is a {type(part).__name__}, expected a NumPy array")
            _check_rows(name, part, [grid], patch_dim)
        return np.concatenate(pixel_values) if grids else np.zeros((0, patch_dim), self._dtype)


def load(
    path: str | os.PathLike[str],
    *,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    session_options: Any = None,
    max_patches: int = MAX_PATCHES,
) -> OnnxEncoder:
    """Open an exported file.

    Args:
        path: the file; weights outside of it must lie beside it.
        providers: of ONNX Runtime, in order of preference.
        session_options: an `onnxruntime.SessionOptions`, such as for the number of threads; None
            for the defaults without memory patterns.
        max_patches: most patch rows of one run; a batch over it is cut between segments. A segment
            over it runs alone.

    Raises:
        RequestError: an argument is impossible.
        DependencyError: ONNX Runtime is not installed.
        ArtifactNotFoundError: there is no such file.
        ArtifactDamagedError: it cannot be read, or `export-onnx` did not write it.
        ArtifactIncompatibleError: ONNX Runtime, or NumPy, lacks what its dtype or opset needs.
    """
    if not isinstance(max_patches, int) or max_patches < 4:
        raise RequestError(f"max_patches is {max_patches!r}; allowed: whole numbers from 4")
    file = Path(path)
    if not os.path.isfile(file):
        raise ArtifactNotFoundError(f"{file}: no such file")
    session = _session(file, list(providers), session_options)
    try:
        metadata = from_properties(session.get_modelmeta().custom_metadata_map)
    except ValueError as error:
        raise ArtifactDamagedError(f"{file}: not written by export-onnx: {error}") from None
    if metadata.dtype == "bfloat16":
        raise ArtifactIncompatibleError(
            f"{file} is bfloat16, which NumPy does not have; export it as float32 or float16, or "
            "bind its inputs and output as OrtValue"
        )
    return OnnxEncoder(session, metadata, max_patches)


def _session(file: Path, providers: list[Any], options: Any) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise DependencyError(
            "running ONNX files needs ONNX Runtime: pip install 'm3compile[onnx]', or onnxruntime"
        ) from error
    names = [entry if isinstance(entry, str) else entry[0] for entry in providers]
    version = f"ONNX Runtime {onnxruntime.__version__}"
    # It would warn and run on the CPU instead.
    for name in names:
        if name not in onnxruntime.get_available_providers():
            raise RequestError(
                f"{version} has no {name} here; available: "
                + ", ".join(onnxruntime.get_available_providers())
            )
    version += f" ({', '.join(names)})"
    if options is None:
        options = onnxruntime.SessionOptions()
        # A plan of memory for every shape met: it nearly doubles what a large image takes, and is
        # kept, so that memory would climb with varied sizes.
        options.enable_mem_pattern = False
    try:
        session = onnxruntime.InferenceSession(file, options, providers=providers)
    except Exception as error:
        line = _first_line(error)
        # Its errors have no public classes; they say in words what they are.
        lacking = re.search(r"Could not find an implementation for (\w+)", line)
        opset = re.search(r"official support for domain ai\.onnx is till opset (\d+)", line)
        if lacking is not None:
            reason = f"has no kernel for its {lacking[1]}, in its dtype and opset"
        elif opset is not None:
            reason = f"knows opsets up to {opset[1]}, and it has a later one"
        elif "Unsupported model IR" in line:
            reason = f"is too old for it: {line}"
        else:
            reason = ""
        if reason:
            raise ArtifactIncompatibleError(f"{file}: {version} {reason}") from error
        raise ArtifactDamagedError(f"{file}: {version} cannot open it: {line}") from error
    lost = [name for name in names if name not in session.get_providers()]
    if lost:
        raise ArtifactIncompatibleError(f"{file}: {version} does not run it with {lost[0]}")
    return session


def _first_line(error: Exception) -> str:
    # Without the paths of its own sources, of which there may be many.
    lines = re.sub(r"/onnxruntime_src/\S+", "", str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _check_rows(name: str, rows: Array, grids: list[Grid], patch_dim: int) -> None:
    if rows.dtype.kind != "f":
        raise InputError(f"{name} has dtype {rows.dtype}, expected a float dtype")
    expected = sum(t * h * w for t, h, w in grids)
    check_row_shape(name, rows.shape, expected, patch_dim, grids)


def _runs(segments: list[Grid], max_patches: int) -> Iterator[list[Grid]]:
    """Consecutive segments that share a run."""
    run: list[Grid] = []
    patches = 0
    for t, h, w in segments:
        if run and (patches + t * h * w > max_patches or len(run) == _MAX_SEGMENTS):
            yield run
            run, patches = [], 0
        run.append((t, h, w))
        patches += t * h * w
    if run:
        yield run
