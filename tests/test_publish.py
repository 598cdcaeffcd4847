"""Publishing: what a block did, or failed to do, is compared with what lies in the parent folder
afterwards: the new folder whole, or the old one untouched, and nothing beside it.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from m3compile.artifact import MANIFEST, check_target, publishing
from m3compile.errors import OperationError, RequestError


def fill(folder: Path, mark: str) -> None:
    """What counts as an artifact for publishing."""
    folder.mkdir(exist_ok=True)
    document = {"format_version": 1, "files": {}, "tower": {}}
    (folder / MANIFEST).write_text(json.dumps(document))
    (folder / "mark").write_text(mark)


def publish(
    out: Path, mark: str = "new", *, force: bool = False, inside: Callable[[], object] = int
) -> None:
    """Publish a folder; `inside` is called when it is filled and not published yet."""
    with publishing(out, force=force) as staging:
        fill(staging, mark)
        inside()


def fails(error: BaseException) -> Callable[[], object]:
    def raise_it() -> None:
        raise error

    return raise_it


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    out = tmp_path / "deep/down/a"
    with publishing(out, force=False) as staging:
        assert staging.parent == out.parent
        fill(staging, "new")
        assert not out.exists()
    assert os.listdir(out.parent) == ["a"]
    assert (out / "mark").read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("force", [False, True])
def test_a_failure_leaves_what_was_there(
    tmp_path: Path, error: type[BaseException], force: bool
) -> None:
    out = tmp_path / "a"
    if force:
        fill(out, "old")
    with pytest.raises(error):
        publish(out, force=force, inside=fails(error()))
    assert os.listdir(tmp_path) == (["a"] if force else [])
    assert not force or (out / "mark").read_text() == "old"


def test_force_replaces_all_of_an_artifact(tmp_path: Path) -> None:
    out = tmp_path / "a"
    fill(out, "old")
    (out / "more").write_text("old")
    publish(out, force=True)
    assert sorted(os.listdir(out)) == [MANIFEST, "mark"]
    assert os.listdir(tmp_path) == ["a"]


def test_an_artifact_is_not_replaced_unasked(tmp_path: Path) -> None:
    fill(tmp_path / "a", "old")
    with pytest.raises(RequestError, match=r"a exists; pass --force"):
        check_target(tmp_path / "a", force=False)
    check_target(tmp_path / "a", force=True)


def foreign(kind: str, out: Path) -> None:
    if kind == "file":
        out.write_text("mine")
    elif kind == "dead link":
        out.symlink_to("nowhere")
    elif kind == "link":
        fill(out.with_name("real"), "mine")
        out.symlink_to("real")
    else:
        out.mkdir()
        if kind != "empty folder":
            (out / MANIFEST).write_text(kind)


@pytest.mark.parametrize(
    "kind",
    ["file", "dead link", "link", "empty folder", "", "[]", '{"name": "an extension"}', "{" * 9999],
)
@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_artifact_is_never_replaced(tmp_path: Path, kind: str, force: bool) -> None:
    out = tmp_path / "a"
    foreign(kind, out)
    before = sorted(os.walk(tmp_path))
    with pytest.raises(RequestError, match="is not an artifact"):
        publish(out, force=force, inside=lambda: pytest.fail("work was done"))
    assert sorted(os.walk(tmp_path)) == before


def test_a_file_where_the_parent_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file/a", tmp_path / "file/b/a", tmp_path / ("x" * 300)):
        with pytest.raises(OperationError, match="cannot write to"):
            publish(out, inside=lambda: pytest.fail("work was done"))
    assert os.listdir(tmp_path) == ["file"]


def test_a_build_that_comes_second_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "a"
    with pytest.raises(RequestError, match="a exists"):
        publish(out, "second", inside=lambda: publish(out, "first"))
    assert (out / "mark").read_text() == "first"
    assert os.listdir(tmp_path) == ["a"]


def test_a_failed_rename_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a"
    fill(out, "old")
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if ".building-" in path.name:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OperationError, match=r"cannot publish .*Input/output error"):
        publish(out, force=True)
    assert (out / "mark").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_many_builds_of_one_name(tmp_path: Path) -> None:
    out = tmp_path / "a"
    failures: list[Exception] = []
    start = threading.Barrier(8, timeout=60)

    def run(number: int) -> None:
        start.wait()
        for turn in range(10):
            try:
                publish(out, f"{number} {turn}", force=True)
            except Exception as error:  # noqa: BLE001 (whatever it is, the test names it)
                failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.listdir(tmp_path) == ["a"]
    assert sorted(os.listdir(out)) == [MANIFEST, "mark"]
    # One that is always overtaken gives up; that must be the exception.
    assert {type(failure) for failure in failures} <= {OperationError}
    assert len(failures) < 40


def test_an_artifact_that_is_replaced_during_the_look_is_still_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder goes between the look at its name and the one at its manifest."""
    out = tmp_path / "a"
    fill(out, "old")
    real = os.path.isfile
    gone: list[Path] = []

    def isfile(path: Path) -> bool:
        if not gone:
            gone.append(out.rename(tmp_path / "gone"))
            there = real(path)
            fill(out, "another build")
            return there
        return real(path)

    monkeypatch.setattr(os.path, "isfile", isfile)
    check_target(out, force=True)
    assert gone


def test_another_build_publishes_while_the_old_one_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a"
    fill(out, "old")
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if ".building-" in path.name:
            raise OSError(errno.EIO, "Input/output error")
        if ".replaced-" in path.name:
            fill(out, "another build")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OperationError, match=r"cannot publish .*Input/output error"):
        publish(out, force=True)
    assert (out / "mark").read_text() == "another build"
    assert os.listdir(tmp_path) == ["a"]
