"""Small models of timm, torchvision and diffusers, and torch's own database of modules.

Dropout and drop path are off, so that nothing depends on the order of random draws. Random inputs
of a model are drawn from the seed of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.examine import Call

BATCH = 2
Fields = Mapping[str, Any]
Draw = Callable[[torch.Generator], Any]


def shaken(model: nn.Module) -> nn.Module:
    """Move every parameter from its initial value, and turn dropout off."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout"):
            if "Drop" in type(module).__name__ and hasattr(module, name):
                setattr(module, name, 0.0)
    return model.train()


@dataclass(frozen=True)
class Built:
    """A model that a function creates, and how each of its arguments is drawn."""

    group: str
    model: str
    build: Callable[[], nn.Module]
    inputs: Mapping[str | int, Draw]

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return shaken(self.build())

    def batch(self, seed: int) -> Call:
        generator = torch.Generator().manual_seed(seed)
        drawn = {name: draw(generator) for name, draw in self.inputs.items()}
        args = tuple(value for name, value in drawn.items() if isinstance(name, int))
        return args, {name: value for name, value in drawn.items() if isinstance(name, str)}


def reals(*shape: int) -> Draw:
    return lambda generator: torch.randn((BATCH, *shape), generator=generator)


def whole_reals(*shape: int) -> Draw:
    """Draw the same for shapes without a leading batch dimension."""
    return lambda generator: torch.randn(shape, generator=generator)


def below(number: int, *shape: int) -> Draw:
    return lambda generator: torch.randint(0, number, (BATCH, *shape), generator=generator)


def always(value: Any) -> Draw:
    return lambda generator: value


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Draw:
    return lambda generator: torch.ones((BATCH, *shape), dtype=dtype)


# -- timm -----------------------------------------------------------------------------------------
def _timm(name: str, fields: Fields) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=4, **fields)
    return model


def timm_cases() -> list[Built]:
    return [
        Built("timm", name, partial(_timm, name, fields), {0: reals(3, side, side)})
        for name, side, fields in TIMM
    ]


NARROW = {"embed_dim": 32, "depth": 2, "num_heads": 2}
STAGED = {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}
TIMM: list[tuple[str, int, Fields]] = [
    ("vit_tiny_patch16_224", 32, {**NARROW, "img_size": 32}),
    ("deit_tiny_distilled_patch16_224", 32, {**NARROW, "img_size": 32}),
    ("beit_base_patch16_224", 32, {**NARROW, "img_size": 32}),
    ("eva02_tiny_patch14_224", 28, {**NARROW, "img_size": 28}),
    ("vit_relpos_small_patch16_224", 32, {**NARROW, "img_size": 32}),
    ("cait_xxs24_224", 32, {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 32}),
    ("xcit_nano_12_p16_224", 32, {**NARROW, "img_size": 32}),
    ("convit_tiny", 32, {**NARROW, "local_up_to_layer": 1, "img_size": 32}),
    ("swin_tiny_patch4_window7_224", 64, {**STAGED, "img_size": 64, "window_size": 2}),
    ("swinv2_tiny_window8_256", 64, {**STAGED, "img_size": 64, "window_size": 2}),
    ("twins_svt_small", 64, {"img_size": 64, "depths": (1, 1, 1, 1)}),
    ("pit_ti_224", 64, {"img_size": 64}),
    ("levit_128s", 64, {"img_size": 64}),
    ("tiny_vit_5m_224", 64, {}),
    ("mvitv2_tiny", 64, {"img_size": 64}),
    ("volo_d1_224", 64, {"img_size": 64}),
    ("vit_base_resnet26d_224", 64, {**NARROW, "img_size": 64}),
    ("coat_lite_tiny", 64, {"img_size": 64, "serial_depths": (1, 1, 1, 1)}),
    ("maxvit_pico_rw_256", 64, {"img_size": 64, "depths": (1, 1, 1, 1)}),
    ("coatnet_nano_rw_224", 64, {"img_size": 64, "depths": (1, 1, 1, 1)}),
    ("gcvit_xxtiny", 64, {"img_size": 64}),
    ("hiera_tiny_224", 64, {"img_size": 64, "stages": (1, 1, 1, 1)}),
    ("pvt_v2_b0", 64, {"depths": (1, 1, 1, 1)}),
    ("davit_tiny", 64, {"depths": (1, 1, 1, 1)}),
    ("focalnet_tiny_srf", 64, {}),
    ("poolformer_s12", 64, {}),
    ("inception_next_atto", 64, {}),
    ("mixer_s32_224", 64, {"img_size": 64}),
    ("resmlp_12_224", 32, {"img_size": 32}),
    ("gmlp_ti16_224", 32, {"img_size": 32}),
    ("sequencer2d_s", 64, {"layers": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32),
                           "hidden_sizes": (8, 8, 8, 8)}),
    ("convnext_atto", 64, {"depths": (1, 1, 1, 1)}),
    ("edgenext_xx_small", 64, {"depths": (1, 1, 1, 1)}),
    ("mobilevit_xxs", 64, {}),
    ("mobilenetv3_small_050", 64, {}),
    ("efficientnet_lite0", 64, {}),
    ("efficientvit_b0", 64, {}),
    ("resnet10t", 64, {}),
    ("test_nfnet", 64, {}),
    ("test_mambaout", 64, {}),
    ("test_byobnet", 64, {}),
    ("regnetx_002", 64, {}),
    ("ghostnet_050", 64, {}),
    ("starnet_s1", 64, {"depths": (1, 1, 1, 1)}),
    ("repvit_m0_9", 64, {}),
    ("halonet26t", 256, {}),
    ("skresnet18", 64, {}),
    ("lcnet_035", 64, {}),
]  # fmt: skip


