"""The two-device program, as written for torchrun: each of two gloo processes makes its rows, the first prints all."""

import torch
from torch import distributed

distributed.init_process_group("gloo")
rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
mine = torch.rand(4 // num_ranks, 3)
rows = [torch.empty_like(mine) for _ in range(num_ranks)]
distributed.all_gather(rows, mine)
if rank == 0:
    print(torch.cat(rows))
distributed.destroy_process_group()
