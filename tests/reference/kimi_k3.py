"""The config of the Kimi-K3 release (text model and what of its wrapper is read), and a container without weights."""
import json

from warp_embed.convert import outline

TEXT = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 7168,
    "num_hidden_layers": 93, "num_attention_heads": 96, "num_key_value_heads": 96, "intermediate_size": 33792,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576, "hidden_act": "situ", "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0, "attn_res_block_size": 12, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
    "mla_use_output_gate": True, "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2,
    "moe_intermediate_size": 3072, "moe_router_activation_func": "sigmoid", "moe_renormalize": True,
    "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "moe_layer_freq": 1, "use_grouped_topk": True,
    "num_expert_group": 1, "topk_group": 1, "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True,
    "tie_word_embeddings": False, "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
    "num_nextn_predict_layers": 0,
    "linear_attn_config": {"full_attn_layers": [*range(4, 93, 4), 93],
                           "kda_layers": [n for n in range(1, 93) if n % 4], "num_heads": 96, "head_dim": 128,
                           "short_conv_kernel_size": 4, "use_full_rank_gate": True, "gate_lower_bound": -5.0},
}
RELEASE = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3",
           "media_placeholder_token_id": 163605, "text_config": TEXT,
           "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}}


def write_config(directory):
    """All of the release that planning needs."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(RELEASE))
    return directory


def write_weightless(directory, **options):
    """A container of K3's real shape that has only its manifest; options as of `outline`."""
    return outline(write_config(directory.with_name(directory.name + ".config")), directory, **options)
