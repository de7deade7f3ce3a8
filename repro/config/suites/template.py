"""`repro init`: a suite to begin with, written where a person wants it."""

from __future__ import annotations

import json
from pathlib import Path

from repro.config.errors import require
from repro.config.files import check_writable
from repro.config.sizes import check_name
from repro.config.suites.read import Suite, load
from repro.util import files

TEMPLATE = Path(__file__).parent / "template.toml"


def write(path: Path) -> Suite:
    """Write the commented suite to `path`, named as the file.  Raises `ConfigError`; a file that is there stays."""
    require(path.suffix == ".toml", "FILE", str(path), "a file that ends in .toml")
    require(not path.exists(), "FILE", str(path), says="is there already; it is not overwritten")
    check_name("FILE", path.stem)
    check_writable("FILE", path)
    text = TEMPLATE.read_text(encoding="utf-8").replace("FILE", str(path))
    files.replace_file(path, text.replace('name = "NAME"', f"name = {json.dumps(path.stem)}"))
    return load(path)
