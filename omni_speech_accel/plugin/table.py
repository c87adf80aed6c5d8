# SPDX-License-Identifier: Apache-2.0
"""The one ordered table of patches.

A row says what an item does, why, which host symbols it needs, how far its result may differ from stock, and when it
may retire. README, ``status``, configs and docs are made from it. Importing it imports nothing else that is heavy, so
the entry point may read it in every vLLM process.

Order matters where items wrap one symbol: a later row wraps an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omni_speech_accel.host.symbol import Symbol
from omni_speech_accel.tolerance import EXACT, DeviceTolerances, Tolerance

if TYPE_CHECKING:
    from omni_speech_accel.plugin.options import ItemOptions

_MODELS = "vllm_omni.model_executor.models"
CORE_MODULE = f"{_MODELS}.step_audio2.step_audio2_token2wav"
FACADE_MODULE = f"{_MODELS}.minicpmo_4_5.minicpmo_4_5_token2wav"
CODE2WAV_MODULE = f"{_MODELS}.minicpmo_4_5.minicpmo_4_5_code2wav"
BATCHED_MODULE = f"{_MODELS}.minicpmo_4_5.batched_token2wav"
GRAPHS_MODULE = f"{_MODELS}.minicpmo_4_5.cuda_graph_wrapper"
TALKER_MODULE = f"{_MODELS}.minicpmo_4_5.minicpmo_4_5_omni_tts"
TALKER_SAMPLE_MODULE = f"{_MODELS}.minicpmo_4_5.talker_codec_sample"
TOKENIZER_MODULE = "s3tokenizer.model_v2"

SPEAKER_EMBEDDING = "speaker embedding"
"""Name of the compared tensor that items may change by rounding."""

_REPOSITORY = "https://github.com/vllm-project/vllm-omni"
# The reference thread of the prompt features is one of these; its number is not known here.
_PROMPT_THREAD = f"{_REPOSITORY}/pulls?q=is%3Apr+_prepare_prompt"


@dataclass(frozen=True)
class Hook:
    """A wrapper around one host symbol.

    ``wrapper`` is a function of the patch's module, called as
    ``function(item, wrapped, instance, *args, **kwargs)`` where the item is on.
    An ``optional`` hook's symbol may be missing: some hosts have no such method. A ``lasting`` one is called also once
    the item has taken itself out of the stage.
    """

    symbol: Symbol
    wrapper: str
    optional: bool = False
    lasting: bool = False


@dataclass(frozen=True)
class StageModel:
    """A stage of a model family in which items act. ``classes``: the host's classes whose constructor opens it."""

    family: str
    pipeline: str
    stage: int
    name: str
    classes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.family} {self.name}"


CODE2WAV = StageModel("MiniCPM-o", "minicpmo_4_5", 2, "stage 2", ("MiniCPMO45Code2Wav",))
TALKER = StageModel("MiniCPM-o", "minicpmo_4_5", 1, "stage 1 (talker)", ("MiniCPMO45OmniTTSForConditionalGeneration",))
TOKEN2WAV = StageModel(
    "Step-Audio 2",
    "step_audio_2",
    1,
    "Token2Wav",
    ("StepAudio2Token2WavForConditionalGeneration", "StepAudio2Token2WavCore"),
)
FISH_OMNI = StageModel("fish_omni", "fish_omni", 0, "stage 0")
STAGE_MODELS = (CODE2WAV, TALKER, TOKEN2WAV, FISH_OMNI)


