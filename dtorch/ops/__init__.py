"""The op table, one file per family. Importing this package fills it.

``table.py`` holds the rows, ``_op.py`` records a call, ``_call.py``/``_choose.py``/``_rules.py`` decide placements, the
other files are families of rows. To add an op, add a row to its family.
"""

from __future__ import annotations

from dtorch.ops import attention, conv, diagonal, embedding, matmul, norm, pointwise, pool, reduce, rows, sort, view  # noqa: F401
from dtorch.ops import foreach, index, join, moe, random, rare, recurrent, scatter, shapes  # noqa: F401  (built on view)
from dtorch.ops import multihead  # noqa: F401  (this one on a row of rare)
from dtorch.ops import copies, fft, linalg  # noqa: F401  (torch.*_copy, torch.fft, torch.linalg)
from dtorch.ops import _fallback, _methods  # noqa: F401  (last: makes methods of what is there)

