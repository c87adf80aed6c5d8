# SPDX-License-Identifier: Apache-2.0
"""``flow.yaml`` and ``flow.pt`` with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omni_speech_accel.synthetic.random_weights import FloatArray, layer_weight, normal


@dataclass(frozen=True)
class FlowShape:
    """The parts of the flow that may differ from the shipped model and still load through the stock classes."""

    encoder_blocks: int
    up_blocks: int
    linear_units: int
    depth: int
    mlp_ratio: float


FULL = FlowShape(encoder_blocks=6, up_blocks=4, linear_units=2048, depth=16, mlp_ratio=4.0)
# The DiT's width stays at 512 with 8 heads of 64: cosyvoice2's chunk streaming (Step-Audio 2) writes its caches into
# buffers of exactly these sizes, whatever the YAML says. Two blocks, so that one layer's state in another's place
# shows.
SMALL = FlowShape(encoder_blocks=1, up_blocks=1, linear_units=256, depth=2, mlp_ratio=1.0)

_YAML = """\
flow: !new:cosyvoice2.flow.flow.CausalMaskedDiffWithXvec
  input_size: 512
  output_size: 80
  spk_embed_dim: 192
  output_type: 'mel'
  vocab_size: 6561
  encoder: !new:cosyvoice2.transformer.upsample_encoder_v2.UpsampleConformerEncoderV2
    input_size: 512
    output_size: 512
    input_layer: 'linear'
    pre_lookahead_len: 3
    num_blocks: {encoder_blocks}
    num_up_blocks: {up_blocks}
    up_stride: 2
    up_scale_factor: 2
    attention_heads: 8
    pos_enc_layer_type: 'rel_pos_espnet'
    selfattention_layer_type: 'rel_selfattn'
    key_bias: true
    linear_units: {linear_units}
    dropout_rate: 0.1
    positional_dropout_rate: 0.1
    attention_dropout_rate: 0.1
    normalize_before: true
  decoder: !new:cosyvoice2.flow.flow_matching.CausalConditionalCFM
    inference_cfg_rate: 0.7
    estimator: !new:cosyvoice2.flow.decoder_dit.DiT
      in_channels: 320
      out_channels: 80
      mlp_ratio: {mlp_ratio}
      depth: {depth}
      num_heads: 8
      head_dim: 64
      hidden_size: 512
"""


def flow_yaml(shape: FlowShape) -> str:
    """The configuration that the host instantiates the flow from."""
    return _YAML.format(**vars(shape))


def _flow_weight(seed: int, name: str, shape: tuple[int, ...]) -> FloatArray:
    stream = f"flow.{name}"
    # Zero at upstream's initialisation (adaLN-Zero) and non-zero in every trained model: with zeros each block would be
    # the identity and no fault inside one could show.
    if "adaLN_modulation" in name:
        return normal(seed, stream, shape, 0.02 if len(shape) == 2 else 0.1)
    if name == "input_embedding.weight":
        return normal(seed, stream, shape)
    if name.endswith(("pos_bias_u", "pos_bias_v")):
        return normal(seed, stream, shape, 0.1)
    return layer_weight(seed, stream, shape)


def write_flow(directory: Path, seed: int, shape: FlowShape) -> int:
    """Write ``flow.yaml`` and ``flow.pt`` into ``directory``; returns the number of weights."""
    import torch
    from hyperpyyaml import load_hyperpyyaml

    text = flow_yaml(shape)
    (directory / "flow.yaml").write_text(text)
    # On the meta device: the module owns 2.1 GiB of streaming buffers that are no part of its state.
    with torch.device("meta"):
        state = load_hyperpyyaml(text)["flow"].state_dict()
    weights = {name: torch.from_numpy(_flow_weight(seed, name, tuple(value.shape))) for name, value in state.items()}
    torch.save(weights, directory / "flow.pt")
    return sum(value.numel() for value in weights.values())
