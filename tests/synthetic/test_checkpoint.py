# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from omni_speech_accel.synthetic import (
    checkpoint as writer,
)
from omni_speech_accel.synthetic import (
    read_checkpoint_info,
    reference_wavs,
    varied_reference_wavs,
    write_checkpoint,
)
from omni_speech_accel.synthetic.flow import FULL, SMALL, flow_yaml, write_flow
from omni_speech_accel.synthetic.references import REFERENCE_SECONDS, host_speech
from omni_speech_accel.synthetic.speaker import write_speaker
from omni_speech_accel.synthetic.tokenizer import tokenizer_weights
from omni_speech_accel.synthetic.vocoder import write_vocoder


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return reference_wavs(tmp_path_factory.mktemp("references"))


@pytest.fixture(scope="module")
def core(small_checkpoint: Path) -> Any:
    """The stock model on Step-Audio 2's view of the directory; it loads every part with ``strict=True``."""
    from vllm_omni.model_executor.models.step_audio2.step_audio2_token2wav import StepAudio2Token2WavCore

    core = StepAudio2Token2WavCore(str(small_checkpoint / "token2wav"), device="cpu", n_timesteps=2)
    core._ensure_models_loaded()
    for module in (core.flow.decoder, core.flow.decoder.estimator):  # 2.1 GiB that only chunk streaming uses
        module.att_cache_buffer = None
    return core


@pytest.fixture(scope="module")
def prompts(core: Any, references: list[Path]) -> list[Any]:
    with torch.inference_mode():
        return [core._prepare_prompt(str(path)) for path in references[:3]]


class TestThroughTheStockHost:
    def test_every_part_loads_strictly(self, core: Any) -> None:
        assert core._models_loaded

    def test_codec_tokens_are_varied(self, prompts: list[Any]) -> None:
        for tokens, lengths, *_ in prompts:
            assert tokens.shape == (1, 150)  # 6 s at 25 Hz
            assert int(lengths[0]) == 150
            assert int(tokens.min()) >= 0
            assert int(tokens.max()) < 6561
            assert len(tokens.unique()) >= 20

    def test_speaker_embeddings_tell_voices_apart(self, prompts: list[Any]) -> None:
        embeddings = torch.cat([prompt[2] for prompt in prompts])
        assert float(embeddings.norm(dim=1).min()) > 1.0
        unit = torch.nn.functional.normalize(embeddings, dim=1)
        similarity = (unit @ unit.T).fill_diagonal_(-1.0)
        assert float(similarity.max()) < 0.95

    def test_audio_is_finite_not_silent_and_not_clipped(self, core: Any, references: list[Path]) -> None:
        core.cache.clear()
        with torch.inference_mode():
            audio = core(list(range(100, 128)), str(references[0]), return_bytes=False)
        assert audio.shape == (1, 28 * 960)
        assert torch.isfinite(audio).all()
        assert float(audio.square().mean().sqrt()) > 0.01
        assert float(audio.abs().max()) < 0.95

    def test_audio_depends_on_the_reference(self, core: Any, prompts: list[Any]) -> None:
        """What an item may not do, mix references up, must show in the output of this checkpoint."""
        solved = []
        for tokens, lengths, embedding, mels, mel_lengths in prompts[:2]:
            with torch.inference_mode():
                codes = torch.arange(100, 128, dtype=torch.int32)[None]
                solved.append(
                    core.flow.inference(
                        codes, torch.tensor([28], dtype=torch.int32), tokens, lengths, mels, mel_lengths, embedding, 2
                    )
                )
        assert float((solved[0] - solved[1]).norm() / solved[0].norm()) > 0.05

    def test_no_layer_starts_at_zero(self, core: Any) -> None:
        """adaLN and output layers are zero at upstream's initialisation, which would make each block the identity."""
        for module in (core.flow, core.hift, core.audio_tokenizer):
            for name, value in module.state_dict().items():
                assert bool((value != 0).any()), name

    def test_minicpmo_finds_its_default_reference(self, small_checkpoint: Path) -> None:
        from vllm_omni.model_executor.models.minicpmo_4_5.minicpmo_4_5_code2wav import MiniCPMO45Code2Wav

        stage = SimpleNamespace(model_path=str(small_checkpoint), _prompt_wav_override=None)
        found = Path(MiniCPMO45Code2Wav._default_prompt_wav.fget(stage))
        assert found.read_bytes() == host_speech()[0].read_bytes()


