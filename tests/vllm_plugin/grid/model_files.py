"""Tiny models with random weights, written to disk as vLLM wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 128

#: What all of them share; the spread of the weights makes some n-gram drafts right, most wrong.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}


def mamba2() -> Any:
    """Make a model of Mamba-2 layers alone."""
    import transformers as hf

    config = hf.Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=32,
        state_size=16,
        n_groups=1,
        chunk_size=32,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    return hf.Mamba2ForCausalLM(config)


def write(name: str, folder: Path, seed: int = 0) -> str:
    """Write the model called ``name`` into ``folder``; returns the path.

    ``draft`` is ``llama`` with noise on its weights: right often, not always.
    """
    import torch
    import transformers as hf

    if name == "blip2":
        return write_blip2(folder / name)
    torch.manual_seed(seed)
    layers = {"num_hidden_layers": 3}
    if name in ("llama", "draft"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON, **layers))
    elif name == "mistral":
        torch.manual_seed(seed + 1)  # or else it is the same model as llama
        model = hf.MistralForCausalLM(hf.MistralConfig(**COMMON, **layers, sliding_window=96))
    elif name == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**COMMON, **layers))
    elif name == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * 2
        config = hf.Gemma3TextConfig(
            **COMMON,
            num_hidden_layers=4,
            layer_types=kinds,
            sliding_window=40,
            query_pre_attn_scalar=32,
        )
        model = hf.Gemma3ForCausalLM(config)
    elif name == "gemma2":
        config = hf.Gemma2Config(
            **COMMON | {"tie_word_embeddings": True},
            num_hidden_layers=4,
            sliding_window=40,
            query_pre_attn_scalar=32,
            attn_logit_softcapping=5.0,  # low enough to bend scores
            final_logit_softcapping=30.0,
        )
        model = hf.Gemma2ForCausalLM(config)
    elif name == "bloom":
        config = hf.BloomConfig(
            vocab_size=VOCAB, hidden_size=128, n_layer=3, n_head=4, initializer_range=0.08,
        )  # fmt: skip
        model = hf.BloomForCausalLM(config)
    elif name == "gptoss":
        config = hf.GptOssConfig(
            **COMMON,
            num_hidden_layers=4,
            sliding_window=40,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
        model = hf.GptOssForCausalLM(config)
        for layer in model.model.layers:
            layer.self_attn.sinks.data.normal_()
    elif name == "gemma3n":
        config = hf.Gemma3nTextConfig(
            **COMMON | {"intermediate_size": [96] * 6, "tie_word_embeddings": True},
            num_hidden_layers=6,
            layer_types=["sliding_attention", "full_attention"] * 3,
            sliding_window=40,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=16,
            laurel_rank=8,
            altup_num_inputs=2,
            activation_sparsity_pattern=[0.0] * 6,
        )
        model = hf.Gemma3nForCausalLM(config)
    elif name == "gemma4":
        config = hf.Gemma4TextConfig(
            **COMMON | {"tie_word_embeddings": True},
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=40,
            global_head_dim=64,
            num_kv_shared_layers=0,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=0,
        )
        model = hf.Gemma4ForCausalLM(config)
    elif name == "deepseek":
        # The rank and the rotary size are those that vLLM's CPU kernel is built for.
        config = hf.DeepseekV2Config(
            **COMMON | {"num_key_value_heads": 4},
            **layers,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
            first_k_dense_replace=2,
            moe_intermediate_size=32,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
        )
        model = hf.DeepseekV2ForCausalLM(config)
    elif name == "mamba2":
        model = mamba2()
    elif name in ("qwen3next", "qwen3next_two"):
        # Head sizes are those of vLLM's CPU operator; one layer is a mixture of experts. The
        # second one has heads for two ranks.
        heads = 2 if name == "qwen3next_two" else 1
        config = hf.Qwen3NextConfig(
            **COMMON,
            num_hidden_layers=3,
            layer_types=["linear_attention", "linear_attention", "full_attention"],
            linear_num_key_heads=heads,
            linear_num_value_heads=2 * heads,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            mlp_only_layers=[0, 2],
        )
        model = hf.Qwen3NextForCausalLM(config).to(torch.bfloat16)
        # Or else no token follows from the one before it often enough for a draft to be right.
        model.model.embed_tokens.weight.data.mul_(6.0)
    else:
        raise ValueError(name)
    model.lm_head.weight.data.mul_(8.0)  # sharp enough that sampling accepts some drafts, too
    if name == "draft":
        for weight in model.parameters():
            weight.data.add_(torch.randn_like(weight) * weight.std() * 0.1)
    path = folder / name
    model.save_pretrained(path)
    return str(path)


#: Tokens of a picture of ``blip2``, which come before the text.
PICTURE = 16


def write_blip2(folder: Path) -> str:
    """Write a model of pictures and text, with the files of its processor, into ``folder``."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    small = {"num_attention_heads": 1, "hidden_size": 32, "intermediate_size": 64}
    text = hf.OPTConfig(
        vocab_size=VOCAB + 8,  # room for the processor's token of a picture
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=1024,
        word_embed_proj_dim=64,
        init_std=0.08,
        bos_token_id=1,
        eos_token_id=1,
    )
    vision = {"num_hidden_layers": 1, "image_size": 16, "patch_size": 4, "initializer_range": 0.3}
    former = {"num_hidden_layers": 2, "encoder_hidden_size": 32, "vocab_size": 8}
    config = hf.Blip2Config(
        text_config=text.to_dict(),
        vision_config={**small, **vision},
        qformer_config={**small, **former, "initializer_range": 0.3},
        num_query_tokens=PICTURE,
        image_token_index=VOCAB,
        initializer_range=0.3,
    )
    model = hf.Blip2ForConditionalGeneration(config)
    torch.nn.init.normal_(model.query_tokens)
    model.save_pretrained(folder)
    write_tokenizer(str(folder))
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    images = hf.BlipImageProcessor(size={"height": 16, "width": 16})
    hf.Blip2Processor(images, tokenizer, num_query_tokens=PICTURE).save_pretrained(folder)
    return str(folder)


def write_tokenizer(folder: str) -> None:
    """A tokenizer for those models: every token is one character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(code + 1): code for code in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(1)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=chr(1))
    fast.save_pretrained(folder)
