"""An ONNX file on disk, with its weights inside or in a second file beside it.

Both are written and checked aside and renamed into place. The model names its weights file, so one
must never meet the other's predecessor: while the weights are swapped there is no model.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from m3compile.errors import OperationError, RequestError
from m3compile.onnx_format import PRODUCER

# A protobuf message ends at 2 GiB; the graph itself needs a little of that.
LARGEST_INSIDE = 2_000_000_000
_MAX_NAME_BYTES = 200


def weights_file(out: Path) -> Path:
    """Where the weights of `out` lie if they are outside of it."""
    return out.with_name(f"{out.name}.data")


def check_out(out: Path) -> None:
    """Refuse, before any work, a name that nothing could be written under.

    Raises:
        RequestError: its folder does not exist, or it names a folder, or is too long.
    """
    if not os.path.isdir(out.absolute().parent):
        raise RequestError(f"--out {out}: its folder does not exist")
    if not out.name or os.path.isdir(out):
        raise RequestError(f"--out {out}: a folder; expected the name of a file")
    if os.path.isdir(weights_file(out)):
        raise RequestError(
            f"--out {out}: {weights_file(out)} is a folder, and weights may go there"
        )
    if len(os.fsencode(out.name)) > _MAX_NAME_BYTES:
        raise RequestError(f"--out {out}: a name of at most {_MAX_NAME_BYTES} bytes is expected")


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A path to write the model to, with its weights file beside it; put in place of `out` when
    the block ends, removed when it raises.

    Raises:
        OperationError: the files cannot be written or renamed.
    """
    out = Path(os.path.abspath(out))
    staging = out.parent / f".{out.name}.exporting-{uuid.uuid4().hex}"
    try:
        staging.mkdir()
        yield staging / out.name
        _swap_in(staging, out)
    except OSError as error:
        raise OperationError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _swap_in(staging: Path, out: Path) -> None:
    if not weights_file(staging / out.name).exists() and not _names_weights(out):
        (staging / out.name).replace(out)
        return
    names = (out.name, weights_file(out).name)
    replaced = staging / "replaced"
    replaced.mkdir()
    moved = []
    try:
        for name in names:
            if os.path.lexists(out.with_name(name)):
                out.with_name(name).rename(replaced / name)
                moved.append(name)
        for name in reversed(names):
            if (staging / name).exists():
                (staging / name).rename(out.with_name(name))
    except BaseException:
        for name in reversed(moved):
            (replaced / name).replace(out.with_name(name))
        raise


def _names_weights(out: Path) -> bool:
    """Whether `out` is an ONNX model of ours whose weights lie in its weights file."""
    if not os.path.isfile(out):
        return False
    try:
        model = onnx.load(str(out), format="protobuf", load_external_data=False)
    except DecodeError:
        return False
    return model.producer_name == PRODUCER and any(
        entry.key == "location" and entry.value == weights_file(out).name
        for tensor in model.graph.initializer
        for entry in tensor.external_data
    )


def write_model(model: ir.Model, path: Path, *, external: bool) -> None:
    """Write a model, and check what was written: structure, and every type and shape.

    Args:
        path: the model's; weights go to `weights_file(path)` if there are too many for one file.
        external: put them there in any case.

    Raises:
        OperationError: ONNX's own checker finds a fault.
    """
    size = sum(tensor.nbytes for tensor in _weights(model))
    data = weights_file(path).name if external or size > LARGEST_INSIDE else None
    ir.save(model, path, format="protobuf", external_data=data)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        reason = str(error).strip().splitlines()[0]
        raise OperationError(
            f"the checker of onnx {onnx.__version__} refuses the exported model: {reason}"
        ) from error


def _weights(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        yield value.const_value
