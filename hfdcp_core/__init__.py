"""hfdcp: distributed PyTorch checkpoints become verified Hugging Face repositories."""

__version__ = "0.1.0"