@dataclass(frozen=True)
class Patch:
    """One row: an item that a deploy YAML can switch on its own.

    Args:
        parity: How the result relates to stock's, in words; the numbers are ``tolerances``.
        retire: When the item may go.
        upstream: The public thread or pull request that would retire it, or that it comes from.
        native: Host symbols of which one shows that the host does the work itself.
        acts: The stages in which the item acts.
        idle: Function of the patch's module that tells of a built backend why the item has nothing to do there.
        refused_on: Verified hosts that start no model of the item on its devices, by a check of their own.
        captures: It records graphs of its own, so the device runtime is checked before the stage is built.
        tolerances: By the name of what is compared; everything else must be bit-exact.
    """

    key: str
    summary: str
    why: str
    parity: str
    retire: str
    upstream: str = ""
    hooks: tuple[Hook, ...] = ()
    needs: tuple[Symbol, ...] = ()
    native: tuple[Symbol, ...] = ()
    platforms: tuple[str, ...] = ("cuda", "npu", "cpu")
    default: bool = True
    idle: str = ""
    captures: bool = False
    acts: tuple[StageModel, ...] = (CODE2WAV, TOKEN2WAV)
    refused_on: tuple[str, ...] = ()
    tolerances: Mapping[str, DeviceTolerances] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """The module that holds the item's code."""
        return f"omni_speech_accel.items.{self.key}"

    @property
    def options(self) -> type[ItemOptions]:
        """The class of the item's options."""
        # Here: pydantic is no import for a process that only registers the plugin.
        from omni_speech_accel.plugin.options import OPTIONS, ItemOptions

        return OPTIONS.get(self.key, ItemOptions)

    @property
    def where(self) -> str:
        """The stages in which the item acts, in words."""
        return ", ".join(str(model) for model in self.acts)

    @property
    def against_stock(self) -> str:
        """How the result relates to stock's, numbers included."""
        return "; ".join([self.parity, *(f"{what}: {allowed}" for what, allowed in self.tolerances.items())])

    def tolerance(self, what: str, device_type: str) -> Tolerance:
        """How far ``what`` may be from stock's on a device of this type."""
        allowed = self.tolerances.get(what)
        return EXACT if allowed is None else allowed.on(device_type)

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """Every host symbol the item needs."""
        return tuple(hook.symbol for hook in self.hooks if not hook.optional) + self.needs


def _core(name: str, *parameters: str) -> Symbol:
    return Symbol(CORE_MODULE, f"StepAudio2Token2WavCore.{name}", ("self", *parameters))


def _facade(name: str) -> Symbol:
    return Symbol(FACADE_MODULE, f"MiniCPMO45Token2wav.{name}")


_SPEAKER_SWITCHES = ("enable_trt_spk_embedding", "enable_device_spk_embedding")
_ENSURE_LOADED = _core("_ensure_models_loaded")
_PREPARE_PROMPT = _core("_prepare_prompt", "prompt_wav")
_SPEAKER = _core("_forward_spk_embedding", "spk_feat")
_QUANTIZE = Symbol(TOKENIZER_MODULE, "S3TokenizerV2.quantize", ("self", "mel", "mel_len"), restated=True)
_ENCODER = Symbol(TOKENIZER_MODULE, "AudioEncoderV2.forward", ("self", "x", "x_len"))


def _batched(name: str, *parameters: str) -> Symbol:
    return Symbol(BATCHED_MODULE, f"BatchedToken2Wav.{name}", ("self", *parameters))


def _code2wav(name: str, *parameters: str) -> Symbol:
    return Symbol(CODE2WAV_MODULE, f"MiniCPMO45Code2Wav.{name}", ("self", *parameters) if parameters else None)


_PREPARE_FEATURES = _batched("prepare_prompt", "prompt_cache_id", "prompt_wav")
_SETUP_BATCH = _batched("setup_batch", "features", "batch_size")
_DECODE_CFM = _batched("_decode_cfm", "mu", "speakers", "cond", "cnn_cache", "att_cache")

