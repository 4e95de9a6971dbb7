"""A Ray cluster of several nodes on this machine, for as long as standard input stays open. Not in the tests' own process:
Ray leaves threads and descriptors there.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def main(num_nodes: int) -> None:
    from ray.cluster_utils import Cluster

    # No worker process is started before somebody asks for it, and no dashboard.
    common = {"num_cpus": 2, "object_store_memory": 80 * 1024 * 1024, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**common, "resources": {"host_0": 1}})
    try:
        for number in range(1, num_nodes):
            cluster.add_node(**common, resources={f"host_{number}": 1})
        cluster.wait_for_nodes()
        print(json.dumps({"address": cluster.address}), flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
