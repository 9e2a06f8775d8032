"""``TxnCache`` called by hand: crops, failures, limits, and what stock caches do there."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
import transformers
from kvtxn.integrations.transformers_cache import TxnCache
from tiny_models import NEW_TOKENS, PROMPT, WINDOW, drafting, run
from transformers import (
    BltConfig,
    DynamicCache,
    LlamaConfig,
    RecurrentGemmaConfig,
    StaticCache,
    T5Config,
)

from kvtxn import (
    AcceptanceError,
    CapacityError,
    IncompleteWindowError,
    LayerError,
    WindowStateError,
)
from kvtxn.errors import ConfigError

TEXT = torch.randint(1, 24, (1, 40), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def model(models):
    return models["mistral"]


@torch.no_grad()
def feed(model, cache, first, last):
    """Logits of ``TEXT[first:last]``."""
    return model(TEXT[:, first:last], past_key_values=cache).logits


def follows(model, cache):
    """Tell whether the cache continues ``TEXT`` as if it had never seen anything else."""
    length = cache.get_seq_length()
    expected = feed(model, None, 0, 40)[:, length:]
    return torch.allclose(feed(model, cache, length, 40), expected, atol=1e-4)


def held(cache):
    """Copies of all bytes."""
    refs = cache.manager.layers.values()
    return [c.clone() for ref in refs for c in (ref.key_cache, ref.value_cache)]


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("crops", [[-3], [-3, -2], [0, -5], [-2, 0, -1]])
def test_any_crop_within_reach(model, recording, crops):
    """One after another, with and without recording, past the window: the length is exact."""
    cache = TxnCache(model.config, max_tokens=64, max_drafts=8)
    if recording:
        cache.activate_past_recording()
    feed(model, cache, 0, 30)
    for crop in crops:
        cache.crop(crop)
    assert cache.get_seq_length() == 30 + sum(crops)
    assert follows(model, cache)


@pytest.mark.parametrize("tokens", ["2", None, 1.5, [2]])
def test_a_crop_is_an_int(model, tokens):
    """Half a token is not rounded to none."""
    cache = TxnCache(model.config, max_tokens=64)
    feed(model, cache, 0, 5)
    with pytest.raises(AcceptanceError, match="tokens_to_remove"):
        cache.crop(tokens)
    assert cache.get_seq_length() == 5


@pytest.mark.parametrize("config", [None, 5, "llama", {}])
def test_what_is_no_model_configuration(config):
    """The model itself is a likely one; it has its configuration."""
    with pytest.raises(ConfigError, match=r"model\.config"):
        TxnCache(config, max_tokens=8)


def test_a_positive_crop_is_a_length(model):
    """As stock took it up to 5.13; a length beyond the present one changes nothing."""
    cache = TxnCache(model.config, max_tokens=64)
    feed(model, cache, 0, 30)
    cache.crop(torch.tensor(28))
    cache.crop(99)
    assert cache.get_seq_length() == 28
    with pytest.raises(AcceptanceError, match="0 to 28"):
        cache.crop(-29)
    assert follows(model, cache)


def test_commit_and_abort(model):
    """Rows that wait for a crop are kept or dropped as one says."""
    cache = TxnCache(model.config, max_tokens=64)
    feed(model, cache, 0, 20)
    cache.activate_past_recording()
    before = held(cache)
    feed(model, cache, 20, 25)
    assert cache.get_seq_length() == 25
    cache.abort()
    assert cache.get_seq_length() == 20
    assert all(map(torch.equal, before, held(cache)))
    feed(model, cache, 20, 24)
    cache.commit()
    cache.commit()  # nothing is left to keep
    cache.abort()  # nor to drop
    assert cache.get_seq_length() == 24
    assert cache.snapshot()["kvtxn_windows_total_aborted"] == 1
    assert follows(model, cache)


class ModelFailed(Exception):
    pass


def failing(model, layer):
    """From now on the layer raises; undo with ``.remove()``."""

    def fail(*_):
        raise ModelFailed

    return model.model.layers[layer].register_forward_pre_hook(fail)


@pytest.mark.parametrize("policy", ["deferred", "undo"])
@pytest.mark.parametrize("recording", [False, True])
def test_a_failing_forward_changes_nothing(model, recording, policy):
    """Not a byte, not the length; the next forward follows at once."""
    cache = TxnCache(model.config, max_tokens=64, policy=policy)
    feed(model, cache, 0, 30)
    if recording:
        cache.activate_past_recording()
    before = held(cache)
    hook = failing(model, 1)
    for _ in range(2):
        with pytest.raises(ModelFailed):
            feed(model, cache, 30, 35)
    hook.remove()
    assert [layer.get_seq_length() for layer in cache.layers] == [30, 30]
    cache.abort()  # under "undo" the first layer's rows are in until then
    assert all(map(torch.equal, before, held(cache)))
    assert follows(model, cache)


def test_rows_that_a_failing_forward_has_overwritten_are_not_read(models):
    """Under "direct" rows are written at once, as in stock: the next forward refuses."""
    model = models["mistral"]
    cache = TxnCache(model.config, max_tokens=100, max_drafts=4, block_size=1, policy="direct")
    tokens = torch.arange(90).remainder(24).unsqueeze(0)
    model(tokens[:, :40], past_key_values=cache)
    broken = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens[:, 40:65], past_key_values=cache)
    broken.remove()
    with pytest.raises(CapacityError, match="overwritten"):
        model(tokens[:, 40:62], past_key_values=cache)
    cache.reset()
    found = model(tokens[:, :40], past_key_values=cache).logits
    assert torch.allclose(found, model(tokens[:, :40]).logits, atol=1e-4)


def test_a_first_forward_that_fails_needs_a_reset(model):
    """Otherwise it looks like a model that leaves layers out, which would be silent garbage."""
    cache = TxnCache(model.config, max_tokens=64)
    hook = failing(model, 1)
    with pytest.raises(ModelFailed):
        feed(model, cache, 0, 30)
    hook.remove()
    with pytest.raises(IncompleteWindowError, match=r"no rows of layers \[1\].*reset\(\)"):
        feed(model, cache, 0, 30)
    cache.reset()
    feed(model, cache, 0, 30)
    assert follows(model, cache)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_an_interrupted_generation_goes_on(models, kind):
    """A failure in the middle of assisted decoding; what was accepted before it stays."""
    model = models[kind]
    total = PROMPT.shape[1] + NEW_TOKENS
    stock, _ = run(model)
    cache = TxnCache(model.config, max_tokens=total, max_drafts=8)
    hooks = []
    count = iter(range(1000))
    hooks.append(
        model.register_forward_pre_hook(
            lambda *_: hooks.append(failing(model, 1)) if next(count) == 8 else None
        )
    )
    with pytest.raises(ModelFailed):
        run(model, past_key_values=cache, **drafting(model, "lookup"))
    for hook in hooks:
        hook.remove()
    length = cache.get_seq_length()
    assert PROMPT.shape[1] < length < total - 1
    done = stock.sequences[:, : length + 1]  # the last token has no row yet
    rest = model.generate(done, past_key_values=cache, max_length=total, do_sample=False)
    assert rest.tolist() == stock.sequences.tolist()


def test_a_full_cache_says_so(model):
    """In the middle of ``generate``; what fitted is kept, and is right."""
    cache = TxnCache(model.config, max_tokens=30, block_size=2, max_drafts=4)
    with pytest.raises(CapacityError, match=r"the cache is full: 34 tokens.*max_tokens"):
        model.generate(TEXT[:, :20], past_key_values=cache, max_new_tokens=40, do_sample=False)
    assert cache.get_seq_length() == 34
    with pytest.raises(CapacityError, match=r"update: the cache is full: 0 tokens"):
        feed(model, TxnCache(model.config, max_tokens=8, max_drafts=1), 0, 40)


def test_sliding_layers_take_little_memory(models):
    """A window and the drafts beside it, whatever ``max_tokens`` says."""
    cache = TxnCache(models["gemma3"].config, max_tokens=10_000, block_size=4, max_drafts=5)
    feed(models["gemma3"], cache, 0, 3)
    slots = {ref.group: ref.num_slots for ref in cache.manager.layers.values()}
    assert slots == {f"sliding_{WINDOW}": WINDOW - 1 + 5, "full": 10_008}
    assert cache.is_sliding == [True, False, True]
    assert cache.get_max_length() == 10_008
    assert cache.get_max_length(0) == WINDOW


def test_a_prompt_for_several_generations(model):
    """A deep copy has a cache, a manager and a fate of its own; pending rows are not copied."""
    cache = TxnCache(model.config, max_tokens=80)
    feed(model, cache, 0, 30)
    settings = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(TEXT, **settings).tolist()
    for _ in range(2):
        twin = copy.deepcopy(cache)
        assert model.generate(TEXT, past_key_values=twin, **settings).tolist() == expected
    assert cache.get_seq_length() == 30
    assert copy.deepcopy(TxnCache(model.config, max_tokens=8)).get_seq_length() == 0
    cache.activate_past_recording()
    feed(model, cache, 30, 32)
    with pytest.raises(WindowStateError, match=r"commit\(\), abort\(\) or crop\(\)"):
        copy.deepcopy(cache)


def test_reset_begins_anew(model):
    """Same memory, same manager, another text."""
    cache = TxnCache(model.config, max_tokens=80)
    first = model.generate(TEXT, past_key_values=cache, max_new_tokens=20, do_sample=False)
    manager = cache.manager
    cache.reset()
    assert cache.get_seq_length() == 0
    again = model.generate(TEXT, past_key_values=cache, max_new_tokens=20, do_sample=False)
    assert first.tolist() == again.tolist()
    assert cache.manager is manager


def test_autocast(model):
    """Rotated keys come in float32 there, values do not; stock keeps both."""
    total = PROMPT.shape[1] + NEW_TOKENS
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock, _ = run(model)
        ours, _ = run(model, past_key_values=TxnCache(model.config, max_tokens=total))
    assert torch.equal(ours.sequences, stock.sequences)


def test_a_compiled_model(model):
    """The compiler leaves the transaction alone and compiles what lies between."""
    compiled = torch.compile(model.forward, backend="eager", dynamic=True)
    cache = TxnCache(model.config, max_tokens=64)
    with torch.no_grad():
        compiled(TEXT[:, :20], past_key_values=cache)
        compiled(TEXT[:, 20:24], past_key_values=cache)
    assert follows(model, cache)


def test_refusals(model):
    """Sizes, models and calls that make no sense."""
    for size in (0, -1, True, 1.5, None):
        with pytest.raises(ConfigError, match="max_tokens"):
            TxnCache(model.config, max_tokens=size)
    linear = LlamaConfig(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"])
    with pytest.raises(LayerError, match=r"layer 1 cannot.*DynamicCache"):
        TxnCache(linear, max_tokens=8)
    with pytest.raises(LayerError, match="encoder"):
        TxnCache(T5Config(), max_tokens=8)
    with pytest.raises(LayerError, match=r"states beside the cache.*got recurrent_gemma"):
        TxnCache(RecurrentGemmaConfig(), max_tokens=8)
    with pytest.raises(LayerError, match=r"makes no cache of this configuration: .*got blt"):
        TxnCache(BltConfig(), max_tokens=8)
    cache = TxnCache(model.config, max_tokens=8)
    assert cache.snapshot() == {}
    for call, argument in (("repeat_interleave", 2), ("select_indices", torch.tensor([0]))):
        with pytest.raises(LayerError, match="another batch size"):
            getattr(cache, f"batch_{call}")(argument)


@pytest.mark.parametrize(
    ("setup", "says"),
    [
        ("sys.modules['transformers'] = None", "needs transformers 5.18 or newer: pip install"),
        (
            "from unittest.mock import MagicMock as M; t = M(__version__='5.10.4', Cache=object); "
            "sys.modules |= {'transformers': t, 'transformers.cache_utils': M()}",
            "5.18 or newer, found 5.10.4: pip install --upgrade",
        ),
    ],
)
def test_import_says_what_is_missing(tmp_path, setup, says):
    """No transformers, or one whose generate does not say that a crop follows."""
    code = f"import sys; {setup}; import kvtxn.integrations.transformers_cache"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert says in done.stderr
    assert "ImportError" in done.stderr


@pytest.mark.skipif(transformers.__version__ != "5.19.0", reason="what the guide says of 5.19.0")
def test_what_stock_caches_do_here(model):
    """The guide's comparison, so that it stays true."""
    past_window = DynamicCache(config=model.config)
    feed(model, past_window, 0, 30)
    with pytest.raises(RuntimeError, match="does not track past states"):
        past_window.crop(-3)

    twice = DynamicCache(config=model.config)
    twice.activate_past_recording()
    feed(model, twice, 0, 30)
    twice.crop(-3)
    twice.crop(-2)  # not refused, but a row of the window is gone
    with pytest.raises(RuntimeError, match="size of tensor"):
        feed(model, twice, 25, 27)

    broken = DynamicCache(config=model.config)
    feed(model, broken, 0, 30)
    hook = failing(model, 1)
    with pytest.raises(ModelFailed):
        feed(model, broken, 30, 35)
    hook.remove()
    assert [layer.get_seq_length() for layer in broken.layers] == [35, 30]
    assert not follows(model, broken)

    static = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(ValueError, match="not supported with Static cache"):
        model.generate(PROMPT, past_key_values=static, prompt_lookup_num_tokens=3, max_new_tokens=4)
