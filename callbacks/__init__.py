"""Stable-Baselines3 callbacks for the in-context critic."""
