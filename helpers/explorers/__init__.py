"""Explorers: figures with controls. Each draws a picture of its starting values where widgets do not run."""

from helpers.explorers.bits import explore_format

__all__ = ["explore_format"]
