"""The only package that touches vLLM: its modules, and the attributes of its objects.

Each file knows one part of vLLM. What is read of vLLM's objects is written down as protocols, in
``engine_protocols`` and ``runner_protocols``. Code outside of this package hands vLLM's objects on
and never looks into them: it annotates them by these protocols, or as ``Foreign`` where they can be
of several classes, and asks a function of this package. ``tests/test_foreign_access.py`` holds that
rule. The files were checked against the releases in ``policy.supported.RELEASES``; a method that
looks different is noticed when a runner or a layer is hooked (``hooks.check_methods``).
"""

from typing import Any, TypeAlias

#: An object of vLLM's. Outside of this package only attributes that kvtxn put there are touched;
#: their names start with "kvtxn".
Foreign: TypeAlias = Any

__all__ = ["Foreign"]
