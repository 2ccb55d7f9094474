"""Capture what happens inside PyTorch models, for whole datasets."""
