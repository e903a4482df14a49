"""How commands speak: results on stdout, errors as one red line on stderr, exit codes that mean something.

0    done
1    the run failed, or something went wrong on the way
2    wrong input: the line names the key and the fix; nothing was started
3    no gateway, broker or Redis answers
130  interrupted
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

T = TypeVar("T")
FAILED, WRONG_INPUT, UNREACHABLE, INTERRUPTED = 1, 2, 3, 130

Url = Annotated[
    str,
    typer.Option(envvar="ROLLART_URL", help="Address of the gateway; default: the stack on this machine."),
]
Key = Annotated[str, typer.Option(envvar="ROLLART_KEY", help="Bearer key of the gateway.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def console() -> Console:
    """stdout for people; into a pipe or a file lines are not cut at a width that no one sees."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def show_error(text: str) -> None:
    """One red line on stderr."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(f"error: {text}", style="red"))


def report(error: BaseException) -> int:
    """Say what went wrong and return the exit code."""
    import tempfile
    import traceback

    from shared.errors import Invalid, RollArtError, Unavailable

    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, Invalid) and error.fields:
        for problem in error.fields:
            # Plug-in errors repeat the name of the field in their text.
            show_error(f"{problem.field}: {problem.message.removeprefix(f'{problem.field}: ')}")
        return WRONG_INPUT
    if isinstance(error, RollArtError):
        show_error(error.message)
        if isinstance(error, Invalid):
            return WRONG_INPUT
        return UNREACHABLE if isinstance(error, Unavailable) else FAILED
    with tempfile.NamedTemporaryFile(
        "w", prefix="rollart-error-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        traceback.print_exception(error, file=file)
    first = (str(error).splitlines() or [""])[0]
    show_error(f"unexpected {type(error).__name__}: {first} (details in {file.name})")
    return FAILED


def run_async(work: Coroutine[object, object, T]) -> T:
    """Run a command's coroutine; Ctrl-C cancels it, lets it clean up and raises KeyboardInterrupt."""
    import asyncio

    return asyncio.run(work)


def log_to(path: Path) -> None:
    """Send this process's own log to a file in the state folder: the terminal belongs to the display.

    Raises Invalid where it cannot be written.
    """
    import structlog

    from shared.errors import Invalid

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise Invalid(
            f"cannot write to {path}: {error.strerror}; set ROLLART_STATE_DIR to another folder"
        ) from error
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=file),
    )


def write_line(text: str) -> None:
    """One line on stdout, flushed: a pipe sees it at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
