"""What people and programs can see of a head: a page, a JSON API, metrics.

    GET /                            the dashboard, one page without anything of anybody in it; needs no key
    GET /metrics                     for Prometheus; a key of the role "admin", or none where the head is told so
    GET /api/v1/overview             counts, and rates of the last minutes; "admin"
    GET /api/v1/devices              memory and utilisation of every device; "admin"
    GET /api/v1/failures             the newest first; "admin"
    GET /api/v1/ops                  calls by op, and the lines that send most; "admin", or of the key's own name
    GET /api/v1/sessions[?ended=1]   open ones, or those that have ended; "admin", or of the key's own name
    GET /api/v1/usage[?tenant=NAME]  what was used, by tenant; "admin", or of the key's own name
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from dtorch.cluster.keys import Key
from dtorch.cluster.ledger import Entry, Totals

if TYPE_CHECKING:
    from dtorch.cluster.head import Head

KEY = web.RequestKey("key", Key)
API = "/api/v1/"
FOR_ADMINS = frozenset({"overview", "devices", "failures"})
MAX_ROWS = 100
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def role_for(path: str, open_metrics: bool = False) -> str | None:
    """The role that a path of this file asks for: "admin", "nobody" (no key at all), or None (any, or not of this file)."""
    if path == "/" or (path == "/metrics" and open_metrics):
        return "nobody"
    if path == "/metrics" or path.removeprefix(API) in FOR_ADMINS:
        return "admin"
    return None


class Sight:
    """Reads a head's state; changes nothing."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._page = files("dtorch.cluster").joinpath("dashboard.html").read_bytes()

    def routes(self) -> list[web.RouteDef]:
        answers = {
            "overview": self.overview, "devices": self.devices, "failures": self.failures, "ops": self.ops,
            "sessions": self.sessions, "usage": self.usage,
        }  # fmt: skip
        routes = [web.get(API + name, _answering(answer)) for name, answer in answers.items()]
        return [web.get("/", self._dashboard), web.get("/metrics", self._metrics), *routes]

    async def _dashboard(self, _: web.Request) -> web.Response:
        return web.Response(body=self._page, content_type="text/html", charset="utf-8", headers=_HEADERS)

    async def _metrics(self, _: web.Request) -> web.Response:
        from dtorch.cluster.metrics import metrics

        text = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=metrics(self._head), headers={"Content-Type": text, "Cache-Control": "no-store"})

    # ---- JSON; each takes the tenant that may be seen (None: all) and the query

    def overview(self, _: str | None, __: Any) -> Any:
        head, meter = self._head, self._head.meter
        meter.ledger.advance(meter.now())
        whole = meter.ledger.sum()
        return {
            "url": head.url, "now": meter.now(), "since": head.started, "num_workers": len(head.workers),
            "num_sessions": len(head.sessions), "devices": head.pool.counts(), "used": totals(whole),
            "busy_s": meter.busy_s, "num_workers_lost": meter.num_lost, "rates": list(meter.rates),
        }  # fmt: skip

    def devices(self, _: str | None, __: Any) -> Any:
        head = self._head
        rows = []
        for end in head.workers.values():
            load = head.meter.loads.get(end.number)
            for device, sessions in end.member.used.items():
                told = None if load is None else load.devices.get(device)
                rows.append({
                    "device": f"{device[0]}:{device[1]}",
                    "worker": end.member.name,
                    "number": end.number,
                    "labels": end.member.labels,
                    "state": "draining" if end.member.draining else "up" if end.link.connected else "reconnecting",
                    "sessions": sorted(sessions),
                    "held_bytes": 0 if told is None else told.held_bytes,
                    "capacity_bytes": 0 if told is None else told.capacity_bytes,
                    "utilization": 0.0 if load is None else round(load.share, 4),
                    "process_bytes": 0 if load is None else load.process_bytes,
                })
        return rows

    def failures(self, _: str | None, __: Any) -> Any:
        return list(reversed(self._head.meter.troubles))

    def sessions(self, tenant: str | None, query: Any) -> Any:
        head, meter = self._head, self._head.meter
        meter.ledger.advance(meter.now())
        wants_ended = query.get("ended", "") not in ("", "0")
        rows = []
        for entry in meter.ledger.sessions.values():
            if (tenant is not None and entry.tenant != tenant) or (entry.closed is not None) != wants_ended:
                continue
            row = _session(entry)
            tenancy = head.sessions.get(entry.session)
            if tenancy is not None:
                num_devices, _, num_ops = tenancy.account.use_of(entry.session)
                state = "connected" if tenancy.link.connected else "reconnecting"
                row |= {"devices": num_devices, "ops_in_flight": num_ops, "state": state}
            rows.append(row)
        return rows[::-1][:1000]

    def usage(self, tenant: str | None, query: Any) -> Any:
        meter = self._head.meter
        meter.ledger.advance(meter.now())
        wanted = query.get("tenant", "")
        held = meter.ledger.held_bytes()
        return [
            {"tenant": name, "held_bytes": held[name], **totals(used)}
            for name, used in meter.ledger.tenants.items()
            if (tenant is None or name == tenant) and (not wanted or name == wanted)
        ]

    def ops(self, tenant: str | None, _: Any) -> Any:
        meter = self._head.meter
        counts: dict[str, int] = {}
        for name, used in meter.ledger.tenants.items():
            for op, count in used.ops.items() if tenant in (None, name) else ():
                counts[op] = counts.get(op, 0) + count
        top = sorted(counts.items(), key=lambda item: -item[1])[:MAX_ROWS]
        lines = [line for line in meter.traffic.values() if tenant in (None, line.tenant)]
        lines.sort(key=lambda line: -line.size_bytes)
        return {
            "calls": [{"op": op, "num_calls": count} for op, count in top],
            "traffic": [
                {
                    "session": line.session, "tenant": line.tenant, "op": line.op, "where": line.where,
                    "num_calls": line.num_calls, "sent_bytes": line.size_bytes,
                    "bytes_per_step": round(line.step_bytes, 1), "hint": line.hint,
                }
                for line in lines[:MAX_ROWS]
            ],
        }  # fmt: skip


def totals(used: Totals) -> dict[str, Any]:
    """Of a tenant or a session, for JSON."""
    facts = msgspec.structs.asdict(used)
    return {
        "device_seconds": facts.pop("device_s"), "repeated_device_seconds": facts.pop("repeated_s"),
        "byte_seconds": facts.pop("byte_s"), "num_ops": used.num_ops, **facts,
        "ops": dict(sorted(used.ops.items(), key=lambda item: -item[1])),
    }  # fmt: skip


def _session(entry: Entry) -> dict[str, Any]:
    return {
        "number": entry.session, "tenant": entry.tenant, "name": entry.name, "opened": entry.opened,
        "closed": entry.closed, "held_bytes": entry.held_bytes, **totals(entry.totals),
    }  # fmt: skip


def _answering(answer: Any) -> Any:
    async def handle(request: web.Request) -> web.Response:
        key = request[KEY]
        if key.role == "worker":
            raise web.HTTPForbidden(text="a worker's key sees nothing of what clients do")
        facts: Iterable[Any] = answer(None if key.role == "admin" else key.name, request.query)
        body = msgspec.json.encode(facts)
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})

    return handle
