"""The command group, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import click

from m3compile.cli.bench import bench
from m3compile.cli.build import build
from m3compile.cli.calibrate import calibrate
from m3compile.cli.checkpoint import init_checkpoint
from m3compile.cli.embed import embed
from m3compile.cli.encode import encode
from m3compile.cli.export_onnx import export_onnx
from m3compile.cli.inspect import inspect
from m3compile.cli.plan import plan
from m3compile.cli.serve import serve
from m3compile.cli.verify import verify
from m3compile.errors import ExitCode, M3CompileError
from m3compile.version import VERSION


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION, prog_name="m3compile")
def app() -> None:
    """Ahead-of-time compiler and loader for the MiniMax-M3 vision encoder.

    Every command also takes --debug, which adds the traceback to an error.
    """


COMMANDS = (
    build,
    verify,
    inspect,
    encode,
    serve,
    embed,
    bench,
    plan,
    calibrate,
    export_onnx,
    init_checkpoint,
)
for command in COMMANDS:
    app.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code of the contract. Prints, never exits."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"] or ["--help"]
    with warnings.catch_warnings(), _unwinding(signal.SIGTERM, signal.SIGHUP):
        if not debug:
            # torch warns about its own internals while it traces and compiles.
            warnings.simplefilter("ignore")
        return _run(words, debug)


def _run(words: list[str], debug: bool) -> int:
    try:
        result = app.main(args=words, prog_name="m3compile", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        return _fail(_usage(error), ExitCode.REQUEST, debug)
    except M3CompileError as error:
        return _fail(str(error), error.exit_code, debug)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", ExitCode.INTERRUPTED, debug)
    except (BrokenPipeError, SystemExit):
        # The reader of our output left (click exits by itself then); there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except MemoryError:
        return _fail("out of memory", ExitCode.FAILED, debug)
    except Exception as error:  # noqa: BLE001 (the outermost door: a fault of ours is still one line)
        kind = type(error).__name__
        return _fail(f"{kind}: {error} (--debug shows where)", ExitCode.FAILED, debug)
    return int(result) if isinstance(result, int) else ExitCode.OK


@contextmanager
def _unwinding(*signals: signal.Signals) -> Iterator[None]:
    """Let signals unwind like Ctrl-C, so that half-written folders are removed."""
    # Elsewhere handlers cannot be set; and whoever set one already (nohup does) is not overruled.
    is_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in signals if is_main and signal.getsignal(number) is signal.SIG_DFL]

    def interrupt(signum: int, frame: FrameType | None) -> None:
        for number in ours:
            # A second one must not cut the clean-up short.
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _usage(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    return error.format_message() + hint


def _fail(message: str, code: ExitCode, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    line = " ".join(message.split())
    # A file's content is quoted in messages; it must not steer the terminal.
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    print(f"error: {shown}", file=sys.stderr)
    return code
