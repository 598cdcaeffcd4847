"""`images`: files to rows.

Rows are held to those that another implementation made of the same files (`goldens/images`), the
order of rows and columns to a plain Python loop, decoding to pictures written here with Pillow.
"""

from __future__ import annotations

import struct
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from m3compile.config import PreprocessConfig
from m3compile.config.resize import MAX_ASPECT_RATIO, resized_size
from m3compile.errors import DependencyError, ExitCode, InputError, InputNotFoundError
from m3compile.images import (
    MAX_IMAGE_PIXELS,
    image_rows,
    load_image,
    load_images,
)

GOLDENS = Path(__file__).parent / "goldens" / "images"
FILES = ["gray.png", "large.jpg", "portrait.png", "tiny.png", "wide.png"]
# Of these images only every n-th row is stored.
ROW_STEP = {"large.jpg": 16}
CONFIG = PreprocessConfig()
ONE_LEVEL = (1 / 255 / torch.tensor(CONFIG.std)).view(1, 3, 1)


@pytest.fixture(scope="module")
def golden_rows() -> dict[str, torch.Tensor]:
    return load_file(GOLDENS / "rows.safetensors")


def picture(height: int = 5, width: int = 7) -> np.ndarray:
    """A (height, width, 3) uint8 picture in which no two turns or mirrors look the same."""
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy()).permute(2, 0, 1)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 64)
    end = chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + end


# --- against another implementation


@pytest.mark.parametrize("name", FILES)
def test_rows_equal_the_released_processor(name: str, golden_rows: dict[str, torch.Tensor]) -> None:
    stem = name.partition(".")[0]
    rows, grid = image_rows(load_image(GOLDENS / name), CONFIG)
    assert [list(grid)] == golden_rows[f"{stem}.grid_thw"].tolist()
    assert rows.dtype == torch.float32
    assert rows.shape == (grid[1] * grid[2], 1176)

    expected = golden_rows[f"{stem}.pixel_values"]
    error = (rows[:: ROW_STEP.get(name, 1)] - expected).abs().view(len(expected), 3, -1)
    # The slack is for the last bit of floats around 1, far from a second level.
    assert (error <= ONE_LEVEL * 1.0001).all()
    assert error.mean() <= 2e-3
    # The bounds above are the contract; in fact the same bytes come out of the resize.
    assert (error <= ONE_LEVEL * 1e-3).all()


def test_load_images_joins_files_in_order(golden_rows: dict[str, torch.Tensor]) -> None:
    names = ["wide.png", "gray.png", "tiny.png", "gray.png"]
    calls: list[tuple[int, int]] = []
    rows, grids = load_images(
        [GOLDENS / name for name in names], CONFIG, lambda done, total: calls.append((done, total))
    )
    stems = [name.partition(".")[0] for name in names]
    assert torch.equal(grids, torch.cat([golden_rows[f"{stem}.grid_thw"] for stem in stems]))
    assert grids.dtype == torch.int64
    expected = torch.cat([golden_rows[f"{stem}.pixel_values"] for stem in stems])
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=0)
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_no_files_give_no_rows() -> None:
    rows, grids = load_images([], CONFIG)
    assert rows.shape == (0, 1176)
    assert rows.dtype == torch.float32
    assert grids.shape == (0, 3)
    assert grids.dtype == torch.int64


# --- the size after the resize


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((672, 672), (672, 672)),
        # 1.5 and 2.5 multiples: to the even one, as Python's round does.
        ((42 * 10, 28 * 10), (28 * 15, 28 * 10)),
        ((42, 280), (56, 280)),
        ((70, 280), (56, 280)),
        # Under min_pixels, grown.
        ((1, 1), (56, 56)),
        ((19, 20), (56, 84)),
        # A side that rounds to 0 is one multiple before the area is looked at.
        ((10, 2000), (28, 1988)),
        ((2000, 10), (1988, 28)),
        ((1, 200), (28, 196)),
        # Over max_pixels, shrunk.
        ((800, 1100), (560, 784)),
        ((100, 20_000), (28, 9492)),
    ],
)
def test_resized_size(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert resized_size(*size, CONFIG) == expected


def test_a_thin_picture_keeps_one_multiple_over_a_low_max_pixels() -> None:
    config = PreprocessConfig(max_pixels=4 * 28 * 28)
    # The scale alone would make it 12.5 x 250: no grid at all.
    assert resized_size(100, 2000, config) == (28, 28 * 8)


@pytest.mark.parametrize("size", [(1, 201), (20_001, 100), (7, 1_000_000)])
def test_ratio_over_200_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=r"aspect ratio is over 200"):
        resized_size(*size, CONFIG)


