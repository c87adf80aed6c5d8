# SPDX-License-Identifier: Apache-2.0
"""The host's own code-to-wave stage over a flow and a vocoder of a few thousand weights.

Every class is the host's; only the sizes are small, and feature extraction is replaced by features drawn from the
reference's name. A reference is written ``"voice-SEED-TOKENS"``: another seed is another voice, and TOKENS its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from omni_speech_accel.plugin.session import StageSession, session_of, use_session

MEL_CACHE = 8  # frames; DEFAULT_STREAM_CONFIG.mel_cache_len of the host
SAMPLES_PER_FRAME = 480  # 24 kHz, 20 ms
VOCABULARY = 6561  # the silence token, 4218, is one of them
STEPS = 2


def _randomise(module: nn.Module, seed: int, gain: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in module.parameters():
            scale = 0.3 if value.dim() < 2 else (value[0].numel()) ** -0.5
            value.copy_(torch.randn(value.shape, generator=generator) * (gain * scale))


@lru_cache(maxsize=1)
def _flow() -> nn.Module:
    from cosyvoice2.flow.decoder_dit import DiT
    from cosyvoice2.flow.flow import CausalMaskedDiffWithXvec
    from cosyvoice2.flow.flow_matching import CausalConditionalCFM
    from cosyvoice2.transformer.upsample_encoder_v2 import UpsampleConformerEncoderV2

    encoder = UpsampleConformerEncoderV2(
        input_size=16,
        output_size=16,
        input_layer="linear",
        pre_lookahead_len=3,
        num_blocks=1,
        num_up_blocks=1,
        up_stride=2,
        up_scale_factor=2,
        attention_heads=2,
        pos_enc_layer_type="rel_pos_espnet",
        selfattention_layer_type="rel_selfattn",
        key_bias=True,
        linear_units=16,
        dropout_rate=0.0,
        positional_dropout_rate=0.0,
        attention_dropout_rate=0.0,
        normalize_before=True,
    )
    estimator = DiT(in_channels=320, out_channels=80, mlp_ratio=1.0, depth=2, num_heads=2, head_dim=8, hidden_size=16)
    flow = CausalMaskedDiffWithXvec(
        input_size=16,
        output_size=80,
        spk_embed_dim=192,
        vocab_size=VOCABULARY,
        encoder=encoder,
        decoder=CausalConditionalCFM(estimator, inference_cfg_rate=0.7),
    )
    for module in flow.modules():
        for name in ("att_cache_buffer", "cnn_cache_buffer"):
            module._buffers.pop(name, None)  # gigabytes for a streaming path that this stage never runs
    _randomise(flow, 1)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        flow.decoder.rand_noise.copy_(torch.randn(flow.decoder.rand_noise.shape, generator=generator))
    return flow.eval()


class _Pitch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.condnet = nn.Conv1d(80, 4, 3, padding=1)

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        return 100 + 100 * torch.sigmoid(self.condnet(mel).mean(1))


@lru_cache(maxsize=1)
def _vocoder() -> nn.Module:
    from vllm_omni.model_executor.models.step_audio2.step_audio2_token2wav import HiFTGenerator

    vocoder = HiFTGenerator(
        base_channels=16,
        sampling_rate=24000,
        upsample_rates=[8, 5, 3],
        upsample_kernel_sizes=[16, 11, 7],
        source_resblock_kernel_sizes=[7, 7, 11],
        source_resblock_dilation_sizes=[[1, 3, 5]] * 3,
        f0_predictor=_Pitch(),
    )
    _randomise(vocoder, 3, gain=0.5)  # at 1, audio is noise clipped to full scale and shows nothing
    return vocoder.eval()


def draw_features(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(speech_tokens [1, T], their count, speaker_embedding [1, 192], mels [1, 2 T, 80])`` of a reference's name."""
    _, seed, tokens = name.split("/")[-1].removesuffix(".wav").split("-")
    generator = torch.Generator().manual_seed(int(seed))
    count = int(tokens)
    return (
        torch.randint(0, VOCABULARY, (1, count), generator=generator),
        torch.tensor([count]),
        torch.randn((1, 192), generator=generator),
        torch.randn((1, 2 * count, 80), generator=generator),
    )


class Token2Wav:
    """What the backend reads of the host's facade. ``prepared`` lists the references whose features were drawn.

    All stages of a process share the weights: replace methods of a stage's backend, never of the modules.
    """

    def __init__(self) -> None:
        self.flow = _flow()
        self.hift = _vocoder()
        self.float16 = False
        self.n_timesteps = STEPS
        self.mel_cache_len = MEL_CACHE
        self.source_cache_len = MEL_CACHE * SAMPLES_PER_FRAME
        self.speech_window = torch.hamming_window(2 * self.source_cache_len, periodic=False)
        self.prepared: list[str] = []
        self.broken: set[str] = set()

    def _prepare_prompt(self, prompt_wav: str) -> Any:
        self.prepared.append(prompt_wav)
        if prompt_wav in self.broken:
            raise ValueError(f"cannot read {prompt_wav}")
        return draw_features(prompt_wav)


