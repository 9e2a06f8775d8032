"""Windows over a captured forward, which is replayed over fixed tensors step after step.

``rows`` holds the tensors that a forward makes while it is captured; ``places`` makes or checks the
fixed tensors, which ``shared`` has; ``launches`` is an executor's side; ``window`` and ``windows``
are the transactions.
"""
