"""The `rollart` command. `python -m services.cli` is the same.

Commands live in `services.commands`; what they need is imported when they run, so that `--help` is quick.
"""

from __future__ import annotations

import signal
import sys

import typer

from services.commands import bench, inspect, rollouts, runs, stack
from services.commands.output import report

app = typer.Typer(
    name="rollart",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train language-model agents by reinforcement learning on mixed hardware.\n\n"
    "Example: rollart run recipes/quickstart.toml",
)
for group in (stack, runs, rollouts, inspect, bench):
    group.register(app)


def main() -> None:
    """Run a command; every error is one line, every exit code means something (`commands.output`)."""
    # Until a launcher or a host takes the signals over, SIGTERM means what Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(report(error))


if __name__ == "__main__":
    main()