def make_stage(block: Any = None, *, setup_cache: int = 1, **extra: Any) -> Any:
    """A ``MiniCPMO45Code2Wav`` whose deploy block is ``block`` (None: no block, so the host alone)."""
    from vllm_omni.model_executor.models.minicpmo_4_5.batched_token2wav import BatchedToken2Wav
    from vllm_omni.model_executor.models.minicpmo_4_5.minicpmo_4_5_code2wav import MiniCPMO45Code2Wav

    if block is not None:
        extra["omni_speech_accel"] = block
    extra["token2wav_setup_cache_size"] = setup_cache
    stage = MiniCPMO45Code2Wav(
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(model="unused", stage_connector_config={"extra": extra}),
            additional_config={},
            scheduler_config=SimpleNamespace(max_num_seqs=16),
        )
    )
    with use_session(session_of(stage)):
        stage.backend = BatchedToken2Wav(Token2Wav(), setup_cache_size=setup_cache)
    return stage


def session(stage: Any) -> StageSession:
    found = session_of(stage)
    assert found is not None
    return found


@dataclass
class Stream:
    """One request. Its chunks are drawn from its name, ``width`` codec tokens each."""

    request: str
    voice: str
    width: int = 8
    epoch: int = 0
    seq: int = 0
    audio: list[torch.Tensor] = field(default_factory=list)

    def info(self, *, last: bool = False, width: int | None = None) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(hash((len(self.request), *self.request.encode(), self.seq)) % 2**31)
        codes = torch.randint(0, VOCABULARY, (self.width if width is None else width,), generator=generator)
        return {
            "codes": {"audio": codes},
            "meta": {
                "request_id": self.request,
                "cache_epoch": self.epoch,
                "chunk_seq": self.seq,
                "last_chunk": last,
                "code_flat_numel": codes.numel(),
                "prompt_cache_id": self.voice,
                "prompt_wav": f"{self.voice}.wav",
            },
        }


def step(stage: Any, streams: Sequence[Stream], infos: Sequence[dict[str, Any]] | None = None) -> list[torch.Tensor]:
    """One forward over the next chunk of every stream; returns each one's audio."""
    infos = [stream.info() for stream in streams] if infos is None else infos
    output = stage.forward(
        input_ids=torch.cat([info["codes"]["audio"] for info in infos]),
        runtime_additional_information=list(infos),
        seq_token_counts=[info["codes"]["audio"].numel() for info in infos],
        request_ids=[stream.request for stream in streams],
    )
    audio = list(output.multimodal_outputs["model_outputs"])
    for stream, samples in zip(streams, audio, strict=True):
        stream.audio.append(samples)
        stream.seq += 1
    return audio


def streams(*voices: str, width: int = 8) -> list[Stream]:
    """One stream per voice, named ``r0``, ``r1``, ..."""
    return [Stream(f"r{index}", voice, width) for index, voice in enumerate(voices)]


@contextmanager
def calls_of(owner: Any, name: str, summary: Callable[..., Any]) -> Iterator[list[Any]]:
    """What ``summary(*args, **kwargs)`` makes of each call of a host method, seen where the host's own code is called.

    The method is replaced on the class below any wrapper of this package, by way of the instance's attribute.
    """
    seen: list[Any] = []
    method = getattr(owner, name)

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(summary(*args, **kwargs))
        return method(*args, **kwargs)

    before = owner.__dict__.get(name)  # 0.30.0 and 0.32.0rc1 put their encoder's plain method there
    owner.__dict__[name] = spy
    try:
        yield seen
    finally:
        if before is None:
            del owner.__dict__[name]
        else:
            owner.__dict__[name] = before


def eager_step(backend: Any, *inputs: Any) -> Any:
    """What the host's per-step graph wrapper computes, without a graph."""
    value, time, cnn, att, cnn_out, att_out, mask = inputs
    result = backend.flow.decoder.estimator.blocks_forward_chunk(value, time, mask, cnn, att, cnn_out, att_out)
    return result, cnn_out, att_out


def simulate_step_graphs(stage: Any) -> None:
    """Give a stage the host's policy of one graph per Euler step, without graphs."""
    backend = stage.backend
    backend._cfm_graph_wrapper = SimpleNamespace(enabled=True, replay=lambda *inputs: eager_step(backend, *inputs))


@pytest.fixture
def quiet_vocoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocoder's noise: one fixed draw for every row, so that a row's audio depends on its inputs alone."""
    from vllm_omni.model_executor.models.cosyvoice3.code2wav_core import hifigan

    class FixedNoise:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def rand(*shape: int, device: Any = None) -> torch.Tensor:
            row = torch.rand(shape[1:], generator=torch.Generator().manual_seed(4))
            return row.expand(shape).clone()

        @staticmethod
        def randn_like(value: torch.Tensor) -> torch.Tensor:
            row = torch.randn(value.shape[1:], generator=torch.Generator().manual_seed(5))
            return row.expand_as(value).clone()

    monkeypatch.setattr(hifigan, "torch", FixedNoise())


def has_whole_solve_graphs() -> bool:
    """Whether this host solves a chunk's Euler steps in one graph (0.32.0rc1) rather than in one per step (0.30.0)."""
    from vllm_omni.model_executor.models.minicpmo_4_5 import cuda_graph_wrapper

    return hasattr(cuda_graph_wrapper, "WholeEulerCFMGraphWrapper")


