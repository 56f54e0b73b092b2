"""RankLens for DeepSpeed: the ``"ranklens"`` block of a DeepSpeed config.

Importing this package obeys the block; ``python -m ranklens_deepspeed PROGRAM ARGS`` obeys it without a
changed line. See docs/deepspeed.md.
"""

from ranklens_deepspeed.activate import activate, on_import

__all__ = ["activate"]

on_import()
