"""The head's metrics for Prometheus (text format 0.0.4). Labels are names of tenants and of workers, and never grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from dtorch.cluster.ledger import OTHERS, Totals
from dtorch.cluster.meter import DETECTION_BUCKETS_S

if TYPE_CHECKING:
    from dtorch.cluster.head import Head

MAX_LABELS = 200
"""Tenants, and workers, that have a series of their own. The rest is one series together."""


def metrics(head: Head) -> bytes:
    """What /metrics answers with."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(head))
    return generate_latest(registry)


class _Collector:
    """Reads the head's state when it is asked."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def collect(self) -> Iterator[Metric]:
        meter = self._head.meter
        meter.ledger.advance(meter.now())
        yield from self._of_workers()
        yield from self._of_tenants()
        whole = meter.ledger.sum()
        repeated = CounterMetricFamily("dtorch_recomputed_ops", "Calls executed again after a worker was lost")
        repeated.add_metric([], whole.repeated_ops)
        yield repeated
        lost = CounterMetricFamily("dtorch_workers_lost", "Workers that went unasked")
        lost.add_metric([], meter.num_lost)
        yield lost
        detection = HistogramMetricFamily(
            "dtorch_failure_detection_seconds", "From the last sign of life of a worker until it counts as lost"
        )
        so_far, buckets = 0, []
        for bound, count in zip((*map(str, DETECTION_BUCKETS_S), "+Inf"), meter.detection_counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        detection.add_metric([], buckets, meter.detection_s)
        yield detection

    def _of_workers(self) -> Iterator[Metric]:
        head, meter = self._head, self._head.meter
        up = GaugeMetricFamily("dtorch_worker_up", "1: connected; 0: its connection broke, or it was lost", labels=["worker"])
        busy = GaugeMetricFamily("dtorch_worker_utilization", "Part of the last second that it was busy", labels=["worker"])
        memory = GaugeMetricFamily("dtorch_worker_memory_bytes", "Memory of the process", labels=["worker"])
        held = GaugeMetricFamily("dtorch_worker_held_bytes", "Held by tensors on it", labels=["worker"])
        ends = list(head.workers.values())
        names = {end.member.name for end in ends}
        for end in ends[:MAX_LABELS]:
            label = [end.member.name]
            up.add_metric(label, float(end.link.connected))
            load = meter.loads.get(end.number)
            if load is not None:
                busy.add_metric(label, load.share)
                memory.add_metric(label, load.process_bytes)
                held.add_metric(label, sum(device.held_bytes for device in load.devices.values()))
        if len(ends) > MAX_LABELS:
            up.add_metric([OTHERS], sum(end.link.connected for end in ends[MAX_LABELS:]))
        for name in dict.fromkeys(meter.lost):
            if name not in names:
                up.add_metric([name], 0.0)
        yield from (up, busy, memory, held)
        total = CounterMetricFamily("dtorch_worker_busy_seconds", "All workers' busy time, as they measure it themselves")
        total.add_metric([], meter.busy_s)
        yield total

    def _of_tenants(self) -> Iterator[Metric]:
        head, ledger = self._head, self._head.meter.ledger
        kinds: dict[str, tuple[str, Callable[[Totals], float]]] = {
            "device_seconds": ("Time that workers' devices were had", lambda t: t.device_s),
            "repeated_device_seconds": ("The same, for work done again after a loss; not billed", lambda t: t.repeated_s),
            "byte_seconds": ("Bytes held by tensors, times how long", lambda t: t.byte_s),
            "uploaded_bytes": ("From clients to workers", lambda t: t.uploaded_bytes),
            "fetched_bytes": ("From workers to clients", lambda t: t.fetched_bytes),
            "exchanged_bytes": ("Between devices", lambda t: t.exchanged_bytes),
            "ops": ("Calls executed", lambda t: t.num_ops),
        }
        tenants = _bounded(ledger.tenants)
        for name, (text, value) in kinds.items():
            family = CounterMetricFamily(f"dtorch_{name}", text, labels=["tenant"])
            for tenant, totals in tenants.items():
                family.add_metric([tenant], value(totals))
            yield family
        held = GaugeMetricFamily("dtorch_held_bytes", "Held by tensors now", labels=["tenant"])
        sums: dict[str, int] = {}
        for tenant, size in ledger.held_bytes().items():
            tenant = tenant if tenant in tenants else OTHERS
            sums[tenant] = sums.get(tenant, 0) + size
        for tenant, size in sums.items():
            held.add_metric([tenant], size)
        yield held
        sessions = GaugeMetricFamily("dtorch_sessions", "Sessions that are open")
        sessions.add_metric([], len(head.sessions))
        yield sessions


def _bounded(tenants: dict[str, Totals]) -> dict[str, Totals]:
    """The first tenants by themselves, the rest as one: a series must not change its meaning, so the oldest stay."""
    found: dict[str, Totals] = {}
    rest = Totals()
    for name, totals in tenants.items():
        if len(found) < MAX_LABELS and name != OTHERS:
            found[name] = totals
        else:
            rest.add(totals)
    if not rest.is_nothing:
        found[OTHERS] = rest
    return found