def simulate_whole_solve_graphs(stage: Any, **options: Any) -> Any:
    """Give a stage of 0.32.0rc1 its fused whole-solve policy on a CPU; returns the graph wrapper.

    The wrapper is the host's: its keys, budget, batch planning and precapture run as they are. Only two things are
    simulated, which need a device: a capture is noted in ``captured`` as ``(batch, query width, cache length)``, and a
    replay computes with the host's eager solve. ``replayed`` lists the batch sizes of the solves.
    """
    import inspect

    from vllm_omni.model_executor.models.minicpmo_4_5 import cuda_graph_wrapper as host
    from vllm_omni.model_executor.models.minicpmo_4_5.batched_token2wav import BatchedToken2Wav

    backend = stage.backend
    solve = inspect.unwrap(BatchedToken2Wav._decode_cfm)

    class Simulated(host.WholeEulerCFMGraphWrapper):  # type: ignore[misc, name-defined]
        def _capture(self, key: Any, **_: Any) -> Any:
            self.captured.append(key[1:4])
            self._stats["captures"] += 1
            return (key,)

        def _flush(self) -> None:
            self._cache.clear()

        def replay(
            self,
            *,
            x: torch.Tensor,
            mu_cfg: torch.Tensor,
            speakers_cfg: torch.Tensor,
            cond_cfg: torch.Tensor,
            cnn_cache: Any,
            att_cache: Any,
            att_keep: Any = None,
            valid_lengths: Any = None,
            **_: Any,
        ) -> Any:
            size = int(x.shape[0])
            if not self.enabled or size > self.max_graph_batch or valid_lengths is not None:
                return None
            rows = list(att_cache) if isinstance(att_cache, list) else None
            stacked = att_cache if rows is None else backend._stack_estimator_att(rows)
            offset = 0 if stacked is None else int(stacked.shape[4])
            plan = self._plan_groups(size)
            entries = self._group_entries(
                self._entry,
                plan,
                [None] * len(plan),
                query_cap=host._capture_query_width(int(mu_cfg.shape[2]), self.query_widths),
                offset=host._capture_offset(offset, self.offset_bucket_frames, sum(att_keep) if att_keep else 0),
                x=x,
                spk_dim=int(speakers_cfg.shape[1]),
            )
            if entries is None:
                return None
            self.replayed.append(size)
            self.enabled = False
            try:
                mel, cnn, att = solve(
                    backend,
                    mu_cfg[:size],
                    speakers_cfg[:size],
                    cond_cfg[:size],
                    cnn_cache=cnn_cache,
                    att_cache=stacked,
                )
            finally:
                self.enabled = True
            if rows is None:
                return mel, cnn, att
            kept = host._att_keep_ranges(int(att.shape[4]), att_keep)
            att = torch.cat([att[..., start : start + length, :] for start, length in kept], dim=4)
            return mel, cnn, [torch.cat((att[:, :, row : row + 1], att[:, :, size + row : size + row + 1]), 2)
                              for row in range(size)]  # fmt: skip

    graphs = Simulated(
        backend.flow.decoder.estimator,
        n_timesteps=backend.n_timesteps,
        query_bucket_frames=16,
        ragged_body=backend._ragged_body,
        **options,
    )
    graphs.captured, graphs.replayed = [], []
    graphs.enabled = graphs.max_graphs > 0
    backend._whole_euler_graph_wrapper = graphs
    backend._ragged_fused_body = True
    return graphs


@pytest.fixture
def npu_patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The host's NPU patch on its classes, as on an NPU; yields the stack of the attention contexts that are open."""
    from vllm_omni.model_executor.models.minicpmo_4_5.batched_token2wav import BatchedToken2Wav
    from vllm_omni.model_executor.models.minicpmo_4_5.minicpmo_4_5_code2wav import MiniCPMO45Code2Wav
    from vllm_omni.platforms.npu.models import minicpmo_4_5_code2wav as npu

    opened: list[str] = []

    @contextmanager
    def context(device: torch.device, *, require_math: bool) -> Iterator[None]:
        opened.append(device.type)
        try:
            yield
        finally:
            opened.pop()

    monkeypatch.setattr(npu, "_flow_execution_context", context)
    stock = {
        (owner, name): vars(owner)[name]
        for owner, names in (
            (MiniCPMO45Code2Wav, ("_build_backend",)),
            (BatchedToken2Wav, ("_estimator_step", "setup_batch", "decode_batch")),
        )
        for name in names
    }
    npu.apply_minicpmo_4_5_code2wav_patch()
    try:
        yield opened
    finally:
        for (owner, name), function in stock.items():
            setattr(owner, name, function)
        npu._PATCHED = False
