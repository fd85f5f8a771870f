"""Limits of the development server: what one client, and all together, may send, hold and delay.

uvicorn bounds headers, connections and idle ones. What it lacks is here: a time for headers to
arrive and for an answer to be taken, and an end that answers those who have already connected.
"""

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bytes and seconds. `read_seconds` is the time for headers, for a body, for any progress of
    an answer that is sent; `linger_seconds` how long connected clients may still ask at the end."""

    request_bytes: int = 64 * 2**20
    bytes_in_all: int = 256 * 2**20
    header_bytes: int = 64 * 2**10
    connections: int = 512
    read_seconds: float = 60
    linger_seconds: float = 1
    grace_seconds: int = 30


class Server(uvicorn.Server):
    """A server of `app` that keeps `limits`; `options` are those of `uvicorn.Config`."""

    def __init__(self, app: Any, limits: Limits, **options: Any):
        bounds = {
            "http": "h11",  # the one with a limit on headers
            "ws": "none",
            "h11_max_incomplete_event_size": limits.header_bytes,
            "limit_concurrency": limits.connections,
            "timeout_graceful_shutdown": limits.grace_seconds,
        }
        super().__init__(uvicorn.Config(app, **bounds, **options))
        self._limits = limits
        self._waits: dict[Any, tuple[Any, float]] = {}  # by connection: for what, since when

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: close connections that wait too long for their clients."""
        now, before, self._waits = asyncio.get_running_loop().time(), self._waits, {}
        for connection in self.server_state.connections:
            unsent = connection.transport.get_write_buffer_size()
            if not unsent and connection.conn.their_state is not h11.IDLE:
                continue  # it computes, or reads a body, which the application bounds
            waits = unsent or connection.cycle  # for the headers of the request after that one
            last, since = before.get(connection, (waits, now))
            if unsent < last if unsent and isinstance(last, int) else waits is not last:
                since = now
            self._waits[connection] = waits, since
            if now - since > self._limits.read_seconds:
                connection.transport.abort()  # `close` would wait until the client takes the rest
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer those who have connected: a connection closed on a request is a reset."""
        state = self.server_state
        state.default_headers = [*state.default_headers, (b"connection", b"close")]
        for connection in state.connections:
            if connection.cycle is not None and not connection.cycle.response_started:
                connection.cycle.default_headers = state.default_headers
        await self._linger(lambda connection: True)
        for listener in [*self.servers, *(sockets or [])]:
            listener.close()
        await self._linger(lambda connection: connection.cycle is None)  # who came last
        await super().shutdown(sockets)

    async def _linger(self, may_ask: Callable[[Any], bool]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.linger_seconds):
                await asyncio.sleep(0.02)  # those who wait are accepted
                while any(map(may_ask, self.server_state.connections)):
                    await asyncio.sleep(0.02)
