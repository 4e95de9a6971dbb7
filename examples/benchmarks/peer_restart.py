"""A rank of a torchrun job for cluster.py: in the first attempt rank 1 kills itself, in the second all meet, and it is over.

Appends times, in seconds since 1970, to the file named: one of the kill, then one for each rank that has met the others.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch.distributed as dist


def note() -> None:
    with open(sys.argv[1], "a", encoding="ascii") as file:
        file.write(f"{time.time()!r}\n")


dist.init_process_group("gloo")
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if dist.get_rank() == 1:
        note()
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
note()
dist.barrier()
dist.destroy_process_group()