PATCHES: tuple[Patch, ...] = (
    Patch(
        key="stop_index_cache",
        summary="Talker stop censoring keeps its constant index tensor, one per (stop ids, device).",
        why="Each frame rebuilt it with torch.tensor(..., device=...), a blocking host-to-device copy.",
        parity="bit-exact",
        retire="when the host keeps the index itself",
        upstream=_PROMPT_THREAD,
        acts=(TALKER,),
        hooks=(
            Hook(
                Symbol(
                    TALKER_SAMPLE_MODULE,
                    "_censor_stop_logits",
                    ("logits", "state", "min_tokens", "stop_ids", "eos_window_masked"),
                    restated=True,
                ),
                "censor_stop_logits",
            ),
        ),
        needs=(
            Symbol(TALKER_MODULE, "MiniCPMO45OmniTTSForConditionalGeneration._sample_audio_code"),
            Symbol(TALKER_MODULE, "MiniCPMO45OmniTTSForConditionalGeneration._sample_audio_code_greedy"),
        ),
    ),
    Patch(
        key="sync_free_prompt",
        summary="Prompt features never wait for the device: pinned uploads, short audio without the mask test.",
        why="py-spy on the reference setup: _prepare_prompt took 57.5 % of stage-2 host time at concurrency 8; each "
        "pageable upload, the .any() in quantize and freqs_cis.to(device) drains the device queue.",
        parity="bit-exact",
        retire="when the host stages its uploads and picks the short path itself",
        upstream=_PROMPT_THREAD,
        native=(_core("_quantize_s3_eager"),),
        hooks=(
            Hook(_ENSURE_LOADED, "ensure_models_loaded"),
            Hook(_PREPARE_PROMPT, "prepare_prompt"),
            Hook(_QUANTIZE, "quantize"),
        ),
        needs=(_ENCODER,),
    ),
    Patch(
        key="speaker_device",
        summary="CAM++ speaker embedding on the accelerator, built from campplus.onnx, instead of CPU onnxruntime.",
        why="campplus on CPU onnxruntime is 77-79 ms of a 144-155 ms prompt setup on an H200 host.",
        parity="equal to onnxruntime but for another order of summation, checked at load over several lengths",
        # Trained weights (3D-Speaker's zh_en common advanced) against onnxruntime, 450 inputs of 30 to 900 frames, one
        # thread and two: median 2.3e-6, worst 1.9e-5, rounding on either side. One per cent on the least influential
        # weight: 4e-4. Ascend's HF32 keeps ten mantissa bits, as TF32, with which 1.1e-3 was measured; the weights are
        # held to the full tolerance on the CPU first.
        tolerances={SPEAKER_EMBEDDING: DeviceTolerances(Tolerance(5e-5, 0.99999999), npu=Tolerance(5e-3, 0.99999))},
        retire="when the host runs campplus on every accelerator",
        upstream=_PROMPT_THREAD,
        hooks=(
            Hook(_ENSURE_LOADED, "ensure_models_loaded"),
            *(Hook(_core(name), name, optional=True, lasting=True) for name in _SPEAKER_SWITCHES),
            *(Hook(_facade(name), "of_the_core", optional=True, lasting=True) for name in _SPEAKER_SWITCHES),
            Hook(_SPEAKER, "forward_spk_embedding"),
        ),
    ),
    Patch(
        key="speaker_graph",
        summary="CAM++ captured as one graph per frame count.",
        why="Eager CAM++ is about 1,150 launches, 16 ms on an H200 host; a replay is one, 5 ms.",
        parity="equal to eager CAM++ on the same device",
        tolerances={SPEAKER_EMBEDDING: DeviceTolerances(Tolerance(1e-5))},
        retire="never while campplus is launch-bound",
        upstream=_PROMPT_THREAD,
        platforms=("cuda", "npu"),
        captures=True,
        hooks=(Hook(_SPEAKER, "forward_spk_embedding"),),
    ),
    Patch(
        key="speaker_stream",
        summary="CAM++ on a private stream, joined by an event.",
        why="On the decode stream the campplus kernels queue behind the decode backlog (100 ms -> 43 ms in the "
        "reference thread, on its NPU).",
        parity="bit-exact",
        retire="never while prompt setup shares a device with decode",
        upstream=_PROMPT_THREAD,
        platforms=("cuda", "npu"),
        hooks=(Hook(_SPEAKER, "forward_spk_embedding"),),
    ),
    Patch(
        key="s3_graph",
        summary="S3 quantize captured as one graph per frame count.",
        why="Eager quantize is 7-8 ms of launches per reference on an H200 host; a replay takes 4 ms.",
        parity="codes and lengths bit-equal to eager",
        retire="never while quantize is launch-bound",
        upstream=_PROMPT_THREAD,
        native=(_core("_quantize_s3_graph"),),
        platforms=("cuda", "npu"),
        captures=True,
        hooks=(
            Hook(_ENSURE_LOADED, "ensure_models_loaded"),
            Hook(_QUANTIZE, "quantize"),
        ),
        needs=(_ENCODER,),
    ),
    Patch(
        key="cold_reference_batch",
        summary="Cold references of one step: their initial CFM solved as one batch.",
        why="Eight new voices in one step are eight CFM solves: 692 ms on 0.30.0, 176 ms on 0.32.0rc1 (H200, "
        "full-size weights).",
        parity="states within the host's own spread over batch sizes (relative error <= 3e-4); bit-exact for a "
        "reference that is solved alone",
        retire="when the host solves the cold references of a step together",
        upstream=f"{_REPOSITORY}/pull/9221",
        idle="policy_problem",
        acts=(CODE2WAV,),
        hooks=(
            Hook(_code2wav("forward"), "forward"),
            Hook(_code2wav("_iter_decode_batches", "buckets"), "iter_decode_batches"),
            Hook(_batched("_create_initial_states", "features", "batch_size"), "create_initial_states"),
            Hook(_batched("_encode_chunk", "tokens", "last_chunk", "cnn_cache", "att_cache"), "encode_chunk"),
            Hook(_DECODE_CFM, "decode_cfm"),
        ),
        needs=(_PREPARE_FEATURES, _SETUP_BATCH, _batched("_ensure_relpos_pe", "tokens", "att_cache")),
    ),
    Patch(
        key="cold_setup_precapture",
        summary="Graphs of the initial CFM solve captured at start-up, after the decode graphs, smallest batch first.",
        why="The first cold reference of a batch size waits for a capture.",
        parity="bit-exact: the graphs that the host would capture later",
        retire="when the host's precapture covers cache length zero",
        upstream=f"{_REPOSITORY}/pull/9221",
        platforms=("cuda", "npu"),
        acts=(CODE2WAV,),
        hooks=(Hook(_batched("precapture_whole_euler", "features"), "precapture_whole_euler"),),
        needs=(
            _batched("_create_initial_states", "features", "batch_size"),
            Symbol(GRAPHS_MODULE, "WholeEulerCFMGraphWrapper._graph_batches", ("self",)),
            Symbol(GRAPHS_MODULE, "WholeEulerCFMGraphWrapper.stats_snapshot", ("self",)),
        ),
    ),
    Patch(
        key="cross_reference_decode",
        summary="Rows of different references in one decode batch.",
        why="Eight voices at once are eight batches of one: 653 ms per chunk against 143 ms on 0.30.0, 170 ms against "
        "56 ms on 0.32.0rc1 (H200, full-size weights).",
        parity="each row equals the host's separate call within the host's own spread over batch sizes, given the same "
        "vocoder noise (drawn per call, so a seed gives other samples); bit-exact while all rows share a reference",
        retire="when the host's decode batches no longer depend on the reference",
        upstream=f"{_REPOSITORY}/pull/9159",
        acts=(CODE2WAV,),
        hooks=(
            Hook(_code2wav("_iter_decode_batches", "buckets"), "iter_decode_batches"),
            Hook(_PREPARE_FEATURES, "prepare_prompt"),
            Hook(_batched("decode_batch", "tokens", "features", "states", "last_chunk"), "decode_batch"),
            Hook(_DECODE_CFM, "decode_cfm"),
        ),
        needs=(
            _SETUP_BATCH,
            Symbol(CODE2WAV_MODULE, "_RequestState"),
            Symbol(CODE2WAV_MODULE, "_batch_error", ("reason",)),
            Symbol(BATCHED_MODULE, "PromptFeatures"),
        ),
    ),
    Patch(
        key="fish_omni_full_graph",
        summary="fish_omni stage 0 decodes from full graphs (FULL_AND_PIECEWISE), capture sizes up to max_num_seqs.",
        why="PIECEWISE leaves the decode step eager: one stream made 17.3 frames/s so, and 22.4 to 22.9 with full "
        "graphs, in the reference thread on its NPU.",
        parity="no tensor of ours; the same kernels replayed. `transitions` compares two servers' speech",
        retire="when the host's own deploy asks for FULL_AND_PIECEWISE on NPU: the item then finds nothing to change",
        upstream=f"{_REPOSITORY}/pull/9386",
        platforms=("npu",),
        acts=(FISH_OMNI,),
        refused_on=("0.32.0rc1",),  # stage 0 asks for model runner v2, which the host refuses on NPU
        needs=(
            Symbol(
                "vllm_omni.config.omni_config",
                "VllmOmniConfig.from_pipeline_config",
                ("cls", "pipeline_cfg", "user_deploy_config", "deploy_config_path", "cli_overrides", "strategy_specs"),
            ),
            Symbol("vllm_omni.config.stage_config", "_apply_platform_overrides", ("deploy", "platform")),
            Symbol(f"{_MODELS}.fish_omni.fish_omni_model", "FishOmniForConditionalGeneration"),
        ),
    ),
)


