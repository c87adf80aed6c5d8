# SPDX-License-Identifier: Apache-2.0
"""Builds the stock speech stage in this process, with any settings block, and drives its `forward`.

Stock code does all the work: `MiniCPMO45Code2Wav` for streams, `StepAudio2Token2WavCore`
for prompt features. Only what the engine would hand to the stage is made here.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from omni_speech_accel import environment, plugin
from omni_speech_accel.errors import ReferenceMixup, RunError, Unavailable
from omni_speech_accel.measure.stage_profile import StageProfile
from omni_speech_accel.plugin.session import StageSession, attach, session_of
from omni_speech_accel.plugin.settings import BLOCK
from omni_speech_accel.synthetic.references import REFERENCE_RATE, Reference

if TYPE_CHECKING:
    import torch

# A stream's first payload starts with this code as context.
# Source: ``_MINICPMO45_SILENCE_CODE`` of the host's stage input processor.
SILENCE_CODE = 4218

# A reference reaches the model through a 16-bit WAV: half a step, and one for full scale clipping to 32767/32768.
_WAV_ROUNDING = 1.5 / 32768


def ready_platform(wanted: str = "auto") -> str:
    """Register the plugin, import the host and return its device type: ``cuda``, ``npu`` or ``cpu``.

    Raises:
        Unavailable: The host is missing, the kill switch is set, or the host's platform is not the wanted one.
        RunError: The plugin could not be registered.
    """
    if environment.killed():
        raise Unavailable(f"{environment.KILL_SWITCH} switches the package off here: unset it for this command")
    plugin.register()
    if not plugin.is_registered():
        raise RunError("the plugin could not be registered; the log says why")
    try:
        from omni_speech_accel.anchors.stages import device_type

        found = device_type()
    except ImportError as error:
        raise Unavailable(f"vllm-omni cannot be imported here: {error}") from error
    if wanted not in ("auto", found):
        raise Unavailable(
            f"vllm-omni runs on {found} in this environment, not on {wanted}; "
            "CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES choose a card"
        )
    return found


def _check_model(model: Path) -> None:
    wanted = [
        model / "assets" / "HT_ref_audio.wav",
        *(
            model / "assets" / "token2wav" / name
            for name in ("speech_tokenizer_v2_25hz.onnx", "campplus.onnx", "flow.yaml", "flow.pt", "hift.pt")
        ),
    ]
    missing = [path for path in wanted if not path.is_file()]
    if missing:
        names = ", ".join(str(path.relative_to(model)) for path in missing)
        raise Unavailable(f"{model} is no MiniCPM-o speech model directory: it lacks {names}")


def _vllm_config(model: Path, profile: StageProfile, block: Any) -> Any:
    extra = dict(profile.extra)
    if block is not None:
        extra[BLOCK] = block
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model), revision=None, model_stage=None, stage_connector_config={"extra": extra}
        ),
        additional_config=dict(profile.additional_config),
        scheduler_config=SimpleNamespace(max_num_seqs=profile.max_num_seqs),
        load_config=SimpleNamespace(load_format="auto"),
    )


def _drop_unread_buffers(core: Any) -> None:
    """Free the flow's own chunk caches: 2.1 GiB a stage, which neither prompt features nor `BatchedToken2Wav` read.

    0.32.0rc1 does so itself where `cfm_drop_upstream_att_buffer` is set; 0.30.0 cannot, and two of its stages would not
    fit the memory of a small machine.
    """
    for module in core.flow.modules():
        module._buffers.pop("att_cache_buffer", None)


@dataclass(frozen=True)
class Payload:
    """One chunk of one stream, as the talker's connector hands it on.

    ``codes``: codec tokens, context included. ``reference`` rides on the first chunk only, as in the engine; ``None``
    there is the model's default voice.
    """

    stream: str
    sequence: int
    codes: tuple[int, ...]
    reference: Reference | None = None
    last: bool = False

    def info(self) -> dict[str, Any]:
        """The ``runtime_additional_information`` entry of this chunk."""
        import torch

        codes: dict[str, Any] = {"audio": torch.tensor(self.codes, dtype=torch.long)}
        meta: dict[str, Any] = {
            "request_id": self.stream,
            "cache_epoch": 0,
            "chunk_seq": self.sequence,
            "last_chunk": self.last,
            "code_flat_numel": len(self.codes),
        }
        if self.reference is not None:
            codes["ref"] = torch.from_numpy(self.reference.samples)
            meta["ref_audio_sr"] = self.reference.rate
        return {"codes": codes, "meta": meta}


def stream_payloads(
    stream: str,
    codes: Sequence[int],
    profile: StageProfile,
    reference: Reference | None = None,
) -> list[Payload]:
    """Cut ``codes`` into the payloads of one stream: ``chunk_frames`` new codes each, after the context."""
    size, width = profile.chunk_frames, profile.context_frames
    starts = range(0, len(codes), size)
    payloads = []
    context = [SILENCE_CODE] * width
    for sequence, start in enumerate(starts):
        body = [*context, *codes[start : start + size]]
        context = body[-width:] if width else []
        payloads.append(
            Payload(stream, sequence, tuple(body), reference if sequence == 0 else None, start == starts[-1])
        )
    return payloads


class Code2WavDriver:
    """One stock stage-2 model with its own settings block.

    Args:
        model: A MiniCPM-o speech model directory.
        profile: What else the deploy YAML would give the stage.
        block: The ``omni_speech_accel`` block; ``None`` is no block, stock.
        seed: Seeds torch before the model is built.

    Raises:
        Unavailable: ``model`` is not a speech model directory.
        SettingsError: ``block`` is wrong.
    """

    def __init__(self, model: Path, profile: StageProfile, *, block: Any = None, seed: int = 0) -> None:
        _check_model(model)
        import torch
        from vllm_omni.model_executor.models.minicpmo_4_5.minicpmo_4_5_code2wav import MiniCPMO45Code2Wav

        torch.manual_seed(seed)
        self.profile = profile
        self.model: Any = MiniCPMO45Code2Wav(vllm_config=_vllm_config(model, profile, block))
        self.model.load_weights(())
        if self.device.type == "cpu":
            _drop_unread_buffers(self.core)
        self._given: dict[str, Reference | None] = {}

    @property
    def session(self) -> StageSession:
        """The stage's session: what is on, what was not applied, and the counters."""
        found = session_of(self.model)
        if found is None:
            raise RunError("the stage has no session: the plugin was registered after the host had built it")
        return found

    @property
    def backend(self) -> Any:
        """The stage's ``BatchedToken2Wav``."""
        return self.model.backend

    @property
    def core(self) -> Any:
        """The stage's ``StepAudio2Token2WavCore``."""
        return self.backend._token2wav._core

    @property
    def device(self) -> torch.device:
        """Where the stage computes."""
        import torch

        return torch.device(self.core.device)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        from omni_speech_accel.runtime import accelerator_for

        accelerator_for(self.device).synchronize(self.device)

    def step(self, payloads: Sequence[Payload]) -> list[torch.Tensor]:
        """One ``forward`` of the stage with one payload per stream.

        Returns:
            Per payload its audio, float32 ``[n]`` at 24 kHz, on the stage's device.

        Raises:
            RuntimeError: Whatever the stage raises.
        """
        import torch

        flat = [code for payload in payloads for code in payload.codes]
        output = self.model.forward(
            input_ids=torch.tensor(flat, dtype=torch.long, device=self.device),
            runtime_additional_information=[payload.info() for payload in payloads],
            seq_token_counts=[len(payload.codes) for payload in payloads],
            request_ids=[payload.stream for payload in payloads],
        )
        self._given.update((payload.stream, payload.reference) for payload in payloads if payload.sequence == 0)
        return list(output.multimodal_outputs["model_outputs"])

    def check_references(self, streams: Sequence[str]) -> None:
        """Hold each stream's prompt in the stage against the reference that its first payload gave.

        A benchmark whose references are ignored measures a warm cache (and one voice), not cold setups.

        Raises:
            ReferenceMixup: A stream holds another reference, or two different references share a cache entry.
        """
        owners: dict[tuple[str, str], Reference | None] = {}
        for stream in streams:
            state = self.model._states.get(stream)
            given = self._given.get(stream)
            if state is None:
                raise ReferenceMixup(f"stream {stream} has no state in the stage to check its reference by")
            key = (state.prompt_cache_id, state.prompt_wav)
            if given is not None:
                self._check_file(stream, Path(state.prompt_wav), given)
            elif key[0].startswith("runtime-ref-"):
                raise ReferenceMixup(f"stream {stream} was given no reference and uses {key[0]}, not the default voice")
            if key not in self.backend._prompt_features:
                raise ReferenceMixup(f"stream {stream} uses {key[0]}, which has no features in the stage")
            owner = owners.setdefault(key, given)
            if (owner is None) != (given is None) or (
                owner is not None and given is not None and not _same_samples(owner, given)
            ):
                raise ReferenceMixup(f"stream {stream} shares the features {key[0]} with another reference")

    def _check_file(self, stream: str, path: Path, given: Reference) -> None:
        import numpy as np
        import soundfile

        samples, rate = soundfile.read(path, dtype="float32")
        length = min(len(samples), len(given.samples))
        if rate != given.rate or given.rate != REFERENCE_RATE or length == 0:
            raise ReferenceMixup(f"stream {stream} was given {given.rate} Hz and uses {path.name} at {rate} Hz")
        difference = np.abs(samples[:length] - np.clip(given.samples[:length], -1.0, 1.0)).max()
        if difference > _WAV_ROUNDING or np.abs(samples[length:]).max(initial=0.0) > 0.0:
            raise ReferenceMixup(
                f"stream {stream} was given {given.name} and uses {path.name}, which holds other audio "
                f"(differs by {difference:.3g})"
            )

    def finish(self, streams: Sequence[str]) -> None:
        """Tell the stage that the requests are over, as the engine does."""
        self.model.on_requests_finished(set(streams))
        for stream in streams:
            self._given.pop(stream, None)

    def close(self) -> None:
        """Drop the model and its prompt files."""
        directory = getattr(self.model, "_runtime_prompt_dir", None)
        self.model = None
        if directory is not None:
            directory.cleanup()
        gc.collect()


