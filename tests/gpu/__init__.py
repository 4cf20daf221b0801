"""Tests that need an NVIDIA GPU: `make gpu-test`. Elsewhere they are skipped and say why."""
