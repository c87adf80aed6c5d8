# SPDX-License-Identifier: Apache-2.0
"""The baseline's runs on disk, for servers that cannot run side by side.

A model that fills its cards leaves no room for a second server. So the baseline can be recorded, stopped, and the
candidate started in its place. A recording knows the requests that it answers: it is refused for any others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omni_speech_accel.transitions.client import Ending, RequestOptions, StreamRecord, request_body
from omni_speech_accel.transitions.plan import Transition

FORMAT = 1
_INDEX, _AUDIO = "recording.json", "audio.pcm"


class RecordingError(ValueError):
    """The recording cannot be read, or was made with other requests."""


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
        """Raise `RecordingError` unless every transition of `plan` was recorded with the same requests."""
        for name, wanted in requests_of(plan, options).items():
            recorded = self.requests.get(name)
            if recorded is None:
                raise RecordingError(f"the recording has no transition {name}; it has: {', '.join(self.requests)}")
            for stream, (ours, theirs) in enumerate(zip(wanted, recorded, strict=False)):
                differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
                if differing:
                    raise RecordingError(
                        f"the recording was made with other requests: {name}, stream {stream} differs in "
                        f"{', '.join(differing)}"
                    )
            if len(wanted) != len(recorded):
                raise RecordingError(f"the recording of {name} has {len(recorded)} streams, the plan {len(wanted)}")


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
    """Write the recording into `folder`, which is made; an older recording there is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    runs: dict[str, Any] = {}
    with (folder / _AUDIO).open("wb") as audio:
        for name, recorded in recording.runs.items():
            runs[name] = [
                [_to_json(record, audio.tell(), audio.write(record.pcm)) for record in run] for run in recorded
            ]
    index = {
        "format": FORMAT,
        "server": recording.server,
        "environment": recording.environment,
        "requests": recording.requests,
        "runs": runs,
    }
    (folder / _INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")


def load_recording(folder: Path) -> Recording:
    """Read what `save_recording` wrote; raises `RecordingError` if it is not there or not whole."""
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        audio = (folder / _AUDIO).read_bytes()
        if index["format"] != FORMAT:
            raise RecordingError(f"{folder} has recording format {index['format']}; this version reads {FORMAT}")
        runs = {
            name: [[_from_json(item, audio) for item in run] for run in recorded]
            for name, recorded in index["runs"].items()
        }
        return Recording(index["server"], index["environment"], index["requests"], runs)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, RecordingError):
            raise
        raise RecordingError(f"{folder} is not a whole recording: {type(error).__name__}: {error}") from error


def is_recording(folder: Path) -> bool:
    """Whether `folder` looks like something that `save_recording` wrote."""
    return (folder / _INDEX).is_file()


def _to_json(record: StreamRecord, offset: int, length: int) -> dict[str, Any]:
    item = {name.name: getattr(record, name.name) for name in fields(record) if name.name != "pcm"}
    return item | {"ending": record.ending.value, "pcm": [offset, length]}


def _from_json(item: Mapping[str, Any], audio: bytes) -> StreamRecord:
    offset, length = item["pcm"]
    pcm = audio[offset : offset + length]
    if len(pcm) != length:
        raise RecordingError("the recording's audio is cut short")
    return StreamRecord(**{**item, "ending": Ending(item["ending"]), "pcm": pcm})
