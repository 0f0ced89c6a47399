"""Runs the `penstock` command for `python -m penstock`."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the working folder may be a downloaded model, whose modules must not be imported

from penstock.cli.main import main

main()