@pytest.mark.parametrize("size", [(0, 10), (10, 0), (0, 0), (-1, 10)])
def test_empty_size_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="at least 1x1"):
        resized_size(*size, CONFIG)


@st.composite
def allowed_sizes(draw: st.DrawFn) -> tuple[int, int]:
    short = draw(st.integers(1, 3000))
    long = draw(st.integers(short, short * MAX_ASPECT_RATIO))
    return draw(st.sampled_from([(short, long), (long, short)]))


@given(allowed_sizes())
def test_default_sizes_are_multiples_within_the_limits(size: tuple[int, int]) -> None:
    height, width = resized_size(*size, CONFIG)
    assert height % 28 == width % 28 == 0
    assert CONFIG.min_pixels <= height * width <= CONFIG.max_pixels


@given(
    allowed_sizes(), st.integers(1, 20), st.integers(1, 3), st.integers(0, 5000), st.integers(0, 99)
)
def test_any_config_gives_multiples_and_only_thin_pictures_pass_max_pixels(
    size: tuple[int, int], patch: int, merge: int, max_blocks: int, min_percent: int
) -> None:
    block_pixels = (patch * merge) ** 2
    max_pixels = block_pixels * (1 + max_blocks)
    config = PreprocessConfig(
        patch_size=patch,
        merge_size=merge,
        min_pixels=max(block_pixels, max_pixels * min_percent // 100),
        max_pixels=max_pixels,
    )
    factor = config.factor
    height, width = resized_size(*size, config)
    assert min(height, width) >= factor
    assert height % factor == width % factor == 0
    if height * width > max_pixels:
        kept_at_one_multiple = min(height, width) == factor
        grown_and_rounded_up = (height - factor) * (width - factor) < config.min_pixels
        assert kept_at_one_multiple or grown_and_rounded_up


# --- rows and columns


@pytest.mark.parametrize(("merge", "frames", "patch"), [(2, 2, 3), (3, 1, 2), (1, 2, 4)])
def test_rows_come_in_merge_block_order(merge: int, frames: int, patch: int) -> None:
    config = PreprocessConfig(
        patch_size=patch,
        merge_size=merge,
        temporal_patch_size=frames,
        min_pixels=(patch * merge) ** 2,
        rescale_factor=1.0,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    )
    height, width = 2 * patch * merge, 3 * patch * merge
    # Its size is already right, so the resize leaves every byte as it is.
    image = as_tensor(picture(height, width))
    rows, grid = image_rows(image, config)
    assert grid == (1, 2 * merge, 3 * merge)

    expected = []
    for block_row in range(2):
        for block_column in range(3):
            for inner_row in range(merge):
                for inner_column in range(merge):
                    top = (block_row * merge + inner_row) * patch
                    left = (block_column * merge + inner_column) * patch
                    expected.append(
                        [
                            int(image[channel, top + y, left + x])
                            for channel in range(3)
                            for _ in range(frames)
                            for y in range(patch)
                            for x in range(patch)
                        ]
                    )
    assert torch.equal(rows, torch.tensor(expected, dtype=torch.float32))


def test_config_is_honoured() -> None:
    config = PreprocessConfig(
        max_pixels=8 * 28 * 28, mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 2.0), rescale_factor=1 / 128
    )
    rows, grid = image_rows(torch.full((3, 400, 800), 64, dtype=torch.uint8), config)
    assert grid == (1, 4, 8)
    expected = torch.tensor([0.0, 1.0, 0.25]).view(1, 3, 1).expand(32, 3, 392).reshape(32, 1176)
    torch.testing.assert_close(rows, expected, atol=1e-6, rtol=0)


