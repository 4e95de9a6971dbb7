"""``python -m dtorch``: see ``dtorch.cli``."""

from __future__ import annotations

from dtorch.cli import main

raise SystemExit(main())
