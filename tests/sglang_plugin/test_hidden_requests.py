"""A request whose tokens are dropped takes nothing from the others of its step."""

from __future__ import annotations

from types import SimpleNamespace

from kvtxn.integrations.sglang_plugin.seam import retraction


def test_the_grammar_of_a_dropped_step_forgets_its_tokens():
    """With drafts SGLang lets it take them in before the result is."""
    forgotten = []
    grammar = SimpleNamespace(rollback=forgotten.append)
    one, other, chunk = (
        SimpleNamespace(name=name, grammar=grammar, inflight_middle_chunks=name == "chunk")
        for name in ("one", "other", "chunk")
    )
    verified = SimpleNamespace(grammar_advanced=True, grammar_retained_tokens=[[1, 2, 3], [4]])
    retraction.take_back_grammars([one, other], [one], verified)
    assert forgotten == [3]
    prompts = SimpleNamespace(grammar_advanced=True, grammar_retained_tokens=None)
    retraction.take_back_grammars([one, chunk], [one, chunk], prompts)
    assert forgotten == [3, 1]
    retraction.take_back_grammars([one], [one], SimpleNamespace(grammar_advanced=False))
    assert forgotten == [3, 1]


def test_logprobs_of_prompts_are_cut_out_for_each_request():
    """SGLang forgets those of a retracted one, and so gives the next request wrong ones."""
    before = {"is_retracted": False, "inflight_middle_chunks": 0, "return_logprob": True}
    prompts = SimpleNamespace(forward_mode=SimpleNamespace(name="MIXED"), return_logprob=True)
    assert retraction.has_input_logprobs(prompts)
    prompts.return_logprob = False
    assert not retraction.has_input_logprobs(prompts)
    held = SimpleNamespace(**before)
    with retraction.hidden([held], prompts=[held]):
        assert vars(held) == {**before, "inflight_middle_chunks": 1, "return_logprob": False}
        held.inflight_middle_chunks -= 1
    assert vars(held) == before
    with retraction.hidden([held]):
        assert vars(held) == {**before, "is_retracted": True}
    assert vars(held) == before


def test_a_request_that_waits_already_is_cut_out_like_a_prompt_that_goes_on():
    """Its chunk was under way as it was retracted; SGLang would forget its logprobs."""
    held = SimpleNamespace(is_retracted=True, inflight_middle_chunks=0, return_logprob=True)
    with retraction.hidden([held], prompts=[held]):
        assert not held.is_retracted
    assert held.is_retracted


def test_a_prompt_that_goes_on_beside_a_hidden_one_keeps_its_first_logprob():
    """SGLang streams it without a token, and counts the logprobs of one token as sent."""
    chunk, held = (
        SimpleNamespace(
            is_retracted=False, inflight_middle_chunks=goes_on, return_logprob=True,
            send_output_token_logprobs_offset=0,
        )
        for goes_on in (1, 0)
    )  # fmt: skip
    with retraction.hidden([held], prompts=[chunk, held]):
        chunk.inflight_middle_chunks -= 1
        chunk.send_output_token_logprobs_offset = 1
    assert vars(chunk) == {**vars(held), "inflight_middle_chunks": 0}
