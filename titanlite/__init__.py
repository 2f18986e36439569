"""titanlite: a composable PyTorch pretraining framework. Nothing heavy is imported here."""

__version__ = "0.1.0"
