# SPDX-License-Identifier: Apache-2.0
"""Deploy overlays with every item of a model listed, rendered from the patch table.

``configs/`` and the CLI's ``config`` command both print what is made here, so
neither can list an item that the table does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

from omni_speech_accel.plugin.table import CODE2WAV, FISH_OMNI, PATCHES, TOKEN2WAV, Patch, StageModel

_SHM = "connector_of_shared_memory"
_DEVICES = {"cuda": "NVIDIA GPUs", "npu": "Ascend NPUs", "cpu": "CPUs"}


@dataclass(frozen=True)
class Profile:
    """A model on a platform.

    ``main`` is the stage where its items act (most of them, where there are
    several), ``base`` the host's deploy file, ``place`` the keys that lead to the block: a connector's
    ``extra`` reaches every stage on that connector and stays out of the compile
    cache's hash; a stage's ``additional_config`` is for a deploy without connectors.
    ``devices`` are the platforms that an overlay is written for, where not all of ``platforms``.
    """

    key: str
    model: str
    main: StageModel
    base: str
    platforms: tuple[str, ...]
    place: tuple[str | int, ...] = ("connectors", _SHM, "extra")
    place_note: str = ""
    notes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The model family, as the table names it."""
        return self.main.family

    @property
    def pipeline(self) -> str:
        """The host's key of the model's pipeline."""
        return self.main.pipeline

    @property
    def stage(self) -> int:
        """The number of ``main``."""
        return self.main.stage

    @property
    def title(self) -> str:
        """The model and the devices that the overlay is for."""
        return f"{self.model} on {' and '.join(_DEVICES[name] for name in self.devices or self.platforms)}"

    def acts_in(self, patch: Patch) -> int | None:
        """The stage of this model in which an item acts, ``None`` where it is for another model."""
        return next((model.stage for model in patch.acts if model.pipeline == self.pipeline), None)

    def concerns(self, patch: Patch) -> bool:
        """Whether an item acts on this model at all."""
        return self.acts_in(patch) is not None

    def stages(self) -> frozenset[int]:
        """The stages of this model in which an item acts."""
        return frozenset(stage for patch in PATCHES if (stage := self.acts_in(patch)) is not None)

    def items(self) -> tuple[Patch, ...]:
        """The table's rows that can act here, in table order: at the block's stage, where it stands at one."""
        stage = self.place[1] if self.place[0] == "stages" else None
        return tuple(
            patch
            for patch in PATCHES
            if self.concerns(patch)
            and set(self.platforms) & set(patch.platforms)
            and stage in (None, self.acts_in(patch))
        )


PROFILES: tuple[Profile, ...] = (
    Profile("minicpmo_4_5_cuda", "MiniCPM-o 4.5", CODE2WAV, "minicpmo_4_5.yaml", ("cuda",)),
    Profile(
        "minicpmo_4_5_npu",
        "MiniCPM-o 4.5",
        CODE2WAV,
        "minicpmo_4_5.yaml",
        ("npu",),
        place_note="The block stands in the connector's extra: on NPU the host's own "
        "platforms.npu.stages[2].additional_config replaces stages[2].additional_config, and a block there "
        "would be lost.",
    ),
    Profile(
        "step_audio_2",
        "Step-Audio 2",
        TOKEN2WAV,
        "step_audio_2.yaml",
        ("cuda", "npu"),
        place=("stages", 1, "additional_config"),
        place_note="This deploy has no connectors, so the block stands at the Token2Wav stage.",
    ),
    Profile(
        "fish_omni_npu",
        "Fish Audio Drama 3 (fish_omni)",
        FISH_OMNI,
        "fish_omni.yaml",
        ("npu",),
        notes=(
            "vllm-omni 0.32.0rc1 refuses this deploy on NPU: its stage 0 asks for model runner v2. A host that serves "
            "fish_omni on NPU says so in its own fish_omni.yaml; `omni-speech-accel status --deploy-config` tells.",
        ),
    ),
)


def profile_for(key: str) -> Profile:
    """The profile named ``key``; raises ``KeyError``."""
    for profile in PROFILES:
        if profile.key == key:
            return profile
    raise KeyError(key)


def profile_of(pipeline: str | None) -> Profile | None:
    """The first profile of a pipeline of the host, ``None`` where no item is for it."""
    return next((profile for profile in PROFILES if profile.pipeline == pipeline), None)


def suggest_profile(base: str, platform: str) -> Profile | None:
    """The profile whose base has the file name of ``base``, or begins it, on ``platform``."""
    name = base.rsplit("/", 1)[-1].removesuffix(".yaml")
    fitting = [
        profile
        for profile in PROFILES
        if name.startswith(profile.base.removesuffix(".yaml")) and platform in profile.platforms
    ]
    return fitting[0] if fitting else None