def _same_samples(first: Reference, second: Reference) -> bool:
    import numpy as np

    return first is second or (first.rate == second.rate and np.array_equal(first.samples, second.samples))


class PromptDriver:
    """One stock Token2Wav core, as Step-Audio 2 and MiniCPM-o share it, for prompt features alone.

    Args:
        model: A MiniCPM-o speech model directory.
        platform: Device type to compute on.
        block: The ``omni_speech_accel`` block; ``None`` is stock.
    """

    def __init__(self, model: Path, platform: str, *, block: Any = None) -> None:
        _check_model(model)
        from vllm_omni.model_executor.models.step_audio2.step_audio2_token2wav import StepAudio2Token2WavCore

        from omni_speech_accel.anchors.stages import open_session

        self.core: Any = StepAudio2Token2WavCore(str(model / "assets" / "token2wav"), device=platform)
        self.session = open_session(_vllm_config(model, StageProfile("prompt features"), block), self.core)
        attach(self.core, self.session)
        # Loads now, with the session in place, since that is when items put their parts in.
        self.core._ensure_models_loaded()
        _drop_unread_buffers(self.core)

    @property
    def device(self) -> torch.device:
        """Where the core computes."""
        import torch

        return torch.device(self.core.device)

    def features(self, path: Path) -> dict[str, torch.Tensor]:
        """Prompt features of one reference file, by name: tokens ``[1, N]`` and their count, speaker embedding
        ``[1, 192]``, log-mel ``[1, T, 80]`` at 24 kHz and its count."""
        import torch

        from omni_speech_accel.runtime import accelerator_for

        with torch.inference_mode():
            values = self.core._prepare_prompt(str(path))
        accelerator_for(self.device).synchronize(self.device)
        names = ("codec tokens", "token count", "speaker embedding", "mel", "mel count")
        return dict(zip(names, values, strict=True))

    def close(self) -> None:
        """Drop the models."""
        self.core = None
        gc.collect()


def talker_session(model: Path, block: Any) -> StageSession:
    """The session that a talker stage would open with `block`; the talker itself is not built."""
    from vllm_omni.model_executor.models.minicpmo_4_5.minicpmo_4_5_omni_tts import (
        MiniCPMO45OmniTTSForConditionalGeneration as Talker,
    )

    from omni_speech_accel.anchors.stages import open_session

    return open_session(_vllm_config(model, StageProfile("talker"), block), Talker.__new__(Talker))