# -- torchvision ----------------------------------------------------------------------------------
def _torchvision(name: str, fields: Fields) -> nn.Module:
    from torchvision import models

    if "." in name:  # a class of one of its modules
        module, kind = name.split(".")
        model: nn.Module = getattr(getattr(models, module), kind)(**fields)
        return model
    return models.get_model(name, weights=None, **fields)  # type: ignore[no-any-return]


def torchvision_cases() -> list[Built]:
    return [
        Built("torchvision", f"{name} {part}".strip(), partial(_torchvision, name, fields),
              {0: reals(*shape)})
        for name, part, shape, fields in TORCHVISION
    ]  # fmt: skip


C, W = {"num_classes": 4}, {"num_classes": 4, "weights_backbone": None}
RGB, FILM = (3, 64, 64), (3, 8, 32, 32)
TORCHVISION: list[tuple[str, str, tuple[int, ...], Fields]] = [
    *((name, "", RGB, C) for name in (
        "resnet18", "resnet34", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "densenet121",
        "densenet169", "squeezenet1_0", "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_small",
        "mobilenet_v3_large", "mnasnet0_5", "mnasnet0_75", "mnasnet1_0", "shufflenet_v2_x0_5",
        "shufflenet_v2_x1_0", "shufflenet_v2_x1_5", "efficientnet_b0", "efficientnet_b1",
        "efficientnet_v2_s", "regnet_x_400mf", "regnet_x_800mf", "regnet_y_400mf",
        "regnet_y_800mf", "convnext_tiny",
    )),
    ("googlenet", "", RGB, {**C, "init_weights": False}),
    ("inception_v3", "", (3, 299, 299), {**C, "init_weights": False}),
    ("vision_transformer.VisionTransformer", "small", (3, 32, 32),
     {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 32,
      "mlp_dim": 48, **C}),
    ("swin_transformer.SwinTransformer", "small", (3, 32, 32),
     {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2],
      "window_size": [4, 4], **C}),
    ("maxvit.MaxVit", "small", (3, 64, 64),
     {"input_size": (64, 64), "stem_channels": 8, "partition_size": 2, "block_channels": [8, 16],
      "block_layers": [1, 1], "head_dim": 8, "stochastic_depth_prob": 0.0, **C}),
    *((name, "", RGB, W) for name in (
        "deeplabv3_mobilenet_v3_large",
        "lraspp_mobilenet_v3_large",
    )),
    *((name, "", FILM, C) for name in ("r3d_18", "mc3_18", "r2plus1d_18")),
    ("video.SwinTransformer3d", "small", FILM,
     {"patch_size": [2, 4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2],
      "window_size": [2, 4, 4], **C}),
    ("mnasnet1_3", "", RGB, C),
]  # fmt: skip


