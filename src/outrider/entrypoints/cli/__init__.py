"""The command line, `outrider`: one module for each command."""

from outrider.entrypoints.cli.app import main

__all__ = ["main"]
