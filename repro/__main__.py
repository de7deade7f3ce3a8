"""`python -m repro`: the `repro` command of this interpreter."""

import sys

from repro.cli import main

sys.exit(main())
