"""`python -m penstock` is the `penstock` command."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the working folder, which may be a downloaded model: its modules must not run

from penstock.cli.main import main

main()
