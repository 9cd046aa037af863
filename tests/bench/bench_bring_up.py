"""What a controller needs to start a gang on Ray, and to find why the ranks of a dead node ended, by its size.

    python tests/bench/bench_bring_up.py [--nodes 16 600 2048] [--tensor 8]

The gang, its worker groups and their decisions are the product's own code. Ray is a stand-in: it grants placement
groups one after the other (1 ms each), its actors are ready 0.5 s after, and nothing else takes time, except what a
dead node does not answer. Only waits advance the clock, so no figure but the processor's depends on the machine. The
figures are what the controller adds: its seconds beyond those that Ray takes, how often it asks for all nodes, and the
bytes of configuration that it sends. A node has room for 8 ranks, and `--tensor` of them must share one; the
configuration names a snapshot server on each node. `--apart` makes the smallest groups, as earlier versions did.
"""

from __future__ import annotations

import argparse
import time

import paths  # noqa: F401
from stand_in_ray import GRANT, READY, stand_in_ray

from cluster.workers import ray_gang
from cluster.workers.gang import Bundle, RankStatus
from cluster.workers.ray_gang import RayGang

RANKS = 8


def measured(nodes: int, tensor: int) -> str:
    with stand_in_ray(nodes, RANKS) as of:
        gang = RayGang()
        config = {"servers": [f"10.0.{number // 256}.{number % 256}:40000" for number in range(nodes)]}
        cpu, began = time.process_time(), of.clock.monotonic()
        gang.start(nodes * RANKS, Bundle(cpu=1), "module:function", config, ranks_per_group=tensor)
        cpu, seconds = time.process_time() - cpu, of.clock.monotonic() - began
        dead = of.names[1]
        of.dead = {dead}
        ranks = [number for number, (group, _) in enumerate(gang._slots) if group.locations[0][0] == dead]
        began = of.clock.monotonic()
        for number in ranks:
            assert gang._cause(RankStatus(number, dead, 1, "dead"))[0].end == "lost"
        lost = of.clock.monotonic() - began
        gang._heartbeats.close()
    return (
        f"{nodes:5} nodes, {nodes * RANKS:6} ranks: {of.actors:5} actors, up in {seconds:.2f} s, of which Ray takes "
        f"{of.actors * GRANT + READY:.2f} s; {cpu:.2f} s of a processor, "
        f"{of.queries} queries of all nodes, {of.sent / 1e6:.2f} MB sent; "
        f"{len(ranks)} ranks of a dead node explained in {lost:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="*", default=[16, 600, 2048])
    parser.add_argument("--tensor", type=int, default=RANKS)
    parser.add_argument("--apart", action="store_true")
    asked = parser.parse_args()
    if asked.apart:
        ray_gang.group_sizes = lambda workers, room, together: [together] * (workers // together)
    for nodes in asked.nodes:
        print(measured(nodes, asked.tensor), flush=True)


if __name__ == "__main__":
    main()