# -- diffusers ------------------------------------------------------------------------------------
def _diffusers(name: str, fields: Fields) -> nn.Module:
    import diffusers

    model: nn.Module = getattr(diffusers, name)(**fields)
    return model


def diffusers_cases() -> list[Built]:
    return [Built("diffusers", name, partial(_diffusers, name, fields), inputs)
            for name, fields, inputs in DIFFUSERS]  # fmt: skip


TIME: Mapping[str, Draw] = {"timestep": below(1000)}
VAE: Fields = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 4, "norm_num_groups": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (4, 8),
}  # fmt: skip
UNET: Fields = {"block_out_channels": (4, 8), "norm_num_groups": 2, "layers_per_block": 1,
                "sample_size": 16}  # fmt: skip
CROSS: Fields = {**UNET, "cross_attention_dim": 8, "attention_head_dim": 2}
FLUX: Fields = {
    "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1,
    "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}  # fmt: skip
FLUX_CALL: Mapping[str, Draw] = {
    "hidden_states": reals(16, 4), "encoder_hidden_states": reals(8, 32),
    "img_ids": whole_reals(16, 3), "txt_ids": whole_reals(8, 3), "timestep": ones(),
}  # fmt: skip
POOLED: Mapping[str, Draw] = {"pooled_projections": reals(32)}
TWO_HEADS: Fields = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
                     "out_channels": 4, "num_layers": 2}  # fmt: skip
WAN: Fields = {**TWO_HEADS, "patch_size": (1, 2, 2), "text_dim": 16, "freq_dim": 32, "ffn_dim": 32,
               "cross_attn_norm": True, "rope_max_seq_len": 32}  # fmt: skip
FILM_CALL: Mapping[str, Draw] = {"hidden_states": reals(4, 2, 8, 8),
                                 "encoder_hidden_states": reals(6, 16), **TIME}  # fmt: skip
SMALL_DIT: Fields = {"num_attention_heads": 2, "attention_head_dim": 4, "in_channels": 4,
                     "num_layers": 1, "patch_size": 2, "sample_size": 8}  # fmt: skip
IMAGE = reals(4, 8, 8)
PICTURE, CLIP = {"sample": reals(3, 16, 16)}, {"sample": reals(3, 9, 16, 16)}
SIZES: Mapping[str, Draw] = {
    name: always(torch.tensor([[8.0, 8.0]] * BATCH))
    for name in ("original_size", "target_size", "crop_coords")
}

