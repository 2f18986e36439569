"""Uses of PyTorch's private API: names that PyTorch may change without notice.

Nothing outside this room uses a private name of PyTorch. Each function has a test in
tests/unit/runtime/test_private_torch.py that fails when PyTorch changes what it relies on. `tracing` is the planner's,
and training does not import it.
"""
