# SPDX-License-Identifier: Apache-2.0
"""The baseline's runs on disk, for servers that cannot run side by side.

A model that fills its cards leaves no room for a second server. So the baseline can be recorded, stopped, and the
candidate started in its place. A recording knows the requests that it answers: it is refused for any others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omni_speech_accel.transitions import CannotCompare
from omni_speech_accel.transitions.client import Ending, RequestOptions, StreamRecord, request_body
from omni_speech_accel.transitions.inputs import parse_json
from omni_speech_accel.transitions.plan import Transition
from omni_speech_accel.transitions.wire import MAX_CHANNELS, MAX_SAMPLE_RATE

FORMAT = 1
_INDEX, _AUDIO = "recording.json", "audio.pcm"


@dataclass(frozen=True)
class Recording:
    """What one server answered.

    `runs[transition][run][stream]` are the records, `requests[transition][stream]` the bodies that they answer.
    """

    server: dict[str, Any]
    environment: dict[str, Any]
    requests: dict[str, list[dict[str, Any]]]
    runs: dict[str, list[list[StreamRecord]]]

    def require(self, plan: Sequence[Transition], options: RequestOptions) -> None:
        """Raise `CannotCompare` unless every transition of `plan` was recorded with the same requests."""
        for name, wanted in requests_of(plan, options).items():
            recorded = self.requests.get(name)
            if recorded is None:
                raise CannotCompare(f"the recording has no transition {name}; it has: {', '.join(self.requests)}")
            for stream, (ours, theirs) in enumerate(zip(wanted, recorded, strict=False)):
                differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
                if differing:
                    raise CannotCompare(
                        f"the recording was made with other requests: {name}, stream {stream} differs in "
                        f"{', '.join(differing)}"
                    )
            if len(wanted) != len(recorded):
                raise CannotCompare(f"the recording of {name} has {len(recorded)} streams, the plan {len(wanted)}")


def requests_of(plan: Sequence[Transition], options: RequestOptions) -> dict[str, list[dict[str, Any]]]:
    """The request bodies of a plan, by transition, without the model's name: two servers may give it their own."""
    return {
        transition.name: [
            {key: value for key, value in request_body(spec, options).items() if key != "model"}
            for spec in transition.streams
        ]
        for transition in plan
    }


def save_recording(recording: Recording, folder: Path) -> None:
    """Write the recording into `folder`, which is made; an older recording there is replaced.

    Nothing is replaced before all is written. The index goes last and holds the audio's SHA-256, so that an index and
    another recording's audio are never taken for one. Raises `OSError` if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    new_audio, new_index = folder / f"{_AUDIO}.new", folder / f"{_INDEX}.new"
    try:
        runs: dict[str, Any] = {}
        digest = hashlib.sha256()
        with new_audio.open("wb") as audio:
            for name, recorded in recording.runs.items():
                runs[name] = [
                    [_to_json(record, audio.tell(), audio.write(record.pcm)) for record in run] for run in recorded
                ]
                for run in recorded:
                    for record in run:
                        digest.update(record.pcm)
        index = {
            "format": FORMAT,
            "server": recording.server,
            "environment": recording.environment,
            "requests": recording.requests,
            "audio_sha256": digest.hexdigest(),
            "runs": runs,
        }
        new_index.write_text(json.dumps(index) + "\n", encoding="utf-8")
        new_audio.replace(folder / _AUDIO)
        new_index.replace(folder / _INDEX)
    finally:
        new_audio.unlink(missing_ok=True)
        new_index.unlink(missing_ok=True)


def load_recording(folder: Path) -> Recording:
    """Read what `save_recording` wrote; raises `CannotCompare` if it is not there or not whole."""
    try:
        index = _object("the index", parse_json((folder / _INDEX).read_text(encoding="utf-8")))
        audio = (folder / _AUDIO).read_bytes()
        if index["format"] != FORMAT:
            raise CannotCompare(f"{folder} has recording format {index['format']}; this version reads {FORMAT}")
        recording = _read(index, audio)
        # Older recordings have no digest.
        if index.get("audio_sha256", _sha256(audio)) != _sha256(audio):
            raise _damaged("its audio is not what its index was written for")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotCompare(f"{folder} is not a whole recording: {type(error).__name__}: {error}") from error
    return recording


def _read(index: Mapping[str, Any], audio: bytes) -> Recording:
    server = _object("server", index["server"])
    _demand(isinstance(server.get("url"), str), "server has no URL")
    requests, runs = _object("requests", index["requests"]), _object("runs", index["runs"])
    _demand(bool(requests) and requests.keys() == runs.keys(), "requests and runs are not of the same transitions")
    read = {}
    for name, bodies in requests.items():
        for number, body in enumerate(_items(f"requests of {name}", bodies)):
            _object(f"request {number} of {name}", body)
        read[name] = [
            [_from_json(_object(f"a stream of {name}", item), audio) for item in _items(f"a run of {name}", run)]
            for run in _items(f"runs of {name}", runs[name])
        ]
        _demand(all(len(run) == len(bodies) for run in read[name]), f"a run of {name} has not one record a request")
    return Recording(server, _object("environment", index["environment"]), requests, read)


def _damaged(what: str) -> CannotCompare:
    return CannotCompare(f"not a whole recording: {what}")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _damaged(otherwise)


def _object(what: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _damaged(f"{what} is no JSON object")
    return value


def _items(what: str, value: object) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _damaged(f"{what}: none" if value == [] else f"{what} is no list")
    return value


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _to_json(record: StreamRecord, offset: int, length: int) -> dict[str, Any]:
    item = {name.name: getattr(record, name.name) for name in fields(record) if name.name != "pcm"}
    return item | {"ending": record.ending.value, "pcm": [offset, length]}


def _from_json(item: Mapping[str, Any], audio: bytes) -> StreamRecord:
    offset, length = item["pcm"]
    _demand(min(int(offset), int(length)) >= 0, "a stream lies before the start of its audio")
    pcm = audio[offset : offset + length]
    if len(pcm) != length:
        raise CannotCompare("the recording's audio is cut short")
    for name, most in (("sample_rate", MAX_SAMPLE_RATE), ("channels", MAX_CHANNELS)):
        value = item[name]
        _demand(value is None or (isinstance(value, int) and 0 < value <= most), f"{name} is {value!r}")
    times = [item["sent_at"], item["ended_at"], *item["audio_at"]]
    _demand(all(isinstance(value, int | float) for value in times), "a time is no number")
    _demand(isinstance(item["detail"], str), "a detail is no text")
    return StreamRecord(**{**item, "ending": Ending(item["ending"]), "pcm": pcm})
