# SPDX-License-Identifier: Apache-2.0
"""A small HTTP/1.1 server on the loopback interface that can also misbehave: break off, stall, end early."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Exchange:
    """One request and the means to answer it."""

    request: Request
    writer: asyncio.StreamWriter
    started: bool = field(default=False)

    async def start(self, status: int, headers: dict[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} Status", "transfer-encoding: chunked", "connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        self.started = True
        await self.writer.drain()

    async def send(self, data: bytes) -> None:
        if data:
            self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await self.writer.drain()

    async def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def abort(self) -> None:
        """Drop the connection as a dying server does: no terminal chunk."""
        self.writer.transport.abort()

    async def reply(self, status: int, content_type: str, body: bytes) -> None:
        await self.start(status, {"content-type": content_type})
        await self.send(body)
        await self.end()


Handler = Callable[[Exchange], Awaitable[None]]


async def _serve_connection(handler: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        pairs = [line.partition(":") for line in head[1:] if line]
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        await handler(Exchange(Request(method, path, headers, body), writer))
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        with contextlib.suppress(Exception):
            writer.close()


@contextlib.contextmanager
def serve(handler: Handler) -> Iterator[str]:
    """Serve `handler` from a thread of its own on a free loopback port; yields the base URL."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    address: list[str] = []

    async def main() -> None:
        server = await asyncio.start_server(lambda r, w: _serve_connection(handler, r, w), "127.0.0.1", 0)
        address.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        ready.set()
        async with server:
            await asyncio.Event().wait()

    def run() -> None:
        asyncio.set_event_loop(loop)
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        pending = asyncio.all_tasks(loop)
        for left in pending:
            left.cancel()
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.close()

    task = loop.create_task(main())
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
