"""Entry point of `python -m repro`, which runs the command `repro` with the current Python interpreter."""

import sys

from repro.cli import main

sys.exit(main())
