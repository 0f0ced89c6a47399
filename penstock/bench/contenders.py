"""The servers of a comparison: their flags and their runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.bench.options import BackendName, ClientOptions, CompareOptions, ServerOptions
from penstock.bench.prepare import Prepared
from penstock.bench.run import Run
from penstock.bench.servers import Server
from penstock.errors import BadValue


@dataclass(slots=True, eq=False)
class Contender:
    name: str
    options: ServerOptions
    server: Server | None = None  # None: already running
    load: Prepared | None = None
    runs: list[Run] = field(default_factory=list)

    def values(self, figure: str) -> list[float]:
        """One value for each run; `median_e2el` and `p99_e2el` are in milliseconds."""
        return [_figure(run, figure) for run in self.runs]


def contenders_of(client: ClientOptions, compare: CompareOptions) -> list[Contender]:
    urls = pairs(compare.server, "--server")
    if len(urls) < 2:
        raise BadValue("give at least two servers: --server NAME=URL NAME=URL", param="server")
    others = {
        "--start": pairs(compare.start, "--start"),
        "--server-backend": pairs(compare.server_backend, "--server-backend"),
        "--server-endpoint": pairs(compare.server_endpoint, "--server-endpoint"),
        "--server-model": pairs(compare.server_model, "--server-model"),
    }
    for flag, found in others.items():
        if unknown := [name for name in found if name not in urls]:
            raise BadValue(f"{flag} {unknown[0]}: there is no --server of that name")
    shared = {name: getattr(client, name) for name in client.__struct_fields__}
    contenders = []
    for name, url in urls.items():
        backend = _backend(others["--server-backend"].get(name, client.backend.value))
        own = {"backend": backend, "base_url": url, "endpoint": others["--server-endpoint"].get(name)}
        if name in others["--server-model"]:
            own["served_model_name"] = others["--server-model"][name]
        command = others["--start"].get(name)
        if compare.one_at_a_time and command is None:
            raise BadValue(f"--one-at-a-time: {name} has no --start command", param="start")
        contenders.append(
            Contender(name, ServerOptions(**(shared | own)), Server(name, command) if command else None)
        )
    return contenders


def pairs(values: Sequence[str], flag: str) -> dict[str, str]:
    found = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not name or not rest:
            raise BadValue(f"{flag} {value!r}: give NAME=VALUE")
        if name in found:
            raise BadValue(f"{flag}: {name} is given twice")
        found[name] = rest
    return found


def _backend(name: str) -> BackendName:
    try:
        return BackendName(name)
    except ValueError:
        raise BadValue(f"--server-backend {name!r} is unknown; use {', '.join(BackendName)}") from None


def _figure(run: Run, name: str) -> float:
    e2el = run.summary.spreads["e2el"]
    if name == "median_e2el":
        return e2el.median
    if name == "p99_e2el":
        return e2el.percentiles.get("99", 0.0)
    return float(getattr(run.summary, name))