def test_one_pixel_fills_the_smallest_grid() -> None:
    image = torch.tensor([10, 20, 30], dtype=torch.uint8).view(3, 1, 1)
    rows, grid = image_rows(image, CONFIG)
    assert grid == (1, 4, 4)
    color = (torch.tensor([10, 20, 30]) / 255 - torch.tensor(CONFIG.mean)) / torch.tensor(
        CONFIG.std
    )
    expected = color.view(1, 3, 1).expand(16, 3, 392).reshape(16, 1176)
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "image",
    [
        torch.zeros(3, 8, 8),
        torch.zeros(1, 8, 8, dtype=torch.uint8),
        torch.zeros(8, 8, 3, dtype=torch.uint8),
        torch.zeros(1, 3, 8, 8, dtype=torch.uint8),
        torch.zeros(3, 0, 8, dtype=torch.uint8),
        torch.zeros(3, 8, 8, dtype=torch.uint8, device="meta"),
    ],
)
def test_other_tensors_are_refused(image: torch.Tensor) -> None:
    with pytest.raises(InputError, match="allowed"):
        image_rows(image, CONFIG)


# --- decoding


def test_grey(tmp_path: Path) -> None:
    grey = picture()[:, :, :1]
    Image.fromarray(grey[:, :, 0]).save(tmp_path / "a.png")
    assert torch.equal(load_image(tmp_path / "a.png"), as_tensor(grey.repeat(3, axis=2)))


def test_black_and_white(tmp_path: Path) -> None:
    Image.fromarray(np.array([[True, False, True]])).save(tmp_path / "a.png")
    assert load_image(tmp_path / "a.png")[2].tolist() == [[255, 0, 255]]


@pytest.mark.parametrize("name", ["a.png", "a.tiff", "a.pgm"])
def test_16_bit_grey_keeps_the_high_byte(tmp_path: Path, name: str) -> None:
    levels = np.array([[0, 255, 256, 1000, 40_000, 65_535]], dtype=np.uint16)
    if name.endswith("pgm"):  # Pillow before 11 doesn't write these.
        (tmp_path / name).write_bytes(b"P5 6 1 65535\n" + levels.astype(">u2").tobytes())
    else:
        Image.fromarray(levels).save(tmp_path / name)
    image = load_image(tmp_path / name)
    assert image.tolist() == [[[0, 0, 1, 3, 156, 255]]] * 3


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_32_bit_samples_are_refused(tmp_path: Path, dtype: type) -> None:
    Image.fromarray(np.ones((4, 4), dtype=dtype)).save(tmp_path / "a.tiff")
    with pytest.raises(InputError, match=r"a\.tiff: 32-bit samples"):
        load_image(tmp_path / "a.tiff")


@pytest.mark.parametrize("alphas", [None, 0, b"\x00\x80\xff"])
def test_palette(tmp_path: Path, alphas: int | bytes | None) -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    image.putdata([2, 0, 1])
    options = {} if alphas is None else {"transparency": alphas}
    image.save(tmp_path / "a.png", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_image(tmp_path / "a.png")
    assert loaded.permute(1, 2, 0).tolist() == [[[70, 80, 90], [10, 20, 30], [40, 50, 60]]]


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_dropped_and_the_stored_colour_shows(tmp_path: Path, mode: str) -> None:
    array = picture()
    channels = 3 if mode == "RGBA" else 1
    alpha = np.arange(35, dtype=np.uint8).reshape(5, 7, 1)
    Image.fromarray(np.concatenate([array[:, :, :channels], alpha], axis=2)).save(
        tmp_path / "a.png"
    )
    expected = array if mode == "RGBA" else array[:, :, :1].repeat(3, axis=2)
    assert torch.equal(load_image(tmp_path / "a.png"), as_tensor(expected))


def test_cmyk(tmp_path: Path) -> None:
    image = Image.fromarray(picture()).convert("CMYK")
    image.save(tmp_path / "a.tiff")
    assert torch.equal(load_image(tmp_path / "a.tiff"), as_tensor(picture()))
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "a.jpg")
    assert load_image(tmp_path / "a.jpg")[:, 8, 8].tolist() == pytest.approx([255, 0, 0], abs=3)