class TestWeights:
    def test_the_same_seed_gives_the_same_bits_as_another_process_wrote(
        self, small_checkpoint: Path, tmp_path: Path
    ) -> None:
        """The shared directory was written by whichever process came first."""
        token2wav = small_checkpoint / "assets" / "token2wav"
        write_flow(tmp_path, 0, SMALL)
        write_vocoder(tmp_path / "hift.pt", 0)
        for name in ("flow.pt", "hift.pt"):
            ours, theirs = (torch.load(folder / name, weights_only=True) for folder in (tmp_path, token2wav))
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert (tmp_path / "flow.yaml").read_text() == (token2wav / "flow.yaml").read_text()

    def test_the_exported_speaker_model_has_the_same_bits_too(self, small_checkpoint: Path, tmp_path: Path) -> None:
        from omni_speech_accel.campplus.model import build_campplus

        write_speaker(tmp_path / "campplus.onnx", 0)
        paths = (tmp_path / "campplus.onnx", small_checkpoint / "assets" / "token2wav" / "campplus.onnx")
        ours, theirs = (build_campplus(path).model.state_dict() for path in paths)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)

    def test_the_tokenizer_file_gives_back_every_bit(self, small_checkpoint: Path, core: Any) -> None:
        loaded = core.audio_tokenizer.state_dict()
        weights = tokenizer_weights(0)
        assert weights.keys() == loaded.keys()
        assert all(np.array_equal(loaded[name].numpy(), value) for name, value in weights.items())

    def test_another_seed_gives_other_weights(self, small_checkpoint: Path, tmp_path: Path) -> None:
        write_vocoder(tmp_path / "hift.pt", 1)
        ours = torch.load(tmp_path / "hift.pt", weights_only=True)
        theirs = torch.load(small_checkpoint / "assets" / "token2wav" / "hift.pt", weights_only=True)
        same = [name for name in ours if torch.equal(ours[name], theirs[name])]
        # the pitch and the magnitudes of weight-normed kernels are set, not drawn
        assert all(name.endswith(("original0", "f0_predictor.classifier.bias")) for name in same), same

    def test_full_has_the_released_models_sizes(self) -> None:
        """MiniCPM-o 4.5's flow.yaml: 16 DiT blocks of 512 over 6 + 4 conformer layers of 2048, 155.8 M weights."""
        from hyperpyyaml import load_hyperpyyaml

        with torch.device("meta"):
            flow = load_hyperpyyaml(flow_yaml(FULL))["flow"]
        assert len(flow.decoder.estimator.blocks) == 16
        assert (len(flow.encoder.encoders), len(flow.encoder.up_encoders)) == (6, 4)
        assert sum(value.numel() for value in flow.state_dict().values()) == 155_802_352


PARTS = ("write_tokenizer", "write_speaker", "write_flow", "write_vocoder")


