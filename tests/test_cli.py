"""The command line as a whole, `inspect` and `init-checkpoint`: exit codes are
compared with the contract's, errors with one line on stderr, JSON with the files it stands for.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN_CHECKPOINT
from crafted import copy, edited, redigest, rewrite
from terminal import Refused, Run, Terminal

from m3compile import errors
from m3compile.cli import app as app_module
from m3compile.cli.app import app, main
from m3compile.config import TINY, TowerConfig
from m3compile.errors import ExitCode, M3CompileError
from m3compile.version import VERSION


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Terminal(capsys).run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Terminal(capsys).refused


def process(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "m3compile", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


# The whole.


def test_nothing_asked_shows_help(run: Run) -> None:
    for words in ((), ("--help",), ("-h",), ("--debug",)):
        code, out, err = run(*words)
        assert (code, err) == (0, "")
        assert out.startswith("Usage: m3compile")


@pytest.mark.parametrize("name", sorted(app.commands))
def test_help_of_a_command(run: Run, name: str) -> None:
    code, out, err = run(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: m3compile {name}")


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"m3compile, version {VERSION}\n", "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nothing",), "nothing"),
        (("--nothing",), "--nothing"),
        (("inspect",), "Missing argument 'ARTIFACT'"),
        (("inspect", "a", "b"), "b"),
        (("verify", "a", "--checkpint", "b"), "--checkpint"),
        (("init-checkpoint", "x", "--preset", "huge"), "huge"),
        (("init-checkpoint", "x", "--seed", "-1"), "-1"),
        (("encode", "x", "--input", "y"), "--output"),
        (("encode", "x", "--output", "y"), "--input"),
    ],
)
def test_a_command_line_that_is_none(refused: Refused, words: tuple[str, ...], says: str) -> None:
    line = refused(2, *words)
    assert says in line
    assert "--help)" in line


ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, M3CompileError)
]


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let `inspect` fail like this."""

    def fail(folder: Path) -> None:
        raise error

    monkeypatch.setattr("m3compile.cli.inspect.read_manifest", fail)


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_ours(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, kind: type[M3CompileError]
) -> None:
    raising(monkeypatch, kind("found this, expected that"))
    assert refused(kind.exit_code, "inspect", "x") == "error: found this, expected that"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyError("x"), 4, "error: KeyError: 'x' (--debug shows where)"),
        (RuntimeError("a\n  b"), 4, "error: RuntimeError: a b (--debug shows where)"),
        (OSError(28, "No space left"), 4, "error: OSError: [Errno 28] No space left (--debug"),
        (AssertionError(), 4, "error: AssertionError"),
        (MemoryError(), 4, "error: out of memory"),
        (RecursionError("deep"), 4, "error: RecursionError"),
    ],
)
def test_an_error_that_nobody_expected(
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    line: str,
) -> None:
    raising(monkeypatch, error)
    assert refused(code, "inspect", "x").startswith(line)


def test_an_interrupt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    code, out, err = run("inspect", "x")
    assert (code, out, err.strip()) == (ExitCode.INTERRUPTED, "", "error: interrupted")


