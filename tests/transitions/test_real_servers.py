# SPDX-License-Identifier: Apache-2.0
"""`transitions` over two real ``vllm serve --omni`` on CPU: stock MiniCPMO45Code2Wav behind an echo talker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omni_speech_accel.transitions.inputs import load_pool
from omni_speech_accel.transitions.plan import PATTERNS, build_plan
from tests.speech_server.client import random_codes
from tests.speech_server.model_dir import build_model_dir, ensure_checkpoint
from tests.speech_server.server import SpeechServer, deploy_config

from .fault_proxy import FaultProxy
from .loopback import serve
from .test_end_to_end import EXPECTED_FAULT, invoke, problems

# Slow: every pattern is played three times at a CPU's pace. `make transitions` runs it, `make test` does not.
pytestmark = [pytest.mark.server, pytest.mark.slow]

REPO = Path(__file__).resolve().parents[2]
# The speech stage sends a second of audio for every 25 codes.
SHORT_CODES, LONG_CODES = 10, 110
# Rows that share a batch are summed in another order: 1 step of int16 seen, where another stream's audio is thousands.
TOLERANCE_LSB = 8
# Three at once leave one of the server's four rows to a joiner, and are no captured size.
SIZE = 3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Codec ids, one utterance a line, four short and eight long ones."""
    path = tmp_path_factory.mktemp("inputs") / "codes.txt"
    lengths = [SHORT_CODES] * 4 + [LONG_CODES] * 8
    lines = [" ".join(map(str, random_codes(length, seed))) for seed, length in enumerate(lengths)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URLs of two servers of the same stock deploy.

    Their vocoder draws the same noise for a row wherever it stands in a batch: the clock, not the plan, decides which
    rows meet, and stock's own runs would lie as far apart as two voices.
    """
    folder = tmp_path_factory.mktemp("servers")
    checkpoint = ensure_checkpoint(REPO / ".cache" / "models" / "small", size="small")
    model = build_model_dir(folder / "model", checkpoint)
    deploy = deploy_config(folder / "deploy.yaml", "two_stage")
    pair = [
        SpeechServer(
            deploy, model_dir=model, seed=7, row_noise=True, log=folder / f"server{number}.log", startup_seconds=900
        )
        for number in range(2)
    ]
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(SpeechServer.start, pair))
        yield pair[0].url, pair[1].url
    finally:
        for server in pair:
            server.stop()


def compare(inputs: Path, baseline: str, candidate: str, *more: str) -> tuple[int, dict]:
    code, stdout, stderr = invoke(
        "--baseline", baseline, "--candidate", candidate, "--inputs", str(inputs), "--concurrency", str(SIZE),
        "--pcm-tolerance", str(TOLERANCE_LSB), "--attempts", "4", "--json", *more,
    )  # fmt: skip
    assert code in (0, 1), stderr
    return code, json.loads(stdout)


def test_two_healthy_servers_match_in_every_transition(servers, inputs):
    code, report = compare(inputs, *servers)
    assert (code, report["status"]) == (0, "ok"), [t for t in report["transitions"] if t["status"] != "ok"]
    assert [transition["name"] for transition in report["transitions"]] == [
        f"{pattern}-{SIZE}" if sized else pattern for pattern, (_, sized) in PATTERNS.items()
    ]
    # Alone in its batch a stream is repeated exactly, by either server.
    assert report["transitions"][0]["distance"]["max_lsb"] == 0


@pytest.fixture(scope="module")
def recorded(servers, inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "baseline"
    code, stdout, _ = invoke(
        "--baseline", servers[0], "--record", str(folder), "--inputs", str(inputs), "--concurrency", str(SIZE),
        "--only", "padded", "--attempts", "4",
    )  # fmt: skip
    assert code == 0, stdout
    return folder


@pytest.mark.parametrize("fault", ["truncate", "swap", "longer", "error-in-200", "cut"])
def test_each_fault_in_front_of_a_real_server_is_found_and_named(servers, inputs, recorded, fault):
    (padded,) = build_plan(load_pool(inputs), [SIZE], 0, ["padded"])
    streams = (0, 1) if fault == "swap" else (1,)
    proxy = FaultProxy(servers[1], fault, [padded.streams[stream].seed for stream in streams])
    with serve(proxy) as candidate:
        code, report = compare(inputs, str(recorded), candidate, "--only", "padded")
    assert proxy.spoiled >= len(streams)
    assert code == 1
    assert problems(report) == {(f"padded-{SIZE}", stream, EXPECTED_FAULT[fault]) for stream in streams}
