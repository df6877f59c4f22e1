"""Gymnasium wrappers that keep a rolling context of transitions."""
