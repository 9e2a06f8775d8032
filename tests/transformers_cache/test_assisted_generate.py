"""``generate`` on a ``TxnCache`` gives what it gives on the stock cache, bit by bit."""

from __future__ import annotations

import pytest
import torch
import transformers
from kvtxn.integrations.transformers_cache import TxnCache
from tiny_models import COMMON, NEW_TOKENS, PROMPT, WINDOW, RecordedCache, drafting, run
from transformers import PreTrainedModel

HEAD = {"head_dim": 8}
SLIDES = {**HEAD, "sliding_window": WINDOW}

LAST = ["sliding_attention", "full_attention"]  # these read what the second and third wrote

#: Families with something of their own in the cache.
#: name: (what is special, model class, config class, settings)
FAMILIES = {
    "qwen2": (
        "slides from a layer on",
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW}
        | {"max_window_layers": 1},
    ),
    "gpt_oss": (
        "attention sinks",
        "GptOssForCausalLM",
        "GptOssConfig",
        {**SLIDES, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (
        "values smaller than keys",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {"num_hidden_layers": 2, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 16}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6, "n_group": 1}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1}
        | {"moe_intermediate_size": 16, "first_k_dense_replace": 1},
    ),
    "llama4": (
        "attends in chunks",
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**HEAD, "num_hidden_layers": 4, "attention_chunk_size": WINDOW, "num_local_experts": 2}
        | {"intermediate_size_mlp": 32, "no_rope_layers": [1, 1, 1, 0]},
    ),
    "gemma3n": (
        "later layers share earlier ones' rows",
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {**SLIDES, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "altup_num_inputs": 2}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", *LAST]}
        | {"vocab_size_per_layer_input": COMMON["vocab_size"], "laurel_rank": 4}
        | {"hidden_size_per_layer_input": 8, "activation_sparsity_pattern": [0.0] * 5},
    ),
}


def build_family(name: str) -> PreTrainedModel:
    """A model of the family, random weights."""
    _, model, config, settings = FAMILIES[name]
    torch.manual_seed(0)
    settings = {**COMMON, **settings}
    return getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()


KINDS = ("llama", "mistral", "gemma3")
ASSISTED = ("lookup", "assistant")
TOKENS = PROMPT.shape[1] + NEW_TOKENS


def same_logits(ours, theirs) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("method", ASSISTED)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_assisted_equals_stock(models, kind, method):
    """Tokens equal plain greedy decoding; tokens, logits and acceptance equal stock's assisted."""
    model = models[kind]
    settings = drafting(model, method)
    plain, _ = run(model)
    stock, stock_steps = run(model, **settings)
    cache = RecordedCache(model.config, max_tokens=TOKENS, block_size=8, max_drafts=8)
    ours, steps = run(model, past_key_values=cache, **settings)

    assert ours.sequences.tolist() == plain.sequences.tolist() == stock.sequences.tolist()
    assert same_logits(ours.logits, stock.logits)
    assert steps == stock_steps
    assert 0 < steps.accepted < steps.drafted  # some right, some wrong: else nothing is tested
    assert ours.past_key_values is cache

    # Every token but the last is in; the others were rejected, and they are nowhere.
    counts = cache.snapshot()
    assert cache.get_seq_length() == TOKENS - 1
    assert counts["kvtxn_rows_committed_total"] == TOKENS - 1
    assert counts["kvtxn_rows_rejected_total"] == steps.drafted - steps.accepted
    assert counts["kvtxn_rows_staged_total"] == sum(steps.fed)
    assert counts["kvtxn_windows_total_committed"] == len(steps.fed)
    assert counts["kvtxn_windows_total"] == len(steps.fed)

    # No byte moves before the crop; after it they are those of a cache that saw the kept rows only.
    assert cache.exact == [(True, True)] * len(steps.fed)


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_equal_stock(name):
    """Whatever the cache holds of them: same tokens and logits, and exact bytes."""
    model = build_family(name)
    settings = drafting(model, "assistant") | {"max_new_tokens": 30}
    stock, stock_steps = run(model, **settings)
    cache = RecordedCache(model.config, max_tokens=TOKENS, block_size=8, max_drafts=8)
    ours, steps = run(model, past_key_values=cache, **settings)
    assert ours.sequences.tolist() == stock.sequences.tolist()
    assert same_logits(ours.logits, stock.logits)
    assert steps == stock_steps
    assert cache.exact == [(True, True)] * len(steps.fed)


