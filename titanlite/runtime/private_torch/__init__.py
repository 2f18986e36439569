"""Uses of PyTorch's private API: names that PyTorch may change without notice.

Nothing outside this room uses a private name of PyTorch. Where PyTorch may change what a function relies on and a run
would not fail at once, tests/unit/test_private_torch.py does. `tracing` is the planner's, and training does not import
it.
"""
