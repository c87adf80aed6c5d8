# SPDX-License-Identifier: Apache-2.0
"""What an item's mapping in the deploy YAML may hold: one class of options per kind of item."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field


class ItemOptions(BaseModel):
    """Options that every item takes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    enabled: bool = True


class GraphOptions(ItemOptions):
    """Options of an item that captures one graph per shape."""

    max_graphs: int = Field(default=2, ge=0, le=64, description="Shapes captured; first seen, first captured.")


class ColdReferenceOptions(ItemOptions):
    """Options of ``cold_reference_batch``."""

    max_batch: int | None = Field(
        default=None, ge=1, le=64, description="References solved together; default: the stage's microbatch."
    )
    max_memory_mib: int | None = Field(
        default=None, ge=64, description="Cap on the transient memory of one solve; default: half of the free memory."
    )
    encoder_graphs: int = Field(
        default=4,
        ge=0,
        le=64,
        description="Graphs of the prompt encoder, one per group size and reference length (CUDA).",
    )


class CrossReferenceOptions(ItemOptions):
    """Options of ``cross_reference_decode``."""

    max_batch: int | None = Field(
        default=None, ge=1, le=256, description="Rows of one joined decode; default: the host's largest graphed batch."
    )
    max_memory_mib: int | None = Field(
        default=None,
        ge=64,
        description="Cap on the transient memory of a joined decode that stacks its rows' caches; "
        "default: half of the free memory.",
    )


class FullGraphOptions(ItemOptions):
    """Options of ``fish_omni_full_graph``."""

    keep_piecewise_above: bool = Field(
        default=False, description="Keep the stock capture sizes above max_num_seqs for prefill and mixed batches."
    )


OPTIONS: Mapping[str, type[ItemOptions]] = {
    "speaker_graph": GraphOptions,
    "s3_graph": GraphOptions,
    "cold_reference_batch": ColdReferenceOptions,
    "cross_reference_decode": CrossReferenceOptions,
    "fish_omni_full_graph": FullGraphOptions,
}
"""By item; every other item takes :class:`ItemOptions`."""