DIFFUSERS: list[tuple[str, Fields, Mapping[str | int, Draw]]] = [
    ("UNet2DModel",
     {**UNET, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "attention_head_dim": 2,
      "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}, {**PICTURE, **TIME}),
    ("UNet2DConditionModel",
     {**CROSS, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
      "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
     {"sample": reals(4, 16, 16), "encoder_hidden_states": reals(4, 8), **TIME}),
    ("UNet3DConditionModel",
     {**CROSS, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
      "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
     {"sample": reals(4, 2, 16, 16), "encoder_hidden_states": reals(4, 8), **TIME}),
    ("UNet1DModel",
     {"block_out_channels": (8, 8, 16), "in_channels": 6, "out_channels": 6,
      "time_embedding_type": "positional", "use_timestep_embedding": True,
      "flip_sin_to_cos": False, "freq_shift": 1.0, "act_fn": "swish",
      "out_block_type": "OutConv1DBlock", "mid_block_type": "MidResTemporalBlock1D",
      "down_block_types": ("DownResnetBlock1D",) * 3, "up_block_types": ("UpResnetBlock1D",) * 2},
     {"sample": reals(6, 16), **TIME}),
    ("UNetMotionModel",
     {**UNET, "block_out_channels": (16, 32), "norm_num_groups": 16, "num_attention_heads": 2,
      "cross_attention_dim": 16,
      "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
      "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion")},
     {"sample": reals(4, 2, 16, 16), "timestep": always(torch.tensor([10])),
      "encoder_hidden_states": lambda g: torch.randn(4, 4, 16, generator=g)}),
    ("UNetSpatioTemporalConditionModel",
     {"block_out_channels": (32, 32), "cross_attention_dim": 16, "num_attention_heads": (2, 2),
      "layers_per_block": 1, "in_channels": 4, "addition_time_embed_dim": 8,
      "projection_class_embeddings_input_dim": 24,
      "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
      "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")},
     {"sample": reals(2, 4, 16, 16), "encoder_hidden_states": reals(1, 16),
      "added_time_ids": reals(3), **TIME}),
    ("AutoencoderKL", VAE, PICTURE),
    ("AsymmetricAutoencoderKL",
     {"down_block_types": ("DownEncoderBlock2D",) * 2, "down_block_out_channels": (4, 8),
      "up_block_types": ("UpDecoderBlock2D",) * 2, "up_block_out_channels": (4, 8),
      "latent_channels": 4, "norm_num_groups": 2}, {**PICTURE, "mask": ones(1, 16, 16)}),
    ("VQModel", {**VAE, "latent_channels": 3}, PICTURE),
    ("AutoencoderTiny",
     {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8),
      "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}, PICTURE),
    ("AutoencoderDC",
     {"in_channels": 3, "latent_channels": 4, "attention_head_dim": 2,
      "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
      "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
      "encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8),
      "encoder_qkv_multiscales": ((), (5,)), "decoder_qkv_multiscales": ((), (5,)),
      "encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1),
      "downsample_block_type": "conv", "upsample_block_type": "interpolate"}, PICTURE),
    ("AutoencoderOobleck",
     {"encoder_hidden_size": 12, "decoder_channels": 12, "decoder_input_channels": 6,
      "downsampling_ratios": [2, 4], "channel_multiples": [1, 2]},
     {"sample": reals(2, 24)}),
    ("AutoencoderKLTemporalDecoder",
     {"block_out_channels": (32, 32), "layers_per_block": 1,
      "down_block_types": ("DownEncoderBlock2D",) * 2},
     {**PICTURE, "num_frames": always(2)}),
    ("AutoencoderKLWan",
     {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
      "temperal_downsample": [False, True, True]}, CLIP),
    ("AutoencoderKLCogVideoX",
     {"block_out_channels": (8, 8, 8, 8), "latent_channels": 4, "layers_per_block": 1,
      "norm_num_groups": 2}, {"sample": reals(3, 8, 16, 16)}),
    ("AutoencoderKLHunyuanVideo",
     {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "layers_per_block": 1,
      "norm_num_groups": 4}, CLIP),
    ("AutoencoderKLLTXVideo",
     {"latent_channels": 8, "block_out_channels": (8, 8, 8, 8),
      "decoder_block_out_channels": (8, 8, 8, 8), "layers_per_block": (1,) * 5,
      "decoder_layers_per_block": (1,) * 5, "spatio_temporal_scaling": (True, True, False, False),
      "decoder_spatio_temporal_scaling": (True, True, False, False), "patch_size": 1}, CLIP),
    ("DiTTransformer2DModel", {**SMALL_DIT, "out_channels": 8, "num_embeds_ada_norm": 8},
     {"hidden_states": IMAGE, "class_labels": below(8), **TIME}),
    ("PixArtTransformer2DModel",
     {**SMALL_DIT, "cross_attention_dim": 8, "caption_channels": 6,
      "use_additional_conditions": False, "out_channels": 8},
     {"hidden_states": IMAGE, "encoder_hidden_states": reals(5, 6), **TIME,
      "added_cond_kwargs": always({"aspect_ratio": None, "resolution": None})}),
    ("Transformer2DModel",
     {"num_attention_heads": 2, "attention_head_dim": 4, "in_channels": 4, "norm_num_groups": 2},
     {"hidden_states": IMAGE}),
    ("TransformerTemporalModel",
     {"num_attention_heads": 2, "attention_head_dim": 4, "in_channels": 4, "norm_num_groups": 1},
     {"hidden_states": IMAGE, **TIME}),
    ("HunyuanDiT2DModel",
     {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2,
      "attention_head_dim": 8, "num_attention_heads": 2, "cross_attention_dim": 8,
      "cross_attention_dim_t5": 8, "pooled_projection_dim": 4, "hidden_size": 16, "text_len": 4,
      "text_len_t5": 4},
     {"hidden_states": IMAGE, "encoder_hidden_states": reals(4, 8),
      "text_embedding_mask": ones(4), "encoder_hidden_states_t5": reals(4, 8),
      "text_embedding_mask_t5": ones(4), "timestep": ones(), "image_meta_size": ones(6),
      "style": always(torch.zeros(BATCH, dtype=torch.long)),
      "image_rotary_emb": always([torch.ones(16, 8), torch.zeros(16, 8)])}),
    ("LatteTransformer3DModel",
     {**SMALL_DIT, "caption_channels": 8, "cross_attention_dim": 8, "out_channels": 8,
      "video_length": 2, "num_embeds_ada_norm": 1000, "norm_type": "ada_norm_single",
      "norm_elementwise_affine": False},
     {"hidden_states": reals(4, 2, 8, 8), "encoder_hidden_states": reals(4, 8), **TIME}),
    ("LuminaNextDiT2DModel",
     {"sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 2,
      "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 16, "learn_sigma": False,
      "cross_attention_dim": 32},
     {"hidden_states": IMAGE, "encoder_hidden_states": reals(6, 32), **TIME,
      "encoder_mask": ones(6), "image_rotary_emb": whole_reals(384, 384, 4),
      "cross_attention_kwargs": always({})}),
    ("Lumina2Transformer2DModel",
     {"sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 2,
      "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2,
      "axes_dim_rope": (4, 2, 2), "axes_lens": (32, 32, 32), "cap_feat_dim": 32},
     {"hidden_states": IMAGE, "encoder_hidden_states": reals(6, 32), **TIME,
      "encoder_attention_mask": ones(6, dtype=torch.bool)}),
    ("SanaTransformer2DModel",
     {"patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 1, "sample_size": 8,
      "attention_head_dim": 4, "num_attention_heads": 2, "num_cross_attention_heads": 2,
      "cross_attention_head_dim": 4, "cross_attention_dim": 8, "caption_channels": 8},
     {"hidden_states": IMAGE, "encoder_hidden_states": reals(6, 8), **TIME}),
    ("SD3Transformer2DModel",
     {"sample_size": 8, "patch_size": 1, "in_channels": 4, "num_layers": 2, "out_channels": 4,
      "attention_head_dim": 8, "num_attention_heads": 2, "caption_projection_dim": 16,
      "joint_attention_dim": 32, "pooled_projection_dim": 32, "pos_embed_max_size": 16},
     {"hidden_states": IMAGE, "encoder_hidden_states": reals(6, 32), **POOLED, **TIME}),
    ("AuraFlowTransformer2DModel",
     {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1,
      "num_single_dit_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2,
      "caption_projection_dim": 16, "joint_attention_dim": 32, "pos_embed_max_size": 64},
     {"hidden_states": IMAGE, "encoder_hidden_states": reals(6, 32), **TIME}),
    ("FluxTransformer2DModel", {**FLUX, "pooled_projection_dim": 32}, {**FLUX_CALL, **POOLED}),
    ("ChromaTransformer2DModel",
     {**FLUX, "approximator_num_channels": 8, "approximator_hidden_dim": 16,
      "approximator_layers": 1}, FLUX_CALL),
    ("BriaTransformer2DModel",
     {**FLUX, "pooled_projection_dim": None, "attention_head_dim": 8,
      "axes_dims_rope": [0, 4, 4]}, FLUX_CALL),
    ("QwenImageTransformer2DModel",
     {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2,
      "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 16,
      "axes_dims_rope": (8, 4, 4)},
     {"hidden_states": reals(16, 16), "encoder_hidden_states": reals(8, 16),
      "encoder_hidden_states_mask": ones(8, dtype=torch.long), "timestep": ones(),
      "img_shapes": always([(1, 4, 4)] * BATCH)}),
    ("CogVideoXTransformer3DModel",
     {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4,
      "time_embed_dim": 4, "text_embed_dim": 8, "num_layers": 2, "sample_width": 8,
      "sample_height": 8, "sample_frames": 8, "max_text_seq_length": 8},
     {"hidden_states": reals(1, 4, 8, 8), "encoder_hidden_states": reals(8, 8), **TIME}),
    ("CogView3PlusTransformer2DModel",
     {"in_channels": 4, "num_layers": 2, "attention_head_dim": 4, "num_attention_heads": 2,
      "out_channels": 4, "text_embed_dim": 8, "time_embed_dim": 8, "condition_dim": 2,
      "pos_embed_max_size": 8, "sample_size": 8},
     {"hidden_states": IMAGE, "encoder_hidden_states": reals(8, 8), **TIME, **SIZES}),
    ("CogView4Transformer2DModel",
     {"in_channels": 4, "num_layers": 2, "attention_head_dim": 4, "num_attention_heads": 4,
      "out_channels": 4, "text_embed_dim": 8, "time_embed_dim": 8, "condition_dim": 4},
     {"hidden_states": IMAGE, "encoder_hidden_states": reals(8, 8), **TIME, **SIZES}),
    ("AllegroTransformer3DModel",
     {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4,
      "num_layers": 1, "cross_attention_dim": 16, "sample_width": 8, "sample_height": 8,
      "sample_frames": 8, "caption_channels": 8},
     {"hidden_states": reals(4, 2, 8, 8), "encoder_hidden_states": reals(6, 8), **TIME}),
    ("MochiTransformer3DModel",
     {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "in_channels": 4,
      "pooled_projection_dim": 16, "text_embed_dim": 16, "time_embed_dim": 4,
      "max_sequence_length": 16},
     {**FILM_CALL, "encoder_attention_mask": ones(6, dtype=torch.bool)}),
    ("LTXVideoTransformer3DModel",
     {**TWO_HEADS, "attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 16,
      "num_layers": 1},
     {"hidden_states": reals(32, 4), "encoder_hidden_states": reals(6, 16), **TIME,
      "encoder_attention_mask": ones(6, dtype=torch.bool), "num_frames": always(2),
      "height": always(4), "width": always(4)}),
    ("HunyuanVideoTransformer3DModel",
     {**TWO_HEADS, "attention_head_dim": 10, "num_layers": 1, "num_single_layers": 1,
      "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1, "text_embed_dim": 16,
      "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)},
     {**FILM_CALL, "pooled_projections": reals(8), "guidance": ones(),
      "encoder_attention_mask": ones(6)}),
    ("CosmosTransformer3DModel",
     {**TWO_HEADS, "mlp_ratio": 2, "text_embed_dim": 16, "adaln_lora_dim": 4,
      "max_size": (4, 16, 16), "patch_size": (1, 2, 2), "extra_pos_embed_type": "learnable"},
     {**FILM_CALL, "padding_mask": always(torch.zeros(1, 1, 8, 8)), "fps": always(30)}),
    ("WanTransformer3DModel", WAN, FILM_CALL),
    ("SkyReelsV2Transformer3DModel", WAN, FILM_CALL),
    ("PriorTransformer",
     {"num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 2, "embedding_dim": 8,
      "num_embeddings": 7, "additional_embeddings": 4},
     {"hidden_states": reals(8), "proj_embedding": reals(8),
      "encoder_hidden_states": reals(7, 8), **TIME}),
]  # fmt: skip


# -- torch's modules ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sample:
    """One sample of a module in torch's database: how it is built and called."""

    info: Any = field(repr=False)
    number: int
    group: str = "torch.nn"

    @property
    def model(self) -> str:
        return f"{self.info.name} {self.number}"

    def _sample(self, seed: int) -> Any:
        torch.manual_seed(seed)
        made = self.info.module_inputs_func(
            self.info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
        )
        return made[self.number]

    def make(self) -> nn.Module:
        sample = self._sample(0).constructor_input
        torch.manual_seed(0)
        module: nn.Module = self.info.module_cls(*sample.args, **sample.kwargs)
        if any(nn.parameter.is_lazy(p) for p in module.parameters()):
            args, kwargs = self.batch(0)
            module(*args, **kwargs)
        return module.train()

    def batch(self, seed: int) -> Call:
        sample = self._sample(seed).forward_input
        return tuple(sample.args), dict(sample.kwargs)


def torch_cases(samples: int = 110) -> list[Sample]:
    """Return the samples of each module; PyTorch's tests need the package expecttest.

    One of them, nn.LinearCrossEntropyLoss, has hundreds: at most `samples` of a module are taken.
    """
    from torch.testing._internal.common_modules import module_db

    cases = []
    for info in module_db:
        torch.manual_seed(0)
        made = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
        )
        cases += [Sample(info, number) for number in range(min(samples, len(made)))]
    return cases
