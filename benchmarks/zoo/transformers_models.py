"""Transformers architectures with small configurations, and the inputs of one training call.

Integer fields that a configuration leaves at their default are made small by `SMALL`. Dropout is
off, so that nothing depends on the order of random draws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.examine import Call

BATCH, LENGTH, VOCAB, SIDE = 2, 16, 64, 32
FIRST_WORD = 3  # smaller tokens mean padding, beginning and end

SMALL = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "emb_dim": 32, "embedding_size": 32,
    "intermediate_size": 48, "d_ff": 48, "ffn_dim": 48, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "d_inner": 48, "dff": 48, "ffn_hidden_size": 48,
    "num_hidden_layers": 1, "num_layers": 1, "n_layer": 1, "n_layers": 1, "encoder_layers": 1,
    "decoder_layers": 1, "num_decoder_layers": 1, "num_encoder_layers": 1,
    "num_attention_heads": 2, "num_heads": 2, "n_head": 2, "n_heads": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_encoder_attention_heads": 2,
    "num_decoder_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "d_kv": 16,
    "d_head": 16, "vocab_size": VOCAB, "max_position_embeddings": 64, "n_positions": 64,
    "image_size": SIDE, "patch_size": 8, "projection_dim": 32, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "kv_lora_rank": 16,
    "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "sliding_window": 8, "chunk_size": 8, "num_mel_bins": 8,
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Words:
    """Token numbers, or classes if `below` is given."""

    shape: tuple[int, ...] = (BATCH, LENGTH)
    below: int = 0

    def draw(self, generator: torch.Generator) -> Tensor:
        least, most = (0, self.below) if self.below else (FIRST_WORD, VOCAB)
        return torch.randint(least, most, self.shape, generator=generator)


@dataclass(frozen=True)
class Reals:
    shape: tuple[int, ...]

    def draw(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.shape, generator=generator)


@dataclass(frozen=True)
class Fixed:
    """The same values in every batch."""

    value: Any

    def draw(self, generator: torch.Generator) -> Any:
        return torch.tensor(self.value) if isinstance(self.value, list) else self.value


Inputs = Mapping[str, Words | Reals | Fixed]
TEXT: Inputs = {"input_ids": Words(), "labels": Words()}
WORDS: Inputs = {"input_ids": Words()}
CHOICE: Inputs = {"input_ids": Words(), "labels": Words((BATCH,), 2)}
ONES = [[1] * LENGTH] * BATCH
PIXELS: Inputs = {"pixel_values": Reals((BATCH, 3, SIDE, SIDE))}
IMAGE: Inputs = PIXELS | {"labels": Words((BATCH,), 2)}
WIDE_PIXELS: Inputs = {"pixel_values": Reals((BATCH, 3, 64, 64))}
WIDE_IMAGE: Inputs = WIDE_PIXELS | {"labels": Words((BATCH,), 2)}
SEGMENTS: Inputs = WIDE_PIXELS | {"labels": Words((BATCH, 64, 64), 2)}
VIDEO: Inputs = {"pixel_values": Reals((BATCH, 4, 3, SIDE, SIDE)), "labels": Words((BATCH,), 2)}
SOUND: Inputs = {"input_values": Reals((BATCH, 800)), "labels": Words((BATCH, 4))}
PAIRS: Inputs = {"input_ids": Words(), "return_loss": Fixed(True)} | PIXELS


@dataclass(frozen=True)
class Case:
    """One architecture: its class in transformers, its inputs, and its configuration.

    is_called_first: whether it is called once before it is compiled, because it installs hooks in
        its first call.
    """

    group: str
    model: str
    inputs: Inputs
    fields: Fields = field(default_factory=dict)
    is_called_first: bool = False

    def make(self) -> nn.Module:
        """Return the model with random weights, none of them at its special start value."""
        import transformers

        kind = getattr(transformers, self.model)
        torch.manual_seed(0)
        model: nn.Module = kind(tiny(kind.config_class, self.fields))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        if self.is_called_first:
            model(**self.batch(0)[1])
        return model.train()

    def batch(self, seed: int) -> Call:
        """Return the arguments of one call."""
        generator = torch.Generator().manual_seed(seed)
        return (), {name: spec.draw(generator) for name, spec in self.inputs.items()}


def tiny(kind: Any, fields: Fields) -> Any:
    """Return a small configuration of this class; a dict in `fields` configures a part of it."""
    import transformers

    made: dict[str, Any] = {}
    for known in dataclasses.fields(kind):
        given = isinstance(known.default, int) and not isinstance(known.default, bool)
        if given and known.name in SMALL:
            made[known.name] = SMALL[known.name]
        elif "drop" in known.name and isinstance(known.default, (int, float)):
            made[known.name] = 0.0 if isinstance(known.default, float) else 0
    if "vocab_size" in made:
        made |= {**TOKENS, "use_cache": False}
    if "layer_types" in fields:
        made["num_hidden_layers"] = len(fields["layer_types"])
    made |= fields
    for name, part in kind.sub_configs.items():
        inner = dict(made.get(name) or {})
        if not inner and name not in fields:
            continue
        if part is transformers.AutoConfig:
            part = transformers.CONFIG_MAPPING[inner.pop("model_type")]
        made[name] = tiny(part, inner)
    return kind(**made)


# -- parts shared by several models ---------------------------------------------------------------
CONV = {"conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 4]}
SPEECH = {
    **CONV, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}  # fmt: skip
STAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
RESNET = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1], "layer_type": "basic",
}  # fmt: skip
RESNET_BACKBONE = {**RESNET, "out_features": ["stage4"]}
SWIN = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "patch_size": 2,
        "drop_path_rate": 0.0}  # fmt: skip
PYRAMID = {
    **STAGES, "num_attention_heads": [1, 2, 2, 2], "mlp_ratios": [2, 2, 2, 2],
    "drop_path_rate": 0.0,
}  # fmt: skip
MAMBA = {
    "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_expand": 2,
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 2,
}  # fmt: skip
LLAMA = {"model_type": "llama", "num_key_value_heads": 2}
IMAGE_TOKEN = 10
SEEN = [[1] + [IMAGE_TOKEN] * 16 + [5, 6, 7, 8, 9, 11, 12]] * BATCH  # 16 patches of 8 x 8


def seeing(more: Fields | None = None) -> Inputs:
    """Return the inputs of a model that sees one image per text."""
    text = {"input_ids": Fixed(SEEN), "labels": Words((BATCH, len(SEEN[0])))}
    return {**text, **PIXELS, "attention_mask": Fixed([[1] * len(SEEN[0])] * BATCH), **(more or {})}


# -- the architectures, those most unlike the others first ----------------------------------------
def _cases(group: str, *cases: tuple[Any, ...]) -> list[Case]:
    return [Case(group, *case) for case in cases]


def _plain(group: str, inputs: Inputs, models: str) -> list[Case]:
    return [Case(group, model, inputs) for model in models.split()]


TWO = {"encoder_layers": 2, "decoder_layers": 2}
T5 = {"num_heads": 2, "decoder_start_token_id": 0}
SPECTRUM: Inputs = {"input_features": Reals((BATCH, 8, 16)), "labels": Words((BATCH, 6))}
DETR = {
    "backbone_config": RESNET_BACKBONE, "use_timm_backbone": False, "num_queries": 5,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2,
}  # fmt: skip
BOTH = {"text_config": {"hidden_size": 32}, "vision_config": {"num_channels": 3}}
RAW: Inputs = {"input_values": Reals((BATCH, 800))}
SERIES: Inputs = {
    "past_values": Reals((BATCH, 24)), "past_time_features": Reals((BATCH, 24, 1)),
    "past_observed_mask": Fixed([[1.0] * 24] * BATCH), "future_values": Reals((BATCH, 4)),
    "future_time_features": Reals((BATCH, 4, 1)),
}  # fmt: skip
SERIES_FIELDS = {
    "prediction_length": 4, "context_length": 17, "lags_sequence": [1, 2, 7],
    "num_time_features": 1, "d_model": 32,
}  # fmt: skip

CASES = [
    *_cases(
        "encoder-decoder",
        ("T5ForConditionalGeneration", TEXT,
         {**T5, "num_layers": 2, "feed_forward_proj": "gated-gelu"}),
        ("BartForConditionalGeneration", TEXT, TWO),
        ("WhisperForConditionalGeneration", SPECTRUM,
         {**TWO, "max_source_positions": 8, "max_target_positions": 8,
          "begin_suppress_tokens": None}),
        ("LEDForConditionalGeneration", TEXT,
         {"attention_window": 4, "max_encoder_position_embeddings": 64,
          "max_decoder_position_embeddings": 64}),
        ("M2M100ForConditionalGeneration", TEXT,
         {**TWO, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}),
        ("PegasusXForConditionalGeneration", TEXT,
         {**TWO, "num_global_tokens": 4, "block_size": 4}),
        ("LongT5ForConditionalGeneration", {**TEXT, "attention_mask": Fixed(ONES)},
         {**T5, "local_radius": 3, "encoder_attention_type": "transient-global",
          "global_block_size": 4}),
        ("ProphetNetForConditionalGeneration", TEXT, {"num_buckets": 8}),
        ("BigBirdPegasusForConditionalGeneration", TEXT,
         {"attention_type": "original_full"}),
        ("SwitchTransformersForConditionalGeneration", TEXT,
         {**T5, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}),
        ("Speech2TextForConditionalGeneration",
         {"input_features": Reals((BATCH, 16, 8)), "labels": Words((BATCH, 6))},
         {"max_source_positions": 16, "max_target_positions": 8, "conv_channels": 16,
          "input_feat_per_channel": 8}),
        ("MoonshineForConditionalGeneration",
         {"input_values": Reals((BATCH, 1200)), "labels": Words((BATCH, 6))},
         {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2,
          "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2}),
        ("PegasusForConditionalGeneration", TEXT),
        ("FSMTForConditionalGeneration", TEXT, {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB}),
        ("MBartForConditionalGeneration", TEXT),
        ("MarianMTModel", TEXT),
        ("BlenderbotForConditionalGeneration", TEXT),
        ("UMT5ForConditionalGeneration", TEXT, T5),
    ),
    *_cases(
        "vision",
        ("SwinForImageClassification", IMAGE, SWIN),
        ("DeformableDetrForObjectDetection", WIDE_PIXELS,
         {**DETR, "backbone_config": {**RESNET, "out_features": ["stage3", "stage4"]},
          "num_feature_levels": 2, "disable_custom_kernels": True}),
        ("SegformerForSemanticSegmentation", SEGMENTS,
         {**PYRAMID, "decoder_hidden_size": 16}, True),
        ("DPTForDepthEstimation", PIXELS,
         {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8, "num_hidden_layers": 4,
          "backbone_out_indices": [0, 1, 2, 3]}, True),
        ("ConvNextForImageClassification", IMAGE, {**STAGES, "patch_size": 4}),
        ("MobileViTForImageClassification", WIDE_IMAGE,
         {"hidden_sizes": [8, 12, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
          "patch_size": 2, "image_size": 64}),
        ("Swinv2ForImageClassification", IMAGE,
         {**SWIN, "pretrained_window_sizes": [0, 0]}),
        ("BeitForImageClassification", IMAGE,
         {"drop_path_rate": 0.0, "use_relative_position_bias": True}),
        ("FocalNetForImageClassification", IMAGE,
         {"embed_dim": 8, "hidden_sizes": [16, 16], "depths": [1, 1], "focal_levels": [2, 2],
          "focal_windows": [3, 3], "patch_size": 4, "drop_path_rate": 0.0}),
        ("HieraForImageClassification", WIDE_IMAGE,
         {"embed_dim": 8, "image_size": [64, 64], "depths": [1, 1], "num_heads": [1, 2],
          "num_query_pool": 1, "masked_unit_size": [4, 4], "masked_unit_attention": [True, False],
          "patch_size": [7, 7]}),
        ("CvtForImageClassification", IMAGE,
         {"embed_dim": [8, 16], "num_heads": [1, 2], "depth": [1, 2], "patch_sizes": [7, 3],
          "patch_stride": [4, 2], "patch_padding": [2, 1], "mlp_ratio": [2.0, 2.0],
          "attention_drop_rate": [0.0, 0.0], "drop_rate": [0.0, 0.0],
          "drop_path_rate": [0.0, 0.0], "qkv_bias": [True, True], "cls_token": [False, True],
          "qkv_projection_method": ["dw_bn", "dw_bn"], "kernel_qkv": [3, 3],
          "padding_kv": [1, 1], "stride_kv": [2, 2], "padding_q": [1, 1], "stride_q": [1, 1]}),
        ("DetrForObjectDetection", WIDE_PIXELS, DETR),
        ("SwiftFormerForImageClassification", WIDE_IMAGE,
         {"depths": [1, 1, 1, 1], "embed_dims": [8, 8, 16, 16], "drop_path_rate": 0.0}),
        ("PoolFormerForImageClassification", IMAGE, STAGES),
        ("MobileNetV2ForImageClassification", IMAGE, {"depth_multiplier": 0.25}),
        ("BitForImageClassification", WIDE_IMAGE,
         {**STAGES, "embedding_size": 8, "num_groups": 2}),
        ("LevitForImageClassification", WIDE_IMAGE,
         {"hidden_sizes": [16, 16, 16], "num_attention_heads": [1, 2, 2], "depths": [1, 1, 1],
          "key_dim": [8, 8, 8], "image_size": 64, "patch_size": 16}),
        ("UperNetForSemanticSegmentation", SEGMENTS,
         {"backbone_config": {"model_type": "convnext", **STAGES, "patch_size": 4,
                              "out_features": ["stage1", "stage2", "stage3", "stage4"]},
          "hidden_size": 8, "auxiliary_channels": 8, "auxiliary_in_channels": 16,
          "pool_scales": [1, 2]}),
        ("ViTForImageClassification", IMAGE),
        ("VideoMAEForVideoClassification", VIDEO, {"num_frames": 4}),
        ("TimesformerForVideoClassification", VIDEO, {"num_frames": 4}),
        ("Swin2SRForImageSuperResolution", PIXELS,
         {"embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4, "patch_size": 1,
          "drop_path_rate": 0.0}),
        ("SamModel",
         {"pixel_values": Reals((BATCH, 3, 64, 64)),
          "input_points": Reals((BATCH, 1, 2, 2))},
         {"vision_config": {"image_size": 64, "output_channels": 32, "num_pos_feats": 16,
                            "window_size": 4, "global_attn_indexes": [1], "mlp_dim": 48,
                            "num_hidden_layers": 2},
          "prompt_encoder_config": {"image_size": 64, "mask_input_channels": 4},
          "mask_decoder_config": {"mlp_dim": 48, "iou_head_hidden_dim": 32}}),
        ("GLPNForDepthEstimation",
         {"pixel_values": Reals((BATCH, 3, 64, 64)), "labels": Reals((BATCH, 64, 64))},
         {**PYRAMID, "decoder_hidden_size": 8}),
        ("PvtForImageClassification", WIDE_IMAGE,
         {**STAGES, "num_attention_heads": [1, 2, 2, 2], "mlp_ratios": [2, 2, 2, 2],
          "image_size": 64}),
        ("ConditionalDetrForObjectDetection", WIDE_PIXELS, DETR),
        ("EfficientNetForImageClassification", IMAGE,
         {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320}),
        ("RegNetForImageClassification", IMAGE,
         {**STAGES, "embedding_size": 8, "groups_width": 4}),
        ("Dinov2ForImageClassification", IMAGE),
        ("YolosForObjectDetection", PIXELS,
         {"image_size": [SIDE, SIDE], "num_detection_tokens": 4}),
    ),
    *_cases(
        "state space",
        ("MambaForCausalLM", TEXT, {"num_hidden_layers": 2, "state_size": 8}),
        ("Mamba2ForCausalLM", TEXT,
         {"num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 8,
          "n_groups": 2}),
        ("Qwen3NextForCausalLM", TEXT,
         {**DELTA, "layer_types": ["linear_attention", "full_attention"]}),
        ("RwkvForCausalLM", TEXT, {"attention_hidden_size": 32}),
        ("xLSTMForCausalLM", TEXT,
         {"num_blocks": 2, "mode": "train", "return_last_states": False, "chunk_size": 8}),
        ("RecurrentGemmaForCausalLM", TEXT,
         {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8}),
        ("FalconH1ForCausalLM", TEXT, {**MAMBA, "mamba_d_ssm": 64}),
        ("Zamba2ForCausalLM", TEXT,
         {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"],
          "mamba_d_state": 8, "n_mamba_heads": 4, "use_mamba_kernels": False,
          "num_key_value_heads": 2}),
        ("BambaForCausalLM", TEXT, {**MAMBA, "num_hidden_layers": 2, "attn_layer_indices": [1]}),
        ("JambaForCausalLM", TEXT,
         {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
          "mamba_d_state": 8, "use_mamba_kernels": False, "mamba_dt_rank": 4}),
        ("GraniteMoeHybridForCausalLM", TEXT,
         {**MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32,
          "num_key_value_heads": 2}),
        ("Lfm2ForCausalLM", TEXT, {"layer_types": ["conv", "full_attention"]}),
        ("MiniMaxForCausalLM", TEXT,
         {"block_size": 4, "layer_types": ["linear_attention", "full_attention"],
          "head_dim": 16}),
        ("KimiLinearForCausalLM", TEXT,
         {"linear_head_dim": 8, "linear_num_heads": 2, "linear_conv_kernel_dim": 2,
          "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"],
          "mlp_layer_types": ["dense", "sparse"]}),
        ("NemotronHForCausalLM", TEXT,
         {"layers_block_type": ["mamba", "attention", "moe"], "ssm_state_size": 8,
          "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "use_mamba_kernels": False,
          "moe_shared_expert_intermediate_size": 32}),
    ),
    *_cases(
        "odd attention",
        ("LongformerForMaskedLM", TEXT, {"attention_window": 4}),
        ("BigBirdForMaskedLM", {"input_ids": Words((BATCH, 64)), "labels": Words((BATCH, 64))},
         {"block_size": 4, "num_random_blocks": 1}),
        ("ReformerModelWithLMHead", TEXT,
         {"attn_layers": ["local", "local"], "axial_pos_shape": [4, 4],
          "axial_pos_embds_dim": [16, 16], "attention_head_size": 16, "is_decoder": True,
          "local_attn_chunk_length": 4, "feed_forward_size": 48}),
        ("FunnelForMaskedLM", TEXT, {"block_sizes": [1, 1]}),
        ("DebertaForMaskedLM", TEXT,
         {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
        ("DebertaV2ForMaskedLM", TEXT,
         {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
          "norm_rel_ebd": "layer_norm", "share_att_key": True, "conv_kernel_size": 3,
          "conv_act": "tanh"}),
        ("XLNetLMHeadModel", TEXT, {"mem_len": 0}),
        ("NystromformerForMaskedLM", TEXT,
         {"segment_means_seq_len": 16, "num_landmarks": 4, "conv_kernel_size": 3}),
        ("FNetForMaskedLM", TEXT),
        ("ConvBertForMaskedLM", TEXT, {"head_ratio": 1, "conv_kernel_size": 3}),
        ("SqueezeBertForMaskedLM", TEXT),
        ("MPNetForMaskedLM", TEXT),
        ("CanineForSequenceClassification", CHOICE,
         {"local_transformer_stride": 8, "num_hash_buckets": 16}),
        ("PerceiverForMaskedLM", TEXT,
         {"max_position_embeddings": LENGTH, "num_latents": 4, "d_latents": 16,
          "num_self_attends_per_block": 1,
          "num_self_attention_heads": 2, "num_cross_attention_heads": 2, "qk_channels": 16,
          "v_channels": 16}),
        ("RoFormerForMaskedLM", TEXT),
        ("IBertForMaskedLM", TEXT),
        ("XLMWithLMHeadModel", TEXT),
        ("ModernBertForMaskedLM", TEXT, {"local_attention": 8}),
        ("MobileBertForMaskedLM", TEXT,
         {"embedding_size": 16, "intra_bottleneck_size": 16, "hidden_size": 32}),
    ),
    *_cases(
        "mixture of experts",
        ("MixtralForCausalLM", TEXT),
        ("Qwen2MoeForCausalLM", TEXT),
        ("DeepseekV2ForCausalLM", TEXT,
         {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_experts_per_tok": 2,
          "head_dim": 8, "n_group": 1, "topk_group": 1}),
        ("DeepseekV3ForCausalLM", TEXT,
         {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
          "num_key_value_heads": 2}),
        ("OlmoeForCausalLM", TEXT, {"num_key_value_heads": 2}),
        ("GptOssForCausalLM", TEXT),
        ("JetMoeForCausalLM", TEXT, {"kv_channels": 16}),
        ("PhimoeForCausalLM", TEXT, {"router_jitter_noise": 0.0}),
        ("Qwen3MoeForCausalLM", TEXT, {"head_dim": 16}),
        ("LongcatFlashForCausalLM", TEXT,
         {"zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 16, "head_dim": 8}),
        ("Llama4ForCausalLM", TEXT, {"intermediate_size_mlp": 48, "attention_chunk_size": 8}),
    ),
    *_cases(
        "audio",
        ("Wav2Vec2ForCTC", SOUND, {**SPEECH, "layerdrop": 0.0}),
        ("HubertForSequenceClassification", RAW | {"labels": Words((BATCH,), 2)},
         {**SPEECH, "layerdrop": 0.0, "classifier_proj_size": 16}),
        ("WavLMForSequenceClassification", RAW | {"labels": Words((BATCH,), 2)},
         {**SPEECH, "layerdrop": 0.0, "num_buckets": 8, "max_bucket_distance": 16,
          "classifier_proj_size": 16}),
        ("SpeechT5ForSpeechToText", SOUND,
         {**SPEECH, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
          "encoder_max_relative_position": 8}),
        ("ASTForAudioClassification",
         {"input_values": Reals((BATCH, 24, 16)), "labels": Words((BATCH,), 2)},
         {"max_length": 24, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8}),
        ("SEWDForCTC", SOUND,
         {**SPEECH, "max_position_embeddings": 32, "position_buckets": 8, "layerdrop": 0.0}),
        ("Wav2Vec2ConformerForCTC", SOUND,
         {**SPEECH, "layerdrop": 0.0, "vocab_size": VOCAB, "conv_depthwise_kernel_size": 3}),
        ("Wav2Vec2BertForCTC",
         {"input_features": Reals((BATCH, 16, 8)), "labels": Words((BATCH, 4))},
         {"vocab_size": VOCAB, "feature_projection_input_dim": 8, "layerdrop": 0.0,
          "conv_depthwise_kernel_size": 3, "apply_spec_augment": False}),
        ("EncodecModel", {"input_values": Reals((BATCH, 1, 64))},
         {"num_filters": 4, "upsampling_ratios": [2, 2], "codebook_size": 8,
          "target_bandwidths": [24.0], "sampling_rate": 4000, "codebook_dim": 32}),
    ),
    *_cases(
        "image and text",
        ("CLIPModel", PAIRS, BOTH),
        ("SiglipModel", PAIRS, {**BOTH, "text_config": {"projection_size": 32}}),
        ("LlavaForConditionalGeneration", seeing(),
         {"vision_config": {"model_type": "clip_vision_model"}, "text_config": LLAMA,
          "image_token_index": IMAGE_TOKEN, "image_seq_length": 16}),
        ("PaliGemmaForConditionalGeneration",
         seeing({"token_type_ids": Fixed([[0] * 18 + [1] * 6] * BATCH)}),
         {"vision_config": {"model_type": "siglip_vision_model", "projection_dim": 32,
                            "vision_use_head": False},
          "text_config": {"model_type": "gemma"}, "image_token_index": IMAGE_TOKEN,
          "image_token_id": IMAGE_TOKEN, "projection_dim": 32, "vocab_size": VOCAB}),
        ("Idefics3ForConditionalGeneration",
         {"input_ids": Fixed([[1] + [IMAGE_TOKEN] * 4 + [5, 6, 7, 8]] * BATCH),
          "labels": Words((BATCH, 9)), "pixel_values": Reals((BATCH, 1, 3, SIDE, SIDE))},
         {"vision_config": {"num_channels": 3}, "text_config": LLAMA,
          "image_token_id": IMAGE_TOKEN, "scale_factor": 2}),
        ("ViltForImagesAndTextClassification",
         {"input_ids": Words(), "pixel_values": Reals((BATCH, 1, 3, SIDE, SIDE)),
          "labels": Words((BATCH,), 2)}, {"num_images": 1, "modality_type_vocab_size": 3}),
        ("LayoutLMv3ForTokenClassification",
         {"input_ids": Words(), "bbox": Words((BATCH, LENGTH, 4), 30), **PIXELS,
          "labels": Words((BATCH, LENGTH), 2)},
         {"input_size": SIDE, "coordinate_size": 6, "shape_size": 4,
          "max_2d_position_embeddings": 64, "rel_pos_bins": 8, "rel_2d_pos_bins": 8,
          "max_rel_pos": 16, "max_rel_2d_pos": 32}),
        ("BlipForConditionalGeneration", {"input_ids": Words(), "labels": Words(), **PIXELS},
         {"text_config": {"encoder_hidden_size": 32}, "vision_config": {"num_channels": 3}}),
        ("GroupViTModel", PAIRS,
         {"text_config": {"hidden_size": 32},
          "vision_config": {"depths": [1, 1], "num_group_tokens": [4, 0],
                            "num_output_groups": [4, 4]},
          "projection_intermediate_dim": 32}),
        ("OwlViTForObjectDetection",
         {"input_ids": Words((BATCH, LENGTH)), **PIXELS},
         {"text_config": {"hidden_size": 32, "max_position_embeddings": 16},
          "vision_config": {"hidden_size": 32}}),
        ("CLIPSegForImageSegmentation",
         {"input_ids": Words(), **PIXELS, "labels": Reals((BATCH, SIDE, SIDE))},
         {"text_config": {"hidden_size": 32}, "vision_config": {"num_hidden_layers": 2},
          "extract_layers": [0, 1], "reduce_dim": 16, "decoder_num_attention_heads": 2,
          "decoder_intermediate_size": 32}),
        ("Qwen2VLForConditionalGeneration",
         {"input_ids": Fixed([[1, 11] + [IMAGE_TOKEN] * 4 + [12, 5, 6, 7]] * BATCH),
          "labels": Words((BATCH, 10)), "pixel_values": Reals((BATCH * 16, 3 * 2 * 8 * 8)),
          "image_grid_thw": Fixed([[1, 4, 4]] * BATCH),
          "mm_token_type_ids": Fixed([[0, 0, 1, 1, 1, 1, 0, 0, 0, 0]] * BATCH)},
         {"vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32},
          "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                              "mrope_section": [2, 3, 3]}},
          "image_token_id": IMAGE_TOKEN, "vision_start_token_id": 11, "vision_end_token_id": 12,
          "video_token_id": 13}),
    ),
    *_cases(
        "decoder",
        ("LlamaForCausalLM", TEXT),
        ("GPT2LMHeadModel", TEXT),
        ("GPTNeoXForCausalLM", TEXT),
        ("Gemma2ForCausalLM", TEXT),
        ("Gemma3ForCausalLM", TEXT, {"layer_types": ["sliding_attention", "full_attention"]}),
        ("FalconForCausalLM", TEXT, {"alibi": True}),
        ("MptForCausalLM", TEXT, {"max_seq_len": 64}),
        ("BloomForCausalLM", TEXT),
        ("OPTForCausalLM", TEXT, {"word_embed_proj_dim": 16}),
        ("GPTJForCausalLM", TEXT, {"rotary_dim": 8}),
        ("GPTNeoForCausalLM", TEXT,
         {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4}),
        ("Phi3ForCausalLM", TEXT),
        ("CTRLLMHeadModel", TEXT),
        ("BertForMaskedLM", TEXT),
        ("Gemma3nForCausalLM", TEXT,
         {"num_hidden_layers": 2, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
          "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0,
          "layer_types": ["sliding_attention", "full_attention"],
          "activation_sparsity_pattern": [0.5, 0.0]}),
    ),
    *_cases(
        "time series",
        ("AutoformerForPrediction", SERIES,
         {**SERIES_FIELDS, "label_length": 4, "moving_average": 3, "encoder_layerdrop": 0.0,
          "decoder_layerdrop": 0.0}),
        ("InformerForPrediction", SERIES,
         {**SERIES_FIELDS, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}),
        ("PatchTSTForPrediction",
         {"past_values": Reals((BATCH, 32, 2)), "future_values": Reals((BATCH, 4, 2))},
         {"num_input_channels": 2, "prediction_length": 4, "patch_length": 4,
          "patch_stride": 4}),
        ("PatchTSMixerForPrediction",
         {"past_values": Reals((BATCH, 32, 2)), "future_values": Reals((BATCH, 4, 2))},
         {"num_input_channels": 2, "prediction_length": 4}),
        ("DecisionTransformerModel",
         {"states": Reals((BATCH, 4, 17)), "actions": Reals((BATCH, 4, 4)),
          "rewards": Reals((BATCH, 4, 1)), "returns_to_go": Reals((BATCH, 4, 1)),
          "timesteps": Words((BATCH, 4), 8), "attention_mask": Fixed([[1] * 4] * BATCH)},
         {"max_ep_len": 16}),
    ),
    # -- models that the configuration above makes small enough
    *_plain("decoder", TEXT, """
        AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM
        BailingHybridForCausalLM BeamForCausalLM BertGenerationDecoder BioGptForCausalLM
        BitNetForCausalLM BlenderbotSmallForCausalLM CamembertForCausalLM CohereForCausalLM
        Cohere2ForCausalLM Cohere2MoeForCausalLM CpmAntForCausalLM CwmForCausalLM
        Data2VecTextForCausalLM DeepseekV4ForCausalLM DiffLlamaForCausalLM DogeForCausalLM
        ElectraForCausalLM Emu3ForCausalLM ErnieForCausalLM Ernie4_5ForCausalLM
        Ernie4_5_MoeForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM FalconMambaForCausalLM
        FlexOlmoForCausalLM FlintForCausalLM GemmaForCausalLM Gemma4UnifiedForCausalLM
        GlmForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM GPTBigCodeForCausalLM
        GPTNeoXJapaneseForCausalLM GraniteForCausalLM GraniteSWAForCausalLM
        GraniteMoeForCausalLM GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM
        HeliumForCausalLM HrmTextForCausalLM HYV3ForCausalLM HYV4ForCausalLM
        HyperCLOVAXForCausalLM Inkling2ForCausalLM InklingForCausalLM Jais2ForCausalLM
        Kolibri1ForCausalLM LagunaForCausalLM Lfm3ForCausalLM MegatronBertForCausalLM
        MellumForCausalLM MiMoV2FlashForCausalLM MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM
        Ministral3ForCausalLM MistralForCausalLM MllamaForCausalLM ModernBertDecoderForCausalLM
        MoshiForCausalLM MvpForCausalLM NanoChatForCausalLM OlmoForCausalLM Olmo2ForCausalLM
        Olmo3ForCausalLM OpenAIGPTLMHeadModel PersimmonForCausalLM PhiForCausalLM
        PLBartForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM Qwen3_5ForCausalLM
        Qwen3_5MoeForCausalLM Qwen4ExpForCausalLM RemBertForCausalLM RobertaForCausalLM
        RobertaPreLayerNormForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
        SolarOpenForCausalLM StableLmForCausalLM Starcoder2ForCausalLM TrOCRForCausalLM
        VaultGemmaForCausalLM XGLMForCausalLM XLMRobertaForCausalLM XLMRobertaXLForCausalLM
    """),
    *_plain("encoder", TEXT, """
        AlbertForMaskedLM EsmcForMaskedLM EuroBertForMaskedLM FlaubertWithLMHeadModel
        GteForMaskedLM JinaEmbeddingsV3ForMaskedLM LayoutLMForMaskedLM MraForMaskedLM
        NeoMMEForMaskedLM NomicBertForMaskedLM TapasForMaskedLM UltrabertForMaskedLM
        YosoForMaskedLM
    """),
    *_plain("encoder-decoder", TEXT, """
        MT5ForConditionalGeneration SeamlessM4TForTextToText SeamlessM4Tv2ForTextToText
    """),
    *_plain("vision", IMAGE, """
        Data2VecVisionForImageClassification DeiTForImageClassification
        Dinov2WithRegistersForImageClassification IJepaForImageClassification
        PPLCNetForImageClassification ViTMSNForImageClassification
    """),
    *_plain("time series", SERIES, """
        TimesFm2_5ModelForPrediction
    """),
    *_plain("text tower", WORDS, """
        CLIPTextModel DPRQuestionEncoder EmbeddingGemma2TextModel GraniteDoclingTextModel
        HiggsAudioV2ForConditionalGeneration ImageGPTModel Molmo2TextModel MuseGlimmerTextModel
        MuseSparkTextModel OpenAIPrivacyFilterModel Qwen3VLMoeTextModel Qwen3VLTextModel
        Sam3LiteTextTextModel SplinterModel Tipsv2TextModel VisualBertModel
    """),
    *_plain("vision tower", PIXELS, """
        Aimv2VisionModel ChineseCLIPVisionModel CLIPVisionModel DINOv3ViTModel
        Idefics3VisionTransformer InternVLVisionModel MLCDVisionModel PixioModel
        PixtralVisionModel QianfanOCRVisionModel Sam3ViTModel SamHQVisionModel SamVisionModel
        Sapiens2Model SiglipVisionModel SmolVLMVisionTransformer Tipsv2VisionModel ViTMAEModel
        VitDetModel
    """),
]  # fmt: skip
