"""Models with the releases' real layer shapes, but fewer layers and experts, so that a machine can hold them."""

KIMI = {                        # KDA but for layers 3 and 7; layer 0 dense; 0.88 G weights a token
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 2304,
    "num_hidden_layers": 8, "first_k_dense_replace": 1, "intermediate_size": 9216, "moe_intermediate_size": 1024,
    "num_experts": 64, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446, "num_expert_group": 1, "topk_group": 1,
    "num_attention_heads": 32, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "kv_lora_rank": 512, "q_lora_rank": None, "mla_use_nope": True, "rms_norm_eps": 1e-5, "vocab_size": 32768,
    "hidden_act": "silu", "model_max_length": 1 << 20,
    "linear_attn_config": {"kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8], "num_heads": 32,
                           "head_dim": 128, "short_conv_kernel_size": 4},
}
TINY = {
    **KIMI, "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_experts": 8, "num_experts_per_token": 2, "num_attention_heads": 2, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "kv_lora_rank": 64, "vocab_size": 512,
    "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 2, "head_dim": 64,
                           "short_conv_kernel_size": 4},
}
# K3's layers: as many as a laptop holds, with fewer experts.
K3 = {
    **KIMI, "hidden_size": 7168, "num_hidden_layers": 4, "intermediate_size": 33792, "moe_intermediate_size": 3072,
    "num_experts": 32, "num_experts_per_token": 16, "num_shared_experts": 2, "routed_scaling_factor": 1.0,
    "num_attention_heads": 96, "q_lora_rank": 1536, "mla_use_output_gate": True,
    "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True, "hidden_act": "situ",
    "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "attn_res_block_size": 12,
    "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 96, "head_dim": 128,
                           "short_conv_kernel_size": 4, "use_full_rank_gate": True, "gate_lower_bound": -5.0},
}
SHAPES = {"kimi": KIMI, "k3": {**K3, "attn_res_block_size": 2}, "tiny": TINY}


def released(config, layers, full, **changes):
    """All layers of a release; `full` are those with MLA, counted from 1."""
    linear = {**config["linear_attn_config"], "full_attn_layers": full,
              "kda_layers": [n for n in range(1, layers + 1) if n not in full]}
    return {**config, "num_hidden_layers": layers, "vocab_size": 163840, "linear_attn_config": linear, **changes}


# What the figures of a shape are extrapolated to.
RELEASED = {"kimi": released(KIMI, 27, [4, 8, 12, 16, 20, 24, 27], num_experts=256),
            "k3": released(K3, 93, [*range(4, 93, 4), 93], num_experts=896)}