@pytest.mark.parametrize("suffix", ["png", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path: Path, orientation: int, suffix: str) -> None:
    upright = picture()
    # What a camera that is held this way stores of it; the inverse of what the tag asks for.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: np.rot90(upright, 2).transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(np.ascontiguousarray(stored)).save(path, exif=exif)
    image = load_image(path)
    assert torch.equal(image, as_tensor(upright))
    # The turned view's strides don't matter to the resize.
    assert torch.equal(image_rows(image, CONFIG)[0], image_rows(as_tensor(upright), CONFIG)[0])


def test_unknown_orientation_counts_as_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 9
    Image.fromarray(picture()).save(tmp_path / "a.png", exif=exif)
    assert torch.equal(load_image(tmp_path / "a.png"), as_tensor(picture()))


@pytest.mark.parametrize("name", ["a.png", "a.tiff", "a.webp"])
def test_first_frame_of_several(tmp_path: Path, name: str) -> None:
    first, second = Image.fromarray(picture()), Image.new("RGB", (7, 5), (1, 2, 3))
    options = {"lossless": True} if name.endswith("webp") else {}
    first.save(tmp_path / name, save_all=True, append_images=[second], **options)
    assert torch.equal(load_image(tmp_path / name), as_tensor(picture()))


# --- files that are refused


def test_extreme_ratio_names_the_file(tmp_path: Path) -> None:
    Image.new("RGB", (2001, 10)).save(tmp_path / "thin.png")
    with pytest.raises(InputError, match=r"thin\.png: the image is 10x2001 pixels.*over 200"):
        load_images([tmp_path / "thin.png"], CONFIG)
    Image.new("RGB", (2000, 10)).save(tmp_path / "thin.png")
    assert load_images([tmp_path / "thin.png"], CONFIG)[1].tolist() == [[1, 2, 142]]


@pytest.mark.parametrize("source", ["portrait.png", "large.jpg"])
@pytest.mark.parametrize("kept", [0.0, 0.0005, 0.5, 0.98])
def test_truncated_file(tmp_path: Path, source: str, kept: float) -> None:
    data = (GOLDENS / source).read_bytes()
    path = tmp_path / "cut"
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(InputError, match=r"cut: (the image is damaged|not recognised)"):
        load_image(path)


def test_damaged_avif(tmp_path: Path) -> None:
    """Its decoder raises RuntimeError, unlike every other."""
    path = tmp_path / "a.avif"
    try:
        Image.fromarray(picture(32, 32)).save(path)
    except (ValueError, KeyError, OSError):
        pytest.skip("this Pillow has no AVIF")
    data = path.read_bytes()
    payload = data.index(b"mdat") + 4
    path.write_bytes(data[:payload] + b"\xff" * (len(data) - payload))
    with pytest.raises(InputError, match=r"a\.avif: "):
        load_image(path)


@pytest.mark.parametrize("content", [b"", b"not an image\n", b"\x93NUMPY", bytes(4096)])
def test_not_an_image(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.png"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"notes\.png: not recognised as an image") as caught:
        load_image(path)
    assert "\n" not in str(caught.value)


def test_postscript_is_never_run(tmp_path: Path) -> None:
    path = tmp_path / "a.eps"
    Image.fromarray(picture()).save(path)
    with pytest.raises(InputError, match="not recognised as an image"):
        load_image(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(InputNotFoundError, match=r"gone\.png: no such file") as caught:
        load_image(tmp_path / "gone.png")
    assert caught.value.exit_code == ExitCode.REQUEST
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        load_image(tmp_path)
    with pytest.raises(InputError, match="cannot be read: "):
        load_image("a\0b.png")


@pytest.mark.parametrize("pillow_limit", [Image.MAX_IMAGE_PIXELS, None])
@pytest.mark.parametrize("side", [9460, 14_000, 60_000])
def test_bomb_is_refused_before_it_is_decoded(
    tmp_path: Path, side: int, pillow_limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between Pillow's warning and its error, above its error, and with both switched off."""
    assert side**2 > MAX_IMAGE_PIXELS
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillow_limit)
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(side, side))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InputError, match=r"bomb\.png: .*pixels") as caught:
            load_image(path)
    assert caught.value.exit_code == ExitCode.REQUEST


def test_missing_pillow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DependencyError, match=r"pip install 'm3compile\[images\]'"):
        load_image(GOLDENS / "tiny.png")
