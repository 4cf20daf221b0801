"""Benchmarks anyone can repeat: arms take turns in one process, outputs are compared."""
