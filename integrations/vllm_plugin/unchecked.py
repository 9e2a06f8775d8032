"""Windows on a release of vLLM that was not checked: the user's setting ``unchecked``.

Every hook point has to be there still, and after the warm-up the engine has to pass a self-test;
else it runs stock, or, with ``"required": true``, its start stops.
"""

from __future__ import annotations

from ...log import get_logger
from . import self_test
from .attach import stay_out, unhook_runner
from .internals import Foreign
from .policy.engine import EngineFacts
from .policy.moved import compare
from .policy.release_rules import on_trial

log = get_logger()


def hook_gone(facts: EngineFacts) -> str | None:
    """Say which hook point a release that was not checked lacks; None without any.

    Args:
        facts: the facts of an engine that is on trial, or of any other, which lacks none.
    """
    if not on_trial(facts):
        return None
    gone = compare(facts.version, facts.device).gone
    return gone and f"vLLM {facts.version} was not checked, and lacks {gone}"


def decide_by_test(runner: Foreign, version: str) -> None:
    """Test a hooked runner after its warm-up; unhook it if the test fails.

    Raises:
        RequiredError: the test failed, and the user wants no engine without kvtxn.
    """
    steps = getattr(runner, "kvtxn", None)
    if steps is None or runner.kvtxn_announce is None:
        return  # kvtxn stays out already, or the test was passed before
    rank, required, announce = runner.kvtxn_rank, runner.kvtxn_required, runner.kvtxn_announce
    why = self_test.run(runner)
    if why is not None:
        unhook_runner(runner)
        stay_out(f"vLLM {version} was not checked, and {why}", rank, required=required)
        return
    runner.kvtxn_announce = None
    steps.manager.metrics.restart()
    log.info("kvtxn.self_test_passed", rank=rank, vllm=version, steps=self_test.ROUNDS)
    announce()
