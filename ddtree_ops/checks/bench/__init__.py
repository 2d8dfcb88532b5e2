"""Measuring a serving engine: which points, how they are loaded, what comes of it."""
