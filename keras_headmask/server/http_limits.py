"""Limits of the development server: what one client, and all together, may send, hold and delay.

uvicorn bounds headers, connections and idle ones. What it lacks is here: a time for headers to
arrive and for an answer to be taken, and an end that answers those who have already connected.
"""

import asyncio
import contextlib
import dataclasses
import functools
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol  # the one with a limit on headers

_CLOSE = (b"connection", b"close")


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


def server(app: Any, limits: Limits, **options: Any) -> uvicorn.Server:
    """A server of `app` that keeps `limits`; `options` are those of `uvicorn.Config`."""
    config = uvicorn.Config(
        app,
        http=functools.partial(_Protocol, limits),
        ws="none",
        h11_max_incomplete_event_size=limits.header_bytes,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=limits.grace_seconds,
        **options,
    )
    return _Server(config, limits)


class _Server(uvicorn.Server):
    """At its end it answers who has connected: a connection closed on a request is a reset."""

    def __init__(self, config: uvicorn.Config, limits: Limits):
        super().__init__(config)
        self._linger = limits.linger_seconds

    async def shutdown(self, sockets: Any = None) -> None:
        state = self.server_state
        state.default_headers = [*state.default_headers, _CLOSE]  # of every answer from here on
        for connection in state.connections:
            connection.next_answer_is_the_last()
        for _ in range(3):  # rounds of the loop, which accept those who wait
            await asyncio.sleep(0)
        end = asyncio.get_running_loop().time() + self._linger
        while state.connections and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
        last = self._stop_listening(sockets or [])
        for accepted in last:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, accepted)
        await super().shutdown(sockets)

    def _stop_listening(self, sockets: Any) -> list[socket.socket]:
        """Close the listeners; those who connected just before, whom that would reset."""
        accepted = []
        for listener in sockets:
            with contextlib.suppress(BlockingIOError):
                while True:
                    accepted.append(listener.accept()[0])
        for server in self.servers:
            server.close()
        for listener in sockets:
            listener.close()
        for connection in accepted:
            connection.setblocking(False)
        return accepted

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


class _Protocol(H11Protocol):
    """A connection that is closed when its client lets it wait too long."""

    def __init__(self, limits: Limits, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` sees all that waits
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _watch_headers(self) -> None:
        """From the first byte, or the connection, to the last header; bodies are the app's."""
        if self.conn.their_state is not h11.IDLE:
            if self._reading is not None:
                self._reading.cancel()
                self._reading = None
        elif self._reading is None:
            self._reading = self.loop.call_later(self._limits.read_seconds, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_progress()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _watch_progress(self, before: int | None = None) -> None:
        waits = self.transport.get_write_buffer_size()
        if before is not None and waits >= before:
            self.transport.abort()  # `close` would wait for what the client does not take
            return
        self._writing = self.loop.call_later(self._limits.read_seconds, self._watch_progress, waits)

    def next_answer_is_the_last(self) -> None:
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.default_headers = self.server_state.default_headers

    def shutdown(self) -> None:
        if self.cycle is None:  # connected, and its first request is still on its path
            self.loop.call_later(self._limits.linger_seconds, self._end_unless_asked)
        else:
            super().shutdown()

    def _end_unless_asked(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            super().shutdown()
