"""Run the command line as `python -m slipstream.cli`."""

from __future__ import annotations

import sys

from slipstream.cli import main

sys.exit(main())