def patch_for(key: str) -> Patch:
    """The row of item ``key``; raises ``KeyError``."""
    for patch in PATCHES:
        if patch.key == key:
            return patch
    raise KeyError(key)


CONFIG_MODULE = "vllm_omni.config.omni_config"


_TALKER = "MiniCPMO45OmniTTSForConditionalGeneration"


@dataclass(frozen=True)
class Anchor:
    """A wrapper called as ``wrapper(wrapped, instance, args, kwargs)`` of the module ``implementation``."""

    symbol: Symbol
    wrapper: str
    implementation: str = "omni_speech_accel.anchors.stages"


ANCHORS: tuple[Anchor, ...] = (
    Anchor(Symbol(CODE2WAV_MODULE, "MiniCPMO45Code2Wav.__init__"), "stage_model_init"),
    Anchor(Symbol(CODE2WAV_MODULE, "MiniCPMO45Code2Wav._build_backend"), "build_backend"),
    Anchor(Symbol(BATCHED_MODULE, "BatchedToken2Wav.__init__"), "backend_init"),
    Anchor(Symbol(CORE_MODULE, "StepAudio2Token2WavCore.__init__"), "core_init"),
    Anchor(Symbol(FACADE_MODULE, "MiniCPMO45Token2wav.__init__"), "facade_init"),
    Anchor(Symbol(CORE_MODULE, "StepAudio2Token2WavForConditionalGeneration.__init__"), "announced_model_init"),
    Anchor(Symbol(TALKER_MODULE, f"{_TALKER}.__init__"), "announced_model_init"),
    Anchor(Symbol(TALKER_MODULE, f"{_TALKER}._sample_audio_code"), "with_session"),
    Anchor(Symbol(TALKER_MODULE, f"{_TALKER}._sample_audio_code_greedy"), "with_session"),
    Anchor(
        Symbol(CONFIG_MODULE, "VllmOmniConfig.from_pipeline_config"),
        "from_pipeline_config",
        "omni_speech_accel.anchors.deploy",
    ),
)
