"""The two-device program, as written for dtorch."""

import dtorch
from dtorch import DeviceMesh, Shard

print(dtorch.rand((4, 3), device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Shard(0)]))
