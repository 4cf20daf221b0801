"""Distilling an assistant drafter from a model: its own conversations in, a checkpoint out."""
