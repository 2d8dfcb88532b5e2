"""Typer commands: parse, call, render. No logic."""
