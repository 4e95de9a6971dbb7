"""What a batch costs the controller: python examples/benchmarks/scaling.py [--json FILE]

The real controller and codec, on batches of a mesh over 1 to 1000 workers that execute nothing: each batch is submitted,
its frames are decoded as a worker would (once, for all get the same bytes), and every worker answers that it is done. Time of
the controller alone, per batch and per send, for batches of few and of many calls: it should grow with the sends and not with
the calls.
"""

from __future__ import annotations

import argparse
import time

import msgspec
from report import Row, add_json_option, print_machine, print_table, table_output, write_json
from timing import Samples

from dtorch.runtime.controller import Controller, Finished, Joined, Received, Send, Submitted
from dtorch.runtime.outgoing import Outgoing
from dtorch.transport import codec
from dtorch.transport.messages import Batch, Definition, Done, Layout, MeshInfo


def batch(seq: int, num_calls: int, mesh: MeshInfo | None = None) -> Outgoing:
    calls = [(1, i % 64, (i + 1) % 64, (i + 2) % 64) for i in range(num_calls)]
    layout = Layout(1, (4096, 4096), "float32", (0,))
    two = [["t", 0], ["t", 1]]
    definition = Definition(1, "torch.add", "local", two, {}, (layout, layout), (layout,))
    first = mesh is not None
    return Outgoing(
        seq, msgspec.msgpack.encode((calls, [])), calls, (mesh,) if mesh is not None else (),
        (definition,) if first else (), (), (), (), (),
    )


def measure(num_workers: int, num_calls: int, num_batches: int) -> tuple[list[float], int]:
    """Microseconds of the controller for each batch, and frames sent for each."""
    controller = Controller(1, frozenset())
    mesh = MeshInfo(1, "cpu", (num_workers,), tuple(range(num_workers)))
    controller.handle(Submitted(batch(1, num_calls, mesh)))
    for worker in controller.workers:
        controller.handle(Joined(worker))
        controller.handle(Received(worker, Done(1, 1, 0)))
    taken, num_sends = [], 0
    for seq in range(2, num_batches + 2):
        out = batch(seq, num_calls)
        start = time.perf_counter()
        instructions = controller.handle(Submitted(out))
        took = time.perf_counter() - start
        sends = [i for i in instructions if isinstance(i, Send)]
        num_sends = len(sends)
        message = codec.decode_to_worker(sends[0].frame)
        assert isinstance(message, Batch)
        answer = codec.encode(Done(1, message.seq, 0))
        finished = False
        start = time.perf_counter()
        for send in sends:
            done = codec.decode_from_worker(answer)
            finished = any(isinstance(i, Finished) for i in controller.handle(Received(send.worker, done)))
        took += time.perf_counter() - start
        assert finished
        taken.append(took * 1e6)
    return taken, num_sends


def main() -> None:
    parser = argparse.ArgumentParser(description="What a batch costs the controller, for 1 to 1000 workers.")
    add_json_option(parser)
    parser.add_argument("--batches", type=int, default=30, help="of each kind (%(default)s)")
    args = parser.parse_args()
    out = table_output(args.json)
    facts = print_machine(out)
    rows = []
    for num_workers in (1, 10, 100, 1000):
        for num_calls in (64, 1024):
            taken, num_sends = measure(num_workers, num_calls, args.batches)
            samples = Samples(taken)
            note = f"best {samples.best:.1f}, {samples.best / num_sends:.2f} us a send"
            name = f"controller, batch of {num_calls} calls, {num_workers} workers"
            rows.append(Row(name, "us", samples.median, note, samples={"dtorch": samples}))
    print_table(rows, {}, out)
    write_json(args.json, facts, rows)


if __name__ == "__main__":
    main()
