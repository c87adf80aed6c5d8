# SPDX-License-Identifier: Apache-2.0
"""What `compare-modes` starts in place of ``vllm``: a program that notes how it was called and plays its part.

``serve`` is the fake speech server on the port asked for. ``bench`` writes a result file in the client's form, from the
numbers in ``$STUB_FOLDER/plan.json``: {"speed": {overlay stem: audio seconds a second}, "fail": {run: how},
"slow": {run: seconds}}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["STUB_FOLDER"])
PLAN = json.loads((FOLDER / "plan.json").read_text())
SERVING = FOLDER / "serving"


def value(flag: str) -> str:
    return sys.argv[sys.argv.index(flag) + 1]


def note(**more: object) -> None:
    with (FOLDER / "calls.jsonl").open("a") as file:
        file.write(json.dumps({"argv": sys.argv[1:], "deploy_dir": os.environ.get("OMNI_DEPLOY_DIR"), **more}) + "\n")


def serve() -> None:
    from tests.transitions.fake_speech import FakeSpeech
    from tests.transitions.loopback import Exchange, _serve_connection

    overlay = Path(value("--deploy-config")).stem
    if overlay in PLAN.get("fail", {}):
        print("the stub server refuses this overlay")
        sys.exit(3)
    SERVING.write_text(overlay)
    print(f"compilation_config: {{'cudagraph_mode': <CUDAGraphMode.{overlay.upper()}: (2, 1)>}}", flush=True)
    speech = FakeSpeech(noise_lsb=PLAN.get("noise", {}).get(overlay, 0))

    async def handle(exchange: Exchange) -> None:
        if exchange.request.path == "/health":
            await exchange.reply(200, "text/plain", b"")
        else:
            await speech(exchange)

    async def main() -> None:
        port = int(value("--port"))
        server = await asyncio.start_server(lambda r, w: _serve_connection(handle, r, w), "127.0.0.1", port)
        async with server:
            await server.serve_forever()

    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        SERVING.unlink()


def bench() -> None:
    overlay, name = SERVING.read_text(), value("--result-filename")
    failure = PLAN.get("fail", {}).get(f"{Path(value('--result-dir')).name}/{name}")
    requests = int(value("--num-prompts"))
    speed = PLAN["speed"][overlay] * int(value("--max-concurrency"))
    result = {
        "completed": requests - (failure == "request"),
        "audio_throughput": speed,
        "request_throughput": speed / 5,
        "mean_audio_rtf": 1 / speed,
        "p95_audio_rtf": 1.2 / speed,
        "median_audio_ttfp_ms": 1000 / speed,
        "p95_audio_ttfp_ms": 2000 / speed,
        "mean_e2el_ms": 5000 / speed,
        "total_audio_duration_s": PLAN.get("audio", {}).get(overlay, 5.0) * requests,
    }
    time.sleep(PLAN.get("slow", {}).get(f"{Path(value('--result-dir')).name}/{name}", 0))
    if failure == "exit":
        sys.exit(7)
    if failure != "no-result":
        (Path(value("--result-dir")) / name).write_text(json.dumps(result))


if __name__ == "__main__":
    note(serving=SERVING.read_text() if SERVING.exists() else None)
    {"serve": serve, "bench": bench}[sys.argv[1]]()
