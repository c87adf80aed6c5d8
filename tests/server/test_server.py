# SPDX-License-Identifier: Apache-2.0
"""The package in a real ``vllm serve --omni``, over HTTP.

Each configuration is one server: it is started, asked, and stopped, and what came back is looked at afterwards. Two run
at a time, since a start is mostly imports on one core.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_speech_accel import __version__
from omni_speech_accel.host.source import host_info
from omni_speech_accel.plugin.table import PATCHES
from omni_speech_accel.synthetic import reference_wavs
from tests.speech_server.client import (
    SAMPLES_PER_CODE,
    RequestRefused,
    Wav,
    item_counts,
    random_codes,
    stream_pcm,
    synthesize,
)
from tests.speech_server.server import Place, Profile, ServerError, SpeechServer, deploy_config, plugins_without

pytestmark = pytest.mark.server

SEED = 7
CODES = random_codes(28)
# One chunk of 25, one of 25 and a tail of 10; the host's bridge puts three frames of left context before the first.
STREAMED_CODES = random_codes(60)
LEFT_CONTEXT = 3
# Our CAM++ differs from onnxruntime's by 1e-6 of the embedding, which moves a sample by less than one step of int16;
# rounding makes at most one of that, and the vocoder's overlap-add at most one more.
TOLERANCE_LSB = 2


@dataclass
class Run:
    """What one server said."""

    log: list[str] = field(default_factory=list)
    wavs: dict[str, Wav] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)
    counts: dict[tuple[str, str], float] = field(default_factory=dict)
    failure: str = ""

    @property
    def called(self) -> set[str]:
        """The items that have counted a call in a worker."""
        return {item for (item, event), count in self.counts.items() if event == "calls" and count}

    @property
    def start_up_lines(self) -> list[str]:
        return [line for line in self.log if f"omni_speech_accel {__version__}: stage " in line]


@dataclass(frozen=True)
class Configuration:
    """One server of this file. ``ask`` sends the requests and records the answers."""

    ask: Callable[[str, Run, list[Path]], None]
    block: Any = None
    place: Place = "connector"
    profile: Profile = "minicpmo"
    plugins: list[str] | None = None


def ask_for_utterances(url: str, run: Run, references: list[Path]) -> None:
    """Two voices, the first again, then none; and one request that the adapter refuses."""
    first, second = references
    for name, reference in {"first": first, "second": second, "again": first, "default": None}.items():
        run.wavs[name] = synthesize(url, CODES, reference)
    with pytest.raises(RequestRefused) as refused:
        synthesize(url, [6561])
    assert refused.value.status == 400


def ask_for_a_stream(url: str, run: Run, references: list[Path]) -> None:
    run.pieces += stream_pcm(url, STREAMED_CODES, references[0])


CONFIGURATIONS = {
    "absent": Configuration(ask_for_utterances, plugins=plugins_without("omni_speech_accel")),
    "no block": Configuration(ask_for_utterances),
    "on": Configuration(ask_for_utterances, block=True),
    "one off": Configuration(ask_for_utterances, block={"sync_free_prompt": False}, place="stage"),
    "wrong key": Configuration(ask_for_utterances, block={"speaker_devise": True}),
    "two stages": Configuration(ask_for_a_stream, block={}, profile="two_stage"),
}


class Runs:
    """Runs the configurations, two at a time, in the order above."""

    def __init__(self, model: Path, references: list[Path], scratch: Path) -> None:
        self._model = model
        self._references = references
        self._scratch = scratch
        self._lock = threading.Lock()
        self._servers: list[SpeechServer] = []
        self._closed = False
        self._pool = ThreadPoolExecutor(max_workers=2)
        self._futures: dict[str, Future[Run]] = {
            name: self._pool.submit(self._run, name, configuration) for name, configuration in CONFIGURATIONS.items()
        }

    def _run(self, name: str, configuration: Configuration) -> Run:
        folder = self._scratch / name.replace(" ", "_")
        metrics = folder / "metrics"
        metrics.mkdir(parents=True)
        server = SpeechServer(
            deploy_config(
                folder / "deploy.yaml", configuration.profile, block=configuration.block, place=configuration.place
            ),
            model_dir=self._model,
            plugins=configuration.plugins,
            seed=SEED,
            extra_env={"PROMETHEUS_MULTIPROC_DIR": str(metrics)},
            log=folder / "server.log",
        )
        with self._lock:
            if self._closed:
                raise RuntimeError("the tests are over")
            self._servers.append(server)
        run = Run()
        try:
            with server:
                configuration.ask(server.url, run, self._references)
                run.counts = item_counts(server.url)
        except ServerError as error:
            run.failure = str(error)
        run.log = server.log_lines()
        for wav_name, wav in run.wavs.items():
            (folder / f"{wav_name}.wav").write_bytes(wav.data)
        return run

    def __getitem__(self, name: str) -> Run:
        """What that server said; raises what the requests to it raised."""
        return self._futures[name].result()

    def up(self, name: str) -> Run:
        """The same, of a server that must have come up."""
        run = self[name]
        assert not run.failure, run.failure
        return run

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for server in self._servers:
                server.stop()
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def runs(speech_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    scratch = tmp_path_factory.mktemp("servers")
    found = Runs(speech_model, reference_wavs(scratch / "references")[:2], scratch)
    yield found
    found.close()


def furthest(left: Wav, right: Wav) -> int:
    """The largest difference between two WAVs in steps of int16."""
    assert left.rate == right.rate
    assert left.samples.shape == right.samples.shape
    return int(np.abs(left.samples.astype(np.int32) - right.samples.astype(np.int32)).max())


def items(line: str, heading: str) -> list[str]:
    """The items that a start-up line lists after ``heading``, without the reasons in brackets."""
    _, found, rest = re.sub(r" \([^()]*\)", "", line).partition(f" {heading}: ")
    assert found, f"no {heading!r} in {line}"
    return [item for item in rest.split(";")[0].split(", ") if item != "none"]


def test_stock_server_speaks_in_the_voice_it_is_given(runs: Runs) -> None:
    wavs = runs.up("absent").wavs
    for wav in wavs.values():
        assert wav.rate == 24_000
        assert len(wav.samples) == len(CODES) * SAMPLES_PER_CODE
        assert np.abs(wav.samples).max() > 100, "silence"
    assert wavs["again"].data == wavs["first"].data, "with a seed, equal requests give equal bytes"
    assert len({wavs[name].data for name in ("first", "second", "default")}) == 3, "each reference changes the voice"


def test_plugin_that_is_not_loaded_leaves_no_trace(runs: Runs) -> None:
    assert not [line for line in runs.up("absent").log if "omni_speech_accel" in line]


def test_wavs_without_a_block_are_byte_equal_to_those_without_the_package(runs: Runs) -> None:
    stock, installed = runs.up("absent"), runs.up("no block")
    assert {name: wav.data for name, wav in installed.wavs.items()} == {
        name: wav.data for name, wav in stock.wavs.items()
    }


def test_start_up_line_without_a_block_says_stock(runs: Runs) -> None:
    (line,) = runs.up("no block").start_up_lines
    assert "stage speech_test_code2wav" in line
    assert "stock" in line
    assert " on: " not in line


def test_start_up_line_accounts_for_every_item_once(runs: Runs) -> None:
    (line,) = runs.up("on").start_up_lines
    assert f"omni_speech_accel {__version__}: stage speech_test_code2wav on {host_info()}: on: " in line
    accounted = [item for heading in ("on", "off", "not applied") for item in items(line, heading)]
    assert len(accounted) == len(set(accounted))
    assert set(accounted) <= {patch.key for patch in PATCHES}
    assert "speaker_graph" in items(line, "not applied")
    assert "speaker_graph (for cuda and npu, not cpu)" in line
    assert {"sync_free_prompt", "speaker_device"} <= set(items(line, "on"))


def test_wavs_with_the_items_on_are_within_tolerance_of_stock(runs: Runs) -> None:
    stock, on = runs.up("absent").wavs, runs.up("on").wavs
    distances = {name: furthest(stock[name], on[name]) for name in stock}
    assert max(distances.values()) <= TOLERANCE_LSB, distances
    # The items were really at work: an unchanged server would be within any tolerance.
    assert {"sync_free_prompt", "speaker_device"} <= runs.up("on").called
    assert on["again"].data == on["first"].data


def test_item_that_is_off_in_the_yaml_is_off_in_the_worker(runs: Runs) -> None:
    on, off = runs.up("on"), runs.up("one off")
    assert "sync_free_prompt" in on.called
    assert "sync_free_prompt" not in off.called
    # The item is exact and all others are on in both.
    assert {name: wav.data for name, wav in off.wavs.items()} == {name: wav.data for name, wav in on.wavs.items()}


def test_nothing_is_counted_without_a_block(runs: Runs) -> None:
    assert not runs.up("no block").counts


def test_start_up_line_says_which_item_is_off(runs: Runs) -> None:
    (line,) = runs.up("one off").start_up_lines
    assert "(Worker" in line
    assert items(line, "off") == ["sync_free_prompt"]
    assert "speaker_device" in items(line, "on")


def test_wrong_key_stops_the_server_at_start_and_names_key_place_and_nearest_name(runs: Runs) -> None:
    run = runs["wrong key"]
    assert "the server ended with" in run.failure
    assert not run.wavs
    (said,) = {line[line.index("SettingsError: ") :] for line in run.log if "SettingsError: " in line}
    assert "connectors.connector_of_shared_memory.extra.omni_speech_accel.speaker_devise" in said
    assert 'did you mean "speaker_device"?' in said


def test_two_stage_server_streams_its_chunks_with_the_items_on(runs: Runs) -> None:
    run = runs.up("two stages")
    (line,) = run.start_up_lines
    assert "stage code2wav" in line
    samples = np.frombuffer(b"".join(run.pieces), np.int16)
    assert len(run.pieces) > 1
    assert len(samples) == (len(STREAMED_CODES) + LEFT_CONTEXT) * SAMPLES_PER_CODE
    assert np.abs(samples).max() > 100