def test_a_message_cannot_steer_the_terminal(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(monkeypatch, errors.ArtifactDamagedError("a\x1b[31m\r\nb\x00\u202ec"))
    assert refused(3, "inspect", "x") == r"error: a\x1b[31m b\x00\u202ec"


@pytest.mark.parametrize("at", range(3))
def test_debug_stands_anywhere(run: Run, at: int) -> None:
    words = ["inspect", "/no/such/folder"]
    words.insert(at, "--debug")
    code, out, err = run(*words)
    assert (code, out) == (3, "")
    assert "Traceback (most recent call last)" in err
    assert "in read_manifest" in err
    assert err.splitlines()[-1] == "error: /no/such/folder: no such artifact folder"


def test_signals_are_as_they_were_afterwards(run: Run) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    run("inspect", "/no/such/folder")
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    assert before == after


def test_a_handler_of_someone_else_is_left_alone() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with app_module._unwinding(signal.SIGTERM):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_reader_that_leaves(golden_artifact: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "m3compile", "inspect", str(golden_artifact), "--json"]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    # Not 1, which would say that a verification failed.
    assert (result.returncode, result.stderr) == (ExitCode.FAILED, "")


# inspect.


def test_inspect_shows_what_matters(run: Run, golden_artifact: Path) -> None:
    code, out, err = run("inspect", golden_artifact)
    assert (code, err) == (0, "")
    for part in (
        "0.9 M parameters, float32, embeddings 96 wide",
        f"weights from    {GOLDEN_CHECKPOINT.resolve()}\n",
        "engine          aoti",
        "TORCH_SDPA",
        "16 64 256 576 tokens, at most 32 segments",
        "routes within bounds",
        "encoder.pt2",
        "weights.safetensors",
    ):
        assert part in out


def test_inspect_json_is_the_manifest(run: Run, golden_artifact: Path) -> None:
    code, out, err = run("inspect", golden_artifact, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads((golden_artifact / "manifest.json").read_text())


@pytest.mark.parametrize(
    ("checkpoint", "says"),
    [
        (None, "random numbers: its embeddings mean nothing"),
        ("/some/where", "/some/where (random numbers: its embeddings mean nothing)"),
    ],
)
def test_inspect_says_that_weights_are_random(
    run: Run, golden_artifact: Path, tmp_path: Path, checkpoint: str | None, says: str
) -> None:
    folder = copy(golden_artifact, tmp_path / "a")
    with edited(folder) as manifest:
        manifest["provenance"].update(weights="random", checkpoint=checkpoint)
    code, out, _ = run("inspect", folder)
    assert code == 0
    assert f"weights from    {says}\n" in out


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"summary": 1}'])
def test_inspect_refuses_a_report_that_is_none(
    refused: Refused, golden_artifact: Path, tmp_path: Path, data: bytes
) -> None:
    folder = copy(golden_artifact, tmp_path / "a")
    rewrite(folder, "verify.json", data)
    assert "verify.json" in refused(3, "inspect", folder)
    # Not part of the artifact, it is not read.
    with edited(folder) as manifest:
        del manifest["files"]["verify.json"]
    redigest(folder)
    assert main(["inspect", str(folder)]) == 0


def test_inspect_never_imports_torch(golden_artifact: Path) -> None:
    code = (
        "import sys; from m3compile.cli.app import main; "
        "print(main(['inspect', sys.argv[1]]), 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, golden_artifact], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "0 False False"


def test_a_damaged_artifact_in_a_true_process(golden_artifact: Path, tmp_path: Path) -> None:
    folder = copy(golden_artifact, tmp_path / "a")
    os.truncate(folder / "encoder.pt2", 1000)
    size = (golden_artifact / "encoder.pt2").stat().st_size
    result = process("inspect", folder)
    assert (result.returncode, result.stdout) == (3, "")
    expected = f"error: {folder / 'encoder.pt2'}: found 1000 bytes, expected {size}\n"
    assert result.stderr == expected


# init-checkpoint.


def test_init_checkpoint(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("init-checkpoint", tmp_path / "a", "--seed", 3)
    assert code == 0
    assert out == f"Wrote {tmp_path / 'a'} (tiny, seed 3, random weights)\n"
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert config["m3compile_random_weights"] is True
    assert config["vision_config"]["hidden_size"] == TINY.hidden_size


def test_seeds_of_init_checkpoint(run: Run, tmp_path: Path) -> None:
    seeds = {"a": 0, "b": 0, "c": 1}
    for name, seed in seeds.items():
        assert run("init-checkpoint", tmp_path / name, "--seed", seed)[0] == 0
    a, b, c = (
        [path.read_bytes() for path in sorted((tmp_path / name).glob("*.safetensors"))]
        for name in seeds
    )
    assert a == b
    assert a != c


def test_presets_of_init_checkpoint(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[TowerConfig] = []
    monkeypatch.setattr(
        "m3compile.weights.init_checkpoint", lambda path, config, **options: written.append(config)
    )
    for preset in ("tiny", "full"):
        assert run("init-checkpoint", tmp_path / "a", "--preset", preset)[0] == 0
    assert written == [TINY, TowerConfig()]


def test_init_checkpoint_spares_what_is_there(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    assert "is not empty (it holds mine.txt)" in refused(2, "init-checkpoint", tmp_path)
    assert "is a file" in refused(2, "init-checkpoint", tmp_path / "mine.txt")
    assert "cannot be written" in refused(4, "init-checkpoint", tmp_path / "mine.txt/a")
    assert os.listdir(tmp_path) == ["mine.txt"]
