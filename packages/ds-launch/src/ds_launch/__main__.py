"""``python -m ds_launch`` is the ``ds`` command."""

from __future__ import annotations

import sys

from ds_launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