@pytest.mark.parametrize("policy", ["undo", "direct"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_policies_give_the_same_tokens(models, kind, policy):
    """ "undo" leaves the same bytes too; "direct" leaves garbage, which the byte test notices."""
    model = models[kind]
    settings = drafting(model, "assistant")
    stock, _ = run(model, **settings)
    cache = RecordedCache(
        model.config, max_tokens=TOKENS, block_size=8, max_drafts=8, policy=policy
    )
    ours, _ = run(model, past_key_values=cache, **settings)
    assert ours.sequences.tolist() == stock.sequences.tolist()
    assert same_logits(ours.logits, stock.logits)
    assert not all(before for before, _ in cache.exact)  # written through, and then ...
    assert all(after for _, after in cache.exact) == (policy == "undo")


@pytest.mark.parametrize("method", ["plain", *ASSISTED])
@pytest.mark.parametrize("kind", KINDS)
def test_sampling_with_a_seed_equals_stock(models, kind, method):
    """The same logits draw the same tokens."""
    model = models[kind]
    settings = {**drafting(model, method), "do_sample": True, "top_k": 0, "max_new_tokens": 40}
    torch.manual_seed(7)
    stock, _ = run(model, **settings)
    torch.manual_seed(7)
    cache = TxnCache(model.config, max_tokens=TOKENS, max_drafts=8)
    ours, steps = run(model, past_key_values=cache, **settings)
    assert ours.sequences.tolist() == stock.sequences.tolist()
    assert same_logits(ours.logits, stock.logits)
    assert method == "plain" or steps.accepted < steps.drafted


@pytest.mark.parametrize("kind", KINDS)
def test_plain_batch_equals_stock(models, kind):
    """Several sequences, one of them padded on the left; committed with each forward."""
    model = models[kind]
    prompt = torch.cat([PROMPT, PROMPT.flip(1), PROMPT.roll(3, 1)])
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    stock, _ = run(model, prompt, attention_mask=mask, max_new_tokens=30)
    cache = RecordedCache(model.config, max_tokens=50, block_size=4, max_drafts=8)
    ours, _ = run(model, prompt, attention_mask=mask, max_new_tokens=30, past_key_values=cache)
    assert ours.sequences.tolist() == stock.sequences.tolist()
    assert same_logits(ours.logits, stock.logits)
    assert cache.is_exact(cache.forwards)
    counts = cache.snapshot()
    assert counts["kvtxn_rows_committed_total"] == 3 * 49 == counts["kvtxn_rows_staged_total"]


@pytest.mark.parametrize("kind", KINDS)
def test_beam_search_equals_stock(models, kind):
    """Beams are copied between sequences, pages and all."""
    model = models[kind]
    settings = {"num_beams": 3, "max_new_tokens": 24, "do_sample": False}
    stock = model.generate(PROMPT, **settings)
    cache = TxnCache(model.config, max_tokens=44)
    assert model.generate(PROMPT, past_key_values=cache, **settings).tolist() == stock.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on(models, kind):
    """A second turn on the same cache feeds only what is new; bf16, inference mode."""
    model = build_like(models[kind], torch.bfloat16)
    cache = TxnCache(model.config, max_tokens=90)
    with torch.inference_mode():
        first, _ = run(model, max_new_tokens=20, past_key_values=cache)
        prompt = torch.cat([first.sequences, PROMPT], dim=1)
        ours, steps = run(model, prompt, max_new_tokens=20, past_key_values=cache)
        stock_first, _ = run(model, max_new_tokens=20)
        stock, _ = run(
            model, prompt, max_new_tokens=20, past_key_values=stock_first.past_key_values
        )
    assert steps.fed[0] == PROMPT.shape[1] + 1
    assert ours.sequences.tolist() == stock.sequences.tolist()
    assert same_logits(ours.logits, stock.logits)
    ref = next(iter(cache.manager.layers.values()))
    assert ref.key_cache.dtype is torch.bfloat16


def build_like(model, dtype):
    """The same weights in another dtype."""
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    return other.to(dtype).eval()