@pytest.fixture
def quick_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part a few bytes: these tests are about the directory."""

    def part(path: Path, seed: int, *shape: Any) -> int:
        (path / "flow.pt" if path.is_dir() else path).write_text(str(seed))
        return 1

    for name in PARTS:
        monkeypatch.setattr(writer, name, part)


@pytest.mark.usefixtures("quick_parts")
class TestDirectory:
    def test_both_layouts_name_the_same_files(self, tmp_path: Path) -> None:
        info = write_checkpoint(tmp_path / "model", size="small", seed=3)
        assert (tmp_path / "model" / "token2wav").resolve() == info.token2wav.resolve()
        assert (tmp_path / "model" / "token2wav" / "hift.pt").read_text() == "3"
        assert info.default_reference.is_file()

    def test_it_can_be_moved(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path / "model", size="small")
        (tmp_path / "model").rename(tmp_path / "elsewhere")
        assert (tmp_path / "elsewhere" / "token2wav" / "hift.pt").is_file()

    def test_its_record_is_read_back(self, tmp_path: Path) -> None:
        info = write_checkpoint(tmp_path / "model", size="small", seed=3)
        assert read_checkpoint_info(tmp_path / "model") == info
        assert (info.size, info.seed, set(info.weights)) == ("small", 3, {"tokenizer", "speaker", "flow", "vocoder"})

    def test_a_record_of_another_format_is_no_record(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_checkpoint(tmp_path / "model", size="small")
        monkeypatch.setattr(writer, "FORMAT", writer.FORMAT + 1)
        assert read_checkpoint_info(tmp_path / "model") is None
        assert read_checkpoint_info(tmp_path / "nothing") is None

    @pytest.mark.parametrize("failing", PARTS)
    def test_a_write_that_fails_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
    ) -> None:
        def fail(*args: Any) -> int:
            raise OSError("disk full")

        monkeypatch.setattr(writer, failing, fail)
        with pytest.raises(OSError, match="disk full"):
            write_checkpoint(tmp_path / "model", size="small")
        assert list(tmp_path.iterdir()) == []

    def test_a_write_that_fails_keeps_the_one_that_was_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = write_checkpoint(tmp_path / "model", size="small", seed=1)

        def fail(*args: Any) -> int:
            raise OSError("disk full")

        monkeypatch.setattr(writer, "write_vocoder", fail)
        with pytest.raises(OSError, match="disk full"):
            write_checkpoint(tmp_path / "model", size="small", seed=2)
        assert read_checkpoint_info(tmp_path / "model") == first
        assert (first.token2wav / "hift.pt").read_text() == "1"

    def test_one_of_ours_is_replaced(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path / "model", size="small", seed=1)
        (tmp_path / "model" / "left over").touch()
        info = write_checkpoint(tmp_path / "model", size="small", seed=2)
        assert (info.token2wav / "hift.pt").read_text() == "2"
        assert not (tmp_path / "model" / "left over").exists()
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

    def test_an_empty_directory_is_taken(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        assert write_checkpoint(tmp_path / "model", size="small").token2wav.is_dir()

    def test_a_directory_of_someone_elses_is_refused_unless_forced(self, tmp_path: Path) -> None:
        precious = tmp_path / "model" / "config.json"
        precious.parent.mkdir()
        precious.write_text("{}")
        with pytest.raises(FileExistsError, match="not written by omni_speech_accel"):
            write_checkpoint(tmp_path / "model", size="small")
        assert precious.read_text() == "{}"
        write_checkpoint(tmp_path / "model", size="small", force=True)
        assert not precious.exists()

    def test_a_file_is_never_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "model").write_text("precious")
        with pytest.raises(FileExistsError, match="is a file"):
            write_checkpoint(tmp_path / "model", size="small", force=True)
        assert (tmp_path / "model").read_text() == "precious"

    def test_a_given_reference_becomes_the_default(self, tmp_path: Path, references: list[Path]) -> None:
        info = write_checkpoint(tmp_path / "model", size="small", reference_wav=references[1])
        assert info.default_reference.read_bytes() == references[1].read_bytes()

    def test_a_reference_that_is_not_there_is_an_error_before_anything_is_written(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"nowhere\.wav"):
            write_checkpoint(tmp_path / "model", size="small", reference_wav=tmp_path / "nowhere.wav")
        assert list(tmp_path.iterdir()) == []

    def test_an_unknown_size_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="'full' or 'small', not 'tiny'"):
            write_checkpoint(tmp_path / "model", size="tiny")  # type: ignore[arg-type]


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    with wave.open(str(path)) as stream:
        assert (stream.getnchannels(), stream.getsampwidth()) == (1, 2)
        return np.frombuffer(stream.readframes(stream.getnframes()), dtype="<i2"), stream.getframerate()


class TestReferences:
    def test_at_least_eight_of_exactly_six_seconds(self, references: list[Path]) -> None:
        assert len(references) >= 8
        for path in references:
            samples, rate = read_wav(path)
            assert len(samples) == REFERENCE_SECONDS * rate == 6 * rate

    def test_six_seconds_is_what_the_host_folds_to(self) -> None:
        from vllm_omni.model_executor.models.minicpmo_4_5 import minicpmo_4_5_code2wav as code2wav

        assert code2wav._REF_MAX_SECONDS == REFERENCE_SECONDS

    def test_they_are_speech_at_a_sane_level(self, references: list[Path], tmp_path: Path) -> None:
        for path in references + varied_reference_wavs(tmp_path):
            samples, _ = read_wav(path)
            level = samples / 32768.0
            assert 0.01 < float(np.sqrt(np.mean(level**2))) < 0.5, path
            assert float(np.mean(np.abs(level) > 0.999)) < 1e-3, path

    def test_no_two_are_alike(self, references: list[Path]) -> None:
        """Envelopes of 100 ms, so that the same words at another level would count as alike."""
        envelopes = []
        for path in references:
            samples, rate = read_wav(path)
            envelope = np.abs(samples[: 6 * rate].astype(float)).reshape(60, -1).mean(axis=1)
            envelopes.append((envelope - envelope.mean()) / envelope.std())
        similarity = np.array(envelopes) @ np.array(envelopes).T / 60 - 2 * np.eye(len(envelopes))
        assert similarity.max() < 0.9

    def test_varied_ones_are_one_to_nine_seconds_shortest_first(self, tmp_path: Path) -> None:
        seconds = [len(samples) / rate for samples, rate in map(read_wav, varied_reference_wavs(tmp_path))]
        assert seconds == sorted(set(seconds))
        assert (seconds[0], seconds[-1]) == (1.0, 9.0)
        assert len(seconds) >= 6

    def test_they_are_the_same_files_every_time(self, references: list[Path], tmp_path: Path) -> None:
        for ours, theirs in zip(reference_wavs(tmp_path), references, strict=True):
            assert ours.name == theirs.name
            assert ours.read_bytes() == theirs.read_bytes()
        assert len(list(tmp_path.iterdir())) == len(references)

    def test_a_host_that_is_not_there_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import importlib.util

        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(FileNotFoundError, match="vllm_omni is not installed"):
            reference_wavs(tmp_path)
