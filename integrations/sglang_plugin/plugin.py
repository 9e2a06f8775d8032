"""The entry point: the ledger beside an SGLang server whose user asks for it.

    KVTXN_SGLANG='{"audit": "ledger"}' python -m sglang.launch_server ...

SGLang calls ``register`` in each of its processes, the user's own first. Without the variable it
returns at once, and nothing of kvtxn runs in the server.
"""

from __future__ import annotations

import os
from typing import Final

#: The environment variable with the settings, a JSON object.
VARIABLE: Final = "KVTXN_SGLANG"


def register() -> None:
    """Put hooks into SGLang's scheduler and model runner, if the environment asks for an audit.

    Raises:
        SystemExit: a setting is not valid, or the user requires an audit that this release of
            SGLang cannot have. The message names the setting; SGLang would only log an error.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return
    from .starting import start

    start(text)
