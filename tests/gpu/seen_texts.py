"""What ``SEEN.md`` says above its tables."""

from __future__ import annotations

from typing import Final

HEAD: Final = """# States, the audit, KV connectors, pipeline stages, servers and SGLang on a GPU

What real engines showed on {machine}, drawn by `python tests/gpu/gpu_seen.py`. Models are small and
have random weights. Each engine has a process of its own.
"""
STATES: Final = """## Recurrent states

`python tests/gpu/try_states.py`: `recurrent="exact"` beside stock vLLM over the same requests,
drafts accepted by lot. *States* are compared request by request after every step, all layers, by
the digest of their bytes; *blocks* is how many state blocks a request has. *Requests at once* is
what vLLM says fits into the same memory. *After a fault*: launches of commits that were made to
fail were repeated, and the tokens are stock's. In engines named *cached* the prefix cache keeps
states: those at the ends of blocks are compared, too, and *from the cache* counts the prompt tokens
that were found there. In those named *left* every third request is aborted in the middle; *eagle*
has a drafter that reads hidden states, and a layer of *falcon* has a state beside its attention.
"""
FAST: Final = """## Recurrent states by kvtxn's own kernels

`python tests/gpu/try_states.py`: `recurrent="fast"` beside stock, gated delta nets and Mamba-2;
in rows named *vLLM's* stock by one of vLLM's two kernels beside stock by the other. Tokens may
part at near-ties: *gap* is the most by which stock's best logit leads that of the token which the
other engine took, *noise* the most that a logit differs by after the same tokens, in steps of
bfloat16, of at most {near} and {noise}. After each commit all states are compared with a
recurrence in float64 over the kept rows: *off* counts those whose difference is more than
{tolerance} of the state's largest number, and *worst* is the largest difference; *ends* counts
those among them that commits left at the ends of blocks, for the prefix cache. *Preempted*
requests are computed again; stock has blocks for all there, and drafts are accepted where the
model says the same. *From the cache* counts prompt tokens whose states came from there. *Strays*
counts states that a forward changed, *elsewhere* blocks of other requests that a step changed; -
was not watched. *After a fault*: launches of commits that were made to fail were repeated, and
the engine gave the same tokens again. *Wrong counts*: commits took in one row more or less than
was accepted; so many states were off, of so many.
"""
AUDIT: Final = """## The audit

`python tests/gpu/gpu_audit.py`: each engine runs scenarios without the audit and with it. *Texts*
counts requests that say the same both times where nothing is drawn by lot and nothing depends on
time; *wrong* is how many violations were reported though nothing was planted. *Faults* are planted
one after the other: found means that the report names the request, the position and the slot.
*Rows brought* came back through a KV connector. *Contained* counts faults after which every text,
those of the requests that were computed again included, is the one without the fault. With *poison*
what is dead was filled with NaN, so that a kernel that reads it would show it; a write into a dead
row, which nobody reads, was reported nowhere. In *aligned* engines the prefix cache keeps states;
in those named *held* kvtxn's windows hold them. *Failed* counts forwards that were made to fail,
before or after the GPU computed them, in an engine that went on: whoever read their rows was told.
"""
CONNECTORS: Final = """## KV connectors

`pytest tests/gpu -k connectors`: requests that come back through a connector (the prefix cache was
emptied, or they were preempted, or come to a second engine). An oracle compares each byte that
leaves with what is durable. *Not durable* counts, after every step, the rows in the cache that no
accepted token left: an engine with windows has some only of steps that were *bypassed*, and stock
of each rejected draft.
"""
