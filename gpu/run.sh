#!/usr/bin/env bash
# Start `repro gpu-day` from an unpacked kit. It needs bash and the Python that the kit was made for, with torch.
#
#     gpu/run.sh --minutes 9 --out DIR          PYTHON=/path/to/python gpu/run.sh --dry-run
#
# The folder of the kit may be read-only: the source and the wheels are copied to a temporary folder (TMPDIR), which
# also takes every cache and is deleted at the end. The results go to DIR alone.
set -euo pipefail
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exec "${PYTHON:-python3}" -B "$kit/gpu/start.py" "$@"
