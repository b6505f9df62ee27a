"""Hooks of the whole suite. Tests import nothing from here."""

pytest_plugins = ["pytester"]
